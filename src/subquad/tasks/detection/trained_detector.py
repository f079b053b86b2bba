"""A trained detector: judged on data, and asked for the objects of images, which it draws."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks
from tqdm import tqdm

from subquad.data import InputConfig, create_loader
from subquad.models.pretrained import figures_text, released_in
from subquad.ranges import Pixels, height_and_width
from subquad.tasks.accuracy import check_finite, evaluating
from subquad.tasks.class_names import check_classes
from subquad.tasks.detection.average_precision import DetectionResult, evaluate_detection
from subquad.tasks.detection.detectors import Detector
from subquad.tasks.detection.object_data import ObjectDataset, load_objects
from subquad.tasks.detection.object_transforms import ObjectTransform, as_lists
from subquad.tasks.image_files import evenly_chosen, plan_outputs, readable_pictures, said_of, save_picture
from subquad.tasks.palette import colour
from subquad.tasks.task import Gallery
from subquad.tasks.trained import ImageNetwork, Trained
from subquad.text import columns
from subquad.weights.notes import required

MOST_SIDE = 512
"""Of the images that a detector's backbone is shown: at those it was trained on, maps do not fit into memory."""


@dataclass(frozen=True)
class TrainedDetector(Trained):
    """A detector with what it was trained on; label k is classes[k - 1].

    Attributes:
        released: what is known of the authors' file that its weights are from; empty for others.
    """

    model: Detector
    released: Mapping[str, Any] = field(default_factory=dict)

    def finder(self, images: ObjectDataset | None = None) -> Any:
        """What finds objects in lists of images of any sizes, a dict for each; labels are those of `images`, if given.

        Raises:
            SubquadError: these have classes that the network does not find.
        """
        if images is not None:
            check_classes(images.name, images.classes, self.classes)
        return self.model

    def image_network(self, img_size: Pixels | None = None) -> ImageNetwork:
        """Give its backbone with the norms of its maps.

        It looks at images of the size that the backbone was made for, cut to 512 px a side.
        """
        pyramid = self.model.pyramid
        height, width = (min(side, MOST_SIDE) for side in pyramid.backbone.img_size)
        size = (height, width) if img_size is None else height_and_width(img_size)
        return self.beside(pyramid, InputConfig(size, mean=self.model.mean, std=self.model.std))


@dataclass(frozen=True)
class ObjectJudgement:
    """What `judge_detector` found out."""

    result: DetectionResult
    classes: tuple[str, ...]
    count: int
    images_per_second: float
    broken: list[str]
    device: torch.device
    published: str = ""

    @property
    def text(self) -> str:
        """The figures of all classes and of each, for a terminal."""
        speed = f"{self.images_per_second:.1f} images/s on {self.device}"
        lines = [f"{self.count} images, {speed}; average precision in %"]
        if self.published:
            lines.append(f"published on COCO's val2017: {self.published}")
        if self.broken:
            lines.append(f"{len(self.broken)} broken images were skipped, the first is {self.broken[0]}")
        return "\n".join([*lines, "", precision_text(self.result, self.classes)])

    def save(self, path: Path) -> list[Path]:
        """Write nothing: all of it fits on a terminal."""
        return []


@dataclass(frozen=True)
class FoundObjects:
    """An image, its objects (class, score, left, top, right, bottom) by score, and where they were drawn."""

    path: Path
    objects: list[tuple[str, float, float, float, float, float]]
    picture: Path

    @property
    def text(self) -> str:
        """How many there are, and some of them, in a line."""
        names = ", ".join(f"{name} {score:.2f}" for name, score, *_ in self.objects[:5])
        return f"{self.path}: {len(self.objects)} objects{': ' if names else ''}{names}"


def opened_detector(model: Detector, note: Mapping[str, Any]) -> TrainedDetector:
    """A detector with what its note says of its training."""
    classes, data = required(note, "classes", "data")
    device = next(model.parameters()).device
    return TrainedDetector("detect", model, tuple(classes), data, None, device, released_in(note))


