"""Axial rotary positions (RoPE): pairs of channels are turned by angles that grow with a token's row and column.

RoFormer, Su et al. 2021, arXiv 2104.09864, on maps as in EVA-02, Fang et al. 2023, arXiv 2303.11331, and DINOv3,
Siméoni et al. 2025, arXiv 2508.10104. d channels have f = d/4 frequencies, t^(-j/f) for j < f; of the d/2 pairs the
first half turns with the row, the second half with the column. Prefix tokens stand nowhere and do not turn.

Letters: b batch, h heads, n tokens, d channels of a head, f frequencies, y x rows and columns.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.errors import SubquadError, unknown_name
from subquad.grid import TokenGrid
from subquad.tracing import larger, smaller, surely

ROPES: dict[str, dict[str, Any]] = {
    "eva02": {"temperature": 10_000, "coordinates": "index", "reference": (16, 16), "interleaved": True},
    "dinov3": {"temperature": 100, "coordinates": "separate", "interleaved": False},
    "mala": {"temperature": 10_000, "coordinates": "index", "interleaved": True, "both_ends": True, "exact": True},
    "mlla": {"temperature": 10_000, "coordinates": "index", "interleaved": True, "across_heads": True, "exact": True},
}
"""The conventions of published networks by name: arguments of `AxialRope`."""

COORDINATES = ("index", "separate", "min", "max")
"""What angles grow with: the number of a row, or its place between -1 and 1."""


class Rotation(NamedTuple):
    """Turns tokens of one grid: cos (n, d), and sin (n, d) with the sign that the partner of a channel gets.

    Where every head turns otherwise, both are (h, n, d).
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def turn(self, tokens: Tensor) -> Tensor:
        """Queries, keys or features of them (b, h, n, d), turned; in their own dtype, computed in fp32 at least.

        Features of several times the tables' width are turned piece by piece, all alike.
        """
        if surely(tokens.shape[-2] != self.cos.shape[-2]):
            raise SubquadError(f"{self.cos.shape[-2]} tokens have a rotation, and {tokens.shape[-2]} are to be turned")
        if self.cos.ndim == 3 and len({len(self.cos), *tokens.shape[-3:-2]} - {1}) > 1:
            raise SubquadError(
                f"a rotation of {len(self.cos)} heads, each of which turns otherwise, can't turn tokens of "
                f"{tokens.shape[-3]}: heads beside the host's (extra_heads) are behind those, and are not turned"
            )
        if surely(tokens.shape[-1] % self.cos.shape[-1] != 0):
            raise SubquadError(f"a rotation of {self.cos.shape[-1]} channels can't turn features of {tokens.shape[-1]}")
        if tokens.shape[-1] > self.cos.shape[-1]:
            return torch.cat([self.turn(piece) for piece in tokens.split(self.cos.shape[-1], dim=-1)], dim=-1)
        if self.interleaved:
            partners = tokens.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            partners = torch.cat(tokens.chunk(2, dim=-1)[::-1], dim=-1)
        return (tokens * self.cos + partners * self.sin).to(tokens.dtype)


def tables_of(rotation: Rotation | None) -> tuple[Tensor | None, Tensor | None, bool]:
    """A rotation as operators take it: cos and sin, which may be absent, and whether pairs are neighbours."""
    return (None, None, True) if rotation is None else (rotation.cos, rotation.sin, rotation.interleaved)


def rotation_of(cos: Tensor | None, sin: Tensor | None, interleaved: bool) -> Rotation | None:
    """The rotation of such tables."""
    return None if cos is None or sin is None else Rotation(cos, sin, interleaved)


def turned(rotation: Rotation | None, *tokens: Tensor) -> tuple[Tensor, ...]:
    """Several tensors of tokens (b, h, n, d), each turned; as they are where there is no rotation."""
    return tokens if rotation is None else tuple(map(rotation.turn, tokens))


