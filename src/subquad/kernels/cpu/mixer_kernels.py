"""All that lies between a layer's projections, on CPUs, in one call of the library.

Tokens are fp32 or bf16, and what is given back has the dtype of the first of them; parameters and all that is computed
on the way are fp32.
"""

import ctypes
from typing import Any

from torch import Tensor

from subquad.kernels import mixer_operators as operators
from subquad.kernels.cpu.calls import mixed
from subquad.kernels.cpu.passing import (
    Predictor,
    as_it_lies,
    bias_of_tables,
    filters_of,
    long,
    map_of,
    norm_of,
)
from subquad.kernels.declaring import implements


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


@implements(operators.agent_mixer, "native")
def agent_mixer(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """Behind the tokens stand the tables of both biases, the local branch, and `shape`, `bins` and `filters`."""
    *tables, weight, bias, shape, bins, filters = rest
    biases, branch = (bias_of_tables(*tables[:4]), bias_of_tables(*tables[4:])), filters_of(weight, bias, filters, q)
    return mixed("agent_mixer", (q, k, v), *biases, branch, map_of(q, shape), *long(*bins))


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


def _no_window(q: Tensor, v: Tensor, windows: Tensor, *rest: Any) -> str | None:
    height, width = rest[4]
    if height < windows.shape[2] or width < windows.shape[3]:
        return f"a map of {height}×{width} is smaller than a window of {windows.shape[2]}×{windows.shape[3]}"
    return None


@implements(operators.soft_mixer, "native", cannot=_no_window)
def soft_mixer(
    q: Tensor,
    v: Tensor,
    windows: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shape: list[int],
    steps: int,
    scale: float,
    norm_eps: float,
    ridge: float,
    start: float,
    filters: str,
) -> Tensor:
    """`windows` (d, d, i, j) is a convolution's weight; landmarks have a LayerNorm of `norm_eps`."""
    return mixed(
        "soft_mixer",
        (q, v),
        as_it_lies(windows),
        norm_of(norm_weight, norm_bias, norm_eps),
        ctypes.c_float(scale),
        *long(steps),
        *map(ctypes.c_float, (ridge, start)),
        filters_of(weight, bias, filters, q),
        map_of(q, shape),
        *long(*windows.shape[2:]),
    )
