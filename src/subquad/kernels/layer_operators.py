"""Operators of what lies around attention in a block.

Letters: b batch, n tokens, c channels, m hidden channels.
"""

from typing import Any

from subquad.kernels.declaring import operator

MLP = {"x": "b n c", "norm_weight": "c", "norm_bias": "c"} | {"first": "m c", "first_bias": "m"}
MLP |= {"second": "c m", "second_bias": "c", "scale": "c"}


def _mlp(x: Any, norm_weight: Any, norm_bias: Any, first: Any, *rest: Any) -> int:
    """Two products of every token."""
    return 4 * x[0] * x[1] * x[2] * first[0]


# x + scale · (second gelu(first norm(x)))
mlp = operator(
    "an MLP with its norm and residual",
    "mlp(Tensor x, Tensor norm_weight, Tensor norm_bias, Tensor first, Tensor first_bias, Tensor second, "
    "Tensor second_bias, Tensor? scale, float eps)",
    MLP,
    _mlp,
    shape=lambda x, *rest: x.new_empty(x.shape),
    needs_all_tokens=False,
)
