"""Softmax attention, the baseline: every query weighs every key. Cost quadratic in n. arXiv 1706.03762."""

from torch import Tensor, nn

from subquad.attention.bricks import head_dim
from subquad.grid import TokenGrid
from subquad.ops import softmax_attention, softmax_weights


class SoftmaxAttention(nn.Module):
    """The only mechanism that can honour a `mask` over pairs."""

    inputs = ("q", "k", "v", "padding", "mask")

    def __init__(self, dim: int, num_heads: int, *, grid: TokenGrid, kv_grid: TokenGrid) -> None:
        super().__init__()
        head_dim(dim, num_heads)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        padding: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
    ) -> Tensor:
        return softmax_attention(q, k, v, forbidden(padding, mask))

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        padding: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
    ) -> Tensor:
        return softmax_weights(q, k, forbidden(padding, mask))[:, :, None]


def forbidden(padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Pairs that may not be attended, for either reason: broadcastable to (b, h, n_q, n_k)."""
    if padding is None:
        return mask
    keys = padding[:, None, None, :]
    return keys if mask is None else keys | mask
