"""The grid that tokens stand on: geometry travels with them, it is never guessed from their number.

Letters: b batch, h heads, n tokens, d channels of a head, c = h·d channels, y x rows and columns.
"""

import itertools
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
        # 224 / 16 is no whole number, though it equals one
        if any(isinstance(count, (float, str)) for count in (self.height, self.width, self.prefix)):
            raise SubquadError(f"a grid has whole numbers of rows, columns and prefix tokens, got {self!r}")
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
        """The grid that these rows are of: itself, but for `GridRows`."""
        return self

    @property
    def without_prefix(self) -> "TokenGrid":
        """The same map alone."""
        return TokenGrid(self.height, self.width)

    def reduced(self, ratio: int) -> "TokenGrid":
        """The map with one place for each `ratio` × `ratio`, rounded up, without prefix tokens."""
        return TokenGrid(-(-self.height // ratio), -(-self.width // ratio))

    def rows(self, first: int, behind: int) -> "GridRows":
        """Rows `first` to `behind` (not included); the first of them brings the prefix tokens."""
        prefix = 0 if first else self.prefix
        return GridRows(behind - first, self.width, prefix, first, self.height, self.prefix)

    def own_rows(self, of_whole: Tensor, dim: int = 0) -> Tensor:
        """What stands on this grid's rows, of a tensor with an entry for each row of the whole grid."""
        return of_whole

    def own_tokens(self, of_whole: Tensor) -> Tensor:
        """What stands on this grid, of a tensor (…, n, d) with a row for each token of the whole grid."""
        return of_whole

    def beside(self, wider: "TokenGrid") -> tuple[int, int]:
        """How many rows above and below these `wider` has, of the same whole grid; none where it is no wider."""
        return 0, 0

    def of(self, wider: "TokenGrid", tokens: Tensor) -> Tensor:
        """Give those of the tokens (…, n, d) of `wider` that stand here."""
        return tokens

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
class GridRows(TokenGrid):
    """Some rows of a whole grid, from row `first` on, as `TokenGrid.rows` gives them; row 0 brings the prefix tokens.

    What has an entry for each row or token of the whole grid, tables and rotations, gives those of these rows.
    """

    first: int = 0
    whole_height: int = 1
    whole_prefix: int = 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GridRows):
            return False
        return self.first == other.first and self.whole == other.whole and super().__eq__(other)

    __hash__ = TokenGrid.__hash__

    def __str__(self) -> str:
        return f"rows {self.first} to {self.behind - 1} of {self.whole}"

    @property
    def behind(self) -> int:
        """The whole grid's first row behind these."""
        return self.first + self.height

    @property
    def tokens(self) -> slice:
        """Which of the whole grid's tokens stand here."""
        behind = self.whole_prefix + self.behind * self.width
        return slice(behind - self.num_tokens, behind)

    @property
    def whole(self) -> TokenGrid:
        return TokenGrid(self.whole_height, self.width, self.whole_prefix)

    @property
    def without_prefix(self) -> TokenGrid:
        return self.whole.without_prefix.rows(self.first, self.behind)

    def widened(self, reach: int) -> "GridRows":
        """With as many as `reach` rows more above and below, as far as there are some."""
        return self.whole.rows(max(0, self.first - reach), min(self.whole_height, self.behind + reach))

    def own_rows(self, of_whole: Tensor, dim: int = 0) -> Tensor:
        return of_whole.narrow(dim, self.first, self.height)

    def own_tokens(self, of_whole: Tensor) -> Tensor:
        return of_whole.narrow(-2, self.tokens.start, self.num_tokens)

    def beside(self, wider: TokenGrid) -> tuple[int, int]:
        if not isinstance(wider, GridRows) or wider.whole != self.whole:
            return 0, 0
        return self.first - wider.first, wider.behind - self.behind

    def of(self, wider: TokenGrid, tokens: Tensor) -> Tensor:
        if not isinstance(wider, GridRows):
            return self.own_tokens(tokens)
        return tokens.narrow(-2, self.tokens.start - wider.tokens.start, self.num_tokens)


@dataclass(frozen=True, eq=False)
class BandGrid(GridRows):
    """Rows of a whole grid whose other rows other processes hold: `heights` are those of all bands from the top."""

    heights: tuple[int, ...] = (1,)

    @classmethod
    def cut(cls, heights: tuple[int, ...], index: int, width: int, prefix: int = 0) -> "BandGrid":
        """The band `index` of a grid with `prefix` tokens in front, which stand in the first band."""
        height, here = heights[index], prefix if index == 0 else 0
        return cls(height, width, here, sum(heights[:index]), sum(heights), prefix, heights)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BandGrid) and self.heights == other.heights and super().__eq__(other)

    __hash__ = TokenGrid.__hash__

    @property
    def index(self) -> int:
        """Which of the bands it is."""
        return list(itertools.accumulate(self.heights, initial=0)).index(self.first)

    @property
    def without_prefix(self) -> TokenGrid:
        return BandGrid.cut(self.heights, self.index, self.width)

    def reduced(self, ratio: int) -> TokenGrid:
        # asked of all bands, so that every process raises
        if any(height % ratio for height in self.heights[:-1]):
            raise SubquadError(
                f"bands of {' '.join(map(str, self.heights))} rows can't be made {ratio} times smaller each: all but "
                f"the last have to be multiples of {ratio} rows high"
            )
        heights = tuple(-(-height // ratio) for height in self.heights)
        return BandGrid.cut(heights, self.index, -(-self.width // ratio))


def cut_into_rows(grid: TokenGrid, most_tokens: int) -> list[GridRows]:
    """Rows of a grid in turn, in parts of about `most_tokens` tokens, one row at least, that differ by one row."""
    count = -(-grid.height // max(1, most_tokens // grid.width))
    bounds = [i * grid.height // count for i in range(count + 1)]
    return [grid.rows(first, behind) for first, behind in itertools.pairwise(bounds)]


def rows_beside(kernel: int, stride: int = 1, padding: int | None = None, dilation: int = 1) -> tuple[int, int]:
    """How many rows above and below some rows, whole strides of them, a convolution looks at.

    `padding` is how many rows of zeros it has above the map, half a kernel if left out.
    """
    reach = dilation * (kernel - 1) + 1
    above = reach // 2 if padding is None else padding
    return above, max(reach - stride - above, 0)
