"""Mechanisms without one of the parts that their papers rest on, where that is no setting of theirs.

`register` adds them to the mechanisms of this process; what was trained with one is opened only after it.
"""

from typing import ClassVar

import torch
from torch import Tensor

from subquad.attention import AgentAttention, InLineAttention, PolaAttention, Traits, register_attention
from subquad.attention.bricks import check_tokens, finish
from subquad.grid import TokenGrid
from subquad.ops.linear_formula import feature_weights, mix_features
from subquad.ops.padding import count_tokens, mean_token
from subquad.ops.pola_formula import pola_features

EPS = 1e-6


class UncentredInLine(InLineAttention):
    """InLine whose keys keep their mean: rows no longer sum to one."""

    traits = Traits(label="InLine without centring")

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        padding: Tensor | None = None,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
    ) -> Tensor:
        whole = super().forward(q, k, v, x, padding, grid=grid, kv_grid=kv_grid)
        # what centring takes off: the mean key, met by each query, times the mean value
        met = q @ mean_token(k, padding).mT * q.shape[-1] ** -0.5
        return whole + met * mean_token(v, padding)

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        x: Tensor | None = None,
        padding: Tensor | None = None,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid,
    ) -> Tensor:
        check_tokens(q, k, grid=grid, kv_grid=kv_grid)
        weights = (1 + q @ k.mT * q.shape[-1] ** -0.5) / count_tokens(k, padding)
        return (weights if padding is None else weights.masked_fill(padding[:, None, None, :], 0))[:, :, None]


class UnbiasedAgent(AgentAttention):
    """Agents whose biases are zero and stay it."""

    traits = Traits(label="agent without biases", pools=True)

    def __init__(self, dim: int, num_heads: int, *, grid: TokenGrid, kv_grid: TokenGrid, num_agents: int = 49) -> None:
        super().__init__(dim, num_heads, grid=grid, kv_grid=kv_grid, num_agents=num_agents)
        for table in (*self.agent_bias.parameters(), *self.query_bias.parameters()):
            torch.nn.init.zeros_(table).requires_grad_(False)


class FixedPowerPola(PolaAttention):
    """PolaFormer whose powers stay at 1 + alpha / 2: 3 by default, 1 with alpha=0."""

    traits = Traits(label="PolaFormer with fixed powers")

    def __init__(
        self, dim: int, num_heads: int, *, grid: TokenGrid, kv_grid: TokenGrid, alpha: float = 4, local: bool = True
    ) -> None:
        super().__init__(dim, num_heads, grid=grid, kv_grid=kv_grid, alpha=alpha, local=local)
        self.power.requires_grad_(False)


class OneSidedPola(PolaAttention):
    """PolaFormer whose values all come by the stream of equal signs."""

    traits = Traits(label="PolaFormer, equal signs alone")

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
        q, k = self._features(q, k, grid, kv_grid)
        y = mix_features(q, k, v, padding, eps=EPS)
        return finish(self.local, y, v, g, grid=grid, kv_grid=kv_grid, padding=padding)

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
        return feature_weights(*self._features(q, k, grid, kv_grid), padding, eps=EPS)[:, :, None]

    def _features(self, q: Tensor, k: Tensor, grid: TokenGrid, kv_grid: TokenGrid) -> tuple[Tensor, Tensor]:
        check_tokens(q, k, grid=grid, kv_grid=kv_grid)
        temperature = self._temperature()
        power = self.powers()
        return pola_features(q / temperature, power), pola_features((k + self.positions(kv_grid)) / temperature, power)


class UngatedPola(PolaAttention):
    """PolaFormer without a gate, which is not projected either."""

    inputs: ClassVar[tuple[str, ...]] = ("q", "k", "v", "padding")
    traits = Traits(label="PolaFormer without a gate")

    def forward(  # type: ignore[override]
        self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None, *, grid: TokenGrid, kv_grid: TokenGrid
    ) -> Tensor:
        return super().forward(q, k, v, None, padding, grid=grid, kv_grid=kv_grid)  # type: ignore[arg-type]

    def weights(  # type: ignore[override]
        self, q: Tensor, k: Tensor, padding: Tensor | None = None, *, grid: TokenGrid, kv_grid: TokenGrid
    ) -> Tensor:
        return super().weights(q, k, None, padding, grid=grid, kv_grid=kv_grid)


ABLATED = {
    "inline_uncentred": UncentredInLine,
    "agent_unbiased": UnbiasedAgent,
    "pola_fixed": FixedPowerPola,
    "pola_one_sided": OneSidedPola,
    "pola_ungated": UngatedPola,
}


def register() -> None:
    """Make them mechanisms of this process."""
    for name, cls in ABLATED.items():
        register_attention(name, cls)
