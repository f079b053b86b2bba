"""Attention layers of Llama's vision towers, which are handed tiles of images: 3.2, which sees all of them, and 4.

Letters: b images, t tiles of each, m tokens of a tile, n = t·m tokens, d channels of a head, c = h·d channels.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from subquad.conversion.families.transformers_attention import TransformersAttention
from subquad.conversion.grid_recorder import GridRecorder, is_called
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.rope import Rotation, with_signs


class MllamaAttention(TransformersAttention):
    """Of Llama 3.2 Vision: the maps of an image's tiles stand below one another, as one.

    A tile has a class token in front of its map and some behind it that fill it up to a multiple of eight; these are
    prefix tokens. Those that fill up, and tiles that are not there, are seen by all but one another: a mechanism that
    forms no pairs lets them see each other as well.
    """

    replaces = ("transformers.models.mllama.modeling_mllama.MllamaVisionAttention",)
    # tokens are put in another order
    projected_by = ()

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        self.num_tiles = original.config.max_num_tiles

    @classmethod
    def grid_of(cls, original: Any, grid: TokenGrid) -> TokenGrid:
        tiles, places = original.config.max_num_tiles, int(grid.num_places)
        beside = -(-(places + 1) // 8) * 8 - places
        return TokenGrid(tiles * grid.height, grid.width, tiles * beside)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Tokens (b, n, c), and a mask of pairs (b, 1, n, n), below zero for those that are not seen."""
        numbers = torch.arange(hidden_states.shape[1], device=hidden_states.device).view(self.num_tiles, -1)
        tile = self.recorder.grid_within(hidden_states[:, : numbers.shape[1]], self)
        classes, places, rest = numbers.split([1, tile.num_places, tile.prefix - 1], dim=1)
        order = torch.cat([part.flatten() for part in (classes, rest, places)])
        grid = TokenGrid(self.num_tiles * tile.height, tile.width, self.num_tiles * tile.prefix)
        mask = None
        if attention_mask is not None and "mask" in self.inner.inputs:
            mask = (attention_mask < 0)[..., order[:, None], order]
        x = hidden_states.index_select(1, order)
        q, k, v = self._heads(*(self.through(name, x) for name in ("q_proj", "k_proj", "v_proj")))
        y = self.mix(q, k, v, x, grid=grid, mask=mask).index_select(1, order.argsort())
        return self.through(self.output_projection, y), None


class UnfoldRecorder(GridRecorder):
    """Listens in front of what cuts a tile into patches without a convolution."""

    in_front: ClassVar[bool] = True

    @classmethod
    def hears(cls, module: Any) -> bool:
        return is_called(module, "transformers.models.llama4.modeling_llama4.Llama4UnfoldConvolution")

    @classmethod
    def map_from(cls, embedding: Any, size: tuple[int, int]) -> tuple[int, int]:
        height, width = (length // patch for length, patch in zip(size, embedding.unfold.kernel_size, strict=True))
        if min(height, width) < 1:
            raise SubquadError(f"images of {size[0]}×{size[1]} px hold no patch of {embedding.unfold.kernel_size}")
        return height, width

    def __call__(self, module: Any, arguments: Any, keywords: Any) -> None:
        image = arguments[0] if arguments else keywords["hidden_states"]
        self.record(TokenGrid(*self.map_from(module, image.shape[-2:])))


class Llama4Attention(TransformersAttention):
    """Of Llama 4: each tile sees itself, its class token stands behind the map, and here in front of it."""

    replaces = ("transformers.models.llama4.modeling_llama4.Llama4VisionAttention",)
    listener: ClassVar[type[GridRecorder]] = UnfoldRecorder
    projected_by = ()

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, freqs_ci: Tensor, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Tokens (b, m, c), whose pairs of channels are turned by complex numbers (m, 1, d / 2)."""
        x, turns = hidden_states.roll(1, dims=1), freqs_ci.flatten(1).roll(1, dims=0)
        cos, sin = (part.repeat_interleave(2, dim=-1) for part in (turns.real, turns.imag))
        rotation = Rotation(cos, with_signs(sin, interleaved=True), interleaved=True)
        q, k, v = self._heads(*(self.through(name, x) for name in ("q_proj", "k_proj", "v_proj")))
        y = self.mix(q, k, v, x, rotation=rotation).roll(-1, dims=1)
        return self.through(self.output_projection, y), None
