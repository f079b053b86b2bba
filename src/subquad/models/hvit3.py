"""H-ViT³'s pyramid: four stages of blocks with conditional positions and MLPs that see the map.

Han et al. 2026, arXiv 2512.01643, section 5, in the details of the released code. Tokens are placed by convolutions of
the map and by rotary positions, so that images of any size go through; every convolution that halves a map rounds up.
"""

from collections.abc import Sequence

from timm.models import register_notrace_module
from torch import Tensor, nn

from subquad.models.backbone import Backbone, grids_of
from subquad.models.convolutions import ConvNorm, Downsample, stem_strides
from subquad.models.layers import Block, Mechanism, SelfAttention
from subquad.models.map_layers import MapMlp
from subquad.models.stages import BlockPlace, rotary_stages
from subquad.ranges import Count, DropRate, Positive, Ratio, checks_arguments


class HViT3(Backbone):
    """A pyramid with its own width in each stage and a batch norm of the last tokens; the head reads the mean.

    Args:
        attention: the mechanism of each block.
        depths: blocks of each stage.
        patch_size: 4, or 2 or 1 for small images.
        embed_dims: channels of each stage.
        num_heads: heads of each stage's blocks.
        qkv_bias: whether the projection to queries, keys and values has a bias.
        rope: rotary positions as in a network of `subquad.rope.ROPES`; None for none.
    """

    layout = "hvit3"
    spreads = True
    first_conv = "stages.0.embed.0.conv"

    @checks_arguments
    def __init__(
        self,
        attention: Sequence[Mechanism],
        *,
        depths: Sequence[Positive],
        img_size: tuple[Positive, Positive] = (224, 224),
        patch_size: Positive = 4,
        in_chans: Positive = 3,
        num_classes: Count = 1000,
        embed_dims: Sequence[Positive] = (64, 128, 320, 512),
        num_heads: Sequence[Positive] = (2, 4, 10, 16),
        mlp_ratio: Ratio = 4,
        qkv_bias: bool = True,
        rope: str | None = None,
        global_pool: str = "avg",
        drop_rate: DropRate = 0,
        drop_path_rate: DropRate = 0,
    ) -> None:
        def block(mechanism: Mechanism, at: BlockPlace) -> nn.Module:
            attn = SelfAttention(at.dim, at.num_heads, mechanism, grid=at.grid, qkv_bias=qkv_bias)
            return ConvMlpBlock(at.dim, attn, mlp_ratio=mlp_ratio, drop=drop_rate, drop_path=at.drop_path)

        def embed(s: int) -> nn.Module:
            return Downsample(*embed_dims[s - 1 : s + 1]) if s else conv_stem(in_chans, embed_dims[0], patch_size)

        stages = rotary_stages(
            attention,
            depths=depths,
            dims=embed_dims,
            num_heads=num_heads,
            grids=grids_of(img_size, patch_size, len(depths)),
            block=block,
            embed=embed,
            rope=rope,
            drop_rates=[drop_rate, *[0] * (len(depths) - 1)],
            drop_path_rate=drop_path_rate,
        )
        super().__init__(
            stages,
            embed_dims,
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            norm=TokenBatchNorm(embed_dims[-1]),
            global_pool=global_pool,
            drop_rate=drop_rate,
        )


class ConvMlpBlock(Block):
    """x + conv(x), then + attention(norm(x)), then + mlp(norm(x)), whose hidden channels see their neighbours.

    A depthwise 3×3 is added to them behind their GELU, and a second GELU follows.
    """

    def __init__(
        self, dim: int, attn: nn.Module, *, mlp_ratio: float = 4, drop: float = 0, drop_path: float = 0
    ) -> None:
        super().__init__(dim, attn, mlp_ratio=mlp_ratio, drop_path=drop_path, eps=1e-5, cpe=True)
        self.mlp = MapMlp(dim, int(dim * mlp_ratio), in_front=True, behind=True, drop=drop)


@register_notrace_module  # torch.fx can't follow PyTorch's check of the shape
class TokenBatchNorm(nn.BatchNorm1d):
    """A batch norm of tokens (b, n, c) over images and tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


def conv_stem(in_chans: int, dim: int, patch_size: int) -> nn.Sequential:
    """Images to a map `patch_size` times smaller: convolutions with batch norm, ReLU between them."""
    strides, narrow = stem_strides(patch_size), max(dim // 2, 1)
    layers: list[nn.Module] = [ConvNorm(in_chans, narrow, 3, stride=strides[0]), nn.ReLU(inplace=True)]
    for _ in range(2):
        layers += [ConvNorm(narrow, narrow, 3), nn.ReLU(inplace=True)]
    layers += [ConvNorm(narrow, 4 * dim, 3, stride=strides[1]), nn.ReLU(inplace=True), ConvNorm(4 * dim, dim, 1)]
    return nn.Sequential(*layers)
