"""Test-time training (ViT³): keys and values train a small model in one step, which answers the queries. 2512.01643.

Cost 6 n d² a head, three times that of plain linear attention. Beside the host's heads, each a gated unit, there is one
more, a depthwise convolution of the map.
"""

import torch
from torch import Tensor, nn

from subquad.attention.bricks import check_tokens, head_dim
from subquad.attention.sweeps import State, Streaming, Sweep
from subquad.attention.traits import Traits
from subquad.errors import SubquadError
from subquad.grid import GridRows, TokenGrid
from subquad.ops import ttt_filter, ttt_unit
from subquad.ops.at_once import ttt_at_once
from subquad.ops.ttt_formula import filter_answers, filter_sums, unit_answers, unit_sums
from subquad.positions import start_normal
from subquad.ranges import Positive, checks_arguments
from subquad.rope import Rotation

EXTRA_HEADS = 1
"""The head that is a convolution; it stands behind the others and does not turn."""


class TTTAttention(nn.Module):
    """`w1`, `w2` (h, d, d) and `w3` (d, 1, 3, 3) are what the inner models start from."""

    inputs = ("q", "k", "v", "rotation", "padding")
    traits = Traits(
        label="test-time training (ViT³)",
        extra_heads=EXTRA_HEADS,
        no_weights="its answer is not linear in the values, which train an inner model",
        spreads=True,
        colour="#8c6d46",
    )

    @checks_arguments
    def __init__(self, dim: Positive, num_heads: Positive, *, grid: TokenGrid, kv_grid: TokenGrid) -> None:
        super().__init__()
        width = head_dim(dim, num_heads)
        self.w1 = nn.Parameter(torch.empty(num_heads, width, width))
        self.w2 = nn.Parameter(torch.empty(num_heads, width, width))
        self.w3 = nn.Parameter(torch.empty(EXTRA_HEADS * width, 1, 3, 3))
        for parameter in self.parameters():
            start_normal(parameter)

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
        self._check_heads(q, k, v)
        if padding is None and grid == kv_grid:
            whole = ttt_at_once(q, k, v, self.w1, self.w2, self.w3, rotation=rotation, grid=grid)
            if whole is not None:
                return whole
        sizes = [len(self.w1), EXTRA_HEADS]
        (q, filter_q), (k, filter_k), (v, filter_v) = (tokens.split(sizes, dim=1) for tokens in (q, k, v))
        y = ttt_unit(q, k, v, self.w1, self.w2, padding, rotation=rotation)
        filtered = ttt_filter(filter_q, filter_k, filter_v, self.w3, padding, grid=grid, kv_grid=kv_grid)
        return torch.cat([y, filtered], dim=1)

    def _check_heads(self, *several: Tensor) -> None:
        heads = len(self.w1)
        for tokens in several:
            if tokens.dim() != 4 or tokens.shape[1] != heads + EXTRA_HEADS:
                raise SubquadError(
                    f"test-time training of {heads} heads takes tokens (b, {heads + EXTRA_HEADS}, n, d), a head more "
                    f"that is filtered, got {tuple(tokens.shape)}"
                )

    def streaming(self, grid: TokenGrid) -> Streaming:
        """See `subquad.attention.sweeps`."""
        sizes = [len(self.w1), EXTRA_HEADS]

        def sums(rows: GridRows, k: Tensor, v: Tensor, rotation: Rotation | None) -> State:
            (k, filter_k), (v, filter_v) = (tokens.split(sizes, dim=1) for tokens in (k, v))
            k, seen = rows.of(rows.widened(1), k), rows.widened(1)
            of_unit = unit_sums(k, v, self.w1, self.w2, rotation=rotation)
            return *of_unit, filter_sums(filter_k, filter_v, grid=rows, seen=seen)

        def answers(rows: GridRows, state: State, q: Tensor, rotation: Rotation | None) -> Tensor:
            q, filter_q = q.split(sizes, dim=1)
            q, seen = rows.of(rows.widened(1), q), rows.widened(1)
            y = unit_answers(q, self.w1, self.w2, state[:2], grid.num_tokens, rotation)
            filtered = filter_answers(filter_q, self.w3, state[2], grid.num_places, grid=rows, seen=seen)
            return torch.cat([y, filtered], dim=1)

        state = Sweep(("v", "rotation"), sums, beside={"k": 1})
        return Streaming((state,), Sweep(("rotation",), answers, beside={"q": 1}))

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
        raise SubquadError(f"test-time training has no explicit weights: {self.traits.no_weights}")
