"""Bricks of the hosts: attention layers, which gather tokens, project them and hand them to a mechanism.

Letters: b batch, h heads, n tokens, d channels of a head, c = h·d channels, p projections.
"""

from collections.abc import Callable
from typing import Any

from einops import rearrange
from timm.layers import DropPath, Mlp
from torch import Tensor, nn

from subquad.grid import TokenGrid

Mechanism = Callable[..., Any]
"""A class of `subquad.attention`, or a `functools.partial` of one that fixes its settings."""

PROJECTED = frozenset({"q", "k", "v", "g"})


class SelfAttention(nn.Module):
    """All tokens attend to all: project, mix, project back. x (b, n, c) -> (b, n, c).

    Args:
        dim: channels c.
        num_heads: heads h, a divisor of `dim`.
        attention: the mechanism.
        grid: the grid that position parameters are made for; a call may bring another one.
        qkv_bias: whether the fused projection has a bias.
    """

    def __init__(
        self, dim: int, num_heads: int, attention: Mechanism, *, grid: TokenGrid, qkv_bias: bool = True
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.inner = attention(dim, num_heads, grid=grid, kv_grid=grid)
        self.projected = tuple(name for name in self.inner.inputs if name in PROJECTED)
        self.project = nn.Linear(dim, dim * len(self.projected), bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, *, grid: TokenGrid, padding: Tensor | None = None) -> Tensor:
        """`padding` (b, n) is True for tokens that are not there; their own outputs mean nothing."""
        grid.check(x)
        heads = rearrange(self.project(x), "b n (p h d) -> p b h n d", p=len(self.projected), h=self.num_heads)
        supply: dict[str, Tensor | None] = dict(zip(self.projected, heads.unbind(0), strict=True))
        supply |= {"x": x, "padding": padding, "mask": None}
        y = self.inner(**{name: supply[name] for name in self.inner.inputs}, grid=grid, kv_grid=grid)
        return self.proj(rearrange(y, "b h n d -> b n (h d)"))


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
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop=drop)
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor, *, grid: TokenGrid) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x), grid=grid))
        return x + self.drop_path(self.mlp(self.norm2(x)))
