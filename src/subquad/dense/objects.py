"""Images with objects, in the layout of COCO: Lin et al. 2014, arXiv 1405.0312.

{train,val}2017/*.jpg    annotations/instances_{train,val}2017.json
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from subquad.data.archives import is_archive, unpack
from subquad.data.dataset import BrokenImageError, DataError, read_image
from subquad.errors import SubquadError, unknown_name

SPLITS = {"train": "train", "validation": "val", "test": "test"}
Target = dict[str, Any]


class ObjectDataset(Dataset):
    """Pairs of (picture, target), or what `transform` makes of them; None in place of a pair whose picture is broken.

    A target has `image_id`, `boxes` (n, 4) as left, top, right, bottom in pixels, `labels` (n,) from 1, and with
    `masks` also these, (n, height, width). Crowds and empty boxes are left out.

    Attributes:
        classes: names; label k is classes[k - 1].
        name: what the user calls the data.
        truth: the annotations of all images as COCO has them, but for its categories, which are numbered from 1.
        num_empty: annotations whose box is empty.
    """

    def __init__(
        self, file: Path, folder: Path, name: str, *, masks: bool, strict: bool, max_images: int | None
    ) -> None:
        content = _read(file)
        self.name, self.masks, self._strict = name, masks, strict
        self.transform: Callable[[Any, Target], Any] | None = None
        categories = sorted(content["categories"], key=lambda category: category["id"])
        self.classes = tuple(str(category["name"]) for category in categories)
        numbers = {category["id"]: place for place, category in enumerate(categories, start=1)}
        images = sorted(content["images"], key=lambda image: image["id"])[:max_images]
        self.paths = [folder / image["file_name"] for image in images]
        missing = [path.name for path in self.paths if not path.is_file()]
        if missing:
            few = ", ".join(missing[:3])
            raise SubquadError(f"{len(missing)} of {len(images)} images that {file} names are not in {folder}: {few}")
        self.images = images
        by_image: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in images}
        own = [one for one in content["annotations"] if one["image_id"] in by_image]
        kept = _kept(own, numbers, file, strict)
        self.num_empty = len(own) - len(kept)
        for annotation in kept:
            by_image[annotation["image_id"]].append(annotation)
        self.annotations = [by_image[image["id"]] for image in images]
        named = [{"id": place, "name": name} for place, name in enumerate(self.classes, start=1)]
        self.truth = {"info": {}, "images": images, "annotations": kept, "categories": named}
        # shared, so that what a loader process finds out is known here
        self._broken = torch.zeros(len(images), dtype=torch.bool).share_memory_()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        try:
            picture = read_image(self.paths[index])
        except BrokenImageError as error:
            if self._strict:
                raise BrokenImageError(f"broken image {self.paths[index]}: {error}") from None
            self._broken[index] = True
            return None
        target = self.target(index, picture.size)
        return (picture, target) if self.transform is None else self.transform(picture, target)

    def target(self, index: int, size: tuple[int, int]) -> Target:
        """The objects of an image of `size`, (width, height)."""
        width, height = size
        named = self.images[index]
        if (named.get("width", width), named.get("height", height)) != size:
            raise DataError(
                f"image {self.paths[index]} has {width}×{height} px, its annotations are for "
                f"{named['width']}×{named['height']}"
            )
        own = [annotation for annotation in self.annotations[index] if not annotation["iscrowd"]]
        boxes = torch.tensor([annotation["bbox"] for annotation in own], dtype=torch.float32).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        boxes[:, 0::2].clamp_(0, width)
        boxes[:, 1::2].clamp_(0, height)
        labels = torch.tensor([annotation["category_id"] for annotation in own], dtype=torch.long)
        target: Target = {"image_id": named["id"], "boxes": boxes, "labels": labels}
        if self.masks:
            masks = [decode_mask(annotation, height, width) for annotation in own]
            stacked = np.stack(masks) if masks else np.zeros((0, height, width), np.uint8)
            target["masks"] = torch.from_numpy(stacked)
        inside = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
        return {key: value[inside] if isinstance(value, Tensor) else value for key, value in target.items()}

    @property
    def num_broken(self) -> int:
        """Broken images met so far."""
        return int(self._broken.sum())

    def broken_paths(self) -> list[str]:
        """Files of the broken images met so far."""
        return [str(self.paths[i]) for i in self._broken.nonzero()[:, 0].tolist()]


def _kept(annotations: list[dict[str, Any]], numbers: dict[int, int], file: Path, strict: bool) -> list[dict[str, Any]]:
    """Annotations whose boxes are not empty, with the numbers of their classes."""
    kept = []
    for annotation in annotations:
        where, category, box = f"annotation {annotation['id']} in {file}", annotation["category_id"], annotation["bbox"]
        if category not in numbers:
            known = ", ".join(map(str, list(numbers)[:8]))
            raise SubquadError(f"{where} has category {category}, and the {len(numbers)} categories are {known}")
        if min(box[2:]) > 0:
            kept.append({"iscrowd": 0, "area": box[2] * box[3], **annotation, "category_id": numbers[category]})
        elif strict:
            raise SubquadError(f"{where} has an empty box {box}")
    return kept


def decode_mask(annotation: dict[str, Any], height: int, width: int) -> NDArray[np.uint8]:
    """An annotation's polygons or run lengths as a mask (height, width) of 0 and 1.

    Raises:
        DataError: it has none, or one of another size.
    """
    from faster_coco_eval.core import mask as coding

    shape, number = annotation.get("segmentation"), annotation.get("id")
    if not shape:
        raise DataError(f"annotation {number} has no mask: take a head without masks, as faster_rcnn")
    if isinstance(shape, dict) and tuple(shape["size"]) != (height, width):
        theirs = f"{shape['size'][1]}×{shape['size'][0]}"
        raise DataError(f"the mask of annotation {number} has {theirs} px, its image {width}×{height}")
    try:
        if isinstance(shape, dict) and not isinstance(shape["counts"], list):
            return coding.decode(shape)
        coded = coding.frPyObjects(shape, height, width)
        return coding.decode(coding.merge(coded) if isinstance(coded, list) else coded)
    except (TypeError, ValueError, RuntimeError, KeyError, IndexError) as error:
        raise DataError(f"the mask of annotation {number} can't be read: {error}") from None


def load_objects(
    data: str | Path, *, split: str, masks: bool = False, strict: bool = False, max_images: int | None = None
) -> ObjectDataset:
    """The images in a folder or archive in COCO's layout, without a transform.

    Args:
        data: the folder or archive.
        split: "train", "validation" or "test".
        masks: whether targets have masks.
        strict: raise at a broken image or an empty box instead of leaving it out.
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
    path = Path(data).expanduser()
    if is_archive(path):
        path = unpack(path)
    if not path.is_dir():
        raise SubquadError(f"there is no folder or archive {path}")
    files = sorted((path / "annotations").glob(f"instances_{SPLITS[split]}*.json"))
    if not files:
        raise SubquadError(f"{path} has no annotations/instances_{SPLITS[split]}2017.json, as COCO's layout has")
    named = files[0].stem.removeprefix("instances_")
    folders = [path / named, path / "images" / named, path / "images"]
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is None:
        raise SubquadError(f"{path} has no folder {named} with the images of {files[0].name}")
    return ObjectDataset(files[0], folder, str(data), masks=masks, strict=strict, max_images=max_images)


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SubquadError(f"{file} is not JSON: {error}") from None
    missing = [key for key in ("images", "annotations", "categories") if not isinstance(content.get(key), list)]
    if missing:
        raise SubquadError(f"{file} has no {' and no '.join(missing)}, as COCO's annotations have")
    return content
