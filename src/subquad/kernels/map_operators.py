"""Operators of what is computed on the map: the local branch, means over bins, windows.

Letters: b batch, h heads, n tokens, d channels of a head, a bins, m windows. `shape` is (height, width) of the map;
tokens in front of it are its prefix.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.declaring import Settings, Tensors, empty_tokens, operator

FILTERS = "h*d k k|b h*d k k"
"""Depthwise: one for each channel, or for each channel of each image."""


def _filter(v: Any, weight: Any, height: int, width: int) -> int:
    """A depthwise convolution of the map."""
    return 2 * v[0] * v[1] * v[3] * height * width * weight[-1] * weight[-2]


# y ← (y + depthwise of v on its map) · g
local_branch = operator(
    "the local branch",
    "local_branch(Tensor(a!) y, Tensor v, Tensor? g, Tensor weight, Tensor? bias, int[] shape)",
    {"y": "b h n d", "v": "b h n d", "g": "b h n d", "weight": FILTERS, "bias": "h*d"},
    lambda y, v, g, weight, bias, shape: _filter(v, weight, *shape),
    result="()",
    changes_first=True,
)

# to v, the weight and a bias
depthwise_gradient = operator(
    "the gradient of the local branch",
    "depthwise_gradient(Tensor grad, Tensor v, Tensor weight, int[] shape)",
    {"grad": "b h n d", "v": "b h n d", "weight": FILTERS},
    lambda grad, v, weight, shape: 2 * _filter(v, weight, *shape),
    shape=lambda grad, v, weight, shape: (
        empty_tokens(v),
        weight.new_empty(weight.shape),
        weight.new_empty(weight.shape[-3]),
    ),
    result="(Tensor, Tensor, Tensor)",
)


def _depthwise_backward(
    gradient: Callable[..., Any], grad: Tensor, tensors: Tensors, settings: Settings
) -> tuple[Tensor | None, ...]:
    v, weight, bias = tensors
    dv, dweight, dbias = gradient(grad, v, weight, *settings)
    return dv, dweight, None if bias is None else dbias


# 0 for tokens of the prefix
depthwise = operator(
    "the local branch",
    "depthwise(Tensor v, Tensor weight, Tensor? bias, int[] shape)",
    {"v": "b h n d", "weight": FILTERS, "bias": "h*d"},
    lambda v, weight, bias, shape: _filter(v, weight, *shape),
    gradient=depthwise_gradient,
    backward=_depthwise_backward,
)

# activation([x +] depthwise of x on its map); tokens of the prefix stay where it adds, or are 0
map_filter = operator(
    "a depthwise convolution of tokens with what stands around it",
    "map_filter(Tensor x, Tensor weight, Tensor? bias, int[] shape, bool adds, str activation)",
    {"x": "b n c", "weight": "c k k", "bias": "c"},
    lambda x, weight, bias, shape, *rest: 2 * x[0] * x[2] * shape[0] * shape[1] * weight[1] * weight[2],
    shape=lambda x, *rest: x.new_empty(x.shape),
)

map_products_gradient = operator(
    "the gradient of products of two maps",
    "map_products_gradient(Tensor grad, Tensor k, Tensor v, int size, int[] shape)",
    {"grad": "b t c", "k": "b h n d", "v": "b h n d"},
    lambda grad, k, v, size, shape: 4 * grad[0] * grad[1] * grad[2] * shape[0] * shape[1],
    shape=lambda grad, k, v, size, shape: (empty_tokens(k), empty_tokens(v)),
    result="(Tensor, Tensor)",
)

# Σ_p k[p + t] v[p] of each channel, (b, t, h·d): what a depthwise kernel of `size` rows and columns is taught by v
map_products = operator(
    "products of two maps",
    "map_products(Tensor k, Tensor v, int size, int[] shape)",
    {"k": "b h n d", "v": "b h n d"},
    lambda k, v, size, shape: 2 * k[0] * k[1] * k[3] * size**2 * shape[0] * shape[1],
    shape=lambda k, v, size, shape: k.new_empty(k.shape[0], size**2, k.shape[1] * k.shape[3], dtype=torch.float32),
    gradient=map_products_gradient,
    sums_in_fp32=True,
    gives_fp32=True,
)

pool_gradient = operator(
    "the gradient of means over the map",
    "pool_gradient(Tensor grad, Tensor x, int[] shape, int[] bins)",
    {"grad": "b h a d", "x": "b h n d"},
    shape=lambda grad, x, *rest: empty_tokens(x),
)

# means (b, h, a, d) of the tokens on a map over its adaptive bins
pool = operator(
    "means over the map",
    "pool(Tensor x, int[] shape, int[] bins)",
    {"x": "b h n d"},
    shape=lambda x, shape, bins: x.new_empty(*x.shape[:2], bins[0] * bins[1], x.shape[3]),
    gradient=pool_gradient,
)


def empty_windows(x: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    """Room for the windows' tokens (b, h, m, d)."""
    count = height // weight.shape[2] * (width // weight.shape[3])
    return x.new_empty(*x.shape[:2], count, weight.shape[0])


# a convolution (d, d, i, j) of each head's map whose windows lie side by side: (b, h, m, d)
convolve_windows = operator(
    "a convolution of windows",
    "convolve_windows(Tensor x, Tensor weight, int height, int width)",
    {"x": "b h n d", "weight": "d d i j"},
    lambda x, weight, height, width: 2 * x[0] * x[1] * height * width * weight[0] * weight[1],
    shape=empty_windows,
)
