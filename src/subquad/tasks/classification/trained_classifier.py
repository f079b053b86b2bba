"""A trained classifier, and its judgement on its data."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from subquad.data import ImageDataset, InputConfig, create_loader, eval_transform, load_dataset
from subquad.data.imagenet_names import is_imagenet, places_of
from subquad.errors import SubquadError
from subquad.tasks.accuracy import EvalResult, TopOne, evaluate
from subquad.tasks.class_names import all_named, check_classes, numbered
from subquad.tasks.classification.published_figures import published_text
from subquad.tasks.classification.throughput import measure_throughput
from subquad.tasks.confusion import confusion_text, save_confusion
from subquad.tasks.held_out import HeldOut, evenly_some
from subquad.tasks.trained import ImageNetwork
from subquad.weights.notes import required, settings_of


@dataclass(frozen=True)
class TrainedClassifier(ImageNetwork):
    """A classifier with what it was trained on."""

    def held_out(self, *, data_dir: str | None = None, most: int | None = None) -> HeldOut | None:
        """Give its validation images; None where nothing says what it was trained on."""
        if self.data is None:
            return None
        images = evenly_some(images_of(self, data_dir=data_dir), most)
        return HeldOut("top-1", lambda size: iter(create_loader(images, batch_size=size)), TopOne)


@dataclass(frozen=True)
class ClassJudgement:
    """What `judge` found out."""

    result: EvalResult
    classes: tuple[str, ...]
    images_per_second: float
    batch_size: int
    broken: list[str]
    device: torch.device
    published: str = ""

    @property
    def text(self) -> str:
        """Accuracy, confusion and throughput, for a terminal."""
        result = self.result
        lines = [f"{result.count} images: top-1 {result.top1:.2f} %, top-5 {result.top5:.2f} %, loss {result.loss:.4f}"]
        if self.published:
            lines.append(self.published)
        if self.broken:
            lines.append(f"{len(self.broken)} broken images were skipped, the first is {self.broken[0]}")
        lines.append(f"throughput {self.images_per_second:.0f} images/s on {self.device}, batch {self.batch_size}\n")
        return "\n".join([*lines, confusion_text(result.confusion, self.classes)])

    def save(self, path: Path) -> list[Path]:
        """Write the confusion matrix, as .csv and .png."""
        return save_confusion(self.result.confusion, self.classes, path)


def opened_classifier(model: nn.Module, note: Mapping[str, Any], recipe: Mapping[str, Any]) -> ImageNetwork:
    """A classifier with what its note, and the recipe beside it, say of its training."""
    classes, settings = required(note, "classes", "input")
    size: Any = getattr(model, "img_size", None)
    # a network of others does not say it, but its note does
    config = settings_of(InputConfig, settings, **({} if size is None else {"img_size": size}))
    data, device = recipe.get("data", note.get("data")), next(model.parameters()).device
    released = note.get("released")
    about = released if isinstance(released, dict) else {}
    return TrainedClassifier("classify", model, tuple(classes), data, recipe.get("data_dir"), device, config, about)


def check_head(trained: ImageNetwork) -> None:
    """Raise where a network tells no classes apart, as DINOv2: its features are not their probabilities."""
    if getattr(trained.model, "num_classes", None) == 0:
        raise SubquadError(
            "the network has features and no classes: `subquad analyze` looks into it, `subquad stream --features` "
            "writes what it sees, and `subquad convert --labelled DATA` judges features by simple classifiers"
        )


def judge(
    trained: ImageNetwork,
    *,
    data: str | None = None,
    data_dir: str | None = None,
    split: str = "validation",
    batch_size: int = 64,
    workers: int = 0,
    strict: bool = False,
) -> ClassJudgement:
    """Accuracy and speed of a network, on what it was trained on or on other data with the same classes."""
    images = images_of(trained, data=data, data_dir=data_dir, split=split, strict=strict)
    loader = create_loader(images, batch_size=batch_size, workers=workers)
    num_classes: Any = trained.model.num_classes
    result = evaluate(trained.model, loader, device=trained.device, num_classes=num_classes)
    if not math.isfinite(result.loss):
        raise SubquadError(
            f"the network's answers to {images.name} are not finite: its weights are damaged, or it has diverged"
        )
    speed = measure_throughput(trained.model, trained.input.img_size, batch_size, trained.device)
    names = tuple(all_named(trained.classes, num_classes))
    published = published_text(trained.released, result)
    return ClassJudgement(result, names, speed, batch_size, images.broken_paths(), trained.device, published)


def images_of(
    trained: ImageNetwork,
    *,
    data: str | None = None,
    data_dir: str | None = None,
    split: str = "validation",
    strict: bool = False,
) -> ImageDataset:
    """The images that a network is judged on, as it takes them."""
    name = trained.data_to_judge(data)
    images = load_dataset(name, split=split, data_dir=data_dir or (None if data else trained.data_dir), strict=strict)
    count = getattr(trained.model, "num_classes", None)
    if is_imagenet(trained.classes) and tuple(images.classes) != tuple(trained.classes):
        # fewer classes, or by their names in words
        places = places_of(name, images.classes)
        images.classes, images.labels = trained.classes, [places[label] for label in images.labels]
    elif trained.classes:
        if tuple(images.classes) != trained.classes and set(images.classes) == set(trained.classes):
            # a network that was trained elsewhere may have them in another order
            places = [trained.classes.index(one) for one in images.classes]
            images.classes, images.labels = trained.classes, [places[label] for label in images.labels]
        check_classes(name, images.classes, trained.classes)
    elif count == IMAGENETS and len(images.classes) != count:
        places = places_of(name, images.classes)
        images.classes, images.labels = numbered(count), [places[label] for label in images.labels]
    elif count and len(images.classes) != count:
        raise SubquadError(
            f"{name} has {len(images.classes)} classes, and the model tells {count} apart and has no names for them: "
            "which are which is not known"
        )
    elif count:
        _say_order(name, images.classes)
    images.transform = eval_transform(trained.input)
    return images


IMAGENETS = 1000
"""How many classes ImageNet-1k has."""


def _say_order(name: str, classes: Sequence[str]) -> None:
    """Warn where libraries put folders in another order, by which a network without names may have been trained."""
    others = sorted(classes)
    if list(classes) != others:
        ours, theirs = (", ".join([*order[:3], "…"]) for order in (classes, others))
        warnings.warn(
            f"the model has no names of classes, and those of {name} are taken in the order {ours}; where it was "
            f"trained by torchvision or timm, theirs was {theirs}: let its label_names say so",
            stacklevel=3,
        )
