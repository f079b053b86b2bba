"""Large images, read some rows at a time: arrays, and files by their endings.

A reader has `shape`, (height, width) in pixels, and `read(first, behind)`, which gives rows as an array
(y, x, channels) of whole numbers or of fractions from 0 to 1. `NormalisedRows` makes of it what a network takes.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from subquad.data.decoding import read_named_image, size_in_header
from subquad.errors import SubquadError
from subquad.large.png_rows import PngRows, can_read_by_rows
from subquad.large.slide_rows import SlideRows
from subquad.large.streamed_hosts import StreamedHost
from subquad.large.tiff_rows import TiffRows
from subquad.models.stages import ImageRows

MOST_WHOLE = 2**28
"""Pixels of an image that is decoded at once, 0.8 GB of bytes, where its format can't be read by rows."""


class PixelRows(Protocol):
    """An image of pixels that is read some rows at a time."""

    shape: tuple[int, int]

    def read(self, first: int, behind: int) -> NDArray[Any]:
        """Give rows `first` to `behind`, (y, x, channels)."""


class ArrayRows:
    """An array (y, x, channels), or (y, x) of grey; a numpy array, or anything that is cut like one."""

    def __init__(self, array: Any) -> None:
        if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
            raise SubquadError(f"an image is an array (y, x) or (y, x, 1, 3 or 4), got {tuple(array.shape)}")
        self.array, self.shape = array, (array.shape[0], array.shape[1])

    def read(self, first: int, behind: int) -> NDArray[Any]:
        """Give a view, or what the array makes of a slice."""
        rows = np.asarray(self.array[first:behind])
        return rows[..., None] if rows.ndim == 2 else rows


class NpyRows:
    """A file of numpy, mapped anew for each read: what is no longer mapped does not count as this process's memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shape = ArrayRows(self._mapped()).shape

    def _mapped(self) -> NDArray[Any]:
        try:
            array: NDArray[Any] = np.load(self.path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise SubquadError(f"{self.path} is no file of numpy that can be read: {error}") from None
        return array

    def read(self, first: int, behind: int) -> NDArray[Any]:
        """Give a copy."""
        return ArrayRows(self._mapped()).read(first, behind).copy()


class TensorRows:
    """A tensor (channels, y, x) or (1, channels, y, x), as a network takes it."""

    def __init__(self, image: Tensor, dtype: torch.dtype) -> None:
        self.image = image[None] if image.dim() == 3 else image
        if self.image.dim() != 4 or len(self.image) != 1 or not image.is_floating_point():
            raise SubquadError(
                f"one image at a time is streamed, a tensor (channels, height, width) of fractions; got "
                f"{tuple(image.shape)} of {str(image.dtype).removeprefix('torch.')}"
            )
        self.shape, self.dtype = (self.image.shape[2], self.image.shape[3]), dtype
        self.channels = self.image.shape[1]

    def rows(self, first: int, behind: int) -> Tensor:
        """Give rows (1, channels, y, x)."""
        return self.image[:, :, first:behind].to(self.dtype)


class NormalisedRows:
    """Pixels as a network takes them: fractions less `mean`, over `std`, in colours; transparency is left out."""

    def __init__(self, pixels: PixelRows, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype) -> None:
        self.pixels, self.shape, self.dtype, self.channels = pixels, pixels.shape, dtype, len(mean)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        of_mean, of_std = (torch.tensor(numbers, dtype=torch.float64) for numbers in (mean, std))
        # of all numbers of a row: what is repeated for every three of them is slow
        self.scale, self.shift = (numbers.to(wide).repeat(self.shape[1]) for numbers in (1 / of_std, -of_mean / of_std))

    def rows(self, first: int, behind: int) -> Tensor:
        """Give rows (1, channels, y, x)."""
        pixels = self.pixels.read(first, behind)
        pixels = np.repeat(pixels, self.channels, axis=2) if pixels.shape[2] == 1 else pixels[..., : self.channels]
        most = np.iinfo(pixels.dtype).max if np.issubdtype(pixels.dtype, np.integer) else 1
        # numbers of 16 bits as wider ones, which PyTorch knows; it warns of memory that is not writable
        is_short = pixels.dtype.itemsize == 2
        pixels = pixels.astype(np.float32) if is_short else np.require(pixels, requirements=("C", "W"))
        image = torch.from_numpy(pixels).flatten(1).to(self.scale.dtype)
        image = torch.addcmul(self.shift, image, self.scale / most).to(self.dtype)
        return image.view(1, *pixels.shape).permute(0, 3, 1, 2)


def rows_of(image: Any, mean: Sequence[float], std: Sequence[float], host: StreamedHost) -> ImageRows:
    """An image to stream, as a network takes it: a file, an array of pixels, or a tensor that is so already.

    Args:
        image: of these.
        mean: what is taken from pixels, for each channel.
        std: what they are divided by.
        host: the network.

    Raises:
        SubquadError: it can't be read, or has not the channels of the network, in one line.
    """
    rows: TensorRows | NormalisedRows
    dtype, wanted = next(host.model.parameters()).dtype, host.in_chans
    if isinstance(image, Tensor):
        rows = TensorRows(image, dtype)
    elif isinstance(image, str | Path):
        rows = NormalisedRows(open_image(Path(image)), mean, std, dtype)
    else:
        rows = NormalisedRows(ArrayRows(image), mean, std, dtype)
    if rows.channels != wanted:
        raise SubquadError(f"this network takes images of {wanted} channels, and this one has {rows.channels}")
    return rows


def open_image(path: Path) -> PixelRows:
    """Open an image file to be read by rows.

    Raises:
        SubquadError: there is none, it is damaged, a package that reads it is missing, or it is too large for a format
            that is decoded at once; in one line that names it.
    """
    if not path.exists():
        raise SubquadError(f"there is no image {path}")
    make = READERS.get(path.suffix.lower(), _whole)
    return make(path)


def _png(path: Path) -> PixelRows:
    return PngRows(path) if can_read_by_rows(path) else _whole(path)


def _zarr(path: Path) -> PixelRows:
    try:
        import zarr
    except ImportError:
        raise SubquadError(f"{path} needs the package zarr: pip install 'subquad[large]'") from None
    try:
        stored: Any = zarr.open(str(path), mode="r")
    except Exception as error:
        raise SubquadError(f"{path} is no zarr array that can be read: {error}") from None
    array = stored if hasattr(stored, "ndim") else stored["0"]
    return ArrayRows(array)


def _whole(path: Path) -> PixelRows:
    """Decode all of an image at once, of the formats that the library reads, where it is small enough."""
    width, height = size_in_header(path)
    if width * height > MOST_WHOLE:
        raise SubquadError(
            f"{path} has {width:,}×{height:,} pixels, and {path.suffix or 'its format'} is decoded at once, up to "
            f"{MOST_WHOLE:,}: convert it to PNG, tiled TIFF, zarr or .npy, which are read by rows"
        )
    return ArrayRows(np.asarray(read_named_image(path)))


READERS: dict[str, Callable[[Path], PixelRows]] = {
    ".npy": NpyRows,
    ".png": _png,
    ".tif": TiffRows,
    ".tiff": TiffRows,
    ".zarr": _zarr,
    **dict.fromkeys((".svs", ".ndpi", ".mrxs", ".scn", ".vms", ".vmu", ".bif", ".dcm"), SlideRows),
}
"""Who reads files of which ending; all others are decoded at once."""
