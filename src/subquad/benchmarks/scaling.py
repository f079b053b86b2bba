"""Cost of whole attention layers against the number of tokens: timed, as the report shows it, or counted; exponents."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from subquad.benchmarks.blocks import BlockRow, measure_blocks
from subquad.benchmarks.layers_on_squares import check_mechanisms, describe_device, layer_on_tokens
from subquad.benchmarks.memory import peak_memory_mb
from subquad.kernels import use_backend
from subquad.text import columns
from subquad.timing import timed_pass

LENGTHS = (64, 196, 576, 1600, 4096)
"""Square grids from 8×8 to 64×64 tokens."""

LONG = (256, 1024, 4096, 16384, 65536)
"""Square grids from 16×16 to 256×256 tokens."""

FITTED = 16
"""Exponents are of lengths down to the longest over this: constant parts decide on shorter ones."""


@dataclass(frozen=True)
class CountedRow:
    """What an attention layer with its projections costs on one image, fp32, without being computed.

    Attributes:
        backward: forward and backward pass, as in a training step; else forward alone.
        macs: multiply-adds of products and convolutions; Fourier transforms and what is done entry by entry is in none.
        peak_mb: of the tensors that live at once beside the layer's parameters and input, softmax being fused.
    """

    mechanism: str
    tokens: int
    backward: bool
    macs: int
    peak_mb: float


def measure_scaling(
    mechanisms: Sequence[str],
    lengths: Sequence[int] = LENGTHS,
    *,
    repeats: int = 7,
    time_budget_s: float = 60,
    log: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> list[BlockRow]:
    """Time whole attention layers and nothing else, within a time that somebody waits for.

    `settings` are further ones of `measure_blocks`.
    """
    budget: dict[str, Any] = {"repeats": repeats, "time_budget_s": time_budget_s, "log": log}
    return measure_blocks(mechanisms, lengths, parts=("block",), **budget, **settings)


def count_scaling(
    mechanisms: Sequence[str], lengths: Sequence[int] = LONG, *, dim: int = 192, num_heads: int = 3
) -> list[CountedRow]:
    """Count what layers cost, forward and as a training step: shapes alone go through the eager forms.

    It takes the same few seconds and no memory whatever the length, and says the same on every machine.
    """
    check_mechanisms(mechanisms)
    cpu = torch.device("cpu")
    rows = []
    for name in mechanisms:
        for length in sorted(lengths):
            for backward in (False, True):
                layer, x, grid = layer_on_tokens(name, (1, length, dim), num_heads, device=cpu, backward=backward)
                mode = without_numbers(layer.requires_grad_(backward))
                with mode, use_backend("eager"):
                    tokens = torch.empty(x.shape, requires_grad=backward)
                    run = timed_pass(partial(layer, tokens, grid=grid), backward)
                    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                        run()
                    # gradients are a part of what a step makes
                    layer.zero_grad()
                    tokens.grad = None
                    peak_mb = peak_memory_mb(run, cpu)
                rows.append(CountedRow(name, length, backward, counter.get_total_flops() // 2, peak_mb))
    return rows


def without_numbers(model: nn.Module) -> FakeTensorMode:
    """Leave of a network's parameters and buffers their shapes alone; what it computes in the mode has shapes alone."""
    mode = FakeTensorMode()
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            setattr(module, key, nn.Parameter(mode.from_tensor(parameter.detach()), parameter.requires_grad))
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, mode.from_tensor(buffer))
    return mode


def fitted_exponent(costs: Iterable[tuple[int, float]]) -> float | None:
    """The power of the tokens that costs grow with, from pairs (tokens, cost) by least squares of their logarithms.

    Over lengths from a sixteenth of the longest; None where there are less than two of them.
    """
    pairs = [(tokens, cost) for tokens, cost in costs if cost > 0]
    longest = max((tokens for tokens, _ in pairs), default=0)
    fitted = sorted({(math.log(tokens), math.log(cost)) for tokens, cost in pairs if tokens * FITTED >= longest})
    if len({x for x, _ in fitted}) < 2:
        return None
    return statistics.linear_regression(*zip(*fitted, strict=True)).slope


def growth(rows: Sequence[BlockRow]) -> dict[tuple[str, int, str], tuple[float | None, float | None]]:
    """By mechanism, batch size and dtype the exponents of milliseconds and of the peak of memory.

    Layers are timed with layers; where operations alone were timed it is theirs.
    """
    found = {}
    for key in dict.fromkeys((row.mechanism, row.batch_size, row.dtype) for row in rows):
        own = [row for row in rows if (row.mechanism, row.batch_size, row.dtype) == key]
        timed = ((row.tokens, row.core_ms if row.block_ms is None else row.block_ms) for row in own)
        ms = fitted_exponent((tokens, value) for tokens, value in timed if value is not None)
        found[key] = ms, fitted_exponent((row.tokens, row.peak_mb) for row in own)
    return found


def growth_text(rows: Sequence[BlockRow]) -> str:
    """The exponents for a terminal; nothing where there is but one length."""
    found = {key: pair for key, pair in growth(rows).items() if pair[0] is not None}
    if not found:
        return ""
    lines = [["grows as tokens to the power", "batch", "dtype", "ms", "MB"]]
    for (name, batch, dtype), (ms, peak) in found.items():
        lines.append([name, str(batch), dtype, f"{ms:.2f}", "" if peak is None else f"{peak:.2f}"])
    return columns(lines)


def describe_scaling(device: torch.device | str = "cpu") -> str:
    """Say on what `measure_scaling` measures, in a sentence."""
    where = describe_device(device)
    return f"Width 192, 3 heads, one image, fp32, {where}, torch {torch.__version__}; medians of interleaved repeats."
