"""A trained network's own held-out data: what other networks in its place are judged on, and by which figure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import Subset


class Tally(Protocol):
    """Counts what a network says of batches, and makes one share of it."""

    @property
    def add(self) -> Callable[..., None]:
        """Count a batch: those answers that it is for, as logits (b, classes, …), and labels (b, …)."""

    @property
    def share(self) -> float:
        """The figure, from 0 to 1."""


@dataclass(frozen=True)
class HeldOut:
    """Data that a network was not trained on, as it takes them.

    Attributes:
        measure: the name of the figure, as "top-1".
        batches: begins anew at each call, with so many images of a batch at most: images (b, c, y, x) and labels.
        tally: a fresh one.
        counted: the names of those of a network's answers that it is given, in front of labels.
    """

    measure: str
    batches: Callable[[int], Iterator[tuple[Tensor, Tensor]]]
    tally: Callable[[], Tally]
    counted: tuple[str, ...] = ("logits",)


def evenly_some(images: Any, most: int | None) -> Any:
    """At most so many of a data set, from all parts of it."""
    if most is None or most >= len(images):
        return images
    return Subset(images, [place * len(images) // most for place in range(most)])
