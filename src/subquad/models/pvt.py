"""PVT, a pyramid of four stages: tokens attend to all, or to fewer keys by spatial reduction.

Pyramid Vision Transformer, Wang et al. 2021, arXiv 2102.12122, as the linear families have it: no class token, no
final norm, the head reads the mean. Images of any size: every embedding fills its map up to whole patches, or drops
what fills none, as the released dense networks do.
"""

from collections.abc import Sequence

from einops import rearrange
from torch import Tensor, nn

from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.models.backbone import Backbone, grids_of
from subquad.models.layers import Block, Mechanism, SelfAttention, move_tables
from subquad.models.stages import ConvEmbed, Stage, by_stage, drop_path_rates
from subquad.ranges import Count, DropRate, Positive, Ratio, checks_arguments


class PVT(Backbone):
    """A pyramid with a position table and its own width in each stage.

    Args:
        attention: the mechanism of each block.
        depths: blocks of each stage.
        sr_ratio: of each block, how many times fewer rows and columns of keys and values there are.
        embed_dims: channels of each stage.
        num_heads: heads of each stage's blocks.
        mlp_ratios: of each stage.
        qkv_bias: whether the projections to queries, keys and values have a bias.
        drop_remainder: whether rows and columns that fill no patch are dropped instead of filled up with zeros.
    """

    layout = "pvt"
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
        drop_remainder: bool = False,
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
                Block(
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
            width = in_chans if s == 0 else embed_dims[s - 1]
            embed = ConvEmbed(width, dim, stride, stride, drop_remainder=drop_remainder)
            stages.append(Stage(embed, blocks, dim, grid=grid, positions="bilinear", drop_rate=drop_rate))
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

    @staticmethod
    def default_reach(img_size: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        """Where attention is quadratic, each stage's default."""
        return {"sr_ratio": (8, 4, 2, 1)}


class SpatialReductionAttention(SelfAttention):
    """Keys and values come from a map that a convolution has made `sr_ratio` times smaller; 1 leaves all of them."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        attention: Mechanism,
        *,
        grid: TokenGrid,
        sr_ratio: int,
        qkv_bias: bool = True,
    ) -> None:
        if sr_ratio < 1:
            raise SubquadError(f"sr_ratio is at least 1, got {sr_ratio}")
        super().__init__(dim, num_heads, attention, grid=grid, kv_grid=reduced(grid, sr_ratio), qkv_bias=qkv_bias)
        self.sr_ratio = sr_ratio
        self.reduce = ConvEmbed(dim, dim, sr_ratio, sr_ratio) if sr_ratio > 1 else None

    def forward(  # type: ignore[override]
        self, x: Tensor, *, grid: TokenGrid, padding: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        if self.reduce is None:
            return super().forward(x, grid=grid, padding=padding, mask=mask)
        if padding is not None or mask is not None:
            raise SubquadError(f"keys that are reduced {self.sr_ratio} times can't be told apart by padding or a mask")
        keys = rearrange(self.reduce(grid.to_image(x)), "b c y x -> b (y x) c")
        supply = {"x": x, "padding": None, "mask": None, "rotation": None}
        return self.mix(supply | self.heads(x, keys), grid, reduced(grid, self.sr_ratio))

    def is_plain_on(self, grid: TokenGrid) -> bool:
        """Where keys are not reduced."""
        return self.reduce is None

    def regrid(self, old: TokenGrid, new: TokenGrid) -> None:
        move_tables(self.inner, {reduced(old, self.sr_ratio): reduced(new, self.sr_ratio), old: new})


def reduced(grid: TokenGrid, sr_ratio: int) -> TokenGrid:
    """The grid of keys."""
    return grid.reduced(sr_ratio)
