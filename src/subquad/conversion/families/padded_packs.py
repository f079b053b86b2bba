"""Attention layers of towers that are handed a batch of images, each filled up with tokens that stand nowhere.

Letters: b images, n tokens of each with those that stand nowhere, d channels of a head, c = h·d channels.
"""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import isqrt
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.conversion.families.packed_attention import (
    Images,
    PackedApartAttention,
    PackGrid,
    PackRecorder,
    classes_of,
    not_told,
    taken,
)
from subquad.conversion.families.packed_by_numbers import places_of
from subquad.conversion.grid_recorder import GridRecorder
from subquad.errors import SubquadError
from subquad.tracing import as_plain, can_be_read, is_exporting, outside_of_traces

OF_GEMMA = (("gemma4", "Gemma4VisionRotaryEmbedding", "Gemma4VisionAttention"),)
OF_SIGLIP_2 = (("siglip2", "Siglip2VisionEmbeddings", "Siglip2Attention"),)
OF_PIX2STRUCT = (("pix2struct", "Pix2StructVisionEmbeddings", "Pix2StructVisionAttention"),)
"""What is told where patches stand, and the attention layers, of each of transformers' models."""


@dataclass(frozen=True, eq=False)
class PaddedGrid(PackGrid):
    """All b·n tokens as a row; `places` are -1 of those that stand nowhere.

    Attributes:
        there: (b, n), True for tokens that stand somewhere.
    """

    there: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.bool))

    @cached_property
    def numbers(self) -> Tensor:
        """Which of the row stand somewhere."""
        with outside_of_traces():
            return self.there.flatten().nonzero()[:, 0]

    @cached_property
    def slots(self) -> Tensor:
        """(b·n,), the how manieth of those each token is; behind all of them for one that stands nowhere."""
        with outside_of_traces():
            there = self.there.flatten()
            return torch.where(there, there.cumsum(0) - 1, there.sum())

    @cached_property
    def standing(self) -> list[Images]:
        """The images of those."""
        with outside_of_traces():
            places = self.places[self.numbers]
            counts = self.there.sum(1).tolist()
        return PackGrid(1, len(places), places=places).images_between(accumulate(counts, initial=0))


class PaddedRecorder(PackRecorder):
    """Keeps where the tokens of a batch stand."""

    def record_places(self, places: Tensor) -> None:
        """Tokens stand at these (b, n, 2), rows and columns that can be read, -1 for those that stand nowhere."""
        with outside_of_traces():
            places = as_plain(places).detach()
            there, row = (places >= 0).all(-1), places.flatten(0, 1)
        self.record(PaddedGrid(1, len(row), places=row, there=there))

    @property
    def present(self) -> Tensor | None:
        last = self.last_standing
        return last.grid.there if last is not None and isinstance(last.grid, PaddedGrid) else None


