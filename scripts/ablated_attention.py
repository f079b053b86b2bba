"""Mechanisms without one of the parts that their papers rest on, where that is no setting of theirs.

`register` adds them to the mechanisms of this process; what was trained with one is opened only after it. Each
overrides what it changes; inputs come by name, as hosts give them, and `wraps` says that these are the mechanism's.
"""

from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor

from subquad.attention import AgentAttention, InLineAttention, PolaAttention, Traits, register_attention
from subquad.attention.bricks import finish
from subquad.ops.linear_formula import feature_weights, mix_features
from subquad.ops.padding import count_tokens, mean_token, zero_padding
from subquad.ops.pola_formula import pola_features

EPS = 1e-6


class UncentredInLine(InLineAttention):
    """InLine whose keys keep their mean: rows no longer sum to one."""

    traits = Traits(label="InLine without centring")

    @wraps(InLineAttention.forward)
    def forward(self, *, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None, **given: Any) -> Tensor:
        whole = super().forward(q=q, k=k, v=v, padding=padding, **given)
        # what centring takes off: the mean key, met by each query, times the mean value
        return whole + q @ mean_token(k, padding).mT * q.shape[-1] ** -0.5 * mean_token(v, padding)

    @wraps(InLineAttention.weights)
    def weights(self, *, q: Tensor, k: Tensor, padding: Tensor | None = None, **given: Any) -> Tensor:
        whole = super().weights(q=q, k=k, padding=padding, **given)
        met = q @ mean_token(k, padding).mT * q.shape[-1] ** -0.5 / count_tokens(k, padding)
        present = zero_padding(torch.ones_like(k[..., :1]), padding)
        return whole + (met * present.mT)[:, :, None]


class UnbiasedAgent(AgentAttention):
    """Agents whose biases are zero and stay it."""

    traits = Traits(label="agent without biases", pools=True)

    @wraps(AgentAttention.__init__)
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for table in (*self.agent_bias.parameters(), *self.query_bias.parameters()):
            torch.nn.init.zeros_(table).requires_grad_(False)


class FixedPowerPola(PolaAttention):
    """PolaFormer whose powers stay at 1 + alpha / 2: 3 by default, 1 with alpha=0."""

    traits = Traits(label="PolaFormer with fixed powers")

    @wraps(PolaAttention.__init__)
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.power.requires_grad_(False)


class OneSidedPola(PolaAttention):
    """PolaFormer whose values all come by the stream of equal signs."""

    traits = Traits(label="PolaFormer, equal signs alone")

    @wraps(PolaAttention.forward)
    def forward(self, *, v: Tensor, g: Tensor, padding: Tensor | None = None, **given: Any) -> Tensor:
        y = mix_features(*self._features(**given), v, padding, eps=EPS)
        return finish(self.local, y, v, g, grid=given["grid"], kv_grid=given["kv_grid"], padding=padding)

    @wraps(PolaAttention.weights)
    def weights(self, *, g: Tensor | None = None, padding: Tensor | None = None, **given: Any) -> Tensor:
        return feature_weights(*self._features(**given), padding, eps=EPS)[:, :, None]

    def _features(self, *, q: Tensor, k: Tensor, grid: Any, kv_grid: Any) -> tuple[Tensor, Tensor]:
        temperature, power = self._temperature(), self.powers()
        return pola_features(q / temperature, power), pola_features((k + self.positions(kv_grid)) / temperature, power)


class UngatedPola(PolaAttention):
    """PolaFormer without a gate, which is not projected either."""

    inputs: ClassVar[tuple[str, ...]] = ("q", "k", "v", "padding")
    traits = Traits(label="PolaFormer without a gate")

    def forward(self, q, k, v, padding=None, *, grid, kv_grid):
        return super().forward(q, k, v, None, padding, grid=grid, kv_grid=kv_grid)

    def weights(self, q, k, padding=None, *, grid, kv_grid):
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
