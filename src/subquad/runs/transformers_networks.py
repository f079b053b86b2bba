"""transformers' networks called with images alone, as ours are: classifiers, segmenters, of depth, encoders."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.errors import SubquadError
from subquad.tasks import TASKS
from subquad.text import one_line

SEGMENTER = "ForSemanticSegmentation"
"""What the names of those end with that tell classes of places."""

DEPTH = "ForDepthEstimation"
"""What the names of those end with that give a depth of each place."""

UNCLASSED = {"Model": "last_hidden_state", DEPTH: "predicted_depth"}
"""What those answer with that have no classes, by what their names end with."""


class NetworkOfTransformers(nn.Module):
    """A network of transformers that is called with images alone, as ours are: it answers with classes or features.

    Attributes:
        network: transformers' own.
        num_classes: of its answers (b, classes), or of those of its places; 0 where it has none, and answers with its
            last tokens (b, n, c), its last map (b, c, y, x) or depths (b, y, x).
        answer: what is taken of transformers' answer.
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        name = type(network).__name__
        self.answer = next((taken for end, taken in UNCLASSED.items() if name.endswith(end)), "logits")
        self.num_classes = network.config.num_labels if self.answer == "logits" else 0
        # networks whose tables are for one size resample them where they are asked to
        self.is_asked_to_resample = "interpolate_pos_encoding" in inspect.signature(network.forward).parameters

    def forward(self, x: Tensor) -> Tensor:
        """Scores of classes (b, classes), the last tokens (b, n, c) or depths, of images (b, c, height, width)."""
        return self._answered(x)

    def features_and_logits(self, x: Tensor) -> dict[str, Tensor]:
        """What is compared with another network's: "features", the last tokens, and "logits"; "depth" (b, 1, y, x)."""
        if not self.num_classes:
            answers = self._answered(x)
            return {"features": answers} if self.answer == "last_hidden_state" else {"depth": answers.unsqueeze(1)}
        encoder = self.encoder
        if encoder is None:
            return {"logits": self._answered(x)}
        with _heard(encoder) as heard:
            logits = self._answered(x)
        return {"features": heard[0].last_hidden_state, "logits": logits}

    @property
    def as_it_is_walked(self) -> Any:
        """What can be taken some rows at a time: transformers' own network."""
        return self.network

    @property
    def encoder(self) -> Any:
        """The part of transformers' network that gives its last tokens or map; None where nothing is called so."""
        part = self.network.base_model
        return part if not self.num_classes or part is not self.network else None

    def _answered(self, x: Tensor) -> Tensor:
        more = {"interpolate_pos_encoding": True} if self.is_asked_to_resample else {}
        answered = self.network(pixel_values=x, **more)
        answers: Tensor = answered[self.answer]
        return answers


class SegmenterOfTransformers(NetworkOfTransformers):
    """One whose answers are classes of every pixel, as those of our segmenters."""

    @property
    def pyramid(self) -> nn.Module:
        """What there is to look into: its encoder, called with images alone, or all of it where it has none."""
        return self if self.encoder is None else NetworkOfTransformers(self.encoder)

    def forward(self, x: Tensor) -> Tensor:
        """Scores (b, classes, height, width) of the pixels of images (b, c, height, width)."""
        logits = self._answered(x)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.interpolate(wide, size=x.shape[-2:], mode="bilinear", align_corners=False)


@contextmanager
def _heard(module: nn.Module) -> Iterator[list[Any]]:
    """What a module answers inside this context."""
    answers: list[Any] = []
    hook = module.register_forward_hook(lambda _, arguments, answer: answers.append(answer))
    try:
        yield answers
    finally:
        hook.remove()


def make_transformers(name: str, *, config: Any = None, num_classes: int = 0, **more: Any) -> nn.Module:
    """A network of transformers without weights, as the note of a conversion says.

    Raises:
        SubquadError: transformers is not there, or has no such network.
    """
    cls = class_named(name, "its note")
    if not isinstance(config, Mapping) or more:
        raise SubquadError("its note does not say how the network was made")
    labels = {"num_labels": num_classes} if num_classes else {}
    return called_with_images(cls(cls.config_class.from_dict({**config, **labels})))


def called_with_images(network: Any) -> NetworkOfTransformers:
    """A network of transformers, to be called as ours of its task are."""
    is_segmenter = type(network).__name__.endswith(SEGMENTER)
    return (SegmenterOfTransformers if is_segmenter else NetworkOfTransformers)(network)


NAMING = ("id2label", "label2id", "transformers_version", "architectures", "_name_or_path", "auto_map")
"""What is not about how a network is made; names of classes are in the note itself."""


def of_making(config: Any) -> dict[str, Any]:
    """What a configuration says otherwise than its class, of how the network is made."""
    return {key: value for key, value in config.to_diff_dict().items() if key not in NAMING}


def task_of(name: str) -> Any:
    """The task that a class of transformers of this name is for; None where there is none."""
    return next((task for task in TASKS.usable() if name.endswith(task.of_transformers)), None)


def class_named(name: str, where: str) -> Any:
    """A class of transformers' own for images: one that tells classes of them or of their places, or gives tokens.

    Raises:
        SubquadError: there is none of this name, or it does something else.
    """
    try:
        import transformers
    except ImportError:
        raise SubquadError(
            f"{where} is of a network of transformers, which is not installed: pip install transformers"
        ) from None
    cls = getattr(transformers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise SubquadError(f"{where}: transformers {transformers.__version__} has no network '{one_line(name, 60)}'")
    if cls.main_input_name != "pixel_values" or task_of(name) is None:
        raise SubquadError(
            f"{where} is of a {name}: commands take classifiers, semantic segmenters, networks of depth and "
            "encoders; others are opened by transformers and given to subquad.convert(network, …)"
        )
    return cls
