"""The grid that tokens stand on: geometry travels with them, it is never guessed from their number.

Letters: b batch, h heads, n tokens, d channels of a head, c = h·d channels, y x rows and columns.
"""

import itertools
from dataclasses import dataclass

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from subquad.errors import SubquadError
from subquad.tracing import surely


@dataclass(frozen=True)
class TokenGrid:
    """A map of `height` × `width` tokens in row-major order, behind `prefix` tokens that have no place on it.

    A plain sequence of n tokens is the grid of one row, `TokenGrid(1, n)`.
    """

    height: int
    width: int
    prefix: int = 0

    def __post_init__(self) -> None:
        if surely(self.height < 1) or surely(self.width < 1) or self.prefix < 0:
            raise SubquadError(f"a grid needs at least one row and one column and no negative prefix, got {self}")

    def __eq__(self, other: object) -> bool:
        # of sizes that are symbols: for sure the same
        if not isinstance(other, TokenGrid):
            return NotImplemented
        return self.stands_on(other) and self.prefix == other.prefix

    def __ne__(self, other: object) -> bool:
        # torch.compile traces equality where sizes are symbols, but not its absence
        return not self == other

    def __str__(self) -> str:
        prefix = f" after {self.prefix} prefix tokens" if self.prefix else ""
        return f"{self.height}×{self.width}{prefix}"

    @property
    def num_places(self) -> int:
        """Tokens on the map, without the prefix."""
        return self.height * self.width

    @property
    def num_tokens(self) -> int:
        """All tokens: prefix and map."""
        return self.prefix + self.num_places

    @property
    def shape(self) -> tuple[int, int]:
        """(height, width)."""
        return self.height, self.width

    def stands_on(self, other: "TokenGrid") -> bool:
        """Whether it has the rows and columns of `other`, whatever their prefix."""
        return surely(self.height == other.height) and surely(self.width == other.width)

    def check(self, *several: Tensor) -> None:
        """Raise if tokens, each (b, h, n, d) or (b, n, c), are not as many as this grid holds."""
        for tokens in several:
            if surely(tokens.shape[-2] != self.num_tokens):
                raise SubquadError(f"{tokens.shape[-2]} tokens do not fill a grid of {self} ({self.num_tokens} tokens)")

    def to_map(self, tokens: Tensor) -> Tensor:
        """(b, h, n, d) tokens to the map (b, h·d, y, x); prefix tokens are left out."""
        self.check(tokens)
        places = tokens[:, :, self.prefix :]
        return rearrange(places, "b h (y x) d -> b (h d) y x", y=self.height, x=self.width)

    def to_image(self, tokens: Tensor) -> Tensor:
        """(b, n, c) tokens to the map (b, c, y, x); prefix tokens are left out."""
        self.check(tokens)
        return rearrange(tokens[:, self.prefix :], "b (y x) c -> b c y x", y=self.height, x=self.width)

    def to_heads(self, image: Tensor, num_heads: int) -> Tensor:
        """A map (b, h·d, y, x) to tokens (b, h, n, d); prefix tokens, which have no place on it, get zeros."""
        tokens = rearrange(image, "b (h d) y x -> b h (y x) d", h=num_heads)
        return F.pad(tokens, (0, 0, self.prefix, 0)) if self.prefix else tokens


@dataclass(frozen=True)
class GridRows:
    """Rows `first` to `behind` (not included) of a grid; the first of them brings the prefix tokens."""

    whole: TokenGrid
    first: int
    behind: int

    @property
    def grid(self) -> TokenGrid:
        """These rows as a grid of their own."""
        return TokenGrid(self.behind - self.first, self.whole.width, 0 if self.first else self.whole.prefix)

    @property
    def tokens(self) -> slice:
        """Which of the whole grid's tokens stand here."""
        first = self.whole.prefix + self.first * self.whole.width if self.first else 0
        return slice(first, self.whole.prefix + self.behind * self.whole.width)

    def widened(self, reach: int) -> "GridRows":
        """With as many as `reach` rows more above and below, as far as there are some."""
        return GridRows(self.whole, max(0, self.first - reach), min(self.whole.height, self.behind + reach))

    def of(self, wider: "GridRows", tokens: Tensor) -> Tensor:
        """Give those of a wider part's tokens (…, n, d) that stand here."""
        start = self.tokens.start - wider.tokens.start
        return tokens[..., start : start + self.grid.num_tokens, :]


def cut_into_rows(grid: TokenGrid, most_tokens: int) -> list[GridRows]:
    """Rows of a grid in turn, in parts of about `most_tokens` tokens, one row at least, that differ by one row."""
    count = -(-grid.height // max(1, most_tokens // grid.width))
    bounds = [i * grid.height // count for i in range(count + 1)]
    return [GridRows(grid, first, behind) for first, behind in itertools.pairwise(bounds)]
