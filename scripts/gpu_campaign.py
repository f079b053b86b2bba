"""All that is to be found out on a machine with one NVIDIA GPU, in steps that each end within nine minutes.

    python scripts/gpu_campaign.py                 # the steps that are not done yet, until the time is up
    python scripts/gpu_campaign.py --minutes 9     # of them as many as fit into so many minutes
    python scripts/gpu_campaign.py --compile-first 14    # of what is timed, so many at a time, before anything is
    python scripts/gpu_campaign.py --status        # what is done
    python scripts/gpu_campaign.py --toy           # a test of itself: tiny sizes on the CPU

Needs torch 2.11 or newer and triton 3.6 or newer, and no network. A step is a command; what it prints is kept in
`--output`, one file a step, and a step that is there is not run again. docs/gpu/<device>.md is written anew after each.
A step that fails is kept as well, with the end of what it said, and the others go on; one whose time was up is run
again at the next call (training goes on where it was).
"""

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
PER_STEP = 540
"""Seconds that a step may take."""

LINEAR = ("linear", "inline", "agent", "pola", "focused", "soft")
NEWER = ("mlla", "mala", "rala", "nala", "polapp", "ttt", "circulant", "mhla")
FAMILIES = {"": LINEAR, "-newer": NEWER}
"""Mechanisms by what stands behind a step's name: a step has no time for all of them."""

LENGTHS = {1: (1024, 4096, 16384, 65536), 64: (196, 1024, 4096)}
"""Numbers of tokens by those of images."""

HEADS = ((12, 32), (6, 64), (3, 128))
"""Heads of a width of 384, and channels of each."""

SHORT = f"{PER_STEP / 60 - 0.5:g}"
"""Minutes for what ends by itself."""


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


# most of their time is that of compilers
SIDE_BY_SIDE = ("-n", str(min(15, os.cpu_count() or 1))) if importlib.util.find_spec("xdist") else ()


# pytest-benchmark warns beside xdist, and warnings are errors
PYTEST = ("pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark")


def correctness_steps() -> list[Step]:
    """Whether the kernels compute what they are to: first of all."""
    titles = {
        "test_triton_operators": "Operators against their definitions in float64",
        "test_triton": "Kernels against explicit weights in float64, and whole mechanisms",
        "test_cuda_networks": "Every mechanism in every host against the CPU, in half precision, as CUDA graphs",
        "test_tile_table": "The table of tiles",
        "test_needs": "Registers and shared memory of kernels that were compiled for other GPUs",
    }
    some = {"test_triton": "relu and float32 and 5", "test_triton_operators": "pool or (newton and 5)"}
    return [
        Step(
            f"correctness-{name.removeprefix('test_')}",
            f"{title} (tests/gpu/{name}.py)",
            (*PYTEST, *SIDE_BY_SIDE, f"tests/gpu/{name}.py"),
            (*PYTEST, f"tests/gpu/{name}.py", "-k", some[name]) if name in some else (),
        )
        for name, title in titles.items()
    ]


def tuning_steps() -> list[Step]:
    """Tiles chosen by time, for the shapes that the steps behind these time; what each gained is printed."""

    def tune(name: str, title: str, *words: object) -> Step:
        toy = ("subquad", "tune", "--device", "cpu", "--dtype", "fp32", "--minutes", "0.2", "--backward")
        toy += ("--attention", "linear", "--tokens", "4", "--dim", "16", "--num-heads", "1")
        command = ("subquad", "tune", "--dtype", "bf16", "--minutes", SHORT, "--backward", *map(str, words))
        return Step(f"tune-{name}", f"Tiles chosen by time: {title}", command, toy)

    steps = []
    for behind, mechanisms in FAMILIES.items():
        for batch, tokens in LENGTHS.items():
            words = ("--attention", *mechanisms, "--batch-size", batch, "--tokens", *tokens)
            steps.append(tune(f"b{batch}{behind}", f"layers of {', '.join(mechanisms)}, batch {batch}", *words))
    for heads, width in HEADS:
        words = ("--attention", *LINEAR, "--batch-size", 8, "--tokens", 4096, "--dim", 384, "--num-heads", heads)
        steps.append(tune(f"heads-{width}", f"heads of {width}", *words))
    for host, models in networks().items():
        words = ("--model", *models, "--img-size", 224, 448, "--batch-size", 8)
        steps.append(tune(host, f"networks of {host}, batch 8", *words))
    return steps


