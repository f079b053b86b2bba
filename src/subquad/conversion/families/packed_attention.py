"""Attention layers of vision towers that are handed patches of several images, of any sizes, in one row of tokens.

Qwen2-VL's (Wang et al. 2024, arXiv 2409.12191) and what is built as it is: Qwen3 and 4, GLM-4V, ERNIE. Patches come in
blocks of those that are merged behind the last block, and their rotary positions say where each stands.

Letters: n tokens of all images, m of one, b images of one size, c = h·d channels.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from subquad.conversion.converted_attention import ConvertedAttention, channels_into
from subquad.conversion.grid_recorder import GridRecorder, is_called
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.rope import Rotation, with_signs
from subquad.tracing import as_plain, can_be_read, outside_of_traces

TOWERS = (
    ("qwen2_vl", "Qwen2VLVisionRotaryEmbedding", "VisionAttention"),
    ("qwen3_vl", "Qwen3VLVisionRotaryEmbedding", "Qwen3VLVisionAttention"),
    ("qwen3_vl_moe", "Qwen3VLMoeVisionRotaryEmbedding", "Qwen3VLMoeVisionAttention"),
    ("qwen3_5", "Qwen3_5VisionRotaryEmbedding", "Qwen3_5VisionAttention"),
    ("qwen3_5_moe", "Qwen3_5MoeVisionRotaryEmbedding", "Qwen3_5MoeVisionAttention"),
    ("qwen3_omni_moe", "Qwen3OmniMoeVisionRotaryEmbedding", "Qwen3OmniMoeVisionAttention"),
    ("qwen4_exp", "Qwen4ExpVisionRotaryEmbedding", "Qwen4ExpVisionAttention"),
    ("cohere_compass", "CohereCompassVisionRotaryEmbedding", "CohereCompassVisionAttention"),
    ("ernie4_5_vl_moe", "Ernie4_5_VLMoeVisionRotaryEmbedding", "Ernie4_5_VLMoeVisionAttention"),
    ("glm4v", "Glm4vVisionRotaryEmbedding", "Glm4vVisionAttention"),
    ("glm4v_moe", "Glm4vMoeVisionRotaryEmbedding", "Glm4vMoeVisionAttention"),
    ("glm_ocr", "GlmOcrVisionRotaryEmbedding", "GlmOcrVisionAttention"),
    ("glm5_next", "Glm5NextVisionRotaryEmbedding", "Glm5NextVisionAttention"),
    ("dots3_note", "Dots3NoteVisionRotaryEmbedding", "Dots3NoteVisionAttention"),
)
"""What knows where patches stand, and the attention layers, of each of transformers' models."""

OF_KIMI = (("kimi_k25", "Kimi_K25VisionRotaryEmbedding", "Kimi_K25VisionAttention"),)
OF_SIGLIP = (
    ("paddleocr_vl", "PaddleOCRVisionRotaryEmbedding", "PaddleOCRVisionAttention"),
    ("video_llama_3", "VideoLlama3VisionRotaryEmbedding", "VideoLlama3VisionAttention"),
    ("lfm3_vl", "Lfm3VlVisionRotaryEmbedding", "Lfm3VlVisionAttention"),
)
OF_PIXTRAL = (("pixtral", "PixtralVisionRotaryEmbedding", "PixtralAttention"),)
"""The same of those whose projections are apart."""


@dataclass(frozen=True)
class Images:
    """Those of a pack that have one size.

    Attributes:
        grid: of each.
        tokens: (b, m), the numbers of their tokens in the pack, row by row of the map, behind those in front of it.
    """

    grid: TokenGrid
    tokens: Tensor


