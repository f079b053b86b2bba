"""How long something takes: the one clock and the one timing loop, of benchmarks and of throughput."""

import random
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)
Run = Callable[[], object]


def now(device: torch.device) -> float:
    """Seconds of a clock, when the device has done what it was told."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def seconds_of(run: Run, device: torch.device) -> float:
    """How long a pass takes, the device's queue included.

    On a GPU its own clock is read, as telling a process that a pass is over takes longer than a short one.
    """
    if device.type == "cuda":
        return _seconds_by_events(run, device)
    start = now(device)
    run()
    return now(device) - start


def _seconds_by_events(run: Run, device: torch.device) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    stream = torch.cuda.current_stream(device)
    began.record(stream)
    run()
    ended.record(stream)
    ended.synchronize()
    return began.elapsed_time(ended) / 1000


def timed_pass(compute: Callable[[], Tensor], backward: bool, *, shares_graph: bool = False) -> Run:
    """A pass to be timed: forward alone, or forward and backward together, from the sum of what is computed.

    With `shares_graph` passes have a part of their graph in common, which is then kept, and takes memory.
    """

    def forward() -> None:
        with torch.inference_mode():
            compute()

    def both() -> None:
        compute().sum().backward(retain_graph=shares_graph)

    return both if backward else forward


def warmed_up(
    passes: Mapping[Key, Run],
    device: torch.device,
    *,
    is_too_slow: Callable[[float], bool] = lambda seconds: False,
) -> tuple[dict[Key, Run], dict[Key, float]]:
    """Run each pass once: those that are left, and the seconds of those that were too slow."""
    first = {key: seconds_of(run, device) for key, run in passes.items()}
    slow = {key: seconds for key, seconds in first.items() if is_too_slow(seconds)}
    return {key: run for key, run in passes.items() if key not in slow}, slow


def interleaved_ms(
    passes: Mapping[Key, Run],
    repeats: int,
    device: torch.device,
    *,
    within: Callable[[Key], AbstractContextManager[object]] = nullcontext,
) -> dict[Key, list[float]]:
    """How many milliseconds each pass takes, `repeats` times; they should be warm.

    All take turns, so that what else the machine does hits all alike, and in another order each time, as what ran
    before leaves its data in the cache or takes it out. The context that `within` makes of a pass's key is entered and
    left beside the clock.
    """
    times: dict[Key, list[float]] = {key: [] for key in passes}
    order = random.Random(0)
    for _ in range(repeats):
        for key in order.sample(list(passes), len(passes)):
            with within(key):
                times[key].append(1000 * seconds_of(passes[key], device))
    return times
