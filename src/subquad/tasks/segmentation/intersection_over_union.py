"""How well scenes are segmented: a confusion matrix of all pixels, and what follows from it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from subquad.errors import SubquadError
from subquad.tasks.accuracy import evaluating
from subquad.tasks.image_files import said_of_item
from subquad.tasks.segmentation.scene_data import VOID


@dataclass(frozen=True)
class SegmentationResult:
    """In percent; of pixels with a class.

    Attributes:
        miou: mean over the classes of intersection over union; classes that are neither there nor predicted are left
            out.
        accuracy: the share of pixels that are right.
        class_accuracy: mean over the classes that are there of the share of their pixels that are right.
        iou: of each class, not a number where it is left out.
        confusion: pixels of class i (row) that were taken for j.
    """

    miou: float
    accuracy: float
    class_accuracy: float
    iou: tuple[float, ...]
    confusion: Tensor


def judge_confusion(confusion: Tensor) -> SegmentationResult:
    """What a confusion matrix (classes, classes) says."""
    if not confusion.sum():
        raise SubquadError("there are no pixels with a class to evaluate")
    hits, true, found = (part.double() for part in (confusion.diagonal(), confusion.sum(1), confusion.sum(0)))
    iou = 100 * hits / (true + found - hits)
    return SegmentationResult(
        miou=float(iou.nanmean()),
        accuracy=float(100 * hits.sum() / true.sum()),
        class_accuracy=float((100 * hits / true).nanmean()),
        iou=tuple(iou.tolist()),
        confusion=confusion,
    )


def count_pixels(predicted: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """The confusion matrix of pixels that have a class."""
    known = labels != VOID
    true, found = labels[known].long(), predicted[known].long()
    for what, classes in (("labels", true), ("answers", found)):
        # another number would be counted as a pair of others
        if len(classes) and not 0 <= int(classes.min()) <= int(classes.max()) < num_classes:
            wrong = int(classes.min()) if classes.min() < 0 else int(classes.max())
            raise SubquadError(f"{what} of pixels are one of the {num_classes} classes that are counted, got {wrong}")
    pairs = true * num_classes + found
    return torch.bincount(pairs.cpu(), minlength=num_classes**2).view(num_classes, num_classes)


def segment(model: nn.Module, image: Tensor, size: Sequence[int], window: Sequence[int] | None = None) -> Tensor:
    """Logits (classes, *size) of an image (3, height, width).

    Args:
        model: a segmenter, in evaluation mode.
        image: normalised.
        size: (height, width) that logits are brought to.
        window: look at it through windows of this (height, width) that overlap by a third, and take the mean; the
            whole image at once if left out.
    """
    logits = model(image[None]) if window is None else _slid(model, image[None], window)
    return F.interpolate(logits, size=tuple(size), mode="bilinear", align_corners=False)[0]


def _slid(model: nn.Module, x: Tensor, window: Sequence[int]) -> Tensor:
    height, width = x.shape[-2:]
    high, wide = min(window[0], height), min(window[1], width)
    total: Tensor | None = None
    count = x.new_zeros(1, 1, height, width)
    for top in _starts(height, high):
        for left in _starts(width, wide):
            part = model(x[..., top : top + high, left : left + wide])
            if total is None:
                total = part.new_zeros(1, part.shape[1], height, width)
            total[..., top : top + high, left : left + wide] += part
            count[..., top : top + high, left : left + wide] += 1
    assert total is not None
    return total / count


def _starts(length: int, window: int) -> list[int]:
    """Where windows begin that overlap by a third; the last one ends with the image."""
    step = max(1, 2 * window // 3)
    return [min(start, length - window) for start in range(0, max(1, length - window + step), step)]


def evaluate_segmentation(
    model: nn.Module,
    loader: Iterable[list[tuple[Tensor, Tensor]]],
    *,
    device: torch.device | str,
    num_classes: int,
    window: Sequence[int] | None = None,
    amp_dtype: torch.dtype | None = None,
) -> SegmentationResult:
    """Judge a segmenter on lists of (image, labels); in several processes on those of all loaders, which must differ.

    Logits are brought to the size of the labels.
    """
    device = torch.device(device)
    confusion = torch.zeros(num_classes, num_classes, dtype=torch.long)
    several = dist.is_available() and dist.is_initialized()
    hidden = True if several and dist.get_rank() else None
    with evaluating(model), torch.autocast(device.type, amp_dtype, enabled=amp_dtype is not None):
        for batch, pairs in enumerate(tqdm(loader, desc="evaluation", leave=False, disable=hidden)):
            for place, (image, labels) in enumerate(pairs):
                with said_of_item(loader, batch, place):
                    logits = segment(model, image.to(device), labels.shape, window)
                largest, predicted = logits.max(0)
                if not largest.isfinite().all():
                    raise SubquadError(
                        "the network's answer is not finite: its weights are damaged, or it has diverged"
                    )
                confusion += count_pixels(predicted.cpu(), labels, num_classes)
    if several:
        total = confusion.to(device)
        dist.all_reduce(total)
        confusion = total.cpu()
    return judge_confusion(confusion)
