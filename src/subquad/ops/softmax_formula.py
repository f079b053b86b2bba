"""Softmax attention: o_i = sum_j softmax_j(s q_i·k_j) v_j, s = d^-1/2. Quadratic in n.

Vaswani et al. 2017, arXiv 1706.03762, eq. 1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from subquad import kernels
from subquad.errors import SubquadError
from subquad.kernels import Shapes
from subquad.ops.precision import in_fp32, of_widest_dtype
from subquad.tracing import has_forward_derivatives, is_exporting, is_traced, is_transformed

SHAPES = Shapes(
    "softmax attention",
    q="b h n d",
    k="b h m d",
    v="b h m d",
    forbidden="?b ?h ?n ?m|?h ?n ?m|?n ?m",
    bias="h n m|b h n m",
)
WEIGHTS_SHAPES = SHAPES.without("v")


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forbidden: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """(b, h, n_q, d) from q (b, h, n_q, d), k and v (b, h, n_k, d).

    `forbidden` is bool and broadcastable to (b, h, n_q, n_k): True where a query must not see a key. `bias`, (h, n_q,
    n_k) or (b, h, n_q, n_k), is added to the scores. A query that may see nothing gets zeros. Of PyTorch's fused forms
    gradients have no gradients: `sdpa_kernel(SDPBackend.MATH)` of torch.nn.attention around the call gives them.

    Raises:
        SubquadError: shapes do not fit, or `forbidden` is not bool.
    """
    SHAPES.check(q, k, v, forbidden, bias)
    if forbidden is not None and forbidden.dtype != torch.bool:
        raise SubquadError(
            f"forbidden pairs are True or False, got {forbidden.dtype}: what is added to scores is a bias"
        )
    pairs = tuple(None if x is None else x[(None,) * (4 - x.dim())] for x in (bias, forbidden))
    # it has a backend of its own, PyTorch
    return kernels.compute(kernels.softmax_attention, _softmax, (q, k, v, *pairs), backend=backend, optional=True)


def _softmax(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, forbidden: Tensor | None) -> Tensor:
    """The same of bias and forbidden pairs (b, h, n, m), broadcast."""
    dtype, (q, k, v) = q.dtype, of_widest_dtype(q, k, v)
    mask = None if forbidden is None else ~forbidden
    if bias is not None:
        bias = bias.to(q.dtype)
        mask = bias if forbidden is None else bias.masked_fill(forbidden, float("-inf"))
    if not is_traced() and (has_forward_derivatives() or (mask is not None and is_transformed())):
        # PyTorch's fused forms have none of these, nor gradients of a bias, which it does not see within vmap
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).to(dtype)
    return pytorch_softmax(q, k, v, mask).to(dtype)


def pytorch_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """PyTorch's softmax attention, of a mask that is True for what may be seen, or added to scores.

    Where torch.onnx writes it, what it is made of: what is known of fused forms is that tokens lie as these leave them,
    and those of torch.onnx do not.
    """
    if not (is_exporting() and torch.onnx.is_in_onnx_export()):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    root, wide = q.shape[-1] ** -0.25, torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) * root) @ (k.to(wide) * root).mT
    if mask is None:
        shares = scores.softmax(dim=-1)
    elif mask.dtype == torch.bool:
        # what sees nothing gets nothing
        shares = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1).masked_fill(~mask, 0)
    else:
        shares = (scores + mask).softmax(dim=-1).masked_fill(mask.isneginf(), 0)
    return (shares @ v.to(wide)).to(q.dtype)


@in_fp32
def softmax_weights(q: Tensor, k: Tensor, forbidden: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Explicit weights (b, h, n_q, n_k) of `softmax_attention`; a query that may see nothing gets zeros."""
    WEIGHTS_SHAPES.check(q, k, forbidden, bias)
    logits = q @ k.mT * q.shape[-1] ** -0.5
    if bias is not None:
        logits = logits + bias
    if forbidden is not None:
        logits = logits.masked_fill(forbidden, float("-inf"))
    # by the scores, not by what becomes of them: what is not a number stays so
    return logits.softmax(dim=-1).masked_fill(logits.isneginf().all(dim=-1, keepdim=True), 0)
