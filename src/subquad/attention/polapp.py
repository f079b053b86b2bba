"""PolaFormer++ attention: same-sign and opposite-sign similarities of exponentials in two streams, and a gate.

Cost 4 n d² a head. Meng et al., the successor of arXiv 2501.15061.
"""

import torch
from torch import Tensor, nn

from subquad.attention.bricks import (
    LocalConv,
    check_tokens,
    finish,
    finish_rows,
    head_dim,
    is_plain,
    silence,
    values_beside,
)
from subquad.attention.key_removal import renormalised
from subquad.attention.sweeps import State, Streaming, Sweep
from subquad.attention.traits import Traits
from subquad.grid import GridRows, TokenGrid
from subquad.ops import polapp_attention, polapp_weights
from subquad.ops.at_once import polapp_at_once
from subquad.ops.polapp_formula import polapp_answers, polapp_sums
from subquad.ops.weighted_sums import merge_weighted
from subquad.ranges import Positive, checks_arguments
from subquad.rope import Rotation


class PolappAttention(nn.Module):
    """`local` is a depthwise `kernel_size`² of the values, which the gate multiplies as well."""

    inputs = ("q", "k", "v", "g", "rotation", "padding")
    # keys are removed exactly without a rotation; with one, rows keep the sums that they had
    traits = Traits(
        label="PolaFormer++",
        key_removal=renormalised,
        start_quietly=lambda new: silence(new.local),
        # through a sigmoid: 0.02 to 0.98
        start_values={"same_spikiness": (-4.0, -1.0, 0.0, 1.0, 4.0), "opposite_spikiness": (-4.0, -1.0, 0.0, 1.0, 4.0)},
        feature_width=2,
        spreads=True,
        colour="#e08fc0",
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
        # through a sigmoid, one of each feature: of positive and of negative parts
        self.same_spikiness = nn.Parameter(torch.zeros(num_heads, 1, 2 * width))
        self.opposite_spikiness = nn.Parameter(torch.zeros(num_heads, 1, 2 * width))
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
        local, learned = self.local, (self.same_spikiness, self.opposite_spikiness)
        if padding is None and grid == kv_grid and is_plain(local, LocalConv):
            branch = local.weight, local.bias
            whole = polapp_at_once(q, k, v, g, *learned, *branch, rotation=rotation, grid=grid, filters=local.filters)
            if whole is not None:
                return whole
        y = polapp_attention(q, k, v, *self.spikiness(), padding, rotation)
        return finish(local, y, v, g, grid=grid, kv_grid=kv_grid, padding=padding)

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
        return polapp_weights(q, k, *self.spikiness(), padding, rotation)

    def spikiness(self) -> tuple[Tensor, Tensor]:
        """What exponents of queries are multiplied by in each stream, 0 to 1, (h, 1, 2d) each."""
        return torch.sigmoid(self.same_spikiness), torch.sigmoid(self.opposite_spikiness)

    def streaming(self, grid: TokenGrid) -> Streaming:
        """See `subquad.attention.sweeps`."""
        spikiness = self.spikiness()

        def sums(rows: GridRows, k: Tensor, v: Tensor, rotation: Rotation | None) -> State:
            return polapp_sums(k, v, rotation=rotation)

        def answers(
            rows: GridRows, state: State, q: Tensor, g: Tensor, rotation: Rotation | None, v: Tensor | None = None
        ) -> Tensor:
            y = polapp_answers(q, *spikiness, state, grid.num_tokens, rotation)
            return finish_rows(self.local, y, v, g, rows=rows)

        state = Sweep(("k", "v", "rotation"), sums, merge=merge_weighted)
        return Streaming((state,), Sweep(("q", "g", "rotation"), answers, values_beside(self.local)))
