"""What lies around attention in a block, on CPUs.

Letters: b batch, n tokens, c channels, m hidden channels. Tokens and weights are fp32 or bf16, as the tokens are.
"""

from torch import Tensor

from subquad.kernels import layer_operators as operators
from subquad.kernels.cpu.library import kernel
from subquad.kernels.cpu.passing import norm_of, parameter_of, shape_of, tokens_of
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
