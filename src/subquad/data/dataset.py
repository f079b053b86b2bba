"""A data set: a reader that finds images, the names of their classes, and what to do about a broken file.

Readers are timm's, or answer as they do: `reader[index] -> (file or picture, label)`, `len`, `filename`.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch.utils.data import Dataset

from subquad.data.decoding import BrokenImageError, DataError, read_image
from subquad.errors import SubquadError, reason_without_path

__all__ = ["BrokenImageError", "DataError", "ImageDataset", "PictureDataset", "Source", "read_image"]


@dataclass(frozen=True)
class Source:
    """Where images come from: `labels[i]` is the class of `reader[i]`, an index into `classes`."""

    reader: Any
    classes: tuple[str, ...]
    labels: Sequence[int]

    def check(self, name: str) -> None:
        """Raise where there are no images, or labels that are no classes, as sets without known labels have them."""
        if not len(self.labels):
            raise SubquadError(f"{name} has no images")
        wrong = set(self.labels) - set(range(len(self.classes)))
        if wrong:
            count = sum(label in wrong for label in self.labels)
            raise SubquadError(
                f"{count} of {len(self.labels)} images of {name} have labels that are none of the {len(self.classes)} "
                f"classes: {', '.join(map(str, list(wrong)[:3]))}"
            )

    def part(self, indices: Sequence[int]) -> "Source":
        """Keep only the images at `indices`."""
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


class PictureDataset(Dataset, ABC):
    """Items made of pictures, None in place of one whose picture is broken.

    Broken pictures are counted across loader processes. With `strict` the first one raises `BrokenImageError`, and
    without it the last one, when none is left.

    Attributes:
        name: what the user calls the data.
    """

    def __init__(self, count: int, name: str, *, strict: bool = False):
        self.name, self._strict = name, strict
        # shared, so that what a loader process finds out is known here
        self._broken = torch.zeros(count, dtype=torch.bool).share_memory_()
        self._gone = torch.zeros(count, dtype=torch.bool).share_memory_()

    def __len__(self) -> int:
        return len(self._broken)

    @abstractmethod
    def picture(self, index: int) -> Image.Image:
        """Decode an image as it is stored, in RGB; raises BrokenImageError if it can't be."""

    @abstractmethod
    def path(self, index: int) -> str:
        """Name the file of an image."""

    def whole_picture(self, index: int) -> Image.Image | None:
        """Decode an image; a broken one is counted, and None.

        Raises:
            BrokenImageError: it is broken and the data set strict, or all its images are.
        """
        try:
            return self.picture(index)
        except BrokenImageError as error:
            if self._strict:
                raise BrokenImageError(f"broken image {self.path(index)}: {error}") from None
            self._broken[index] = True
            self._gone[index] = error.missing == self.path(index) and not os.path.lexists(error.missing)
        # numpy's stops at the first that is whole
        if self._broken.numpy().all():
            raise self._all_broken()
        return None

    def check_any_whole(self) -> None:
        """Raise BrokenImageError if not a single image can be read; quick where the first can."""
        if not any(self.whole_picture(index) is not None for index in range(len(self))):
            raise self._all_broken()

    @property
    def num_broken(self) -> int:
        """Broken images met so far."""
        return int(self._broken.sum())

    def is_broken(self, index: int) -> bool:
        """Whether an image was met and found to be broken."""
        return bool(self._broken[index])

    def broken_paths(self) -> list[str]:
        """Files of the broken images met so far."""
        return [self.path(i) for i in self._broken.nonzero()[:, 0].tolist()]

    def check_all_there(self) -> None:
        """Raise DataError where the file of an image that was met, there when the data were opened, is gone since."""
        if gone := self._gone.nonzero()[:, 0].tolist():
            raise DataError(
                f"image {self.path(gone[0])} is gone, which was there when {self.name} was opened: put it back"
            )

    def _all_broken(self) -> BrokenImageError:
        try:
            self.picture(0)
            reason = ""
        except BrokenImageError as error:
            reason = f": {error}"
        return BrokenImageError(
            f"all {len(self)} images of {self.name} are broken, the first is {self.path(0)}{reason}"
        )


class ImageDataset(PictureDataset):
    """Pairs of (image or what `transform` makes of it, label); None in place of a pair whose image is broken."""

    def __init__(self, source: Source, name: str, *, strict: bool = False):
        super().__init__(len(source.labels), name, strict=strict)
        self.classes = source.classes
        self.labels = source.labels
        self.transform: Callable[[Image.Image], Any] | None = None
        self._reader = source.reader
        source.check(name)

    def __getitem__(self, index: int) -> tuple[Any, int] | None:
        image = self.whole_picture(index)
        if image is None:
            return None
        return image if self.transform is None else self.transform(image), self.labels[index]

    def picture(self, index: int) -> Image.Image:
        """Decode the image as it is stored, in RGB."""
        try:
            file = self._reader[index][0]
        except Exception as error:
            # of a damaged row of a table, libraries raise anything
            raise BrokenImageError(reason_without_path(error)) from None
        return read_image(file)

    def path(self, index: int) -> str:
        """Name the file of an image, or its place in data that have no files."""
        return self._reader.filename(index, absolute=True) or f"{self.name}[{index}]"
