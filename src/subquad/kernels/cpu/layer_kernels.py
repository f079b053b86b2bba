"""What lies around attention in a block, on CPUs, settled with its parameters: see `subquad.kernels.settling`.

Letters: b batch, n tokens, c channels, m hidden channels. Tokens and weights are fp32 or bf16, as the tokens are.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from subquad.kernels import layer_operators as operators
from subquad.kernels.cpu.library import kernel
from subquad.kernels.cpu.passing import (
    as_it_lies,
    images_of,
    long,
    norm_of,
    numbers_of,
    parameter_of,
    rows_of,
    weight_of,
)
from subquad.kernels.cpu.states import FEATURES
from subquad.kernels.declaring import settles


@settles(operators.mlp, "native")
def mlp(
    dtype: torch.dtype,
    norm_weight: Tensor,
    norm_bias: Tensor,
    first: Tensor,
    first_bias: Tensor,
    second: Tensor,
    second_bias: Tensor,
    scale: Tensor | None,
    eps: float,
) -> Callable[[Tensor], Tensor]:
    """See subquad.ops.mlp_branch."""
    norm = norm_of(norm_weight, norm_bias, eps)
    inner, outer = (weight_of(weight.to(dtype)) for weight in (first, second))
    inner_bias, *behind = map(as_it_lies, (first_bias, second_bias, scale))
    compute = kernel("mlp", dtype)

    def settled(x: Tensor) -> Tensor:
        out = x.new_empty(x.shape)
        tokens, shape = rows_of(x)
        compute(shape, tokens, norm, inner, inner_bias, outer, *behind, rows_of(out)[0])
        return out

    return settled


@settles(operators.linear_branch_sums, "native")
def linear_branch_sums(
    dtype: torch.dtype,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    num_heads: int,
    feature_map: str,
    norm_eps: float,
) -> Callable[[Tensor], Tensor]:
    """See subquad.ops.branch_at_once."""
    # rounded weights would err alike for all tokens, which a sum shows
    computed = dtype if weight.dtype == dtype else torch.float32
    parameters = norm_of(norm_weight, norm_bias, norm_eps), weight_of(weight.to(computed)), as_it_lies(bias)
    behind = *long(num_heads), ctypes.c_int32(FEATURES[feature_map])
    compute = kernel("linear_branch_sums", computed)

    def settled(x: Tensor) -> Tensor:
        out = operators.empty_states(x, num_heads)
        tokens, shape = images_of(x.to(computed))
        compute(shape, tokens, *parameters, numbers_of(out), *behind)
        return out

    return settled


@settles(operators.linear_branch_answers, "native", moving=("x", "sums"))
def linear_branch_answers(
    dtype: torch.dtype,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    proj: Tensor,
    proj_bias: Tensor | None,
    scale: Tensor | None,
    count: int,
    feature_map: str,
    norm_eps: float,
    eps: float,
) -> Callable[[Tensor, Tensor], Tensor]:
    """See subquad.ops.branch_at_once."""
    queries, behind = (weight_of(one.to(dtype)) for one in (weight, proj))
    before = norm_of(norm_weight, norm_bias, norm_eps), queries, as_it_lies(bias)
    after = behind, *map(as_it_lies, (proj_bias, scale))
    feature, floor = ctypes.c_int32(FEATURES[feature_map]), ctypes.c_float(eps)
    compute = kernel("linear_branch_answers", dtype)

    def settled(x: Tensor, sums: Tensor) -> Tensor:
        out = x.new_empty(x.shape)
        tokens, shape = images_of(x)
        heads_and_count = long(sums.shape[1], count)
        compute(shape, tokens, *before, parameter_of(sums), *after, images_of(out)[0], *heads_and_count, feature, floor)
        return out

    return settled


@settles(operators.norm_projection, "native")
def norm_projection(
    dtype: torch.dtype,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    keeps: bool,
) -> Callable[[Tensor], Tensor]:
    """See subquad.ops.branch_at_once."""
    parameters = norm_of(norm_weight, norm_bias, eps), weight_of(weight.to(dtype)), as_it_lies(bias)
    compute = kernel("norm_projection", dtype)

    def settled(x: Tensor) -> Tensor:
        out = operators.empty_projection(x, weight, keeps)
        tokens, shape = rows_of(x)
        compute(shape, tokens, *parameters, rows_of(out)[0])
        return out

    return settled


@settles(operators.projection_residual, "native", moving=("x", "y"))
def projection_residual(
    dtype: torch.dtype, weight: Tensor, bias: Tensor | None, scale: Tensor | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """See subquad.ops.branch_at_once."""
    parameters = weight_of(weight.to(dtype)), *map(as_it_lies, (bias, scale))
    compute = kernel("projection_residual", dtype)

    def settled(x: Tensor, y: Tensor) -> Tensor:
        out = x.new_empty(x.shape)
        tokens, shape = rows_of(x)
        compute(shape, tokens, rows_of(y.to(dtype))[0], *parameters, rows_of(out)[0])
        return out

    return settled