class PaddedAttention(PackedApartAttention):
    """Packs what stands on the maps; other tokens get zeros for an answer, which nobody reads."""

    listener: ClassVar[type[GridRecorder]] = PaddedRecorder

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Tokens (b, n, c), turned by cosines and sines (b, n, d) where there are any."""
        grid = self.recorder.pack_of(hidden_states.flatten(0, 1))
        assert isinstance(grid, PaddedGrid)
        if not is_exporting():
            self.check_mask(attention_mask, grid.there)
        x, turned_by = hidden_states.flatten(0, 1), None
        if position_embeddings is not None:
            cos, sin = (taken(turns.flatten(0, 1), grid.numbers) for turns in position_embeddings)
            turned_by = cos, sin
        answers = self.attend(taken(x, grid.numbers), grid.standing, turned_by)
        return taken(F.pad(answers, (0, 0, 0, 1)), grid.slots).view_as(hidden_states), None

    def check_mask(self, attention_mask: Tensor | None, there: Tensor) -> None:
        """Raise a SubquadError where a mask of pairs (b, 1, n, n) is not that of the tokens that are there (b, n)."""
        seen = torch.ones_like(there)
        if attention_mask is not None:
            row = attention_mask[:, 0, 0]
            seen = row if row.dtype == torch.bool else row == 0
        if not torch.equal(seen, there):
            raise SubquadError(
                f"the attention mask leaves {int(seen.sum())} tokens to be seen, and {int(there.sum())} stand on the "
                "maps of their images: hand over the mask that the processor made beside the patches"
            )


class GemmaRecorder(PaddedRecorder):
    """Listens to the rotary embedding, which is told (column, row) of each token, -1 for those that stand nowhere."""

    towers: ClassVar[tuple[tuple[str, str, str], ...]] = OF_GEMMA

    def __call__(self, module: Any, arguments: Any, turns: Any) -> None:
        places = arguments[1] if len(arguments) == 2 else None
        if not isinstance(places, Tensor) or places.dim() != 3:
            raise not_told(module)
        # else a program is made, which is for the images of the call before
        if can_be_read(places):
            self.record_places(places.flip(-1))


class GemmaAttention(PaddedAttention):
    """Of Gemma 4; queries, keys and values have norms, and logits no factor."""

    replaces: ClassVar[tuple[str, ...]] = classes_of(OF_GEMMA)
    listener: ClassVar[type[GridRecorder]] = GemmaRecorder
    answered_as: ClassVar[str] = "o_proj"

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.config.num_attention_heads, original.head_dim

    def tokens_width(self, original: Any) -> int:
        return int(original.config.hidden_size)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> tuple[Tensor, None]:
        cos, sin = map(as_halves, position_embeddings)
        return super().forward(hidden_states, (cos, sin))

    def check_mask(self, attention_mask: Tensor | None, there: Tensor) -> None:
        # it comes from where tokens stand itself
        return

    def prepared(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.through(f"{name}_norm", heads) for name, heads in (("q", q), ("k", k), ("v", v)))
        # attention divides by the root of the width
        return as_halves(q) * self.width**0.5, as_halves(k), v


def as_halves(channels: Tensor) -> Tensor:
    """Channels (…, d) in an order in which one half of all turns against the other.

    Gemma turns those of columns and those of rows apart, in halves of each: for queries and keys the order is the same.
    """
    return channels.unflatten(-1, (2, 2, -1)).transpose(-3, -2).flatten(-3)


class SiglipRecorder(PaddedRecorder):
    """Listens in front of SigLIP 2's embeddings, which are told rows and columns of each image's patches."""

    towers: ClassVar[tuple[tuple[str, str, str], ...]] = OF_SIGLIP_2
    in_front: ClassVar[bool] = True

    def __call__(self, module: Any, arguments: Any, keywords: Any) -> None:
        given = dict(zip(("pixel_values", "spatial_shapes"), arguments, strict=False)) | keywords
        patches, sizes = given["pixel_values"], given.get("spatial_shapes")
        if not isinstance(sizes, Tensor) or sizes.dim() != 2:
            raise not_told(module)
        if not can_be_read(sizes):
            return
        most = patches.shape[1]
        with outside_of_traces():
            places = [places_of(height, width, 1) for height, width in sizes.tolist()]
            filled = [F.pad(one, (0, 0, 0, most - len(one)), value=-1) for one in places]
            in_batch = torch.stack(filled).to(patches.device)
        self.record_places(in_batch)


class Siglip2Attention(PaddedAttention):
    """Of SigLIP 2's NaFlex."""

    replaces: ClassVar[tuple[str, ...]] = classes_of(OF_SIGLIP_2)
    listener: ClassVar[type[GridRecorder]] = SiglipRecorder
    answered_as: ClassVar[str] = "out_proj"

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        return super().forward(hidden_states, None, attention_mask)


class Pix2StructRecorder(PaddedRecorder):
    """Listens in front of the embeddings, whose patches begin with their row and column, from 1 on."""

    towers: ClassVar[tuple[tuple[str, str, str], ...]] = OF_PIX2STRUCT
    in_front: ClassVar[bool] = True

    @classmethod
    def map_from(cls, embedding: Any, size: tuple[int, int]) -> tuple[int, int]:
        patch = isqrt(embedding.patch_projection.in_features // 3)
        return size[0] // patch, size[1] // patch

    def __call__(self, module: Any, arguments: Any, keywords: Any) -> None:
        patches = arguments[0] if arguments else keywords["flattened_patches"]
        if can_be_read(patches):
            self.record_places(patches[..., :2].long() - 1)


class Pix2StructAttention(Siglip2Attention):
    """Of Pix2Struct, DePlot and MatCha; logits have no factor."""

    replaces: ClassVar[tuple[str, ...]] = classes_of(OF_PIX2STRUCT)
    listener: ClassVar[type[GridRecorder]] = Pix2StructRecorder
    projected_as: ClassVar[tuple[str, ...]] = ("query", "key", "value")
    answered_as: ClassVar[str] = "output"

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.n_heads, original.key_value_proj_dim

    def prepared(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q * self.width**0.5, k, v
