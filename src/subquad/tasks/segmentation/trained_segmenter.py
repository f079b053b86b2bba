"""A trained segmenter: judged on data, and asked for label maps and overlays of images."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from tqdm import tqdm

from subquad.data import InputConfig, create_loader
from subquad.models.pretrained import figures_text, released_in
from subquad.ranges import Pixels, height_and_width
from subquad.tasks.accuracy import check_finite, evaluating
from subquad.tasks.class_names import check_classes, numbered
from subquad.tasks.confusion import save_confusion
from subquad.tasks.held_out import HeldOut, evenly_some
from subquad.tasks.image_files import evenly_chosen, plan_outputs, readable_pictures, said_of, save_picture
from subquad.tasks.palette import colour
from subquad.tasks.segmentation.intersection_over_union import (
    SegmentationResult,
    count_pixels,
    evaluate_segmentation,
    judge_confusion,
    segment,
)
from subquad.tasks.segmentation.scene_data import VOID, SceneDataset, are_scenes, load_scenes
from subquad.tasks.segmentation.scene_transforms import SceneInput, SceneTransform, leave_apart
from subquad.tasks.task import Gallery
from subquad.tasks.trained import ImageNetwork, Trained
from subquad.text import columns
from subquad.weights.notes import required, settings_of

OTHER_NAMES = " (if they are the same in this order by other names, take objectInfo*.txt away)"


class MeanIntersection:
    """Counts pixels of scenes, for the mean intersection over union."""

    def __init__(self, num_classes: int):
        self.confusion = torch.zeros(num_classes, num_classes, dtype=torch.long)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: logits (b, classes, y, x), which are brought to the size of labels (b, y, x)."""
        logits = F.interpolate(logits.float(), size=labels.shape[1:], mode="bilinear", align_corners=False)
        found, labels = logits.argmax(1).cpu(), labels.cpu()
        # what is NaN is right nowhere, and argmax takes it for a class
        another = (labels + 1) % len(self.confusion)
        found = torch.where(logits.isnan().any(1).cpu(), another, found)
        self.confusion += count_pixels(found, labels, len(self.confusion))

    @property
    def share(self) -> float:
        """The mean over classes that are there or predicted."""
        return judge_confusion(self.confusion).miou / 100


@dataclass(frozen=True)
class TrainedSegmenter(Trained):
    """A segmenter with what it was trained on.

    Attributes:
        input: how scenes are brought to the network.
        slide: whether it was judged through windows.
        released: what is known of the authors' file that its weights are from; empty for others.
        first_label: the label of the first class in maps that it was trained on, 1 or 0; so it is written.
    """

    input: SceneInput
    slide: bool
    released: Mapping[str, Any] = field(default_factory=dict)
    first_label: int = 1

    def image_network(self, img_size: Pixels | None = None) -> ImageNetwork:
        """Give its backbone with the norms of its maps, which looks at images of the size of its crops."""
        scenes = self.input
        size = scenes.crop if img_size is None else height_and_width(img_size)
        return self.beside(self.model.pyramid, InputConfig(size, mean=scenes.mean, std=scenes.std))

    def held_out(self, *, data_dir: str | None = None, most: int | None = None) -> HeldOut | None:
        """Give its validation scenes, each a batch, to be looked at as wholes; None where nothing says its data."""
        if self.data is None:
            return None
        images = load_scenes(self.data_to_judge(data_dir), split="validation", classes=self.classes)
        check_scenes(images, self.classes)
        images.transform = SceneTransform(self.input)
        some, classes = evenly_some(images, most), len(self.classes)

        def batches(size: int) -> Iterator[tuple[Tensor, Tensor]]:
            for pairs in create_loader(some, batch_size=1, collate=leave_apart):
                for image, labels in pairs:
                    yield image[None], labels[None]

        return HeldOut("mIoU", batches, lambda: MeanIntersection(classes))

    def knows_as_data(self, source: str) -> bool:
        """Whether these are scenes."""
        return are_scenes(source)

    def training_images(self, *, data_dir: str | None = None) -> SceneDataset | None:
        """Give its training scenes; `data_dir` is the folder or archive of all scenes."""
        return load_scenes(self.data_to_judge(data_dir), split="train", classes=self.classes)

    def window(self, slide: bool | None) -> tuple[int, int] | None:
        """The window to look through, None for none; as in training where `slide` is None."""
        return self.input.crop if (self.slide if slide is None else slide) else None


