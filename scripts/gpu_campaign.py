"""All that is to be found out on a machine with one NVIDIA GPU, in steps that each end within nine minutes.

    python scripts/gpu_campaign.py                 # the steps that are not done yet, until the time is up
    python scripts/gpu_campaign.py --minutes 9     # of them as many as fit into so many minutes
    python scripts/gpu_campaign.py --status        # what is done
    python scripts/gpu_campaign.py --toy           # a test of itself: tiny sizes on the CPU

Needs torch 2.11 or newer and triton 3.6 or newer, and no network. A step is a command; what it prints is kept in
`--output`, one file a step, and a step that is there is not run again. docs/gpu/<device>.md is written anew after each.
A step that fails is kept as well, with the end of what it said, and the others go on; one whose time was up is run
again at the next call (training goes on where it was).
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
PER_STEP = 540
"""Seconds that a step may take."""

LINEAR = ("linear", "inline", "agent", "pola", "focused", "soft")


@dataclass(frozen=True)
class Step:
    """A command and what it is for.

    Attributes:
        name: of the file that holds what it printed.
        title: on the page.
        command: words behind `python -m`, or behind `python` where the first is a script.
        toy: the words that stand in for it on a machine without a GPU.
        environment: variables that are set for it.
    """

    name: str
    title: str
    command: tuple[str, ...]
    toy: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


def bench(*words: object) -> tuple[str, ...]:
    """A command of `subquad bench` on the GPU."""
    return ("subquad", "bench", "--device", "cuda", *map(str, words))


def toy_bench(*words: object) -> tuple[str, ...]:
    """The like on the CPU."""
    return ("subquad", "bench", "--repeats", "1", *map(str, words))


TOY_LAYER = toy_bench("--attention", "linear", "--tokens", 16, "--dim", 16, "--num-heads", 1)


def layer_steps() -> list[Step]:
    """Layers and operations, forward and with backward, against flash attention and a copy."""
    steps = []
    for batch, tokens in ((1, (1024, 4096, 16384, 65536)), (64, (196, 1024, 4096))):
        for backward in (False, True):
            for what, flags in (("operations", ("--ops",)), ("layers", ())):
                direction = "forward and backward" if backward else "forward"
                name = f"{what}-b{batch}{'-backward' if backward else ''}"
                words = ("--dtype", "bf16", "--batch-size", batch, "--tokens", *tokens, *flags)
                more = ("--backward",) if backward else ()
                title = f"{what.capitalize()}, {direction}, bf16, batch {batch}, width 192, heads of 64"
                steps.append(
                    Step(name, title, bench("--attention", *LINEAR, *words, *more), (*TOY_LAYER, *flags, *more))
                )
    for heads, width in ((12, 32), (6, 64), (3, 128)):
        words = ("--dim", 384, "--num-heads", heads, "--dtype", "bf16", "--batch-size", 8, "--tokens", 4096, "--ops")
        title = f"Operations, heads of {width}, 4,096 tokens, batch 8, bf16"
        steps.append(Step(f"heads-{width}", title, bench("--attention", *LINEAR, *words), TOY_LAYER))
    compiled = bench("--attention", *LINEAR, "--dtype", "bf16", "--batch-size", 8, "--tokens", 1024, 4096, "--compile")
    steps.append(Step("compiled", "Layers made by torch.compile, batch 8, bf16", compiled, TOY_LAYER))
    return steps


def network_steps() -> list[Step]:
    """Whole networks against the same hosts with softmax."""
    steps = []
    for host in ("deit", "pvt", "swin"):
        models = [f"{name}_{host}_tiny" for name in ("agent", "inline", "pola")]
        words = ("--model", *models, "--img-size", 224, 448, 1024, "--dtype", "bf16", "--batch-size", 8)
        for backward in (False, True):
            name = f"networks-{host}{'-backward' if backward else ''}"
            title = f"{host.upper()} networks, {'a training step' if backward else 'inference'}, batch 8, bf16"
            toy = toy_bench("--model", "linear_deit_tiny", "--img-size", 32)
            steps.append(Step(name, title, bench(*words, *(("--backward",) if backward else ())), toy))
    return steps


def unet_steps() -> list[Step]:
    """A step of Stable Diffusion's U-Nets, 512² to 2,048²."""
    return [
        Step(
            f"unet-{name}",
            f"A step of {name}'s U-Net, images of {', '.join(map(str, px))} px, bf16",
            bench("--unet", name, "--img-size", *px, "--dtype", "bf16"),
        )
        for name, px in (("sd15", (512, 768, 1024, 2048)), ("sdxl", (1024, 2048)))
    ]


def training_steps(data: str) -> list[Step]:
    """The trained evidence, which goes on where it was: as many steps as one machine may have time for."""
    return [
        Step(
            f"evidence-{number}",
            "Trained networks: docs/evidence.md",
            ("scripts/evidence.py", "--data", str(Path(data).parent), "--minutes", f"{PER_STEP / 60 - 0.5}"),
        )
        for number in range(1, 4)
    ]


