"""What benchmarks of layers stand on: a layer, tokens that fill a square, the device in words, where lines cross."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from subquad.attention import ATTENTION
from subquad.errors import SubquadError, UnknownSettingError, reason_of, unknown_name
from subquad.grid import TokenGrid
from subquad.models.assembling import settings_of
from subquad.models.attention_names import parse_attention
from subquad.models.layers import SelfAttention


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
    """An attention layer with a mechanism, random tokens (b, n, c), and the square that they fill.

    The mechanism may have settings behind its name, "inline:local=false"; `settings` are stronger.
    """
    dim, grid = shape[2], square(shape[1])
    if dim % num_heads:
        raise SubquadError(f"{num_heads} heads do not divide a width of {dim}: choose num_heads among its divisors")
    mechanism, own = parse_attention(name)
    layer = SelfAttention(dim, num_heads, partial(ATTENTION[mechanism], **own | dict(settings or {})), grid=grid)
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=backward)
    return layer.to(device=device, dtype=dtype).eval(), x, grid


def check_mechanisms(names: Sequence[str]) -> None:
    """Raise for a name that is none of a mechanism, and for a setting behind it that is none of its own."""
    for mechanism, own in map(parse_attention, names):
        if mechanism not in ATTENTION:
            raise unknown_name("attention", mechanism, ATTENTION)
        for key in own:
            if key not in (known := settings_of(mechanism)):
                raise unknown_name(f"setting of {mechanism} attention", key, known, UnknownSettingError)


def is_mechanism(name: str) -> bool:
    """Whether what is to be timed is a mechanism, with settings or without, and not a network."""
    return ":" in name or name in ATTENTION


def square(length: int) -> TokenGrid:
    """The square grid of `length` tokens."""
    side = math.isqrt(max(length, 0))
    if side < 1 or side * side != length:
        raise SubquadError(f"{length} tokens make no square grid: use {max(side, 1) ** 2} or {(side + 1) ** 2}")
    return TokenGrid(side, side)


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


def last_descent(ratios: Sequence[tuple[int, float]]) -> float | None:
    """Where a ratio, given at rising lengths, goes below 1 for good; None if it does not."""
    if not ratios or ratios[-1][1] >= 1:
        return None
    for (left, above), (right, below) in reversed(list(pairwise(ratios))):
        if above >= 1 > below:
            share = math.log(above) / (math.log(above) - math.log(below))
            return math.exp(math.log(left) + share * (math.log(right) - math.log(left)))
    return float(ratios[0][0])
