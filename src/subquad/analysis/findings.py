"""What an analysis comes to: measures, counts and maps of each network."""

import statistics
from dataclasses import dataclass, field

from PIL import Image

from subquad.analysis.network_measures import MeasureRow
from subquad.analysis.small_maps import Looking
from subquad.analysis.survey import Counts
from subquad.text import counted

PAPERS_COUNT = 25
"""Confusions of an image that InLine's figure draws its line at."""


@dataclass(frozen=True)
class Findings:
    """What is found of each network, by its name.

    Attributes:
        rows: of `measure_network`.
        hits: of `count_hits`.
        confusions: of `count_confusions`.
        looks: of `looking`.
        pictures: the images of `looks` as the first network sees them, cropped and at its size.
        images: how many images the measures are of, by network.
    """

    rows: dict[str, list[MeasureRow]] = field(default_factory=dict)
    hits: dict[str, Counts] = field(default_factory=dict)
    confusions: dict[str, Counts] = field(default_factory=dict)
    looks: dict[str, list[list[Looking]]] = field(default_factory=dict)
    pictures: list[Image.Image] = field(default_factory=list)
    images: dict[str, int] = field(default_factory=dict)

    @property
    def looked_at(self) -> str:
        """How many images the networks were measured on, in words."""
        counts = set(self.images.values())
        if len(counts) == 1:
            return counted(counts.pop(), "image")
        return ", ".join(f"{counted(count, 'image')} ({name})" for name, count in self.images.items())

    @property
    def names(self) -> list[str]:
        """Name the networks."""
        return list(dict.fromkeys([*self.rows, *self.hits, *self.confusions]))


def removal_shares(counts: Counts) -> dict[str, float]:
    """Accuracy in percent, by what was removed."""
    return {name: 100 * sum(values) / len(values) for name, values in counts.items()}


def confusion_words(counts: Counts) -> str:
    """How many there are, in a few words."""
    values = counts["confused"]
    many = 100 * sum(value > PAPERS_COUNT for value in values) / len(values)
    return (
        f"{sum(values) / len(values):.1f} confused pairs an image, median {statistics.median(values):g}; "
        f"more than {PAPERS_COUNT} in {many:.1f} % of {len(values)} images"
    )
