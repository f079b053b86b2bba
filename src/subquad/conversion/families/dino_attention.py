"""Attention of DINOv2 and DINOv3 as their authors' repositories make them (torch.hub): modules `dinov2` and `dinov3`.

Known by the names of their classes and what these are called with; neither package is needed here.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from subquad.conversion.converted_attention import channels_into
from subquad.conversion.families.timm_attention import TimmAttention
from subquad.errors import SubquadError

Tables = tuple[Tensor, Tensor]
"""Sines and cosines (y·x, d) or (h, y·x, d) of the map's tokens."""


class Dinov2Attention(TimmAttention):
    """Tokens (b, n, c) of images of one size; lists of several, which need xFormers' block-diagonal masks, are not."""

    replaces: ClassVar[tuple[str, ...]] = (
        "dinov2.layers.attention.Attention",
        "dinov2.layers.attention.MemEffAttention",
    )

    def check(self, original: Any) -> None:
        """All of them can be converted."""

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_heads, channels_into(original.proj) // original.num_heads

    def tokens_width(self, original: Any) -> int:
        return channels_into(original.qkv)

    def forward(self, x: Tensor, attn_bias: Any = None) -> Tensor:  # type: ignore[override]
        refuse_bias(attn_bias)
        return self.attend(x, None, None, False)


class Dinov3Attention(Dinov2Attention):
    """The same with rotary positions of the map's tokens, which a call hands over, turned in two halves."""

    replaces: ClassVar[tuple[str, ...]] = ("dinov3.layers.attention.SelfAttention",)

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        self.rotate_half = True

    def forward(self, x: Tensor, attn_bias: Any = None, rope: Tables | None = None) -> Tensor:  # type: ignore[override]
        refuse_bias(attn_bias)
        if rope is not None and rope[0].dim() > 3:
            raise SubquadError(
                "a converted layer turns all images of a batch alike: call DINOv3 without rope of its own"
            )
        return self.attend(x, None if rope is None else torch.cat(rope, dim=-1), None, False)

    def forward_list(
        self, x_list: Sequence[Tensor], attn_bias: Any = None, rope_list: Sequence[Tables | None] | None = None
    ) -> list[Tensor]:
        """Several batches, which stand on one grid."""
        ropes = rope_list or [None] * len(x_list)
        return [self(x, attn_bias, rope) for x, rope in zip(x_list, ropes, strict=True)]


def refuse_bias(attn_bias: Any) -> None:
    """Raise where tokens of several images lie in one row, told apart by a bias."""
    if attn_bias is not None:
        raise SubquadError(
            "a converted layer takes no attn_bias: call the network with one tensor of images, not a list"
        )
