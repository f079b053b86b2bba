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
from PIL import Image
from torch import Tensor

from subquad.data.decoding import read_image, read_named_image, size_in_header
from subquad.errors import SubquadError, reason_without_path, shown
from subquad.large.array_rows import ArrayRows, NpyRows
from subquad.large.kept_bands import MOST_WHOLE
from subquad.large.png_rows import PngRows, can_read_by_rows
from subquad.large.slide_rows import SlideRows
from subquad.large.streamed_hosts import StreamedHost
from subquad.large.tiff_rows import TiffRows
from subquad.large.zarr_rows import ZARR_MARKS, ZarrRows
from subquad.models.backbone import not_dense
from subquad.models.stages import ImageRows

ABOVE_ONE = 1e-6
"""What fractions may be off by: white that was rounded."""


class PixelRows(Protocol):
    """An image of pixels that is read some rows at a time."""

    shape: tuple[int, int]

    def read(self, first: int, behind: int) -> NDArray[Any]:
        """Give rows `first` to `behind`, (y, x, channels)."""


class TensorRows:
    """A tensor (channels, y, x) or (1, channels, y, x), as a network takes it."""

    def __init__(self, image: Tensor, dtype: torch.dtype) -> None:
        if why := not_dense(image):
            raise SubquadError(f"one image at a time is streamed, a tensor (channels, height, width), got {why}")
        self.image = image[None] if image.dim() == 3 else image
        if self.image.dim() != 4 or len(self.image) != 1 or not image.is_floating_point() or image.is_meta:
            raise SubquadError(
                f"one image at a time is streamed, a tensor (channels, height, width) of fractions; got "
                f"{tuple(image.shape)} of {str(image.dtype).removeprefix('torch.')}"
            )
        self.shape, self.dtype = (self.image.shape[2], self.image.shape[3]), dtype
        self.channels = self.image.shape[1]

    def rows(self, first: int, behind: int) -> Tensor:
        """Give rows (1, channels, y, x)."""
        return self.image[:, :, first:behind].to("cpu", self.dtype)


class NormalisedRows:
    """Pixels as a network takes them: fractions less `mean`, over `std`, in colours; transparency is left out."""

    def __init__(
        self,
        pixels: PixelRows,
        mean: Sequence[float],
        std: Sequence[float],
        dtype: torch.dtype,
        name: object = "this image",
    ) -> None:
        self.pixels, self.shape, self.dtype, self.channels = pixels, pixels.shape, dtype, len(mean)
        self.name = name
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        of_mean, of_std = (torch.tensor(numbers, dtype=torch.float64, device="cpu") for numbers in (mean, std))
        # of all numbers of a row: what is repeated for every three of them is slow
        self.scale, self.shift = (numbers.to(wide).repeat(self.shape[1]) for numbers in (1 / of_std, -of_mean / of_std))

    def rows(self, first: int, behind: int) -> Tensor:
        """Give rows (1, channels, y, x)."""
        try:
            pixels = self.pixels.read(first, behind)
        except OSError as error:
            raise SubquadError(f"{self.name} can't be read any more: {reason_without_path(error)}") from None
        pixels = np.repeat(pixels, self.channels, axis=2) if pixels.shape[2] == 1 else pixels[..., : self.channels]
        most = np.iinfo(pixels.dtype).max if pixels.dtype.kind == "u" else 1
        if pixels.dtype.kind == "f":
            self._check_fractions(pixels, first)
        # numbers of 16 bits as wider ones, which PyTorch knows, as it does those of this machine's order of bytes alone
        is_short = pixels.dtype.itemsize == 2
        pixels = pixels.astype(np.float32 if is_short else pixels.dtype.newbyteorder("="), copy=is_short)
        # it warns of memory that is not writable
        pixels = np.require(pixels, requirements=("C", "W"))
        image = torch.from_numpy(pixels).flatten(1).to(self.scale.dtype)
        image = torch.addcmul(self.shift, image, self.scale / most).to(self.dtype)
        return image.view(1, *pixels.shape).permute(0, 3, 1, 2)

    def _check_fractions(self, pixels: NDArray[Any], first: int) -> None:
        lowest, highest = (float(number) for number in (pixels.min(), pixels.max()))
        if not (lowest >= -ABOVE_ONE and highest <= 1 + ABOVE_ONE):
            raise SubquadError(
                f"{self.name}: fractions must go from 0 to 1, and go from {lowest:g} to {highest:g} in rows {first} to "
                f"{first + len(pixels) - 1}: scale them, or write whole numbers of 8 or 16 bits"
            )


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
        rows = NormalisedRows(open_image(Path(image)), mean, std, dtype, image)
    elif isinstance(image, Image.Image):
        rows = NormalisedRows(ArrayRows(np.asarray(read_image(image))), mean, std, dtype)
    elif hasattr(image, "shape") and hasattr(image, "dtype"):
        rows = NormalisedRows(ArrayRows(image), mean, std, dtype)
    else:
        raise SubquadError(
            "an image is a file, an array of pixels (y, x, channels), a picture of Pillow, a tensor (channels, y, x); "
            f"got {shown(image)}"
        )
    if rows.channels != wanted:
        message = f"this network takes images of {wanted} channels, and this "
        if isinstance(image, Tensor):
            raise SubquadError(f"{message}tensor has {rows.channels}")
        # pixels become three colours, grey ones too
        raise SubquadError(
            f"{message}picture is read as {rows.channels}: pass it as a tensor ({wanted}, height, width), normalised"
        )
    return rows


def open_image(path: Path) -> PixelRows:
    """Open an image file to be read by rows.

    Raises:
        SubquadError: there is none, it is damaged, a package that reads it is missing, or it is too large for a format
            that is decoded at once; in one line that names it.
    """
    try:
        if path.is_dir() and any((path / name).exists() for name in ZARR_MARKS):
            return ZarrRows(path)
        if path.is_dir() and path.suffix.lower() not in FOLDERS:
            raise SubquadError(f"{path} is a folder: name an image in it")
        if not path.exists():
            raise SubquadError(f"there is no image {path}")
        return READERS.get(path.suffix.lower(), _whole)(path)
    except OSError as error:
        raise SubquadError(f"{path} can't be read: {reason_without_path(error)}") from None


def _png(path: Path) -> PixelRows:
    return PngRows(path) if can_read_by_rows(path) else _whole(path)


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
    ".zarr": ZarrRows,
    **dict.fromkeys((".svs", ".ndpi", ".mrxs", ".scn", ".vms", ".vmu", ".bif", ".dcm"), SlideRows),
}
"""Who reads files of which ending; all others are decoded at once."""
FOLDERS = (".zarr", ".mrxs", ".dcm")
"""Endings of what may be a folder."""
