"""Data sets known by name: the digits that scikit-learn ships, torchvision's, and those of the Hugging Face hub."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from PIL import Image
from timm.data import create_dataset
from timm.data.readers import create_reader

from subquad.data.archives import data_home
from subquad.data.dataset import Source
from subquad.data.folders import LAYOUT, SPLITS
from subquad.data.sampling import hold_out
from subquad.errors import SubquadError, unknown_name

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
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SubquadError("the digits come with scikit-learn: pip install 'subquad[train]'") from None
    digits = load_digits()
    # 0..16 as they come
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    labels = digits.target.tolist()
    images = [(Image.fromarray(image).convert("RGB"), label) for image, label in zip(pixels, labels, strict=True)]
    source = Source(_Pictures(images, "digits"), tuple(map(str, digits.target_names)), labels)
    train, validation = hold_out(labels, _HELD_OUT_DIGITS)
    return source.part(train if split == "train" else validation)


def read_torch(name: str, split: str, root: Path | None) -> Source:
    """A data set of torchvision, downloaded into `root` if it is not there."""
    if name not in TORCH:
        raise unknown_name("torchvision data", name, TORCH)
    root = root or data_home()
    try:
        with FileLock(root / f".{name}.lock"):
            images = create_dataset(f"torch/{name}", root=str(root), split=split, download=True)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise SubquadError(
            f"can't download {name} into {root} ({reason}): give data_dir a folder with {LAYOUT}, or an archive of one"
        ) from None
    labels = [int(label) for label in images.targets]
    return Source(_Pictures(images, name), tuple(images.classes), labels)


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
    root = str(cache) if cache else None
    try:
        parts = datasets.load_dataset(name, cache_dir=root)
    except (OSError, ValueError, RuntimeError) as error:
        raise SubquadError(f"can't load hfds/{name}: {' '.join(str(error).split())}") from None
    candidates = [part for part in SPLITS[split] if part in parts]
    if not candidates and "train" not in parts:
        raise SubquadError(f"hfds/{name} has no images for {split}, only the splits {', '.join(parts)}")
    part = candidates[0] if candidates else "train"
    columns = parts[part].features
    images = [key for key, kind in columns.items() if isinstance(kind, datasets.Image)]
    classes = [key for key, kind in columns.items() if isinstance(kind, datasets.ClassLabel)]
    if not images or not classes:
        raise SubquadError(f"hfds/{name} needs a column of images and one of class labels, it has {', '.join(columns)}")
    reader = create_reader(f"hfds/{name}", root=root, split=part, input_key=images[0], target_key=classes[0])
    source = Source(reader, tuple(columns[classes[0]].names), list(reader.iter_targets()))
    if any(held in parts for held in SPLITS["validation"]):
        return source
    train, validation = hold_out(source.labels)
    return source.part(train if split == "train" else validation)
