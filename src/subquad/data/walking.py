"""Which images lie in a folder: every real folder is looked into once, whatever links there are."""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from subquad.data.decoding import IMAGE_ENDINGS
from subquad.errors import SubquadError, reason_without_path

ANNOTATIONS = frozenset({"annotations", "labels", "masks"})
"""What a folder beside images/ is called that holds what is known of them."""


_OF_SYSTEMS = frozenset(
    {"__MACOSX", "@eaDir", "#recycle", "@Recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found"}
)
"""Folders that archives, network disks and file systems put beside a user's own, with thumbnails or the deleted."""


def find_images(folder: Path) -> list[Path]:
    """All images in `folder` and below, in natural order.

    They are known by their endings, see `IMAGE_ENDINGS`: what can't be read, or is no regular file, is found to be
    broken later on.
    """
    return [Path(name) for name in image_names(folder)]


def image_names(folder: Path) -> list[str]:
    """Name all images in `folder` and below, in natural order."""
    return sorted((name for name in walk_files(folder) if is_image_name(name)), key=natural_order)


def is_image_name(name: str) -> bool:
    """Whether a file's name has the ending of an image, in upper or lower case."""
    return name.lower().endswith(IMAGE_ENDINGS)


def walk_files(folder: Path) -> Iterator[str]:
    """Name the files in `folder` and below, but for hidden ones; each real folder is visited once.

    Raises:
        SubquadError: a folder can't be read.
    """
    # what lies around the folder is not in it, whatever link leads there
    visited = {_identity(parent) for parent in folder.resolve().parents}
    # real folders before links, so that files are called by the shortest names they have
    folders, links = [str(folder)], list[str]()
    while folders or links:
        name = folders.pop() if folders else links.pop()
        try:
            identity = _identity(name)
            if identity in visited:
                continue
            visited.add(identity)
            with os.scandir(name) as scanned:
                entries = sorted((entry for entry in scanned if not is_hidden(entry.name)), key=lambda e: e.name)
        except OSError as error:
            raise SubquadError(f"can't read the folder {name}: {reason_without_path(error)}") from None
        for entry in entries:
            if not _is_folder(entry):
                yield entry.path
            else:
                (links if entry.is_symlink() else folders).append(entry.path)


def is_hidden(name: str) -> bool:
    """Whether a file or folder is none of the user's own, by its name."""
    return name.startswith(".") or name in _OF_SYSTEMS


def subfolders(folder: Path) -> list[Path]:
    """List the folders in a folder that are not hidden.

    Raises:
        SubquadError: it can't be read.
    """
    try:
        return [path for path in folder.iterdir() if not is_hidden(path.name) and path.is_dir()]
    except OSError as error:
        raise SubquadError(f"can't read the folder {folder}: {reason_without_path(error)}") from None


def annotations_beside_images(folder: Path) -> str | None:
    """Name the folder whose label maps belong to the pictures in images/ beside it; None where there are no such two.

    They are neither pictures nor a class.
    """
    names = {inside.name for inside in subfolders(folder)}
    drawn = names & ANNOTATIONS
    return drawn.pop() if len(names) == 2 and "images" in names and drawn else None


def find_path(name: Path | str) -> Path:
    """Make a path of what a user names, with ~ for a home.

    Raises:
        SubquadError: there can be no file of that name.
    """
    try:
        path = Path(name).expanduser()
        # of what the locale can't encode `exists` says that it is not there
        os.fsencode(path)
        path.exists()
    except UnicodeEncodeError as error:
        raise SubquadError(
            f"the locale's file names are {error.encoding}, which can't name {str(name)[:100]}: set PYTHONUTF8=1, or "
            "another locale"
        ) from None
    except (OSError, RuntimeError, ValueError) as error:
        raise SubquadError(f"there is no file or folder {str(name)[:100]}: {reason_without_path(error)}") from None
    return path


def is_regular_file(path: Path) -> bool:
    """Whether a file can be read from its beginning to its end: no folder, pipe or device, and a name that can be."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def natural_order(text: str) -> Any:
    """Sort key that puts a9 before a10; names that differ in their case alone have a fixed order, too."""
    parts = re.split(r"(\d+)", text.lower())
    return [int(part) if place % 2 else part for place, part in enumerate(parts)], text


def _identity(folder: str | Path) -> tuple[int, int]:
    status = os.stat(folder)  # noqa: PTH116 (paths of a million files are strings)
    return status.st_dev, status.st_ino


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        # a link to itself
        return False