def check_scenes(images: SceneDataset, classes: Sequence[str]) -> None:
    """Raise where scenes have other classes than a network, whose own may have numbers alone, those of the labels."""
    if len(images.classes) != len(classes) or tuple(classes) != numbered(len(classes)):
        check_classes(images.name, images.classes, classes, hint=OTHER_NAMES)


@dataclass(frozen=True)
class SceneJudgement:
    """What `judge_segmenter` found out."""

    result: SegmentationResult
    classes: tuple[str, ...]
    count: int
    images_per_second: float
    broken: list[str]
    device: torch.device
    published: str = ""

    @property
    def text(self) -> str:
        """The figures of all classes and of each, for a terminal."""
        result = self.result
        lines = [
            f"{self.count} images: mIoU {result.miou:.2f} %, pixel accuracy {result.accuracy:.2f} %, "
            f"class accuracy {result.class_accuracy:.2f} %"
        ]
        if self.published:
            lines.append(f"published on ADE20K's validation part: {self.published}")
        if self.broken:
            lines.append(f"{len(self.broken)} broken images were skipped, the first is {self.broken[0]}")
        lines.append(f"{self.images_per_second:.1f} images/s on {self.device}\n\n{iou_text(result, self.classes)}")
        return "\n".join(lines)

    def save(self, path: Path) -> list[Path]:
        """Write the confusion matrix, as .csv and .png."""
        return save_confusion(self.result.confusion, self.classes, path, counted="pixels")


@dataclass(frozen=True)
class SegmentedScene:
    """An image, its labels (height, width), and the share of each class that is there, the largest first."""

    path: Path
    labels: NDArray[np.uint8]
    shares: list[tuple[str, float]]

    @property
    def text(self) -> str:
        """The largest classes in a line."""
        return f"{self.path}: " + ", ".join(f"{name} {100 * share:.0f} %" for name, share in self.shares[:4])


def opened_segmenter(model: nn.Module, note: Mapping[str, Any]) -> TrainedSegmenter:
    """A segmenter with what its note says of its training."""
    # networks of other libraries do not say their data
    classes, slide, settings = required(note, "classes", "slide", "input")
    device, scenes = next(model.parameters()).device, settings_of(SceneInput, settings)
    known, first = (device, scenes, slide, released_in(note)), 0 if note.get("labels_from_zero") else 1
    return TrainedSegmenter("segment", model, tuple(classes), note.get("data"), None, *known, first_label=first)


def judge_segmenter(
    trained: TrainedSegmenter,
    *,
    data: str | None = None,
    split: str = "validation",
    slide: bool | None = None,
    strict: bool = False,
) -> SceneJudgement:
    """Intersection over union on what a segmenter was trained on, or on other scenes with the same classes."""
    images = load_scenes(trained.data_to_judge(data), split=split, classes=trained.classes, strict=strict)
    check_scenes(images, trained.classes)
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
    speed = count / (time.perf_counter() - start)
    published = figures_text(trained.released.get("figures"))
    return SceneJudgement(result, trained.classes, count, speed, images.broken_paths(), trained.device, published)


