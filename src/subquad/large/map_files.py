"""Maps of a large image as files: features (y, x, c), labels and heat (y, x), written some rows at a time.

A file is there whole or not at all: it is written aside and takes its name when the last row is in it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from PIL import Image

from subquad.errors import SubquadError
from subquad.writing import replacing, reserve

WriteRows = Callable[[int, NDArray[Any]], None]
"""Puts rows (y, x) or (y, x, c) at the row of that number."""

TILE = 256
"""Pixels of a tile's side."""


class UnwritableError(SubquadError):
    """A format that does not hold such a map, or can't be written here."""


def check_map(path: Path, is_of_labels: bool) -> None:
    """Raise where no map of the kind is written by such a name, or over what is there: a .zarr is a folder."""
    if path.suffix.lower() not in WRITERS:
        raise SubquadError(f"{path} has no ending of maps: use one of {' '.join(WRITERS)}")
    if path.is_dir():
        raise SubquadError(f"{path} is there already: remove it, or name another")
    if path.suffix.lower() == ".png" and not is_of_labels:
        raise SubquadError(f"{path}: a PNG holds labels; write features and heat as .npy, .tif or .zarr")


@contextmanager
def map_file(path: Path, shape: tuple[int, ...], dtype: Any) -> Iterator[WriteRows]:
    """A file of the format that its ending says, to be filled with rows.

    Raises:
        SubquadError: nothing writes such an ending, or not this kind of map, or a package is missing.
    """
    check_map(path, len(shape) == 2 and dtype in (np.uint8, np.uint16))
    with replacing(path) as aside:
        try:
            with WRITERS[path.suffix.lower()](aside, shape, np.dtype(dtype)) as write:
                yield write
        except UnwritableError as error:
            raise SubquadError(f"{path}: {error}") from None


@contextmanager
def _npy(path: Path, shape: tuple[int, ...], dtype: Any) -> Iterator[WriteRows]:
    open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    reserve(path, path.stat().st_size)

    def write(first: int, rows: NDArray[Any]) -> None:
        # mapped anew for each write: what is no longer mapped does not count as this process's memory
        np.load(path, mmap_mode="r+")[first : first + len(rows)] = rows

    yield write


@contextmanager
def _in_memory(shape: tuple[int, ...], dtype: Any, save: Callable[[NDArray[Any]], None]) -> Iterator[WriteRows]:
    """For formats that are written at once, of labels and heat."""
    whole = np.zeros(shape, dtype)

    def write(first: int, rows: NDArray[Any]) -> None:
        whole[first : first + len(rows)] = rows

    yield write
    save(whole)


@contextmanager
def _png(path: Path, shape: tuple[int, ...], dtype: Any) -> Iterator[WriteRows]:
    with _in_memory(shape, dtype, lambda whole: Image.fromarray(whole).save(path, format="PNG")) as write:
        yield write


@contextmanager
def _tiff(path: Path, shape: tuple[int, ...], dtype: Any) -> Iterator[WriteRows]:
    try:
        import tifffile
    except ImportError:
        raise UnwritableError("this format needs the package tifffile: pip install 'subquad[large]'") from None

    def save(whole: NDArray[Any]) -> None:
        levels = [whole]
        while max(levels[-1].shape[:2]) > TILE:
            levels.append(levels[-1][::2, ::2])
        settings: dict[str, Any] = {"tile": (TILE, TILE), "compression": "zlib", "photometric": "minisblack"}
        if whole.ndim == 3:
            settings["planarconfig"] = "contig"
        with tifffile.TiffWriter(path, bigtiff=whole.nbytes > 2**31) as file:
            # a pyramid: the whole, and ever smaller pictures of it
            file.write(whole, subifds=len(levels) - 1, **settings)
            for level in levels[1:]:
                file.write(level, subfiletype=1, **settings)

    with _in_memory(shape, dtype, save) as write:
        yield write


@contextmanager
def _zarr(path: Path, shape: tuple[int, ...], dtype: Any) -> Iterator[WriteRows]:
    try:
        import zarr
    except ImportError:
        raise UnwritableError("this format needs the package zarr: pip install 'subquad[large]'") from None
    chunks = (*(min(TILE, side) for side in shape[:2]), *shape[2:])
    array: Any = zarr.open(str(path), mode="w", shape=shape, chunks=chunks, dtype=dtype)

    def write(first: int, rows: NDArray[Any]) -> None:
        array[first : first + len(rows)] = rows

    yield write


WRITERS: dict[str, Callable[..., Any]] = {".npy": _npy, ".png": _png, ".tif": _tiff, ".tiff": _tiff, ".zarr": _zarr}
"""Who writes maps of which ending."""
