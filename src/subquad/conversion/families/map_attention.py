"""Attention layers of timm's hybrids that are handed maps, and no rows of tokens: each knows where its tokens stand.

FastViT and MobileCLIP (Vasu et al. 2023, arXiv 2303.14189; 2024, arXiv 2311.17049), Visformer (Chen et al. 2021, arXiv
2104.12533), VOLO (Yuan et al. 2021, arXiv 2106.13112), CoAtNet (Dai et al. 2021, arXiv 2106.04803), MobileNetV4 and
MobileNetV5, which is Gemma 3n's (Qin et al. 2024, arXiv 2404.10518). What is in front of their layers, branches that
are fused later among it, is not asked: the network is run once to see which maps reach them.

Letters: b batch, h heads, n tokens, d channels of a head, c channels, y x rows and columns.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor, nn

from subquad.attention.bricks import is_conv
from subquad.conversion.converted_attention import ConvertedAttention, Mechanism, is_quadratic
from subquad.conversion.families.timm_biased_attention import WithPairBiases
from subquad.conversion.grid_recorder import GridRecorder, OverlappingRecorder
from subquad.errors import SubquadError
from subquad.grid import TokenGrid


class MapRecorder(OverlappingRecorder):
    """Listens to a network as a whole, and need not know more than that it is handed images.

    Its first convolution is no place to listen at: timm's `reparameterize_model` puts another one there.
    """

    in_front: ClassVar[bool] = True

    def __call__(self, module: Any, arguments: Any, named: Any) -> None:
        """What a hook in front of the network is called with.

        Raises:
            SubquadError: it is one image without a batch.
        """
        x = next(iter((*arguments, *named.values())), None)
        if isinstance(x, Tensor) and x.dim() == 3:
            raise SubquadError(
                f"a converted network takes images (b, c, height, width), got {tuple(x.shape)}: x[None] makes a batch "
                "of one image"
            )


class MapAttention(ConvertedAttention):
    """What all of them share: a map (b, c, y, x) is projected by a fused layer, mixed, and projected back.

    Attributes:
        channels_last: whether maps are (b, y, x, c).
    """

    host: ClassVar[str] = "pvt"
    listener: ClassVar[type[GridRecorder]] = MapRecorder
    is_handed_maps: ClassVar[bool] = True
    channels_last: ClassVar[bool] = False

    def scale_of(self, original: Any) -> float | None:
        # which PyTorch's fused attention is not told; one of timm's two classes has none
        return None if getattr(original, "fused_attn", False) else getattr(original, "scale", None)

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_heads, original.head_dim

    def kept(self, original: nn.Module) -> Iterable[tuple[str, nn.Module | nn.Parameter]]:
        return ((name, part) for name, part in super().kept(original) if name != "attn_drop")

    @classmethod
    def map_under(cls, x: Tensor) -> TokenGrid:
        """Where the tokens of a map stand that such a layer is called with."""
        height, width = x.shape[1:3] if cls.channels_last else x.shape[2:4]
        return TokenGrid(height, width)

    def forward(self, x: Tensor) -> Tensor:
        grid = self.map_under(x)
        tokens = x.flatten(1, 2) if self.channels_last else x.flatten(2).mT
        y = self.mix(*self.heads(tokens, x, grid), tokens, grid=grid)
        return self.through("proj_drop", self.answers(y, grid))

    def heads(self, tokens: Tensor, x: Tensor, grid: TokenGrid) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (b, h, n, d) of a map x, whose tokens are (b, n, c)."""
        q, k, v = map(self.split, self.through("qkv", tokens).chunk(3, dim=-1))
        return q, k, v

    def answers(self, y: Tensor, grid: TokenGrid) -> Tensor:
        """A map as the layer gives it, of what the mechanism makes of the heads (b, n, h·d)."""
        y = self.through("proj", y)
        return y.unflatten(1, grid.shape) if self.channels_last else grid.to_image(y)


class FastVitAttention(MapAttention):
    """Linear layers of a map's tokens."""

    replaces: ClassVar[tuple[str, ...]] = ("timm.models.fastvit.Attention",)


class VoloAttention(MapAttention):
    """The same, channels last: of VOLO's later stages."""

    replaces: ClassVar[tuple[str, ...]] = ("timm.models.volo.Attention",)
    channels_last: ClassVar[bool] = True

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_heads, original.proj.in_features // original.num_heads


class VoloOutlook(VoloAttention):
    """Of VOLO's first stage, within windows, which stay: they are cheap as they are."""

    replaces: ClassVar[tuple[str, ...]] = ("timm.models.volo.OutlookAttention",)
    others_see: ClassVar[str | None] = "windows"

    @classmethod
    def is_target(cls, original: nn.Module, block: nn.Module, number: int) -> bool:
        return False


