"""Image files to look at: those named, those in folders, those that can be read; and what is written of them."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from subquad.data import BrokenImageError, find_images, read_image
from subquad.data.decoding import IMAGE_ENDINGS
from subquad.data.loader import file_in
from subquad.data.walking import annotations_beside_images, find_path
from subquad.errors import SubquadError, reason_without_path
from subquad.writing import replacing

_LONGEST_NAME = 200
"""Bytes of a written file's name: file systems take 255, and some are for what stands there while it is written."""


@dataclass(frozen=True)
class PlannedImage:
    """An image, and the files that are written of it, one for each ending."""

    path: Path
    outputs: tuple[Path, ...]


def image_files(paths: Path | str | Iterable[Path | str]) -> list[Path]:
    """Image files, those in folders included.

    Raises:
        SubquadError: one is not there, a folder has none, or nothing is named.
    """
    return [file for _, file in rooted_image_files(paths)]


def check_there(paths: Iterable[Path | str]) -> None:
    """Raise where an image or folder is not there, before a network is opened that may have to be fetched."""
    for path in map(find_path, paths):
        if not path.exists():
            raise SubquadError(f"there is no image or folder {path}")


def plan_outputs(paths: Path | str | Iterable[Path | str], folder: Path, endings: Sequence[str]) -> list[PlannedImage]:
    """Each image of `paths` once, and what is written of it: <folder>/<its place below what is named><ending>.

    Where `folder` lies within one of `paths`, what is in it was written before and is not looked at.

    Raises:
        SubquadError: as `image_files`; or two images would be written to one file, or one over an image.
    """
    inside = find_path(folder).resolve()
    images: dict[Path, tuple[Path | None, Path]] = {}
    for root, file in rooted_image_files(paths):
        real = file.resolve()
        if root is None or root.resolve() not in inside.parents or not real.is_relative_to(inside):
            images.setdefault(real, (root, file))
    if not images:
        raise SubquadError(f"all images lie in {folder}, where results are written: name others, or another --output")
    sources: dict[Path, Path] = {}
    planned = []
    for root, file in images.values():
        place = Path(file.name) if root is None else file.relative_to(root)
        outputs = [place.with_name(f"{place.stem}{ending}") for ending in endings]
        for output in outputs:
            if output in sources:
                raise SubquadError(
                    f"{sources[output]} and {file} would both be written to {folder / output}: "
                    "give them to commands of their own, with another --output"
                )
            if inside / output in images:
                raise SubquadError(f"{folder / output} is one of the images: name another --output")
            if len(output.name.encode(errors="surrogateescape")) > _LONGEST_NAME:
                raise SubquadError(f"the name of {file} is too long to write {output.name[-30:]}: shorten it")
            sources[output] = file
        planned.append(PlannedImage(file, tuple(folder / output for output in outputs)))
    return planned


def check_no_image(output: Path, paths: Iterable[Path | str], flag: str) -> None:
    """Raise where a file to write is one of the images of `paths`."""
    target = find_path(output).resolve()
    if any(target == file.resolve() for file in image_files(paths)):
        raise SubquadError(f"{output} is one of the images: name another {flag}")


@contextlib.contextmanager
def said_of(path: Path | None) -> Iterator[None]:
    """Name the image that a network refuses: among thousands of a folder its size does not say which it is."""
    try:
        yield
    except SubquadError as error:
        raise error if path is None else SubquadError(f"{path}: {error}") from None


@contextlib.contextmanager
def said_of_item(loader: object, batch: int, place: int) -> Iterator[None]:
    """Name the image of a data set that a network refuses, an item of a batch of `loader`."""
    try:
        yield
    except SubquadError:
        with said_of(file_in(loader, batch, place)):
            raise


def readable_pictures(
    files: Iterable[Path], *, strict: bool, log: Callable[[str], None]
) -> Iterator[tuple[Path, Image.Image]]:
    """The files that are images, with their pictures.

    Args:
        files: to be read.
        strict: raise at a broken image instead of skipping it.
        log: gets a line for each image that is skipped, and one of how many there were.

    Raises:
        BrokenImageError: an image is broken, if `strict`.
        SubquadError: all of them are.
    """
    broken: list[Path] = []
    whole = 0
    for path in files:
        try:
            picture = read_image(path)
        except BrokenImageError as error:
            message = f"broken image {path}: {error}"
            if strict:
                raise BrokenImageError(message) from None
            log(f"skipped {message}")
            broken.append(path)
            continue
        whole += 1
        yield path, picture
    if broken and not whole:
        raise none_readable(broken)
    if len(broken) > 1:
        log(f"skipped {len(broken)} of {whole + len(broken)} images, which are broken")


def none_readable(broken: Sequence[Path]) -> SubquadError:
    """What is to be raised where none of some images can be read."""
    if len(broken) == 1:
        return SubquadError(f"{broken[0]} can't be read as an image")
    return SubquadError(f"none of {len(broken)} images can be read, the first is {broken[0]}")


def readable_images(
    files: Iterable[Path], transform: Callable[..., Tensor], strict: bool, log: Callable[[str], None]
) -> Iterator[tuple[Path, Tensor]]:
    """The files that are images, with the tensors that the model takes; raises as `readable_pictures`."""
    for path, picture in readable_pictures(files, strict=strict, log=log):
        yield path, transform(picture)


def save_picture(picture: Image.Image, path: Path) -> None:
    """Write a PNG, whole or not at all.

    Raises:
        SubquadError: it can't be written.
    """
    try:
        with replacing(path) as aside:
            picture.save(aside, "PNG")
    except OSError as error:
        raise SubquadError(f"can't write {path}: {reason_without_path(error)}") from None


def rooted_image_files(paths: Path | str | Iterable[Path | str]) -> Iterator[tuple[Path | None, Path]]:
    """Image files, of one path or of several, with the folder that was named where they were not themselves.

    Of a folder with images/ and annotations/ beside it the label maps in these are left out.
    """
    nothing = True
    # the letters of a single name are no paths
    for path in map(find_path, [paths] if isinstance(paths, Path | str) else paths):
        nothing = False
        if path.is_dir():
            images = find_images(path)
            if drawn := annotations_beside_images(path):
                images = [image for image in images if not image.is_relative_to(path / drawn)]
            if not images:
                raise SubquadError(f"folder {path} has no images ({' '.join(IMAGE_ENDINGS)})")
            yield from ((path, image) for image in images)
        elif path.exists():
            yield None, path
        else:
            raise SubquadError(f"there is no image or folder {path}")
    if nothing:
        raise SubquadError("no images to predict: name image files or a folder")


def evenly_chosen(length: int, count: int) -> list[int]:
    """At most `count` of `length` places, from the first to the last at like distances."""
    return [int(place) for place in np.linspace(0, length - 1, min(count, length)).round()]