def with_signs(sin: Tensor, *, interleaved: bool) -> Tensor:
    """Sines (…, d) with the sign that the partner of a channel gets, which is minus for the first of a pair."""
    signs = torch.ones(sin.shape[-1], dtype=sin.dtype, device=sin.device)
    if interleaved:
        signs[0::2] = -1
    else:
        signs[: len(signs) // 2] = -1
    return sin * signs


class AxialRope(nn.Module):
    """The rotation of every grid; it learns nothing and keeps nothing.

    Tables are formed in fp32 and in the order of steps that timm has: networks that were trained with it compute the
    same numbers here, to the last bit of the tables.

    Args:
        head_dim: channels d of a head, a multiple of 4.
        num_heads: heads h.
        temperature: t; the slowest pairs turn almost t times slower than the first.
        coordinates: "index" for numbers 0, 1, … of rows and columns; else places between -1 and 1, times 2π, at the
            middle of a token: "separate" divides rows by the height and columns by the width, "min" and "max" both by
            the smaller or the larger of the two.
        reference: with "index", the (height, width) that every grid is stretched to; None for none.
        interleaved: whether a pair is two neighbours, or a channel of the first half and its like of the second.
        both_ends: whether the slowest pairs turn t times slower than the first: t^(-j/(f-1)) instead of t^(-j/f).
        across_heads: whether the h·d channels of a token are one vector, so that every head turns otherwise; with
            `interleaved` alone.
        exact: whether float64 tokens get tables in float64.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int = 1,
        *,
        temperature: float,
        coordinates: str,
        reference: Sequence[int] | None = None,
        interleaved: bool,
        both_ends: bool = False,
        across_heads: bool = False,
        exact: bool = False,
    ) -> None:
        super().__init__()
        if across_heads and head_dim * num_heads % 4:
            raise SubquadError(f"rotary positions need a width of a multiple of 4, got {head_dim * num_heads}")
        if across_heads and not interleaved:
            raise SubquadError("rotary positions across heads pair neighbours: they need interleaved=True")
        if head_dim % (2 if across_heads else 4):
            raise SubquadError(f"rotary positions need heads of a multiple of 4 channels, got {head_dim}")
        if coordinates not in COORDINATES:
            raise unknown_name("coordinates", coordinates, COORDINATES)
        self.head_dim, self.temperature, self.coordinates = head_dim, temperature, coordinates
        self.reference, self.interleaved, self.exact = reference, interleaved, exact
        self.num_heads, self.both_ends, self.across_heads = num_heads, both_ends, across_heads

    def forward(
        self,
        grid: TokenGrid,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        feature_width: int = 1,
    ) -> Rotation:
        """The rotation of all tokens of a grid, or of some rows of one.

        `feature_width` is how many features become of each channel of a head before they are turned, see `Traits`;
        `dtype` is that of the tokens.
        """
        width = self.head_dim * feature_width * (self.num_heads if self.across_heads else 1)
        exact = self.exact and dtype == torch.float64
        like = torch.empty(0, dtype=torch.float64 if exact else torch.float32, device=device)
        rows, columns = (self._angles(grid.whole, axis, width // 4, like) for axis in (0, 1))
        rows = grid.own_rows(rows)
        cos, sin = (self._written_out(table(rows), table(columns), grid) for table in (torch.cos, torch.sin))
        # made on the device: what is copied there waits for it, and no CUDA graph records it
        channels = torch.arange(width, dtype=like.dtype, device=device)
        signs = 2 * (channels % 2 if self.interleaved else torch.floor(channels / (width // 2))) - 1
        prefix = (0, 0, grid.prefix, 0)
        cos, sin = F.pad(cos, prefix, value=1), F.pad(sin * signs, prefix)
        if self.across_heads:
            cos, sin = (table.unflatten(-1, (self.num_heads, -1)).transpose(0, 1) for table in (cos, sin))
        return Rotation(cos, sin, self.interleaved)

    def _angles(self, grid: TokenGrid, axis: int, count: int, like: Tensor) -> Tensor:
        """Angles (y, f) of the rows of a grid, or (x, f) of its columns, f = count."""
        size, steps = grid.shape[axis], max(count - 1, 1) if self.both_ends else count
        places = torch.arange(size, dtype=like.dtype, device=like.device)
        periods = self.temperature ** (torch.arange(count, dtype=like.dtype, device=like.device) / steps)
        if self.coordinates == "index":
            if self.reference is not None:
                places = places / size * self.reference[axis]
            return places[:, None] * (1.0 / periods)
        divisor = {"separate": size, "min": smaller(*grid.shape), "max": larger(*grid.shape)}[self.coordinates]
        return 2 * math.pi * (2.0 * ((places + 0.5) / divisor) - 1.0)[:, None] / periods

    def _written_out(self, rows: Tensor, columns: Tensor, grid: TokenGrid) -> Tensor:
        """A table (n, d) of the map from one of its rows (y, f) and one of its columns (x, f)."""
        rows, columns = (part.repeat_interleave(2, dim=-1) if self.interleaved else part for part in (rows, columns))
        parts = [rows[:, None].expand(-1, grid.width, -1), columns[None].expand(grid.height, -1, -1)]
        return torch.cat(parts if self.interleaved else parts * 2, dim=-1).flatten(0, 1)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, temperature={self.temperature}, coordinates={self.coordinates!r}"


def rope_of(name: str | None, head_dim: int, num_heads: int = 1) -> AxialRope | None:
    """The rotary positions of a published network, by their name in `ROPES`; None for none."""
    if name is None:
        return None
    if name not in ROPES:
        raise unknown_name("rope", name, ROPES)
    return AxialRope(head_dim, num_heads, **ROPES[name])
