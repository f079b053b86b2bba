"""What lies around attention in a block, on CPUs.

Letters: b batch, n tokens, c channels, m hidden channels. Tokens and weights are fp32 or bf16, as the tokens are.
"""

import ctypes

from torch import Tensor

from subquad.kernels import layer_operators as operators
from subquad.kernels.cpu.library import kernel
from subquad.kernels.cpu.passing import long, norm_of, numbers_of, of_one_dtype, parameter_of, shape_of, tokens_of
from subquad.kernels.cpu.states import FEATURES
from subquad.kernels.declaring import implements


def _one_head(x: Tensor) -> Tensor:
    """Rows (n, c) as the tokens of one head."""
    return x.contiguous()[None, None]


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
    eps: float,
) -> Tensor:
    """See subquad.ops.mlp_branch."""
    out = x.new_empty(x.shape)
    tokens = _one_head(x.flatten(0, 1))
    inner, outer = (_one_head(weight.to(x.dtype)) for weight in (first, second))
    kernel("mlp", x.dtype)(
        shape_of(tokens, tokens),
        tokens_of(tokens),
        norm_of(norm_weight, norm_bias, eps),
        tokens_of(inner),
        parameter_of(first_bias),
        tokens_of(outer),
        *map(parameter_of, (second_bias, scale)),
        tokens_of(_one_head(out.flatten(0, 1))),
    )
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
    out = operators.empty_states(x, num_heads)
    # rounded weights would err alike for all tokens, which a sum shows
    x, weight = of_one_dtype(x, weight)
    tokens, rows = x.contiguous()[:, None], _one_head(weight)
    kernel("linear_branch_sums", x.dtype)(
        shape_of(tokens, tokens),
        tokens_of(tokens),
        norm_of(norm_weight, norm_bias, norm_eps),
        tokens_of(rows),
        parameter_of(bias),
        numbers_of(out),
        *long(num_heads),
        ctypes.c_int32(FEATURES[feature_map]),
    )
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
    tokens = x.contiguous()[:, None]
    queries, behind = (_one_head(one.to(x.dtype)) for one in (weight, proj))
    kernel("linear_branch_answers", x.dtype)(
        shape_of(tokens, tokens),
        tokens_of(tokens),
        norm_of(norm_weight, norm_bias, norm_eps),
        tokens_of(queries),
        parameter_of(bias),
        parameter_of(sums),
        tokens_of(behind),
        *map(parameter_of, (proj_bias, scale)),
        tokens_of(out[:, None]),
        *long(sums.shape[1], count),
        ctypes.c_int32(FEATURES[feature_map]),
        ctypes.c_float(eps),
    )
    return out


@implements(operators.norm_projection, "native")
def norm_projection(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, bias: Tensor | None, eps: float, keeps: bool
) -> Tensor:
    """See subquad.ops.branch_at_once."""
    out = operators.empty_projection(x, weight, keeps)
    # names, as what is handed over has to live as long as the call
    tokens, rows = _one_head(x.flatten(0, 1)), _one_head(weight.to(x.dtype))
    kernel("norm_projection", x.dtype)(
        shape_of(tokens, tokens),
        tokens_of(tokens),
        norm_of(norm_weight, norm_bias, eps),
        tokens_of(rows),
        parameter_of(bias),
        tokens_of(_one_head(out.flatten(0, 1))),
    )
    return out


@implements(operators.projection_residual, "native")
def projection_residual(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    """See subquad.ops.branch_at_once."""
    out = x.new_empty(x.shape)
    tokens, mixed = (_one_head(some.flatten(0, 1)) for some in (x, y.to(x.dtype)))
    rows = _one_head(weight.to(x.dtype))
    kernel("projection_residual", x.dtype)(
        shape_of(tokens, tokens),
        tokens_of(tokens),
        tokens_of(mixed),
        tokens_of(rows),
        *map(parameter_of, (bias, scale)),
        tokens_of(_one_head(out.flatten(0, 1))),
    )
    return out
