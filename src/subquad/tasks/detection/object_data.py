"""Images with objects, in the layout of COCO: Lin et al. 2014, arXiv 1405.0312.

{train,val}2017/*.jpg    annotations/instances_{train,val}2017.json
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from subquad.data.archives import is_archive, not_there, unpack
from subquad.data.dataset import PictureDataset
from subquad.data.decoding import BrokenImageError, DataError, read_image, size_in_header
from subquad.data.walking import find_path, is_regular_file
from subquad.errors import SubquadError, reason_without_path, unknown_name
from subquad.tasks.detection.coco_file import Entry, read_coco

SPLITS = {"train": "train", "validation": "val", "test": "test"}
Target = dict[str, Any]

_SEVERAL_PIXELS = 16
"""An area that no polygon has without a pixel of its own."""


class ObjectDataset(PictureDataset):
    """Pairs of (picture, target), or what `transform` makes of them; None in place of a pair whose picture is broken.

    A target has `image_id`, `boxes` (n, 4) as left, top, right, bottom in pixels, `labels` (n,) from 1, and with
    `masks` also these, (n, height, width). Crowds and empty boxes are left out.

    Attributes:
        classes: names; label k is classes[k - 1].
        truth: the annotations of all images as COCO has them, but for its categories, which are numbered from 1.
        num_empty: annotations whose box is empty, or as thin as rounding, or beside its image.
        num_undrawn: objects left out of the targets, where these have masks, as theirs have no pixel in their image.
    """

    def __init__(
        self, file: Path, folder: Path, name: str, *, masks: bool, strict: bool, max_images: int | None
    ) -> None:
        content = read_coco(file)
        images = content.images[:max_images]
        super().__init__(len(images), name, strict=strict)
        self.file, self.masks = file, masks
        self.transform: Callable[[Any, Target], Any] | None = None
        self.classes = _distinct_names(content.categories)
        self.paths = [folder / image["file_name"] for image in images]
        missing = [
            image["file_name"] for image, path in zip(images, self.paths, strict=True) if not is_regular_file(path)
        ]
        if missing:
            few = ", ".join(missing[:3])
            raise SubquadError(f"{len(missing)} of {len(images)} images that {file} names are not in {folder}: {few}")
        by_image: dict[int, list[Entry]] = {image["id"]: [] for image in images}
        self.images = images = [_with_size(image, path) for image, path in zip(images, self.paths, strict=True)]
        own = [one for one in content.annotations if one["image_id"] in by_image]
        kept = _kept(own, images, content.categories, file, strict)
        if all(annotation["iscrowd"] for annotation in kept):
            crowds = "objects but crowds" if kept else "objects"
            raise SubquadError(f"{file} has no {crowds} for its {len(images)} images")
        self.num_empty = len(own) - len(kept)
        for annotation in kept:
            by_image[annotation["image_id"]].append(annotation)
        self.annotations = [by_image[image["id"]] for image in images]
        named = [{"id": place, "name": name} for place, name in enumerate(self.classes, start=1)]
        self.truth = {"info": {}, "images": images, "annotations": kept, "categories": named}
        self._undrawn: set[int] = set()
        if masks:
            self.check_masks()
            self._undrawn = self._find_undrawn(strict)

    @property
    def num_undrawn(self) -> int:
        """How many objects have no pixel, and are no targets."""
        return len(self._undrawn)

    def check_masks(self, *, crowds: bool = False) -> None:
        """Raise where an object has no mask; if `crowds`, which masks are judged by, where a crowd has none as well.

        Run lengths are held against their image then, too: judged by some that end early, the library never ends.

        Raises:
            DataError: the first annotation that has none, or one that does not fit.
        """
        sizes = {image["id"]: image for image in self.images}
        for annotation in self.truth["annotations"]:
            if not annotation.get("segmentation") and (crowds or not annotation["iscrowd"]):
                raise DataError(f"{self.file}: {_no_mask(annotation)}")
            size = sizes[annotation["image_id"]]
            if crowds and isinstance(annotation["segmentation"], dict) and "width" in size:
                self._mask(annotation, size["height"], size["width"])

    def _find_undrawn(self, strict: bool) -> set[int]:
        """The numbers of objects whose mask has no pixel in its image, which would be trained as nothing.

        Raises:
            SubquadError: there is one, if `strict`, or one can't be read.
        """
        sizes = {image["id"]: (image.get("height"), image.get("width")) for image in self.images}
        found = set()
        for annotation in self.truth["annotations"]:
            height, width = sizes[annotation["image_id"]]
            # of a broken image neither is known
            if annotation["iscrowd"] or height is None or width is None:
                continue
            if _is_drawn(annotation["segmentation"], height, width) or self._mask(annotation, height, width).any():
                continue
            if strict:
                raise DataError(f"{self.file}: the mask of annotation {annotation['id']} has no pixel in its image")
            found.add(annotation["id"])
        return found

    def __getitem__(self, index: int) -> Any:
        picture = self.whole_picture(index)
        if picture is None:
            return None
        target = self.target(index, picture.size)
        return (picture, target) if self.transform is None else self.transform(picture, target)

    def picture(self, index: int) -> Image.Image:
        """Decode an image as it is stored, in RGB."""
        return read_image(self.paths[index])

    def path(self, index: int) -> str:
        """Name the file of an image."""
        return str(self.paths[index])

    def target(self, index: int, size: tuple[int, int]) -> Target:
        """The objects of an image of `size`, (width, height).

        Raises:
            DataError: they are of an image of another size.
        """
        self._check_size(index, size)
        (width, height), named = size, self.images[index]
        left_out = self._undrawn
        own = [one for one in self.annotations[index] if not one["iscrowd"] and one["id"] not in left_out]
        boxes = torch.tensor([corners(one["bbox"], *size) for one in own], dtype=torch.float32).reshape(-1, 4)
        labels = torch.tensor([annotation["category_id"] for annotation in own], dtype=torch.long)
        target: Target = {"image_id": named["id"], "boxes": boxes, "labels": labels}
        if self.masks:
            masks = [self._mask(annotation, height, width) for annotation in own]
            stacked = np.stack(masks) if masks else np.zeros((0, height, width), np.uint8)
            target["masks"] = torch.from_numpy(stacked)
        return target

    def check_sizes(self) -> None:
        """Hold the sizes that images have by their annotations against those that their files say.

        Raises:
            DataError: the first that has another.
        """
        for index, path in enumerate(self.paths):
            try:
                self._check_size(index, size_in_header(path))
            except BrokenImageError:
                # left out and counted when it is decoded
                continue

    def _check_size(self, index: int, size: tuple[int, int]) -> None:
        width, height = size
        named = self.images[index]
        if (named.get("width", width), named.get("height", height)) != size:
            raise DataError(
                f"image {self.paths[index]} has {width}×{height} px, its annotations are for "
                f"{named.get('width', width)}×{named.get('height', height)}"
            )

    def _mask(self, annotation: Entry, height: int, width: int) -> NDArray[np.uint8]:
        try:
            return decode_mask(annotation, height, width)
        except DataError as error:
            raise DataError(f"{self.file}: {error}") from None


def corners(box: Sequence[float], width: float = math.inf, height: float = math.inf) -> list[float]:
    """Left, top, right and bottom of a box (left, top, width, height), within an image of `width` and `height`."""
    left, top, wide, high = box
    edges = (left, width), (top, height), (left + wide, width), (top + high, height)
    return [float(np.float32(min(max(edge, 0), most))) for edge, most in edges]


def _with_size(image: Entry, path: Path) -> Entry:
    """An image with its width and height, which are its file's where it does not say them."""
    if "width" in image and "height" in image:
        return image
    try:
        width, height = size_in_header(path)
    except BrokenImageError:
        # left out and counted when it is decoded
        return image
    return {"width": width, "height": height, **image}


