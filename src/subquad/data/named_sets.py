"""Data sets known by name: the digits that scikit-learn ships, torchvision's, and those of the Hugging Face hub."""

import sys
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from timm.data import create_dataset

from subquad.data.archives import data_home, locked
from subquad.data.dataset import Source
from subquad.data.decoding import BrokenImageError
from subquad.data.folders import LAYOUT, SPLITS
from subquad.data.sampling import hold_out
from subquad.errors import SubquadError, reason_without_path, unknown_name

TORCH = ("cifar10", "cifar100", "fashion_mnist", "kmnist", "mnist")
"""torchvision's data sets that timm creates and that download themselves."""

_HELD_OUT_DIGITS = 360


class _Pictures:
    """A reader of images that are in memory."""

    def __init__(self, images: Any, name: str):
        self._images, self._name = images, name

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return self._images[index]

    def filename(self, index: int, absolute: bool = False) -> str:
        return f"{self._name}[{index}]"


def read_digits(split: str) -> Source:
    """The 1,797 handwritten digits of scikit-learn, 8×8 pixels: 1,437 to train on, 360 held out."""
    images, names = _digits()
    labels = [label for _, label in images]
    source = Source(_Pictures(images, "digits"), names, labels)
    train, validation = hold_out(labels, _HELD_OUT_DIGITS)
    return source.part(train if split == "train" else validation)


@cache
def _digits() -> tuple[list[tuple[Image.Image, int]], tuple[str, ...]]:
    """All of them with their labels, and the names of these; read once, as every run asks for them twice."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SubquadError("the digits come with scikit-learn: pip install 'subquad[train]'") from None
    digits = load_digits()
    # 0..16 as they come
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    images = [
        (Image.fromarray(image).convert("RGB"), label)
        for image, label in zip(pixels, digits.target.tolist(), strict=True)
    ]
    return images, tuple(map(str, digits.target_names))


def read_torch(name: str, split: str, root: Path | None) -> Source:
    """A data set of torchvision, downloaded into `root` if it is not there."""
    if name not in TORCH:
        raise unknown_name("torchvision data", name, TORCH)
    root = root or data_home()
    try:
        with locked(root / f".{name}"):
            images = create_dataset(f"torch/{name}", root=str(root), split=split, download=True)
    except SubquadError:
        raise
    except Exception as error:
        # offline, a full disk, a damaged file: torchvision has no exceptions of its own
        raise SubquadError(
            f"can't download {name} into {root} ({reason_without_path(error)}): give data_dir a folder with {LAYOUT}, "
            "or an archive of one"
        ) from None
    labels = [int(label) for label in images.targets]
    return Source(_Pictures(images, name), tuple(images.classes), labels)


class _Rows:
    """A reader of rows of a Hugging Face data set, whose images are not decoded yet."""

    def __init__(self, rows: Any, image: str, labels: list[Any], name: str):
        self._rows, self._image, self._labels, self._name = rows, image, labels, name

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        stored = self._rows[index][self._image]
        if not stored or not (stored["bytes"] or stored["path"]):
            raise BrokenImageError("there is no image in this row")
        return BytesIO(stored["bytes"]) if stored["bytes"] else Path(stored["path"]), self._labels[index]

    def filename(self, index: int, absolute: bool = False) -> str:
        stored = self._rows[index][self._image]
        return (stored and stored["path"]) or f"{self._name}[{index}]"


def read_hub(name: str, split: str, cache: Path | None) -> Source:
    """A data set of the Hugging Face hub, or a folder in their layout, with its images kept in `cache`.

    Where it has nothing but images to train on, a tenth of them is held out.
    """
    try:
        import datasets
    except ImportError:
        raise SubquadError("hfds/ data needs the Hugging Face library: pip install 'subquad[hfds]'") from None
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        parts = datasets.load_dataset(name, cache_dir=str(cache) if cache else None)
    except Exception as error:
        # each of the many formats has exceptions of its own
        raise SubquadError(f"can't load hfds/{name}: {reason_without_path(error)}") from None
    candidates = [part for part in SPLITS[split] if part in parts]
    if not candidates and "train" not in parts:
        raise SubquadError(f"hfds/{name} has no images for {split}, only the splits {', '.join(parts)}")
    rows = parts[candidates[0] if candidates else "train"]
    images = [key for key, kind in rows.features.items() if isinstance(kind, datasets.Image)]
    classes = [key for key, kind in rows.features.items() if isinstance(kind, datasets.ClassLabel)]
    if not images or not classes:
        columns = ", ".join(rows.features)
        raise SubquadError(f"hfds/{name} needs a column of images and one of class labels, it has {columns}")
    names = tuple(rows.features[classes[0]].names)
    try:
        labels = list(rows[classes[0]])
        reader = _Rows(rows.cast_column(images[0], datasets.Image(decode=False)), images[0], labels, f"hfds/{name}")
    except Exception as error:
        raise SubquadError(f"can't read the rows of hfds/{name}: {reason_without_path(error)}") from None
    source = Source(reader, names, labels)
    source.check(f"hfds/{name}")
    if any(held in parts for held in SPLITS["validation"]):
        return source
    train, validation = hold_out(source.labels)
    return source.part(train if split == "train" else validation)