def tile_steps() -> list[Step]:
    """What the library's own tiles are chosen from."""
    words = ("scripts/gpu_tiles.py", "--minutes", SHORT, "--output", "runs/gpu_tiles.json")
    return [Step("tiles", "Every tile of a grid, for each kernel", words)]


def layer_steps() -> list[Step]:
    """Layers and operations, forward and with backward, against flash attention and a copy.

    As CUDA graphs, which is what the device does, and layers also as they are, where Python may be what is waited for.
    """
    steps = []
    kinds = {
        "operations": ("operations, as CUDA graphs", ("--ops", "--graphs")),
        "layers": ("layers, as CUDA graphs", ("--graphs",)),
        "eager": ("layers as they are", ()),
    }
    for (what, (said, flags)), (batch, tokens), backward, (behind, mechanisms) in itertools.product(
        kinds.items(), LENGTHS.items(), (False, True), FAMILIES.items()
    ):
        direction = "forward and backward" if backward else "forward"
        name = f"{what}-b{batch}{'-backward' if backward else ''}{behind}"
        words = ("--dtype", "bf16", "--batch-size", batch, "--tokens", *tokens, *flags)
        more = ("--backward",) if backward else ()
        title = f"{said.capitalize()}, {direction}, bf16, batch {batch}, width 192, heads of 64"
        toy = tuple(flag for flag in (*flags, *more) if flag != "--graphs")
        steps.append(Step(name, title, bench("--attention", *mechanisms, *words, *more), (*TOY_LAYER, *toy)))
    for heads, width in HEADS:
        words = ("--dim", 384, "--num-heads", heads, "--dtype", "bf16", "--batch-size", 8, "--tokens", 4096, "--ops")
        words += ("--graphs",)
        title = f"Operations, heads of {width}, 4,096 tokens, batch 8, bf16, as CUDA graphs"
        steps.append(Step(f"heads-{width}", title, bench("--attention", *LINEAR, *words), TOY_LAYER))
    for behind, mechanisms in FAMILIES.items():
        words = ("--dtype", "bf16", "--batch-size", 8, "--tokens", 1024, 4096, "--compile")
        title = "Layers made by torch.compile, batch 8, bf16"
        steps.append(Step(f"compiled{behind}", title, bench("--attention", *mechanisms, *words), TOY_LAYER))
    return steps


def networks() -> dict[str, tuple[str, ...]]:
    """Whole networks by what a step is called."""
    papers = {host: tuple(f"{name}_{host}_tiny" for name in ("agent", "inline", "pola")) for host in HOSTS}
    newer = tuple(f"{name}_deit_tiny" for name in ("mlla", "mala", "rala", "nala", "polapp", "ttt", "mhla"))
    own = ("soft_tiny", "mlla_tiny", "mala_tiny", "rala_tiny", "nala_tiny", "polapp_b1", "ttt_hvit3_tiny")
    return {**papers, "deit-newer": newer, "own-hosts": own}


HOSTS = ("deit", "pvt", "swin", "cswin")


def network_steps() -> list[Step]:
    """Whole networks against the same hosts with softmax: as they are, trained, as graphs, and by torch.compile."""
    steps = []
    kinds = {
        "": ("inference, as CUDA graphs", ("--graphs",)),
        "-backward": ("a training step, as CUDA graphs", ("--graphs", "--backward")),
        "-eager": ("inference as it is", ()),
        "-eager-backward": ("a training step as it is", ("--backward",)),
        "-compiled": ("inference, torch.compile with CUDA graphs", ("--compile",)),
    }
    for host, models in networks().items():
        for behind, (kind, flags) in kinds.items():
            # compiling one takes half a minute, and the references are compiled as well
            sizes = (224, 448) if flags == ("--compile",) else (224, 448, 1024)
            words = ("--model", *models, "--img-size", *sizes, "--dtype", "bf16", "--batch-size", 8)
            toy = toy_bench("--model", "linear_deit_tiny", "--img-size", 32)
            title = f"Networks of {host}, {kind}, batch 8, bf16"
            steps.append(Step(f"networks-{host}{behind}", title, bench(*words, *flags), toy))
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
    """All steps: whether it is right, how fast it is as it comes, what tiles chosen by time gain, and training."""
    measured = [*correctness_steps(), *layer_steps(), *network_steps(), *unet_steps()]
    every = [*measured, *tile_steps(), *tuning_steps(), *training_steps(data)]
    return sorted(every, key=lambda step: next(i for i, one in enumerate(ORDER) if re.match(one, step.name)))


