"""Attention of Hiera, timm's and transformers', whose tokens come in the order of nested mask units.

Ryali et al. 2023, arXiv 2306.00989. A stride parts a map into cells. Tokens of the same corner of all cells follow one
another, corner by corner, and those of one corner, a map of cells, are parted by the next stride in the same way; what
is left at last comes row by row. Queries are pooled over the corners of the first stride, which leaves the map of the
next stage in the order of the other strides. Blocks that pool so lead from stage to stage, and stay; so do those that
see mask units, which are cheap as they are.

Letters: b batch, h heads, n tokens, d channels of a head, c channels.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from math import isqrt, prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from subquad.conversion.converted_attention import ConvertedAttention, Mechanism, channels_into
from subquad.conversion.grid_recorder import GridRecorder, OverlappingRecorder
from subquad.errors import SubquadError
from subquad.grid import TokenGrid

Strides = Sequence[tuple[int, int]]
"""Rows and columns of the cells of each stride, that of the first one first."""


class HieraRecorder(OverlappingRecorder):
    """Listens in front of timm's network, which is for images of one size, and tells its converted layers their order.

    Attributes:
        networks: full names of the classes that it listens to.
        images: what these call their images.
    """

    in_front: ClassVar[bool] = True
    networks: ClassVar[tuple[str, ...]] = ("timm.models.hiera.Hiera",)
    images: ClassVar[str] = "x"

    @classmethod
    def hears(cls, module: nn.Module) -> bool:
        return any(f"{kind.__module__}.{kind.__qualname__}" in cls.networks for kind in type(module).__mro__)

    @classmethod
    def map_from(cls, embedding: Any, size: Any) -> tuple[int, int]:
        """Rows and columns of the first stage of a network, for images of this (height, width).

        Raises:
            SubquadError: it is for others, or its tokens stand otherwise than converted layers know it.
        """
        refuse_oblong(embedding.q_stride)
        made_for = [places * step for places, step in zip(embedding.unroll.size, embedding.patch_stride, strict=True)]
        if list(size) != made_for:
            raise SubquadError(
                f"this Hiera takes {_times(made_for)} px alone, and no images of {_times(size)} px: make another one, "
                "by timm.create_model(…, img_size=…)"
            )
        height, width = embedding.unroll.size
        return height, width

    @classmethod
    def strides_left(cls, network: Any) -> Iterator[tuple[nn.Module, Strides]]:
        """The attention layer of each block, and the strides in whose order it gives its tokens."""
        # blocks may have been taken from its end
        for block, (left, _) in zip(network.blocks, network.reroll.schedule.values(), strict=False):
            yield block.attn, left

    def hook_onto(self, module: nn.Module) -> RemovableHandle:
        """Listen to a network, and tell its converted layers their order, which is the same in each call."""
        layers = list(self.strides_left(module))
        _, strides = layers[0]
        for layer, left in layers:
            if isinstance(layer, HieraAttention):
                layer.pooled, layer.left = strides[: len(strides) - len(left)], left
        return super().hook_onto(module)

    def __call__(self, module: Any, arguments: Any, named: Any) -> None:
        """What a hook in front of the network is called with.

        Raises:
            SubquadError: it is one image without a batch.
        """
        x = arguments[0] if arguments else named.get(self.images)
        if isinstance(x, Tensor) and x.dim() == 3:
            raise SubquadError(
                f"a converted network takes images (b, {x.shape[0]}, height, width), got {tuple(x.shape)}: x[None] "
                "makes a batch of one image"
            )
        if isinstance(x, Tensor):
            self.told(module, x)

    def told(self, network: Any, x: Tensor) -> None:
        """Images (b, c, height, width) come in: timm's say nothing new."""


class TransformersHieraRecorder(HieraRecorder):
    """The same of transformers', which takes images of any size where it is told to resample its positions."""

    networks: ClassVar[tuple[str, ...]] = (
        "transformers.models.hiera.modeling_hiera.HieraModel",
        "transformers.models.hiera.modeling_hiera.HieraBackbone",
    )
    images: ClassVar[str] = "pixel_values"

    @classmethod
    def map_from(cls, embedding: Any, size: Any) -> tuple[int, int]:
        if not hasattr(embedding, "unroll_schedule"):
            # that of transformers 5.24 puts its maps back into an order that they never had
            raise SubquadError(
                f"transformers' {type(embedding).__name__} leaves tokens in rows that its blocks take for mask units, "
                "so that nobody knows where they stand: open its weights with transformers.HieraModel, whose "
                "reshaped_hidden_states are maps"
            )
        if embedding.embeddings.is_mae:
            raise SubquadError(
                "a Hiera that learns to fill in masked images drops tokens: open its weights with "
                "transformers.HieraModel, which can be converted"
            )
        refuse_oblong(embedding.config.query_stride)
        return super(HieraRecorder, cls).map_from(embedding.embeddings.patch_embeddings.projection, size)

    @classmethod
    def size_of(cls, network: nn.Module, embedding: Any) -> tuple[int, ...] | None:
        """What the Hiera says, where what holds it does not."""
        return tuple(embedding.config.image_size)

    @classmethod
    def strides_left(cls, network: Any) -> Iterator[tuple[nn.Module, Strides]]:
        for stage, (left, _) in zip(network.encoder.stages, network.encoder.schedule.values(), strict=True):
            yield from ((block.attn, left) for block in stage.layers)

    def told(self, network: Any, x: Tensor) -> None:
        self.record(TokenGrid(*self.map_from(network, x.shape[2:])))

    def first_map(self, places: int) -> TokenGrid:
        """That of the first stage, which has so many places, in the call whose tokens are asked for."""
        return self._find(places, 0)


