"""What a model sees in image files."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from subquad.data import InputConfig, eval_transform
from subquad.errors import SubquadError
from subquad.tasks.accuracy import evaluating
from subquad.tasks.image_files import image_files, readable_pictures

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

    Raises:
        SubquadError: no image can be read, or the model gives no numbers.
    """
    files = image_files([paths] if isinstance(paths, str | Path) else paths)
    transform = eval_transform(input_config)
    predictions: list[Prediction] = []
    bar = tqdm(files, desc="predicting", leave=False, disable=None)
    inputs = readable_images(bar, transform, strict, log)
    with evaluating(model):
        while batch := list(islice(inputs, _BATCH)):
            logits = model(torch.stack([image for _, image in batch]).to(device))
            check_finite(logits, batch[0][0])
            names = _all_named(classes, logits.shape[-1])
            best = logits.float().softmax(-1).cpu().topk(min(top_k, len(names)))
            for (path, _), values, places in zip(batch, best.values.tolist(), best.indices.tolist(), strict=True):
                named = [(names[place], value) for place, value in zip(places, values, strict=True)]
                folder = path.resolve().parent.name
                predictions.append(Prediction(path, named, folder if folder in classes else None))
    return predictions


def readable_images(
    files: Iterable[Path], transform: Callable[..., Tensor], strict: bool, log: Callable[[str], None]
) -> Iterator[tuple[Path, Tensor]]:
    """The files that are images, with the tensors that the model takes; raises as `readable_pictures`."""
    for path, picture in readable_pictures(files, strict=strict, log=log):
        yield path, transform(picture)


def check_finite(answer: Tensor, what: Path | str) -> None:
    """Raise where a network's answer has numbers that are not finite."""
    if not answer.isfinite().all():
        raise SubquadError(f"the network's answer to {what} is not finite: its weights are damaged, or it has diverged")


def _all_named(classes: Sequence[str], outputs: int) -> list[str]:
    """A name for each output: a model may have more of them than its data had classes."""
    if outputs < len(classes):
        raise SubquadError(f"the model tells {outputs} classes apart, but {len(classes)} have names")
    return [*classes, *(f"class {place}" for place in range(len(classes), outputs))]
