"""ViT, the plain host: all tokens attend to all, in one stage. DeiT, Touvron et al. 2020, arXiv 2012.12877.

Its later forms are rows of the table: DeiT-III (arXiv 2204.07118), DINOv2 (arXiv 2304.07193), EVA-02 (arXiv
2303.11331), DINOv3 (arXiv 2508.10104). Images of any size: they are filled up to whole patches, the position table is
resampled to their grid, rotary positions are computed for it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from subquad.attention.bricks import ConvLayer, is_conv, is_heard
from subquad.errors import unknown_name
from subquad.grid import TokenGrid
from subquad.models.backbone import Backbone, grids_of
from subquad.models.layers import Block, Mechanism, SelfAttention
from subquad.models.stages import ImageRows, Stage, drop_path_rates, fill_up
from subquad.ranges import AboveZero, Count, DropRate, Positive, Ratio, checks_arguments
from subquad.rope import rope_of
from subquad.tracing import up_to_multiple

POSITIONS = ("all", "patches", "none")
"""Which tokens a learned position is added to."""


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
        has_table = self.stages[0].pos_embed is not None
        return super().no_weight_decay() | ({"stages.0.pos_embed.table"} if has_table else set())

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
        image_margin: pixels of zeros around each image; what lies there has tokens, too. Maps of the levels are without
            the patches that lie there as a whole.
        embed_dim: channels c.
        num_heads: heads of every block.
        mlp_ratio: hidden channels of the MLPs over `embed_dim`.
        mlp: what kind they are: "plain", "swiglu" or "swiglu_norm", see `make_mlp`.
        qkv_bias: whether the projection to queries, keys and values has a bias.
        key_bias: whether keys have one, too.
        gate_bias: whether a mechanism's gates have one; as `qkv_bias` says if left out.
        qk_norm: whether queries and keys have a norm.
        attn_norm: whether attention layers start with a norm of their own, behind that of the block.
        init_values: what LayerScale starts from; None for networks without.
        norm_eps: of all norms.
        pos_embed: which tokens a learned position is added to: "all", "patches" or "none".
        rope: rotary positions as in a network of `subquad.rope.ROPES`; None for none.
        cpe: whether each block starts with a position that is computed from its tokens, see `ConvPosition`.
        class_token: a learned token in front, which the head reads; without it the head reads the mean.
        reg_tokens: further learned tokens in front, which nothing reads (registers, arXiv 2309.16588).
        global_pool: what the head reads, see `Backbone`; the class token if there is one.
        fc_norm: whether the last norm is of what the head reads, instead of all tokens.
        drop_path_rate: stochastic depth of the last block; it rises linearly from 0.
    """

    layout = "vit"
    spreads = True

    @checks_arguments
    def __init__(
        self,
        attention: Sequence[Mechanism],
        *,
        img_size: tuple[Positive, Positive] = (224, 224),
        patch_size: Positive = 16,
        image_margin: Count = 0,
        in_chans: Positive = 3,
        num_classes: Count = 1000,
        embed_dim: Positive = 768,
        num_heads: Positive = 12,
        mlp_ratio: Ratio = 4,
        mlp: str = "plain",
        qkv_bias: bool = True,
        key_bias: bool = True,
        gate_bias: bool | None = None,
        qk_norm: bool = False,
        attn_norm: bool = False,
        init_values: AboveZero | None = None,
        norm_eps: AboveZero = 1e-6,
        pos_embed: str = "all",
        rope: str | None = None,
        cpe: bool = False,
        class_token: bool = True,
        reg_tokens: Count = 0,
        global_pool: str | None = None,
        fc_norm: bool = False,
        drop_rate: DropRate = 0,
        drop_path_rate: DropRate = 0,
    ) -> None:
        if pos_embed not in POSITIONS:
            raise unknown_name("pos_embed", pos_embed, POSITIONS)
        height, width = grids_of(_with_margin(img_size, image_margin), patch_size, 1)[0].shape
        grid = TokenGrid(height, width, int(class_token) + reg_tokens)
        rates = drop_path_rates(drop_path_rate, [len(attention)])[0]
        projections: dict[str, Any] = {"qkv_bias": qkv_bias, "key_bias": key_bias, "gate_bias": gate_bias}
        projections |= {"qk_norm": qk_norm, "pre_norm": attn_norm}
        blocks = [
            Block(
                embed_dim,
                SelfAttention(embed_dim, num_heads, mechanism, grid=grid, eps=norm_eps, **projections),
                mlp_ratio=mlp_ratio,
                mlp=mlp,
                drop=drop_rate,
                drop_path=rate,
                eps=norm_eps,
                init_values=init_values,
                cpe=cpe,
            )
            for mechanism, rate in zip(attention, rates, strict=True)
        ]
        stage = Stage(
            PatchEmbed(in_chans, embed_dim, patch_size, margin=image_margin),
            blocks,
            embed_dim,
            grid=grid,
            positions=None if pos_embed == "none" else "bicubic",
            prefix_positions=pos_embed == "all",
            rope=rope_of(rope, embed_dim // num_heads, num_heads),
            drop_rate=drop_rate,
        )
        norm = nn.LayerNorm(embed_dim, eps=norm_eps)
        super().__init__(
            stage,
            embed_dim,
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            norm=nn.Identity() if fc_norm else norm,
            fc_norm=norm if fc_norm else None,
            global_pool=("token" if class_token else "avg") if global_pool is None else global_pool,
            drop_rate=drop_rate,
            reg_tokens=reg_tokens,
        )

    def grids(self, img_size: tuple[int, int]) -> list[TokenGrid]:
        """The grid of the tokens, without prefix tokens, for images of (height, width); their margin has some, too."""
        return super().grids(_with_margin(img_size, self.stages[0].embed.margin))

    def walk(self, x: Tensor) -> Iterator[tuple[Tensor, TokenGrid]]:
        """Tokens and their grid after each block."""
        self.check_images(x)
        yield from self.stages[0].steps(x)

    def _as_map(self, tokens: Tensor, grid: TokenGrid, output_fmt: str) -> Tensor:
        embed: Any = self.stages[0].embed
        if places := embed.margin // embed.patch_size:
            # whoever reads maps takes the first place for the upper left corner of the image
            image = grid.to_image(tokens)[..., places:-places, places:-places]
            grid = TokenGrid(image.shape[-2], image.shape[-1])
            tokens = image.flatten(2).mT
        return super()._as_map(tokens, grid, output_fmt)


def _with_margin(img_size: tuple[int, int], margin: int) -> tuple[int, int]:
    return img_size[0] + 2 * margin, img_size[1] + 2 * margin


class PatchEmbed(nn.Module):
    """A linear map of each patch: (b, c_in, height, width) to (b, c, y, x), the image filled up to whole patches.

    A `margin` of zeros, in pixels, comes around the image first.
    """

    def __init__(self, in_chans: int, dim: int, patch_size: int, *, margin: int = 0) -> None:
        super().__init__()
        self.patch_size, self.margin = patch_size, margin
        self.proj = nn.Conv2d(in_chans, dim, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (self.margin,) * 4) if self.margin else x
        return self.proj(fill_up(x, self.patch_size))

    def of_rows(self, image: ImageRows, first: int, behind: int) -> Tensor:
        """Rows `first` to `behind` of what `forward` gives of an image that is read some rows at a time."""
        height, width = image.shape
        top, bottom = (row * self.patch_size - self.margin for row in (first, behind))
        x = image.rows(max(top, 0), min(bottom, height))
        right = up_to_multiple(width + 2 * self.margin, self.patch_size) - width - self.margin
        filling = self.margin, right, max(-top, 0), max(bottom - height, 0)
        x = F.pad(x, filling) if any(filling) else x
        if not is_conv(self.proj) or is_heard(self.proj):
            # what others make of it is not in its weight, or wants to see it called
            embedded: Tensor = self.proj(x)
            return embedded
        # a product of matrices, which on a CPU is several times as fast as a convolution of so wide an image
        patches = rearrange(x, "b c (y i) (x j) -> b y x (i j c)", i=self.patch_size, j=self.patch_size)
        weight = rearrange(self.proj.weight, "d c i j -> d (i j c)")
        product = self.proj.product if isinstance(self.proj, ConvLayer) else F.linear
        return product(patches, weight, self.proj.bias).permute(0, 3, 1, 2)
