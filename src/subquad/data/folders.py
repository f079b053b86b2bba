"""Folders of images: one folder a class, in train/ and val/ as ImageNet has them or without such splits."""

import os
import re
from collections import Counter
from pathlib import Path

from subquad.data.archives import is_archive, not_there, unpack
from subquad.data.dataset import Source
from subquad.data.decoding import IMAGE_ENDINGS
from subquad.data.sampling import hold_out
from subquad.data.walking import (
    annotations_beside_images,
    find_images,
    image_names,
    natural_order,
    subfolders,
)
from subquad.errors import SubquadError

SPLITS = {"train": ("train", "training"), "validation": ("val", "validation", "valid", "test", "testing")}
"""What the folders of a split may be called, in upper case or lower, the preferred name first."""

_UNWRITABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""Line ends, and what stands for bytes that are no UTF-8."""

LAYOUT = "train/<class>/*.jpg and val/<class>/*.jpg"


class FolderReader:
    """Images of a folder with their labels."""

    def __init__(self, folder: Path, samples: list[tuple[str, int]]):
        self.folder, self.samples = folder, samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Path, int]:
        name, label = self.samples[index]
        return Path(name), label

    def filename(self, index: int, absolute: bool = False) -> str:
        """Name an image, within its folder or with it."""
        name = self.samples[index][0]
        return name if absolute else os.path.relpath(name, self.folder)


def read_folder(path: Path, split: str) -> Source:
    """The images of a split: of its own folder, or of a tenth that is held out of a folder without splits."""
    if is_archive(path):
        path = unpack(path)
    if not path.is_dir():
        raise SubquadError(not_there("folder of images or archive" if path.is_file() else "folder", path))
    folders = {name: folder for name in SPLITS if (folder := split_folder(path, name)) is not None}
    if not folders:
        if drawn := annotations_beside_images(path):
            raise SubquadError(
                f"{path} has images/ and {drawn}/ beside it, whose label maps are neither pictures nor a class: "
                f"name a folder of pictures, as {path / 'images'}"
            )
        source = _read_classes(path, _class_names(path))
        train, validation = hold_out(source.labels)
        return source.part(train if split == "train" else validation)
    if split not in folders:
        wanted = "/, ".join(SPLITS[split])
        raise SubquadError(f"{path} has no images for {split}: it needs a folder {wanted}/ beside {_names(folders)}/")
    return _read_classes(folders[split], _agreed_classes(folders))


def split_folder(path: Path, split: str) -> Path | None:
    """The folder of a split in `path`, if there is one."""
    splits = {name for names in SPLITS.values() for name in names}
    # where names differ in their case alone, the one that is written as here is first
    folders = sorted(subfolders(path), key=lambda folder: (not folder.name.islower(), folder.name))
    among_classes = any(folder.name.lower() not in splits for folder in folders)
    for name in SPLITS[split]:
        for folder in folders:
            # beside other classes, a folder of images that is called "train" is a class, too
            if folder.name.lower() == name and (not among_classes or subfolders(folder)):
                return folder
    return None


def _read_classes(folder: Path, classes: tuple[str, ...]) -> Source:
    """The images in the class folders of `folder`, each of which must have some."""
    places = {name: index for index, name in enumerate(classes)}
    root = str(folder)
    named = ((name, name.removeprefix(root).lstrip(os.sep).partition(os.sep)) for name in image_names(folder))
    # an image beside the class folders belongs to none of them
    reader = FolderReader(folder, [(name, places[top]) for name, (top, inside, _) in named if inside])
    labels = [label for _, label in reader.samples]
    if not labels:
        raise SubquadError(f"the folders in {folder} hold no images ({_endings()})")
    counts = Counter(labels)
    empty = [name for index, name in enumerate(classes) if not counts[index]]
    if empty:
        more = f", nor do {len(empty) - 1} others" if len(empty) > 1 else ""
        raise SubquadError(f"class folder {folder / empty[0]} holds no images ({_endings()}){more}")
    return Source(reader, classes, labels)


def _agreed_classes(folders: dict[str, Path]) -> tuple[str, ...]:
    """The class names, the same in all splits."""
    names = {split: _class_names(folder) for split, folder in folders.items()}
    if len(names) == 2 and names["train"] != names["validation"]:
        train, validation = set(names["train"]), set(names["validation"])
        parts = [
            f"{', '.join(sorted(only, key=natural_order)[:3])}{', …' if len(only) > 3 else ''} only in {folders[split]}"
            for split, only in (("train", train - validation), ("validation", validation - train))
            if only
        ]
        raise SubquadError(f"the splits have different classes: {'; '.join(parts)}")
    return next(iter(names.values()))


def _class_names(folder: Path) -> tuple[str, ...]:
    names = tuple(sorted((path.name for path in subfolders(folder)), key=natural_order))
    if not names:
        images = len(find_images(folder))
        raise SubquadError(f"{folder} has {images} images but no class folders: sort them as <class>/*.jpg or {LAYOUT}")
    for name in names:
        if _UNWRITABLE.search(name):
            # names of classes are written into runs and tables
            raise SubquadError(f"class folder {name!a} in {folder} has a name that can't be written: rename it")
    return names


def _names(folders: dict[str, Path]) -> str:
    return "/, ".join(folder.name for folder in folders.values())


def _endings() -> str:
    return " ".join(IMAGE_ENDINGS)
