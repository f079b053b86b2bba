"""What detectors of mmdetection do otherwise than torchvision's: anchors, boxes, features of boxes, images, masks.

Boxes are (left, top, right, bottom) in pixels.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection._utils import BoxCoder
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import batched_nms, clip_boxes_to_image, roi_align
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock

from subquad.models.pyramid import STRIDES
from subquad.tasks.byte_resizing import resize_bytes, size_within

RATIOS = (0.5, 1.0, 2.0)
"""Height over width of anchors."""

FINEST_SIDE = 56
"""Boxes of this side and smaller, up to twice as large, have their features from the finest level."""

HALF = 0.5
"""The share from which on a pixel belongs to a mask."""


class StridedAnchors(AnchorGenerator):
    """Anchors around (column·stride, row·stride) of each level, their sides not rounded.

    Args:
        strides: of each level, pixels.
        scales: sides of square anchors over the stride.
    """

    def __init__(self, strides: Sequence[int], scales: Sequence[float]) -> None:
        self.strides = tuple(strides)
        sizes = tuple(tuple(stride * scale for scale in scales) for stride in strides)
        super().__init__(sizes, (RATIOS,) * len(sizes))
        # in float32, as they were trained with, whatever the maps are
        roots = torch.tensor(RATIOS, device="cpu").sqrt()
        factors = torch.tensor(scales, device="cpu")
        self.bases = []
        for stride in strides:
            widths = (stride * (1 / roots)[:, None] * factors).flatten()
            heights = (stride * roots[:, None] * factors).flatten()
            self.bases.append(torch.stack([-widths, -heights, widths, heights], dim=1) / 2)

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """Give the anchors of all levels for each image: by level, row, column, ratio and scale."""
        dtype = torch.promote_types(feature_maps[0].dtype, torch.float32)
        device = feature_maps[0].device
        anchors = []
        for image, stride, base in zip(feature_maps, self.strides, self.bases, strict=True):
            rows, columns = (torch.arange(side, device=device) * stride for side in image.shape[-2:])
            y, x = torch.meshgrid(rows, columns, indexing="ij")
            centres = torch.stack([x, y, x, y], dim=-1).view(-1, 1, 4)
            anchors.append((centres + base.to(device, dtype)).view(-1, 4))
        return [torch.cat(anchors)] * len(image_list.image_sizes)


class ClampedCoder(BoxCoder):
    """Differences of boxes over standard deviations; sides shrink no more than they may grow, 62.5 times."""

    def __init__(self, deviations: Sequence[float] = (1.0, 1.0, 1.0, 1.0)) -> None:
        left, top, wide, high = (1 / deviation for deviation in deviations)
        super().__init__((left, top, wide, high), math.log(1000 / 16))

    def decode_single(self, rel_codes: Tensor, boxes: Tensor) -> Tensor:
        """Boxes (n, 4·k) of differences (n, 4·k) from boxes (n, 4), in 32 bits at least."""
        # sixteen do not tell pixels apart
        rel_codes = rel_codes.to(torch.promote_types(rel_codes.dtype, torch.float32))
        least = rel_codes.new_tensor([-math.inf, -math.inf, *(-self.bbox_xform_clip * w for w in self.weights[2:])])
        codes = rel_codes.unflatten(1, (-1, 4)).maximum(least).flatten(1)
        return super().decode_single(codes, boxes)


class AlignedPooler(nn.Module):
    """Features (n, c, side, side) of boxes, each of the level for its size, by RoIAlign with half-pixel centres.

    As many samples a bin as it has pixels. He et al. 2017, arXiv 1703.06870, section 3; levels as in Lin et al. 2017,
    arXiv 1612.03144, eq. 1.
    """

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, features: dict[str, Tensor], boxes: list[Tensor], image_shapes: Any) -> Tensor:
        """Features of the boxes of all images, one after another; the shapes of images are not needed."""
        rois = torch.cat([F.pad(one, (1, 0), value=float(image)) for image, one in enumerate(boxes)])
        levels = levels_of(rois[:, 1:])
        parts, places = [], []
        for level, stride in enumerate(STRIDES):
            at = torch.where(levels == level)[0]
            pooled = roi_align(features[str(level)], rois[at], self.side, 1 / stride, sampling_ratio=0, aligned=True)
            parts.append(pooled)
            places.append(at)
        # of each box the row where it came to lie
        return torch.cat(parts)[torch.cat(places).argsort()]


def levels_of(boxes: Tensor) -> Tensor:
    """The level (n,) that boxes (n, 4) have their features from, 0 for the finest."""
    sides = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).sqrt()
    return (sides / FINEST_SIDE + 1e-6).log2().floor().clamp(0, len(STRIDES) - 1)


class CoarserLevels(ExtraFPNBlock):
    """Two levels more: of the backbone's last map, and of that without an activation between."""

    def __init__(self, in_channels: int, width: int) -> None:
        super().__init__()
        self.p6 = nn.Conv2d(in_channels, width, 3, stride=2, padding=1)
        self.p7 = nn.Conv2d(width, width, 3, stride=2, padding=1)

    def forward(self, p: list[Tensor], c: list[Tensor], names: list[str]) -> tuple[list[Tensor], list[str]]:
        """Levels `p` with two behind them, `c` being the backbone's maps."""
        coarse = self.p6(c[-1])
        return [*p, coarse, self.p7(coarse)], [*names, "p6", "p7"]


