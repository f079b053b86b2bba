"""Resolutions of a network, one after another: embeddings, stages, and what is said of each block by stage.

Letters: b batch, n tokens, c channels, y x rows and columns.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from einops import rearrange
from timm.models import register_notrace_module
from torch import Tensor, nn

from subquad import spread
from subquad.attention.traits import traits_of
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.models.computed_again import computed_again
from subquad.models.layers import Mechanism
from subquad.positions import PositionTable, start_normal
from subquad.rope import AxialRope, Rotation, rope_of
from subquad.tracing import surely, up_to_multiple


class ImageRows(Protocol):
    """An image of (height, width) that is read some rows at a time, as a network takes it."""

    shape: tuple[int, int]

    def rows(self, first: int, behind: int) -> Tensor:
        """Give rows `first` to `behind`, (1, c, y, x)."""


class ConvEmbed(nn.Module):
    """A strided convolution and a LayerNorm: a map (b, c_in, y, x) to (b, c, y / stride, x / stride), rounded up.

    The map is filled up to whole strides with zeros on the right and at the bottom; with `drop_remainder` the rows and
    columns that fill no stride are left out instead, and sizes are rounded down.
    """

    def __init__(
        self,
        in_chans: int,
        dim: int,
        kernel_size: int,
        stride: int,
        *,
        padding: int = 0,
        eps: float = 1e-5,
        drop_remainder: bool = False,
    ) -> None:
        super().__init__()
        self.stride, self.drop_remainder = stride, drop_remainder
        self.proj = nn.Conv2d(in_chans, dim, kernel_size, stride=stride, padding=padding)
        self.norm = nn.LayerNorm(dim, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        if self.drop_remainder and min(x.shape[-2:]) < self.stride:
            raise SubquadError(
                f"a map of {x.shape[-2]}×{x.shape[-1]} holds no patch of {self.stride}×{self.stride}, and this network "
                "drops what fills none: take a larger image"
            )
        x = self.proj(x if self.drop_remainder else fill_up(x, self.stride))
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def fill_up(image: Tensor, multiple: int) -> Tensor:
    """A map (b, c, y, x) with zeros on the right and at the bottom, up to multiples of `multiple`."""
    bottom, right = (up_to_multiple(size, multiple) - size for size in image.shape[-2:])
    return image if surely(bottom == 0) and surely(right == 0) else F.pad(image, (0, right, 0, bottom))


@register_notrace_module
class Stage(nn.Module):
    """The tokens of one resolution: an embedding, prefix tokens, positions, blocks.

    Args:
        embed: a map (b, c_in, y_in, x_in) to a map (b, c, y, x).
        blocks: (b, n, c) to (b, n, c), called with `grid`.
        dim: channels c.
        grid: of this stage at the size the network is made for; its prefix are learned tokens, a class token first.
        positions: how a learned table, added to all tokens, is resampled ("bilinear", "bicubic"); None for no table.
        prefix_positions: whether prefix tokens have rows in that table.
        rope: rotary positions, handed to the blocks as `rotation`; None for none.
        drop_rate: dropout in front of the blocks.
        norm: of the tokens behind the blocks; None for none.
    """

    def __init__(
        self,
        embed: nn.Module,
        blocks: Sequence[nn.Module],
        dim: int,
        *,
        grid: TokenGrid,
        positions: str | None = None,
        prefix_positions: bool = True,
        rope: AxialRope | None = None,
        drop_rate: float = 0,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.grid = grid
        self.grad_checkpointing = False
        self.embed = embed
        self.prefix_tokens = nn.Parameter(torch.zeros(1, grid.prefix, dim)) if grid.prefix else None
        if self.prefix_tokens is not None:
            start_normal(self.prefix_tokens)
        table_grid = grid if prefix_positions else TokenGrid(*grid.shape)
        self.pos_embed = PositionTable(1, dim, table_grid, std=0.02, mode=positions) if positions else None
        self.rope = rope
        self.drop = nn.Dropout(drop_rate)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.Identity() if norm is None else norm

    fused_embed: "Callable[[Stage, Tensor], tuple[Tensor, TokenGrid] | None] | None" = None
    """What computes `tokens_of` in one step, where it can, given by `subquad.inference`."""

    in_a_row: "Callable[[Stage, Tensor, TokenGrid, dict[int, Rotation]], Tensor] | None" = None
    """What lets all blocks be one step, where it can, given by `subquad.inference`."""

    def forward(self, x: Tensor) -> tuple[Tensor, TokenGrid]:
        """A map (b, c_in, y_in, x_in) to tokens (b, n, c), prefix tokens first, and the grid they stand on."""
        tokens, grid = self.tokens_of(x)
        through = Stage.through if self.in_a_row is None or self.training else self.in_a_row
        return self.norm(through(self, tokens, grid, self.rotations(tokens, grid))), grid

    def steps(self, x: Tensor) -> Iterator[tuple[Tensor, TokenGrid]]:
        """What `forward` gives, but without the stage's norm, after each block."""
        first, grid = self.tokens_of(x)
        for tokens in self.steps_from(first, grid, self.rotations(first, grid)):
            yield tokens, grid

    def through(self, tokens: Tensor, grid: TokenGrid, rotations: dict[int, Rotation]) -> Tensor:
        """What comes out of the last block, of what goes into the first."""
        for last in self.steps_from(tokens, grid, rotations):
            tokens = last
        return tokens

    def steps_from(self, tokens: Tensor, grid: TokenGrid, rotations: dict[int, Rotation]) -> Iterator[Tensor]:
        """What comes out of each block, of what goes into the first."""
        for block in self.blocks:
            turned = {} if self.rope is None else {"rotation": rotations[feature_width_of(block)]}
            if self.grad_checkpointing and self.training:
                tokens = computed_again(block, block, tokens, grid=grid, **turned)
            else:
                tokens = block(tokens, grid=grid, **turned)
            yield tokens

    def rotations(self, tokens: Tensor, grid: TokenGrid) -> dict[int, Rotation]:
        """How tokens turn, once for all blocks: for each width of features that one of them has."""
        if self.rope is None:
            return {}
        widths = {feature_width_of(block) for block in self.blocks}
        return {width: self.rope(grid, tokens.device, tokens.dtype, feature_width=width) for width in widths}

    def tokens_of(self, x: Tensor) -> tuple[Tensor, TokenGrid]:
        """What goes into the blocks."""
        fused = None if self.fused_embed is None or self.training else self.fused_embed(self, x)
        if fused is not None:
            return fused
        image = self.embed(x)
        grid = spread.grid_of(image, self.grid.prefix)
        return self.drop(self.placed(image, grid)), grid

    def placed(self, image: Tensor, grid: TokenGrid) -> Tensor:
        """The tokens (b, n, c) of an embedded image (b, c, y, x), or of some rows of one: prefix tokens, positions."""
        tokens = rearrange(image, "b c y x -> b (y x) c")
        of_prefix = self.pos_embed is not None and self.pos_embed.grid.prefix > 0
        if self.pos_embed is not None and not of_prefix:
            tokens = tokens + self.pos_embed(grid.without_prefix)
        if self.prefix_tokens is not None:
            prefix_tokens = self.prefix_tokens[:, : grid.prefix].expand(tokens.shape[0], -1, -1)
            tokens = torch.cat([prefix_tokens, tokens], dim=1)
        if self.pos_embed is not None and of_prefix:
            tokens = tokens + self.pos_embed(grid)
        return tokens

    def regrid(self, grid: TokenGrid) -> None:
        """Make position parameters for another grid."""
        old, self.grid = self.grid, TokenGrid(*grid.shape, self.grid.prefix)
        if self.pos_embed is not None:
            self.pos_embed.regrid(TokenGrid(*grid.shape, self.pos_embed.grid.prefix))
        for block in self.blocks:
            block.attn.regrid(old, self.grid)  # type: ignore[union-attr,operator]


