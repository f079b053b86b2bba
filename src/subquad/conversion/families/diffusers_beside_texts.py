"""Attention of diffusers' CogView4, CogVideoX and Hunyuan's networks, to which a text comes as tokens of its own.

Rotary positions turn tokens of the image alone. Where a text has no projections of its own, those of the image are its
as well. Here its tokens come first, whatever the network's own order is.

Letters: b batch, n tokens, m tokens of a text, d channels of a head, c channels of all.
"""

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from subquad.conversion.families.diffusers_attention import (
    DiffusersAttention,
    absent_tokens,
    refuse_given,
    rotation_of,
    rotation_of_halves,
)
from subquad.conversion.families.diffusers_recorder import TRANSFORMERS, LatentRecorder
from subquad.conversion.families.film_recorder import FilmRecorder, TokensOfFilmRecorder
from subquad.conversion.grid_recorder import GridRecorder, is_called
from subquad.grid import TokenGrid
from subquad.rope import Rotation


class CogVideoRecorder(FilmRecorder):
    """Listens to CogVideoX's embedding, which is called with a text and latents (b, f, c, y, x)."""

    @classmethod
    def hears(cls, module: nn.Module) -> bool:
        return is_called(module, "diffusers.models.embeddings.CogVideoXPatchEmbed")

    @classmethod
    def map_from(cls, embedding: Any, size: Any) -> tuple[int, int]:
        frames, height, width = (1, *size)[-3:]
        # networks of version 1.5 take several frames at a time, and of a last one alone make as many
        rows = -(-frames // (embedding.patch_size_t or 1)) * (height // embedding.patch_size)
        return rows, width // embedding.patch_size

    @classmethod
    def whole_size(cls, config: Any, size: tuple[int, ...]) -> tuple[int, ...]:
        if len(size) == 3:
            return size
        return (config.sample_frames - 1) // config.temporal_compression_ratio + 1, *size

    def __call__(self, module: Any, arguments: Any, embedded: Any) -> None:
        latents = arguments[1].shape
        self.record(TokenGrid(*self.map_from(module, (latents[1], *latents[-2:]))))


class HunyuanRecorder(FilmRecorder):
    """Listens to an embedding of Hunyuan's networks, which is called with latents (b, c, y, x) or (b, c, f, y, x).

    Attributes:
        network: the file of diffusers in which it is, and what its class's name begins with.
    """

    network: ClassVar[tuple[str, str]] = ("hunyuan_video", "HunyuanVideo")
    # that of 129 frames of 720×1,280 px
    usual_size: ClassVar[tuple[int, int] | None] = (90, 160)
    usual_frames: ClassVar[int | None] = 33

    @classmethod
    def hears(cls, module: nn.Module) -> bool:
        file, name = cls.network
        return is_called(module, f"{TRANSFORMERS}.transformer_{file}.{name}PatchEmbed")

    @classmethod
    def map_from(cls, embedding: Any, size: Any) -> tuple[int, int]:
        strides = embedding.proj.stride
        *frames, height, width = (
            length // stride for length, stride in zip(size[-len(strides) :], strides, strict=True)
        )
        return height * (frames[0] if frames else 1), width

    def __call__(self, module: Any, arguments: Any, embedded: Any) -> None:
        self.record(TokenGrid(*self.map_from(module, arguments[0].shape)))


class Hunyuan15Recorder(HunyuanRecorder):
    """That of HunyuanVideo 1.5, usually of 121 frames of 480×848 px."""

    network: ClassVar[tuple[str, str]] = ("hunyuan_video15", "HunyuanVideo15")
    usual_size: ClassVar[tuple[int, int] | None] = (30, 53)
    usual_frames: ClassVar[int | None] = 31


class HunyuanImageRecorder(HunyuanRecorder):
    """That of HunyuanImage 2.1, usually of 2,048 px."""

    network: ClassVar[tuple[str, str]] = ("hunyuanimage", "HunyuanImage")
    usual_size: ClassVar[tuple[int, int] | None] = (64, 64)
    usual_frames: ClassVar[int | None] = None


class AttentionBesideText(DiffusersAttention):
    """What these have in common: they are called with tokens of an image (b, n, c) and of a text (b, m, c)."""

    @classmethod
    def sees_text(cls, original: Any) -> bool:
        return True

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Tokens of the image, and those of the text; tables of rotary positions are (n, d)."""
        refuse_given(kwargs)
        rotation = None
        if image_rotary_emb is not None:
            rotation = behind_text(self.rotation_of_image(*image_rotary_emb), encoder_hidden_states.shape[1])
        padding = self.absent_first(attention_mask, hidden_states)
        answer: tuple[Tensor, Tensor] = self.attend(hidden_states, encoder_hidden_states, rotation, padding)
        return answer

    def absent_first(self, attention_mask: Tensor | None, image: Tensor) -> Tensor | None:
        """(b, m + n), True for tokens that no one sees, those of the text first."""
        refuse_given({"attention_mask": attention_mask})
        return None

    def rotation_of_image(self, cos: Tensor, sin: Tensor) -> Rotation:
        """What turns the tokens of the image."""
        return rotation_of(cos, sin)


class CogViewAttention(AttentionBesideText):
    """CogView4's, whose rotary positions turn the first half of a head's channels with the second."""

    processors: ClassVar[tuple[str, ...]] = ("CogView4AttnProcessor",)
    listener: ClassVar[type[GridRecorder]] = LatentRecorder

    def rotation_of_image(self, cos: Tensor, sin: Tensor) -> Rotation:
        return rotation_of_halves(cos, sin)


class CogVideoAttention(AttentionBesideText):
    """CogVideoX's (Yang et al. 2024, arXiv 2408.06072), of all frames."""

    processors: ClassVar[tuple[str, ...]] = ("CogVideoXAttnProcessor2_0",)
    listener: ClassVar[type[GridRecorder]] = CogVideoRecorder


class HunyuanAttention(AttentionBesideText):
    """HunyuanVideo's (Kong et al. 2024, arXiv 2412.03603): texts with absent tokens, whose own blocks stay."""

    processors: ClassVar[tuple[str, ...]] = ("HunyuanVideoAttnProcessor2_0",)
    listener: ClassVar[type[GridRecorder]] = HunyuanRecorder

    def absent_first(self, attention_mask: Tensor | None, image: Tensor) -> Tensor | None:
        absent = absent_tokens(attention_mask)
        # the image's tokens come first in it
        return None if absent is None else absent.roll(-image.shape[1], dims=1)


class HunyuanImageAttention(HunyuanAttention):
    """HunyuanImage 2.1's."""

    processors: ClassVar[tuple[str, ...]] = ("HunyuanImageAttnProcessor",)
    listener: ClassVar[type[GridRecorder]] = HunyuanImageRecorder


class BesideTold(AttentionBesideText):
    """What is told of the texts' tokens alone which are there."""

    def absent_first(self, attention_mask: Tensor | None, image: Tensor) -> Tensor | None:
        if attention_mask is None:
            return None
        return F.pad(~attention_mask.bool(), (0, image.shape[1]), value=False)


class Hunyuan15Attention(BesideTold):
    """HunyuanVideo 1.5's."""

    processors: ClassVar[tuple[str, ...]] = ("HunyuanVideo15AttnProcessor2_0",)
    listener: ClassVar[type[GridRecorder]] = Hunyuan15Recorder


class MochiRecorder(TokensOfFilmRecorder):
    """Listens in front of Mochi's rotary embedding, which is told of how many frames, rows and columns a film is."""

    # that of 84 frames of 480×848 px
    usual_size: ClassVar[tuple[int, int] | None] = (30, 53)
    usual_frames: ClassVar[int | None] = 14
    in_front: ClassVar[bool] = True

    @classmethod
    def hears(cls, module: nn.Module) -> bool:
        return is_called(module, f"{TRANSFORMERS}.transformer_mochi.MochiRoPE")

    def __call__(self, module: Any, arguments: Any, keywords: Any) -> None:
        self.record(TokenGrid(*self.map_from(module, arguments[1:4])))


class MochiAttention(BesideTold):
    """Mochi's (Genmo 2024), of all frames: texts whose last tokens may be absent."""

    processors: ClassVar[tuple[str, ...]] = ("MochiAttnProcessor2_0",)
    listener: ClassVar[type[GridRecorder]] = MochiRecorder

    def check(self, original: Any) -> None:
        self.refuse_patched(original)

    def rotation_of_image(self, cos: Tensor, sin: Tensor) -> Rotation:
        # (n, h, d / 2): heads turn otherwise
        return rotation_of(*(table.transpose(0, 1).repeat_interleave(2, dim=-1) for table in (cos, sin)))


def behind_text(rotation: Rotation, count: int) -> Rotation:
    """A rotation of tokens behind so many that are not turned."""
    cos, sin = (F.pad(table, (0, 0, count, 0), value=still) for table, still in ((rotation.cos, 1), (rotation.sin, 0)))
    return Rotation(cos, sin, rotation.interleaved)
