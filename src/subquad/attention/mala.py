"""Magnitude-aware linear attention (MALA): a long query is spikier than a short one; with a gate and a local branch.

Cost 2 n d² a head. Fan et al. 2025, arXiv 2507.00698.
"""

from torch import Tensor, nn

from subquad.attention.bricks import LocalConv, check_tokens, finish, finish_rows, head_dim, silence, values_beside
from subquad.attention.sweeps import State, Streaming, Sweep
from subquad.attention.traits import Traits
from subquad.grid import GridRows, TokenGrid
from subquad.ops import mala_attention, mala_weights
from subquad.ops.mala_formula import mala_answers, mala_sums
from subquad.ranges import Positive, checks_arguments
from subquad.rope import Rotation


class MalaAttention(nn.Module):
    """`local` is a depthwise `kernel_size`² of the values, which the gate multiplies as well."""

    inputs = ("q", "k", "v", "g", "rotation", "padding")
    # its weights without some keys can't be made of those with them: they do not tell the mean that they subtract
    traits = Traits(label="MALA", start_quietly=lambda new: silence(new.local), spreads=True, colour="#8a6d00")

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
        y = mala_attention(q, k, v, padding, rotation)
        return finish(self.local, y, v, g, grid=grid, kv_grid=kv_grid, padding=padding)

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
        return mala_weights(q, k, padding, rotation)[:, :, None]

    def streaming(self, grid: TokenGrid) -> Streaming:
        """See `subquad.attention.sweeps`."""

        def sums(rows: GridRows, k: Tensor, v: Tensor, rotation: Rotation | None) -> State:
            return mala_sums(k, v, rotation=rotation)

        def answers(
            rows: GridRows, state: State, q: Tensor, g: Tensor, rotation: Rotation | None, v: Tensor | None = None
        ) -> Tensor:
            y = mala_answers(q, state, grid.num_tokens, rotation)
            return finish_rows(self.local, y, v, g, rows=rows)

        inputs = ("q", "g", "rotation")
        return Streaming((Sweep(("k", "v", "rotation"), sums),), Sweep(inputs, answers, values_beside(self.local)))