ORDER = (
    r"correctness-(?!needs)",
    "operations-b64",
    r"networks-\w+$|networks-(deit-newer|own-hosts)$",
    r"networks-[\w-]+(?<!eager)-backward$",
    "operations",
    "unet",
    "tiles",
    "layers|heads",
    "networks|eager|compiled",
    "tune",
    "correctness",
    "evidence",
)
"""Names of steps, those first that are worth most where a machine is lent for minutes."""


def main() -> None:
    """Run what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=None, help="folder of what is done; default runs/gpu_campaign")
    parser.add_argument("--data-dir", default="cifar10.tar.xz", help="folder or archive of CIFAR-10")
    parser.add_argument("--minutes", type=float, default=None, help="begin no step that may not end within so many")
    parser.add_argument("--step-minutes", type=float, default=PER_STEP / 60, help="most that a step may take")
    parser.add_argument("--only", nargs="+", default=None, metavar="NAME", help="these steps, in this order")
    parser.add_argument("--again", action="store_true", help="run steps again that failed")
    parser.add_argument(
        "--compile-first",
        type=int,
        default=0,
        metavar="N",
        help="run what is timed once, N at a time, so that compilers take little of the time",
    )
    parser.add_argument("--toy", action="store_true", help="tiny sizes on the CPU, in Triton's interpreter")
    parser.add_argument("--status", action="store_true", help="only say what is done")
    arguments = parser.parse_args()
    if not arguments.toy and not arguments.status and not torch.cuda.is_available():
        sys.exit("gpu_campaign: there is no CUDA device; --toy tries the steps on the CPU")
    folder = arguments.output or ROOT / "runs" / ("gpu_campaign_toy" if arguments.toy else "gpu_campaign")
    folder.mkdir(parents=True, exist_ok=True)
    every = [step for step in steps(arguments.data_dir) if step.toy or not arguments.toy]
    wanted = chosen(every, arguments.only)
    longest = 60 * arguments.step_minutes
    end = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    if arguments.compile_first and not arguments.status:
        missing = [step for step in wanted if (read(folder, step) or {"status": -1})["status"]]
        # of little time half is for what is timed
        limit = longest if arguments.minutes is None else min(longest, 30 * arguments.minutes)
        compile_first(missing, arguments.compile_first, limit, arguments.toy)
    for step in wanted if not arguments.status else ():
        done = read(folder, step)
        if done is not None and (done["status"] == 0 or (done["status"] > 0 and not arguments.again)):
            continue
        left = longest if end is None else min(longest, end - time.monotonic())
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


def chosen(every: Sequence[Step], names: Sequence[str] | None) -> list[Step]:
    """The steps of these names, as they stand there, or all."""
    if names is None:
        return list(every)
    known = {step.name: step for step in every}
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"gpu_campaign: there is no step {unknown[0]}: --status names them")
    return [known[name] for name in names]


def run(step: Step, seconds: float, toy: bool) -> dict:
    """Run a command, at most for so long; what it printed, and how it ended."""
    words = step.toy if toy else step.command
    variables = environment(toy) | dict(step.environment)
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


def compile_first(wanted: Sequence[Step], at_once: int, seconds: float, toy: bool) -> None:
    """Run every bench once, some at a time and so long at most: kernels are in Triton's cache then.

    Nobody looks at these times.
    """
    end = time.monotonic() + seconds
    benches = [words for step in wanted if "bench" in (words := step.toy if toy else step.command)]

    def once(words: Sequence[str]) -> None:
        command = [sys.executable, *called(words), "--repeats", "1"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            left = max(0.0, end - time.monotonic())
            subprocess.run(command, cwd=ROOT, env=environment(toy), timeout=left, capture_output=True, check=False)

    print(f"{len(benches)} benches once, {at_once} at a time …", flush=True)
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(once, benches))


def environment(toy: bool) -> dict[str, str]:
    """Variables of a step."""
    variables = dict(os.environ) | {"PYTHONUNBUFFERED": "1"} | ({"TRITON_INTERPRET": "1"} if toy else {})
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), variables.get("PYTHONPATH")]))
    return variables


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
