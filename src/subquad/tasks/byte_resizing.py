"""Images resized in bytes as OpenCV's bilinear interpolation does: what the released dense networks were trained on.

Half-pixel centres, no antialiasing, weights of 11 bits, the result rounded to bytes. Resizing the same image as numbers
with a point is a level off at one pixel in eight, and Pillow's bilinear, which antialiases, at most of them.
"""

import torch
from torch import Tensor

WEIGHT_BITS = 11


def size_within(size: tuple[int, int], short_side: int, long_side: int) -> tuple[int, int]:
    """The (height, width) that an image of `size` is resized to: as large as both sides allow, halves rounded up."""
    factor = min(long_side / max(size), short_side / min(size))
    return max(1, int(size[0] * factor + 0.5)), max(1, int(size[1] * factor + 0.5))


def resize_bytes(image: Tensor, size: tuple[int, int]) -> Tensor:
    """An image (c, y, x) of bytes at another (height, width)."""
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    upper, lower, top_weight, bottom_weight = _taps(image.shape[-2], size[0], image.device)
    left, right, left_weight, right_weight = _taps(image.shape[-1], size[1], image.device)
    numbers = image.int()
    rows = left_weight * numbers[..., left] + right_weight * numbers[..., right]
    top, bottom = rows[..., upper, :] >> 4, rows[..., lower, :] >> 4
    summed = (top_weight[:, None] * top >> 16) + (bottom_weight[:, None] * bottom >> 16)
    return (summed + 2 >> 2).clamp(0, 255).to(torch.uint8)


def _taps(old: int, new: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each new place along an axis: the two old ones that it lies between, and their weights in whole numbers."""
    places = (torch.arange(new, dtype=torch.float64, device=device) + 0.5) * (old / new) - 0.5
    before = places.floor()
    share = places - before
    inside = (before >= 0) & (before < old - 1)
    share = torch.where(inside, share, torch.zeros_like(share))
    first = before.long().clamp(0, old - 1)
    scale = 2**WEIGHT_BITS
    return (
        first,
        (first + 1).clamp(max=old - 1),
        ((1 - share) * scale).round().int(),
        (share * scale).round().int(),
    )
