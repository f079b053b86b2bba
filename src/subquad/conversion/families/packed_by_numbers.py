"""Attention layers of vision towers that are handed packs of patches and have no rotary positions.

Where patches stand says what adds learned positions to them, which is told how many rows and columns each image has.

Letters: n tokens of all images, c = h·d channels.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from subquad.conversion.checkpointed_calls import in_backward
from subquad.conversion.families.packed_attention import (
    PackedApartAttention,
    PackedAttention,
    PackGrid,
    PackRecorder,
    classes_of,
    not_told,
)
from subquad.conversion.grid_recorder import COMPUTED_AGAIN, GridRecorder
from subquad.errors import SubquadError
from subquad.tracing import can_be_read, outside_of_traces

OF_COSMOS = (("cosmos3_edge", "Cosmos3EdgeVisionEmbeddings", "Cosmos3EdgeVisionAttention"),)
OF_HUNYUAN = (
    ("hunyuan_vl", "HunYuanVLVisionPatchEmbed", "HunYuanVLVisionAttention"),
    ("hy_v4_vl", "HYV4VLVisionPatchEmbed", "HYV4VLVisionAttention"),
)
OF_GLM = (("glm_image", "GlmImageVisionEmbeddings", "GlmImageVisionAttention"),)
OF_MINICPM = (
    ("minicpm_ocr", "MiniCPMOcrVisionEmbeddings", "MiniCPMOcrVisionAttention"),
    ("minicpmv4_6", "MiniCPMV4_6VisionEmbeddings", "MiniCPMV4_6VisionAttention"),
    ("minicpmv4_7", "MiniCPMV4_7VisionEmbeddings", "MiniCPMV4_7VisionAttention"),
)
"""What is told where patches stand, and the attention layers, of each of transformers' models."""


class NumbersRecorder(PackRecorder):
    """Listens in front of an embedding, to the numbers of patches that each image has.

    Attributes:
        told_as: the argument that holds them, (images, 3), frames, rows and columns of each, or (images, 2), and its
            place.
    """

    towers: ClassVar[tuple[tuple[str, str, str], ...]] = OF_HUNYUAN
    in_front: ClassVar[bool] = True
    told_as: ClassVar[tuple[str, int]] = ("grid_thw", 1)

    @classmethod
    def side_of_blocks(cls, embedding: Any) -> int:
        """How many rows and columns of patches stand together, in front of the next ones; 1 where rows do."""
        return 1

    def __call__(self, module: Any, arguments: Any, keywords: Any) -> None:
        name, place = self.told_as
        numbers = keywords.get(name, arguments[place] if len(arguments) > place else None)
        if isinstance(numbers, Tensor) and not can_be_read(numbers):
            return
        if not isinstance(numbers, Tensor) or numbers.dim() != 2:
            raise not_told(module, f"how many patches each image has as {name}")
        sizes = [one[-2:] for one in numbers.tolist() for _ in range(1 if len(one) == 2 else one[0])]
        side = self.side_of_blocks(module)
        with outside_of_traces():
            places = torch.cat([places_of(height, width, side) for height, width in sizes])
        self.record(self.pack(places))

    def pack(self, places: Tensor) -> PackGrid:
        """The pack whose patches stand at these (n, 2)."""
        return PackGrid(1, len(places), places=places)


def places_of(height: int, width: int, side: int) -> Tensor:
    """Row and column (height·width, 2) of each patch of an image, a block of side × side of them after the other."""
    rows, columns = torch.arange(height), torch.arange(width)
    places = torch.cartesian_prod(rows, columns).view(height // side, side, width // side, side, 2)
    return places.transpose(1, 2).reshape(-1, 2)


class CosmosRecorder(NumbersRecorder):
    """Patches come in the blocks that are merged behind the tower."""

    towers: ClassVar[tuple[tuple[str, str, str], ...]] = OF_COSMOS

    @classmethod
    def side_of_blocks(cls, embedding: Any) -> int:
        return int(embedding.config.spatial_merge_size)


class CosmosAttention(PackedApartAttention):
    """Of Cosmos 3 Edge, a SigLIP 2."""

    replaces: ClassVar[tuple[str, ...]] = classes_of(OF_COSMOS)
    listener: ClassVar[type[GridRecorder]] = CosmosRecorder
    answered_as: ClassVar[str] = "out_proj"


class GlmImageRecorder(PackRecorder):
    """Listens in front of what adds positions, which is told row and column of each patch."""

    towers: ClassVar[tuple[tuple[str, str, str], ...]] = OF_GLM
    in_front: ClassVar[bool] = True

    def __call__(self, module: Any, arguments: Any, keywords: Any) -> None:
        if len(arguments) != 5:
            raise not_told(module)
        places = torch.stack(arguments[3:], dim=1).detach()
        if not can_be_read(places):
            return
        self.record(PackGrid(1, len(places), places=places))


class GlmImageAttention(PackedAttention):
    """Of GLM-Image."""

    replaces: ClassVar[tuple[str, ...]] = classes_of(OF_GLM)
    listener: ClassVar[type[GridRecorder]] = GlmImageRecorder


class HunyuanAttention(PackedApartAttention):
    """Of HunYuan-VL and its fourth version: a batch of one pack; the answer is a pair."""

    replaces: ClassVar[tuple[str, ...]] = classes_of(OF_HUNYUAN)
    listener: ClassVar[type[GridRecorder]] = NumbersRecorder
    answered_as: ClassVar[str] = "o_proj"

    def forward(self, hidden_states: Tensor, cu_seqlens: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Tokens (1, n, c) of images that begin at `cu_seqlens`."""
        return super().forward(hidden_states.squeeze(0), cu_seqlens).unsqueeze(0), None


@dataclass(frozen=True, eq=False)
class MergedPack(PackGrid):
    """A pack whose patches are merged by two times two within the tower."""

    @cached_property
    def merged(self) -> PackGrid:
        """What is left of it behind that, in the order of rows."""
        with outside_of_traces():
            places = self.places[(self.places % 2 == 0).all(1)] // 2
        return PackGrid(1, len(places), places=places)


class MiniCPMRecorder(NumbersRecorder):
    """Listens in front of the embedding, to the rows and columns of each image's patches."""

    towers: ClassVar[tuple[tuple[str, str, str], ...]] = OF_MINICPM
    told_as: ClassVar[tuple[str, int]] = ("target_sizes", 1)

    def pack(self, places: Tensor) -> PackGrid:
        return MergedPack(1, len(places), places=places)

    def pack_of(self, tokens: Tensor) -> PackGrid:
        count = len(tokens)
        last = self.calls.standing or self.last_standing
        if self.calls.standing is None and in_backward() and count in self._earlier and 4 * count in self._earlier:
            raise SubquadError(f"{count} tokens {COMPUTED_AGAIN}")
        if last is None or last.grid.num_places != 4 * count:
            return super().pack_of(tokens)
        found = self._find(4 * count, 0)
        assert isinstance(found, MergedPack)
        return found.merged


class MiniCPMAttention(HunyuanAttention):
    """Of MiniCPM-V and MiniCPM-OCR, whose later layers stand behind a merger of two times two patches."""

    replaces: ClassVar[tuple[str, ...]] = classes_of(OF_MINICPM)
    listener: ClassVar[type[GridRecorder]] = MiniCPMRecorder
    answered_as: ClassVar[str] = "out_proj"
