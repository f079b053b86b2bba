"""Folders of images: one folder a class, in train/ and val/ as ImageNet has them or without such splits."""

from collections import Counter
from pathlib import Path

from timm.data.readers import create_reader
from timm.data.readers.img_extensions import get_img_extensions
from timm.utils.misc import natural_key

from subquad.data.archives import is_archive, unpack
from subquad.data.dataset import Source
from subquad.data.sampling import hold_out
from subquad.errors import SubquadError

SPLITS = {"train": ("train", "training"), "validation": ("val", "validation", "valid", "test")}
"""What the folders of a split may be called, the preferred name first."""

LAYOUT = "train/<class>/*.jpg and val/<class>/*.jpg"


def read_folder(path: Path, split: str) -> Source:
    """The images of a split: of its own folder, or of a tenth that is held out of a folder without splits."""
    if is_archive(path):
        path = unpack(path)
    if not path.is_dir():
        if path.is_file():
            raise SubquadError(f"{path} is neither a folder of images nor an archive (.tar, .tar.gz, .tgz, .tar.xz)")
        raise SubquadError(f"there is no folder {path}")
    folders = {name: folder for name in SPLITS if (folder := split_folder(path, name)) is not None}
    if not folders:
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
    among_classes = any(folder.name not in splits for folder in _subfolders(path))
    for name in SPLITS[split]:
        folder = path / name
        # beside other classes, a folder of images that is called "train" is a class, too
        if folder.is_dir() and (_subfolders(folder) or not among_classes):
            return folder
    return None


def find_images(folder: Path) -> list[Path]:
    """All images in `folder` and below, in natural order."""
    endings = get_img_extensions(as_set=True)
    paths = [path for path in folder.rglob("*") if path.suffix.lower() in endings and path.is_file()]
    return sorted(paths, key=lambda path: natural_key(str(path)))


def _read_classes(folder: Path, classes: tuple[str, ...]) -> Source:
    """The images in the class folders of `folder`, each of which must have some."""
    class_to_idx = {name: index for index, name in enumerate(classes)}
    try:
        reader = create_reader("", root=str(folder), class_map=class_to_idx)
    except RuntimeError:
        raise SubquadError(f"the folders in {folder} hold no images ({_endings()})") from None
    labels = [label for _, label in reader.samples]
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
            f"{', '.join(sorted(only, key=natural_key)[:3])}{', …' if len(only) > 3 else ''} only in {folders[split]}"
            for split, only in (("train", train - validation), ("validation", validation - train))
            if only
        ]
        raise SubquadError(f"the splits have different classes: {'; '.join(parts)}")
    return next(iter(names.values()))


def _class_names(folder: Path) -> tuple[str, ...]:
    names = tuple(sorted((path.name for path in _subfolders(folder)), key=natural_key))
    if not names:
        images = len(find_images(folder))
        raise SubquadError(f"{folder} has {images} images but no class folders: sort them as <class>/*.jpg or {LAYOUT}")
    return names


def _subfolders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__MACOSX"))]


def _names(folders: dict[str, Path]) -> str:
    return "/, ".join(folder.name for folder in folders.values())


def _endings() -> str:
    return " ".join(get_img_extensions())
