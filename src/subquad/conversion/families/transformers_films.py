"""Attention of transformers' encoders of films: VideoMAE, ViViT, V-JEPA 2.

Letters: b batch, n tokens, d channels of a head.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from subquad.conversion.converted_attention import ConvertedAttention, channels_into
from subquad.conversion.families.film_recorder import FilmRecorder
from subquad.conversion.families.transformers_attention import TransformersAttention, TransformersSelfAttention
from subquad.conversion.grid_recorder import GridRecorder
from subquad.errors import SubquadError
from subquad.rope import Rotation, with_signs


class VideoMaeAttention(TransformersSelfAttention):
    """VideoMAE's (Tong et al. 2022, arXiv 2203.12602)."""

    replaces: ClassVar[tuple[str, ...]] = ("transformers.models.videomae.modeling_videomae.VideoMAESelfAttention",)
    listener: ClassVar[type[GridRecorder]] = FilmRecorder


class VivitAttention(TransformersAttention):
    """ViViT's (Arnab et al. 2021, arXiv 2103.15691), a class token in front."""

    replaces = ("transformers.models.vivit.modeling_vivit.VivitAttention",)
    listener: ClassVar[type[GridRecorder]] = FilmRecorder


class VJepaAttention(ConvertedAttention):
    """V-JEPA 2's (Assran et al. 2025, arXiv 2506.09985), with rotary positions of frames, rows and columns."""

    replaces: ClassVar[tuple[str, ...]] = ("transformers.models.vjepa2.modeling_vjepa2.VJEPA2RopeAttention",)
    listener: ClassVar[type[GridRecorder]] = FilmRecorder

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        # rows and columns of a frame of the size that it is made for; films of another have their positions by it, too
        self.side = original.grid_size

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_attention_heads, original.attention_head_size

    def tokens_width(self, original: Any) -> int:
        return channels_into(original.query)

    def forward(self, hidden_states: Tensor, position_mask: Tensor | None = None) -> tuple[Tensor, None]:
        if position_mask is not None:
            raise SubquadError("a converted layer of V-JEPA 2 sees whole films: it takes no position_mask")
        q, k, v = (self.split(self.through(name, hidden_states)) for name in ("query", "key", "value"))
        rotation = film_rotation(hidden_states.shape[1], self.side, self.width, hidden_states)
        return self.through("proj", self.mix(q, k, v, hidden_states, rotation=rotation)), None


def film_rotation(num_tokens: int, side: int, width: int, like: Tensor) -> Rotation:
    """V-JEPA 2's rotation of tokens: a third of the d = `width` channels each by frame, row and column.

    Channel j of a third of e channels turns by its place times 10,000^(-2(j mod e/2)/e), so that the two of a pair,
    which are neighbours, turn by different angles. Channels that are left over do not turn.
    """
    places = torch.arange(num_tokens, device=like.device)
    axes = (places // side**2, places % side**2 // side, places % side)
    third = 2 * (width // 3 // 2)
    slower = 10_000 ** -(torch.arange(third // 2, dtype=like.dtype, device=like.device) / (third / 2))
    angles = torch.cat([(axis[:, None] * slower).repeat(1, 2) for axis in axes], dim=1)
    angles = torch.cat([angles, angles.new_zeros(num_tokens, width - 3 * third)], dim=1)
    return Rotation(angles.cos(), with_signs(angles.sin(), interleaved=True), interleaved=True)
