"""InLine attention: linear attention normalised by subtraction. Linear in n: 2 n d² products a head, no division.

    w_ij = 1/n + (s/n) q_i·(k_j − k̄)        o_i = v̄ + s q_i Cov(k, v),  s = d^-1/2

Han et al. 2024, arXiv 2412.06590, eq. 5 (φ = identity, in the released scaling).
Rows sum to 1, entries may be negative.
"""

from torch import Tensor

from subquad import kernels
from subquad.ops.padding import count_tokens, mean_token, totals, zero_padding
from subquad.ops.precision import in_fp32

SHAPES = kernels.inline_attention.shapes.extended(padding="b m")
WEIGHTS_SHAPES = SHAPES.without("v")


def inline_attention(
    q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """(b, h, n_q, d) from q (b, h, n_q, d), k and v (b, h, n_k, d); `padding` (b, n_k)."""
    SHAPES.check(q, k, v, padding)
    return kernels.compute(kernels.inline_attention, _inline, (q, k, v), (), (padding,), backend=backend)


@in_fp32
def _inline(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None) -> Tensor:
    # keys are centred before the product: subtracting afterwards cancels when they share a large mean
    k = zero_padding(k - mean_token(k, padding), padding)
    v = zero_padding(v, padding)
    count, value_sum, products = totals(v, padding, v.sum(dim=-2, keepdim=True), k.mT @ v)
    return value_sum / count + q @ (products / count * q.shape[-1] ** -0.5)


@in_fp32
def inline_weights(q: Tensor, k: Tensor, padding: Tensor | None = None) -> Tensor:
    """Explicit weights (b, h, n_q, n_k) of `inline_attention`."""
    WEIGHTS_SHAPES.check(q, k, padding)
    k = k - mean_token(k, padding)
    weights = (1 + q @ k.mT * q.shape[-1] ** -0.5) / count_tokens(k, padding)
    return weights if padding is None else weights.masked_fill(padding[:, None, None, :], 0)
