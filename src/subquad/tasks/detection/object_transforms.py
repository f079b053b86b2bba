"""Images with objects as a detector takes them: numbers from 0 to 1, in training flipped and cropped by chance."""

from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms
from torchvision.tv_tensors import BoundingBoxes, BoundingBoxFormat, Mask

from subquad.tasks.detection.object_data import Target


class ObjectTransform:
    """(picture, target) to (image (3, height, width), target). Detectors resize and normalise by themselves.

    Args:
        hflip: probability of a horizontal flip.
        crop: probability of a crop to between half of each side and all of it, as DETR's augmentation has.
    """

    def __init__(self, *, hflip: float = 0.0, crop: float = 0.0) -> None:
        self.hflip, self.crop = hflip, crop

    def __call__(self, picture: Image.Image, target: Target) -> tuple[Tensor, Target]:
        image = transforms.to_dtype(transforms.pil_to_tensor(picture), torch.float32, scale=True)
        target = dict(target)
        if self.crop and float(torch.rand(())) < self.crop:
            image, target = _cropped(image, target)
        if self.hflip and float(torch.rand(())) < self.hflip:
            size = tuple(image.shape[-2:])
            image = transforms.horizontal_flip(image)
            boxes = BoundingBoxes(target["boxes"], format=BoundingBoxFormat.XYXY, canvas_size=size)
            target["boxes"] = transforms.horizontal_flip(boxes).as_subclass(torch.Tensor)
            if "masks" in target:
                target["masks"] = transforms.horizontal_flip(Mask(target["masks"])).as_subclass(torch.Tensor)
        return image, target


def _cropped(image: Tensor, target: Target) -> tuple[Tensor, Target]:
    """A part of the image with what is left of its objects; all of it where nothing would be left."""
    full = image.shape[-2:]
    size = [int(torch.randint(side // 2, side + 1, ())) for side in full]
    top, left = (int(torch.randint(side - part + 1, ())) for side, part in zip(full, size, strict=True))
    boxes = target["boxes"] - torch.tensor([left, top, left, top])
    boxes[:, 0::2].clamp_(0, size[1])
    boxes[:, 1::2].clamp_(0, size[0])
    inside = (boxes[:, 2] - boxes[:, 0] > 1) & (boxes[:, 3] - boxes[:, 1] > 1)
    if len(inside) and not inside.any():
        return image, target
    target = {key: value[inside] if isinstance(value, Tensor) else value for key, value in target.items()}
    target["boxes"] = boxes[inside]
    if "masks" in target:
        target["masks"] = target["masks"][:, top : top + size[0], left : left + size[1]]
    return image[:, top : top + size[0], left : left + size[1]], target


def as_lists(pairs: list[Any]) -> tuple[list[Tensor], list[Target]]:
    """Images of any size and their targets, those of broken pictures left out."""
    whole = [pair for pair in pairs if pair is not None]
    return [image for image, _ in whole], [target for _, target in whole]
