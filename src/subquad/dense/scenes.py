"""Scenes with a class at every pixel, in the layout of ADE20K: Zhou et al. 2017.

    images/{training,validation}/*.jpg    annotations/{training,validation}/*.png    objectInfo*.txt

A label of 0 is nothing, 1 is the first class. Here classes count from 0, and nothing is `VOID`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset

from subquad.data.archives import is_archive, unpack
from subquad.data.dataset import BrokenImageError, DataError, read_image
from subquad.errors import SubquadError, unknown_name

VOID = 255
SPLITS = {"train": "training", "validation": "validation", "test": "testing"}
IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
LAYOUT = "images/training, images/validation, and the same under annotations"


class SceneDataset(Dataset):
    """Pairs of (picture, labels), or what `transform` makes of them; None in place of a pair whose picture is broken.

    Attributes:
        classes: names, in the order of the labels.
        name: what the user calls the data.
    """

    def __init__(
        self, pairs: Sequence[tuple[Path, Path]], classes: Sequence[str], name: str, *, strict: bool = False
    ) -> None:
        self.pairs, self.classes, self.name = list(pairs), tuple(classes), name
        self.transform: Callable[[Image.Image, NDArray[np.uint8]], Any] | None = None
        self._strict = strict
        # shared, so that what a loader process finds out is known here
        self._broken = torch.zeros(len(self.pairs), dtype=torch.bool).share_memory_()

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Any:
        path = self.pairs[index][0]
        try:
            image = read_image(path)
        except BrokenImageError as error:
            if self._strict:
                raise BrokenImageError(f"broken image {path}: {error}") from None
            self._broken[index] = True
            return None
        labels = self.labels(index, image.size)
        return (image, labels) if self.transform is None else self.transform(image, labels)

    def labels(self, index: int, size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
        """Classes from 0, `VOID` for nothing, (height, width); raises where they are not those of a picture this size.

        Raises:
            DataError: the file is no map of labels of this size and these classes.
        """
        path = self.pairs[index][1]
        try:
            with Image.open(path) as file:
                values = np.asarray(file if file.mode in ("L", "P", "I", "I;16") else file.convert("L"))
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(f"annotation {path} can't be read: {' '.join(str(error).split())}") from None
        height, width = values.shape
        if size is not None and (width, height) != size:
            raise DataError(f"annotation {path} has {width}×{height} px, its image {size[0]}×{size[1]}")
        highest = int(values[values != VOID].max(initial=0))
        if highest > len(self.classes):
            raise DataError(f"annotation {path} has label {highest}, and there are {len(self.classes)} classes")
        return np.where((values == 0) | (values == VOID), VOID, values - 1).astype(np.uint8)

    @property
    def num_broken(self) -> int:
        """Broken images met so far."""
        return int(self._broken.sum())

    def broken_paths(self) -> list[str]:
        """Files of the broken images met so far."""
        return [str(self.pairs[i][0]) for i in self._broken.nonzero()[:, 0].tolist()]


def load_scenes(
    data: str | Path, *, split: str, num_classes: int | None = None, strict: bool = False, max_images: int | None = None
) -> SceneDataset:
    """The scenes in a folder or archive in ADE20K's layout, without a transform.

    Args:
        data: the folder or archive.
        split: "train", "validation" or "test".
        num_classes: how many classes there are where no objectInfo*.txt names them.
        strict: raise at a broken image instead of skipping it.
        max_images: keep the first so many.

    Raises:
        SubquadError: there is no such data, or images lack annotations.
    """
    if split not in SPLITS:
        raise unknown_name("split", split, SPLITS)
    path = Path(data).expanduser()
    if is_archive(path):
        path = unpack(path)
    if not path.is_dir():
        raise SubquadError(f"there is no folder or archive {path}")
    images, annotations = path / "images" / SPLITS[split], path / "annotations" / SPLITS[split]
    for folder in (images, annotations):
        if not folder.is_dir():
            raise SubquadError(f"{path} has no {folder.relative_to(path)}: scenes lie in {LAYOUT}")
    files = sorted(file for file in images.iterdir() if file.suffix.lower() in IMAGES)
    pairs = [(file, annotations / f"{file.stem}.png") for file in files]
    missing = [file.name for file, labels in pairs if not labels.is_file()]
    if missing:
        few = ", ".join(missing[:3])
        raise SubquadError(f"{len(missing)} of {len(files)} images in {images} have no annotation, the first: {few}")
    if not pairs:
        raise SubquadError(f"{images} has no images")
    names = _class_names(path, num_classes)
    if len(names) >= VOID:
        raise SubquadError(f"{path} has {len(names)} classes, and labels of a byte tell {VOID - 1} apart")
    return SceneDataset(pairs[:max_images], names, str(data), strict=strict)


def _class_names(path: Path, num_classes: int | None) -> list[str]:
    files = sorted(path.glob("objectInfo*.txt"))
    if not files:
        if num_classes is None:
            raise SubquadError(f"{path} has no objectInfo.txt with the names of classes: give --num-classes")
        return [f"class {k + 1}" for k in range(num_classes)]
    names = read_class_names(files[0])
    if num_classes is not None and num_classes != len(names):
        raise SubquadError(f"{files[0]} names {len(names)} classes, not {num_classes}: leave out --num-classes")
    return names


def read_class_names(file: Path) -> list[str]:
    """Of lines "1<tab>sky" or as ADE20K's, whose columns are index, shares and counts, and names; in that order."""
    names: dict[int, str] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("\t") if cell.strip()]
        if len(cells) > 1 and cells[0].isdigit():
            names[int(cells[0])] = cells[-1].split(",")[0]
    if not names or sorted(names) != list(range(1, len(names) + 1)):
        raise SubquadError(f"{file} does not name classes 1, 2, 3, …, a line each: number, tab, name")
    return [names[k] for k in sorted(names)]