def _kept(
    annotations: list[Entry], images: list[Entry], categories: list[Entry], file: Path, strict: bool
) -> list[Entry]:
    """Annotations whose boxes are not empty, with the numbers of their classes."""
    numbers = {category["id"]: place for place, category in enumerate(categories, start=1)}
    sizes = {image["id"]: (image.get("width", math.inf), image.get("height", math.inf)) for image in images}
    kept = []
    for annotation in annotations:
        box = annotation["bbox"]
        width, height = sizes[annotation["image_id"]]
        left, top, right, bottom = corners(box, width, height)
        if right - left > _lost(width) and bottom - top > _lost(height):
            own = {"iscrowd": 0, "area": box[2] * box[3], **annotation}
            kept.append(own | {"category_id": numbers[annotation["category_id"]], "iscrowd": int(own["iscrowd"])})
        elif strict:
            inside = left < width and top < height and box[0] + box[2] > 0 and box[1] + box[3] > 0
            what = "an empty box" if inside else "a box beside its image,"
            raise SubquadError(f"annotation {annotation['id']} in {file} has {what} {box}")
    return kept


def _distinct_names(categories: list[Entry]) -> tuple[str, ...]:
    """The names of categories; those that several share, with their numbers in the file."""
    shared = Counter(category["name"] for category in categories)
    return tuple(
        category["name"] if shared[category["name"]] == 1 else f"{category['name']} (category {category['id']})"
        for category in categories
    )


