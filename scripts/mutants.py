"""Faults put in by hand, one at a time, and which test notices: a count of tests that could not fail.

    python scripts/mutants.py --room training             # all faults of a room, and its row of the table
    python scripts/mutants.py --room training --only 3 7  # some of them
    python scripts/mutants.py --table                     # the table of what is known, for docs/reliability.md

A room is a file of `scripts/faults/`, whose README says how faults are written down. A fault lives in a copy of the
sources that a child process has first on its path; the parent has imported what is not ours, so that a child begins
its tests at once. Verdicts are kept in runs/mutants.json and hold while the fault, its file and the room's tests are
what they were; of a fault that a test has caught before, that test is asked first.
"""

import argparse
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faulty import FAULTS, ROOT, Fault, digest, read_room, rooms

KEPT = ROOT / "runs" / "mutants.json"
UNWARNED = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
SLOWEST = 600.0
"""Seconds that the tests of a room may take with a fault in."""

INTERPRETED = frozenset({"triton"})
"""Rooms whose kernels run in Triton's interpreter, which is chosen when Triton is imported."""

WARM = [
    "pytest",
    "torch",
    "torchvision.transforms.v2",
    "torchvision.models.detection",
    "timm",
    "timm.data",
    "timm.optim",
    "einops",
    "safetensors.torch",
    "accelerate",
    "sklearn.datasets",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "PIL.Image",
    "yaml",
    "torch.utils.tensorboard",
    "faster_coco_eval",
    "segmentation_models_pytorch",
    "pycocotools.coco",
    "diffusers",
    "transformers",
    "torch._dynamo",
    "torch._inductor",
    "tqdm",
    "filelock",
]
"""What children need and do not have to import again."""


class Watch:
    """A plugin of pytest that remembers the first failure."""

    def __init__(self) -> None:
        self.failed, self.ran = "", 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.ran += report.when == "call"
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = f"{report.nodeid} (when it is collected)"


def child(fault: Fault | None, groups: list[list[str]], pristine: Path, folder: Path) -> None:
    """Run groups of tests one after the other until one fails, and write down which; never returns."""
    import pytest

    os.setsid()
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    source = folder / "src"
    shutil.copytree(pristine, source)
    if fault is not None:
        target = source / "subquad" / fault.file
        target.write_text(fault.patched(target.read_text(encoding="utf-8")), encoding="utf-8")
        for stale in (target.parent / "__pycache__").glob(f"{target.stem}.*"):
            stale.unlink()
        if target.suffix in (".h", ".cpp"):
            os.environ["SUBQUAD_HOME"] = str(folder / "home")
    sys.path.insert(0, str(source))
    os.environ["PYTHONPATH"] = str(source)
    os.chdir(ROOT)
    watch, status = Watch(), 0
    for tests in groups:
        flags = [
            "-x",
            "-q",
            "-m",
            "not slow",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-p",
            "no:anyio",
            "--no-header",
            *UNWARNED,
        ]
        status = int(pytest.main([*flags, *tests], plugins=[watch]))
        if status:
            break
    where = Path(sys.modules["subquad"].__file__ or "") if "subquad" in sys.modules else source
    verdict = {"status": status, "failed": watch.failed, "ran": watch.ran, "ours": source in where.parents}
    (folder / "verdict").write_text(json.dumps(verdict))
    os._exit(0)


@dataclass
class Job:
    """A child at work."""

    number: int
    fault: Fault | None
    folder: Path
    process: int
    began: float


def start(number: int, fault: Fault | None, groups: list[list[str]], pristine: Path) -> Job:
    """Fork a child for a fault."""
    folder = Path(tempfile.mkdtemp(prefix="mutant-", dir=pristine.parent))
    sys.stdout.flush()
    process = os.fork()
    if not process:
        try:
            child(fault, groups, pristine, folder)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return Job(number, fault, folder, process, time.monotonic())


def finished(job: Job) -> dict[str, Any] | None:
    """What became of a child, None while it works."""
    done, _ = os.waitpid(job.process, os.WNOHANG)
    seconds = time.monotonic() - job.began
    if not done and seconds < SLOWEST:
        return None
    if not done:
        os.killpg(job.process, signal.SIGKILL)
        os.waitpid(job.process, 0)
    file = job.folder / "verdict"
    found = json.loads(file.read_text()) if file.is_file() else {}
    log = (job.folder / "log").read_text(errors="replace")[-600:] if (job.folder / "log").is_file() else ""
    shutil.rmtree(job.folder, ignore_errors=True)
    verdict: dict[str, Any] = {"seconds": round(seconds, 1)}
    if not done:
        return verdict | {"verdict": "caught", "by": "time"}
    if not found:
        return verdict | {"verdict": "caught", "by": "the process died", "log": log}
    if found["status"] == 5 or not found["ours"]:
        raise SystemExit(f"no tests were run, or not on the copy:\n{log}")
    if found["status"]:
        return verdict | {"verdict": "caught", "by": found["failed"] or "nothing can be collected", "log": log}
    if not found["ran"]:
        # as where sources that do not compile leave nothing to test
        return verdict | {"verdict": "no fault: all tests are skipped", "by": ""}
    return verdict | {"verdict": "survived", "by": "", "ran": found["ran"]}