class VoloClassAttention(VoloAttention):
    """VOLO's last blocks, in which one token reads all others: no attention among tokens."""

    replaces: ClassVar[tuple[str, ...]] = ("timm.models.volo.ClassAttention",)

    @classmethod
    def is_self_attention(cls, original: nn.Module, block: nn.Module, path: str) -> bool:
        return False


class VisformerAttention(MapAttention):
    """Convolutions of a pixel each."""

    replaces: ClassVar[tuple[str, ...]] = ("timm.models.visformer.Attention",)

    def heads(self, tokens: Tensor, x: Tensor, grid: TokenGrid) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (one.flatten(2).mT for one in self.through("qkv", x).chunk(3, dim=1))
        return self.split(q), self.split(k), self.split(v)

    def answers(self, y: Tensor, grid: TokenGrid) -> Tensor:
        return self.through("proj", grid.to_image(y))


class TimmAttention2d(VisformerAttention):
    """The same, the heads outermost if wanted."""

    replaces: ClassVar[tuple[str, ...]] = ("timm.layers.attention2d.Attention2d",)

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        self.head_first = bool(original.head_first)

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_heads, original.dim_head

    def tokens_width(self, original: Any) -> int:
        return channels_of(original.qkv)

    def heads(self, tokens: Tensor, x: Tensor, grid: TokenGrid) -> tuple[Tensor, Tensor, Tensor]:
        if not self.head_first:
            return super().heads(tokens, x, grid)
        q, k, v = self.through("qkv", x).flatten(2).unflatten(1, (self.num_heads, -1)).mT.chunk(3, dim=-1)
        return q, k, v

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        refuse_mask(attn_mask)
        return super().forward(x)


class CoAtNetAttention(WithPairBiases, TimmAttention2d):
    """The same with biases of each pair of tokens, which mechanisms that form no pairs go without, at any size."""

    replaces: ClassVar[tuple[str, ...]] = ("timm.models.maxxvit.Attention2d",)

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        grid, tokens = self.map_under(x), x.flatten(2).mT
        y = self.mix_biased(*self.heads(tokens, x, grid), tokens, shared_rel_pos, grid)
        return self.through("proj_drop", self.answers(y, grid))


class MultiQueryAttention(MapAttention):
    """MobileNetV4's and V5's: heads share keys and values, in the earlier layers those of fewer places.

    A quadratic mechanism keeps the fewer places. Others see all of them: the convolution of each channel that made
    them fewer goes from place to place, so that the old ones are among the new.
    """

    replaces: ClassVar[tuple[str, ...]] = ("timm.layers.attention2d.MultiQueryAttention2d",)

    def __init__(self, original: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(original, *args, **kwargs)
        if not self.reduces:
            for name in ("key", "value"):
                convolution: Any = self.get_submodule(name)._modules.get("down_conv")
                if convolution is not None:
                    go_everywhere(convolution)

    def check(self, original: Any) -> None:
        if original.has_query_strides:
            raise SubquadError(
                f"its queries stand {original.query_strides} places apart, on no map of the network's: leave its block "
                "out of `blocks`"
            )
        if original.key_dim != original.value_dim:
            raise SubquadError(
                f"its keys have {original.key_dim} channels and its values {original.value_dim}: converted layers have "
                "as many of both, so leave its block out of `blocks`"
            )
        super().check(original)

    def sizes(self, original: Any) -> tuple[int, int]:
        return original.num_heads, original.key_dim

    def tokens_width(self, original: Any) -> int:
        return channels_of(original.query.proj)

    def make_inner(self, original: Any, mechanism: Mechanism, grid: TokenGrid) -> Any:
        self.reduces = is_quadratic(mechanism)
        step = original.kv_stride if self.reduces else 1
        fewer = TokenGrid(-(-grid.height // step), -(-grid.width // step))
        return mechanism(self.num_heads * self.width, self.num_heads, grid=grid, kv_grid=fewer)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        refuse_mask(attn_mask)
        maps = [self.through(name, x) for name in ("query", "key", "value")]
        q, k, v = (self.split(one.flatten(2).mT) for one in maps)
        grid = self.map_under(x)
        y = self.mix(q, k, v, x.flatten(2).mT, grid=grid, kv_grid=self.map_under(maps[1]))
        return self.through("output", grid.to_image(y))


def go_everywhere(convolution: Any) -> None:
    """Let a convolution of odd size answer at every place of a map, where it skipped some."""
    convolution.stride = (1, 1)
    # timm's own, whose padding is reckoned in each call, says 0
    if is_conv(convolution):
        sizes = zip(convolution.dilation, convolution.kernel_size, strict=True)
        convolution.padding = tuple(dilation * (size - 1) // 2 for dilation, size in sizes)


def channels_of(convolution: Any) -> int:
    """Channels of the maps that a convolution reads."""
    return int(convolution.in_channels)


def refuse_mask(attn_mask: Any) -> None:
    """Raise where a call hands over biases of pairs, which timm's networks never do."""
    if attn_mask is not None:
        raise SubquadError("a converted layer that is handed maps takes no attn_mask: call it without")
