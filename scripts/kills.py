"""Kill runs at random moments, go on with them, and compare what they end with, to the bit, with unbroken ones.

    python scripts/kills.py --folder runs/kills --count 100

Every task is tiny. A process that has imported everything forks one for each attempt, so that a kill costs a second.
Kills that were made are kept in kills.jsonl of the folder: the same command goes on with them.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"
sys.path += [str(Path(__file__).parents[1] / "tests" / "dense")]

import accelerate  # noqa: F401
import numpy as np
import torch
import torch.utils.tensorboard
import worlds
from PIL import Image
from safetensors.torch import load_file

from subquad.cli import main
from subquad.models import create_model, save_weights
from subquad.tasks.detection import DetectRecipe
from subquad.tasks.segmentation import SegmentRecipe

TIMES = {"epoch_seconds", "images_per_second", "peak_memory_mb", "train_seconds", "seconds", "created", "command"}
SIGNALS = [signal.SIGKILL] * 4 + [signal.SIGTERM, signal.SIGINT]
PATIENCE = 60.0
"""Seconds after which a process that should end is said to be stuck."""

LAUNCHER = 20.0
"""Seconds after which a process that waits for one that was killed is ended, as torchrun does at once."""

MOST = 4
"""Kills of a run, which then goes on to its end."""


@dataclass(frozen=True)
class Job:
    """A command that writes to a folder.

    Attributes:
        command: its arguments, for the folder.
        resume: those that go on with what a kill left there.
        processes: how many of them make one run.
    """

    name: str
    command: Callable[[Path], list[str]]
    resume: Callable[[Path], list[str]]
    processes: int = 1


def jobs(home: Path) -> list[Job]:
    """All of them, with their data in `home`."""
    scenes, objects = home / "scenes", home / "objects"
    if not scenes.exists():
        worlds.scenes(scenes, counts=(4, 2))
        worlds.objects(objects, counts=(4, 2))
        draw_classes(home / "pictures")
    weights, network = home / "weights.safetensors", home / "network"
    if not weights.exists():
        save_weights(create_model("agent_deit_tiny", num_classes=10), weights)
    small = ["--epochs", "2", "--warmup-epochs", "0", "--lr", "1e-3"]
    micro = ["--config", "digits", "--data", str(home / "pictures"), "--img-size", "8", "--patch-size", "4"]
    micro += ["--depth", "1", "--embed-dim", "16", "--num-heads", "2", "--batch-size", "8", *small]
    pyramid = {"embed_dims": [8, 16, 24, 32], "num_heads": [1, 2, 2, 4], "depths": [1, 1, 1, 1]}
    for kind in (SegmentRecipe, DetectRecipe):
        recipe = kind(model="pvt_tiny", attention="inline", settings=pyramid, batch_size=2)
        recipe = recipe.replace(head="retinanet") if kind is DetectRecipe else recipe
        (home / f"{kind.task}.yaml").write_text(recipe.to_yaml())
    arena = ["--task", "listops", "--data-settings", "count=200,shortest=5,longest=24", "--max-length", "24"]
    arena += ["--epochs", "3", "--updates-per-epoch", "2", "--warmup-updates", "1", "--batch-size", "8"]

    def dense(task: str, data: Path) -> list[str]:
        return ["--config", str(home / f"{task}.yaml"), "--data", str(data), *small]

    def trained(name: str, command: list[str], flags: list[str], processes: int = 1) -> Job:
        def begin(folder: Path) -> list[str]:
            return [*command, *flags, "--output", str(folder.parent), "--experiment", folder.name]

        def go_on(folder: Path) -> list[str]:
            return [*command, "--resume", str(folder)] if (folder / "recipe.yaml").is_file() else begin(folder)

        return Job(name, begin, go_on, processes)

    def repeated(name: str, command: Callable[[Path], list[str]]) -> Job:
        return Job(name, command, command)

    average = ["--model-ema", "--model-ema-decay", "0.9", "--mixup", "0.8", "--drop-path", "0.2", "--rotation", "10"]
    sizes = ["--img-size", "64", "--short-side", "48,64", "--long-side", "96", "--head-channels", "16"]
    here = ["--output", "{folder.parent}", "--experiment", "{folder.name}"]
    if not network.exists():
        run(["train", *micro, "--attention", "agent", "--output", str(home), "--experiment", "network"], home / "log")

    def at(words: list[str]) -> Callable[[Path], list[str]]:
        return lambda folder: [word.format(folder=folder) for word in words]

    looked = ["--removed", "--confusion", "--max-images", "4", "--output", "{folder}"]
    return [
        trained("train", ["train"], [*micro, "--attention", "agent", *average, "--workers", "1"]),
        trained("train, 2 processes", ["train"], [*micro, "--attention", "agent"], 2),
        trained("segment", ["segment", "train"], [*dense("segment", scenes), "--img-size", "32"]),
        trained("detect", ["detect", "train"], [*dense("detect", objects), *sizes]),
        repeated("lra", at(["lra", *arena, "--embed-dim", "16", "--attention", "linear", "--seeds", "0", "1", *here])),
        repeated("compare", at(["compare", *micro, "--attention", "softmax", "linear", "--seeds", "0", *here])),
        repeated("analyze", at(["analyze", str(network), *looked])),
        repeated("convert-checkpoint", at(["convert-checkpoint", str(weights), "{folder}/converted.safetensors"])),
    ]


def draw_classes(folder: Path) -> None:
    """Pictures of two classes, dark and light, in the layout of ImageNet."""
    chance = np.random.default_rng(0)
    for part, count in (("train", 20), ("val", 6)):
        for light, name in enumerate(("dark", "light")):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = chance.integers(80 * light, 100 + 80 * light, (8, 8, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.png")


def start(work: Callable[[], int], log: Path, processes: int = 1) -> list[int]:
    """Fork processes that do some `work` and exit with what it gives; what they say goes to files named after `log`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(processes):
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            output = os.open(f"{log}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if processes > 1:
                ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
                address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                os.environ.update({name: str(value) for name, value in {**ranks, **address}.items()})
            torch.set_num_threads(1)
            code = work()
            sys.stdout.flush()
        except BaseException:
            # as the interpreter would say it
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return children


def wait(children: list[int], seconds: float) -> dict[int, int]:
    """The exit codes of the children that end in time."""
    deadline, codes = time.monotonic() + seconds, {}
    while len(codes) < len(children) and time.monotonic() < deadline:
        for child in children:
            if child not in codes and (status := os.waitpid(child, os.WNOHANG))[0]:
                codes[child] = os.waitstatus_to_exitcode(status[1])
        time.sleep(0.002)
    return codes


def end(children: list[int]) -> None:
    """Kill what is left, so that nothing is."""
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def run(words: list[str], log: Path, processes: int = 1) -> float:
    """Carry out a command to its end; seconds."""
    begin = time.monotonic()
    children = start(lambda: main(words), log, processes)
    codes = wait(children, 600)
    if list(codes.values()) != [0] * processes:
        end([child for child in children if child not in codes])
        raise SystemExit(f"{' '.join(words)} failed: {Path(f'{log}.0').read_text()[-2000:]}")
    return time.monotonic() - begin


def complaints(log: Path, code: int, rank: int) -> list[str]:
    """What is wrong with what an interrupted or refused process said: it ends in one line, without a trace."""
    said = Path(f"{log}.{rank}").read_text(errors="replace")
    wrong = ["a trace"] if "Traceback" in said else []
    errors = [line for line in said.splitlines() if line.startswith("subquad: ")]
    if code in (2, 130) and len(errors) != 1:
        wrong.append(f"{len(errors)} lines")
    return wrong


def content(folder: Path) -> dict[str, object]:
    """What a folder holds, by file, without times and places."""
    found: dict[str, object] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(file.relative_to(folder))
        if file.suffix == ".safetensors":
            found[name] = {key: value.numpy().tobytes() for key, value in load_file(file).items()}
        elif file.suffix == ".pt":
            found[name] = plain(torch.load(file, weights_only=True))
        elif file.suffix in (".json", ".jsonl"):
            found[name] = [plain(json.loads(line)) for line in _documents(file)]
        elif "tfevents" not in name:
            # tables and pages have times in them
            found[name] = file.read_text(errors="replace") if file.name == "recipe.yaml" else None
    return found


def _documents(file: Path) -> list[str]:
    text = file.read_text()
    return text.splitlines() if file.suffix == ".jsonl" else [text]


def plain(value: object) -> object:
    """Without what differs between two runs of the same."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items() if key not in TIMES}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value.numpy().tobytes() if isinstance(value, torch.Tensor) else value


def differences(folder: Path, reference: dict[str, object]) -> list[str]:
    """The files in which a folder differs from the unbroken one; those that should not be there among them."""
    found = content(folder)
    return sorted(name for name in {*found, *reference} if name not in found or found[name] != reference.get(name, 0))


def attempt(job: Job, folder: Path, chance: random.Random, seconds: float, log: Path) -> dict[str, object]:
    """Go on with a run and kill it at a random moment in the next `seconds`, unless it ends before."""
    number = chance.choice(SIGNALS)
    moment = chance.uniform(0, seconds)
    words = job.resume(folder) if folder.exists() else job.command(folder)
    children = start(lambda: main(words), log, job.processes)
    codes = wait(children, moment)
    if len(codes) == len(children):
        good = all(code == 0 for code in codes.values())
        return {"ended": good, "said": "" if good else Path(f"{log}.0").read_text()[-300:]}
    victims = [child for child in children if child not in codes]
    victim = chance.choice(victims)
    os.kill(victim, number)
    begin = time.monotonic()
    codes |= wait(victims, PATIENCE if job.processes == 1 else LAUNCHER)
    ended = job.processes > 1 and len(codes) < len(children)
    if ended and victim in codes:
        # it was killed before it was known to the others, who wait for it to come
        others = [child for child in children if child not in codes]
        for child in others:
            os.kill(child, signal.SIGTERM)
        codes |= wait(others, 5)
        others = [child for child in others if child not in codes]
        end(others)
        codes |= dict.fromkeys(others, -9)
    stuck = [child for child in children if child not in codes]
    end(stuck)
    wrong = ["stuck"] if stuck else []
    for rank, child in enumerate(children):
        if codes.get(child, -9) >= 0:
            wrong += complaints(log, codes[child], rank)
    waited = time.monotonic() - begin
    for rank in range(job.processes if wrong else 0):
        wrong.append(Path(f"{log}.{rank}").read_text(errors="replace")[-2000:])
    return {"signal": number.name, "moment": round(moment, 2), "wrong": wrong, "ended after": round(waited, 2)} | (
        {"by": "launcher"} if ended else {}
    )


def main_loop(home: Path, count: int) -> int:
    """Kill until there were `count`, and print the table."""
    home.mkdir(parents=True, exist_ok=True)
    os.environ["SUBQUAD_HOME"] = str(home / "home")
    journal, log = home / "kills.jsonl", home / "log"
    done = [json.loads(line) for line in journal.read_text().splitlines()] if journal.is_file() else []
    kinds = jobs(home)
    references, seconds = {}, {}
    for job in kinds:
        folder = home / "unbroken" / "run"
        shutil.rmtree(folder.parent, ignore_errors=True)
        seconds[job.name] = run(job.command(folder), log, job.processes)
        references[job.name] = content(folder)
        print(f"{job.name}: {seconds[job.name]:.1f} s unbroken, {len(references[job.name])} files", flush=True)
    while sum("signal" in kill for kill in done) < count or any("signal" in kill for kill in done[-1:]):
        number = len(done)
        chance = random.Random(number)
        # a run goes on until it has ended; the next job has its turn then
        job = kinds[sum("same" in kill for kill in done) % len(kinds)]
        folder = home / "broken" / "run"
        if not done or "same" in done[-1]:
            shutil.rmtree(folder.parent, ignore_errors=True)
        since = next((k for k, kill in enumerate(reversed(done)) if "same" in kill), len(done))
        kill = {"job": job.name, **attempt(job, folder, chance, seconds[job.name] if since < MOST else 600, log)}
        if "ended" in kill:
            kill["same"] = differences(folder, references[job.name]) if kill["ended"] else ["it failed"]
        done.append(kill)
        with journal.open("a") as file:
            file.write(json.dumps(kill) + "\n")
        print(number + 1, *(f"{key}: {value}" for key, value in kill.items() if value != []), sep="  ", flush=True)
    print(table(done, [job.name for job in kinds]))
    return int(any(kill.get("wrong") or kill.get("same") for kill in done))


def table(done: list[dict], names: list[str]) -> str:
    """By job: kills, runs that were ended after them, and what was wrong."""
    lines = [
        "| | SIGKILL | SIGTERM | SIGINT | runs ended | not the same | wrong |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in [*names, "all"]:
        own = [kill for kill in done if name in (kill["job"], "all")]
        by = Counter(kill.get("signal") for kill in own)
        ended = [kill for kill in own if "same" in kill]
        bad = sum(bool(kill["same"]) for kill in ended), sum(bool(kill.get("wrong")) for kill in own)
        counts = [*(by[signal] for signal in ("SIGKILL", "SIGTERM", "SIGINT")), len(ended), *bad]
        lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for data, runs and what was done")
    parser.add_argument("--count", type=int, default=100, help="kills")
    given = parser.parse_args()
    raise SystemExit(main_loop(given.folder, given.count))
