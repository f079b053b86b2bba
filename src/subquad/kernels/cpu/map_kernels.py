"""What is computed on the map, on CPUs: the local branch, means over bins, windows.

Letters: b batch, h heads, n tokens, d channels of a head, a bins, m windows. `shape` is (height, width) of the map;
tokens in front of it are its prefix. Tokens are fp32 or bf16, and what is given back has the dtype of the first of
them; weights and whatever is summed are fp32.
"""

import ctypes
import math

import torch
from torch import Tensor

from subquad.errors import SubquadError
from subquad.kernels import map_operators as operators
from subquad.kernels.cpu.library import kernel
from subquad.kernels.cpu.passing import (
    ACTIVATIONS,
    as_it_lies,
    long,
    map_of,
    numbers_of,
    of_one_dtype,
    parameter_of,
    shape_of,
    tokens_of,
)
from subquad.kernels.declaring import empty_tokens, implements


def _run_branch(
    out: Tensor,
    y: Tensor | None,
    v: Tensor,
    g: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    shape: list[int],
    activation: str = "nothing",
) -> None:
    kernel("local_branch", out.dtype)(
        shape_of(out, v),
        *map(tokens_of, (v, y, g, out)),
        map_of(out, shape),
        as_it_lies(weight),
        *long(len(weight) if weight.dim() == 4 else 0),
        as_it_lies(bias),
        ctypes.c_int32(weight.shape[-1]),
        ctypes.c_int32(ACTIVATIONS[activation]),
    )


@implements(operators.local_branch, "native")
def local_branch(y: Tensor, v: Tensor, g: Tensor | None, weight: Tensor, bias: Tensor | None, shape: list[int]) -> None:
    """Y ← (y + depthwise of v on its map) · g, from weight (h·d, k, k), or (b, h·d, k, k) of each image's own."""
    summed, v, g = of_one_dtype(y, v, g)
    _run_branch(summed, summed, v, g, weight, bias, shape)
    if summed is not y:
        y.copy_(summed)


@implements(operators.depthwise, "native")
def depthwise(v: Tensor, weight: Tensor, bias: Tensor | None, shape: list[int]) -> Tensor:
    """Depthwise convolution of the values on their map; 0 for tokens of the prefix."""
    out = empty_tokens(v)
    _run_branch(out, None, v, None, weight, bias, shape)
    return out


@implements(operators.map_filter, "native")
def map_filter(x: Tensor, weight: Tensor, bias: Tensor | None, shape: list[int], adds: bool, activation: str) -> Tensor:
    """See subquad.ops.branch_at_once."""
    # tokens that a convolution made lie channel by channel
    out, image = x.new_empty(x.shape), x.contiguous()[:, None]
    _run_branch(out[:, None], image if adds else None, image, None, weight, bias, shape, activation)
    return out


def _run_gradient(taps: Tensor, v: Tensor, grad: Tensor, shape: list[int]) -> Tensor:
    """Add to taps (k², h·d), or (b, k², h·d), the gradient of a depthwise weight; give that of its bias."""
    bias = taps.new_zeros(taps.shape[-1])
    kernel("local_branch_gradient", v.dtype)(
        shape_of(v, v),
        *map(tokens_of, (v, grad)),
        map_of(v, shape),
        numbers_of(taps),
        *long(taps.stride(0) if taps.dim() == 3 else 0),
        numbers_of(bias),
        ctypes.c_int32(math.isqrt(taps.shape[-2])),
    )
    return bias


LARGEST_LEARNED = 9
"""The largest kernel whose gradient fits the registers of the loops that were written for it."""


def _too_large(v: Tensor, weight: Tensor, bias: Tensor | None, shape: list[int]) -> str | None:
    if weight.shape[-1] <= LARGEST_LEARNED:
        return None
    return f"a kernel of {weight.shape[-1]} has no gradient there, only those up to {LARGEST_LEARNED}"


