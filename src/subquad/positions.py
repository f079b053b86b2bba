"""Learned tables that stand on a grid: called with another grid than their own they resample.

Each has `grid`, its own; `fitted(name, tensor, stored)`, a stored parameter resampled to the shape of the one here;
and `regrid(grid)`, which moves the table to another grid for good.

Letters: h heads, n tokens, d channels of a head, a agents, y x rows and columns.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from timm.layers import trunc_normal_
from torch import Tensor, nn

from subquad.errors import SubquadError
from subquad.grid import GridRows, TokenGrid
from subquad.tracing import is_exporting, larger, surely


def same_prefix(built: TokenGrid, called: TokenGrid, *, repeats: bool = False) -> None:
    """Raise if position tables built for one number of prefix tokens are asked for another, or no multiple of it."""
    if called.prefix % built.prefix if repeats and built.prefix else built.prefix != called.prefix:
        raise SubquadError(
            f"built for {built.prefix} prefix tokens but called with {called.prefix}: "
            "a position table has a row for each of them; construct the mechanism with the grid that it will see"
        )


def start_normal(parameter: Tensor, std: float = 0.02) -> None:
    """Truncated normal, in place; nothing to do, and slow to do, where there are no numbers yet."""
    if not parameter.is_meta:
        trunc_normal_(parameter, std=std)


def without_autocast(like: Tensor) -> AbstractContextManager[object]:
    """Where tables are resampled by products, which autocast would lower to half precision."""
    device = like.device.type
    # the meta device has no autocast to ask about
    lowered = device != "meta" and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if lowered else nullcontext()


def resampled(image: Tensor, shape: tuple[int, ...], mode: str, *, antialias: bool = False) -> Tensor:
    """The last axes of (b, c, …) resampled to `shape`, without aligned corners; in fp32, as not all modes know less."""
    wide = image if image.dtype == torch.float64 else image.float()
    if antialias:
        rows, columns = (smooth_bicubic(old, new, wide) for old, new in zip(image.shape[2:], shape, strict=True))
        with without_autocast(wide):
            return (rows @ wide @ columns.T).to(image.dtype)
    return F.interpolate(wide, shape, mode=mode).to(image.dtype)


def _centres(old: int, new: int, like: Tensor, step: float | None) -> Tensor:
    """Where `new` places along a line lie among `old` ones: `step` apart, or so that both reach equally far."""
    step = old / new if step is None else step
    return (torch.arange(new, dtype=like.dtype, device=like.device) + 0.5) * step - 0.5


def linear(old: int, new: int, like: Tensor, step: float | None = None) -> Tensor:
    """The matrix (new, old) of linear resampling along a line, without aligned corners."""
    places = _centres(old, new, like, step)
    sources = torch.arange(old, dtype=like.dtype, device=like.device)
    return (1 - (places.clamp(0, old - 1)[:, None] - sources).abs()).clamp(min=0)


def smooth_bicubic(old: int, new: int, like: Tensor) -> Tensor:
    """The matrix (new, old) of bicubic resampling along a line, widened where it shrinks so that nothing aliases.

    The filter of Pillow and of `F.interpolate(mode="bicubic", antialias=True)`, Keys 1981 with a = -1/2; that function
    itself cannot be compiled for images of changing size.
    """
    step = old / new
    places = (torch.arange(new, dtype=like.dtype, device=like.device) + 0.5) * step
    sources = torch.arange(old, dtype=like.dtype, device=like.device) + 0.5
    x = (places[:, None] - sources).abs() / (larger(old, new) / new)
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    weights = torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
    return weights / weights.sum(1, keepdim=True)


def sharp_bicubic(old: int, new: int, like: Tensor, step: float | None = None) -> Tensor:
    """The matrix (new, old) of bicubic resampling along a line as `F.interpolate(mode="bicubic")` has it.

    Keys 1981 with a = -3/4, not widened where it shrinks; places outside are those at the border.
    """
    places = _centres(old, new, like, step)
    around = places.floor()[:, None] + torch.arange(-1, 3, dtype=like.dtype, device=like.device)
    x = (places[:, None] - around).abs()
    near, far = (1.25 * x - 2.25) * x * x + 1, ((-0.75 * x + 3.75) * x - 6) * x + 3
    weights = torch.where(x <= 1, near, far)
    empty = torch.zeros(new, old, dtype=like.dtype, device=like.device)
    return empty.scatter_add(1, around.clamp(0, old - 1).long(), weights)


def adaptive_means(image: Tensor, shape: tuple[int, int]) -> Tensor:
    """Means of a map (b, c, y, x) over `shape` adaptive bins."""
    return means_by_products(image, shape) if is_exporting() else F.adaptive_avg_pool2d(image, shape)


def means_by_products(image: Tensor, shape: tuple[int, int]) -> Tensor:
    """`adaptive_means` as products with matrices of the bins, for what is exported.

    No format of networks has such bins: what PyTorch makes of them is gathered place by place, where it can be at all.
    """
    rows, columns = (bin_means(size, count, image) for size, count in zip(image.shape[-2:], shape, strict=True))
    return rows @ image @ columns.mT


def means_of_rows(image: Tensor, grid: TokenGrid, shape: tuple[int, int]) -> Tensor:
    """What a map's rows, all those of its grid or some, contribute to the means over `shape` adaptive bins."""
    if not isinstance(grid, GridRows):
        return adaptive_means(image, shape)
    rows, columns = (bin_means(size, count, image) for size, count in zip(grid.whole.shape, shape, strict=True))
    return grid.own_rows(rows, dim=1) @ image @ columns.mT


