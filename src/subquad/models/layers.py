"""Bricks that several hosts are built from: projections around a mechanism, blocks, embeddings, stages.

Letters: b batch, h heads, n tokens, d channels of a head, c = h·d channels, p projections, y x rows and columns.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from timm.layers import DropPath, Mlp
from timm.models import checkpoint, register_notrace_module
from torch import Tensor, nn

from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.positions import GridTable, PositionTable, start_normal

Mechanism = Callable[..., Any]
"""A class of `subquad.attention`, or a `functools.partial` of one that fixes its settings."""

PROJECTED = frozenset({"q", "k", "v", "g"})
OF_KEYS = frozenset({"k", "v"})


class SelfAttention(nn.Module):
    """All tokens attend to all: project, mix, project back. x (b, n, c) -> (b, n, c).

    Args:
        dim: channels c.
        num_heads: heads h, a divisor of `dim`.
        attention: the mechanism.
        grid: the grid that position parameters are made for; a call may bring another one.
        kv_grid: that of keys and values, if not the same.
        qkv_bias: whether the fused projection has a bias.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        attention: Mechanism,
        *,
        grid: TokenGrid,
        kv_grid: TokenGrid | None = None,
        qkv_bias: bool = True,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.inner = attention(dim, num_heads, grid=grid, kv_grid=kv_grid or grid)
        self.projected = projected_by(self.inner)
        self.project = nn.Linear(dim, dim * len(self.projected), bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(
        self, x: Tensor, *, grid: TokenGrid, padding: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """`padding` (b, n) is True for tokens that are not there; their own outputs mean nothing.

        `mask`, broadcastable to (b, h, n, n), is True for pairs that must not attend.
        """
        grid.check(x)
        heads = self.project(x).unflatten(-1, (len(self.projected), self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        supply: dict[str, Tensor | None] = dict(zip(self.projected, heads.unbind(0), strict=True))
        return self.mix(supply | {"x": x, "padding": padding, "mask": mask}, grid, grid)

    def regrid(self, old: TokenGrid, new: TokenGrid) -> None:
        """Make position parameters for `new`, a grid of queries, instead of `old`."""
        move_tables(self.inner, {old: new})

    def mix(self, supply: dict[str, Tensor | None], grid: TokenGrid, kv_grid: TokenGrid) -> Tensor:
        """What the mechanism makes of its inputs, projected back: (b, n, c)."""
        y = self.inner(**{name: supply[name] for name in self.inner.inputs}, grid=grid, kv_grid=kv_grid)
        return self.proj(y.transpose(1, 2).flatten(2))


def projected_by(mechanism: nn.Module) -> tuple[str, ...]:
    """Those of a mechanism's inputs that a fused projection supplies, in its order."""
    return tuple(name for name in mechanism.inputs if name in PROJECTED)  # type: ignore[union-attr]


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        *,
        mlp_ratio: float = 4,
        drop: float = 0,
        drop_path: float = 0,
        eps: float = 1e-6,
        act_layer: Callable[[], nn.Module] = nn.GELU,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        if int(dim * mlp_ratio) < 1:
            raise SubquadError(f"an MLP of {mlp_ratio} times a width of {dim} has no channels: take a larger mlp_ratio")
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=act_layer, drop=drop)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor, *, grid: TokenGrid) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x), grid=grid))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class ConvEmbed(nn.Module):
    """A strided convolution and a LayerNorm: a map (b, c_in, y, x) to (b, c, y / stride, x / stride), rounded up.

    The map is filled up to whole strides with zeros on the right and at the bottom.
    """

    def __init__(
        self, in_chans: int, dim: int, kernel_size: int, stride: int, *, padding: int = 0, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.stride = stride
        self.proj = nn.Conv2d(in_chans, dim, kernel_size, stride=stride, padding=padding)
        self.norm = nn.LayerNorm(dim, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(fill_up(x, self.stride))
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def fill_up(image: Tensor, multiple: int) -> Tensor:
    """A map (b, c, y, x) with zeros on the right and at the bottom, up to multiples of `multiple`."""
    bottom, right = -image.shape[-2] % multiple, -image.shape[-1] % multiple
    return F.pad(image, (0, right, 0, bottom)) if bottom or right else image


@register_notrace_module
class Stage(nn.Module):
    """The tokens of one resolution: an embedding, prefix tokens, positions, blocks.

    Args:
        embed: a map (b, c_in, y_in, x_in) to a map (b, c, y, x).
        blocks: (b, n, c) to (b, n, c), called with `grid`.
        dim: channels c.
        grid: of this stage at the size the network is made for; its prefix are learned tokens, a class token first.
        positions: how a learned table, added to all tokens, is resampled ("bilinear", "bicubic"); None for no table.
        drop_rate: dropout in front of the blocks.
    """

    def __init__(
        self,
        embed: nn.Module,
        blocks: Sequence[nn.Module],
        dim: int,
        *,
        grid: TokenGrid,
        positions: str | None = None,
        drop_rate: float = 0,
    ) -> None:
        super().__init__()
        self.grid = grid
        self.grad_checkpointing = False
        self.embed = embed
        self.prefix_tokens = nn.Parameter(torch.zeros(1, grid.prefix, dim)) if grid.prefix else None
        if self.prefix_tokens is not None:
            start_normal(self.prefix_tokens)
        self.pos_embed = PositionTable(1, dim, grid, std=0.02, mode=positions) if positions else None
        self.drop = nn.Dropout(drop_rate)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> tuple[Tensor, TokenGrid]:
        """A map (b, c_in, y_in, x_in) to tokens (b, n, c), prefix tokens first, and the grid they stand on."""
        for last in self.steps(x):
            tokens, grid = last
        return tokens, grid

    def steps(self, x: Tensor) -> Iterator[tuple[Tensor, TokenGrid]]:
        """What `forward` gives, after each block."""
        tokens, grid = self.tokens_of(x)
        for block in self.blocks:
            if self.grad_checkpointing and self.training:
                tokens = checkpoint(block, tokens, grid=grid)
            else:
                tokens = block(tokens, grid=grid)
            yield tokens, grid

    def tokens_of(self, x: Tensor) -> tuple[Tensor, TokenGrid]:
        """What goes into the blocks."""
        image = self.embed(x)
        grid = TokenGrid(image.shape[2], image.shape[3], self.grid.prefix)
        tokens = rearrange(image, "b c y x -> b (y x) c")
        if self.prefix_tokens is not None:
            tokens = torch.cat([self.prefix_tokens.expand(tokens.shape[0], -1, -1), tokens], dim=1)
        if self.pos_embed is not None:
            tokens = tokens + self.pos_embed(grid)
        return self.drop(tokens), grid

    def regrid(self, grid: TokenGrid) -> None:
        """Make position parameters for another grid."""
        old, self.grid = self.grid, TokenGrid(*grid.shape, self.grid.prefix)
        if self.pos_embed is not None:
            self.pos_embed.regrid(self.grid)
        for block in self.blocks:
            block.attn.regrid(old, self.grid)  # type: ignore[union-attr,operator]


def move_tables(module: nn.Module, moves: dict[TokenGrid, TokenGrid]) -> None:
    """Tables in `module` that stand on a grid of `moves` now stand on the one it names."""
    for table in module.modules():
        if isinstance(table, GridTable) and table.grid in moves:
            table.regrid(moves[table.grid])


def init_linear(module: nn.Module) -> None:
    """Weights of a linear layer: truncated normal, std 0.02; its bias zero."""
    if isinstance(module, nn.Linear):
        start_normal(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def drop_path_rates(rate: float, depths: Sequence[int]) -> list[list[float]]:
    """Stochastic depth of every block, by stage: it rises linearly over all blocks from 0 to `rate`."""
    rates = torch.linspace(0, rate, sum(depths), device="cpu")
    return [part.tolist() for part in rates.split(list(depths))]


def by_stage(values: Sequence[Any], depths: Sequence[int]) -> list[list[Any]]:
    """A list with an entry for each block, cut into stages."""
    starts = [sum(depths[:s]) for s in range(len(depths))]
    return [list(values[start : start + depth]) for start, depth in zip(starts, depths, strict=True)]
