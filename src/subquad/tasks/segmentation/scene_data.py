"""Scenes with a class at every pixel, in the layout of ADE20K: Zhou et al. 2017.

    images/{training,validation}/*.jpg    annotations/{training,validation}/*.png    objectInfo*.txt

A label of 0 is nothing, 1 is the first class, unless objectInfo*.txt counts classes from 0, as Cityscapes and Pascal
VOC do: then 255 alone is nothing. Here classes count from 0, and nothing is `VOID`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from subquad.data.archives import is_archive, not_there, unpack
from subquad.data.dataset import PictureDataset
from subquad.data.decoding import BrokenImageError, DataError, read_image, read_label_map, size_in_header
from subquad.data.walking import find_path, is_image_name, is_regular_file, walk_files
from subquad.errors import SubquadError, reason_without_path, unknown_name

VOID = 255
SPLITS = {"train": "training", "validation": "validation", "test": "testing"}
LAYOUT = "images/training, images/validation, and the same under annotations"


class SceneDataset(PictureDataset):
    """Pairs of (picture, labels), or what `transform` makes of them; None in place of a pair whose picture is broken.

    Attributes:
        classes: names, in the order of the labels.
        first_label: the label of the first class in the files, 1 or 0.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[Path, Path]],
        classes: Sequence[str],
        name: str,
        *,
        first_label: int = 1,
        strict: bool = False,
    ) -> None:
        super().__init__(len(pairs), name, strict=strict)
        self.pairs, self.classes, self.first_label = list(pairs), tuple(classes), first_label
        self.transform: Callable[[Image.Image, NDArray[np.uint8]], Any] | None = None

    def __getitem__(self, index: int) -> Any:
        image = self.whole_picture(index)
        if image is None:
            return None
        labels = self.labels(index, image.size)
        return (image, labels) if self.transform is None else self.transform(image, labels)

    def picture(self, index: int) -> Image.Image:
        """Decode an image as it is stored, in RGB."""
        return read_image(self.pairs[index][0])

    def path(self, index: int) -> str:
        """Name the file of an image."""
        return str(self.pairs[index][0])

    def labels(self, index: int, size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
        """Classes from 0, `VOID` for nothing, (height, width); raises where they are not those of a picture this size.

        Raises:
            DataError: the file is no map of labels of this size and these classes.
        """
        path = self.pairs[index][1]
        values = read_label_map(path)
        height, width = values.shape
        if size is not None and (width, height) != size:
            raise DataError(f"annotation {path} has {width}×{height} px, its image {size[0]}×{size[1]}")
        highest, lowest = int(values.max(initial=0, where=values != VOID)), int(values.min(initial=0))
        last = len(self.classes) - 1 + self.first_label
        if highest > last or lowest < 0:
            label = lowest if lowest < 0 else highest
            counted = "" if self.first_label else f", from 0 to {last} in objectInfo*.txt, and {VOID} for nothing"
            raise DataError(f"annotation {path} has label {label}, and there are {len(self.classes)} classes{counted}")
        if self.first_label:
            values = np.where(values == 0, VOID, values)
        return np.where(values == VOID, VOID, values - self.first_label).astype(np.uint8)

    def check_labels(self) -> None:
        """Read all maps of labels, and of images where they say how large these are.

        Raises:
            DataError: the first that does not fit, or none has a pixel with a class.
        """
        seen, has_classes = 0, False
        for index, (image, _) in enumerate(self.pairs):
            try:
                size = size_in_header(image)
            except BrokenImageError:
                # left out and counted when it is decoded
                continue
            seen, has_classes = seen + 1, bool((self.labels(index, size) != VOID).any()) or has_classes
        if seen and not has_classes:
            nothing = f"0 or {VOID}" if self.first_label else VOID
            raise DataError(
                f"none of {seen} maps of labels of {self.name} has a pixel with a class: all are {nothing}, which is "
                f"nothing, as {self.pairs[0][1]}"
            )

    def counted_from_zero(self, most: int = 500) -> str | None:
        """A line where labels seem to count from 0, by at most so many maps; None where they don't.

        They do where the last class is nowhere, while 0 is, which is nothing here.
        """
        if not self.first_label:
            return None
        last, step = len(self.classes), max(1, -(-len(self.pairs) // most))
        seen = zeros = 0
        for _, path in self.pairs[::step]:
            values = read_label_map(path)
            if (values == last).any():
                return None
            seen, zeros = seen + 1, zeros + bool((values == 0).any())
        if not zeros:
            return None
        return (
            f"none of {seen} maps of labels has {last}, the last class, and {zeros} have 0, which is nothing: "
            f"classes count from 1 unless {self.name}/objectInfo.txt counts them from 0, a line each: number, tab, name"
        )


def load_scenes(
    data: str | Path,
    *,
    split: str,
    num_classes: int | None = None,
    classes: Sequence[str] = (),
    strict: bool = False,
    max_images: int | None = None,
) -> SceneDataset:
    """The scenes in a folder or archive in ADE20K's layout, without a transform.

    Args:
        data: the folder or archive.
        split: "train", "validation" or "test".
        num_classes: how many classes there are where no objectInfo*.txt names them.
        classes: their names there, as the network that is shown the scenes has them.
        strict: raise at a broken image instead of skipping it.
        max_images: keep the first so many.

    Raises:
        SubquadError: there is no such data, or images lack annotations.
    """
    if split not in SPLITS:
        raise unknown_name("split", split, SPLITS)
    if max_images is not None and max_images < 1:
        raise SubquadError(f"the largest number of images must be at least 1, got {max_images}")
    path = _folder_of(data)
    if not path.is_dir():
        raise SubquadError(not_there("folder or archive", path))
    images, annotations = path / "images" / SPLITS[split], path / "annotations" / SPLITS[split]
    for folder in (images, annotations):
        if not folder.is_dir():
            raise SubquadError(f"{path} has no {folder.relative_to(path)}: scenes lie in {LAYOUT}")
    pairs = _pairs(images, annotations)
    first_label, names = _class_names(path, num_classes, classes)
    if len(names) >= VOID:
        raise SubquadError(f"{path} has {len(names)} classes, and labels of a byte tell {VOID - 1} apart")
    return SceneDataset(pairs[:max_images], names, str(data), first_label=first_label, strict=strict)


def are_scenes(data: str | Path) -> bool:
    """Whether a folder or archive is in ADE20K's layout, with a part that is held out."""
    return (_folder_of(data) / "images" / SPLITS["validation"]).is_dir()


def _folder_of(data: str | Path) -> Path:
    """Where they lie, unpacked."""
    path = find_path(data)
    return unpack(path) if is_archive(path) else path


def _pairs(images: Path, annotations: Path) -> list[tuple[Path, Path]]:
    """The images in a folder and below, and their annotations, by where they lie and their name."""
    files = sorted(file for file in map(Path, walk_files(images)) if is_image_name(file.name))
    pairs = [(file, _annotation_at(annotations / file.relative_to(images))) for file in files]
    missing = [str(file.relative_to(images)) for file, labels in pairs if not is_regular_file(labels)]
    if missing:
        few, wanted = ", ".join(missing[:3]), Path(missing[0]).with_suffix(".png")
        raise SubquadError(
            f"{len(missing)} of {len(files)} images in {images} have no annotation, the first: {few}; its labels are "
            f"looked for in {annotations / wanted}"
        )
    shared = [labels for labels, count in Counter(labels for _, labels in pairs).items() if count > 1]
    if shared:
        names = " and ".join(file.name for file, labels in pairs if labels == shared[0])
        raise SubquadError(f"{names} in {images} share the annotation {shared[0].name}: which it is of is not clear")
    if not pairs:
        raise SubquadError(f"{images} has no images")
    return pairs


def _annotation_at(image: Path) -> Path:
    """A PNG of this name; its ending may be in upper case, as that of images."""
    usual, upper = image.with_suffix(".png"), image.with_suffix(".PNG")
    return upper if is_regular_file(upper) and not usual.exists() else usual


def _class_names(path: Path, num_classes: int | None, classes: Sequence[str]) -> tuple[int, list[str]]:
    """The label of the first class, and the names of all."""
    files = sorted(path.glob("objectInfo*.txt"))
    if not files and classes:
        return 1, list(classes)
    if not files:
        if num_classes is None:
            raise SubquadError(f"{path} has no objectInfo.txt with the names of classes: give --num-classes")
        if num_classes < 1:
            raise SubquadError(f"scenes have 1 class or more, got {num_classes}")
        return 1, [f"class {k + 1}" for k in range(num_classes)]
    first_label, names = read_class_names(files[0])
    for other in files[1:]:
        if read_class_names(other) != (first_label, names):
            raise SubquadError(f"{files[0]} and {other.name} beside it name other classes: keep the one that is meant")
    if num_classes is not None and num_classes != len(names):
        raise SubquadError(f"{files[0]} names {len(names)} classes, not {num_classes}: leave out --num-classes")
    return first_label, names


def read_class_names(file: Path) -> tuple[int, list[str]]:
    """Read names from lines "1<tab>sky", or ADE20K's of index, shares, counts and names, in the order of indices.

    The number of the first comes with them, 1 or 0.

    Of several names of a class, divided by commas, the first is taken; all of them where another class has it as well,
    and with its number where all are shared.
    """
    try:
        # some editors begin a file with a mark of its encoding
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise SubquadError(f"{file} can't be read: {reason_without_path(error)}") from None
    rows = ([cell.strip() for cell in line.split("\t") if cell.strip()] for line in lines)
    named = [(cells[0], cells[-1]) for cells in rows if len(cells) > 1 and cells[0].isdecimal()]
    short = {number: cell.split(",")[0].strip() or cell for number, cell in named}
    shared = Counter(short.values())
    names = {number: short[number] if shared[short[number]] == 1 else cell for number, cell in named}
    first_label = 0 if "0" in names else 1
    numbers = [str(k) for k in range(first_label, len(named) + first_label)]
    if not names or sorted(names) != sorted(numbers):
        raise SubquadError(f"{file} does not name classes 1, 2, 3, … or 0, 1, 2, …, a line each: number, tab, name")
    alike = Counter(names.values())
    return first_label, [names[k] if alike[names[k]] == 1 else f"{names[k]} (class {k})" for k in numbers]
