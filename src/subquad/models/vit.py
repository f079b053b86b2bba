"""ViT, the plain host: all tokens attend to all, in one stage. DeiT, Touvron et al. 2020, arXiv 2012.12877.

Images of any size: they are filled up to whole patches and the position table is resampled to their grid.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from subquad.grid import TokenGrid
from subquad.models.backbone import Backbone, grids_of
from subquad.models.layers import Block, Mechanism, SelfAttention, Stage, drop_path_rates, fill_up
from subquad.ranges import Count, DropRate, Positive, Ratio, checks_arguments


class Plain(Backbone):
    """A network of one stage; its levels are its blocks. `sizes` are those of `Backbone`."""

    is_plain = True

    def __init__(self, stage: Stage, dim: int, *, patch_size: int, **sizes: Any) -> None:
        super().__init__([stage], [dim], patch_size=patch_size, **sizes)
        level = {"num_chs": dim, "reduction": patch_size}
        self.feature_info = [level | {"module": f"stages.0.blocks.{i}"} for i in range(len(stage.blocks))]

    @property
    def blocks(self) -> nn.ModuleList:
        """All blocks."""
        return self.stages[0].blocks

    def _norm_fits(self, level: int) -> bool:
        return True

    def _cut_after(self, level: int) -> None:
        self.stages[0].blocks = self.blocks[: level + 1]

    def no_weight_decay(self) -> set[str]:
        """Parameters that the papers' recipes do not decay."""
        return super().no_weight_decay() | {"stages.0.pos_embed.table"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layer groups, for layer-wise learning rates."""
        return {
            "stem": r"^stages\.0\.(?:embed|pos_embed|prefix_tokens)",
            "blocks": [(r"^stages\.0\.blocks\.(\d+)", None), (r"^norm", (99999,))],
        }


class ViT(Plain):
    """A plain vision transformer; all tokens attend to all.

    Args:
        attention: the mechanism of each block.
        img_size: (height, width) in pixels that position parameters are made for; other sizes work.
        embed_dim: channels c.
        num_heads: heads of every block.
        qkv_bias: whether the projection to queries, keys and values has a bias.
        class_token: a learned token in front, which the head reads; without it the head reads the mean.
        reg_tokens: further learned tokens in front, which nothing reads (registers, arXiv 2309.16588).
        global_pool: what the head reads, see `Backbone`; the class token if there is one.
        drop_path_rate: stochastic depth of the last block; it rises linearly from 0.
    """

    layout = "vit"

    @checks_arguments
    def __init__(
        self,
        attention: Sequence[Mechanism],
        *,
        img_size: tuple[Positive, Positive] = (224, 224),
        patch_size: Positive = 16,
        in_chans: Positive = 3,
        num_classes: Count = 1000,
        embed_dim: Positive = 768,
        num_heads: Positive = 12,
        mlp_ratio: Ratio = 4,
        qkv_bias: bool = True,
        class_token: bool = True,
        reg_tokens: Count = 0,
        global_pool: str | None = None,
        drop_rate: DropRate = 0,
        drop_path_rate: DropRate = 0,
    ) -> None:
        grid = TokenGrid(*grids_of(img_size, patch_size, 1)[0].shape, int(class_token) + reg_tokens)
        rates = drop_path_rates(drop_path_rate, [len(attention)])[0]
        blocks = [
            Block(
                embed_dim,
                SelfAttention(embed_dim, num_heads, mechanism, grid=grid, qkv_bias=qkv_bias),
                mlp_ratio=mlp_ratio,
                drop=drop_rate,
                drop_path=rate,
            )
            for mechanism, rate in zip(attention, rates, strict=True)
        ]
        embed = PatchEmbed(in_chans, embed_dim, patch_size)
        stage = Stage(embed, blocks, embed_dim, grid=grid, positions="bicubic", drop_rate=drop_rate)
        super().__init__(
            stage,
            embed_dim,
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            norm=nn.LayerNorm(embed_dim, eps=1e-6),
            global_pool=("token" if class_token else "avg") if global_pool is None else global_pool,
            drop_rate=drop_rate,
        )

    def walk(self, x: Tensor) -> Iterator[tuple[Tensor, TokenGrid]]:
        """Tokens and their grid after each block."""
        yield from self.stages[0].steps(x)


class PatchEmbed(nn.Module):
    """A linear map of each patch: (b, c_in, height, width) to (b, c, y, x), the image filled up to whole patches."""

    def __init__(self, in_chans: int, dim: int, patch_size: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(in_chans, dim, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(fill_up(x, self.patch_size))
