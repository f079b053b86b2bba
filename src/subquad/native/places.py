"""What is computed on the map, as operators: the local branch, means over bins, windows.

Letters: b batch, h heads, n tokens, d channels of a head, a bins, m windows. `shape` is (height, width) of the map;
tokens in front of it are its prefix.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from subquad.native.calls import Map, empty_tokens, long, operator, pointer_to, shape_of, tokens_of
from subquad.native.library import library


def _filter(v: Any, weight: Any, height: int, width: int) -> int:
    """A depthwise convolution of the map."""
    return 2 * v[0] * v[1] * v[3] * height * width * weight[-1] * weight[-2]


def _run_branch(
    out: Tensor, y: Tensor | None, v: Tensor, g: Tensor | None, weight: Tensor, bias: Tensor | None, shape: list[int]
) -> None:
    taps = weight.flatten(-2).mT.contiguous()
    height, width = shape
    library().local_branch(
        shape_of(out, v),
        *map(tokens_of, (v, y, g, out)),
        Map(height, width, out.shape[2] - height * width),
        pointer_to(taps),
        *long(taps.stride(0) if taps.dim() == 3 else 0),
        pointer_to(None if bias is None else bias.contiguous()),
        ctypes.c_int32(weight.shape[-1]),
    )


@operator(
    "local_branch(Tensor(a!) y, Tensor v, Tensor? g, Tensor weight, Tensor? bias, int[] shape)",
    lambda y, v, g, weight, bias, shape: _filter(v, weight, *shape),
    shape=None,
    result="()",
)
def local_branch(y: Tensor, v: Tensor, g: Tensor | None, weight: Tensor, bias: Tensor | None, shape: list[int]) -> None:
    """Y ← (y + depthwise of v on its map) · g, from weight (h·d, k, k), or (b, h·d, k, k) of each image's own."""
    _run_branch(y, y, v, g, weight, bias, shape)


@operator(
    "depthwise(Tensor v, Tensor weight, Tensor? bias, int[] shape)",
    lambda v, weight, bias, shape: _filter(v, weight, *shape),
)
def depthwise(v: Tensor, weight: Tensor, bias: Tensor | None, shape: list[int]) -> Tensor:
    """Depthwise convolution of the values on their map; 0 for tokens of the prefix."""
    out = empty_tokens(v)
    _run_branch(out, None, v, None, weight, bias, shape)
    return out


def _like_filter(weight: Tensor) -> tuple[Tensor, Tensor]:
    return weight.new_empty(weight.shape), weight.new_empty(weight.shape[-3])


@operator(
    "depthwise_gradient(Tensor grad, Tensor v, Tensor weight, int[] shape)",
    lambda grad, v, weight, shape: 2 * _filter(v, weight, *shape),
    shape=lambda grad, v, weight, shape: (
        empty_tokens(v),
        torch.empty_like(weight),
        weight.new_empty(weight.shape[-3]),
    ),
    result="(Tensor, Tensor, Tensor)",
)
def depthwise_gradient(grad: Tensor, v: Tensor, weight: Tensor, shape: list[int]) -> tuple[Tensor, ...]:
    """Of `depthwise`, to v, the weight and a bias."""
    dv, bias = depthwise(grad, weight.flip(-1, -2), None, shape), weight.new_zeros(weight.shape[-3])
    taps = weight.new_zeros(*weight.shape[:-3], weight.shape[-1] ** 2, weight.shape[-3])
    height, width = shape
    library().local_branch_gradient(
        shape_of(v, v),
        *map(tokens_of, (v, grad)),
        Map(height, width, v.shape[2] - height * width),
        pointer_to(taps),
        *long(taps.stride(0) if taps.dim() == 3 else 0),
        pointer_to(bias),
        ctypes.c_int32(weight.shape[-1]),
    )
    return dv, taps.mT.unflatten(-1, weight.shape[-2:]).contiguous(), bias


@operator(
    "pool(Tensor x, int[] shape, int[] bins)",
    shape=lambda x, shape, bins: x.new_empty(*x.shape[:2], bins[0] * bins[1], x.shape[3]),
)
def pool(x: Tensor, shape: list[int], bins: list[int]) -> Tensor:
    """Means (b, h, a, d) of the tokens on a map over its adaptive bins."""
    height, width = shape
    out = x.new_empty(*x.shape[:2], bins[0] * bins[1], x.shape[3])
    grid = Map(height, width, x.shape[2] - height * width)
    library().pool(shape_of(x, x), tokens_of(x), grid, *long(*bins), pointer_to(out))
    return out


@operator("pool_gradient(Tensor grad, Tensor x, int[] shape, int[] bins)", shape=lambda grad, x, *rest: empty_tokens(x))
def pool_gradient(grad: Tensor, x: Tensor, shape: list[int], bins: list[int]) -> Tensor:
    """Of `pool`, to x."""
    height, width = shape
    dx = empty_tokens(x).zero_()
    grid = Map(height, width, x.shape[2] - height * width)
    library().pool_gradient(shape_of(x, x), pointer_to(grad.contiguous()), grid, *long(*bins), tokens_of(dx))
    return dx


def _empty_windows(x: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    count = height // weight.shape[2] * (width // weight.shape[3])
    return x.new_empty(*x.shape[:2], count, weight.shape[0])


@operator(
    "convolve_windows(Tensor x, Tensor weight, int height, int width)",
    lambda x, weight, height, width: 2 * x[0] * x[1] * height * width * weight[0] * weight[1],
    shape=_empty_windows,
)
def convolve_windows(x: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    """A convolution (d, d, i, j) of each head's map whose windows lie side by side: (b, h, m, d)."""
    out = _empty_windows(x, weight, height, width)
    grid = Map(height, width, x.shape[2] - height * width)
    windows = *long(*weight.shape[2:]), pointer_to(weight.permute(2, 3, 1, 0).contiguous())
    library().convolve_windows(shape_of(x, x), tokens_of(x), grid, *windows, pointer_to(out))
    return out