def warm_up(folder: Path) -> Path:
    """Import what is not ours, and copy the sources with their bytecode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in WARM:
            try:
                importlib.import_module(name)
            except ImportError:
                print(f"without {name}")
    import compileall

    import torch

    torch.set_num_threads(1)
    shutil.copytree(ROOT / "src", folder / "pristine", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    compileall.compile_dir(folder / "pristine", quiet=1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # a run collects garbage when it begins: what is imported here is never any
    gc.collect()
    gc.freeze()
    # tests that need no home of their own share one, in which the kernels are compiled once
    os.environ.setdefault("SUBQUAD_HOME", str(ROOT / "runs" / "mutants-home"))
    return folder / "pristine"


def read_kept() -> dict[str, Any]:
    """The verdicts so far."""
    return json.loads(KEPT.read_text()) if KEPT.is_file() else {}


def keep(line: str, verdict: dict[str, Any]) -> None:
    """Write a verdict down, beside those of other rooms that run at the same time."""
    import filelock

    KEPT.parent.mkdir(exist_ok=True)
    with filelock.FileLock(f"{KEPT}.lock"):
        content = read_kept() | {line: verdict}
        aside = KEPT.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(content, indent=1, ensure_ascii=False))
        aside.replace(KEPT)


def run_room(room: str, only: list[int], jobs: int, near: bool, pristine: Path) -> None:
    """Try the faults of a room that have no verdict which still holds."""
    tests, faults = read_room(FAULTS / f"{room}.txt")
    kept = read_kept()
    waiting: list[tuple[int, Fault]] = []
    for number, fault in enumerate(faults, 1):
        try:
            fault.patched((pristine / "subquad" / fault.file).read_text(encoding="utf-8"))
        except (LookupError, OSError) as error:
            print(f"{room} {number}: STALE: {fault.file}: {error}", flush=True)
            continue
        known = kept.get(f"{room}: {fault.line}", {})
        if not fault.equivalent and number in (only or [number]) and known.get("key") != digest(fault, tests):
            waiting.append((number, fault))
    working: list[Job] = []
    while waiting or working:
        while waiting and len(working) < jobs:
            number, fault = waiting.pop(0)
            known = kept.get(f"{room}: {fault.line}", {})
            before = known.get("by", "")
            there = "::" in before and (ROOT / before.split("::")[0]).is_file() and "(" not in before
            groups = [[before]] if there else []
            asked = fault.tests if near and fault.tests else (*fault.tests, *tests)
            working.append(start(number, fault, [*groups, [*asked]], pristine))
        time.sleep(0.1)
        for job in list(working):
            if (verdict := finished(job)) is None:
                continue
            working.remove(job)
            assert job.fault is not None
            # what other files' tests say of it is still to be asked
            key = "" if near and verdict["verdict"] == "survived" else digest(job.fault, tests)
            keep(f"{room}: {job.fault.line}", verdict | {"key": key})
            says = f"caught by {verdict['by']}" if verdict["by"] else verdict["verdict"].upper()
            print(f"{room} {job.number}: {job.fault.line}: {says} ({verdict['seconds']} s)", flush=True)


def check_clean(room: str, pristine: Path) -> None:
    """Raise where the tests of a room fail without a fault."""
    tests, _ = read_room(FAULTS / f"{room}.txt")
    job = start(0, None, [tests], pristine)
    while (verdict := finished(job)) is None:
        time.sleep(0.1)
    if verdict["verdict"] != "survived":
        raise SystemExit(f"{room}: its tests fail without a fault: {verdict['by']}\n{verdict.get('log', '')}")
    print(f"{room}: {verdict['ran']} tests pass in {verdict['seconds']} s without a fault", flush=True)


def table(names: list[str]) -> str:
    """What is known, in Markdown: a row a room, then the survivors."""
    kept = read_kept()
    lines = ["| room | faults | caught | survived | equivalent | not tried |", "| --- | " + "---: | " * 5]
    total = [0] * 5
    left = []
    for room in names:
        _, faults = read_room(FAULTS / f"{room}.txt")
        verdicts = [
            "equivalent" if fault.equivalent else kept.get(f"{room}: {fault.line}", {}).get("verdict", "not tried")
            for fault in faults
        ]
        counts = [len(faults), *(verdicts.count(what) for what in ("caught", "survived", "equivalent", "not tried"))]
        total = [one + other for one, other in zip(total, counts, strict=True)]
        lines.append(f"| {room} | " + " | ".join(map(str, counts)) + " |")
        left += [f"- {room}: `{f.line}`" for f, what in zip(faults, verdicts, strict=True) if what == "survived"]
    lines.append("| all | " + " | ".join(map(str, total)) + " |")
    return "\n".join([*lines, *(["", "Survivors:", "", *left] if left else [])])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Put faults in, one at a time, and see which test notices.")
    parser.add_argument("--room", nargs="+", choices=rooms(), default=rooms(), metavar="ROOM", help="all if left out")
    parser.add_argument("--only", nargs="+", type=int, default=[], help="numbers of faults in their room")
    parser.add_argument("--jobs", type=int, default=1, help="children at a time")
    parser.add_argument("--near", action="store_true", help="ask a file's own tests only, where it names some")
    parser.add_argument("--unchecked", action="store_true", help="take it for granted that the tests pass as it is")
    parser.add_argument("--table", action="store_true", help="run nothing, print what is known")
    arguments = parser.parse_args()
    if not arguments.table:
        interpreting = os.environ.get("TRITON_INTERPRET") == "1"
        here = [room for room in arguments.room if (room in INTERPRETED) == interpreting]
        if elsewhere := [room for room in arguments.room if room not in here]:
            command = [sys.executable, *sys.orig_argv[1 : sys.orig_argv.index(sys.argv[0]) + 1], *sys.argv[1:]]
            own = os.environ | {"TRITON_INTERPRET": str(int(not interpreting))}
            subprocess.run([*command, "--room", *elsewhere], env=own, check=True)
        if here:
            with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
                pristine = warm_up(Path(folder))
                for room in here:
                    if not arguments.unchecked:
                        check_clean(room, pristine)
                    run_room(room, arguments.only, arguments.jobs, arguments.near, pristine)
            gc.unfreeze()
    print(table(arguments.room))


if __name__ == "__main__":
    main()
