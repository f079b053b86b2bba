"""Softmax attention, the baseline: every query weighs every key. Cost quadratic in n. arXiv 1706.03762."""

from torch import Tensor, nn

from subquad.attention.bricks import check_tokens, head_dim, silence
from subquad.attention.key_removal import renormalised
from subquad.attention.traits import Traits
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.ops import softmax_attention, softmax_weights
from subquad.ops.padding import zero_padding
from subquad.positions import RelativeBias
from subquad.ranges import Positive, checks_arguments


class SoftmaxAttention(nn.Module):
    """The only mechanism that can honour a `mask` over pairs.

    `relative_bias` adds a learned number for each offset between query and key (Swin, arXiv 2103.14030, eq. 4).
    """

    inputs = ("q", "k", "v", "padding", "mask")
    traits = Traits(
        label="softmax",
        quadratic=True,
        start_quietly=lambda new: silence(new.relative_bias),
        key_removal=renormalised,
        in_hosts={"swin": {"relative_bias": True}},
        no_streaming="every query looks at every key, and no state of a fixed size stands for the keys",
        colour="#3a3f4a",
    )

    @checks_arguments
    def __init__(
        self, dim: Positive, num_heads: Positive, *, grid: TokenGrid, kv_grid: TokenGrid, relative_bias: bool = False
    ) -> None:
        super().__init__()
        head_dim(dim, num_heads)
        if relative_bias and grid != kv_grid:
            raise SubquadError(f"a relative bias is of one grid, not of {grid} for queries and {kv_grid} for keys")
        self.relative_bias = RelativeBias(num_heads, grid) if relative_bias else None

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
        check_tokens(q, k, grid=grid, kv_grid=kv_grid)
        # a weight of nothing makes nothing of any number, but not of NaN
        k, v = zero_padding(k, padding), zero_padding(v, padding)
        return softmax_attention(q, k, v, forbidden(padding, mask), self._bias(grid))

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
        check_tokens(q, k, grid=grid, kv_grid=kv_grid)
        return softmax_weights(q, zero_padding(k, padding), forbidden(padding, mask), self._bias(grid))[:, :, None]

    def _bias(self, grid: TokenGrid) -> Tensor | None:
        return None if self.relative_bias is None else self.relative_bias(grid)


def forbidden(padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Pairs that may not be attended, for either reason: broadcastable to (b, h, n_q, n_k)."""
    if padding is None:
        return mask
    keys = padding[:, None, None, :]
    return keys if mask is None else keys | mask