def bin_means(size: int, count: int, like: Tensor) -> Tensor:
    """The matrix (count, size) of means over adaptive bins along a line, which may overlap."""
    bins, places = torch.arange(count, device=like.device)[:, None], torch.arange(size, device=like.device)
    first, behind = bins * size // count, ((bins + 1) * size + count - 1) // count
    inside = ((places >= first) & (places < behind)).to(like.dtype)
    return inside / (behind - first)


class GridTable(nn.Module):
    """What the tables share: moving to another grid keeps device, dtype and whether a parameter is frozen.

    Attributes:
        grid: its own.
        repeats_prefix: whether it may be called with a multiple of its prefix tokens, each of which is repeated next
            to itself.
    """

    grid: TokenGrid
    repeats_prefix = False

    def fitted(self, name: str, tensor: Tensor, stored: TokenGrid | None = None) -> Tensor:
        """`tensor`, stored as parameter `name` of a table on the grid `stored`, resampled to this one's.

        Where nobody knows that grid, it is what the tensor's shape says: a square, of a table of tokens.
        """
        raise NotImplementedError

    def regrid(self, grid: TokenGrid) -> None:
        """Stand on `grid` from now on; parameters are resampled."""
        same_prefix(self.grid, grid)
        if grid == self.grid:
            return
        self.grid = grid
        for name, parameter in list(self._parameters.items()):
            if parameter is not None:
                moved = self.fitted(name, parameter.detach())
                setattr(self, name, nn.Parameter(moved, requires_grad=parameter.requires_grad))


