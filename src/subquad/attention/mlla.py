"""MLLA's linear attention: ELU + 1, rotary positions on the features, and a local branch. arXiv 2405.16605.

Cost 2 n d² a head, as plain linear attention.
"""

from torch import Tensor, nn

from subquad.attention.bricks import LocalConv, check_tokens, finish, finish_rows, head_dim, silence, values_beside
from subquad.attention.key_removal import renormalised
from subquad.attention.sweeps import State, Streaming, Sweep
from subquad.attention.traits import Traits
from subquad.grid import GridRows, TokenGrid
from subquad.ops import mlla_attention, mlla_weights
from subquad.ops.mlla_formula import mlla_answers, mlla_sums
from subquad.ranges import Positive, checks_arguments
from subquad.rope import Rotation


class MLLAAttention(nn.Module):
    """`local` adds a depthwise 3×3 of the values, with a bias (LePE).

    That values are the tokens themselves, and that a gate and no projection of its own follow, is its network's matter,
    not the mechanism's.
    """

    inputs = ("q", "k", "v", "rotation", "padding")
    traits = Traits(
        label="MLLA (Mamba-like linear)",
        # exact without a rotation; with one, the sums of rows take the place of normalisers that weights do not show
        key_removal=renormalised,
        start_quietly=lambda new: silence(new.local),
        spreads=True,
        colour="#7a5cc7",
    )

    @checks_arguments
    def __init__(
        self, dim: Positive, num_heads: Positive, *, grid: TokenGrid, kv_grid: TokenGrid, local: bool = True
    ) -> None:
        super().__init__()
        width = head_dim(dim, num_heads)
        self.local = LocalConv(num_heads, width, 3) if local else None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotation: Rotation | None = None,
        padding: Tensor | None = None,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
    ) -> Tensor:
        check_tokens(q, k, rotation, grid=grid, kv_grid=kv_grid)
        y = mlla_attention(q, k, v, padding, rotation=rotation)
        return finish(self.local, y, v, grid=grid, kv_grid=kv_grid, padding=padding)

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        rotation: Rotation | None = None,
        padding: Tensor | None = None,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
    ) -> Tensor:
        check_tokens(q, k, rotation, grid=grid, kv_grid=kv_grid)
        return mlla_weights(q, k, padding, rotation=rotation)[:, :, None]

    def streaming(self, grid: TokenGrid) -> Streaming:
        """See `subquad.attention.sweeps`."""

        def sums(rows: GridRows, k: Tensor, v: Tensor, rotation: Rotation | None) -> State:
            return mlla_sums(k, v, rotation)

        def answers(
            rows: GridRows, state: State, q: Tensor, rotation: Rotation | None, v: Tensor | None = None
        ) -> Tensor:
            y = mlla_answers(q, state, grid.num_tokens, rotation)
            return finish_rows(self.local, y, v, rows=rows)

        inputs = ("q", "rotation")
        return Streaming((Sweep(("k", "v", "rotation"), sums),), Sweep(inputs, answers, values_beside(self.local)))
