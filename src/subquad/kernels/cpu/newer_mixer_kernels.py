"""As mixer_kernels, for focused attention and the mechanisms that came after the ones there."""

import ctypes
from typing import Any

from torch import Tensor

from subquad.kernels import mixer_operators as operators
from subquad.kernels.cpu.calls import mixed
from subquad.kernels.cpu.passing import Blocks, as_it_lies, filters_of, long, map_of, turning_of
from subquad.kernels.cpu.states import why_not_turned
from subquad.kernels.declaring import implements


@implements(operators.focused_mixer, "native")
def focused_mixer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor,
    positions: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shape: list[int],
    power: float,
    eps: float,
    filters: str,
) -> Tensor:
    """`temperature` (h, 1, d) as it is learned, `positions` (h, n, d)."""
    learned, numbers = map(as_it_lies, (positions, temperature)), map(ctypes.c_float, (power, eps))
    return mixed("focused_mixer", (q, k, v), *learned, *numbers, filters_of(weight, bias, filters, q), map_of(q, shape))


def _not_turned(q: Tensor, k: Tensor, *rest: Any) -> str | None:
    *_, cos, _, _, _, _, interleaved, _, _ = rest
    return why_not_turned(q, k, cos, interleaved, pieces=2)


@implements(operators.polapp_mixer, "native", cannot=_not_turned)
def polapp_mixer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    same: Tensor,
    opposite: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    shape: list[int],
    interleaved: bool,
    eps: float,
    filters: str,
) -> Tensor:
    """`same` and `opposite` (h, 1, 2d) as they are learned."""
    learned, branch = map(as_it_lies, (same, opposite)), filters_of(weight, bias, filters, q)
    arguments = *learned, turning_of(cos, sin), ctypes.c_float(eps), branch, map_of(q, shape)
    return mixed("polapp_mixer", (q, k, v, g), *arguments)


def _unit_not_turned(q: Tensor, k: Tensor, *rest: Any) -> str | None:
    *_, cos, _, _, interleaved, _ = rest
    return why_not_turned(q, k, cos, interleaved)


@implements(operators.ttt_mixer, "native", cannot=_unit_not_turned)
def ttt_mixer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    shape: list[int],
    interleaved: bool,
    loss_scale: float,
) -> Tensor:
    """Tokens (b, g, n, d) of the units' heads, and behind these the filters'."""
    learned = map(as_it_lies, (w1, w2, w3))
    return mixed("ttt_mixer", (q, k, v), *learned, turning_of(cos, sin), ctypes.c_float(loss_scale), map_of(q, shape))


@implements(operators.circulant_mixer, "native")
def circulant_mixer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, shape: list[int]) -> Tensor:
    """Tokens of a map without prefix."""
    return mixed("circulant_mixer", (q, k, v, g), *long(*shape))


@implements(operators.mhla_mixer, "native")
def mhla_mixer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shape: list[int],
    pieces: list[int],
    least: float,
    filters: str,
) -> Tensor:
    """`mixing` (i, i) as it is learned, the scales (h, 1, d)."""
    learned, branch = map(as_it_lies, (mixing, q_scale, k_scale)), filters_of(weight, bias, filters, q)
    return mixed("mhla_mixer", (q, k, v), *learned, ctypes.c_float(least), branch, Blocks(*shape, *pieces))