def _is_drawn(shape: Any, height: int, width: int) -> bool:
    """Whether a mask surely has pixels, by numbers alone: to draw each of COCO's takes minutes."""
    if isinstance(shape, dict):
        return False
    return any(_has_area(polygon, height, width) for polygon in shape)


def _has_area(polygon: list[float], height: int, width: int) -> bool:
    """Whether a polygon lies within its image and has an area of several pixels."""
    columns, rows = polygon[::2], polygon[1::2]
    if min(columns) < 0 or max(columns) > width or min(rows) < 0 or max(rows) > height:
        return False
    before = zip(columns[-1:] + columns, rows[-1:] + rows, strict=True)
    doubled = sum(x * b - a * y for (x, y), a, b in zip(before, columns, rows, strict=False))
    return abs(doubled) > 2 * _SEVERAL_PIXELS and min(max(columns) - min(columns), max(rows) - min(rows)) > 2


def _lost(side: float) -> float:
    """What edges may lose of their distance where an image of this side is flipped and resized, in single precision."""
    return 4 * torch.finfo(torch.float32).eps * side if side < math.inf else 0.0


def _no_mask(annotation: Entry) -> str:
    return f"annotation {annotation.get('id')} has no mask: take a head without masks, as faster_rcnn"


def decode_mask(annotation: dict[str, Any], height: int, width: int) -> NDArray[np.uint8]:
    """An annotation's polygons or run lengths as a mask (height, width) of 0 and 1.

    Raises:
        DataError: it has none, or one of another size.
    """
    from faster_coco_eval.core import mask as coding

    shape, number = annotation.get("segmentation"), annotation.get("id")
    if not shape:
        raise DataError(_no_mask(annotation))
    if isinstance(shape, dict) and tuple(shape["size"]) != (height, width):
        theirs = f"{shape['size'][1]}×{shape['size'][0]}"
        raise DataError(f"the mask of annotation {number} has {theirs} px, its image {width}×{height}")
    try:
        if isinstance(shape, dict) and not isinstance(shape["counts"], list):
            return coding.decode(shape)
        coded = coding.frPyObjects(shape, height, width)
        return coding.decode(coding.merge(coded) if isinstance(coded, list) else coded)
    except (TypeError, ValueError, RuntimeError, LookupError, MemoryError) as error:
        raise DataError(f"the mask of annotation {number} can't be read: {reason_without_path(error)}") from None


def load_objects(
    data: str | Path, *, split: str, masks: bool = False, strict: bool = False, max_images: int | None = None
) -> ObjectDataset:
    """The images in a folder or archive in COCO's layout, without a transform.

    Args:
        data: the folder or archive.
        split: "train", "validation" or "test".
        masks: whether targets have masks.
        strict: raise at a broken image, an empty box or a mask without a pixel instead of leaving it out.
        max_images: keep the first so many.

    Raises:
        SubquadError: there is no such data, or it does not fit together.
    """
    if split not in SPLITS:
        raise unknown_name("split", split, SPLITS)
    try:
        import faster_coco_eval  # noqa: F401
    except ImportError:
        raise SubquadError("detection needs its libraries: pip install 'subquad[dense]'") from None
    if max_images is not None and max_images < 1:
        raise SubquadError(f"the largest number of images must be at least 1, got {max_images}")
    path = _folder_of(data)
    if not path.is_dir():
        raise SubquadError(not_there("folder or archive", path))
    file = _annotation_file(path / "annotations", f"instances_{SPLITS[split]}")
    named = file.stem.removeprefix("instances_")
    folders = [path / named, path / "images" / named, path / "images"]
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is None:
        raise SubquadError(f"{path} has no folder {named} with the images of {file.name}")
    return ObjectDataset(file, folder, str(data), masks=masks, strict=strict, max_images=max_images)


def are_objects(data: str | Path) -> bool:
    """Whether a folder or archive is in COCO's layout, with a part that is held out."""
    annotations = _folder_of(data) / "annotations"
    return all(any(annotations.glob(f"instances_{SPLITS[split]}*.json")) for split in ("train", "validation"))


def _folder_of(data: str | Path) -> Path:
    """Where they lie, unpacked."""
    path = find_path(data)
    return unpack(path) if is_archive(path) else path


def _annotation_file(folder: Path, start: str) -> Path:
    """The annotations of a split: COCO's of 2017, else the only file whose name begins so."""
    usual = folder / f"{start}2017.json"
    files = [usual] if usual.is_file() else sorted(folder.glob(f"{start}*.json"))
    if not files:
        raise SubquadError(f"{folder.parent} has no annotations/{usual.name}, as COCO's layout has")
    if len(files) > 1:
        names = " and ".join(file.name for file in files)
        raise SubquadError(f"{folder} has {names}: which of them is meant is not clear, call it {usual.name}")
    return files[0]
