"""Softmax-free attention on CPUs: landmarks and Newton's steps.

Letters: b batch, h heads, n tokens, d channels of a head, m landmarks.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from subquad.kernels import landmark_operators as operators
from subquad.kernels import mixer_operators
from subquad.kernels.cpu.calls import as_given, mixed
from subquad.kernels.cpu.library import kernel
from subquad.kernels.cpu.passing import (
    as_it_lies,
    filters_of,
    long,
    map_of,
    norm_of,
    numbers_of,
    of_one_dtype,
    parameter_of,
    shape_of,
    tokens_of,
)
from subquad.kernels.declaring import empty_tokens, implements


@implements(operators.soft_gather, "native")
def soft_gather(x: Tensor, landmarks: Tensor, v: Tensor, scale: float) -> Tensor:
    """κ(scale·x, landmarks)ᵀ v: (b, h, m, d), in fp32."""
    x, v = of_one_dtype(x, v)
    out = landmarks.new_empty(landmarks.shape, dtype=torch.float32)
    few = parameter_of(landmarks), *long(landmarks.shape[2])
    kernel("soft_gather", x.dtype)(
        shape_of(x, v), tokens_of(x), *few, tokens_of(v), ctypes.c_float(scale), numbers_of(out)
    )
    return out


@implements(operators.soft_spread, "native")
def soft_spread(x: Tensor, landmarks: Tensor, u: Tensor, scale: float) -> Tensor:
    """κ(scale·x, landmarks) u: (b, h, n, d)."""
    out = empty_tokens(x)
    few = parameter_of(landmarks), *long(landmarks.shape[2]), parameter_of(u)
    kernel("soft_spread", x.dtype)(shape_of(x, x), tokens_of(x), *few, ctypes.c_float(scale), tokens_of(out))
    return out


def _soft_gradient(
    x: Tensor, landmarks: Tensor, y: Tensor, few: Tensor, scale: float, *, gathered: bool
) -> tuple[Tensor, ...]:
    """To x and the landmarks, and to `y` (b, h, n, d) where these were gathered, else to `few` (b, h, m, d)."""
    given, (x, y) = (x, y), of_one_dtype(x, y)
    dx, dy = empty_tokens(x), empty_tokens(y) if gathered else None
    dlandmarks = landmarks.new_empty(landmarks.shape, dtype=torch.float32)
    dfew = None if gathered else torch.empty_like(dlandmarks)
    kernel("soft_gradient", x.dtype)(
        shape_of(x, y),
        tokens_of(x),
        parameter_of(landmarks),
        *long(landmarks.shape[2]),
        tokens_of(y),
        parameter_of(few),
        ctypes.c_float(scale),
        tokens_of(dx),
        numbers_of(dlandmarks),
        tokens_of(dy),
        numbers_of(dfew),
    )
    last, like = (dy, given[1]) if dy is not None else (dfew, few)
    assert last is not None
    return as_given((dx, dlandmarks, last), (given[0], landmarks, like))


@implements(operators.soft_gather_gradient, "native")
def soft_gather_gradient(grad: Tensor, x: Tensor, landmarks: Tensor, v: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Give the gradients of `soft_gather` to x, landmarks and v."""
    return _soft_gradient(x, landmarks, v, grad, scale, gathered=True)


@implements(operators.soft_spread_gradient, "native")
def soft_spread_gradient(grad: Tensor, x: Tensor, landmarks: Tensor, u: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Give the gradients of `soft_spread` to x, landmarks and u."""
    return _soft_gradient(x, landmarks, grad, u, scale, gathered=False)


@implements(operators.newton_inverse, "native")
def newton_inverse(gram: Tensor, alpha: Tensor, steps: int) -> Tensor:
    """From `alpha` (..., 1, 1) times `gram` (..., m, m), ridge included; in fp32 throughout."""
    out, m = gram.new_empty(gram.shape, dtype=torch.float32), gram.shape[-1]
    kernel("newton_inverse")(
        *map(parameter_of, (gram, alpha)),
        *long(gram.numel() // m**2, m),
        ctypes.c_int32(steps),
        numbers_of(out),
        ctypes.c_int32(torch.get_num_threads()),
    )
    return out.to(gram.dtype)


@implements(operators.newton_inverse_gradient, "native")
def newton_inverse_gradient(grad: Tensor, gram: Tensor, alpha: Tensor, steps: int) -> tuple[Tensor, ...]:
    """Give the gradients of `newton_inverse` to gram and alpha; both matrices are symmetric."""
    grads, m = tuple(x.new_empty(x.shape, dtype=torch.float32) for x in (gram, alpha)), gram.shape[-1]
    kernel("newton_inverse_gradient")(
        *map(parameter_of, (grad, gram, alpha)),
        *long(gram.numel() // m**2, m),
        ctypes.c_int32(steps),
        *map(numbers_of, grads),
        ctypes.c_int32(torch.get_num_threads()),
    )
    return as_given(grads, (gram, alpha))


def _no_window(q: Tensor, v: Tensor, windows: Tensor, *rest: Any) -> str | None:
    height, width = rest[4]
    if height < windows.shape[2] or width < windows.shape[3]:
        return f"a map of {height}×{width} is smaller than a window of {windows.shape[2]}×{windows.shape[3]}"
    return None


@implements(mixer_operators.soft_mixer, "native", cannot=_no_window)
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
