"""SOFT's own network: a convolutional pyramid, post-norm blocks, and softmax with a class token in the last stage.

SOFT, Lu et al. 2021, arXiv 2110.11945, table 1, in the details of the released code. Images of any size: every
convolution that halves a map rounds up.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.models.backbone import Backbone, grids_of
from subquad.models.layers import Block, Mechanism, SelfAttention
from subquad.models.stages import Stage, by_stage, drop_path_rates
from subquad.ranges import Count, DropRate, Positive, Ratio, checks_arguments

HEAD_DIM = 32
STEM_STRIDES = {4: (2, 1, 2), 2: (2, 1, 1), 1: (1, 1, 1)}
"""Of the stem's three convolutions, by the size of a patch: 4 as published, less for small images."""


class SoftNet(Backbone):
    """A pyramid of four stages; heads are 32 channels wide in all of them.

    Args:
        attention: the mechanism of each block.
        depths: blocks of each stage.
        embed_dims: channels of each stage.
        patch_size: 4, or 2 or 1 for small images.
        stem_dim: channels of the first convolutions.
        drop_path_rate: element dropout of the branches in all stages but the last, stochastic depth there, as released.
    """

    layout = "softnet"
    spreads = True
    first_conv = "stages.0.embed.0"

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
        stem_dim: Positive = 32,
        mlp_ratio: Ratio = 4,
        global_pool: str = "token",
        drop_rate: DropRate = 0,
        drop_path_rate: DropRate = 0,
    ) -> None:
        if patch_size not in STEM_STRIDES:
            raise SubquadError(f"SOFT's stem makes patches of 4, 2 or 1 px, not of {patch_size}")
        grids = grids_of(img_size, patch_size, len(depths))
        grids[-1] = TokenGrid(*grids[-1].shape, prefix=1)
        mechanisms, rates = by_stage(attention, depths), drop_path_rates(drop_path_rate, depths)
        stages = []
        for s, (dim, grid) in enumerate(zip(embed_dims, grids, strict=True)):
            block = PostNormBlock if s < len(depths) - 1 else Block
            blocks = [
                block(
                    dim,
                    SelfAttention(dim, dim // HEAD_DIM, mechanism, grid=grid),
                    mlp_ratio=mlp_ratio,
                    drop=drop_rate,
                    drop_path=rate,
                )
                for mechanism, rate in zip(mechanisms[s], rates[s], strict=True)
            ]
            if s == 0:
                embed = conv_stack(in_chans, *zip((stem_dim, stem_dim, dim), STEM_STRIDES[patch_size], strict=True))
            else:
                embed = conv_stack(embed_dims[s - 1], (dim, 2))
            stages.append(Stage(embed, blocks, dim, grid=grid, positions="bilinear", drop_rate=drop_rate))
        super().__init__(
            stages,
            embed_dims,
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            norm=nn.LayerNorm(embed_dims[-1], eps=1e-6),
            global_pool=global_pool,
            drop_rate=drop_rate,
        )


class PostNormBlock(Block):
    """norm(x + drop(attention(x))), then norm(x + drop(mlp(x))); GELU in its tanh form."""

    def __init__(
        self, dim: int, attn: nn.Module, *, mlp_ratio: float = 4, drop: float = 0, drop_path: float = 0
    ) -> None:
        gelu = partial(nn.GELU, approximate="tanh")
        super().__init__(dim, attn, mlp_ratio=mlp_ratio, drop=drop, eps=1e-5, act_layer=gelu)
        self.drop_path = nn.Dropout(drop_path)

    def forward(self, x: Tensor, *, grid: TokenGrid) -> Tensor:  # type: ignore[override]
        x = self.norm1(x + self.drop_path(self.attn(x, grid=grid)))
        return self.norm2(x + self.drop_path(self.mlp(x)))


def conv_stack(in_chans: int, *layers: tuple[int, int]) -> nn.Sequential:
    """3×3 convolutions of (channels, stride), each with batch norm and ReLU."""
    modules: list[nn.Module] = []
    for dim, stride in layers:
        modules += [nn.Conv2d(in_chans, dim, 3, stride=stride, padding=1), nn.BatchNorm2d(dim), nn.ReLU(inplace=True)]
        in_chans = dim
    return nn.Sequential(*modules)
