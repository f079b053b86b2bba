"""TIFF files, some rows at a time: the tiles or strips that hold them, by the package tifffile."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.errors import SubquadError, reason_of
from subquad.large.array_rows import check_range
from subquad.large.kept_bands import KeptBands

GREY, COLOURS = ("MINISWHITE", "MINISBLACK"), 3
JPEG = frozenset({6, 7, 34892, 33007})
"""Compressions whose decoder makes RGB of YCbCr."""

ASSOCIATED = 1
"""What TIFF calls a transparency that colours were multiplied with."""

_OF_ITS_OWN = ": write the one to stream, with the colours of a pixel side by side, as a file of its own"


class TiffRows:
    """The largest picture of a file: tiled or in strips, compressed or not, its colours together or apart."""

    def __init__(self, path: Path) -> None:
        try:
            import tifffile
        except ImportError:
            raise SubquadError(f"{path} needs the package tifffile: pip install 'subquad[large]'") from None
        # its remarks about odd headers would stand between our own lines
        logging.getLogger("tifffile").addHandler(logging.NullHandler())
        self.path = path
        try:
            with tifffile.TiffFile(path) as file:
                if not file.series:
                    raise SubquadError(f"{path} is a TIFF that holds no picture")
                largest = max(file.series, key=lambda series: math.prod(_sides(series)))
                if (alike := sum(_kind(series) == _kind(largest) for series in file.series)) > 1:
                    height, width = _sides(largest)
                    raise SubquadError(f"{path} is a stack of {alike} pictures of {width}×{height} px{_OF_ITS_OWN}")
                self._open(largest)
        except SubquadError:
            raise
        except Exception as error:
            raise SubquadError(f"{path} is no TIFF that can be read: {reason_of(error)}") from None

    def _open(self, series: Any) -> None:
        """Take in where a picture's pixels lie, and what they mean."""
        self.page: Any = series.keyframe
        page, extent = self.page, dict(zip(series.axes, series.shape, strict=True))
        if refusal := _refusal(page, extent):
            raise SubquadError(f"{self.path} {refusal}")
        self.shape: tuple[int, int] = _sides(series)
        self.dtype: np.dtype[Any] = page.dtype
        check_range(self.path, self.dtype)
        self.planes, self.as_pixels = _planes(page), _as_pixels(page)
        self.apart, self.samples = page.planarconfig != 1, page.samplesperpixel
        tall, wide = (page.tilelength, page.tilewidth) if page.is_tiled else (page.rowsperstrip, self.shape[1])
        self.tall, self.across = min(tall, self.shape[0]), math.ceil(self.shape[1] / wide)
        self.read: Callable[[int, int], NDArray[Any]] = self._mapped
        if page.is_memmappable:
            self.dtype, self.start = page.dtype.newbyteorder(page.parent.byteorder), page.dataoffsets[0]
        else:
            self.read = KeptBands(self.path, self.shape, self.tall, self._decoded).read

    def _mapped(self, first: int, behind: int) -> NDArray[Any]:
        """Rows of pixels that lie in the file as they are; mapped anew, so that they don't count as memory of ours."""
        height, width = self.shape
        shape = (self.samples, height, width) if self.apart else (height, width, self.samples)
        try:
            pixels = np.memmap(self.path, self.dtype, mode="r", offset=self.start, shape=shape)
        except (OSError, ValueError) as error:
            raise SubquadError(f"{self.path} is damaged: {reason_of(error)}") from None
        if self.apart:
            rows = np.stack([pixels[plane, first:behind] for plane in self.planes], axis=-1)
        else:
            rows = pixels[first:behind, :, : len(self.planes)]
        return self.as_pixels(np.array(rows))

    def _decoded(self, first: int, behind: int) -> NDArray[Any]:
        """Rows of tiles or strips."""
        rows = np.zeros((behind - first, self.shape[1], len(self.planes)), self.dtype)
        of_plane = math.ceil(self.shape[0] / self.tall) * self.across
        own = range(first // self.tall * self.across, math.ceil(behind / self.tall) * self.across)
        indices = [plane * of_plane + i for plane in (self.planes if self.apart else (0,)) for i in own]
        page, file = self.page, self.page.parent.filehandle
        try:
            file.open()
            try:
                places = ([numbers[i] for i in indices] for numbers in (page.dataoffsets, page.databytecounts))
                for data, index in file.read_segments(*places, indices):
                    _place(page, data, index, rows, first)
            finally:
                file.close()
        except Exception as error:
            reason = reason_of(error)
            if "imagecodecs" in reason:
                reason = f"{self.path} needs the package imagecodecs, as it is compressed: pip install 'subquad[large]'"
                raise SubquadError(reason) from None
            raise SubquadError(f"{self.path} is damaged near row {first}: {reason}") from None
        return self.as_pixels(rows)


def _sides(series: Any) -> tuple[int, int]:
    page = series.keyframe
    return page.imagelength, page.imagewidth


def _kind(series: Any) -> tuple[Any, ...]:
    """What pictures of a stack have in common, where they are not written as one."""
    page = series.keyframe
    return _sides(series), page.samplesperpixel, page.bitspersample, page.photometric


def _refusal(page: Any, extent: dict[str, int]) -> str:
    """Why a picture can't be streamed, behind the name of its file; nothing if it can."""
    kind, samples, extra = page.photometric.name, page.samplesperpixel, len(page.extrasamples)
    others = {axis: size for axis, size in extent.items() if axis not in "YXS" and size > 1}
    if others:
        shape = " × ".join(f"{size} {axis}" for axis, size in extent.items())
        return f"is a stack of {math.prod(others.values())} pictures ({shape}){_OF_ITS_OWN}"
    if kind not in (*GREY, "RGB", "PALETTE") and not (kind == "YCBCR" and int(page.compression) in JPEG):
        return f"has its colours as {kind}, compressed by {page.compression.name}: write it in RGB"
    if kind in GREY and samples not in (1, COLOURS) and not (samples == 2 and page.extrasamples[0] in (1, 2)):
        return f"has {samples} channels, which are not said to be colours: write grey, or the three of RGB"
    if kind == "RGB" and samples < COLOURS:
        return f"has {samples} channels, and says that they are RGB"
    if kind == "PALETTE" and (samples - extra != 1 or page.colormap is None):
        return "has a palette, and more than one number for each pixel"
    if page.dtype is None:
        return f"has pixels of {page.bitspersample} bits, which tifffile has no type for: write it with 8 or 16"
    return ""


def _planes(page: Any) -> tuple[int, ...]:
    """Which samples of a pixel are its colours: grey, or red, green and blue.

    Transparency is left out, or comes behind them where they were multiplied with it.
    """
    return tuple(range((COLOURS if page.samplesperpixel >= COLOURS else 1) + _is_multiplied(page)))


def _is_multiplied(page: Any) -> bool:
    """Whether colours were multiplied with the transparency behind them."""
    colours = COLOURS if page.samplesperpixel >= COLOURS else 1
    return page.samplesperpixel > colours and tuple(page.extrasamples)[:1] == (ASSOCIATED,)


def _as_pixels(page: Any) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """What makes pixels, whole numbers of 8 or 16 bits or fractions, of a picture's numbers (y, x, channels)."""
    if not _is_multiplied(page):
        return _as_colours(page)
    as_colours, dtype, bits = _as_colours(page), page.dtype, page.bitspersample
    most = 2**bits - 1 if dtype.kind == "u" else 1

    def divided(numbers: NDArray[Any]) -> NDArray[Any]:
        colours, share = numbers[..., :-1].astype(np.float64), numbers[..., -1:]
        colours = np.minimum(colours * most / np.where(share > 0, share, most), most)
        return as_colours((np.floor(colours) if dtype.kind == "u" else colours).astype(dtype))

    return divided


def _as_colours(page: Any) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """The same for the numbers of colours alone."""
    kind, bits, dtype = page.photometric.name, page.bitspersample, page.dtype
    if kind == "PALETTE":
        # numbers of 16 bits, of which the upper eight are the colours
        palette = (np.asarray(page.colormap) >> 8).astype(np.uint8).T
        return lambda numbers: palette[numbers[..., 0]]
    if dtype.kind == "b":
        return np.logical_not if kind == "MINISWHITE" else _as_they_are
    # a few bits may stand in whole bytes
    most = 2**bits - 1 if dtype.kind == "u" else 1
    full = dtype.kind != "u" or bits in (8, 16)
    if kind == "MINISWHITE":
        return lambda numbers: most - numbers if full else ((most - numbers) / most).astype(np.float32)
    return _as_they_are if full else lambda numbers: (numbers / most).astype(np.float32)


def _as_they_are(numbers: NDArray[Any]) -> NDArray[Any]:
    return numbers


def _place(page: Any, data: bytes | None, index: int, rows: NDArray[Any], first: int) -> None:
    """Put a tile or strip where it belongs among rows that begin with `first`."""
    tile, (plane, _, top, left, _), _ = page.decode(data, index, jpegtables=page.jpegtables)
    if tile is None:
        return
    tile, planes = tile[0], slice(plane, plane + 1) if page.planarconfig != 1 else slice(None)
    above, top = max(0, first - top), max(0, top - first)
    tile = tile[above : above + len(rows) - top, : rows.shape[1] - left, : rows.shape[2]]
    rows[top : top + tile.shape[0], left : left + tile.shape[1], planes] = tile
