"""The choice of tiles by time: the kernels that something launches are tried with others, and the fastest are kept.

Each setting of a kernel is tried in turn with the best of those before it, and a choice is kept if it is faster than
what the library comes with by MARGIN at least and computes the same.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subquad.errors import SubquadError
from subquad.holding import holding
from subquad.kernels import triton as room
from subquad.kernels.backends import KERNELS, unavailable, use_backend
from subquad.kernels.declaring import OPERATORS
from subquad.kernels.triton.measured_tiles import may_idle
from subquad.kernels.triton.tile_table import (
    INTERPRETER,
    RANGES,
    Tile,
    device_name,
    keep_tiles,
    path_of,
    read_tiles,
    watching,
)
from subquad.timing import seconds_of

MARGIN = 0.97
"""A choice is kept if it takes at most this share of the time."""

FARTHEST = 2
"""Times the number that the library comes with that is tried: compilers take minutes for much larger tiles."""

SAME = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far, relatively, results may be off those with the tiles that the library comes with."""

Timer = Callable[[Callable[[], Any]], float]


@dataclass(frozen=True)
class Tuned:
    """What was found for one kernel and shape.

    Attributes:
        key: the kernel, dtype and shape, see `tile_table`.
        default, chosen: settings that can be chosen, as the library has them and as they are fastest.
        default_ms, chosen_ms: milliseconds of the whole operation with either.
        failed: how many settings could not be compiled or launched, or computed something else.
    """

    key: str
    default: dict[str, int]
    chosen: dict[str, int]
    default_ms: float
    chosen_ms: float
    failed: int


@dataclass(frozen=True)
class Call:
    """An operation that was launched, with its arguments."""

    name: str
    arguments: tuple[Any, ...]

    @property
    def signature(self) -> tuple[Any, ...]:
        """The same for calls of the same shapes."""
        words = [
            (one.dtype, one.shape, one.stride()) if isinstance(one, Tensor) else str(one) for one in self.arguments
        ]
        return self.name, *words

    @property
    def tokens(self) -> Tensor:
        """The first of its tensors."""
        return next(one for one in self.arguments if isinstance(one, Tensor))

    def __call__(self) -> list[Tensor]:
        """Results of this operation alone."""
        arguments = self.arguments
        if OPERATORS[self.name].changes_first:
            arguments = (arguments[0].clone(), *arguments[1:])
        results = room.function_of(self.name)(*arguments)
        if results is None:
            return [arguments[0]]
        return [results] if isinstance(results, Tensor) else list(results)


def tune(
    run: Callable[[], Any],
    *,
    device: torch.device | str = "cuda",
    again: bool = False,
    minutes: float | None = None,
    timer: Timer | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> list[Tuned]:
    """Choose tiles for every kernel that `run()` launches; they are kept in $SUBQUAD_HOME, and used from then on.

    Args:
        run: forward, or forward and backward, of whatever is to be fast; it is called once, with Triton's kernels.
        device: where it runs.
        again: also what the table has already.
        minutes: that it may take; what is left is chosen by the next call.
        timer: milliseconds of a function; PyTorch's events on the device if left out.
        log: hears a line for each kernel.

    Raises:
        SubquadError: there is no such device, or the table can't be read or written, in one line.
    """
    device = torch.device(device)
    check_tunable(device)
    name = device_name(device)
    end = None if minutes is None else time.monotonic() + 60 * minutes
    found: list[Tuned] = []
    # so that no other process writes the same table meanwhile
    with holding(path_of(name).parent):
        done = set() if again else set(read_tiles(name))
        for call in calls_of(run):
            for key, default in keys_of(call).items():
                if key in done:
                    continue
                if end is not None and time.monotonic() > end:
                    log("the time is up: the next call goes on")
                    return found
                done.add(key)
                one = best_of(call, key, default, timer or milliseconds)
                found.append(one)
                # what is fastest as it comes is kept as well, as nothing: it was tried
                keep_tiles(name, {key: one.chosen if one.chosen != one.default else {}})
                log(f"{key}: {one.default_ms:.3f} ms, {one.chosen_ms:.3f} with {_shown(one)}")
    return found


def check_tunable(device: torch.device) -> None:
    """Raise SubquadError, in one line, where no tiles can be chosen by time."""
    reason = unavailable("triton")
    if reason is None and device.type not in KERNELS["triton"].devices:
        reason = f"{device} is none"
    if reason is not None:
        raise SubquadError(f"tiles are chosen by time on a CUDA device: {reason}")


def _shown(one: Tuned) -> str:
    if one.chosen == one.default:
        return "nothing better"
    return ", ".join(f"{name} {value}" for name, value in one.chosen.items())


def calls_of(run: Callable[[], Any]) -> Sequence[Call]:
    """The operations that `run` launches, each of its shapes once."""
    calls: dict[tuple[Any, ...], Call] = {}

    def note(name: str, arguments: tuple[Any, ...]) -> None:
        call = Call(name, tuple(one.detach() if isinstance(one, Tensor) else one for one in arguments))
        calls.setdefault(call.signature, call)

    with room.noting(note), use_backend("triton"):
        run()
    return list(calls.values())


def keys_of(call: Call) -> dict[str, dict[str, int]]:
    """The kernels of an operation, and what of their settings can be chosen, as the library has it."""
    keys: dict[str, dict[str, int]] = {}

    def watcher(key: str, defaults: Tile) -> Tile:
        keys[key] = {name: defaults[name] for name in RANGES if name in defaults}
        return {}

    with watching(watcher):
        call()
    return keys


def best_of(call: Call, key: str, default: dict[str, int], timer: Timer) -> Tuned:
    """Try one kernel of an operation with other settings."""
    chosen = trial = default

    def watcher(found: str, defaults: Tile) -> Tile:
        return dict(trial) if found == key else {}

    failed = 0
    with watching(watcher):
        expected = call()
        default_ms = best_ms = timer(call)
        for name in default:
            start = chosen
            for value in RANGES[name]:
                if value == start[name] or value > FARTHEST * default[name]:
                    continue
                trial = start | {name: value}
                if may_idle(call.tokens, trial, default):
                    continue
                try:
                    if not _same(call(), expected):
                        failed += 1
                        continue
                    ms = timer(call)
                # whatever Triton, its compilers or the driver say of tiles that they can't take
                except Exception:
                    failed += 1
                    continue
                if ms < best_ms:
                    chosen, best_ms = trial, ms
    if best_ms > MARGIN * default_ms:
        chosen, best_ms = default, default_ms
    return Tuned(key, default, chosen, default_ms, best_ms, failed)


def _same(results: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    for one, other in zip(results, expected, strict=True):
        reference = other.float().nan_to_num()
        off = (one.float().nan_to_num() - reference).norm() / reference.norm().clamp(min=1e-6)
        if not off <= SAME[other.dtype]:
            return False
    return True


def milliseconds(run: Callable[[], Any]) -> float:
    """The median time of a function on the GPU, its launches included only where the GPU waits for them."""
    if device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")) == INTERPRETER:
        return 1000 * seconds_of(run, torch.device("cpu"))
    from triton.testing import do_bench

    return float(do_bench(run, warmup=10, rep=60, return_mode="median"))
