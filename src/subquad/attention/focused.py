"""Focused linear attention (FLatten): sharpened features, then a division. Cost 2 n d² a head. arXiv 2308.00442."""

import torch
import torch.nn.functional as F
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
from subquad.ops import focused_attention, focused_weights
from subquad.ops.at_once import focused_at_once
from subquad.ops.focused_formula import focused_answers, focused_sums
from subquad.positions import PositionTable
from subquad.ranges import AboveZero, Positive, checks_arguments


class FocusedAttention(nn.Module):
    """`power` is the focusing factor; `local` a depthwise `kernel_size`² of the values that the heads share."""

    inputs = ("q", "k", "v", "padding")
    traits = Traits(
        label="focused linear (FLatten)",
        key_removal=renormalised,
        start_quietly=lambda new: silence(new.positions, new.local),
        spreads=True,
        colour="#56a7d8",
    )

    @checks_arguments
    def __init__(
        self,
        dim: Positive,
        num_heads: Positive,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
        power: AboveZero = 3,
        local: bool = True,
        kernel_size: Positive = 5,
    ) -> None:
        super().__init__()
        width = head_dim(dim, num_heads)
        self.power = power
        self.temperature = nn.Parameter(torch.zeros(num_heads, 1, width))  # through softplus
        self.positions = PositionTable(num_heads, width, kv_grid)
        self.local = LocalConv(num_heads, width, kernel_size, filters="head_channel") if local else None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        padding: Tensor | None = None,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
    ) -> Tensor:
        check_tokens(q, k, grid=grid, kv_grid=kv_grid)
        positions, local = self.positions(kv_grid), self.local
        if padding is None and grid == kv_grid and is_plain(local, LocalConv):
            learned = self.temperature, positions, local.weight, local.bias
            whole = focused_at_once(q, k, v, *learned, power=self.power, grid=grid, filters=local.filters)
            if whole is not None:
                return whole
        y = focused_attention(q, k, v, F.softplus(self.temperature), padding, positions, power=self.power)
        return finish(local, y, v, grid=grid, kv_grid=kv_grid, padding=padding)

    def weights(
        self, q: Tensor, k: Tensor, padding: Tensor | None = None, *, grid: TokenGrid, kv_grid: TokenGrid
    ) -> Tensor:
        check_tokens(q, k, grid=grid, kv_grid=kv_grid)
        learned = F.softplus(self.temperature), padding, self.positions(kv_grid)
        return focused_weights(q, k, *learned, power=self.power)[:, :, None]

    def streaming(self, grid: TokenGrid) -> Streaming:
        """See `subquad.attention.sweeps`."""
        temperature = F.softplus(self.temperature)

        def sums(rows: GridRows, k: Tensor, v: Tensor) -> State:
            return focused_sums(k + self.positions(rows), v, temperature, power=self.power)

        def answers(rows: GridRows, state: State, q: Tensor, v: Tensor | None = None) -> Tensor:
            y = focused_answers(q, temperature, state, grid.num_tokens, power=self.power)
            return finish_rows(self.local, y, v, rows=rows)

        return Streaming((Sweep(("k", "v"), sums),), Sweep(("q",), answers, values_beside(self.local)))
