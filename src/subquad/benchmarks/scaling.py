"""Latency and memory of whole attention layers against the number of tokens, as the report shows them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from subquad.benchmarks.blocks import BlockRow, measure_blocks
from subquad.benchmarks.layers_on_squares import describe_device

LENGTHS = (64, 196, 576, 1600, 4096)
"""Square grids from 8×8 to 64×64 tokens."""


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


def describe_scaling(device: torch.device | str = "cpu") -> str:
    """Say on what `measure_scaling` measures, in a sentence."""
    where = describe_device(device)
    return f"Width 192, 3 heads, one image, fp32, {where}, torch {torch.__version__}; medians of interleaved repeats."
