"""How images with objects are brought to a network that, unlike our detectors, does not resize and normalise itself."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as transforms

from subquad.errors import SubquadError, unknown_name

INTERPOLATIONS = {
    "bilinear": InterpolationMode.BILINEAR,
    "bicubic": InterpolationMode.BICUBIC,
    "nearest": InterpolationMode.NEAREST_EXACT,
}
"""How images may be resized."""


@dataclass(frozen=True)
class ObjectInput:
    """How an image is brought to a network: to a fixed size, or as large as two sides allow, and normalised.

    Attributes:
        mean, std: of the channels.
        size: (height, width) that images are resized to, whatever their aspect; None where the sides say it.
        short_side: what the shorter side is resized to.
        long_side: what the longer side has at most; the shorter one is smaller then.
        multiple_of: what both sides are cut to multiples of, where they are resized so.
        interpolation: a name of `INTERPOLATIONS`.
        antialias: whether they are resized in bytes, with antialiasing; else as numbers with a point, without.
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    size: tuple[int, int] | None = None
    short_side: int | None = None
    long_side: int | None = None
    multiple_of: int = 1
    interpolation: str = "bilinear"
    antialias: bool = True

    def __post_init__(self) -> None:
        sides = (self.short_side, self.long_side)
        if (self.size is None) == (None in sides) or (self.size is not None and sides != (None, None)):
            raise SubquadError(
                f"images of objects are resized to a size or by a short and a long side, got {self.size} and {sides}"
            )
        if min(*(side for side in (*sides, *(self.size or ())) if side is not None), self.multiple_of) < 1:
            raise SubquadError(f"images are resized to 1 px or more, got {self.size or sides} by {self.multiple_of}")
        if min(self.std) <= 0:
            raise SubquadError(f"images need an std above 0 of each channel, got {self.std}")
        if self.interpolation not in INTERPOLATIONS:
            raise unknown_name("interpolation", self.interpolation, INTERPOLATIONS)

    @property
    def square(self) -> tuple[int, int]:
        """The size of images of which many are looked at together: a square where their own sides would say it."""
        return self.size or (self.short_side or 1, self.short_side or 1)

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """The (height, width) that an image of this one is resized to.

        Raises:
            SubquadError: nothing is left of its shorter side.
        """
        if self.size is not None:
            return self.size
        assert self.short_side is not None and self.long_side is not None
        short, long = sorted((height, width))
        # whole numbers as DETR's transforms have them: the shorter side rounded, the longer one cut off
        exact = float(self.short_side)
        if long / short * exact > self.long_side:
            exact = self.long_side * short / long
        side = round(exact)
        other = long if side == short else int(exact * long / short)
        side, other = (px - px % self.multiple_of for px in (side, other))
        if not side:
            raise SubquadError(
                f"an image of {width}×{height} px is less than {self.multiple_of} px thin at a long side of "
                f"{self.long_side}: leave it out"
            )
        return (side, other) if height <= width else (other, side)

    def seen(self, image: Tensor) -> Tensor:
        """An image (3, height, width) of numbers from 0 to 1, as the network takes it."""
        size = list(self.size_of(image.shape[-2], image.shape[-1]))
        how: dict[str, Any] = {"interpolation": INTERPOLATIONS[self.interpolation], "antialias": self.antialias}
        if not self.antialias:
            return transforms.normalize(transforms.resize(image, size, **how), list(self.mean), list(self.std))
        # in the bytes that it was decoded to, and normalised in one step, as transformers has it to the bit: queries
        # that are nearly alike are chosen by less
        in_bytes = (255 * image).round().clamp(0, 255).to(torch.uint8)
        mean, std = (255 * torch.tensor(of_channels)[:, None, None].to(image) for of_channels in (self.mean, self.std))
        return (transforms.resize(in_bytes, size, **how).to(image.dtype) - mean) / std
