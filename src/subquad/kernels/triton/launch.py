"""How a kernel is started: the shape of its tiles, and over how many programs a sequence is split."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from subquad.kernels.triton.measured_tiles import measured
from subquad.kernels.triton.tile_table import power_of_2, with_choice

PROGRAMS = 4
"""For each multiprocessor: fewer leave it idle at the end, more split sequences for nothing."""

NARROW = 32
"""Channels of a head up to which programs need so little room that twice as many are better."""

INTERPRETED_PROCESSORS = 2
"""What stands for a GPU's number of multiprocessors in Triton's interpreter."""

LINE_NUMBERS = 1024
"""Numbers of a tile of which no product is made."""

OF_ONE_WARP = 8
"""Times as many programs of one warp as of others fill the device."""

SUMMED = 32
"""Tokens of a tile that are summed."""

MIDDLE = 64
"""Channels of a head beyond which tiles are smaller."""


class Split(NamedTuple):
    """Tokens in `pieces` of `chunk`, the last of which may be shorter."""

    pieces: int
    chunk: int


def split_of(tokens: Tensor, block: int, *, times: int = 1, groups: int | None = None, more: int = 1) -> Split:
    """Tokens (b, h, n, d) split so that small batches fill the device, where each sequence is read `times` over.

    One program may go through the images of a group, of which there are `groups`; `more` times as many programs fill it
    where they are small.
    """
    b, h, n, _ = tokens.shape
    blocks = -(-n // block)
    wanted = min(max(1, more * _programs(tokens) // ((groups or b) * h * times)), blocks)
    chunk = -(-blocks // wanted) * block
    return Split(-(-n // chunk), chunk)


def groups_of(tokens: Tensor, block: int, *, times: int = 1) -> tuple[int, Split]:
    """In how many groups the images of tokens (b, h, n, d) are gone through, and how tokens are split then.

    Of g groups and s splits, g s fill the device. Each group has a sum (f, n) for each head, and each split of every
    image one (f, d): the least of both together is where g is the root of b d g s / n.
    """
    b, h, n, d = tokens.shape
    wanted = max(1, _programs(tokens) // (h * times))
    most_splits = -(-n // block)
    groups = min(b, max(1, round((b * wanted * d / n) ** 0.5), -(-wanted // most_splits)))
    # as many in all groups but the last
    groups = -(-b // -(-b // groups))
    return groups, split_of(tokens, block, times=times, groups=groups)


def _programs(tokens: Tensor) -> int:
    """How many fill the device of these tokens."""
    programs = 2 * PROGRAMS if tokens.shape[-1] <= NARROW else PROGRAMS
    return programs * (_processors(tokens.device) if tokens.is_cuda else INTERPRETED_PROCESSORS)


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def tile_of(
    kernel: str, tokens: Tensor, *, few: int = 0, heavy: int = 0, exact: bool = False, ahead: int = 2
) -> dict[str, Any]:
    """The settings that all kernels share, for tokens (b, h, n, d): as many rows at once as registers hold.

    `kernel` and, where there are some, the number of agents or landmarks are what a table of tiles goes by; `ahead` is
    how many tiles are read ahead of the products, but for fp32.

    `heavy` says how often that is halved: some kernels, those of gradients above all, have much else to hold
    (scripts/kernel_needs.py shows what).
    Products of bf16 are of bf16 numbers. Those of fp16 are of the nearest tf32 ones, which have as many digits and the
    range that features, states and sums over tokens need. With `exact` those of bf16 are of tf32 as well, whose digits
    are cut off, and those of fp16 have fp32's digits. Sums are in fp32.
    """
    d, fp32 = tokens.shape[-1], tokens.dtype == torch.float32
    width = max(16, power_of_2(d))
    block = 16 if fp32 else 64 >> (heavy + (width > MIDDLE))
    defaults = {
        "D": d,
        "BLOCK_D": width,
        "BLOCK": block,
        "DOT": tl.bfloat16 if tokens.dtype == torch.bfloat16 and not exact else tl.float32,
        "PRECISION": "ieee" if fp32 else "tf32" if tokens.dtype == torch.bfloat16 else "halves" if exact else "nearest",
        "num_warps": 16 if fp32 and width > MIDDLE else 8,
        "num_stages": 1 if fp32 else ahead,
        "enable_fp_fusion": True,
    }
    return with_choice(kernel, defaults | measured(kernel, tokens), tokens, few)


def lines_of(kernel: str, tokens: Tensor, *, block: int | None = None) -> dict[str, Any]:
    """The settings of kernels without products of matrices, for tokens (b, h, n, d), of which a tile has `block`.

    A program is one warp: its threads meet without waiting for others.
    """
    d = tokens.shape[-1]
    width = power_of_2(d)
    block = block or min(128, max(16, LINE_NUMBERS // width))
    compiled = {"num_warps": 1, "num_stages": 2, "enable_fp_fusion": True}
    return with_choice(kernel, {"D": d, "BLOCK_D": width, "BLOCK": block, **compiled}, tokens)


def square_of(kernel: str, matrices: Tensor) -> dict[str, Any]:
    """The settings of kernels that hold matrices (b, m, m) in fp32."""
    side = max(16, power_of_2(matrices.shape[-1]))
    compiled = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
    return with_choice(kernel, {"SIDE": side, "CHUNK": 16, "PRECISION": "ieee", **compiled}, matrices[None])


def few_of(count: int, tile: dict[str, Any]) -> int:
    """How many of `count` agents or landmarks are in one tile."""
    most = 32 if tile["PRECISION"] in ("ieee", "halves") or (tile["BLOCK_D"] > MIDDLE and tile["BLOCK"] < 32) else 64
    return min(most, max(16, power_of_2(count)))


def total(partial: Tensor) -> Tensor:
    """The sum over splits of (b·h, splits, …), which is nothing to do for one."""
    return partial[:, 0] if partial.shape[1] == 1 else partial.sum(dim=1)
