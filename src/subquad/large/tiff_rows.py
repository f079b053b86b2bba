"""TIFF files, some rows at a time: the tiles or strips that hold them, by the package tifffile."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.errors import SubquadError


class TiffRows:
    """The first, largest picture of a file: tiled or in strips, compressed or not, BigTIFF too."""

    def __init__(self, path: Path) -> None:
        try:
            import tifffile
        except ImportError:
            raise SubquadError(f"{path} needs the package tifffile: pip install 'subquad[large]'") from None
        self.path = path
        try:
            self.page: Any = tifffile.TiffFile(path).pages[0]
        except Exception as error:
            raise SubquadError(f"{path} is no TIFF that can be read: {error}") from None
        if self.page.planarconfig != 1 and self.page.samplesperpixel > 1:
            raise SubquadError(f"{path} has its colours apart: write it with the colours of a pixel side by side")
        self.shape = self.page.imagelength, self.page.imagewidth
        self.channels = self.page.samplesperpixel
        tall, wide = (self.page.tilelength, self.page.tilewidth) if self.page.is_tiled else (self.page.rowsperstrip, 0)
        self.tall = min(tall, self.shape[0])
        self.across = math.ceil(self.shape[1] / wide) if wide else 1

    def read(self, first: int, behind: int) -> NDArray[Any]:
        """Give rows (y, x, channels)."""
        rows = np.zeros((behind - first, self.shape[1], self.channels), self.page.dtype)
        begin, end = first // self.tall, math.ceil(behind / self.tall)
        indices = range(begin * self.across, end * self.across)
        offsets = [self.page.dataoffsets[i] for i in indices]
        counts = [self.page.databytecounts[i] for i in indices]
        try:
            for data, index in self.page.parent.filehandle.read_segments(offsets, counts, list(indices)):
                self._place(data, index, rows, first)
        except SubquadError:
            raise
        except Exception as error:
            raise SubquadError(f"{self.path} is damaged near row {first}: {error}") from None
        return rows

    def _place(self, data: bytes | None, index: int, rows: NDArray[Any], first: int) -> None:
        """Put a tile or strip where it belongs among rows that begin with `first`."""
        tile, (_, _, top, left, _), _ = self.page.decode(data, index, jpegtables=self.page.jpegtables)
        if tile is None:
            return
        tile = tile[0]
        above, top = max(0, first - top), max(0, top - first)
        tile = tile[above : above + len(rows) - top, : rows.shape[1] - left]
        rows[top : top + tile.shape[0], left : left + tile.shape[1]] = tile
