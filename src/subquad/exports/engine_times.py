"""What a pass of a network takes in PyTorch and in other engines, in fp32, bf16 and int8, each in its own process.

Engines keep threads of their own that wait by spinning, so that two of them in one process disturb each other.
"""

import ast
import copy
import importlib.util
import json
import multiprocessing
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint

from subquad.errors import SubquadError, reason_of
from subquad.exports.exporting import DTYPES, export, exporter_named
from subquad.exports.formats import EXPORTERS, Exporter
from subquad.inference import optimize
from subquad.instructions import multiplies_bf16
from subquad.keeping_memory import keep_memory
from subquad.models.stated_inputs import image_channels
from subquad.ranges import check_repeats
from subquad.starting import quiet_torchao
from subquad.text import one_line
from subquad.timing import Run, interleaved_ms, warmed_up
from subquad.writing import replacing, temporary_folder, write_json

PYTORCH = {"PyTorch": lambda model: model, "optimize": optimize}
"""Forms of a network in PyTorch itself: as it is, and by `subquad.optimize`, where memory is kept as well."""

FLOATS = ("fp32", "bf16")
INT8 = "int8"
"""Products of matrices in int8, activations too, where the engine has a tool for that; images and the rest are fp32."""

MEASURED = (*FLOATS, INT8)


@dataclass(frozen=True)
class EngineTime:
    """A network in an engine.

    Attributes:
        network: its name.
        engine: "PyTorch", "optimize", or a format of EXPORTERS.
        dtype: "fp32" or "bf16", of parameters and images, or "int8".
        ms: the median of a pass over one image; None where there is none.
        reason: why there is none, in a line.
    """

    network: str
    engine: str
    dtype: str
    ms: float | None = None
    reason: str = ""


def installed_formats() -> list[str]:
    """Formats of engines other than PyTorch whose packages are installed."""
    return [
        name
        for name in EXPORTERS.usable_names()
        if (needs := EXPORTERS[name].needs) and all(importlib.util.find_spec(part) for part in needs)
    ]


def time_engines(
    networks: Mapping[str, nn.Module],
    px: tuple[int, int],
    formats: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    *,
    repeats: int = 5,
    log: Callable[[str], None] = lambda line: None,
) -> list[EngineTime]:
    """Time passes over one image of `px` (height, width): engine after engine, the networks in turn in each.

    Args:
        networks: by name; they are left as they are.
        px: what files are written for.
        formats: names of EXPORTERS beside PyTorch; those of `installed_formats` if left out.
        dtypes: of MEASURED; all, bf16 where the processor multiplies it, if left out.
        repeats: passes of each, after one that warms up.
        log: gets a line for each engine.

    Raises:
        SubquadError: a format or dtype is unknown, or its package is missing.
    """
    check_repeats(repeats)
    formats = installed_formats() if formats is None else formats
    dtypes = [dtype for dtype in MEASURED if dtype != "bf16" or multiplies_bf16()] if dtypes is None else dtypes
    for format in formats:
        exporter_named(format)
    if unknown := set(dtypes) - set(MEASURED):
        raise SubquadError(f"passes are timed in {', '.join(MEASURED)}, not in {', '.join(sorted(unknown))}")
    able = dict.fromkeys(PYTORCH, FLOATS) | {name: _able(EXPORTERS[name]) for name in formats}
    rows = []
    with temporary_folder("engines") as folder:
        file = folder / "networks.pt"
        # as they are now, training and hooks included, for processes that start from nothing
        with replacing(file) as aside, aside.open("wb") as content:
            torch.save({name: copy.deepcopy(model).eval() for name, model in networks.items()}, content)
        for engine, of_engine in able.items():
            for dtype in (dtype for dtype in dtypes if dtype in of_engine):
                log(f"{px[0]}×{px[1]} {engine} {dtype}")
                rows += in_a_process(file, engine, dtype, px, repeats, list(networks))
    return rows


def _needs_script(file: Path) -> bool:
    """Whether a process can read networks only once it has run the script that was started, which defines classes.

    Raises:
        SubquadError: it can't be run once more, in one line.
    """
    classes = [name for name in get_unsafe_globals_in_checkpoint(file) if name.startswith("__main__.")]
    if not classes:
        return False
    name = classes[0].removeprefix("__main__.")
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None or not Path(script).is_file():
        raise SubquadError(f"engines are timed in processes of their own: define {name} in a file, and import it")
    if not _is_guarded(Path(script)):
        raise SubquadError(
            f"engines are timed in processes of their own, which read {name} from {Path(script).name}: put what it "
            'does below `if __name__ == "__main__":`, or import the class from another file'
        )
    return True


