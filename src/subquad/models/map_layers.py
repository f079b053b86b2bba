"""Bricks that see tokens on their map: conditional positions, and MLPs with a convolution within.

Letters: b batch, n tokens, c channels, k rows and columns of a filter.
"""

from collections.abc import Callable

import torch.nn.functional as F
from timm.layers import Mlp
from torch import Tensor, nn

from subquad.grid import TokenGrid


def on_map(convolve: Callable[[Tensor], Tensor], x: Tensor, grid: TokenGrid) -> Tensor:
    """What a convolution that keeps the map's size makes of tokens (b, n, c), without those of the prefix."""
    return convolve(grid.to_image(x)).flatten(2).mT


class PositionConv(nn.Conv2d):
    """A conditional position: x + a depthwise 3×3 of x on its map. CPVT, Chu et al. 2021, arXiv 2102.10882, sec. 3.4.

    Prefix tokens, which have no place on the map, stay as they are. Zeros lie outside of the map, of whatever size.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim, 3, padding=1, groups=dim)

    fused: "Callable[[PositionConv, Tensor, TokenGrid], Tensor | None] | None" = None
    """What computes it in one step, where it can, given by `subquad.inference`."""

    def forward(self, x: Tensor, *, grid: TokenGrid) -> Tensor:  # type: ignore[override]
        """(b, n, c) to (b, n, c)."""
        y = None if self.fused is None or self.training else self.fused(self, x, grid)
        if y is not None:
            return y
        position = on_map(super().forward, x, grid)
        return x + (F.pad(position, (0, 0, grid.prefix, 0)) if grid.prefix else position)


class ConvPosition(nn.Module):
    """A `PositionConv` whose weights are named `conv`, as the plain network's have always been."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv = PositionConv(dim)

    def forward(self, x: Tensor, *, grid: TokenGrid) -> Tensor:
        """(b, n, c) to (b, n, c)."""
        return self.conv(x, grid=grid)


class MapMlp(Mlp):
    """An MLP with a depthwise 3×3 of its hidden channels, on their map, between its projections.

    Args:
        dim: channels c.
        hidden: channels between the projections.
        in_front: whether the GELU stands in front of the convolution, which is then added to what it reads.
        behind: whether a GELU stands behind it.
        drop: dropout behind the last GELU, and at the end.
    """

    def __init__(self, dim: int, hidden: int, *, in_front: bool, behind: bool, drop: float = 0) -> None:
        super().__init__(dim, hidden, drop=drop)
        self.in_front, self.behind = in_front, behind
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)

    def forward(self, x: Tensor, *, grid: TokenGrid) -> Tensor:
        """(b, n, c) to (b, n, c), on a grid without prefix tokens."""
        hidden = self.fc1(x)
        if self.in_front:
            hidden = self.act(hidden)
            hidden = hidden if self.behind else self.drop1(hidden)
            hidden = hidden + on_map(self.dwconv, hidden, grid)
        else:
            hidden = on_map(self.dwconv, hidden, grid)
        if self.behind:
            hidden = self.drop1(self.act(hidden))
        return self.drop2(self.fc2(hidden))