def repeated(prefix: Tensor, count: int, *, dim: int) -> Tensor:
    """What a table has for each of its prefix tokens, repeated for a multiple of them."""
    own = prefix.shape[dim]
    return prefix if own == count else prefix.repeat_interleave(count // own, dim=dim)


class PositionTable(GridTable):
    """A learned vector for each token; called with a grid it gives (h, n, d).

    Args:
        num_heads: heads h.
        head_dim: channels d.
        grid: what it stands on; prefix tokens have a row each.
        std: of the truncated normal it starts from; 0 for zeros.
        mode: of resampling, "bilinear" or "bicubic".
    """

    def __init__(
        self, num_heads: int, head_dim: int, grid: TokenGrid, *, std: float = 0, mode: str = "bilinear"
    ) -> None:
        super().__init__()
        self.grid, self.mode = grid, mode
        self.table = nn.Parameter(torch.zeros(num_heads, grid.num_tokens, head_dim))
        if std:
            start_normal(self.table, std)

    def forward(self, grid: TokenGrid) -> Tensor:
        same_prefix(self.grid, grid.whole, repeats=self.repeats_prefix)
        own, count = self.grid, grid.whole.prefix
        if own.prefix == count:
            return resample_places(self.table, own, grid, self.mode)
        prefix, places = self.table.split([own.prefix, own.num_places], dim=1)
        table = torch.cat([repeated(prefix, count, dim=1), places], dim=1)
        return resample_places(table, TokenGrid(*own.shape, count), grid, self.mode)

    def fitted(self, name: str, tensor: Tensor, stored: TokenGrid | None = None) -> Tensor:
        if tensor.shape[::2] != self.table.shape[::2]:
            # of another network: what it lacks is said in whole, and not of its size
            return tensor
        return resample_places(tensor, stored_grid(tensor.shape[1], self.grid.prefix, stored), self.grid, self.mode)

    def regrid(self, grid: TokenGrid) -> None:
        same_prefix(self.grid, grid)
        moved = resample_places(self.table.detach(), self.grid, grid, self.mode)
        self.grid = grid
        self.table = nn.Parameter(moved, requires_grad=self.table.requires_grad)


MATRICES = {"bilinear": linear, "bicubic": smooth_bicubic, "sharp bicubic": sharp_bicubic}
"""Along a line, by how a table is resampled."""


def _rows_of_places(table: Tensor, old: TokenGrid, new: GridRows, mode: str) -> Tensor:
    """Rows of a table (h, n, d) without prefix, resampled; channels stay last, so that nothing is turned around."""
    matrix = MATRICES[mode]
    wide = table if table.dtype == torch.float64 else table.float()
    rows, columns = (matrix(before, here, wide) for before, here in zip(old.shape, new.whole.shape, strict=True))
    with without_autocast(wide):
        lines = new.own_rows(rows) @ rearrange(wide, "h (y x) d -> h y (x d)", y=old.height)
        places = columns @ rearrange(lines, "h y (x d) -> h y x d", x=old.width)
    return rearrange(places, "h y x d -> h (y x) d").to(table.dtype)


def resample_places(table: Tensor, old: TokenGrid, new: TokenGrid, mode: str) -> Tensor:
    """A table (h, n, d) from one grid to another; rows of prefix tokens stay. A shorter sequence has the first places.

    A sequence is a grid of one row: its places are numbers that count, it is not a picture at another resolution.
    """
    if old.stands_on(new.whole):
        return new.own_tokens(table)
    if old.height == 1 and surely(new.whole.height == 1) and surely(new.width < old.width):
        return table[:, : new.num_tokens]
    prefix, places = table.split([old.prefix, old.num_places], dim=1)
    if isinstance(new, GridRows):
        places = _rows_of_places(places, old, new, mode)
        return torch.cat([prefix[:, : new.prefix], places], dim=1)
    image = rearrange(places, "h (y x) d -> 1 (h d) y x", y=old.height)
    moved = resampled(image, new.shape, mode.removeprefix("sharp "), antialias=mode == "bicubic")
    places = rearrange(moved, "1 (h d) y x -> h (y x) d", h=table.shape[0])
    return torch.cat([prefix[:, : new.prefix], places], dim=1)


def stored_grid(num_tokens: int, prefix: int, known: TokenGrid | None = None) -> TokenGrid:
    """The grid of a stored table of `num_tokens` rows: the one that is `known`, or a square; most files say no more."""
    if known is not None and (known.num_tokens, known.prefix) == (num_tokens, prefix):
        return known
    side = math.isqrt(max(num_tokens - prefix, 0))
    if side < 1 or side * side != num_tokens - prefix:
        raise SubquadError(
            f"a stored table of {num_tokens} tokens, {prefix} of them prefix, stands on no square: "
            "create the model with the img_size that it was trained at, load, then call set_input_size"
        )
    return TokenGrid(side, side, prefix)


class BiasTables(NamedTuple):
    """A bias (h, a, n) as the sum of a block (h, a, s, s), rows (h, a, y) and columns (h, a, x); prefix (h, a, p)."""

    block: Tensor
    rows: Tensor
    columns: Tensor
    prefix: Tensor | None

    @property
    def grid(self) -> TokenGrid:
        """What the bias is for."""
        prefix = 0 if self.prefix is None else self.prefix.shape[2]
        return TokenGrid(self.rows.shape[2], self.columns.shape[2], prefix)

    def written_out(self) -> Tensor:
        """(h, a, n): the block resampled to the map, and numbers of the prefix in front."""
        block = resampled(self.block, (self.rows.shape[2], self.columns.shape[2]), "bilinear")
        bias = (block + self.rows[..., :, None] + self.columns[..., None, :]).flatten(2)
        return bias if self.prefix is None else torch.cat([self.prefix, bias], dim=2)


class GridBias(GridTable):
    """A bias for each pair of an agent and a token: called with a grid it gives (h, a, n).

    The sum of a coarse block, a row part and a column part (agent attention, arXiv 2312.08874, section 3.3); prefix
    tokens have a number each. Resampled bilinearly (the block) and linearly (rows, columns). Called with `agents`, a
    grid of more or fewer agents than it was built for, it is resampled over them as well, bilinearly.
    """

    def __init__(self, num_heads: int, agents: TokenGrid, grid: TokenGrid, *, block: int = 7) -> None:
        super().__init__()
        self.grid, self.agents = grid, agents
        shape = num_heads, agents.num_places
        self.block = nn.Parameter(torch.empty(*shape, block, block))
        self.rows = nn.Parameter(torch.empty(*shape, grid.height))
        self.columns = nn.Parameter(torch.empty(*shape, grid.width))
        self.prefix = nn.Parameter(torch.empty(*shape, grid.prefix)) if grid.prefix else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Truncated normal, std 0.02."""
        for table in self.parameters():
            start_normal(table)

    def forward(self, grid: TokenGrid, agents: TokenGrid | None = None) -> Tensor:
        return self.tables(grid, agents).written_out()

    def tables(self, grid: TokenGrid, agents: TokenGrid | None = None) -> BiasTables:
        """What the bias is the sum of, on `grid` and for `agents`."""
        same_prefix(self.grid, grid.whole, repeats=self.repeats_prefix)
        agents = agents or self.agents
        block = self._for_agents(self.block, agents)
        rows = resample_line(self._for_agents(self.rows, agents), grid.whole.height)
        if isinstance(grid, GridRows):
            # along rows it is resampled here, and along columns where it is written out
            wide = block if block.dtype == torch.float64 else block.float()
            with without_autocast(wide):
                tall = grid.own_rows(linear(block.shape[2], grid.whole.height, wide)) @ wide
            block = tall.to(block.dtype)
            rows = grid.own_rows(rows, dim=2)
        columns = resample_line(self._for_agents(self.columns, agents), grid.width)
        prefix = None if self.prefix is None else self._for_agents(self.prefix, agents)
        if prefix is not None:
            prefix = repeated(prefix, grid.whole.prefix, dim=2)[:, :, : grid.prefix]
        return BiasTables(block, rows, columns, prefix)

    def fitted(self, name: str, tensor: Tensor, stored: TokenGrid | None = None) -> Tensor:
        length = {"rows": self.grid.height, "columns": self.grid.width}.get(name)
        return tensor if length is None else resample_line(tensor, length)

    def _for_agents(self, table: Tensor, agents: TokenGrid) -> Tensor:
        if agents == self.agents:
            return table
        image = rearrange(table.flatten(2), "h (y x) t -> h t y x", y=self.agents.height)
        image = resampled(image, agents.shape, "bilinear")
        return rearrange(image, "h t y x -> h (y x) t").reshape(len(table), agents.num_places, *table.shape[2:])


def resample_line(line: Tensor, length: int) -> Tensor:
    """The last axis of (h, a, y) linearly to another length."""
    return line if surely(line.shape[-1] == length) else resampled(line, (length,), "linear")


class RelativeBias(GridTable):
    """A bias for each offset between a query and a key: called with a grid it gives (h, n, n).

    Swin, Liu et al. 2021, arXiv 2103.14030, eq. 4. On a smaller grid than its own offsets keep their numbers, on a
    larger one the table is resampled (bicubic, as checkpoints are moved to larger windows).
    """

    def __init__(self, num_heads: int, grid: TokenGrid) -> None:
        super().__init__()
        if grid.prefix:
            raise SubquadError(f"a relative position bias needs a grid without prefix tokens, got {grid}")
        self.grid = grid
        self.table = nn.Parameter(torch.empty(num_heads, 2 * grid.height - 1, 2 * grid.width - 1))
        start_normal(self.table)

    def forward(self, grid: TokenGrid) -> Tensor:
        same_prefix(self.grid, grid)
        table = offsets_within(self.table, grid.shape)
        # [y, x, i, j] is the offset (y + i, x + j) from the other corner, so queries, whole lines, run backwards
        offsets = table.flip(1, 2).unfold(1, grid.height, 1).unfold(2, grid.width, 1)
        return rearrange(offsets, "h y x i j -> h (y x) (i j)").flip(1)

    def fitted(self, name: str, tensor: Tensor, stored: TokenGrid | None = None) -> Tensor:
        return offsets_within(tensor, self.grid.shape)


def offsets_within(table: Tensor, shape: tuple[int, int]) -> Tensor:
    """A table (h, 2y - 1, 2x - 1) of offsets for a grid of `shape`: its middle, or where that is larger, resampled."""
    own = (table.shape[1] + 1) // 2, (table.shape[2] + 1) // 2
    height, width = (larger(here, before) for here, before in zip(shape, own, strict=True))
    table = resample_offsets(table, (height, width))
    top, left = (table.shape[1] + 1) // 2 - shape[0], (table.shape[2] + 1) // 2 - shape[1]
    return table[:, top : top + 2 * shape[0] - 1, left : left + 2 * shape[1] - 1]


def resample_offsets(table: Tensor, shape: tuple[int, int]) -> Tensor:
    """A table (h, 2y - 1, 2x - 1) of offsets within one grid, made one of offsets within a grid of `shape`."""
    size = 2 * shape[0] - 1, 2 * shape[1] - 1
    if surely(table.shape[1] == size[0]) and surely(table.shape[2] == size[1]):
        return table
    return resampled(table[None], size, "bicubic")[0]
