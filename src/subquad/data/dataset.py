"""A data set: a reader that finds images, the names of their classes, and what to do about a broken file.

Readers are timm's, or answer as they do: `reader[index] -> (file or picture, label)`, `len`, `filename`.
"""

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from PIL import Image
from torch.utils.data import Dataset

from subquad.errors import SubquadError

# what PIL raises on files that are cut short, damaged, of another kind or dangerously large
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)


class DataError(SubquadError):
    """Data that is not as it must be."""

    def __init__(self, message: str):
        # a loader process hands its errors over inside a traceback: the message is its last line
        super().__init__(message.strip().splitlines()[-1].removeprefix(f"{__name__}.{type(self).__name__}: "))


class BrokenImageError(DataError):
    """An image that can't be read."""


def read_image(file: Path | BinaryIO | Image.Image) -> Image.Image:
    """The picture in a file, decoded to its end, in RGB.

    Raises:
        BrokenImageError: if it can't be.
    """
    try:
        if isinstance(file, Image.Image):
            return file.convert("RGB")
        with file.open("rb") if isinstance(file, Path) else file as opened, Image.open(opened) as image:
            return image.convert("RGB")
    except _BROKEN as error:
        raise BrokenImageError(" ".join(str(error).split())) from None


@dataclass(frozen=True)
class Source:
    """Where images come from: `labels[i]` is the class of `reader[i]`, an index into `classes`."""

    reader: Any
    classes: tuple[str, ...]
    labels: Sequence[int]

    def part(self, indices: Sequence[int]) -> "Source":
        """Only the images at `indices`."""
        return Source(_Part(self.reader, indices), self.classes, [self.labels[i] for i in indices])


class _Part:
    """Some items of a reader."""

    def __init__(self, reader: Any, indices: Sequence[int]):
        self._reader, self._indices = reader, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._reader[self._indices[index]]

    def filename(self, index: int, absolute: bool = False) -> str:
        return self._reader.filename(self._indices[index], absolute=absolute)


class ImageDataset(Dataset):
    """Pairs of (image or what `transform` makes of it, label); None in place of a pair whose image is broken.

    Broken images are counted across loader processes. With `strict` the first one raises `BrokenImageError`.
    """

    def __init__(self, source: Source, name: str, *, strict: bool = False):
        self.classes = source.classes
        self.labels = source.labels
        self.name = name
        self.transform: Callable[[Image.Image], Any] | None = None
        self._reader = source.reader
        self._strict = strict
        # shared, so that what a loader process finds out is known here
        self._broken = torch.zeros(len(source.labels), dtype=torch.bool).share_memory_()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int] | None:
        try:
            image = self.picture(index)
        except BrokenImageError as error:
            if self._strict:
                raise BrokenImageError(f"broken image {self.path(index)}: {error}") from None
            self._broken[index] = True
            return None
        return image if self.transform is None else self.transform(image), self.labels[index]

    def picture(self, index: int) -> Image.Image:
        """The image as it is stored, in RGB."""
        try:
            file = self._reader[index][0]
        except OSError as error:
            raise BrokenImageError(str(error)) from None
        return read_image(file)

    def path(self, index: int) -> str:
        """The file of an image, or a name for one that has none."""
        return self._reader.filename(index, absolute=True) or f"{self.name}[{index}]"

    @property
    def num_broken(self) -> int:
        """Broken images met so far."""
        return int(self._broken.sum())

    def broken_paths(self) -> list[str]:
        """Files of the broken images met so far."""
        return [self.path(i) for i in self._broken.nonzero()[:, 0].tolist()]
