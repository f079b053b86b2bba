"""The grid that tokens stand on: geometry travels with them, it is never guessed from their number.

Letters: b batch, h heads, n tokens, d channels of a head, c = h·d channels, y x rows and columns.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from subquad.errors import SubquadError
from subquad.tracing import is_exporting, surely


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

    @property
    def whole(self) -> "TokenGrid":
        """The grid that these rows are of: itself, but for a band."""
        return self

    @property
    def without_prefix(self) -> "TokenGrid":
        """The same map alone."""
        return TokenGrid(self.height, self.width)

    def reduced(self, ratio: int) -> "TokenGrid":
        """The map with one place for each `ratio` × `ratio`, rounded up, without prefix tokens."""
        return TokenGrid(-(-self.height // ratio), -(-self.width // ratio))

    def own_rows(self, of_whole: Tensor, dim: int = 0) -> Tensor:
        """What stands on this grid's rows, of a tensor with an entry for each row of the whole grid."""
        return of_whole

    def own_tokens(self, of_whole: Tensor) -> Tensor:
        """What stands on this grid, of a tensor (…, n, d) with a row for each token of the whole grid."""
        return of_whole

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
        if is_exporting():
            # engines convolve with channels last, and see there that this is what they get
            places = rearrange(places, "b h n d -> b n (h d)")
            return rearrange(places, "b (y x) c -> b c y x", y=self.height, x=self.width)
        return rearrange(places, "b h (y x) d -> b (h d) y x", y=self.height, x=self.width)

    def to_image(self, tokens: Tensor) -> Tensor:
        """(b, n, c) tokens to the map (b, c, y, x); prefix tokens are left out."""
        self.check(tokens)
        return rearrange(tokens[:, self.prefix :], "b (y x) c -> b c y x", y=self.height, x=self.width)

    def to_heads(self, image: Tensor, num_heads: int) -> Tensor:
        """A map (b, h·d, y, x) to tokens (b, h, n, d); prefix tokens, which have no place on it, get zeros."""
        if is_exporting():
            tokens = rearrange(rearrange(image, "b c y x -> b (y x) c"), "b n (h d) -> b h n d", h=num_heads)
        else:
            tokens = rearrange(image, "b (h d) y x -> b h (y x) d", h=num_heads)
        return F.pad(tokens, (0, 0, self.prefix, 0)) if self.prefix else tokens


@dataclass(frozen=True, eq=False)
class BandGrid(TokenGrid):
    """A band of rows of a whole grid, whose other rows other processes hold. Prefix tokens stand in the first band.

    `heights` are those of all bands from the top, `index` says which of them is this one.
    """

    index: int = 0
    heights: tuple[int, ...] = (1,)
    whole_prefix: int = 0

    @classmethod
    def of(cls, heights: tuple[int, ...], index: int, width: int, prefix: int = 0) -> "BandGrid":
        """The band `index` of a grid with `prefix` tokens in front."""
        return cls(heights[index], width, prefix if index == 0 else 0, index, heights, prefix)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BandGrid) and self.heights == other.heights and super().__eq__(other)

    __hash__ = TokenGrid.__hash__

    def __str__(self) -> str:
        return f"rows {self.top} to {self.top + self.height - 1} of {self.whole}"

    @property
    def top(self) -> int:
        """Its first row in the whole grid."""
        return sum(self.heights[: self.index])

    @property
    def whole(self) -> TokenGrid:
        return TokenGrid(sum(self.heights), self.width, self.whole_prefix)

    @property
    def without_prefix(self) -> TokenGrid:
        return BandGrid.of(self.heights, self.index, self.width)

    def reduced(self, ratio: int) -> TokenGrid:
        if any(height % ratio for height in self.heights[:-1]):
            raise SubquadError(
                f"bands of {' '.join(map(str, self.heights))} rows can't be made {ratio} times smaller each: all but "
                f"the last have to be multiples of {ratio} rows high"
            )
        heights = tuple(-(-height // ratio) for height in self.heights)
        return BandGrid.of(heights, self.index, -(-self.width // ratio))

    def own_rows(self, of_whole: Tensor, dim: int = 0) -> Tensor:
        return of_whole.narrow(dim, self.top, self.height)

    def own_tokens(self, of_whole: Tensor) -> Tensor:
        first = self.top * self.width + self.whole_prefix - self.prefix
        return of_whole.narrow(-2, first, self.num_tokens)