@implements(operators.depthwise_gradient, "native", cannot=_too_large)
def depthwise_gradient(grad: Tensor, v: Tensor, weight: Tensor, shape: list[int]) -> tuple[Tensor, ...]:
    """Give the gradients of `depthwise` to v, the weight and a bias."""
    dtype, (v, grad) = v.dtype, of_one_dtype(v, grad)
    dv, fp32 = depthwise(grad, weight.flip(-1, -2), None, shape), torch.float32
    taps = weight.new_zeros(*weight.shape[:-3], weight.shape[-1] ** 2, weight.shape[-3], dtype=fp32)
    bias = _run_gradient(taps, v, grad, shape)
    dweight = taps.mT.unflatten(-1, weight.shape[-2:]).contiguous()
    return dv.to(dtype), dweight.to(weight.dtype), bias.to(weight.dtype)


def _not_learned(k: Tensor, v: Tensor, size: int, shape: list[int]) -> str | None:
    if size % 2 and size <= LARGEST_LEARNED:
        return None
    return f"it has kernels of an odd number of rows up to {LARGEST_LEARNED}, not of {size}"


@implements(operators.map_products, "native", cannot=_not_learned)
def map_products(k: Tensor, v: Tensor, size: int, shape: list[int]) -> Tensor:
    """Products (b, size², h·d) of a map with one that is shifted by each tap of a kernel, summed over places."""
    k, v = of_one_dtype(k, v)
    taps = k.new_zeros(k.shape[0], size**2, k.shape[1] * k.shape[3], dtype=torch.float32)
    _run_gradient(taps, k, v, shape)
    return taps


@implements(operators.map_products_gradient, "native")
def map_products_gradient(grad: Tensor, k: Tensor, v: Tensor, size: int, shape: list[int]) -> tuple[Tensor, Tensor]:
    """Give the gradients of `map_products`: depthwise convolutions of one map with each image's products."""
    if k.shape != v.shape:
        raise SubquadError(f"products of two maps are of maps of one shape, not of {(*k.shape,)} and {(*v.shape,)}")
    weight = grad.unflatten(1, (size, size)).permute(0, 3, 1, 2)
    dk = depthwise(v, weight.flip(-1, -2), None, shape)
    return dk.to(k.dtype), depthwise(k, weight, None, shape).to(v.dtype)


@implements(operators.pool, "native")
def pool(x: Tensor, shape: list[int], bins: list[int]) -> Tensor:
    """Means (b, h, a, d) of the tokens on a map over its adaptive bins."""
    out = x.new_empty(*x.shape[:2], bins[0] * bins[1], x.shape[3])
    grid = map_of(x, shape)
    kernel("pool", x.dtype)(shape_of(x, x), tokens_of(x), grid, *long(*bins), tokens_of(out))
    return out


@implements(operators.pool_gradient, "native")
def pool_gradient(grad: Tensor, x: Tensor, shape: list[int], bins: list[int]) -> Tensor:
    """Give the gradient of `pool` to x."""
    dtype, (x, grad) = x.dtype, of_one_dtype(x, grad)
    dx = empty_tokens(x)
    grid = map_of(x, shape)
    kernel("pool_gradient", x.dtype)(shape_of(x, x), tokens_of(grad), grid, *long(*bins), tokens_of(dx))
    return dx.to(dtype)


@implements(operators.convolve_windows, "native")
def convolve_windows(x: Tensor, weight: Tensor, height: int, width: int) -> Tensor:
    """A convolution (d, d, i, j) of each head's map whose windows lie side by side: (b, h, m, d)."""
    out = operators.empty_windows(x, weight, height, width)
    grid = map_of(x, (height, width))
    windows = *long(*weight.shape[2:]), parameter_of(weight.permute(2, 3, 1, 0))
    kernel("convolve_windows", x.dtype)(shape_of(x, x), tokens_of(x), grid, *windows, tokens_of(out))
    return out
