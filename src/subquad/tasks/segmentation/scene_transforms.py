"""Scenes as a segmenter takes them: in training scaled, cropped, flipped and recoloured; else as they are."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torchvision.transforms.v2 as v2
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms
from torchvision.tv_tensors import Image as ImageTensor
from torchvision.tv_tensors import Mask

from subquad.errors import SubquadError, unknown_name
from subquad.ranges import LARGEST
from subquad.tasks.byte_resizing import resize_bytes, size_within
from subquad.tasks.segmentation.scene_data import VOID

INTERPOLATIONS = ("bilinear", "bicubic", "nearest")
"""How images may be resized; in bytes, as the first."""


@dataclass(frozen=True)
class SceneInput:
    """How scenes are brought to a network.

    Attributes:
        crop: (height, width) of training crops and of sliding windows.
        short_side: what the shorter side is resized to; None leaves images as they are.
        mean, std: of the channels.
        long_side: what the longer side may have at most where images are resized.
        in_bytes: whether images are resized in bytes, as the released networks were trained with.
        size: (height, width) that images are resized to, whatever their aspect, instead of a side.
        interpolation: how they are resized, one of `INTERPOLATIONS`.
    """

    crop: tuple[int, int]
    short_side: int | None
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    long_side: int | None = None
    in_bytes: bool = False
    size: tuple[int, int] | None = None
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        if min(*self.crop, self.short_side or 1) < 1 or self.short_side == 0:
            raise SubquadError(f"crops of {self.crop} px and a short side of {self.short_side} px: both are at least 1")
        if min(self.std) <= 0:
            raise SubquadError(f"images need an std above 0 of each channel, got {self.std}")
        if self.size is not None and (min(self.size) < 1 or self.short_side is not None):
            raise SubquadError(
                f"images are resized to {self.size} px or to a short side of {self.short_side} px: at least 1, and one "
                "of both"
            )
        if self.interpolation not in INTERPOLATIONS[: 1 if self.in_bytes else None]:
            raise unknown_name("interpolation", self.interpolation, INTERPOLATIONS[: 1 if self.in_bytes else None])
        if self.long_side is not None and self.long_side < (self.short_side or self.long_side + 1):
            raise SubquadError(
                f"a long side of {self.long_side} px goes with a short side of at most as many, got {self.short_side}"
            )


class SceneTransform:
    """(picture, labels) to (image (3, height, width), labels (height, width))."""

    def __init__(self, settings: SceneInput) -> None:
        self.settings = settings

    def __call__(self, picture: Image.Image, labels: NDArray[np.uint8]) -> tuple[Tensor, Tensor]:
        image = ImageTensor(transforms.pil_to_tensor(picture))
        image, mask = self.change(_resized(image, self.settings), Mask(torch.from_numpy(labels)))
        return normalized(image, self.settings), mask.as_subclass(torch.Tensor).long()

    def change(self, image: Any, mask: Any) -> tuple[Any, Any]:
        """Nothing: labels keep their own size, to which logits are brought."""
        return image, mask


class ColourDistortion(v2.RandomPhotometricDistort):
    """Brightness, contrast, saturation and hue are changed, each with a probability of its own.

    It is that of the papers' recipes: SSD's without the exchange of channels, which makes a blue sky red.
    """

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw by how much, in torchvision's order."""
        return {**super().make_params(flat_inputs), "channel_permutation": None}


class TrainingTransform(SceneTransform):
    """Random scale, a crop that is not all one class, a flip, and other colours, as the papers' recipes have it."""

    def __init__(
        self,
        settings: SceneInput,
        *,
        scale: tuple[float, float] = (0.5, 2.0),
        hflip: float = 0.5,
        distort: bool = True,
        most_of_one: float = 0.75,
    ) -> None:
        super().__init__(settings)
        self.scale, self.hflip, self.most_of_one = scale, hflip, most_of_one
        self.distort = ColourDistortion(p=0.5) if distort else None

    def change(self, image: Any, mask: Any) -> tuple[Any, Any]:
        height, width = image.shape[-2:]
        factor = float(torch.empty(()).uniform_(*self.scale))
        size = [max(1, round(height * factor)), max(1, round(width * factor))]
        image = transforms.resize(image, size, antialias=True)
        # labels are as large as the picture was before it was brought to `short_side`
        rows, columns = (in_the_middle(*lengths) for lengths in zip(mask.shape[-2:], size, strict=True))
        mask = Mask(mask[..., rows[:, None], columns])
        right, below = max(0, self.settings.crop[1] - size[1]), max(0, self.settings.crop[0] - size[0])
        image = transforms.pad(image, [0, 0, right, below], fill=[round(255 * mean) for mean in self.settings.mean])
        mask = transforms.pad(mask, [0, 0, right, below], fill=VOID)
        image, mask = self._cropped(image, mask)
        if float(torch.rand(())) < self.hflip:
            image, mask = transforms.horizontal_flip(image), transforms.horizontal_flip(mask)
        return (image if self.distort is None else self.distort(image)), mask

    def _cropped(self, image: Any, mask: Any) -> tuple[Any, Any]:
        height, width = self.settings.crop
        for _ in range(10):
            top = int(torch.randint(image.shape[-2] - height + 1, ()))
            left = int(torch.randint(image.shape[-1] - width + 1, ()))
            part = transforms.crop(mask, top, left, height, width)
            counts = torch.bincount(part.flatten().long(), minlength=VOID + 1)[:VOID]
            # of nothing but void nothing is learned
            if 0 < counts.max() <= self.most_of_one * counts.sum():
                break
        return transforms.crop(image, top, left, height, width), part


def in_the_middle(old: int, new: int) -> Tensor:
    """(new,), the place of `old` along a line in whose middle each of `new` has its own, as images are resized.

    Where it is between two, it is one and the other by turns: libraries take the first, or the second, of all such, and
    labels lie up to half a pixel beside what they name then.
    """
    twice = (2 * torch.arange(new) + 1) * old
    below, above = -(-twice // (2 * new)) - 1, twice // (2 * new)
    return torch.where(torch.arange(new) % 2 == 0, below, above)


def normalized(image: Any, settings: SceneInput) -> Tensor:
    """Bytes to numbers of mean 0 and deviation 1."""
    floats = transforms.to_dtype(image, torch.float32, scale=True)
    return transforms.normalize(floats, list(settings.mean), list(settings.std)).as_subclass(torch.Tensor)


def _resized(image: Any, settings: SceneInput) -> Any:
    by = v2.InterpolationMode(settings.interpolation)
    if settings.size is not None:
        return transforms.resize(image, list(settings.size), by, antialias=True)
    if settings.short_side is None:
        return image
    if settings.long_side is None and not settings.in_bytes:
        return transforms.resize(image, [settings.short_side], by, antialias=True)
    before = (image.shape[-2], image.shape[-1])
    size = size_within(before, settings.short_side, settings.long_side or LARGEST)
    return ImageTensor(resize_bytes(image, size)) if settings.in_bytes else transforms.resize(image, list(size), by)


def stack(pairs: list[Any]) -> tuple[Tensor, Tensor]:
    """Crops as a batch, those of broken pictures left out."""
    whole = [pair for pair in pairs if pair is not None]
    if not whole:
        return torch.zeros(0, 3, 32, 32), torch.zeros(0, 32, 32, dtype=torch.long)
    images, labels = zip(*whole, strict=True)
    return torch.stack(images), torch.stack(labels)


def leave_apart(pairs: list[Any]) -> list[tuple[Tensor, Tensor]]:
    """Scenes of any size, those with broken pictures left out."""
    return [pair for pair in pairs if pair is not None]
