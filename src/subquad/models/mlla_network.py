"""MLLA, a pyramid of Mamba-like blocks: a gate beside a depthwise convolution and the attention, and an MLP.

Han et al. 2024, arXiv 2405.16605, section 4.3, in the details of the released code. Tokens are placed by convolutions
of the map and by rotary positions, so that images of any size go through; every convolution that halves a map rounds
up.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.models.backbone import Backbone, grids_of
from subquad.models.convolutions import ConvNorm, Downsample, stem_strides
from subquad.models.layers import Block, Mechanism, SelfAttention, projected_by
from subquad.models.map_layers import ConvPosition, on_map
from subquad.models.stages import BlockPlace, rotary_stages
from subquad.ranges import Count, DropRate, Positive, Ratio, checks_arguments
from subquad.rope import Rotation


class MLLANet(Backbone):
    """A pyramid whose width doubles from stage to stage; the head reads the mean.

    Args:
        attention: the mechanism of each block.
        depths: blocks of each stage.
        patch_size: 4, or 2 or 1 for small images.
        embed_dim: channels of the first stage.
        num_heads: heads of each stage's blocks.
        qkv_bias: whether the projection to queries and keys has a bias.
        rope: rotary positions as in a network of `subquad.rope.ROPES`; None for none.
    """

    layout = "mllanet"
    spreads = True
    first_conv = "stages.0.embed.first.conv"

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
        embed_dim: Positive = 64,
        num_heads: Sequence[Positive] = (2, 4, 8, 16),
        mlp_ratio: Ratio = 4,
        qkv_bias: bool = True,
        rope: str | None = None,
        global_pool: str = "avg",
        drop_rate: DropRate = 0,
        drop_path_rate: DropRate = 0,
    ) -> None:
        dims = [embed_dim * 2**s for s in range(len(depths))]

        def block(mechanism: Mechanism, at: BlockPlace) -> nn.Module:
            attn = MambaLikeAttention(at.dim, at.num_heads, mechanism, grid=at.grid, qkv_bias=qkv_bias)
            return MambaLikeBlock(at.dim, attn, mlp_ratio=mlp_ratio, drop=drop_rate, drop_path=at.drop_path)

        def embed(s: int) -> nn.Module:
            return Downsample(*dims[s - 1 : s + 1]) if s else ResidualStem(in_chans, embed_dim, patch_size)

        stages = rotary_stages(
            attention,
            depths=depths,
            dims=dims,
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
            dims,
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            norm=nn.LayerNorm(dims[-1], eps=1e-5),
            global_pool=global_pool,
            drop_rate=drop_rate,
        )


class MambaLikeBlock(Block):
    """x + conv(x), + attention(norm(x)), + conv(x), + mlp(norm(x))."""

    def __init__(
        self, dim: int, attn: nn.Module, *, mlp_ratio: float = 4, drop: float = 0, drop_path: float = 0
    ) -> None:
        super().__init__(dim, attn, mlp_ratio=mlp_ratio, drop=drop, drop_path=drop_path, eps=1e-5, cpe=True)
        self.cpe2 = ConvPosition(dim)

    def in_between(self, x: Tensor, grid: TokenGrid) -> Tensor:
        return self.cpe2(x, grid=grid)


class MambaLikeAttention(SelfAttention):
    """What Mamba's block has around its recurrence: proj(silu(gate(x)) · attention(silu(conv(in_proj(x))))).

    Values are the tokens themselves, without a projection, but for heads that a mechanism has beside the host's.
    """

    def __init__(
        self, dim: int, num_heads: int, attention: Mechanism, *, grid: TokenGrid, qkv_bias: bool = True
    ) -> None:
        super().__init__(dim, num_heads, attention, grid=grid, qkv_bias=qkv_bias)
        width = self.proj.in_features
        self.in_proj = nn.Linear(dim, dim)
        self.gate = nn.Linear(dim, width)
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.more_values = nn.Linear(dim, width - dim, bias=qkv_bias) if width > dim else None

    def projections(self) -> tuple[str, ...]:
        return tuple(name for name in projected_by(self.inner) if name != "v")

    def forward(
        self,
        x: Tensor,
        *,
        grid: TokenGrid,
        padding: Tensor | None = None,
        mask: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        grid.check(x)
        if padding is not None:
            raise SubquadError("tokens that are absent can't be told apart by a convolution in front of attention")
        tokens = F.silu(on_map(self.conv, self.in_proj(x), grid))
        return self.proj(self.mixed_tokens(tokens, grid, rotation, mask) * F.silu(self.gate(x)))

    def mixed_tokens(
        self, tokens: Tensor, grid: TokenGrid, rotation: Rotation | None, mask: Tensor | None = None
    ) -> Tensor:
        """What the mechanism makes of convolved tokens (b, n, c), in front of the gate: (b, n, h·d)."""
        supply: dict[str, Any] = {"x": tokens, "padding": None, "mask": mask, "rotation": rotation}
        return self.mixed(supply | self.heads(tokens), grid, grid)

    def heads(self, x: Tensor, keys: Tensor | None = None) -> dict[str, Any]:
        values = rearrange(x, "b n (h d) -> b h n d", h=self.num_heads)
        if self.more_values is not None:
            more = rearrange(self.more_values(x), "b n (h d) -> b h n d", d=values.shape[-1])
            values = torch.cat([values, more], dim=1)
        return super().heads(x, keys) | {"v": values}


class ResidualStem(nn.Module):
    """Images to a map `patch_size` times smaller: convolutions with batch norm, two of them beside a shortcut."""

    def __init__(self, in_chans: int, dim: int, patch_size: int) -> None:
        super().__init__()
        strides, narrow = stem_strides(patch_size), max(dim // 2, 1)
        self.first = ConvNorm(in_chans, narrow, 3, stride=strides[0])
        self.branch = nn.Sequential(ConvNorm(narrow, narrow, 3), nn.ReLU(inplace=True), ConvNorm(narrow, narrow, 3))
        self.wide = ConvNorm(narrow, 4 * dim, 3, stride=strides[1])
        self.last = ConvNorm(4 * dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x), inplace=True)
        x = x + self.branch(x)
        return self.last(F.relu(self.wide(x), inplace=True))