class ByteTransform(GeneralizedRCNNTransform):
    """Images resized in bytes, then normed; what is found is brought back to them, masks pixel by pixel."""

    def resize(self, image: Tensor, target: Any = None) -> tuple[Tensor, Any]:
        """An image of numbers from 0 to 1, and its boxes and masks, within the sides; not normed yet."""
        short = self.torch_choice(self.min_size) if self.training else self.min_size[-1]
        before = (image.shape[-2], image.shape[-1])
        size = size_within(before, short, self.max_size)
        resized = resize_bytes((image * 255).round().clamp(0, 255).to(torch.uint8), size).to(image.dtype) / 255
        if target is None:
            return resized, None
        boxes = target["boxes"]
        target = {**target, "boxes": boxes * factors_of(before, size).to(boxes)}
        if "masks" in target:
            target["masks"] = F.interpolate(target["masks"][:, None], size)[:, 0]
        return resized, target

    def forward(self, images: list[Tensor], targets: Any = None) -> tuple[ImageList, Any]:
        """A batch, filled up below and on the right with zeros; and what is in the images."""
        pairs = [self.resize(image, None if targets is None else targets[k]) for k, image in enumerate(images)]
        normed = [self.normalize(image) for image, _ in pairs]
        sizes = [(image.shape[-2], image.shape[-1]) for image in normed]
        batch = ImageList(self.batch_images(normed, self.size_divisible), sizes)
        return batch, None if targets is None else [target for _, target in pairs]

    def postprocess(self, result: Any, image_shapes: Any, original_image_sizes: Any) -> Any:
        """Boxes in the images as they were, and masks (n, 1, height, width) of truth values."""
        if self.training:
            return result
        for found, size, before in zip(result, image_shapes, original_image_sizes, strict=True):
            found["boxes"] = found["boxes"] / factors_of(before, size).to(found["boxes"])
            if "masks" in found:
                found["masks"] = pasted(found["masks"], found["boxes"], before)
        return result


def factors_of(before: Sequence[int], size: Sequence[int]) -> Tensor:
    """By what boxes of an image are multiplied where it is resized, (4,); the two sides differ a little."""
    height, width = (torch.tensor(new / old, dtype=torch.float32) for new, old in zip(size, before, strict=True))
    return torch.stack([width, height, width, height])


def pasted(masks: Tensor, boxes: Tensor, size: Sequence[int]) -> Tensor:
    """Masks (n, 1, y, x) of boxes (n, 4) in an image of a size: truth values (n, 1, height, width)."""
    image = torch.zeros((len(masks), 1, *size), dtype=torch.bool, device=masks.device)
    for k, (mask, box) in enumerate(zip(masks, boxes, strict=True)):
        rows, columns, shares = sampled(mask, box, size)
        image[k, :, rows, columns] = shares >= HALF
    return image


def sampled(mask: Tensor, box: Tensor, size: Sequence[int]) -> tuple[slice, slice, Tensor]:
    """A mask (1, y, x) of a box (4,) at the pixels of an image: bilinear, zero outside.

    Returns:
        The rows and the columns where there can be something, and the mask there (1, rows, columns).
    """
    dtype = torch.promote_types(box.dtype, torch.float32)
    mask, box = mask.to(dtype), box.to(dtype)
    left, top, right, bottom = box.tolist()
    if not math.isfinite(left + top + right + bottom):
        return slice(0, 0), slice(0, 0), mask[:, :0, :0]
    # beyond a pixel around the box there is nothing
    rows, columns = _within(top, bottom, size[0]), _within(left, right, size[1])
    x, y = (torch.arange(s.start, s.stop, device=mask.device, dtype=dtype) + 0.5 for s in (columns, rows))
    x = (x - box[0]) / (box[2] - box[0]) * 2 - 1
    y = (y - box[1]) / (box[3] - box[1]) * 2 - 1
    grid = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)
    if not grid.numel():
        return rows, columns, mask.new_zeros(1, len(y), len(x))
    return rows, columns, F.grid_sample(mask[None], grid[None], align_corners=False)[0]


def _within(first: float, last: float, side: int) -> slice:
    """The pixels of an axis that a part of it touches, and one more at both ends."""
    start = min(max(0, math.floor(first) - 1), side)
    return slice(start, max(start, min(side, math.ceil(last) + 1)))


def chosen(
    boxes: Tensor, scores: Tensor, shape: tuple[int, int], *, threshold: float, overlap: float, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes, scores and labels that are left of an image, by score; suppressed within each class.

    Args:
        boxes: (n, classes, 4).
        scores: (n, classes), the first of no object.
        shape: of the image, to which boxes are clipped.
        threshold: what scores are above.
        overlap: intersection over union above which the lower of two boxes is left out.
        most: how many are kept.
    """
    boxes = clip_boxes_to_image(boxes, shape)[:, 1:]
    places, classes = torch.where(scores[:, 1:] > threshold)
    boxes, scores, labels = boxes[places, classes], scores[:, 1:][places, classes], classes + 1
    kept = batched_nms(boxes, scores, labels, overlap)[:most]
    return boxes[kept], scores[kept], labels[kept]
