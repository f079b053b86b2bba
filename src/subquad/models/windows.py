"""Windows of a map, which may be shifted: Swin Transformer, Liu et al. 2021, arXiv 2103.14030.

Maps of any size are filled up to whole windows with zeros, which take part as they do in Swin's detectors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from subquad.grid import TokenGrid
from subquad.tracing import first, is_symbol, smaller, surely, up_to_multiple


@dataclass(frozen=True)
class Windows:
    """How a map is cut into windows.

    Attributes:
        grid: of the map.
        window: of each of them.
        shift: how many rows and columns the map moves up and to the left before it is cut; what leaves it comes in on
            the other side. None where windows are not shifted.
        pads_first: whether the map is filled up to whole windows before it is shifted, or behind that.
    """

    grid: TokenGrid
    window: TokenGrid
    shift: tuple[int, int] | None = None
    pads_first: bool = True

    @property
    def counts(self) -> tuple[int, int]:
        """Rows and columns of windows."""
        sizes = zip(self.grid.shape, self.window.shape, strict=True)
        rows, columns = (up_to_multiple(size, side) // side for size, side in sizes)
        return rows, columns

    def gather(self, image: Tensor) -> Tensor:
        """The tokens of all windows (b·r·l, n, c) of a map (b, y, x, c)."""
        image = fill_windows(image, self.window) if self.pads_first else image
        image = image if self.shift is None else rolled(image, self.shift)
        image = image if self.pads_first else fill_windows(image, self.window)
        windows = rearrange(image, "b (r y) (l x) c -> b r l y x c", y=self.window.height, x=self.window.width)
        # in order first: torch.export must not have to ask whether there is a copy to be made
        return rearrange(windows.contiguous(), "b r l y x c -> (b r l) (y x) c")

    def scatter(self, tokens: Tensor) -> Tensor:
        """The map (b, y, x, c) of the tokens of all windows (b·r·l, n, c)."""
        sizes: dict[str, Any] = dict(zip("rlyx", (*self.counts, *self.window.shape), strict=True))
        image = rearrange(tokens, "(b r l) (y x) c -> b (r y) (l x) c", **sizes)
        image = image if self.pads_first else self._cut(image)
        image = image if self.shift is None else rolled(image, self.shift, back=True)
        return self._cut(image) if self.pads_first else image

    def _cut(self, image: Tensor) -> Tensor:
        return first(first(image, self.grid.height, 1), self.grid.width, 2)

    def mask(self, count: int, device: torch.device) -> Tensor | None:
        """Pairs that only the shift has brought together, for the windows of `count` maps (b·r·l, 1, n, n).

        True = must not attend; None where windows are not shifted.
        """
        if self.shift is None:
            return None
        return border_mask(*self.counts, self.window, self.shift, device).repeat(count, 1, 1)[:, None]

    def fill(self, tokens: Tensor, value: Tensor | None) -> Tensor:
        """Tokens of all windows (b·r·l, n, c) whose ones beyond the map become `value` (c), or 0, in place."""
        sizes = zip(self.grid.shape, self.counts, self.window.shape, strict=True)
        if all(size == count * side for size, count, side in sizes):
            return tokens
        inside = self.gather(torch.ones(1, *self.grid.shape, 1, dtype=torch.bool, device=tokens.device))[..., 0]
        of_maps = tokens.unflatten(0, (-1, len(inside)))
        of_maps[:, ~inside] = torch.zeros_like(tokens[0, 0]) if value is None else value.to(tokens.dtype)
        return tokens


def attend_in_windows(x: Tensor, windows: Windows, attend: Callable[..., Tensor]) -> Tensor:
    """Tokens (b, n, c) of a map to (b, n, c): `attend` is called with those of all windows, `grid` and `mask`."""
    grid = windows.grid
    tokens = windows.gather(rearrange(x, "b (y x) c -> b y x c", y=grid.height, x=grid.width))
    y = attend(tokens, grid=windows.window, mask=windows.mask(x.shape[0], x.device))
    return windows.scatter(y).flatten(1, 2)


def windows_of(grid: TokenGrid, window_size: int | None, *, shifted: bool, fixed: bool) -> Windows | None:
    """The windows of `window_size` on a side on a grid; None where one is the whole grid.

    `shifted` moves windows by half their size along the axes that hold more than one of them, with `fixed` along both.
    """
    window = window_of(grid, window_size, fixed=fixed)
    if window == grid and not (fixed and shifted):
        return None
    if not shifted:
        return Windows(grid, window)
    rows, columns = Windows(grid, window).counts
    half = window.height // 2, window.width // 2
    return Windows(grid, window, half if fixed else (half_of(window.height, rows), half_of(window.width, columns)))


def window_of(grid: TokenGrid, window_size: int | None, *, fixed: bool = False) -> TokenGrid:
    """The window on a grid: no larger than the grid unless it is `fixed`."""
    if window_size is None:
        return grid
    if fixed:
        return TokenGrid(window_size, window_size)
    return TokenGrid(smaller(window_size, grid.height), smaller(window_size, grid.width))


def fill_windows(image: Tensor, window: TokenGrid) -> Tensor:
    """A map (b, y, x, c) with zeros on the right and at the bottom, up to whole windows."""
    bottom, right = (
        up_to_multiple(size, side) - size for size, side in zip(image.shape[1:3], window.shape, strict=True)
    )
    return (
        image if surely(bottom == 0) and surely(right == 0) else nn.functional.pad(image, (0, 0, 0, right, 0, bottom))
    )


def rolled(image: Tensor, shift: tuple[int, int], *, back: bool = False) -> Tensor:
    """A map (b, y, x, c) moved up and to the left, or back; what leaves it comes in on the other side."""
    if not any(map(is_symbol, shift)):
        down, right = shift if back else (-shift[0], -shift[1])
        return image.roll((down, right), dims=(1, 2))
    # ONNX has no roll by as many places as the size decides
    for dim, moved in enumerate(shift, start=1):
        size = image.shape[dim]
        start = size - moved if back else moved
        parts = torch.arange(start, size, device=image.device), torch.arange(start, device=image.device)
        image = image.index_select(dim, torch.cat(parts))
    return image


def half_of(size: int, count: int) -> int:
    """How far windows of `size` move where there are `count` of them along an axis: not at all where there is one."""
    # the factor is 0 for one and 1 for more
    return (1 - 1 // count) * (size // 2)


def border_mask(rows: int, columns: int, window: TokenGrid, shift: tuple[int, int], device: torch.device) -> Tensor:
    """Pairs that only the shift has brought together, for each window (r·l, n, n), True = must not attend."""

    def regions(count: int, size: int, moved: int) -> Tensor:
        # 0 inside, 1 what stays of the last window, 2 what came round from the other border
        place = torch.arange(count * size, device=device)
        if not (is_symbol(moved) or moved):
            return place * 0
        return (place >= (count - 1) * size).long() + (place >= count * size - moved).long()

    vertical, horizontal = regions(rows, window.height, shift[0]), regions(columns, window.width, shift[1])
    region = rearrange(
        3 * vertical[:, None] + horizontal, "(r y) (l x) -> (r l) (y x)", y=window.height, x=window.width
    )
    return region[:, :, None] != region[:, None, :]
