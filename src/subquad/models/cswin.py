"""CSwin, a pyramid of stripes: half of the channels attend within vertical stripes, half within horizontal ones.

CSWin Transformer, Dong et al. 2022, arXiv 2107.00652. A split of None is the whole grid: what linear mechanisms get.
Images of any size: maps are filled up to whole stripes, and what was filled in is not attended to.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from subquad import spread
from subquad.attention.bricks import ConvLayer, is_conv, is_heard
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.models.backbone import Backbone, grids_of, least_for
from subquad.models.layers import Block, Mechanism, all_heads_of, move_tables, projected_by
from subquad.models.stages import ConvEmbed, Stage, by_stage, drop_path_rates
from subquad.ranges import Count, DropRate, Positive, Ratio, checks_arguments
from subquad.tracing import first, smaller, surely, up_to_multiple


class CSwin(Backbone):
    """A pyramid with convolutional embeddings and a locally-enhanced positional encoding (LePE) in every block.

    Args:
        attention: the mechanism of each block.
        depths: blocks of each stage.
        split_size: of each block, the width of a stripe in tokens; None for the whole grid.
        embed_dim: channels of the first stage; the others double.
        num_heads: heads of each stage's blocks.
        qkv_bias: whether the projection to queries, keys and values has a bias.
    """

    layout = "cswin"

    @checks_arguments
    def __init__(
        self,
        attention: Sequence[Mechanism],
        *,
        depths: Sequence[Positive],
        split_size: Sequence[Positive | None],
        img_size: tuple[Positive, Positive] = (224, 224),
        patch_size: Positive = 4,
        in_chans: Positive = 3,
        num_classes: Count = 1000,
        embed_dim: Positive = 64,
        num_heads: Sequence[Positive] = (2, 4, 8, 16),
        mlp_ratio: Ratio = 4,
        qkv_bias: bool = True,
        global_pool: str = "avg",
        drop_rate: DropRate = 0,
        drop_path_rate: DropRate = 0,
    ) -> None:
        dims = [embed_dim * 2**s for s in range(len(depths))]
        mechanisms, splits = by_stage(attention, depths), by_stage(split_size, depths)
        rates = drop_path_rates(drop_path_rate, depths)
        stages = []
        for s, grid in enumerate(grids_of(img_size, patch_size, len(depths))):
            # tokens of the last stage are few: one stripe, the whole grid
            widths = splits[s] if s < len(depths) - 1 else [None] * depths[s]
            blocks = [
                CrossShapedBlock(
                    dims[s],
                    CrossShapedAttention(
                        dims[s], num_heads[s], mechanism, grid=grid, split_size=width, qkv_bias=qkv_bias
                    ),
                    mlp_ratio=mlp_ratio,
                    drop=drop_rate,
                    drop_path=rate,
                    eps=1e-5,
                )
                for mechanism, width, rate in zip(mechanisms[s], widths, rates[s], strict=True)
            ]
            if s == 0:
                embed = ConvEmbed(in_chans, embed_dim, 2 * patch_size - 1, patch_size, padding=patch_size // 2)
            else:
                embed = ConvEmbed(dims[s - 1], dims[s], 3, 2, padding=1)
            stages.append(Stage(embed, blocks, dims[s], grid=grid))
        super().__init__(
            stages,
            dims,
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            norm=nn.LayerNorm(dims[-1], eps=1e-5),
            global_pool=global_pool,
            drop_rate=drop_rate,
        )

    @property
    def least_size(self) -> int:
        return least_for(
            [(block.attn.split_size or 1 for block in stage.blocks) for stage in self.stages], self.patch_size
        )

    @staticmethod
    def default_reach(img_size: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        """Where attention is quadratic, each stage's default: 1-2-7-7 at 224 px, 1-2-12-12 at 384, as published."""
        width = max(7, min(img_size) // 32)
        return {"split_size": (1, 2, width, width)}


class CrossShapedBlock(Block):
    """A block whose attention sees its input as it was before the norm, too."""

    def forward(self, x: Tensor, *, grid: TokenGrid) -> Tensor:  # type: ignore[override]
        return self.feed_forward(x + self.drop_path(self.attn(self.norm1(x), x, grid=grid)), grid)


class CrossShapedAttention(nn.Module):
    """Two branches with half of the heads each, in vertical and in horizontal stripes; or one on the whole grid.

    Every branch adds LePE, a depthwise 3×3 of its values within the stripe. A mechanism that asks for the unprojected
    tokens gets the branch's channels of the block's un-normed input, as the released InLine-CSwin does. Heads that it
    has beside the host's stand behind them in each branch, and LePE is not for them.

    Args:
        dim: channels c.
        num_heads: heads, an even number where there are two branches.
        attention: the mechanism of both branches.
        grid: what position parameters are made for.
        split_size: width of a stripe; None, or as wide as the grid, for one branch.
        qkv_bias: whether the projection has a bias.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        attention: Mechanism,
        *,
        grid: TokenGrid,
        split_size: int | None = None,
        qkv_bias: bool = True,
    ) -> None:
        super().__init__()
        if split_size is not None and split_size < 1:
            raise SubquadError(f"a stripe is at least one token wide, got split_size {split_size}")
        self.split_size = None if split_size is None or split_size >= max(grid.shape) else split_size
        count = 1 if self.split_size is None else 2
        if num_heads % count or dim % count:
            raise SubquadError(f"two branches need an even number of heads and channels, got {num_heads} and {dim}")
        self.heads = num_heads // count
        stripes = [self.stripe_of(b, grid) for b in range(count)]
        self.branches = nn.ModuleList(
            attention(dim // count, self.heads, grid=stripe, kv_grid=stripe) for stripe in stripes
        )
        projected = projected_by(self.branches[0])
        self.names = (*projected, "x") if "x" in self.branches[0].inputs else projected  # type: ignore[operator]
        # what a mechanism has beside the host's heads, in each branch
        self.all_heads, width = all_heads_of(self.branches[0], dim // count, self.heads)
        self.qkv = nn.Linear(dim, count * width * len(projected), bias=qkv_bias)
        self.lepe = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.proj = nn.Linear(count * width, dim)

    def forward(self, x: Tensor, unnormed: Tensor, *, grid: TokenGrid) -> Tensor:
        """Normed tokens (b, n, c) and what they were before to (b, n, c)."""
        grid.check(x)
        parts = self.qkv(x)
        width = parts.shape[2] // (len(self.names) - ("x" in self.names))
        if "x" in self.names:
            parts = torch.cat([parts, filled_to(unnormed, width, len(self.branches))], dim=2)
        image = rearrange(parts, "b (y x) (p c) -> p b y x c", y=grid.height, c=width)
        outputs = [self.branch_of(b, half, grid) for b, half in enumerate(image.chunk(len(self.branches), dim=-1))]
        return self.proj(torch.cat(outputs, dim=-1))

    def branch_of(self, b: int, image: Tensor, grid: TokenGrid) -> Tensor:
        """One branch: maps of all projections and of the unnormed tokens (p, b, y, x, c) to tokens (b, n, c)."""
        # channels of the host's heads
        stripe, own = self.stripe_of(b, grid), image.shape[-1] * self.heads // self.all_heads
        inner: Any = self.branches[b]
        bottom = up_to_multiple(grid.height, stripe.height) - grid.height
        right = up_to_multiple(grid.width, stripe.width) - grid.width
        whole = surely(bottom == 0) and surely(right == 0)
        filled = image if whole else F.pad(image, (0, 0, 0, right, 0, bottom))
        rows, columns = filled.shape[2] // stripe.height, filled.shape[3] // stripe.width
        stripes = rearrange(
            filled, "p b (r y) (l x) c -> p (b r l) (y x) c", r=rows, l=columns, y=stripe.height, x=stripe.width
        )
        supply: dict[str, Tensor | None] = {"mask": None, "padding": None, "rotation": None}
        for name, tokens in zip(self.names, stripes.unbind(0), strict=True):
            heads = rearrange(tokens, "b n (h d) -> b h n d", h=self.all_heads)
            supply[name] = tokens[..., :own] if name == "x" else heads
        if not whole:
            absent = F.pad(image.new_zeros(grid.shape, dtype=torch.bool), (0, right, 0, bottom), value=True)
            absent = rearrange(absent, "(r y) (l x) -> (r l) (y x)", y=stripe.height, x=stripe.width)
            supply["padding"] = absent.repeat(image.shape[1], 1)
        y = inner(**{name: supply[name] for name in inner.inputs}, grid=stripe, kv_grid=stripe)
        values = stripe.to_image(stripes[self.names.index("v")])[:, :own]
        positions = stripe.to_heads(self.positions_of(b, values), self.heads)
        others = self.all_heads - self.heads
        y = y + (F.pad(positions, (0, 0, 0, 0, 0, others)) if others else positions)
        y = rearrange(y, "(b r l) h (y x) d -> b (r y) (l x) (h d)", r=rows, l=columns, y=stripe.height, x=stripe.width)
        return first(first(y, grid.height, 1), grid.width, 2).flatten(1, 2)

    def positions_of(self, b: int, values: Tensor) -> Tensor:
        """LePE of a branch's values, maps (b, c, y, x) of its own channels."""
        own, count = values.shape[1], len(self.branches)
        if spread.is_spread() or (is_conv(self.lepe) and not is_heard(self.lepe)):
            bias = None if self.lepe.bias is None else self.lepe.bias.chunk(count)[b]
            convolved = self.lepe.convolved if isinstance(self.lepe, ConvLayer) else F.conv2d
            return convolved(values, self.lepe.weight.chunk(count)[b], bias, padding=1, groups=own)
        # somebody listens, or it computes more than its weight says: it is called, and others' channels are nothing
        return self.lepe(F.pad(values, (0, 0, 0, 0, b * own, (count - 1 - b) * own)))[:, b * own : (b + 1) * own]

    def stripe_of(self, branch: int, grid: TokenGrid) -> TokenGrid:
        """The stripe of a branch on a grid: 0 is vertical, 1 horizontal."""
        if self.split_size is None:
            return grid
        if branch == 0:
            return TokenGrid(grid.height, smaller(self.split_size, grid.width))
        return TokenGrid(smaller(self.split_size, grid.height), grid.width)

    def regrid(self, old: TokenGrid, new: TokenGrid) -> None:
        """Make position parameters for `new`, a grid of queries, instead of `old`."""
        for b, branch in enumerate(self.branches):
            move_tables(branch, {self.stripe_of(b, old): self.stripe_of(b, new)})


def filled_to(x: Tensor, width: int, branches: int) -> Tensor:
    """Tokens (b, n, c) with zeros behind the channels of each branch, up to `width` channels in all."""
    missing = (width - x.shape[-1]) // branches
    return x if not missing else F.pad(x.unflatten(-1, (branches, -1)), (0, missing)).flatten(-2)
