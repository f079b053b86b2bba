"""Blocks of transformers in the form of its first ViT (YOLOS, DPT), whose steps are one step where they can be.

Their attention layer's output projection, and the MLP's two layers, are modules beside it. Such a block is of
transformers' class before and of a class derived from it afterwards, with the same modules and parameters.
"""

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from subquad.grid import TokenGrid
from subquad.inference.foreign_halves import first_half_of, is_asked_for, replayed_where_it_stands
from subquad.inference.halves import are_mlp, does_more, drops_nothing, is_norm, second_half
from subquad.inference.transformers_blocks import (
    OfTransformers,
    derived,
    full_name,
    named,
    of_blocks,
    of_transformers,
)
from subquad.ops import softmax_attention

BLOCKS = (
    "transformers.models.dpt.modeling_dpt.DPTViTLayer",
    "transformers.models.yolos.modeling_yolos.YolosLayer",
)


class Within:
    """Between the projections of such an attention layer, transformers' own or converted."""

    projected_by = "attention.query", "attention.key", "attention.value"
    answered_by = "output.dense"

    def __init__(self, attn: Any) -> None:
        self.attn = attn
        self.is_converted = hasattr(type(attn), "answers")

    @property
    def reads_tokens(self) -> bool:
        """Whether it reads tokens, and not only how many there are."""
        return self.is_converted and self.attn.reads_tokens

    @property
    def tokens_behind(self) -> int:
        """How many tokens stand behind the map, which it is handed in front."""
        return self.attn.tokens_behind if self.is_converted else 0

    def grid_under(self, x: Tensor) -> TokenGrid | None:
        """Where the tokens stand, which softmax does not ask."""
        return self.attn.grid_under(x) if self.is_converted else None

    def between(self, projected: Sequence[Tensor], x: Tensor, positions: Any = None) -> Tensor:
        """(b, n, h·d)."""
        if self.is_converted:
            answers: Tensor = self.attn.answers(projected, x)
            return answers
        q, k, v = (part.unflatten(-1, (self.attn.num_attention_heads, -1)).transpose(1, 2) for part in projected)
        return softmax_attention(q, k, v).transpose(1, 2).flatten(2)


class FusedOlderLayer(OfTransformers):
    """A block in evaluation; training, and what is asked for beside, are as they were."""

    attention: Any
    intermediate: Any
    output: Any

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.training or is_asked_for(*args, *of_blocks(kwargs).values()) or not self._drop_nothing():
            return super().forward(hidden_states, *args, **kwargs)
        x, mixing = hidden_states.contiguous(), self._mixing()
        behind = 0 if mixing is None else mixing.tokens_behind
        if behind:
            # where the map is behind all others, here once and not before and behind each layer
            x = x.roll(behind, dims=1)
        y = replayed_where_it_stands(self, mixing, x, None, lambda x, _: self._steps(x), settings=mixing is None)
        return y.roll(-behind, dims=1) if behind else y

    def _steps(self, x: Tensor) -> Tensor:
        before, between = self.get_submodule("layernorm_before"), self.get_submodule("layernorm_after")
        y = first_half_of(self, x, before, self.attention, self._mixing(), None)
        if y is None:
            y = x + self._attended(before(x))
        behind = self._second_half(y, between)
        return self.output(self.intermediate(between(y)), y) if behind is None else behind

    def _attended(self, tokens: Tensor) -> Tensor:
        """Normed tokens (b, n, c) behind the attention layer itself, which is handed them in the network's order."""
        mixing = self._mixing()
        behind = 0 if mixing is None else mixing.tokens_behind
        answers: Tensor = self.attention(tokens.roll(-behind, dims=1) if behind else tokens)
        return answers.roll(behind, dims=1) if behind else answers

    def _second_half(self, y: Tensor, norm: nn.Module) -> Tensor | None:
        """Tokens y (b, n, c) behind the MLP; None where it is another one, or somebody listens."""
        first, second = self.intermediate, self.output
        activation = of_transformers(first.intermediate_act_fn)
        if not (self.are_of_home(first, second) and is_norm(norm) and are_mlp(first.dense, second.dense)):
            return None
        if activation is None or any(map(does_more, (norm, first, *first.children(), second, second.dense))):
            return None
        return second_half(self, y, norm, first.dense, second.dense, None, activation=activation)

    def _mixing(self) -> Within | None:
        if not self.are_of_home(self.attention, self.attention.output):
            return None
        within = Within(self.attention.attention)
        return within if within.is_converted or self.is_softmax(within.attn) else None

    def _drop_nothing(self) -> bool:
        return drops_nothing(self.attention.output.dropout, self.output.dropout)


def fuse_all(model: nn.Module) -> None:
    """Let all blocks of these classes be of few steps; those of classes derived from them stay as they are."""
    for module in model.modules():
        name = full_name(type(module))
        if name in BLOCKS and hasattr(module, "intermediate"):
            module.__class__ = fused(name)


@functools.cache
def fused(full: str) -> type[nn.Module]:
    """The class of blocks of few steps that is derived from the one of this full name."""
    return derived(full, FusedOlderLayer, __name__)


def __getattr__(name: str) -> type[nn.Module]:
    """The class of this name, which pickles ask for."""
    return fused(named(name, BLOCKS))
