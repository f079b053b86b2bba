"""A trained segmenter: judged on data, and asked for label maps and overlays of images."""

import colorsys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn
from tqdm import tqdm

from subquad.data import create_loader
from subquad.dense import load_scenes, restore_dense
from subquad.tasks.segmentation.scene_transforms import SceneInput, SceneTransform, leave_apart
from subquad.tasks.segmentation.scene_data import VOID
from subquad.tasks.accuracy import evaluating
from subquad.tasks.class_names import check_classes
from subquad.tasks.image_files import plan_outputs, readable_pictures, save_picture
from subquad.tasks.classification.class_predictions import check_finite
from subquad.tasks.segmentation.intersection_over_union import SegmentationResult, evaluate_segmentation, segment
from subquad.models import weight_file
from subquad.models.restoring import naming
from subquad.text import columns
from subquad.weights.notes import required, settings_of


@dataclass(frozen=True)
class TrainedSegmenter:
    """A network with what it was trained on.

    Attributes:
        model: in evaluation mode, on `device`.
        classes: their names, in the order of the logits.
        input: how scenes are brought to the network.
        slide: whether it was judged through windows.
        data: what it was trained on.
    """

    model: nn.Module
    classes: tuple[str, ...]
    input: SceneInput
    slide: bool
    data: str
    device: torch.device

    def window(self, slide: bool | None) -> tuple[int, int] | None:
        """The window to look through, None for none; as in training where `slide` is None."""
        return self.input.crop if (self.slide if slide is None else slide) else None


@dataclass(frozen=True)
class SceneJudgement:
    """What `judge_segmenter` found out."""

    result: SegmentationResult
    count: int
    images_per_second: float
    broken: list[str]


@dataclass(frozen=True)
class SegmentedScene:
    """An image, its labels (height, width), and the share of each class that is there, the largest first."""

    path: Path
    labels: NDArray[np.uint8]
    shares: list[tuple[str, float]]


def load_segmenter(path: Path | str) -> TrainedSegmenter:
    """The best weights of a run folder, or a weight file that training wrote, on the fastest device there is."""
    model, note = restore_dense(path, "segment")
    with naming(weight_file(path)):
        classes, data, slide = required(note, "classes", "data", "slide")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return TrainedSegmenter(
        model=model.eval().to(device),
        classes=tuple(classes),
        input=input_of(note, weight_file(path)),
        slide=slide,
        data=data,
        device=device,
    )


def input_of(note: dict[str, Any], path: Path) -> SceneInput:
    """How scenes are brought to the network of a weight file, from its note."""
    with naming(path):
        (settings,) = required(note, "input")
        return settings_of(SceneInput, settings)


def judge_segmenter(
    trained: TrainedSegmenter,
    *,
    data: str | None = None,
    split: str = "validation",
    slide: bool | None = None,
    strict: bool = False,
) -> SceneJudgement:
    """Intersection over union on what a segmenter was trained on, or on other scenes with the same classes."""
    images = load_scenes(data or trained.data, split=split, strict=strict)
    check_classes(images.name, images.classes, trained.classes)
    images.transform = SceneTransform(trained.input)
    loader = create_loader(images, batch_size=1, collate=leave_apart)
    start = time.perf_counter()
    result = evaluate_segmentation(
        trained.model,
        loader,
        device=trained.device,
        num_classes=len(trained.classes),
        window=trained.window(slide),
    )
    count = len(images) - images.num_broken
    return SceneJudgement(result, count, count / (time.perf_counter() - start), images.broken_paths())


def predict_scenes(
    trained: TrainedSegmenter,
    images: Sequence[Path],
    folder: Path,
    *,
    slide: bool | None = None,
    strict: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> Iterator[SegmentedScene]:
    """Segment image files, those in folders included; each gets <name>.png, its labels, and <name>-overlay.png.

    Labels are written as ADE20K has them, 1 for the first class, with a palette. Images of subfolders are written to
    subfolders.

    Raises:
        SubquadError: no image can be read, two would be written to one file, or the network gives no numbers.
    """
    transform = SceneTransform(trained.input)
    planned = {image.path: image.outputs for image in plan_outputs(images, folder, (".png", "-overlay.png"))}
    bar = tqdm(planned, desc="segmenting", leave=False, disable=None)
    for path, picture in readable_pictures(bar, strict=strict, log=log):
        size = picture.size[::-1]
        x = transform(picture, np.zeros(size, np.uint8))[0]
        with evaluating(trained.model):
            logits = segment(trained.model, x.to(trained.device), size, trained.window(slide))
        check_finite(logits, path)
        labels = logits.argmax(0).to(torch.uint8).cpu().numpy()
        for output, written in zip(planned[path], (as_labels(labels), overlay(picture, labels)), strict=True):
            save_picture(written, output)
        counts = np.bincount(labels.ravel(), minlength=len(trained.classes)) / labels.size
        order = [int(place) for place in np.argsort(-counts, kind="stable") if counts[place]]
        yield SegmentedScene(path, labels, [(trained.classes[k], float(counts[k])) for k in order])


def as_labels(labels: NDArray[np.uint8]) -> Image.Image:
    """Labels as ADE20K writes them, in colours."""
    image = Image.fromarray(np.where(labels == VOID, 0, labels + 1).astype(np.uint8))
    image.putpalette([0, 0, 0, *(part for k in range(VOID) for part in colour(k))])
    return image


def overlay(picture: Image.Image, labels: NDArray[np.uint8], strength: float = 0.55) -> Image.Image:
    """A picture under the colours of its labels; nothing has none."""
    colours = np.array([colour(k) for k in range(VOID + 1)], dtype=np.float64)[labels]
    base = np.asarray(picture.convert("RGB"), dtype=np.float64)
    mixed = np.where((labels == VOID)[..., None], base, (1 - strength) * base + strength * colours)
    return Image.fromarray(mixed.round().astype(np.uint8))


def colour(k: int) -> tuple[int, int, int]:
    """Of class k: hues a golden angle apart, so that any two next to each other differ."""
    hue = (k * 0.618034) % 1
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.55 + 0.4 * (k % 2), 0.95 - 0.25 * (k // 2 % 2))
    return round(255 * red), round(255 * green), round(255 * blue)


def iou_text(result: SegmentationResult, classes: Sequence[str]) -> str:
    """The classes with their intersection over union, for a terminal."""
    shares = result.confusion.sum(1) / result.confusion.sum()
    lines = [["class", "IoU %", "pixels %"]]
    for name, iou, share in zip(classes, result.iou, shares.tolist(), strict=True):
        lines.append([name[:40], "" if iou != iou else f"{iou:.2f}", f"{100 * share:.2f}"])
    return columns(lines)
