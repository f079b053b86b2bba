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
        self.path, self.open = path, tifffile.TiffFile
        try:
            with self.open(path) as file:
                page: Any = file.pages[0]
                self.shape, self.channels, self.dtype = page.shape[:2], page.samplesperpixel, page.dtype
                apart = page.planarconfig != 1 and self.channels > 1
                tall, wide = (page.tilelength, page.tilewidth) if page.is_tiled else (page.rowsperstrip, 0)
        except Exception as error:
            raise SubquadError(f"{path} is no TIFF that can be read: {error}") from None
        if apart:
            raise SubquadError(f"{path} has its colours apart: write it with the colours of a pixel side by side")
        self.tall = min(tall, self.shape[0])
        self.across = math.ceil(self.shape[1] / wide) if wide else 1

    def read(self, first: int, behind: int) -> NDArray[Any]:
        """Give rows (y, x, channels)."""
        rows = np.zeros((behind - first, self.shape[1], self.channels), self.dtype)
        indices = list(range(first // self.tall * self.across, math.ceil(behind / self.tall) * self.across))
        try:
            with self.open(self.path) as file:
                page: Any = file.pages[0]
                places = ([numbers[i] for i in indices] for numbers in (page.dataoffsets, page.databytecounts))
                for data, index in page.parent.filehandle.read_segments(*places, indices):
                    _place(page, data, index, rows, first)
        except Exception as error:
            raise SubquadError(f"{self.path} is damaged near row {first}: {error}") from None
        return rows


def _place(page: Any, data: bytes | None, index: int, rows: NDArray[Any], first: int) -> None:
    """Put a tile or strip where it belongs among rows that begin with `first`."""
    tile, (_, _, top, left, _), _ = page.decode(data, index, jpegtables=page.jpegtables)
    if tile is None:
        return
    tile = tile[0]
    above, top = max(0, first - top), max(0, top - first)
    tile = tile[above : above + len(rows) - top, : rows.shape[1] - left]
    rows[top : top + tile.shape[0], left : left + tile.shape[1]] = tile
