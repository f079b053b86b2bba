"""Attention layers of towers that are handed packs, and whose rotary positions turn channels in their own way."""

from inspect import signature
from itertools import chain
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from subquad.conversion.families.packed_attention import PackedSiglipAttention, PackGrid, PackRecorder, classes_of
from subquad.conversion.grid_recorder import GridRecorder
from subquad.errors import SubquadError

OF_INKLING = (("inkling2", "Inkling2VisionRotaryEmbedding", "Inkling2VisionAttention"),)
OF_MINIMAX = (("minimax_m3_vl", "MiniMaxM3VLVisionRotaryEmbedding", "MiniMaxM3VLVisionAttention"),)

COORDINATES = ("frame", "row", "column")
"""What MiniMax's channels turn with, a third of them with each, as far as a third is even."""


class PackBehindClasses(PackGrid):
    """A pack of images that begin with a class token each, which stands nowhere."""

    tokens_in_front: ClassVar[int] = 1


class InklingRecorder(PackRecorder):
    """Listens to the rotary embedding, which is told row and column from 1 on, and zeros of class tokens."""

    towers: ClassVar[tuple[tuple[str, str, str], ...]] = OF_INKLING

    def grid_from(self, places: Tensor, turns: Any) -> PackGrid:
        return PackBehindClasses(1, len(places), places=places)


class InklingAttention(PackedSiglipAttention):
    """Of Inkling 2, whose neighbouring channels turn against each other."""

    replaces: ClassVar[tuple[str, ...]] = classes_of(OF_INKLING)
    listener: ClassVar[type[GridRecorder]] = InklingRecorder
    interleaved: ClassVar[bool] = True


class MiniMaxRecorder(PackRecorder):
    """Listens to the rotary embedding, which is told frame, row and column."""

    towers: ClassVar[tuple[tuple[str, str, str], ...]] = OF_MINIMAX
    coordinates: ClassVar[int] = len(COORDINATES)


class MiniMaxAttention(PackedSiglipAttention):
    """Of MiniMax M3, whose last channels do not turn; frames of a film see each other, and are refused."""

    replaces: ClassVar[tuple[str, ...]] = classes_of(OF_MINIMAX)
    listener: ClassVar[type[GridRecorder]] = MiniMaxRecorder

    def check(self, original: Any) -> None:
        super().check(original)
        if "cu_seqlens" not in signature(type(original).forward).parameters:
            raise SubquadError(
                "its layers are not told where images begin (cu_seqlens) by the transformers that is installed, as in "
                "5.20, so that images of a call see each other: 5.24 tells them"
            )

    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Tokens (n, c), of whose heads the first channels are turned by cosines and sines (n, r), r ≤ d."""
        assert position_embeddings is not None
        cos, sin = position_embeddings
        still = 0, self.width - cos.shape[-1]
        turns = F.pad(cos, still, value=1)[:, self._halves], F.pad(sin, still)[:, self._halves]
        return super().forward(hidden_states, cu_seqlens, turns)

    def prepared(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # for queries and keys the order of channels is the same
        return q[..., self._halves], k[..., self._halves], v

    @property
    def _halves(self) -> list[int]:
        """Channels in an order in which one half of all turns against the other."""
        turning = len(COORDINATES) * (self.width // len(COORDINATES) // 2 * 2)
        parts = range(turning), range(turning, self.width)
        return [*chain(*(part[: len(part) // 2] for part in parts), *(part[len(part) // 2 :] for part in parts))]
