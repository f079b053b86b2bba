"""transformers' networks called with images alone, as ours are: classifiers, encoders, networks of depth.

Tasks whose networks answer otherwise have classes of their own.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

DEPTH = "ForDepthEstimation"
"""What the names of those end with that give a depth of each place."""

UNCLASSED = {"Model": "last_hidden_state", DEPTH: "predicted_depth"}
"""What those answer with that have no classes, by what their names end with."""


RESAMPLE = {"interpolate_pos_encoding": True}


def told_of_any_size(network: nn.Module) -> dict[str, bool]:
    """What networks whose tables are for one size are told, by name, so that they resample them for others."""
    return RESAMPLE if RESAMPLE.keys() <= inspect.signature(network.forward).parameters.keys() else {}


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
        self.is_asked_to_resample = bool(told_of_any_size(network))

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
        with heard_from(encoder) as heard:
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
        more = RESAMPLE if self.is_asked_to_resample else {}
        answers: Tensor = self.network(pixel_values=x, **more)[self.answer]
        return answers


class DenseOfTransformers(NetworkOfTransformers):
    """One whose answers are of places or of objects, told by names; it is looked into below its head."""

    @property
    def pyramid(self) -> nn.Module:
        """What there is to look into: its encoder, called with images alone, or all of it where it has none."""
        return self if self.encoder is None else NetworkOfTransformers(self.encoder)


@contextmanager
def heard_from(module: nn.Module) -> Iterator[list[Any]]:
    """What a module answers inside this context."""
    answers: list[Any] = []
    hook = module.register_forward_hook(lambda _, arguments, answer: answers.append(answer))
    try:
        yield answers
    finally:
        hook.remove()
