"""Norm-aware linear attention (NaLa): the longer a query, the spikier; positive and negative entries apart.

Cost 4 n d² a head. Meng et al., arXiv 2506.21137. Its gate, LayerNorm(y) · SiLU(g), is its host's.
"""

from torch import Tensor, nn

from subquad.attention.bricks import LocalConv, check_tokens, finish, finish_rows, head_dim, silence, values_beside
from subquad.attention.key_removal import renormalised
from subquad.attention.sweeps import State, Streaming, Sweep
from subquad.attention.traits import Traits
from subquad.grid import GridRows, TokenGrid
from subquad.ops import nala_attention, nala_weights
from subquad.ops.nala_formula import nala_answers, nala_sums
from subquad.ranges import Positive, checks_arguments
from subquad.rope import Rotation


class NalaAttention(nn.Module):
    """`local` is a depthwise `kernel_size`² of the values."""

    inputs = ("q", "k", "v", "rotation", "padding")
    # keys are removed exactly without a rotation; with one, rows keep the sums that they had
    traits = Traits(
        label="NaLa",
        key_removal=renormalised,
        start_quietly=lambda new: silence(new.local),
        # MAViT's LePE is the depthwise branch of the mechanism
        in_hosts={"mavit": {"local": False}},
        spreads=True,
        colour="#b03a2e",
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
        rotation: Rotation | None = None,
        padding: Tensor | None = None,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
    ) -> Tensor:
        check_tokens(q, k, rotation, grid=grid, kv_grid=kv_grid)
        y = nala_attention(q, k, v, padding, rotation)
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
        return nala_weights(q, k, padding, rotation)[:, :, None]

    def streaming(self, grid: TokenGrid) -> Streaming:
        """See `subquad.attention.sweeps`."""

        def sums(rows: GridRows, k: Tensor, v: Tensor, rotation: Rotation | None) -> State:
            return nala_sums(k, v, rotation)

        def answers(
            rows: GridRows, state: State, q: Tensor, rotation: Rotation | None, v: Tensor | None = None
        ) -> Tensor:
            y = nala_answers(q, state, grid.num_tokens, rotation)
            return finish_rows(self.local, y, v, rows=rows)

        inputs = ("q", "rotation")
        return Streaming((Sweep(("k", "v", "rotation"), sums),), Sweep(inputs, answers, values_beside(self.local)))
