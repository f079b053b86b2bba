"""What a model sees in image files."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from subquad.data import BrokenImageError, InputConfig, eval_transform, find_images, read_image
from subquad.errors import SubquadError
from subquad.evaluation.accuracy import evaluating

_BATCH = 64


@dataclass(frozen=True)
class Prediction:
    """The likeliest classes of an image, the first the likeliest; `true` is the class whose folder it lies in."""

    path: Path
    probabilities: list[tuple[str, float]]
    true: str | None

    @property
    def name(self) -> str:
        """The likeliest class."""
        return self.probabilities[0][0]

    @property
    def is_wrong(self) -> bool:
        """Whether the true class is known and another."""
        return self.true is not None and self.true != self.name


def predict(
    model: nn.Module,
    paths: Path | str | Iterable[Path | str],
    *,
    classes: Sequence[str],
    input_config: InputConfig,
    top_k: int = 5,
    device: torch.device | str = "cpu",
    strict: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> list[Prediction]:
    """Classify images.

    Args:
        model: gives a logit a class.
        paths: image files, and folders in which all images are meant.
        classes: names of the classes.
        input_config: what the model was trained to see.
        top_k: how many classes to name.
        device: where `model` is.
        strict: raise at a broken image instead of skipping it.
        log: gets a line for each image that is skipped.
    """
    files = image_files([paths] if isinstance(paths, str | Path) else paths)
    transform = eval_transform(input_config)
    predictions: list[Prediction] = []
    bar = tqdm(files, desc="predicting", leave=False, disable=None)
    inputs = readable_images(bar, transform, strict, log)
    with evaluating(model):
        while batch := list(islice(inputs, _BATCH)):
            logits = model(torch.stack([image for _, image in batch]).to(device))
            names = _all_named(classes, logits.shape[-1])
            best = logits.float().softmax(-1).cpu().topk(min(top_k, len(names)))
            for (path, _), values, places in zip(batch, best.values.tolist(), best.indices.tolist(), strict=True):
                named = [(names[place], value) for place, value in zip(places, values, strict=True)]
                folder = path.resolve().parent.name
                predictions.append(Prediction(path, named, folder if folder in classes else None))
    if not predictions:
        raise SubquadError(f"none of {len(files)} images can be read, the first is {files[0]}")
    return predictions


def readable_images(
    files: Iterable[Path], transform: Callable[..., Tensor], strict: bool, log: Callable[[str], None]
) -> Iterable[tuple[Path, Tensor]]:
    """The files that are images, with the tensors that the model takes."""
    for path in files:
        try:
            yield path, transform(read_image(path))
        except BrokenImageError as error:
            message = f"broken image {path}: {error}"
            if strict:
                raise BrokenImageError(message) from None
            log(f"skipped {message}")


def _all_named(classes: Sequence[str], outputs: int) -> list[str]:
    """A name for each output: a model may have more of them than its data had classes."""
    if outputs < len(classes):
        raise SubquadError(f"the model tells {outputs} classes apart, but {len(classes)} have names")
    return [*classes, *(f"class {place}" for place in range(len(classes), outputs))]


def image_files(paths: Iterable[Path | str]) -> list[Path]:
    """Image files, those in folders included."""
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found = find_images(path)
            if not found:
                raise SubquadError(f"folder {path} has no images")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise SubquadError(f"there is no image or folder {path}")
    if not files:
        raise SubquadError("no images to predict: name image files or a folder")
    return files