class HieraAttention(ConvertedAttention):
    """timm's: tokens (b, n, c) are put in the order of their stage's map, row by row, and back.

    Attributes:
        pooled: the strides over whose cells queries are pooled in front of the layer.
        left: those that are left in the order of its tokens.
        made_for: where these stand in images of the size that position parameters are made for.
        q_stride: how many queries become one, which timm's blocks ask where they get wider.
    """

    replaces: ClassVar[tuple[str, ...]] = ("timm.models.hiera.MaskUnitAttention",)
    listener: ClassVar[type[GridRecorder]] = HieraRecorder
    q_stride: ClassVar[int] = 1

    def __init__(self, original: Any, mechanism: Mechanism, *, grid: TokenGrid, recorder: GridRecorder) -> None:
        super().__init__(original, mechanism, grid=grid, recorder=recorder)
        self.made_for = grid
        # the recorder tells them when it begins to listen
        self.pooled: Strides = ()
        self.left: Strides = ()

    def check(self, original: Any) -> None:
        if self.queries_pooled_by(original) > 1:
            raise SubquadError("a block that pools its queries can't be converted: leave it out of `blocks`")
        if original.use_mask_unit_attn:
            raise SubquadError("it sees windows, and stays as it is: leave its block out of `blocks`")

    def scale_of(self, original: Any) -> float | None:
        # which PyTorch's fused attention is not told
        return None if getattr(original, "fused_attn", False) else float(original.scale)

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.heads, original.head_dim

    def tokens_width(self, original: Any) -> int:
        # a stage may begin with more channels, and without pooling
        return channels_into(original.qkv)

    @classmethod
    def queries_pooled_by(cls, original: Any) -> int:
        """How many queries become one."""
        return int(original.q_stride)

    @classmethod
    def is_target(cls, original: Any, block: nn.Module, number: int) -> bool:
        return not original.use_mask_unit_attn and cls.queries_pooled_by(original) == 1

    @classmethod
    def grid_behind(cls, original: Any, grid: TokenGrid) -> TokenGrid:
        side = isqrt(cls.queries_pooled_by(original))
        return TokenGrid(max(grid.height // side, 1), max(grid.width // side, 1))

    def grid_under(self, x: Tensor) -> TokenGrid:
        if x.shape[1] != self.made_for.num_places:
            raise SubquadError(
                f"{x.shape[1]} tokens are not those of a map of {self.made_for}: a converted Hiera sees images as "
                "wholes, so give it no `mask`, and set its patch_drop_rate to 0 in training"
            )
        return self.made_for

    def forward(self, x: Tensor) -> Tensor:
        grid = self.grid_under(x)
        order = self.order(grid, x.device)
        x = x.index_select(1, order)
        q, k, v = map(self.split, self.through("qkv", x).chunk(3, dim=-1))
        y = self.through("proj", self.mix(q, k, v, x, grid=grid))
        return y.index_select(1, order.argsort())

    def order(self, grid: TokenGrid, device: torch.device) -> Tensor:
        """(n,), where the token of each place of a map, row by row, comes among all."""
        down, right = _cell_of(self.left)
        nested = torch.arange(grid.num_places, device=device)
        nested = nested.view(*chain(*self.left), grid.height // down, grid.width // right)
        # a row is one of what is left at last, within it one of the last stride's cells, and so on to the first
        rows = range(2 * len(self.left), -1, -2)
        return nested.permute(*rows, *(axis + 1 for axis in rows)).flatten()


class TransformersHieraAttention(HieraAttention):
    """transformers', which answers with a pair: tokens, and weights that are not formed."""

    replaces: ClassVar[tuple[str, ...]] = ("transformers.models.hiera.modeling_hiera.HieraMaskUnitAttention",)
    listener: ClassVar[type[GridRecorder]] = TransformersHieraRecorder

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_heads, original.head_dim

    @classmethod
    def queries_pooled_by(cls, original: Any) -> int:
        return int(original.query_stride)

    def grid_under(self, x: Tensor) -> TokenGrid:
        recorder: Any = self.recorder
        down, right = _cell_of(self.pooled)
        first = recorder.first_map(x.shape[1] * down * right)
        return TokenGrid(first.height // down, first.width // right)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(hidden_states), None


def refuse_oblong(stride: Sequence[int]) -> None:
    """Raise where cells are no squares, or of no images: layers say only of how many queries they make one."""
    if len(stride) != 2 or stride[0] != stride[1]:
        raise SubquadError(f"a Hiera that pools cells of {_times(stride)} queries can't be converted: squares alone")


def _cell_of(strides: Strides) -> tuple[int, int]:
    """Rows and columns of the cells that several strides make together."""
    return prod(down for down, _ in strides), prod(right for _, right in strides)


def _times(sides: Sequence[int]) -> str:
    return "×".join(map(str, sides))
