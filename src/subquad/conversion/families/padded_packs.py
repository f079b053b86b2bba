"""Attention layers of Gemma 4's vision tower: a batch of images, each filled up with tokens that stand nowhere.

Letters: b images, n tokens of each with those that stand nowhere, d channels of a head, c = h·d channels.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.conversion.families.packed_attention import PackedApartAttention, PackGrid, PackRecorder
from subquad.conversion.grid_recorder import GridRecorder, is_called
from subquad.errors import SubquadError

GEMMA = "transformers.models.gemma4.modeling_gemma4"


class PaddedRecorder(PackRecorder):
    """Listens to the rotary embedding, which is told (column, row) of each token, -1 for those that stand nowhere."""

    @classmethod
    def hears(cls, module: Any) -> bool:
        return is_called(module, f"{GEMMA}.Gemma4VisionRotaryEmbedding")

    def __call__(self, module: Any, arguments: Any, turns: Any) -> None:
        places = arguments[1] if len(arguments) == 2 else None
        if not isinstance(places, Tensor) or places.dim() != 3:
            raise SubquadError(
                f"{type(module).__name__} of this transformers is not told where patches stand: 5.24 does it"
            )
        standing = places.detach()[stands(places)].flip(-1)
        self.record(PackGrid(1, len(standing), places=standing))


class GemmaAttention(PackedApartAttention):
    """Packs what stands on the maps; queries, keys and values have norms, and logits no factor."""

    replaces: ClassVar[tuple[str, ...]] = (f"{GEMMA}.Gemma4VisionAttention",)
    listener: ClassVar[type[GridRecorder]] = PaddedRecorder
    answered_as: ClassVar[str] = "o_proj"

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.config.num_attention_heads, original.head_dim

    def tokens_width(self, original: Any) -> int:
        return int(original.config.hidden_size)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Tokens (b, n, c), turned by cosines and sines (b, n, d), at columns and rows (b, n, 2)."""
        assert position_ids is not None
        there = stands(position_ids)
        borders = F.pad(there.sum(1).cumsum(0), (1, 0))
        cos, sin = (as_halves(turns[there]) for turns in position_embeddings)
        y = torch.zeros_like(hidden_states)
        y[there] = super().forward(hidden_states[there], borders, (cos, sin))
        return y, None

    def prepared(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.through(f"{name}_norm", heads) for name, heads in (("q", q), ("k", k), ("v", v)))
        # attention divides by the root of the width
        return as_halves(q) * self.width**0.5, as_halves(k), v


def stands(places: Tensor) -> Tensor:
    """(b, n), True for the tokens that stand somewhere, of their places (b, n, 2)."""
    return (places >= 0).all(-1)


def as_halves(channels: Tensor) -> Tensor:
    """Channels (…, d) in an order in which one half of all turns against the other.

    Gemma turns those of columns and those of rows apart, in halves of each: for queries and keys the order is the same.
    """
    return channels.unflatten(-1, (2, 2, -1)).transpose(-3, -2).flatten(-3)
