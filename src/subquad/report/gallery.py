"""What dense networks make of some held-out images, beside the truth."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import numpy as np
from PIL import Image

from subquad.dense import load_scenes
from subquad.tasks.detection.object_data import load_objects
from subquad.tasks.segmentation.scene_transforms import SceneTransform
from subquad.errors import SubquadError
from subquad.tasks.accuracy import evaluating
from subquad.tasks.detection.trained_detector import TrainedDetector, draw_objects, find_objects, load_detector
from subquad.tasks.segmentation.trained_segmenter import TrainedSegmenter, colour, load_segmenter, overlay
from subquad.tasks.segmentation.intersection_over_union import count_pixels, judge_confusion, segment
from subquad.report.page_parts import figure, section
from subquad.report.run_records import Group

_WIDTH = 300
_COUNT = 4
_THRESHOLD = 0.5

Pictures = list[tuple[Image.Image, str]]


def gallery(groups: Sequence[Group], log: Callable[[str], None]) -> str:
    """A section with some held-out images, their truth and what every group predicts; nothing for classifiers."""
    task = groups[0].first.task
    if task not in _TASKS:
        return ""
    load, show = _TASKS[task]
    networks: list[tuple[str, Any]] = []
    for group in groups:
        try:
            networks.append((group.label, load(group.first.path)))
        except SubquadError as error:
            log(f"no pictures of {group.label}: {error}")
    if not networks:
        return ""
    try:
        rows, lead = show(networks)
    except SubquadError as error:
        log(f"no pictures: {error}")
        return ""
    figures = ("".join(figure(_small(image), text, colours=128) for image, text in row) for row in rows)
    return section(
        "Predictions against truth",
        "Held-out images, evenly chosen.",
        lead + "".join(f'<div class="images">{row}</div>' for row in figures),
    )


def _small(image: Image.Image) -> Image.Image:
    return image.resize((_WIDTH, max(1, round(image.height * _WIDTH / image.width))))


def _evenly(length: int) -> list[int]:
    return [int(place) for place in np.linspace(0, length - 1, min(_COUNT, length)).round()]


def _scenes(networks: Sequence[tuple[str, TrainedSegmenter]]) -> tuple[list[Pictures], str]:
    """Overlays, with the mean IoU of the classes that are in the image or found in it; and what colours mean."""
    images = load_scenes(networks[0][1].data, split="validation")
    rows = []
    for index in _evenly(len(images)):
        if (item := images[index]) is None:
            continue
        picture, labels = item
        row = [(picture, "image"), (overlay(picture, labels), "truth")]
        for label, trained in networks:
            x, target = SceneTransform(trained.input)(picture, labels)
            with evaluating(trained.model):
                logits = segment(trained.model, x.to(trained.device), labels.shape, trained.window(None))
            found = logits.argmax(0).cpu()
            iou = judge_confusion(count_pixels(found, target, len(trained.classes))).miou
            row.append((overlay(picture, found.numpy().astype(np.uint8)), f"{label} (IoU {iou:.0f} %)"))
        rows.append(row)
    swatches = "".join(
        f'<span class="swatch" style="background:rgb{colour(k)}"></span>{escape(name)} &nbsp; '
        for k, name in enumerate(images.classes[:40])
    )
    return rows, f"<p>{swatches}</p>"


def _objects(networks: Sequence[tuple[str, TrainedDetector]]) -> tuple[list[Pictures], str]:
    """Boxes and masks that are found with some certainty."""
    images = load_objects(networks[0][1].data, split="validation")
    rows = []
    for index in _evenly(len(images)):
        if (item := images[index]) is None:
            continue
        picture, target = item
        row = [(draw_objects(picture, target, images.classes), f"truth: {len(target['labels'])} objects")]
        for label, trained in networks:
            found = find_objects(trained, picture, _THRESHOLD)
            drawn = draw_objects(picture, found, trained.classes)
            row.append((drawn, f"{label}: {len(found['labels'])} with a score of at least {_THRESHOLD}"))
        rows.append(row)
    return rows, ""


_TASKS: dict[str, tuple[Callable[..., Any], Callable[..., tuple[list[Pictures], str]]]] = {
    "segment": (load_segmenter, _scenes),
    "detect": (load_detector, _objects),
}
