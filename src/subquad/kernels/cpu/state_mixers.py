"""All that lies between the projections of a layer that attends by a state, on CPUs, in one call of the library.

Tokens are fp32 or bf16, and what is given back has the dtype of the first of them; parameters and all that is computed
on the way are fp32.
"""

import ctypes
from typing import Any

from torch import Tensor

from subquad.kernels import mixer_operators as operators
from subquad.kernels.cpu.calls import mixed
from subquad.kernels.cpu.passing import Predictor, as_it_lies, filters_of, map_of, turning_of
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


@implements(operators.inline_mixer, "native")
def inline_mixer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor,
    first: Tensor,
    first_bias: Tensor,
    second: Tensor,
    second_bias: Tensor,
    shape: list[int],
) -> Tensor:
    """`x` (b, n, h·d) is what the mean token is of; an MLP's weights are (h·d, d, 1) and (9·h·d, d, 1)."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    predictor = Predictor.of(first, first_bias, second, second_bias)
    return mixed("inline_mixer", (q, k, v, x[:, None]), predictor, map_of(q, shape))


@implements(operators.pola_mixer, "native")
def pola_mixer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    power: Tensor,
    temperature: Tensor,
    positions: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shape: list[int],
    alpha: float,
    eps: float,
    filters: str,
) -> Tensor:
    """`power` and `temperature` (h, 1, d) as they are learned, `positions` (h, n, d)."""
    learned, numbers = map(as_it_lies, (positions, power, temperature)), map(ctypes.c_float, (alpha, eps))
    return mixed("pola_mixer", (q, k, v, g), *learned, *numbers, filters_of(weight, bias, filters, q), map_of(q, shape))


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