def steps(data: str) -> list[Step]:
    """All steps, those first that the others rest on."""
    correct = Step(
        "correctness",
        "Kernels against float64 and their formulas (tests/gpu)",
        ("pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"),
        ("pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", "-k", "linear", "-x", "--maxfail=1"),
    )
    return [correct, *layer_steps(), *network_steps(), *unet_steps(), *training_steps(data)]


def main() -> None:
    """Run what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=None, help="folder of what is done; default runs/gpu_campaign")
    parser.add_argument("--data-dir", default="cifar10.tar.xz", help="folder or archive of CIFAR-10")
    parser.add_argument("--minutes", type=float, default=None, help="begin no step that may not end within so many")
    parser.add_argument("--only", nargs="+", default=None, metavar="NAME", help="these steps")
    parser.add_argument("--again", action="store_true", help="run steps again that failed")
    parser.add_argument("--toy", action="store_true", help="tiny sizes on the CPU, in Triton's interpreter")
    parser.add_argument("--status", action="store_true", help="only say what is done")
    arguments = parser.parse_args()
    if not arguments.toy and not arguments.status and not torch.cuda.is_available():
        sys.exit("gpu_campaign: there is no CUDA device; --toy tries the steps on the CPU")
    folder = arguments.output or ROOT / "runs" / ("gpu_campaign_toy" if arguments.toy else "gpu_campaign")
    folder.mkdir(parents=True, exist_ok=True)
    every = [step for step in steps(arguments.data_dir) if step.toy or not arguments.toy]
    wanted = [step for step in every if arguments.only is None or step.name in arguments.only]
    end = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    for step in wanted if not arguments.status else ():
        done = read(folder, step)
        if done is not None and (done["status"] == 0 or (done["status"] > 0 and not arguments.again)):
            continue
        left = PER_STEP if end is None else min(PER_STEP, end - time.monotonic())
        if left < 30:
            break
        print(f"{step.name} …", flush=True)
        done = run(step, left, arguments.toy)
        (folder / f"{step.name}.json").write_text(json.dumps(done, indent=1))
        print(f"{step.name}: {word(done['status'])} after {done['seconds']:.0f} s", flush=True)
        write_page(folder, every, toy=arguments.toy)
    for step in wanted:
        done = read(folder, step)
        print(f"{step.name:24} {'not run' if done is None else word(done['status'])}")


def run(step: Step, seconds: float, toy: bool) -> dict:
    """Run a command, at most for so long; what it printed, and how it ended."""
    words = step.toy if toy else step.command
    variables = dict(os.environ) | {"PYTHONUNBUFFERED": "1"} | dict(step.environment)
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), variables.get("PYTHONPATH")]))
    if toy:
        variables["TRITON_INTERPRET"] = "1"
    began = time.monotonic()
    try:
        ended = subprocess.run(
            [sys.executable, *called(words)],
            cwd=ROOT,
            env=variables,
            timeout=seconds,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        status, said = ended.returncode, ended.stdout
    except subprocess.TimeoutExpired as error:
        status, said = -1, (error.stdout or b"").decode(errors="replace")
    return {
        "command": " ".join(["python", *called(words)]),
        "status": status,
        "seconds": time.monotonic() - began,
        "said": bare(said)[-20_000:],
        "date": date.today().isoformat(),
        "versions": versions(),
    }


def called(words: Sequence[str]) -> list[str]:
    """What stands behind `python`."""
    return [*words] if words[0].endswith(".py") else ["-m", *words]


def bare(text: str) -> str:
    """Text without progress bars and colours."""
    lines = [line.rsplit("\r", 1)[-1] for line in re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).splitlines()]
    return "\n".join(line.rstrip() for line in lines if not re.search(r"\d+%\|", line))


def word(status: int) -> str:
    """How a step ended."""
    return {0: "done", -1: "time was up"}.get(status, f"failed with status {status}")


def read(folder: Path, step: Step) -> dict | None:
    """What is kept of a step."""
    file = folder / f"{step.name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def versions() -> str:
    """What it was run with."""
    from importlib.metadata import PackageNotFoundError, version

    def of(name: str) -> str:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return f"no {name}"

    return f"Python {platform.python_version()}, {of('torch')}, {of('triton')}, {of('timm')}"


def device() -> str:
    """The GPU's name, or the CPU's kind."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"no GPU ({platform.machine()})"


def write_page(folder: Path, wanted: Sequence[Step], *, toy: bool) -> Path:
    """docs/gpu/<device>.md, or beside the toy's results."""
    slug = re.sub(r"[^a-z0-9]+", "-", device().lower()).strip("-")
    page = folder / "page.md" if toy else ROOT / "docs" / "gpu" / f"{slug}.md"
    lines = [
        f"# {device()}",
        "",
        "Written by `python scripts/gpu_campaign.py`. Steps that were not run are not here.",
        "",
    ]
    for step in wanted:
        done = read(folder, step)
        if done is None:
            continue
        about = f"{done['date']}, {done['versions']}, {done['seconds']:.0f} s, {word(done['status'])}."
        shown = done["said"] if done["status"] == 0 else done["said"][-3000:]
        lines += [f"## {step.title}", "", f"    {done['command']}", "", about, "", "```text", shown.strip(), "```", ""]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(lines))
    return page


if __name__ == "__main__":
    main()