@dataclass(frozen=True, eq=False)
class PackGrid(TokenGrid):
    """The tokens of a pack of images as a row of them, with the place of each on the map of its image.

    Attributes:
        places: (n, 2), row and column.
        tokens_in_front: how many tokens of each image stand in front of its map.
    """

    tokens_in_front: ClassVar[int] = 0
    places: Tensor = field(default_factory=lambda: torch.zeros(0, 2))
    _images: dict[tuple[int, ...], list[Images]] = field(default_factory=dict, init=False, repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackGrid) and torch.equal(self.places, other.places)

    __hash__ = None  # type: ignore[assignment]

    def images(self, borders: Tensor) -> list[Images]:
        """The images by their sizes.

        Args:
            borders: (number of images + 1), where each begins in the pack, and the end.

        Raises:
            SubquadError: tokens between two borders are not those of one map.
        """
        return self.images_between(borders.tolist()) if can_be_read(borders) else self._as_before(len(borders) - 1)

    def images_between(self, borders: Iterable[int]) -> list[Images]:
        """The same of numbers; raises as `images`."""
        ends = tuple(borders)
        if ends not in self._images:
            self._images[ends] = self._sorted(ends)
        return self._images[ends]

    def _as_before(self, count: int) -> list[Images]:
        """So many images, as they were sorted in the call before."""
        known = [images for ends, images in self._images.items() if len(ends) == count + 1]
        if len(known) != 1:
            raise SubquadError(
                f"a program of a pack of {count} images is for those of the call before, which had {len(known)} such "
                "packs: call the network once with what it is to be a program of"
            )
        return known[0]

    def _sorted(self, ends: tuple[int, ...]) -> list[Images]:
        with outside_of_traces():
            return self._by_size(as_plain(self.places), ends)

    def _by_size(self, of_pack: Tensor, ends: tuple[int, ...]) -> list[Images]:
        by_size: dict[tuple[int, int], list[Tensor]] = {}
        for first, behind in pairwise(ends):
            map_begins = first + self.tokens_in_front
            places = of_pack[map_begins:behind].long()
            # a window need not begin in the first row and column
            rows, columns = (places - places.amin(0)).unbind(1)
            height, width = int(rows.max()) + 1, int(columns.max()) + 1
            numbers = rows * width + columns
            order = numbers.argsort()
            if not torch.equal(numbers[order], torch.arange(height * width, device=order.device)):
                raise SubquadError(
                    f"{behind - map_begins} tokens that attend to each other are not those of one map of "
                    f"{height}×{width}: a converted layer takes whole images or windows"
                )
            in_front = torch.arange(first, map_begins, device=order.device)
            by_size.setdefault((height, width), []).append(torch.cat([in_front, map_begins + order]))
        return [Images(TokenGrid(*size, self.tokens_in_front), torch.stack(tokens)) for size, tokens in by_size.items()]


