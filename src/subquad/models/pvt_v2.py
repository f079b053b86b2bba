"""PVTv2, a pyramid of overlapping patches without position tables: MLPs look at the map, which tells tokens apart.

PVT v2: Improved Baselines with Pyramid Vision Transformer, Wang et al. 2022, arXiv 2106.13797. Keys of quadratic blocks
are reduced as in PVT. Images of any size: every embedding rounds up.
"""

import math
from collections.abc import Sequence

from torch import nn

from subquad.models.backbone import Backbone, grids_of
from subquad.models.layers import Block, Mechanism
from subquad.models.map_layers import MapMlp
from subquad.models.pvt import SpatialReductionAttention
from subquad.models.stages import ConvEmbed, Stage, by_stage, drop_path_rates
from subquad.ranges import Count, DropRate, Positive, Ratio, checks_arguments


class PVTv2(Backbone):
    """A pyramid with its own width and a norm at the end in each stage; the head reads the mean.

    Args:
        attention: the mechanism of each block.
        depths: blocks of each stage.
        sr_ratio: of each block, how many times fewer rows and columns of keys and values there are.
        patch_size: stride s of the first embedding; windows are 2s - 1 px wide, 7 as published.
        embed_dims: channels of each stage.
        num_heads: heads of each stage's blocks.
        mlp_ratios: of each stage.
        qkv_bias: whether the projections to queries, keys and values have a bias.
    """

    layout = "pvt_v2"
    spreads = True
    everything = 1

    @checks_arguments
    def __init__(
        self,
        attention: Sequence[Mechanism],
        *,
        depths: Sequence[Positive],
        sr_ratio: Sequence[Positive],
        img_size: tuple[Positive, Positive] = (224, 224),
        patch_size: Positive = 4,
        in_chans: Positive = 3,
        num_classes: Count = 1000,
        embed_dims: Sequence[Positive] = (64, 128, 320, 512),
        num_heads: Sequence[Positive] = (1, 2, 5, 8),
        mlp_ratios: Sequence[Ratio] = (8, 8, 4, 4),
        qkv_bias: bool = True,
        global_pool: str = "avg",
        drop_rate: DropRate = 0,
        drop_path_rate: DropRate = 0,
    ) -> None:
        grids = grids_of(img_size, patch_size, len(depths))
        mechanisms, ratios = by_stage(attention, depths), by_stage(sr_ratio, depths)
        rates = drop_path_rates(drop_path_rate, depths)
        stages = []
        for s, (dim, grid) in enumerate(zip(embed_dims, grids, strict=True)):
            blocks = [
                MapBlock(
                    dim,
                    SpatialReductionAttention(
                        dim, num_heads[s], mechanism, grid=grid, sr_ratio=ratio, qkv_bias=qkv_bias
                    ),
                    mlp_ratio=mlp_ratios[s],
                    drop=drop_rate,
                    drop_path=rate,
                )
                for mechanism, ratio, rate in zip(mechanisms[s], ratios[s], rates[s], strict=True)
            ]
            stride = patch_size if s == 0 else 2
            in_dim = in_chans if s == 0 else embed_dims[s - 1]
            embed = ConvEmbed(in_dim, dim, 2 * stride - 1, stride, padding=stride - 1)
            norm = nn.LayerNorm(dim, eps=1e-6)
            stages.append(Stage(embed, blocks, dim, grid=grid, drop_rate=drop_rate, norm=norm))
        super().__init__(
            stages,
            embed_dims,
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            norm=nn.Identity(),
            global_pool=global_pool,
            drop_rate=drop_rate,
        )
        self.apply(init_convolution)

    @staticmethod
    def default_reach(img_size: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        """Where attention is quadratic, each stage's default."""
        return {"sr_ratio": (8, 4, 2, 1)}


class MapBlock(Block):
    """A block whose MLP has a depthwise 3×3 of its hidden channels, on their map, in front of the GELU."""

    def __init__(self, dim: int, attn: nn.Module, *, mlp_ratio: float, drop: float = 0, drop_path: float = 0) -> None:
        super().__init__(dim, attn, mlp_ratio=mlp_ratio, drop_path=drop_path)
        self.mlp = MapMlp(dim, int(dim * mlp_ratio), in_front=False, behind=True, drop=drop)


def init_convolution(module: nn.Module) -> None:
    """Weights of a convolution, a mechanism's too: normal, variance 2 / (window · outputs of a group); bias zero."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 4:
        return
    # what a mechanism filters its values with is depthwise and no nn.Conv2d
    outputs = len(weight) // module.groups if isinstance(module, nn.Conv2d) else 1
    nn.init.normal_(weight, std=math.sqrt(2 / (outputs * weight[0, 0].numel())))
    if bias is not None:
        nn.init.zeros_(bias)
