"""Bricks that several mechanisms are built from: position tables and the local branch.

Letters: b batch, h heads, n tokens, d channels of a head, y x rows and columns, a agents.
"""

import math

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from timm.layers import trunc_normal_
from torch import Tensor, nn

from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.ops.padding import zero_padding


def head_dim(dim: int, num_heads: int) -> int:
    """Channels of a head."""
    if num_heads < 1 or dim % num_heads:
        raise SubquadError(f"{num_heads} heads do not divide a width of {dim}: choose num_heads among its divisors")
    return dim // num_heads


def same_prefix(built: TokenGrid, called: TokenGrid) -> None:
    """Raise if position tables built for one number of prefix tokens are asked for another."""
    if built.prefix != called.prefix:
        raise SubquadError(
            f"built for {built.prefix} prefix tokens but called with {called.prefix}: "
            "a position table has a row for each of them; construct the mechanism with the grid that it will see"
        )


class PositionTable(nn.Module):
    """A learned vector for each token, zeros at first; called with a grid it gives (h, n, d), resized bilinearly."""

    def __init__(self, num_heads: int, head_dim: int, grid: TokenGrid) -> None:
        super().__init__()
        self.grid = grid
        self.table = nn.Parameter(torch.zeros(num_heads, grid.num_tokens, head_dim))

    def forward(self, grid: TokenGrid) -> Tensor:
        same_prefix(self.grid, grid)
        if grid.shape == self.grid.shape:
            return self.table
        prefix, places = self.table.split([grid.prefix, self.grid.num_places], dim=1)
        image = rearrange(places, "h (y x) d -> 1 (h d) y x", y=self.grid.height)
        image = F.interpolate(image, grid.shape, mode="bilinear")
        places = rearrange(image, "1 (h d) y x -> h (y x) d", h=self.table.shape[0])
        return torch.cat([prefix, places], dim=1)


class GridBias(nn.Module):
    """A bias for each pair of an agent and a token: called with a grid it gives (h, a, n).

    The sum of a coarse block, a row part and a column part (agent attention, arXiv 2312.08874, section 3.3); prefix
    tokens have a number each. Resized bilinearly (the block) and linearly (rows, columns).
    """

    def __init__(self, num_heads: int, num_agents: int, grid: TokenGrid, *, block: int = 7) -> None:
        super().__init__()
        self.grid = grid
        self.block = nn.Parameter(torch.empty(num_heads, num_agents, block, block))
        self.rows = nn.Parameter(torch.empty(num_heads, num_agents, grid.height))
        self.columns = nn.Parameter(torch.empty(num_heads, num_agents, grid.width))
        self.prefix = nn.Parameter(torch.empty(num_heads, num_agents, grid.prefix)) if grid.prefix else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Truncated normal, std 0.02."""
        for table in self.parameters():
            trunc_normal_(table, std=0.02)

    def forward(self, grid: TokenGrid) -> Tensor:
        same_prefix(self.grid, grid)
        rows, columns = self._resize_line(self.rows, grid.height), self._resize_line(self.columns, grid.width)
        block = F.interpolate(self.block, grid.shape, mode="bilinear")
        bias = (block + rows[..., :, None] + columns[..., None, :]).flatten(2)
        return bias if self.prefix is None else torch.cat([self.prefix, bias], dim=2)

    @staticmethod
    def _resize_line(line: Tensor, length: int) -> Tensor:
        return line if line.shape[-1] == length else F.interpolate(line, length, mode="linear")


class LocalConv(nn.Module):
    """Depthwise convolution of the values on their map, in heads; prefix tokens get zeros.

    `filters` says how many kernels there are: "channel" one for each of the h·d channels, "head_channel" d kernels
    that the heads share, "head" h kernels that a head's channels share. On another grid than the queries' the values
    are resized bilinearly first.
    """

    def __init__(
        self, num_heads: int, head_dim: int, kernel_size: int, *, filters: str = "channel", bias: bool = True
    ) -> None:
        super().__init__()
        if kernel_size % 2 == 0:
            raise SubquadError(f"the local branch needs an odd kernel_size, got {kernel_size}")
        self.num_heads, self.head_dim, self.filters = num_heads, head_dim, filters
        count = {"channel": num_heads * head_dim, "head_channel": head_dim, "head": num_heads}[filters]
        self.weight = nn.Parameter(torch.empty(count, 1, kernel_size, kernel_size))
        self.bias = nn.Parameter(torch.empty(count)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As nn.Conv2d: uniform within ± 1/kernel_size."""
        bound = 1 / math.sqrt(self.weight[0].numel())
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def _for_channels(self, parameter: Tensor) -> Tensor:
        if self.filters == "head_channel":
            return repeat(parameter, "d ... -> (h d) ...", h=self.num_heads)
        if self.filters == "head":
            return repeat(parameter, "h ... -> (h d) ...", d=self.head_dim)
        return parameter

    def forward(self, v: Tensor, *, grid: TokenGrid, kv_grid: TokenGrid, padding: Tensor | None = None) -> Tensor:
        values = values_on(grid, kv_grid, zero_padding(v, padding))
        weight = self._for_channels(self.weight)
        bias = None if self.bias is None else self._for_channels(self.bias)
        image = F.conv2d(values, weight, bias, padding=self.weight.shape[-1] // 2, groups=values.shape[1])
        return grid.to_heads(image, self.num_heads)


def values_on(grid: TokenGrid, kv_grid: TokenGrid, v: Tensor) -> Tensor:
    """The map (b, h·d, y, x) of values v (b, h, n_k, d), resized bilinearly from their grid to that of the queries."""
    image = kv_grid.to_map(v)
    return image if kv_grid.shape == grid.shape else F.interpolate(image, grid.shape, mode="bilinear")
