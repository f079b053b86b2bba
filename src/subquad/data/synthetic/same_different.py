"""Same or different: an image with two small random patterns, which are equal or not.

To tell, each place of the one has to be compared with the same place of the other, `distance` pixels away: what is near
a place says nothing. After the first problem of the synthetic visual reasoning test (Fleuret et al. 2011).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.data.synthetic.generation import check_size, drawn_part, part_of
from subquad.data.synthetic.pathfinder import SPLITS
from subquad.errors import SubquadError
from subquad.ranges import Count, Positive, checks_arguments

CLASSES = ("different", "same")

_SIDE = 8
"""Pixels of a side of a pattern."""


@dataclass(frozen=True)
class Setting:
    """What is drawn.

    Attributes:
        size: pixels of a side.
        distance: pixels between the middles of the two, across or down, whichever is more.
        cells: of a side of a pattern, of 8 pixels together: the more, the more there is to compare. Patterns that are
            not equal differ in at least three of eight of them.
    """

    size: int = 32
    distance: int = 12
    cells: int = 2

    def __post_init__(self) -> None:
        if self.cells not in (2, 4, 8):
            raise SubquadError(f"a pattern has 2, 4 or 8 cells a side, got {self.cells}")
        most = self.size - _SIDE
        if not _SIDE + 1 <= self.distance <= most:
            raise SubquadError(
                f"on {self.size} px patterns are {_SIDE + 1} to {most} px apart, got {self.distance}: "
                "take a larger size"
            )


def draw_images(setting: Setting, seed: int, chunk: int, count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The images (count, size, size) of a chunk and whether their patterns are equal (count,), from a seed."""
    rng = np.random.default_rng([seed, chunk, setting.size, setting.distance, setting.cells])
    labels = rng.integers(0, 2, count)
    first = rng.integers(0, 2, (count, setting.cells**2)).astype(bool)
    # of the cells, in a random order, so many are turned over
    order = rng.random(first.shape).argsort(1)
    turned = rng.integers(math.ceil(3 / 8 * setting.cells**2), setting.cells**2 + 1, count) * (labels == 0)
    second = first ^ (order < turned[:, None])
    # one step is `distance`, the other anything up to it
    step = np.stack([np.full(count, setting.distance), rng.integers(0, setting.distance + 1, count)], 1)
    step = np.where(rng.integers(0, 2, (count, 1)) == 1, step, step[:, ::-1])
    corner = rng.integers(0, setting.size - _SIDE - step + 1)
    # as often rising as falling
    flipped = rng.integers(0, 2, count) == 1
    start, end = corner.copy(), corner + step
    start[flipped, 0], end[flipped, 0] = end[flipped, 0], start[flipped, 0]
    images = np.full((count, setting.size, setting.size), 64, np.uint8)
    pixels = _SIDE // setting.cells
    rows, around = np.arange(count)[:, None, None], np.arange(_SIDE)
    for place, cells in ((start, first), (end, second)):
        pattern = cells.reshape(count, setting.cells, setting.cells).repeat(pixels, 1).repeat(pixels, 2)
        y, x = (place[:, axis, None] + around for axis in (0, 1))
        images[rows, y[:, :, None], x[:, None, :]] = np.where(pattern, 255, 0)
    return images, labels


@checks_arguments
def load_same_different(
    split: str, *, count: Positive = 20_000, seed: Count = 0, most: Positive | None = None, **settings: Any
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """A part of `count` images (n, size, size) and labels (n,), which are drawn once and kept in the data folder.

    Args:
        split: "train", "validation" or "test": 80, 10 and 10 % of them.
        count: of all three together.
        seed: of the drawing.
        most: only the first of the part, so many at least: the rest need not be drawn.
        settings: those of `Setting`.
    """
    setting, part = checks_arguments(Setting)(**settings), part_of(split, SPLITS, count)
    check_size("images", count, setting.size**2)
    name = f"same_different-{seed}-{count}-{setting.size}-{setting.distance}-{setting.cells}"
    return drawn_part(name, partial(draw_images, setting), part, seed=seed, count=count, most=most)