class PackRecorder(GridRecorder):
    """Listens to the rotary embedding, which is told where each patch stands.

    Attributes:
        towers: what it listens to, see `TOWERS`.
        coordinates: how many say where a patch stands, row and column at last.
    """

    towers: ClassVar[tuple[tuple[str, str, str], ...]] = (*TOWERS, *OF_KIMI, *OF_SIGLIP, *OF_PIXTRAL)
    coordinates: ClassVar[int] = 2
    # where Qwen3-VL's table of positions has an entry for each place
    usual_size = (768, 768)

    @classmethod
    def hears(cls, module: nn.Module) -> bool:
        names = [f"transformers.models.{name}.modeling_{name}.{rotary}" for name, rotary, _ in cls.towers]
        return any(is_called(module, name) for name in names)

    @classmethod
    def map_from(cls, embedding: Any, size: tuple[int, int]) -> tuple[int, int]:
        patch = getattr(embedding, "config", embedding).patch_size
        height, width = (length // patch for length in size)
        if min(height, width) < 1:
            raise SubquadError(f"images of {size[0]}×{size[1]} px hold no patch of {patch}")
        return height, width

    def __call__(self, module: Any, arguments: Any, turns: Any) -> None:
        places = arguments[1] if len(arguments) == 2 else None
        if isinstance(places, Tensor) and not can_be_read(places):
            # a program is for the images of the call before
            return
        if not isinstance(places, Tensor) or places.dim() != 2 or places.shape[1] != self.coordinates:
            raise not_told(module)
        self.record(self.grid_from(places.detach()[:, -2:], turns))

    def grid_from(self, places: Tensor, turns: Any) -> PackGrid:
        """The pack whose patches stand at `places` (n, 2), and are turned by these cosines and sines (n, d)."""
        return PackGrid(1, len(places), places=places)

    def pack_of(self, tokens: Tensor) -> PackGrid:
        """Where tokens (n, c) of a pack stand; raises as `grid_of`."""
        found = self._find(tokens.shape[0], 0)
        assert isinstance(found, PackGrid)
        return found


def not_told(module: nn.Module, what: str = "where patches stand") -> SubquadError:
    """What is raised where a module of another transformers is not called as it is in the one that is known."""
    return SubquadError(f"{type(module).__name__} of this transformers is not told {what}: 5.24 does it")


def classes_of(towers: tuple[tuple[str, str, str], ...]) -> tuple[str, ...]:
    """Full names of their attention layers' classes."""
    return tuple(f"transformers.models.{name}.modeling_{name}.{cls}" for name, _, cls in towers)


class PackedAttention(ConvertedAttention):
    """Mixes the tokens of each image of a pack; images of one size go through the mechanism at once.

    Attributes:
        projected_as: the layers that project tokens to queries, keys and values, together or apart.
        answered_as: the layer that projects back.
        interleaved: whether rotary positions turn neighbouring channels against each other, not the two halves.
    """

    replaces: ClassVar[tuple[str, ...]] = classes_of(TOWERS)
    listener: ClassVar[type[GridRecorder]] = PackRecorder
    projected_as: ClassVar[tuple[str, ...]] = ("qkv",)
    answered_as: ClassVar[str] = "proj"
    interleaved: ClassVar[bool] = False
    recorder: PackRecorder

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_heads, original.head_dim

    def tokens_width(self, original: Any) -> int:
        return channels_into(getattr(original, self.projected_as[0]))

    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Tokens (n, c) of images that begin at `cu_seqlens`, turned by cosines and sines (n, d) if there are any."""
        images = self.pack_of(hidden_states, position_embeddings).images(cu_seqlens)
        return self.attend(hidden_states, images, position_embeddings)

    def attend(self, x: Tensor, images: list[Images], turned_by: tuple[Tensor, Tensor] | None) -> Tensor:
        """Project, mix, project back: tokens (n, c) of these images, turned by cosines and sines (n, d)."""
        projected = torch.cat([self.through(name, x) for name in self.projected_as], dim=-1)
        heads = projected.unflatten(-1, (-1, self.width))
        answers = [self._of_one_size(one, heads, x, turned_by) for one in images]
        with outside_of_traces():
            order = torch.cat([one.tokens.flatten() for one in images]).argsort()
        return self.through(self.answered_as, taken(torch.cat(answers), order))

    def prepared(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Heads (…, d) behind what the layer does to them before they are turned."""
        return self.through("q_norm", q), self.through("k_norm", k), v

    def pack_of(self, x: Tensor, turned_by: tuple[Tensor, Tensor] | None) -> PackGrid:
        """Where tokens (n, c) that are turned by these cosines and sines (n, d) stand."""
        return self.recorder.pack_of(x)

    def _of_one_size(self, images: Images, heads: Tensor, x: Tensor, turned_by: tuple[Tensor, Tensor] | None) -> Tensor:
        """(b·m, h·d), of heads (n, h + 2k, d) of tokens x (n, c): those of queries, then of keys and of values."""
        own = taken(heads, images.tokens).transpose(1, 2)
        of_keys = (own.shape[1] - self.num_heads) // 2
        q, k, v = self.prepared(*own.split([self.num_heads, of_keys, of_keys], dim=1))
        rotation = None
        if turned_by is not None:
            cos, sin = (taken(turns, images.tokens[0]) for turns in turned_by)
            rotation = Rotation(cos, with_signs(sin, interleaved=self.interleaved), interleaved=self.interleaved)
        return self.mix(q, k, v, taken(x, images.tokens), grid=images.grid, rotation=rotation).flatten(0, 1)


def taken(rows: Tensor, numbers: Tensor) -> Tensor:
    """`rows[numbers]`: in engines a step that any version of them knows."""
    return rows.index_select(0, numbers.flatten()).unflatten(0, numbers.shape)


class PackedApartAttention(PackedAttention):
    """One whose projections are apart."""

    projected_as: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")


class KimiAttention(PackedApartAttention):
    """Of Kimi K2.5, whose frames of a film see each other: films are refused, images are not."""

    replaces: ClassVar[tuple[str, ...]] = classes_of(OF_KIMI)


class PackedSiglipAttention(PackedApartAttention):
    """Of SigLIPs that are handed packs, in PaddleOCR-VL and VideoLLaMA 3, and of LFM 3: the answer is a pair."""

    replaces: ClassVar[tuple[str, ...]] = classes_of(OF_SIGLIP)
    answered_as: ClassVar[str] = "out_proj"

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return super().forward(*args, **kwargs), None


class PixtralAttention(PackedApartAttention):
    """Of Pixtral, the images of Mistral 3 and LightOnOCR: a batch of one pack, whose images begin in the first corner.

    What else says where they begin is a mask of all pairs of tokens, which is not looked at.
    """

    replaces: ClassVar[tuple[str, ...]] = classes_of(OF_PIXTRAL)
    answered_as: ClassVar[str] = "o_proj"

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Tokens (1, n, c) of all images, turned by cosines and sines (n, d)."""
        assert position_embeddings is not None
        tokens = hidden_states.squeeze(0)
        with outside_of_traces():
            pack = self.pack_of(tokens, position_embeddings)
            corners = (pack.places == 0).all(1).nonzero().flatten().tolist()
        images = pack.images_between([*corners, len(tokens)])
        return self.attend(tokens, images, position_embeddings).unsqueeze(0), None
