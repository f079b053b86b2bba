"""A trained detector: judged on data, and asked for the objects of images, which it draws."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks
from tqdm import tqdm

from subquad.data import create_loader
from subquad.dense import restore_dense
from subquad.tasks.detection.detectors import Detector
from subquad.tasks.detection.object_transforms import ObjectTransform, as_lists
from subquad.tasks.detection.object_data import load_objects
from subquad.tasks.accuracy import evaluating
from subquad.tasks.class_names import check_classes
from subquad.tasks.detection.average_precision import DetectionResult, evaluate_detection
from subquad.tasks.image_files import plan_outputs, readable_pictures, save_picture
from subquad.tasks.classification.class_predictions import check_finite
from subquad.tasks.segmentation.trained_segmenter import colour
from subquad.models import weight_file
from subquad.models.restoring import naming
from subquad.text import columns
from subquad.weights.notes import required


@dataclass(frozen=True)
class TrainedDetector:
    """A network with the names of its classes, label k is classes[k - 1], and what it was trained on."""

    model: Detector
    classes: tuple[str, ...]
    data: str
    device: torch.device


@dataclass(frozen=True)
class ObjectJudgement:
    """What `judge_detector` found out."""

    result: DetectionResult
    count: int
    images_per_second: float
    broken: list[str]


@dataclass(frozen=True)
class FoundObjects:
    """An image, its objects (class, score, left, top, right, bottom) by score, and where they were drawn."""

    path: Path
    objects: list[tuple[str, float, float, float, float, float]]
    picture: Path


def load_detector(path: Path | str) -> TrainedDetector:
    """The best weights of a run folder, or a weight file that training wrote, on the fastest device there is."""
    model, note = restore_dense(path, "detect")
    with naming(weight_file(path)):
        classes, data = required(note, "classes", "data")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return TrainedDetector(model.eval().to(device), tuple(classes), data, device)


def judge_detector(
    trained: TrainedDetector,
    *,
    data: str | None = None,
    split: str = "validation",
    strict: bool = False,
) -> ObjectJudgement:
    """Average precision on what a detector was trained on, or on other images with the same classes."""
    images = load_objects(data or trained.data, split=split, strict=strict)
    check_classes(images.name, images.classes, trained.classes)
    images.transform = ObjectTransform()
    loader = create_loader(images, batch_size=1, collate=as_lists)
    start = time.perf_counter()
    result = evaluate_detection(
        trained.model, loader, images.truth, device=trained.device, masks=trained.model.has_masks
    )
    count = len(images) - images.num_broken
    return ObjectJudgement(result, count, count / (time.perf_counter() - start), images.broken_paths())


def predict_objects(
    trained: TrainedDetector,
    images: Sequence[Path],
    folder: Path,
    *,
    threshold: float = 0.5,
    strict: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> Iterator[FoundObjects]:
    """Find the objects of image files, those in folders included; each is drawn to <name>-objects.png in `folder`.

    Images of subfolders are written to subfolders.

    Raises:
        SubquadError: no image can be read, two would be written to one file, or the network gives no numbers.
    """
    planned = {image.path: image.outputs[0] for image in plan_outputs(images, folder, ("-objects.png",))}
    bar = tqdm(planned, desc="detecting", leave=False, disable=None)
    for path, picture in readable_pictures(bar, strict=strict, log=log):
        found = find_objects(trained, picture, threshold)
        check_finite(found["boxes"], path)
        save_picture(draw_objects(picture, found, trained.classes), planned[path])
        rows = zip(found["labels"].tolist(), found["scores"].tolist(), found["boxes"].tolist(), strict=True)
        objects: Any = [(trained.classes[label - 1], score, *box) for label, score, box in rows]
        yield FoundObjects(path, objects, planned[path])


def find_objects(trained: TrainedDetector, picture: Image.Image, threshold: float) -> dict[str, Tensor]:
    """What a detector finds in a picture with a score of at least `threshold`: boxes, labels, scores, perhaps masks."""
    x = transforms.to_dtype(transforms.pil_to_tensor(picture), torch.float32, scale=True)
    with evaluating(trained.model):
        found = trained.model([x.to(trained.device)])[0]
    sure = found["scores"] >= threshold
    return {key: value[sure].cpu() for key, value in found.items()}


def draw_objects(picture: Image.Image, found: dict[str, Tensor], classes: Sequence[str]) -> Image.Image:
    """A picture with boxes, names, scores and masks; without scores, as annotations have none."""
    image = transforms.pil_to_tensor(picture)
    labels = found["labels"].tolist()
    if not labels:
        return picture
    colours = [colour(k) for k in range(len(labels))]
    if "masks" in found:
        masks = found["masks"][:, 0] > 0.5 if found["masks"].dim() == 4 else found["masks"] > 0
        image = draw_segmentation_masks(image, masks, alpha=0.5, colors=colours)
    names = [classes[label - 1] for label in labels]
    if "scores" in found:
        names = [f"{name} {score:.2f}" for name, score in zip(names, found["scores"].tolist(), strict=True)]
    width = max(1, round(max(picture.size) / 300))
    drawn = draw_bounding_boxes(image, found["boxes"], labels=names, colors=colours, width=width)
    return transforms.to_pil_image(drawn)


def precision_text(result: DetectionResult, classes: Sequence[str]) -> str:
    """Average precision by kind and size, and of each class, for a terminal."""

    def text(value: float) -> str:
        return "" if value != value else f"{value:.1f}"

    lines = [["", "AP", "AP50", "AP75", "small", "medium", "large"]]
    lines.append(["boxes", *map(text, result.box.values())])
    if result.mask:
        lines.append(["masks", *map(text, result.mask.values())])
    table = columns(lines)
    if len(classes) < 2:
        return table
    named = [["class", "box AP"]] + [[name[:40], text(ap)] for name, ap in zip(classes, result.classes, strict=True)]
    return f"{table}\n\n{columns(named)}"