def _is_guarded(script: Path) -> bool:
    """Whether a script asks for its name, as what is not to be done where it is read for its classes."""
    asked = (node.test for node in ast.parse(script.read_bytes()).body if isinstance(node, ast.If))
    return any(isinstance(part, ast.Name) and part.id == "__name__" for test in asked for part in ast.walk(test))


@contextmanager
def _without_script() -> Iterator[None]:
    """Let processes that are started here not run the script that this one was started with."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _able(exporter: Exporter) -> tuple[str, ...]:
    """What of MEASURED a format can be."""
    floats = tuple(dtype for dtype in FLOATS if dtype in exporter.dtypes)
    return (*floats, INT8) if "dynamic" in exporter.int8_files else floats


def in_a_process(
    file: Path, engine: str, dtype: str, px: tuple[int, int], repeats: int, names: Sequence[str]
) -> list[EngineTime]:
    """The rows of one engine, whose process may end as it likes."""
    answer = file.with_name("times.json")
    answer.unlink(missing_ok=True)
    try:
        starting = nullcontext() if _needs_script(file) else _without_script()
    except SubquadError as error:
        return [EngineTime(name, engine, dtype, None, str(error)) for name in names]
    child = multiprocessing.get_context("spawn").Process(
        target=_child, args=(file, answer, engine, dtype, px, repeats, torch.get_num_threads())
    )
    with starting:
        child.start()
    try:
        child.join()
    finally:
        child.kill()
    if answer.exists():
        return [EngineTime(**row) for row in json.loads(answer.read_text(encoding="utf-8"))]
    reason = "its process was ended, as it is where memory runs out" if child.exitcode == -9 else "its process failed"
    return [EngineTime(name, engine, dtype, None, f"{reason} ({child.exitcode})") for name in names]


def _child(file: Path, answer: Path, engine: str, dtype: str, px: tuple[int, int], repeats: int, threads: int) -> None:
    """What a process does: it writes its rows, and is the first to go where memory runs out."""
    # whoever started it is told of Ctrl-C, and ends it; a command's own words are not for what libraries start in here
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    torch.set_num_threads(threads)
    quiet_torchao()
    if engine == "optimize":
        keep_memory()
    # written by `time_engines` a moment ago, in a folder of its own
    networks = torch.load(file, weights_only=False)
    for network in networks.values():
        _register_with_transformers(network)
    rows = timed_here(networks, engine, dtype, px, repeats, file.parent)
    write_json(answer, [vars(row) for row in rows])


def _register_with_transformers(network: nn.Module) -> None:
    """Have transformers know a network's classes, as it does once one was made in this process.

    Constructors note what each class can record. In a process that has only read its networks from a file, a decoder
    that asks for the hidden states of all blocks (SegFormer, DPT) would get None.
    """
    parts = {type(part): part for part in network.modules() if hasattr(part, "_can_record_outputs")}
    for cls, part in parts.items():
        # one that can't be made so is timed as it is, and says itself what it lacks
        with suppress(Exception), torch.device("meta"):
            cls(part.config)


def timed_here(
    networks: Mapping[str, nn.Module], engine: str, dtype: str, px: tuple[int, int], repeats: int, folder: Path
) -> list[EngineTime]:
    """The rows of one engine, in this process; networks are brought to the dtype, files are written to `folder`."""
    precision = DTYPES["fp32" if dtype == INT8 else dtype]
    image = torch.randn(1, image_channels(next(iter(networks.values()))), *px, dtype=precision)
    passes: dict[str, Run] = {}
    reasons: dict[str, str] = {}
    for name, model in networks.items():
        try:
            run = _runner(model.to(precision), engine, dtype, px, folder / f"network-{len(passes)}")
            passes |= warmed_up({name: _pass(run, image)}, torch.device("cpu"))[0]
        except Exception as error:
            # engines and their translators raise what they like
            reasons[name] = one_line(reason_of(error))
    times = interleaved_ms(passes, repeats, torch.device("cpu"))
    return [
        EngineTime(name, engine, dtype, statistics.median(times[name]))
        if name in times
        else EngineTime(name, engine, dtype, None, reasons[name])
        for name in networks
    ]


def _runner(model: nn.Module, engine: str, dtype: str, px: tuple[int, int], path: Path) -> Callable[[Tensor], Any]:
    if engine in PYTORCH:
        return PYTORCH[engine](model)
    exporter = exporter_named(engine)
    what: dict[str, Any] = {"int8": "dynamic"} if dtype == INT8 else {"dtype": dtype}
    written = export(model, path.with_suffix(exporter.suffix), format=engine, img_size=px, **what)
    return exporter.load(written.path)


def _pass(run: Callable[[Tensor], Any], image: Tensor) -> Run:
    def once() -> None:
        with torch.inference_mode():
            run(image)

    return once