def feature_width_of(block: Any) -> int:
    """How many features of each channel the mechanism of a block turns by itself; 1 where the host turns q and k."""
    inner = getattr(block.attn, "inner", None)
    return traits_of(inner).feature_width if "rotation" in getattr(inner, "inputs", ()) else 1


def drop_path_rates(rate: float, depths: Sequence[int]) -> list[list[float]]:
    """Stochastic depth of every block, by stage: it rises linearly over all blocks from 0 to `rate`."""
    rates = torch.linspace(0, rate, sum(depths), device="cpu")
    return [part.tolist() for part in rates.split(list(depths))]


def by_stage(values: Sequence[Any], depths: Sequence[int]) -> list[list[Any]]:
    """A list with an entry for each block, cut into stages."""
    starts = [sum(depths[:s]) for s in range(len(depths))]
    return [list(values[start : start + depth]) for start, depth in zip(starts, depths, strict=True)]


class BlockPlace(NamedTuple):
    """Where a block stands: the number and grid of its stage, its channels and heads, and its stochastic depth."""

    stage: int
    grid: TokenGrid
    dim: int
    num_heads: int
    drop_path: float


def rotary_stages(
    attention: Sequence[Mechanism],
    *,
    depths: Sequence[int],
    dims: Sequence[int],
    num_heads: Sequence[int],
    grids: Sequence[TokenGrid],
    block: Callable[[Mechanism, BlockPlace], nn.Module],
    embed: Callable[[int], nn.Module],
    rope: str | None,
    drop_rates: Sequence[float],
    drop_path_rate: float,
) -> list[Stage]:
    """The stages of a pyramid whose tokens are placed by rotary positions and by convolutions.

    Args:
        attention: the mechanism of each block.
        depths: blocks of each stage.
        dims: its channels.
        num_heads: its heads.
        grids: its grid.
        block: makes a block from its mechanism and its place.
        embed: makes what leads to a stage, from its number.
        rope: a network of `subquad.rope.ROPES`; None for no rotary positions.
        drop_rates: dropout in front of each stage's blocks.
        drop_path_rate: stochastic depth of the last block.
    """
    mechanisms, rates = by_stage(attention, depths), drop_path_rates(drop_path_rate, depths)
    stages = []
    for s, (dim, heads, grid) in enumerate(zip(dims, num_heads, grids, strict=True)):
        pairs = zip(mechanisms[s], rates[s], strict=True)
        blocks = [block(mechanism, BlockPlace(s, grid, dim, heads, rate)) for mechanism, rate in pairs]
        turns = rope_of(rope, dim // heads, heads)
        stages.append(Stage(embed(s), blocks, dim, grid=grid, rope=turns, drop_rate=drop_rates[s]))
    return stages
