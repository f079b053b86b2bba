"""MAViT, a pyramid of four stages: rotary positions, convolutions around attention and in the MLP, gated attention.

MAViT, Fan et al. 2025, arXiv 2507.00698, after RAVLT, arXiv 2411.07635, in the details of the released code; two more
families of networks stand on it with other gates, ratios and one more convolution. Images of any size: every
convolution that halves a map rounds up.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from subquad.attention.bricks import LocalConv
from subquad.errors import SubquadError, unknown_name
from subquad.grid import TokenGrid
from subquad.models.backbone import Backbone, grids_of
from subquad.models.layers import Block, Mechanism, SelfAttention
from subquad.models.map_layers import MapMlp, PositionConv
from subquad.models.stages import BlockPlace, rotary_stages
from subquad.positions import start_normal
from subquad.ranges import AboveZero, Count, DropRate, Positive, Ratio, checks_arguments

STEM_STRIDES = {4: (2, 1, 1, 2), 2: (2, 1, 1, 1), 1: (1, 1, 1, 1)}
"""Of the stem's four convolutions, by the size of a patch: 4 as published, less for small images."""

GATES = ("plain", "norm_silu")
"""What becomes of attention and its gate g: y · g, or LayerNorm(y) · SiLU(g)."""

STARTS = ("normal", "uniform", "uniform_blocks")
"""What linear layers start from: normal numbers as convolutions do; PyTorch's, those in front of the head or not."""


class MAViT(Backbone):
    """A pyramid whose head reads the mean of a last 1×1 convolution with batch norm and SiLU.

    Args:
        attention: the mechanism of each block.
        depths: blocks of each stage.
        patch_size: 4, or 2 or 1 for small images.
        embed_dims: channels of each stage.
        num_heads: heads of each stage's blocks.
        mlp_ratio: hidden channels of the MLPs over a stage's.
        head_width: channels of the last convolution.
        init_values: what the factors of both branches' channels start from, in each stage.
        gate: of `GATES`, for mechanisms that do not apply a gate themselves.
        conv_positions: depthwise convolutions a block: 1 in front of attention, 2 for one in front of the MLP as well.
        rope: rotary positions as in a network of `subquad.rope.ROPES`; None for none.
        start: what linear layers start from, of `STARTS`.
        drop_path_rate: stochastic depth of the last block; it rises linearly from 0.
    """

    layout = "mavit"
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
        embed_dims: Sequence[Positive] = (64, 128, 256, 512),
        num_heads: Sequence[Positive] = (1, 2, 4, 8),
        mlp_ratio: Ratio = 3.5,
        head_width: Positive = 2048,
        init_values: Sequence[AboveZero] = (1, 1, 1, 1),
        gate: str = "plain",
        conv_positions: Positive = 1,
        rope: str | None = None,
        start: str = "normal",
        global_pool: str = "avg",
        drop_rate: DropRate = 0,
        drop_path_rate: DropRate = 0,
    ) -> None:
        if patch_size not in STEM_STRIDES:
            raise SubquadError(f"MAViT's stem makes patches of 4, 2 or 1 px, not of {patch_size}")
        if conv_positions > 2:
            raise SubquadError(f"a block has one or two convolutions of positions, not {conv_positions}")
        for what, value, known in (("gate", gate, GATES), ("start", start, STARTS)):
            if value not in known:
                raise unknown_name(what, value, known)

        def block(mechanism: Mechanism, at: BlockPlace) -> nn.Module:
            return MapBlock(
                at.dim,
                GatedAttention(at.dim, at.num_heads, mechanism, grid=at.grid, gate=gate),
                mlp_ratio=mlp_ratio,
                conv_positions=conv_positions,
                init_values=init_values[at.stage],
                drop=drop_rate,
                drop_path=at.drop_path,
            )

        def embed(s: int) -> nn.Module:
            return halving(*embed_dims[s - 1 : s + 1]) if s else stem(in_chans, embed_dims[0], STEM_STRIDES[patch_size])

        stages = rotary_stages(
            attention,
            depths=depths,
            dims=embed_dims,
            num_heads=num_heads,
            grids=grids_of(img_size, patch_size, len(depths)),
            block=block,
            embed=embed,
            rope=rope,
            drop_rates=[drop_rate] * len(depths),
            drop_path_rate=drop_path_rate,
        )
        super().__init__(
            stages,
            embed_dims,
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            norm=LastConv(embed_dims[-1], head_width),
            num_features=head_width,
            global_pool=global_pool,
            drop_rate=drop_rate,
        )
        self.apply(start_convolution)
        if start != "normal":
            for part in (self.stages, self.norm)[: 1 + (start == "uniform")]:
                part.apply(start_uniform)

    def _norm_fits(self, level: int) -> bool:
        return False


