"""Attention layers of vision towers whose tokens are in the order of windows, and most of which see these.

Qwen2.5-VL's (Bai et al. 2025, arXiv 2502.13923, section 2.1.1: four of 32 blocks see whole images), EXAONE 4.5's and
Muse's. The first two order patches by windows in front of their blocks, and their rotary positions with them; by these
it is known here where each patch stands.

Letters: n tokens of all images, c = h·d channels.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.conversion.families.packed_attention import (
    PackedApartAttention,
    PackedAttention,
    PackGrid,
    PackRecorder,
    classes_of,
)
from subquad.conversion.grid_recorder import GridRecorder
from subquad.errors import SubquadError
from subquad.tracing import is_exporting


@dataclass(frozen=True, eq=False)
class TurnedPack(PackGrid):
    """A pack in the order in which its patches were embedded.

    Attributes:
        cosines: (n, d), by which each is turned.
    """

    cosines: Tensor = field(default_factory=lambda: torch.zeros(0, 2))
    _ordered: list[tuple[Tensor, PackGrid]] = field(default_factory=list, init=False, repr=False)

    def in_order_of(self, cosines: Tensor) -> PackGrid:
        """The pack in the order of tokens that are turned by these (n, d).

        Raises:
            SubquadError: they are not those of this pack.
        """
        for known, pack in self._ordered:
            # all blocks of a call are handed the same; a program is for the images of the call before
            if known is cosines or is_exporting():
                return pack
        pack = PackGrid(1, len(cosines), places=self._places_of(cosines))
        self._ordered[:] = [(cosines, pack)]
        return pack

    def _places_of(self, cosines: Tensor) -> Tensor:
        # equal rows, as those of one place in several images, have one number
        _, numbers = torch.unique(torch.cat([self.cosines, cosines]), dim=0, return_inverse=True)
        embedded, handed = numbers.split([len(self.cosines), len(cosines)])
        places = self.places.new_full((len(numbers), 2), -1)
        places[embedded] = self.places
        if bool((found := places[handed]).lt(0).any()):
            raise SubquadError("tokens are turned by other positions than those that the rotary embedding was told")
        return found


OF_QWEN = (
    ("qwen2_5_vl", "Qwen2_5_VLVisionRotaryEmbedding", "Qwen2_5_VLVisionAttention"),
    ("exaone4_5", "Exaone4_5_VisionRotaryEmbedding", "Exaone4_5_VisionAttention"),
)
OF_OMNI = (("qwen2_5_omni", "Qwen2_5OmniVisionRotaryEmbedding", "Qwen2_5OmniVisionAttention"),)
OF_MUSE = (
    ("muse_glimmer", "MuseGlimmerVisionRotaryEmbedding", "MuseGlimmerVisionAttention"),
    ("muse_spark", "MuseSparkVisionRotaryEmbedding", "MuseSparkVisionAttention"),
)


class TurnedPackRecorder(PackRecorder):
    """Listens to the rotary embedding, and keeps by what it turns each patch."""

    towers: ClassVar[tuple[tuple[str, str, str], ...]] = (*OF_QWEN, *OF_OMNI)

    def __call__(self, module: Any, arguments: Any, turns: Any) -> None:
        if not is_exporting():
            super().__call__(module, arguments, turns)

    def grid_from(self, places: Tensor, turns: tuple[Tensor, Tensor]) -> PackGrid:
        return TurnedPack(1, len(places), places=places, cosines=turns[0].detach())


class PackedWindows(PackedAttention):
    """Qwen2.5-VL's and EXAONE 4.5's: blocks that see whole images are meant, windows where `blocks` names them."""

    replaces: ClassVar[tuple[str, ...]] = classes_of(OF_QWEN)
    listener: ClassVar[type[GridRecorder]] = TurnedPackRecorder

    @classmethod
    def is_target(cls, original: Any, block: nn.Module, number: int) -> bool:
        return number in original.config.fullatt_block_indexes

    def pack_of(self, x: Tensor, turned_by: tuple[Tensor, Tensor] | None) -> PackGrid:
        pack = super().pack_of(x, turned_by)
        assert isinstance(pack, TurnedPack) and turned_by is not None
        return pack.in_order_of(turned_by[0])


class OmniWindows(PackedWindows):
    """Qwen2.5-Omni's, with projections apart: Xu et al. 2025, arXiv 2503.20215."""

    replaces: ClassVar[tuple[str, ...]] = classes_of(OF_OMNI)
    projected_as: ClassVar[tuple[str, ...]] = ("q", "k", "v")


class MuseRecorder(PackRecorder):
    """Listens to the rotary embedding, which is told columns and rows in the order of windows."""

    towers: ClassVar[tuple[tuple[str, str, str], ...]] = OF_MUSE

    def grid_from(self, places: Tensor, turns: Any) -> PackGrid:
        return super().grid_from(places.flip(-1), turns)


class MuseWindows(PackedApartAttention):
    """Muse's: blocks that see whole images are meant, as in `PackedWindows`."""

    replaces: ClassVar[tuple[str, ...]] = classes_of(OF_MUSE)
    listener: ClassVar[type[GridRecorder]] = MuseRecorder

    @classmethod
    def is_target(cls, original: Any, block: nn.Module, number: int) -> bool:
        kind: str = original.config.layer_types[number]
        return kind == "full_attention"
