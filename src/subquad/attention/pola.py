"""PolaFormer attention: linear, with same-sign and opposite-sign similarities in two streams and a gate.

Cost 4 n d² a head. Meng et al. 2025, arXiv 2501.15061, eq. 5-9.
"""

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
from subquad.ops import pola_attention, pola_weights
from subquad.ops.at_once import pola_at_once
from subquad.ops.pola_formula import pola_answers, pola_sums
from subquad.positions import PositionTable
from subquad.ranges import NotNegative, Positive, checks_arguments


class PolaAttention(nn.Module):
    """`alpha` bounds the learned powers: 1 to 1 + alpha; `local` is a depthwise `kernel_size`² that the heads share."""

    inputs = ("q", "k", "v", "g", "padding")
    traits = Traits(
        label="PolaFormer",
        key_removal=renormalised,
        start_quietly=lambda new: silence(new.positions, new.local),
        # through 1 + alpha·sigmoid: 1.07 to 4.5 with alpha = 4
        start_values={"power": (-4.0, -2.0, -1.0, 0.0, 2.0)},
        spreads=True,
        colour="#b8568e",
    )

    @checks_arguments
    def __init__(
        self,
        dim: Positive,
        num_heads: Positive,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
        alpha: NotNegative = 4,
        local: bool = True,
        kernel_size: Positive = 5,
    ) -> None:
        super().__init__()
        width = head_dim(dim, num_heads)
        self.alpha = alpha
        self.power = nn.Parameter(torch.zeros(num_heads, 1, width))  # through 1 + alpha·sigmoid
        self.temperature = nn.Parameter(torch.zeros(num_heads, 1, width))  # through softplus
        self.positions = PositionTable(num_heads, width, kv_grid)
        self.local = LocalConv(num_heads, width, kernel_size, filters="head_channel") if local else None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        padding: Tensor | None = None,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
    ) -> Tensor:
        check_tokens(q, k, grid=grid, kv_grid=kv_grid)
        positions, local = self.positions(kv_grid), self.local
        if padding is None and grid == kv_grid and is_plain(local, LocalConv):
            learned = self.power, self.temperature, positions, local.weight, local.bias
            whole = pola_at_once(q, k, v, g, *learned, alpha=self.alpha, grid=grid, filters=local.filters)
            if whole is not None:
                return whole
        y = pola_attention(q, k, v, self.powers(), padding, self._temperature(), positions)
        return finish(local, y, v, g, grid=grid, kv_grid=kv_grid, padding=padding)

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        g: Tensor | None = None,
        padding: Tensor | None = None,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
    ) -> Tensor:
        check_tokens(q, k, grid=grid, kv_grid=kv_grid)
        return pola_weights(q, k, self.powers(), padding, self._temperature(), self.positions(kv_grid))

    def streaming(self, grid: TokenGrid) -> Streaming:
        """See `subquad.attention.sweeps`."""
        powers, temperature = self.powers(), self._temperature()

        def sums(rows: GridRows, k: Tensor, v: Tensor) -> State:
            return pola_sums(k + self.positions(rows), v, powers, temperature)

        def answers(rows: GridRows, state: State, q: Tensor, g: Tensor, v: Tensor | None = None) -> Tensor:
            y = pola_answers(q, powers, temperature, state, grid.num_tokens)
            return finish_rows(self.local, y, v, g, rows=rows)

        return Streaming((Sweep(("k", "v"), sums),), Sweep(("q", "g"), answers, values_beside(self.local)))

    def _temperature(self) -> Tensor:
        return F.softplus(self.temperature)

    def powers(self) -> Tensor:
        """What features are raised to, 1 to 1 + alpha, (h, 1, d)."""
        return 1 + self.alpha * torch.sigmoid(self.power)