def judge_detector(
    trained: TrainedDetector,
    *,
    data: str | None = None,
    split: str = "validation",
    strict: bool = False,
) -> ObjectJudgement:
    """Average precision on what a detector was trained on, or on other images with the same classes."""
    images = load_objects(trained.data_to_judge(data), split=split, strict=strict)
    finder = trained.finder(images)
    if finder.has_masks:
        images.check_masks(crowds=True)
    images.transform = ObjectTransform()
    loader = create_loader(images, batch_size=1, collate=as_lists)
    start = time.perf_counter()
    result = evaluate_detection(finder, loader, images.truth, device=trained.device, masks=finder.has_masks)
    count = len(images) - images.num_broken
    speed = count / (time.perf_counter() - start)
    published = figures_text(trained.released.get("figures"))
    return ObjectJudgement(result, images.classes, count, speed, images.broken_paths(), trained.device, published)


def predict_objects(
    trained: TrainedDetector,
    images: Path | str | Sequence[Path | str],
    folder: Path,
    *,
    threshold: float = 0.5,
    strict: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> Iterator[FoundObjects]:
    """Find the objects of image files, those in folders included; each is drawn to <name>-objects.png in `folder`.

    Images of subfolders are written to subfolders. A `threshold` below 0.05 finds no more than 0.05 does: our detectors
    keep no box of a lower score; those of other libraries whose queries are objects do.

    Raises:
        SubquadError: no image can be read, two would be written to one file, or the network refuses an image or gives
            no numbers.
    """
    planned = {image.path: image.outputs[0] for image in plan_outputs(images, folder, ("-objects.png",))}
    bar = tqdm(planned, desc="detecting", leave=False, disable=None)
    for path, picture in readable_pictures(bar, strict=strict, log=log):
        with said_of(path):
            found = find_objects(trained, picture, threshold)
        check_finite(found["boxes"], path)
        save_picture(draw_objects(picture, found, trained.classes), planned[path])
        rows = zip(found["labels"].tolist(), found["scores"].tolist(), found["boxes"].tolist(), strict=True)
        objects: Any = [(trained.classes[label - 1], score, *box) for label, score, box in rows]
        yield FoundObjects(path, objects, planned[path])


def detected_objects(
    trained: TrainedDetector,
    images: Path | str | Sequence[Path | str],
    log: Callable[[str], None] = lambda line: None,
    *,
    output: Path,
    threshold: float = 0.5,
    strict: bool = False,
) -> Iterator[FoundObjects]:
    """Find the objects of image files as `predict_objects` does, into the folder `output`."""
    yield from predict_objects(trained, images, output, threshold=threshold, strict=strict, log=log)
    log(f"the pictures are in {output}")


def find_objects(trained: TrainedDetector, picture: Image.Image, threshold: float) -> dict[str, Tensor]:
    """What a detector finds in a picture with a score of at least `threshold`: boxes, labels, scores, perhaps masks."""
    x = transforms.to_dtype(transforms.pil_to_tensor(picture), torch.float32, scale=True)
    finder = trained.finder()
    with evaluating(finder):
        found = finder([x.to(trained.device)])[0]
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


_SURE = 0.5
"""The score from which on objects are shown in a gallery."""


def object_gallery(networks: Sequence[tuple[str, TrainedDetector]], count: int) -> Gallery:
    """Some held-out images with their objects, and those that networks find."""
    images = load_objects(networks[0][1].data_to_judge(), split="validation")
    rows = []
    for index in evenly_chosen(len(images), count):
        if (item := images[index]) is None:
            continue
        picture, target = item
        row = [(draw_objects(picture, target, images.classes), f"truth: {len(target['labels'])} objects")]
        for label, trained in networks:
            with said_of(images.paths[index]):
                found = find_objects(trained, picture, _SURE)
            drawn = draw_objects(picture, found, trained.classes)
            row.append((drawn, f"{label}: {len(found['labels'])} with a score of at least {_SURE}"))
        rows.append(row)
    return Gallery(rows, [])
