"""How well objects are found: COCO's average precision, of boxes and of masks."""

import contextlib
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from subquad.errors import SubquadError, reason_without_path
from subquad.tasks.accuracy import evaluating
from subquad.tasks.image_files import said_of_item

MEASURES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
"""What COCO's evaluation says first, in its order."""


@dataclass(frozen=True)
class DetectionResult:
    """In percent; not a number where there are no such objects.

    Attributes:
        box, mask: by `MEASURES`; masks are empty where none were asked for.
        classes: average precision of each class's boxes.
    """

    box: dict[str, float]
    mask: dict[str, float]
    classes: tuple[float, ...]


def as_coco(image_id: int, found: dict[str, Tensor]) -> list[dict[str, Any]]:
    """A detector's findings in an image as entries of COCO's result files."""
    boxes = found["boxes"].detach().cpu().double()
    boxes = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], dim=1)
    entries: list[dict[str, Any]] = [
        {"image_id": image_id, "category_id": label, "bbox": box, "score": score}
        for box, label, score in zip(boxes.tolist(), found["labels"].tolist(), found["scores"].tolist(), strict=True)
    ]
    if "masks" in found:
        from faster_coco_eval.core import mask as coding

        whole = (found["masks"][:, 0] > 0.5).to(torch.uint8).cpu().numpy()
        for entry, mask in zip(entries, whole, strict=True):
            entry["segmentation"] = coding.encode(np.asfortranarray(mask))
    return entries


def judge_objects(truth: dict[str, Any], found: Sequence[dict[str, Any]], *, masks: bool) -> DetectionResult:
    """Average precision of findings, entries of COCO's result files, against its annotations.

    Args:
        truth: images, annotations and categories as COCO has them.
        found: of all images together.
        masks: whether to judge masks as well.
    """
    if not truth["annotations"]:
        raise SubquadError("there are no objects to evaluate")
    truth, found = _numbered(truth, found)
    found = found or [_nowhere(truth, masks=masks)]
    box, classes = _evaluated(truth, found, "bbox")
    mask = _evaluated(truth, found, "segm")[0] if masks else {}
    return DetectionResult(box, mask, classes)


def _numbered(
    truth: dict[str, Any], found: Sequence[dict[str, Any]]
) -> tuple[dict[str, Any], Sequence[dict[str, Any]]]:
    """Annotations and findings with images and annotations numbered from 1, in the order that they have.

    To COCO's evaluation, 0 and negative numbers of annotations mean that nothing was found, and it takes no negative
    numbers of images.
    """
    places = {number: place for place, number in enumerate(sorted(image["id"] for image in truth["images"]), start=1)}
    images = [{**image, "id": places[image["id"]]} for image in truth["images"]]
    objects = [
        {**one, "id": number, "image_id": places[one["image_id"]]}
        for number, one in enumerate(truth["annotations"], start=1)
    ]
    if unknown := [entry["image_id"] for entry in found if entry["image_id"] not in places]:
        raise SubquadError(f"something is found in image {unknown[0]}, which is none of the {len(places)} images")
    numbered = [{**entry, "image_id": places[entry["image_id"]]} for entry in found]
    return {**truth, "images": images, "annotations": objects}, numbered


def _nowhere(truth: dict[str, Any], *, masks: bool) -> dict[str, Any]:
    """A finding of no size, as COCO's evaluation needs one: with it alone there is nothing where objects are."""
    image = truth["images"][0]
    entry: dict[str, Any] = {"image_id": image["id"], "category_id": truth["categories"][0]["id"], "score": 0.0}
    entry["bbox"] = [0.0, 0.0, 0.0, 0.0]
    if masks:
        from faster_coco_eval.core import mask as coding

        entry["segmentation"] = coding.encode(np.zeros((image["height"], image["width"]), np.uint8, order="F"))
    return entry


def _evaluated(
    truth: dict[str, Any], found: Sequence[dict[str, Any]], kind: str
) -> tuple[dict[str, float], tuple[float, ...]]:
    from faster_coco_eval import COCO, COCOeval_faster

    # masks are small or large by their own area, as the authors' tools have it: beside a box it would be the box's
    other = "bbox" if kind == "segm" else "segmentation"
    kept = [{k: v for k, v in entry.items() if k != other} for entry in found]
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            reference = COCO(truth)
            judge = COCOeval_faster(reference, reference.loadRes(kept), kind, print_function=lambda *_: None)
            judge.run()
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            # of masks that are cut short, as is seen only when they are decoded
            raise SubquadError(f"the annotations can't be judged by: {reason_without_path(error)}") from None
    values = {name: _percent(value) for name, value in zip(MEASURES, judge.stats, strict=False)}
    # precision by threshold, recall, class, area, number of detections; -1 where there are no objects
    precision = np.asarray(judge.eval["precision"])[:, :, :, 0, -1]
    classes = []
    for place in range(precision.shape[2]):
        known = precision[:, :, place][precision[:, :, place] > -1]
        classes.append(100 * float(known.mean()) if known.size else math.nan)
    return values, tuple(classes)


def _percent(value: float) -> float:
    return math.nan if value < 0 else 100 * float(value)


def evaluate_detection(
    model: nn.Module,
    loader: Iterable[tuple[list[Tensor], list[dict[str, Any]]]],
    truth: dict[str, Any],
    *,
    device: torch.device | str,
    masks: bool,
    amp_dtype: torch.dtype | None = None,
) -> DetectionResult:
    """Judge a detector on (images, targets); in several processes on those of all loaders, which must differ."""
    device = torch.device(device)
    several = dist.is_available() and dist.is_initialized()
    hidden = True if several and dist.get_rank() else None
    entries: list[dict[str, Any]] = []
    seen: list[int] = []
    with evaluating(model), torch.autocast(device.type, amp_dtype, enabled=amp_dtype is not None):
        for batch, (images, targets) in enumerate(tqdm(loader, desc="evaluation", leave=False, disable=hidden)):
            if not images:
                continue
            found = _found(model, [image.to(device) for image in images], loader, batch)
            for target, one in zip(targets, found, strict=True):
                entries += as_coco(target["image_id"], one)
                seen.append(target["image_id"])
    if several:
        shares: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shares, (entries, seen))
        entries = [entry for share, _ in shares for entry in share]
        seen = [number for _, share in shares for number in share]
    return judge_objects(only_images(truth, seen), entries, masks=masks)


def _found(model: nn.Module, images: list[Tensor], loader: object, batch: int) -> list[dict[str, Tensor]]:
    """What a detector finds; where it refuses, the image that it is shown alone is named."""
    with said_of_item(loader, batch, 0) if len(images) == 1 else contextlib.nullcontext():
        found: list[dict[str, Tensor]] = model(images)
    return found


def only_images(truth: dict[str, Any], seen: Sequence[int]) -> dict[str, Any]:
    """The annotations of some images: objects of broken ones were not looked for, and are not missed.

    Raises:
        SubquadError: of none.
    """
    if not seen:
        raise SubquadError("there are no images to evaluate")
    numbers = set(seen)
    images = [image for image in truth["images"] if image["id"] in numbers]
    annotations = [one for one in truth["annotations"] if one["image_id"] in numbers]
    return {**truth, "images": images, "annotations": annotations}
