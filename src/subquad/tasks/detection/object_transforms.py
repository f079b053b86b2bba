"""Images with objects as a detector takes them: numbers from 0 to 1, in training flipped and cropped by chance."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms
from torchvision.tv_tensors import BoundingBoxes, BoundingBoxFormat, Mask, wrap

from subquad.tasks.detection.object_data import Target

_JUST_OVER_A_PIXEL = 1 + torch.finfo(torch.float32).eps
"""The least side of what is left of a box: one of a pixel has too little to be found."""


class ObjectTransform:
    """(picture, target) to (image (3, height, width), target). Detectors resize and normalise by themselves.

    The numbers are drawn here, in an order that recipes rely on: transforms of torchvision draw others, know no crop
    of between half of a side and all of it, and keep no image whole that a crop would leave without objects.

    Args:
        hflip: probability of a horizontal flip.
        crop: probability of a crop to between half of each side and all of it, as DETR's augmentation has.
        long_side: what a detector resizes longer sides to at most; an image stays whole where a crop would be too thin.
    """

    def __init__(self, *, hflip: float = 0.0, crop: float = 0.0, long_side: int | None = None) -> None:
        self.hflip, self.crop, self.long_side = hflip, crop, long_side

    def __call__(self, picture: Image.Image, target: Target) -> tuple[Tensor, Target]:
        image = transforms.to_dtype(transforms.pil_to_tensor(picture), torch.float32, scale=True)
        size = (image.shape[-2], image.shape[-1])
        target = target | {"boxes": BoundingBoxes(target["boxes"], format=BoundingBoxFormat.XYXY, canvas_size=size)}
        if "masks" in target:
            target["masks"] = Mask(target["masks"])
        if self.crop and float(torch.rand(())) < self.crop:
            part, rest = _cropped(image, target)
            if self.long_side is None or not is_too_thin(part.shape[-2:], self.long_side):
                image, target = part, rest
        if self.hflip and float(torch.rand(())) < self.hflip:
            image = transforms.horizontal_flip(image)
            target = target | {name: transforms.horizontal_flip(target[name]) for name in _placed(target)}
        return image, target | {name: target[name].as_subclass(torch.Tensor) for name in _placed(target)}


def is_too_thin(size: Sequence[int], long_side: int) -> bool:
    """Whether nothing is left of the shorter side where the longer one has `long_side` pixels."""
    short, long = sorted(size)
    return short * long_side < long


def _placed(target: Target) -> list[str]:
    """What of a target has a place in the image."""
    return [name for name in ("boxes", "masks") if name in target]


def _cropped(image: Tensor, target: Target) -> tuple[Tensor, Target]:
    """A part of the image with what is left of its objects; all of it where nothing would be left."""
    full = image.shape[-2:]
    # of a side of one pixel half would be none
    height, width = (int(torch.randint(max(1, side // 2), side + 1, ())) for side in full)
    top, left = (int(torch.randint(side - part + 1, ())) for side, part in zip(full, (height, width), strict=True))
    part = {name: transforms.crop(target[name], top, left, height, width) for name in _placed(target)}
    boxes, is_left = transforms.sanitize_bounding_boxes(part["boxes"], min_size=_JUST_OVER_A_PIXEL)
    if "masks" in part:
        # a box may be left where nothing of its object is
        seen = (part["masks"].as_subclass(Tensor) != 0).flatten(1).any(dim=1)
        is_left, boxes = is_left & seen, wrap(boxes[seen[is_left]], like=boxes)
    if len(is_left) and not is_left.any():
        return image, target
    target = {name: value[is_left] if isinstance(value, Tensor) else value for name, value in (target | part).items()}
    return transforms.crop(image, top, left, height, width), target | {"boxes": boxes}


def as_lists(pairs: list[Any]) -> tuple[list[Tensor], list[Target]]:
    """Images of any size and their targets, those of broken pictures left out."""
    whole = [pair for pair in pairs if pair is not None]
    return [image for image, _ in whole], [target for _, target in whole]
