"""A trained network from its run folder or from a weight file alone, and its judgement on its data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from subquad.data import ImageDataset, InputConfig, create_loader, eval_transform, load_dataset
from subquad.data.imagenet_names import is_imagenet, places_of
from subquad.errors import SubquadError
from subquad.evaluation.accuracy import EvalResult, evaluate
from subquad.evaluation.classes import check_classes
from subquad.evaluation.throughput import measure_throughput
from subquad.evaluation.timm_classifiers import load_timm
from subquad.models import restore_model, weight_file
from subquad.models.pretrained import source_of
from subquad.models.restoring import naming
from subquad.reading import read_yaml
from subquad.weights.notes import required, settings_of


@dataclass(frozen=True)
class Trained:
    """A network with what it was trained on.

    Attributes:
        model: in evaluation mode, on `device`.
        classes: their names, in the order of the logits; none where they are not known.
        input: how images are brought to the network.
        data, data_dir: what it was trained on; None where the file does not say.
    """

    model: nn.Module
    classes: tuple[str, ...]
    input: InputConfig
    data: str | None
    data_dir: str | None
    device: torch.device

    @property
    def fingerprint(self) -> str:
        """A few digits that networks with other weights do not have."""
        total = torch.zeros((), dtype=torch.float64)
        for place, parameter in enumerate(self.model.parameters(), start=1):
            total += place * parameter.detach().double().cpu().abs().mean()
        return f"{float(total):.12g}"


@dataclass(frozen=True)
class Judgement:
    """What `judge` found out."""

    result: EvalResult
    classes: tuple[str, ...]
    images_per_second: float
    broken: list[str]
    device: torch.device


def load_trained(path: Path | str, *, img_size: int | None = None) -> Trained:
    """The best weights of a run folder, or a weight file that training wrote, on the fastest device there is.

    Images are brought to the size that it was trained at, or to `img_size`. "timm/NAME" and "timm/NAME=FILE" are
    networks of timm's, see `load_timm`; "pretrained/NAME" stands for the authors' weights, see `pretrained_file`.
    """
    if str(path).startswith("timm/"):
        return trained_on(*load_timm(str(path).removeprefix("timm/"), img_size))
    file = weight_file(source_of(path))
    model, note = restore_model(file)
    size: Any = model.img_size if img_size is None else (img_size, img_size)
    with naming(file):
        classes, settings = required(note, "classes", "input")
        config = settings_of(InputConfig, settings, img_size=size)
    named = recipe_beside(file.parent)
    return trained_on(model, config, tuple(classes), named.get("data", note.get("data")), named.get("data_dir"))


def trained_on(
    model: nn.Module,
    config: InputConfig,
    classes: tuple[str, ...] = (),
    data: str | None = None,
    data_dir: str | None = None,
) -> Trained:
    """A network on the fastest device there is, with what is known of its training."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Trained(model.eval().to(device), classes, config, data, data_dir, device)


def judge(
    trained: Trained,
    *,
    data: str | None = None,
    data_dir: str | None = None,
    split: str = "validation",
    batch_size: int = 64,
    workers: int = 0,
    strict: bool = False,
) -> Judgement:
    """Accuracy and speed of a network, on what it was trained on or on other data with the same classes."""
    images = images_of(trained, data=data, data_dir=data_dir, split=split, strict=strict)
    loader = create_loader(images, batch_size=batch_size, workers=workers)
    num_classes: Any = trained.model.num_classes
    result = evaluate(trained.model, loader, device=trained.device, num_classes=num_classes)
    speed = measure_throughput(trained.model, trained.input.img_size, batch_size, trained.device)
    # a head may have more outputs than the data has classes
    names = (*trained.classes, *(f"class {place}" for place in range(len(trained.classes), num_classes)))
    return Judgement(result, names, speed, images.broken_paths(), trained.device)


def images_of(
    trained: Trained,
    *,
    data: str | None = None,
    data_dir: str | None = None,
    split: str = "validation",
    strict: bool = False,
) -> ImageDataset:
    """The images that a network is judged on, as it takes them."""
    name = data or trained.data
    if name is None:
        raise SubquadError("the weight file does not say what it was trained on: name the data")
    images = load_dataset(name, split=split, data_dir=data_dir or (None if data else trained.data_dir), strict=strict)
    if is_imagenet(trained.classes) and tuple(images.classes) != tuple(trained.classes):
        # fewer classes, or by their names in words
        places = places_of(name, images.classes)
        images.classes, images.labels = trained.classes, [places[label] for label in images.labels]
    elif trained.classes:
        check_classes(name, images.classes, trained.classes)
    images.transform = eval_transform(trained.input)
    return images


def recipe_beside(folder: Path) -> dict[str, Any]:
    """What the recipe of a run folder says, nothing where there is none.

    Raises:
        SubquadError: it is damaged.
    """
    file = folder / "recipe.yaml"
    if not file.is_file():
        return {}
    content = read_yaml(file)
    if not isinstance(content, dict):
        raise SubquadError(f"{file} is damaged: it must hold lines of `field: value`")
    return content
