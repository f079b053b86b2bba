"""What lies around attention in a block, and in front of all blocks, on CPUs.

Letters: b batch, n tokens, c channels, m hidden channels. Tokens and weights are fp32 or bf16, as the tokens are.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from subquad.kernels import layer_operators as operators
from subquad.kernels.cpu.library import kernel
from subquad.kernels.cpu.passing import (
    ACTIVATIONS,
    Tokens,
    as_it_lies,
    images_of,
    long,
    norm_of,
    numbers_of,
    of_one_dtype,
    parameter_of,
    rows_of,
    shape_of,
    tokens_of,
    turning_of,
    weight_of,
)
from subquad.kernels.cpu.states import FEATURES
from subquad.kernels.declaring import empty_tokens, implements


@implements(operators.mlp, "native")
def mlp(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    first: Tensor,
    first_bias: Tensor,
    second: Tensor,
    second_bias: Tensor,
    scale: Tensor | None,
    activation: str,
    eps: float,
) -> Tensor:
    """See subquad.ops.mlp_branch."""
    out = x.new_empty(x.shape)
    tokens, shape = rows_of(x)
    inner, outer = (weight_of(weight.to(x.dtype)) for weight in (first, second))
    inner_bias, *behind = map(as_it_lies, (first_bias, second_bias, scale))
    norm = norm_of(norm_weight, norm_bias, eps)
    number = ctypes.c_int32(ACTIVATIONS[activation])
    kernel("mlp", x.dtype)(shape, tokens, norm, inner, inner_bias, outer, *behind, rows_of(out)[0], number)
    return out


@implements(operators.linear_branch_sums, "native")
def linear_branch_sums(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    num_heads: int,
    feature_map: str,
    norm_eps: float,
) -> Tensor:
    """See subquad.ops.branch_at_once."""
    # rounded weights would err alike for all tokens, which a sum shows
    dtype = x.dtype if weight.dtype == x.dtype else torch.float32
    out = operators.empty_states(x, num_heads)
    tokens, shape = images_of(x.to(dtype))
    parameters = norm_of(norm_weight, norm_bias, norm_eps), weight_of(weight.to(dtype)), as_it_lies(bias)
    settings = *long(num_heads), ctypes.c_int32(FEATURES[feature_map])
    kernel("linear_branch_sums", dtype)(shape, tokens, *parameters, numbers_of(out), *settings)
    return out


@implements(operators.linear_branch_answers, "native")
def linear_branch_answers(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sums: Tensor,
    proj: Tensor,
    proj_bias: Tensor | None,
    scale: Tensor | None,
    count: int,
    feature_map: str,
    norm_eps: float,
    eps: float,
) -> Tensor:
    """See subquad.ops.branch_at_once."""
    out = x.new_empty(x.shape)
    tokens, shape = images_of(x)
    queries, behind = (weight_of(one.to(x.dtype)) for one in (weight, proj))
    before = norm_of(norm_weight, norm_bias, norm_eps), queries, as_it_lies(bias), parameter_of(sums)
    after = behind, *map(as_it_lies, (proj_bias, scale)), images_of(out)[0]
    settings = *long(sums.shape[1], count), ctypes.c_int32(FEATURES[feature_map]), ctypes.c_float(eps)
    kernel("linear_branch_answers", x.dtype)(shape, tokens, *before, *after, *settings)
    return out


@implements(operators.norm_projection, "native")
def norm_projection(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    keeps: bool,
    activation: str,
) -> Tensor:
    """See subquad.ops.branch_at_once."""
    out = operators.empty_projection(x, weight, keeps)
    tokens, shape = rows_of(x)
    parameters = norm_of(norm_weight, norm_bias, eps), weight_of(weight.to(x.dtype)), as_it_lies(bias)
    number = ctypes.c_int32(ACTIVATIONS[activation])
    kernel("norm_projection", x.dtype)(shape, tokens, *parameters, rows_of(out)[0], number)
    return out


@implements(operators.projection_residual, "native")
def projection_residual(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    """See subquad.ops.branch_at_once."""
    out = x.new_empty(x.shape)
    tokens, shape = rows_of(x)
    parameters = weight_of(weight.to(x.dtype)), *map(as_it_lies, (bias, scale))
    kernel("projection_residual", x.dtype)(shape, tokens, rows_of(y.to(x.dtype))[0], *parameters, rows_of(out)[0])
    return out


@implements(operators.turned, "native")
def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """See subquad.ops.turning."""
    out = empty_tokens(x)
    kernel("turned", x.dtype)(
        shape_of(x, x), tokens_of(x), turning_of(cos, sin), ctypes.c_int32(interleaved), tokens_of(out)
    )
    return out


def _tables_learn(*arguments: Any) -> str | None:
    *_, cos, sin, _ = arguments
    return "tables that learn get no gradient there" if cos.requires_grad or sin.requires_grad else None


@implements(operators.turned_gradient, "native", cannot=_tables_learn)
def turned_gradient(grad: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turned back: what a channel gave its partner comes from there."""
    operators.turned_gradient.shapes.check(grad, x, cos, sin)
    partners = sin.unflatten(-1, (-1, 2) if interleaved else (2, -1)).flip(-1 if interleaved else -2).flatten(-2)
    grad, _ = of_one_dtype(grad, x)
    return turned(grad, cos, partners, interleaved).to(x.dtype)


@implements(operators.patch_tokens, "native")
def patch_tokens(
    image: Tensor, weight: Tensor, bias: Tensor | None, prefix: Tensor | None, positions: Tensor | None
) -> Tensor:
    """See subquad.ops.patch_tokens."""
    image, out = image.contiguous(), operators.empty_patch_tokens(image, weight, prefix)
    tokens, shape = images_of(out)
    before, places = (
        Tokens() if one is None else weight_of(one.flatten(0, 1).to(image.dtype)) for one in (prefix, positions)
    )
    parameters = weight_of(weight.flatten(1).to(image.dtype)), as_it_lies(bias), before, places
    kernel("patch_tokens", image.dtype)(shape, tokens_of(image), *long(weight.shape[2]), *parameters, tokens)
    return out