class GatedAttention(SelfAttention):
    """What attention gives and a depthwise 5×5 of the values (LePE), times a gate that is projected with them.

    A mechanism that asks for the gate is handed it, and adds a local branch or not, as it does everywhere.

    Args:
        dim: channels c.
        num_heads: heads h, a divisor of `dim`.
        attention: the mechanism.
        grid: the grid that position parameters are made for; a call may bring another one.
        gate: of `GATES`.
    """

    def __init__(self, dim: int, num_heads: int, attention: Mechanism, *, grid: TokenGrid, gate: str = "plain") -> None:
        super().__init__(dim, num_heads, attention, grid=grid)
        leaves_gate = "g" not in self.inner.inputs
        # a mechanism may have heads beside the host's
        width = self.proj.in_features
        self.lepe = LocalConv(self.all_heads, dim // num_heads, 5) if leaves_gate else None
        self.gate_norm = nn.LayerNorm(width, eps=1e-5) if leaves_gate and gate == "norm_silu" else None

    def projections(self) -> tuple[str, ...]:
        """What the mechanism asks for, and the gate."""
        asked = super().projections()
        return asked if "g" in asked else (*asked, "g")

    def is_plain_on(self, grid: TokenGrid) -> bool:
        return True

    def mixed(self, supply: dict[str, Any], grid: TokenGrid, kv_grid: TokenGrid) -> Tensor:
        """What the mechanism makes of its inputs, gated: (b, n, c)."""
        y = self.answers(supply, grid, kv_grid)
        if self.lepe is not None:
            gate = supply["g"] if self.gate_norm is None else None
            y = self.lepe(y, supply["v"], gate, grid=grid, kv_grid=kv_grid)
        y = y.transpose(1, 2).flatten(2)
        return y if self.gate_norm is None else self.gate_norm(y) * F.silu(supply["g"].transpose(1, 2).flatten(2))


class MapBlock(Block):
    """A block with depthwise convolutions of its tokens on their map, on a grid without prefix tokens.

    The hidden channels of its MLP, behind the GELU, get one of themselves added.
    """

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        *,
        mlp_ratio: float,
        conv_positions: int,
        init_values: float,
        drop: float = 0,
        drop_path: float = 0,
    ) -> None:
        super().__init__(dim, attn, mlp_ratio=mlp_ratio, drop_path=drop_path, init_values=init_values)
        self.mlp = MapMlp(dim, int(dim * mlp_ratio), in_front=True, behind=False, drop=drop)
        self.cpe1 = PositionConv(dim)
        self.cpe2 = PositionConv(dim) if conv_positions == 2 else None

    def in_front(self, x: Tensor, grid: TokenGrid) -> Tensor:
        return self.cpe1(x, grid=grid)

    def in_between(self, x: Tensor, grid: TokenGrid) -> Tensor:
        return x if self.cpe2 is None else self.cpe2(x, grid=grid)


class LastConv(nn.Module):
    """A 1×1 convolution, batch norm and SiLU of tokens: (b, n, c) to (b, n, p)."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.proj(x).transpose(1, 2)).transpose(1, 2))


def stem(in_chans: int, dim: int, strides: Sequence[int]) -> nn.Sequential:
    """Four 3×3 convolutions with batch norm, GELU between them: (b, c_in, height, width) to (b, c, y, x)."""
    widths = [in_chans, *[max(dim // 2, 1)] * (len(strides) - 1), dim]
    modules: list[nn.Module] = []
    for before, behind, stride in zip(widths, widths[1:], strides, strict=False):
        modules += [nn.Conv2d(before, behind, 3, stride=stride, padding=1), nn.BatchNorm2d(behind), nn.GELU()]
    return nn.Sequential(*modules[:-1])


def halving(before: int, dim: int) -> nn.Sequential:
    """A map (b, c_in, y, x) with half as many rows and columns, rounded up, and `dim` channels."""
    return nn.Sequential(nn.Conv2d(before, dim, 3, stride=2, padding=1), nn.BatchNorm2d(dim))


def start_convolution(module: nn.Module) -> None:
    """Weights of a convolution, a mechanism's too: truncated normal, std 0.02; bias zero."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    # what a mechanism filters its values with is depthwise and no nn.Conv2d
    if isinstance(weight, nn.Parameter) and weight.dim() == 4:
        start_normal(weight)
        if bias is not None:
            nn.init.zeros_(bias)


def start_uniform(module: nn.Module) -> None:
    """Weights and bias of a linear layer as PyTorch has them."""
    if isinstance(module, nn.Linear):
        module.reset_parameters()