def predict_scenes(
    trained: TrainedSegmenter,
    images: Path | str | Sequence[Path | str],
    folder: Path,
    *,
    slide: bool | None = None,
    strict: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> Iterator[SegmentedScene]:
    """Segment image files, those in folders included; each gets <name>.png, its labels, and <name>-overlay.png.

    Labels are written as those that it was trained on, with a palette: 1 for the first class, as ADE20K has them, or 0.
    Images of subfolders are written to subfolders.

    Raises:
        SubquadError: no image can be read, two would be written to one file, or the network refuses an image or gives
            no numbers.
    """
    transform = SceneTransform(trained.input)
    planned = {image.path: image.outputs for image in plan_outputs(images, folder, (".png", "-overlay.png"))}
    bar = tqdm(planned, desc="segmenting", leave=False, disable=None)
    for path, picture in readable_pictures(bar, strict=strict, log=log):
        size = picture.size[::-1]
        x = transform(picture, np.zeros(size, np.uint8))[0]
        with said_of(path), evaluating(trained.model):
            logits = segment(trained.model, x.to(trained.device), size, trained.window(slide))
        check_finite(logits, path)
        labels = logits.argmax(0).to(torch.uint8).cpu().numpy()
        pictures = as_labels(labels, trained.first_label), overlay(picture, labels)
        for output, written in zip(planned[path], pictures, strict=True):
            save_picture(written, output)
        counts = np.bincount(labels.ravel(), minlength=len(trained.classes)) / labels.size
        order = [int(place) for place in np.argsort(-counts, kind="stable") if counts[place]]
        yield SegmentedScene(path, labels, [(trained.classes[k], float(counts[k])) for k in order])


def segmented_scenes(
    trained: TrainedSegmenter,
    images: Path | str | Sequence[Path | str],
    log: Callable[[str], None] = lambda line: None,
    *,
    output: Path,
    slide: bool | None = None,
    strict: bool = False,
) -> Iterator[SegmentedScene]:
    """Segment image files as `predict_scenes` does, into the folder `output`."""
    yield from predict_scenes(trained, images, output, slide=slide, strict=strict, log=log)
    log(f"label maps and overlays are in {output}")


def as_labels(labels: NDArray[np.uint8], first_label: int = 1) -> Image.Image:
    """Labels as data write them whose first class has this one, in colours."""
    nothing = 0 if first_label else VOID
    image = Image.fromarray(np.where(labels == VOID, nothing, labels + first_label).astype(np.uint8))
    colours = [list(colour(k)) for k in range(VOID)]
    colours.insert(nothing, [0, 0, 0])
    image.putpalette([part for one in colours for part in one])
    return image


def overlay(picture: Image.Image, labels: NDArray[np.uint8], strength: float = 0.55) -> Image.Image:
    """A picture under the colours of its labels; nothing has none."""
    colours = np.array([colour(k) for k in range(VOID + 1)], dtype=np.float64)[labels]
    base = np.asarray(picture.convert("RGB"), dtype=np.float64)
    mixed = np.where((labels == VOID)[..., None], base, (1 - strength) * base + strength * colours)
    return Image.fromarray(mixed.round().astype(np.uint8))


def iou_text(result: SegmentationResult, classes: Sequence[str]) -> str:
    """The classes with their intersection over union, for a terminal."""
    shares = result.confusion.sum(1) / result.confusion.sum()
    lines = [["class", "IoU %", "pixels %"]]
    for name, iou, share in zip(classes, result.iou, shares.tolist(), strict=True):
        lines.append([name[:40], "" if iou != iou else f"{iou:.2f}", f"{100 * share:.2f}"])
    return columns(lines)


def scene_gallery(networks: Sequence[tuple[str, TrainedSegmenter]], count: int) -> Gallery:
    """Some held-out scenes, their labels, and what networks make of them, as overlays with the mean IoU."""
    images = load_scenes(networks[0][1].data_to_judge(), split="validation", classes=networks[0][1].classes)
    rows = []
    for index in evenly_chosen(len(images), count):
        if (item := images[index]) is None:
            continue
        picture, labels = item
        row = [(picture, "image"), (overlay(picture, labels), "truth")]
        for label, trained in networks:
            x, target = SceneTransform(trained.input)(picture, labels)
            with said_of(Path(images.path(index))), evaluating(trained.model):
                logits = segment(trained.model, x.to(trained.device), labels.shape, trained.window(None))
            found = logits.argmax(0).cpu()
            iou = judge_confusion(count_pixels(found, target, len(trained.classes))).miou
            row.append((overlay(picture, found.numpy().astype(np.uint8)), f"{label} (IoU {iou:.0f} %)"))
        rows.append(row)
    return Gallery(rows, [(name, colour(k)) for k, name in enumerate(images.classes[:40])])
