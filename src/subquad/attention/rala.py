"""Rank-augmented linear attention (RALA): keys weighted against the mean query; with a gate and a local branch.

Cost 2 n d² + 2 n d a head. Fan et al. 2025, arXiv 2411.07635.
"""

from torch import Tensor, nn

from subquad.attention.bricks import LocalConv, check_tokens, finish, finish_rows, head_dim, silence, values_beside
from subquad.attention.key_removal import renormalised
from subquad.attention.sweeps import State, Streaming, Sweep
from subquad.attention.traits import Traits
from subquad.grid import GridRows, TokenGrid
from subquad.ops import rala_attention, rala_weights
from subquad.ops.rala_formula import rala_answers, rala_query_sum, rala_sums
from subquad.ops.weighted_sums import merge_weighted
from subquad.ranges import Positive, checks_arguments
from subquad.rope import Rotation


class RalaAttention(nn.Module):
    """`local` is a depthwise `kernel_size`² of the values, which the gate multiplies as well."""

    inputs = ("q", "k", "v", "g", "rotation", "padding")
    # exact without a rotation; with one, rows keep the sums that they had
    traits = Traits(
        label="RALA",
        key_removal=renormalised,
        start_quietly=lambda new: silence(new.local),
        spreads=True,
        colour="#7a4fb5",
    )

    @checks_arguments
    def __init__(
        self,
        dim: Positive,
        num_heads: Positive,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
        local: bool = True,
        kernel_size: Positive = 5,
    ) -> None:
        super().__init__()
        width = head_dim(dim, num_heads)
        self.local = LocalConv(num_heads, width, kernel_size) if local else None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        rotation: Rotation | None = None,
        padding: Tensor | None = None,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
    ) -> Tensor:
        check_tokens(q, k, rotation, grid=grid, kv_grid=kv_grid)
        y = rala_attention(q, k, v, padding, absent_queries(padding, grid, kv_grid), rotation)
        return finish(self.local, y, v, g, grid=grid, kv_grid=kv_grid, padding=padding)

    def streaming(self, grid: TokenGrid) -> Streaming:
        """See `subquad.attention.sweeps`."""

        def queries(rows: GridRows, q: Tensor) -> State:
            return (rala_query_sum(q),)

        def sums(rows: GridRows, total: State, k: Tensor, v: Tensor, rotation: Rotation | None) -> State:
            return rala_sums(k, v, total[0] / grid.num_tokens, rotation)

        def answers(
            rows: GridRows,
            total: State,
            state: State,
            q: Tensor,
            g: Tensor,
            rotation: Rotation | None,
            v: Tensor | None = None,
        ) -> Tensor:
            y = rala_answers(q, state, rotation)
            return finish_rows(self.local, y, v, g, rows=rows)

        sweeps = Sweep(("q",), queries), Sweep(("k", "v", "rotation"), sums, merge=merge_weighted)
        return Streaming(sweeps, Sweep(("q", "g", "rotation"), answers, values_beside(self.local)))

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        g: Tensor | None = None,
        rotation: Rotation | None = None,
        padding: Tensor | None = None,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
    ) -> Tensor:
        check_tokens(q, k, rotation, grid=grid, kv_grid=kv_grid)
        return rala_weights(q, k, padding, absent_queries(padding, grid, kv_grid), rotation)[:, :, None]


def absent_queries(padding: Tensor | None, grid: TokenGrid, kv_grid: TokenGrid) -> Tensor | None:
    """Which queries (b, n_q) are not there: padding describes the keys, and tells where both stand on one grid."""
    return padding if grid == kv_grid else None
