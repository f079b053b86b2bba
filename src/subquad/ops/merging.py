"""Token merging: tokens that are alike are replaced by their mean, and get a common value back.

One destination stands in each cell of the map; every other token is a source, and has the destination that it is most
alike. Merging the r sources that are most alike theirs leaves n − r tokens. Bolya & Hoffman 2023, arXiv 2303.17604.

Letters: b batch, n tokens, c channels, s sources, y x rows and columns of cells.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.ops.precision import HALF, kept_in_fp32

CHUNK = {"cpu": 2**20, "cuda": 2**26}
"""Similarities that are held at once, by device: their whole matrix would take the most memory of all, and on a CPU a
part that stays in the cache is searched faster."""


@dataclass(frozen=True)
class Matching:
    """Sources by how much they are alike their destination, most first: a list that merges are cut from.

    Attributes:
        sources: their places among the tokens, (b, s).
        owners: which of the destinations is theirs, (b, s).
        destinations: their places, (y·x,), the same for all images.
        num_tokens: n.
    """

    sources: Tensor
    owners: Tensor
    destinations: Tensor
    num_tokens: int

    def cut(self, count: int) -> "Merge":
        """Merge the first `count` sources, or all there are."""
        count = min(count, self.sources.shape[1])
        batch, kept = len(self.sources), self.sources.shape[1] - count
        rows = torch.empty(batch, self.num_tokens, dtype=torch.long, device=self.sources.device)
        rows.scatter_(1, self.sources[:, count:], torch.arange(kept, device=rows.device).expand(batch, -1))
        rows[:, self.destinations] = kept + torch.arange(len(self.destinations), device=rows.device)
        rows.scatter_(1, self.sources[:, :count], kept + self.owners[:, :count])
        return Merge(rows, kept + len(self.destinations))


@dataclass(frozen=True)
class Merge:
    """Which of `count` groups each token is in, `groups` (b, n)."""

    groups: Tensor
    count: int

    def merge(self, x: Tensor) -> Tensor:
        """The mean of each group: (b, n, c) -> (b, count, c)."""
        wide = x.float() if x.dtype in HALF else x
        rows, shape = self._rows(), (len(x) * self.count, x.shape[2])
        sums = wide.new_zeros(shape).index_add_(0, rows, wide.flatten(0, 1))
        sizes = wide.new_zeros(shape[0], 1).index_add_(0, rows, wide.new_ones(len(rows), 1))
        return (sums / sizes).unflatten(0, (x.shape[0], self.count)).to(x.dtype)

    def unmerge(self, y: Tensor) -> Tensor:
        """Each token gets its group's: (b, count, c) -> (b, n, c)."""
        return y.flatten(0, 1).index_select(0, self._rows()).unflatten(0, self.groups.shape)

    def _rows(self) -> Tensor:
        # of a matrix of all images: a token's channels are moved as one row
        images = torch.arange(len(self.groups), device=self.groups.device)[:, None]
        return (self.groups + self.count * images).flatten()


def match(x: Tensor, grid: TokenGrid, cell: tuple[int, int], offsets: Tensor | None = None) -> Matching | None:
    """Match the tokens x (b, n, c) of a map by their cosine similarity, in fp32 at least; None where no cell fits.

    `cell` is (rows, columns) of a cell, rows and columns that fill none are sources. `offsets` (y, x) says which token
    of each cell is its destination, from 0, the top left one, along rows; all are the top left one if left out.
    """
    rows, columns = cell
    if rows < 1 or columns < 1:
        raise SubquadError(f"a cell has at least one row and one column, got {rows}×{columns}")
    if grid.prefix or x.shape[1] != grid.num_places:
        raise SubquadError(f"{x.shape[1]} tokens do not stand on a map of {grid}")
    down, across = grid.height // rows, grid.width // columns
    if not down * across or rows * columns == 1:
        return None
    with torch.no_grad():
        if offsets is None:
            offsets = torch.zeros(down, across, dtype=torch.long, device=x.device)
        y = torch.arange(down, device=x.device)[:, None] * rows + offsets // columns
        destinations = (y * grid.width + torch.arange(across, device=x.device) * columns + offsets % columns).flatten()
        is_source = torch.ones(grid.num_places, dtype=torch.bool, device=x.device)
        is_source[destinations] = False
        sources = torch.argsort(is_source, descending=True, stable=True)[: grid.num_places - down * across]
        scores, owners = _nearest(x, sources, destinations)
        order = scores.argsort(dim=1, descending=True, stable=True)
        return Matching(sources[order], owners.gather(1, order), destinations, grid.num_places)


# half precision has so many ties that the order would be arbitrary, and autocast lowers products to it
@kept_in_fp32
def _nearest(x: Tensor, sources: Tensor, destinations: Tensor) -> tuple[Tensor, Tensor]:
    """Each source's highest cosine similarity with a destination, and whose: (b, s) each."""
    lengths = x.norm(dim=2).clamp(min=torch.finfo(x.dtype).tiny)
    theirs = (x[:, destinations] / lengths[:, destinations, None]).mT
    step = max(1, CHUNK.get(x.device.type, 2**20) // max(1, len(x) * len(destinations)))
    # a source's own length decides on its place among the sources, not on whose it is
    best_of_parts = [(x[:, some] @ theirs).max(dim=2) for some in sources.split(step)]
    scores = torch.cat([best.values for best in best_of_parts], dim=1) / lengths[:, sources]
    return scores, torch.cat([best.indices for best in best_of_parts], dim=1)
