"""Latency and memory of an attention layer against the number of tokens, all mechanisms in turn."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from subquad.attention import ATTENTION
from subquad.benchmarks.memory import peak_memory_mb
from subquad.errors import SubquadError, reason_of, unknown_name
from subquad.grid import TokenGrid
from subquad.models.layers import SelfAttention
from subquad.timing import interleaved_ms, timed_pass, warmed_up

LENGTHS = (64, 196, 576, 1600, 4096)
"""Square grids from 8×8 to 64×64 tokens."""


@dataclass(frozen=True)
class ScalingRow:
    """One mechanism at one length: milliseconds of a pass, over the repeats, and the memory it takes."""

    mechanism: str
    num_tokens: int
    median_ms: float
    min_ms: float
    max_ms: float
    peak_mb: float


def measure_scaling(
    mechanisms: Sequence[str],
    lengths: Sequence[int] = LENGTHS,
    *,
    dim: int = 192,
    num_heads: int = 3,
    batch_size: int = 1,
    repeats: int = 7,
    backward: bool = False,
    device: torch.device | str = "cpu",
    time_budget_s: float = 60,
    log: Callable[[str], None] = lambda line: None,
) -> list[ScalingRow]:
    """Time whole attention layers, projections included, on square grids of `lengths` tokens.

    The mechanisms take turns within each repeat, so that what else the machine does hits all of them alike. A mechanism
    whose repeats at a length would not fit what is left of `time_budget_s` is left out there, and `log` hears of it.
    """
    device = torch.device(device)
    check_mechanisms(mechanisms)
    deadline = time.perf_counter() + time_budget_s
    rows: list[ScalingRow] = []
    running = list(mechanisms)
    for length in sorted(lengths):
        passes = {name: _one_pass(name, length, dim, num_heads, batch_size, backward, device) for name in running}
        passes = warmed_up(
            passes,
            device,
            is_too_slow=lambda seconds: seconds * (repeats + 2) > deadline - time.perf_counter(),
            log=lambda name, seconds, length=length: log(  # type: ignore[misc]
                f"{name} is left out from {length} tokens on: {seconds:.1f} s a pass"
            ),
        )
        running = list(passes)
        times = interleaved_ms(passes, repeats, device)
        rows += [_row(name, length, times[name], peak_memory_mb(passes[name], device)) for name in running]
    return rows


def describe_device(device: torch.device | str) -> str:
    """A device in words; raises if it is not there."""
    try:
        device = torch.device(device)
        # what is computed comes back; on `meta` nothing is
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise SubquadError(f"device '{device}' can't be used: {reason_of(error).partition('. ')[0]}") from None
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({torch.get_num_threads()} of its cores)" if device.type == "cpu" else str(device)


def describe_scaling(device: torch.device | str = "cpu") -> str:
    """On what `measure_scaling` measures by default, in a sentence."""
    where = describe_device(device)
    return f"Width 192, 3 heads, one image, fp32, {where}, torch {torch.__version__}; medians of interleaved repeats."


def crossover(rows: Sequence[ScalingRow], reference: str = "softmax") -> dict[str, float | None]:
    """For each other mechanism the length from which on it is faster than `reference`, None if it never was.

    Between two measured lengths the ratio of the medians is interpolated in logarithms; faster from the first length on
    gives that length.
    """
    base = {row.num_tokens: row.median_ms for row in rows if row.mechanism == reference}
    crossings: dict[str, float | None] = {}
    for name in dict.fromkeys(row.mechanism for row in rows if row.mechanism != reference):
        ratios = [
            (row.num_tokens, row.median_ms / base[row.num_tokens])
            for row in sorted(rows, key=lambda row: row.num_tokens)
            if row.mechanism == name and row.num_tokens in base
        ]
        crossings[name] = last_descent(ratios)
    return crossings


def last_descent(ratios: Sequence[tuple[int, float]]) -> float | None:
    """Where a ratio, given at rising lengths, goes below 1 for good; None if it does not."""
    if not ratios or ratios[-1][1] >= 1:
        return None
    for (left, above), (right, below) in reversed(list(pairwise(ratios))):
        if above >= 1 > below:
            share = math.log(above) / (math.log(above) - math.log(below))
            return math.exp(math.log(left) + share * (math.log(right) - math.log(left)))
    return float(ratios[0][0])


def _one_pass(
    name: str, length: int, dim: int, num_heads: int, batch_size: int, backward: bool, device: torch.device
) -> Callable[[], object]:
    """A pass through a layer of this mechanism, ready to be timed."""
    layer, x, grid = layer_on_tokens(name, (batch_size, length, dim), num_heads, device=device, backward=backward)
    return timed_pass(lambda: layer(x, grid=grid), backward)


def layer_on_tokens(
    name: str,
    shape: tuple[int, int, int],
    num_heads: int,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    backward: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> tuple[SelfAttention, Tensor, TokenGrid]:
    """An attention layer with a mechanism of these settings, random tokens (b, n, c), and the square that they fill."""
    dim, grid = shape[2], square(shape[1])
    if dim % num_heads:
        raise SubquadError(f"{num_heads} heads do not divide a width of {dim}: choose num_heads among its divisors")
    layer = SelfAttention(dim, num_heads, partial(ATTENTION[name], **(settings or {})), grid=grid)
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=backward)
    return layer.to(device=device, dtype=dtype).eval(), x, grid


def check_mechanisms(names: Sequence[str]) -> None:
    """Raise for a name that is none of a mechanism."""
    for name in names:
        if name not in ATTENTION:
            raise unknown_name("attention", name, ATTENTION)


def square(length: int) -> TokenGrid:
    """The square grid of `length` tokens."""
    side = math.isqrt(max(length, 0))
    if side < 1 or side * side != length:
        raise SubquadError(f"{length} tokens make no square grid: use {max(side, 1) ** 2} or {(side + 1) ** 2}")
    return TokenGrid(side, side)


def _row(name: str, length: int, times: Sequence[float], peak_mb: float) -> ScalingRow:
    return ScalingRow(
        mechanism=name,
        num_tokens=length,
        median_ms=statistics.median(times),
        min_ms=min(times),
        max_ms=max(times),
        peak_mb=peak_mb,
    )
