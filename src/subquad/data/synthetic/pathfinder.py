"""Pathfinder: are two discs joined by a dashed path, among dashed paths that distract?

Linsley et al. 2018 (arXiv 1805.08315), Kim et al. 2019 (arXiv 1906.01558); the sets of the Long Range Arena (Tay et al.
2020, arXiv 2011.04006) have contours of 6, 9 and 14 dashes on 32×32 pixels. Drawn here by rules of our own after their
description: the statistics of the released images are met (`tests/data/test_pathfinder.py`), the images are others.

A contour is a chain of dashes of 2 pixels, each near the direction of the last. Two contours grow at a time, from tails
that are near each other; one disc marks the tail of the one, the other its head (joined) or the head of the other.
Thousands of attempts are made at once, since few of them find room.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.data.synthetic.dashed_paths import REACH, SIDE, Canvas, Snakes, first_dash, grow
from subquad.data.synthetic.generation import check_size, drawn_part, part_of
from subquad.errors import SubquadError
from subquad.ranges import Count, Positive, checks_arguments

CLASSES = ("apart", "joined")

TAILS_APART = 7
TARGET, DISTRACTOR = 1.5, 2.0
"""Brightness of dashes, before all is stretched to 255: discs have 1."""

DISTRACTOR_TRIES = 5
_ATTEMPTS = 4096
_MOST_SIDE = 512
"""Pixels, of which the attempts take 13 GB."""


@dataclass(frozen=True)
class Setting:
    """What is drawn.

    Attributes:
        size: pixels of a side.
        contour_length: dashes of a contour.
        distractors: distracting contours; by default as many as the released sets have, in proportion to the area.
        distractor_length: dashes of one of them; a third of a contour by default.
    """

    size: int = 32
    contour_length: int = 14
    distractors: int | None = None
    distractor_length: int | None = None

    def __post_init__(self) -> None:
        if not 24 <= self.size <= _MOST_SIDE:
            least = "at least 24" if self.size < 24 else f"at most {_MOST_SIDE}"
            raise SubquadError(f"paths need an image of {least} pixels, got {self.size}")
        # two contours of more dashes hardly ever find room
        most = self.size**2 // 64
        if not 2 <= self.contour_length <= most:
            raise SubquadError(
                f"on {self.size} px a contour has 2 to {most} dashes, got {self.contour_length}: take a larger size"
            )
        for name in ("distractors", "distractor_length"):
            value = getattr(self, name)
            if value is not None and value < (name == "distractor_length"):
                raise SubquadError(f"{name} must be at least {int(name == 'distractor_length')}, got {value}")

    @property
    def dashes(self) -> int:
        """Give the dashes of a distractor."""
        return self.distractor_length or max(1, self.contour_length // 3)

    @property
    def count(self) -> int:
        """Give the number of distractors."""
        return round(20 / self.dashes * (self.size / 32) ** 2) if self.distractors is None else self.distractors


def draw_images(setting: Setting, seed: int, chunk: int, count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The images (count, size, size) of a chunk and whether their discs are joined (count,), from a seed."""
    rng = np.random.default_rng([seed, chunk, setting.size, setting.contour_length])
    found = _join(list(_take(_pairs(rng, setting), count)))
    canvas, first, second = found.canvas, found.first, found.second
    canvas.keep(slice(count))
    labels = rng.integers(0, 2, count)
    swap = rng.integers(0, 2, count).astype(bool)[:, None]
    first, second = first.keep(slice(count)), second.keep(slice(count))
    tail = np.where(swap, second.tail, first.tail)
    own, other = np.where(swap, second.head, first.head), np.where(swap, first.head, second.head)
    for _ in range(setting.count):
        _distract(canvas, rng, setting)
    _discs(canvas, np.stack([tail, np.where(labels[:, None] == 1, own, other)], 1))
    frame = slice(REACH, -REACH)
    ink = canvas.ink[:, frame, frame]
    return np.rint(255 * ink / ink.max((1, 2), keepdims=True)).astype(np.uint8), labels


@dataclass
class _Pair:
    canvas: Canvas
    first: Snakes
    second: Snakes


def _take(pairs: Iterator[_Pair], count: int) -> Iterator[_Pair]:
    """As many batches as hold `count` images."""
    while count > 0:
        pair = next(pairs)
        count -= len(pair.canvas.ink)
        yield pair


def _join(pairs: list[_Pair]) -> _Pair:
    canvas = Canvas(0, pairs[0].canvas.size)
    for name in ("ink", "mask", "near"):
        setattr(canvas, name, np.concatenate([getattr(pair.canvas, name) for pair in pairs]))
    snakes = [
        Snakes(*(np.concatenate([getattr(getattr(p, who), part) for p in pairs]) for part in ("tail", "head", "shape")))
        for who in ("first", "second")
    ]
    return _Pair(canvas, *snakes)


def _pairs(rng: np.random.Generator, setting: Setting) -> Iterator[_Pair]:
    """Images with two whole contours, without end."""
    misses = 0
    while misses < 100:
        misses += 1
        pair = _seeded(rng, setting)
        for _ in range(setting.contour_length - 1):
            for who in ("first", "second"):
                snakes: Snakes = getattr(pair, who)
                grown, shape, head = grow(pair.canvas, rng, snakes)
                # the last dash takes its room only now: the new one begins beside it
                rows = np.arange(len(grown))
                pair.canvas.occupy(rows, snakes.head, snakes.shape)
                pair.canvas.draw(rows[grown], head[grown], shape[grown], TARGET)
                setattr(pair, who, Snakes(snakes.tail, head, shape))
                pair.canvas.keep(grown)
                pair.first, pair.second = pair.first.keep(grown), pair.second.keep(grown)
        if len(pair.canvas.ink):
            rows = np.arange(len(pair.canvas.ink))
            for snakes in (pair.first, pair.second):
                pair.canvas.occupy(rows, snakes.head, snakes.shape)
            misses = 0
            yield pair
    raise SubquadError(
        f"two contours of {setting.contour_length} dashes found no room on {setting.size} px: take a larger size"
    )


def _seeded(rng: np.random.Generator, setting: Setting) -> _Pair:
    """Images with the first dashes of two contours."""
    canvas = Canvas(_ATTEMPTS, setting.size)
    middle = 2 * TAILS_APART
    low, high = (middle, setting.size - middle) if setting.size > 2 * middle else (setting.size // 2,) * 2
    first_tail = rng.integers(low, max(high, low + 1), (_ATTEMPTS, 2))
    direction = np.deg2rad(rng.integers(-180, 180, _ATTEMPTS))
    away = TAILS_APART * np.stack([np.sin(direction), np.cos(direction)], 1)
    snakes = []
    rows = np.arange(_ATTEMPTS)
    fits = np.ones(_ATTEMPTS, bool)
    for tail in (first_tail, first_tail + np.ceil(away).astype(int)):
        shape, head, good = first_dash(canvas, rng, rows, tail)
        fits &= good
        head = head.clip(0, setting.size - 1)
        canvas.draw(rows, head, shape, TARGET)
        snakes.append(Snakes(tail, head, shape))
    canvas.occupy(rows, snakes[0].head, snakes[0].shape)
    fits &= canvas.room(rows, snakes[1].head, snakes[1].shape)
    # each grows on from its own last dash, which takes its room when the next is there; the other's must show
    canvas.occupy(rows, snakes[1].head, snakes[1].shape)
    canvas.keep(fits)
    return _Pair(canvas, snakes[0].keep(fits), snakes[1].keep(fits))


def _distract(canvas: Canvas, rng: np.random.Generator, setting: Setting) -> None:
    """One more contour in every image that has room for it."""
    left = np.arange(len(canvas.ink))
    for _ in range(DISTRACTOR_TRIES):
        part = Canvas(0, canvas.size)
        part.ink, part.mask, part.near = canvas.ink[left], canvas.mask[left], canvas.near[left]
        rows = np.arange(len(left))
        tail = rng.integers(1, canvas.size - 1, (len(left), 2))
        shape, head, good = first_dash(part, rng, rows, tail)
        head = head.clip(0, canvas.size - 1)
        good &= part.room(rows, head, shape)
        part.draw(rows, head, shape, DISTRACTOR)
        snakes = Snakes(tail, head, shape)
        for _ in range(setting.dashes - 1):
            grown, shape, head = grow(part, rng, snakes)
            good &= grown
            part.occupy(rows, snakes.head, snakes.shape)
            head = head.clip(0, canvas.size - 1)
            part.draw(rows, head, shape, DISTRACTOR)
            snakes = Snakes(tail, head, shape)
        part.occupy(rows, snakes.head, snakes.shape)
        done = left[good]
        canvas.ink[done], canvas.mask[done], canvas.near[done] = part.ink[good], part.mask[good], part.near[good]
        left = left[~good]
        if not len(left):
            return


def _discs(canvas: Canvas, places: Any) -> None:
    """Markers (n, 2, 2) of radius 1.5."""
    y, x = np.mgrid[:SIDE, :SIDE] - REACH
    disc = (np.hypot(y, x) <= 1.5).astype(np.float32)
    rows = np.arange(len(canvas.ink))
    for place in places.swapaxes(0, 1):
        at = canvas.at(rows, place)
        canvas.ink[at] = np.maximum(canvas.ink[at], disc)


SPLITS = {"train": 0.8, "validation": 0.1, "test": 0.1}
"""Shares of the released sets."""


@checks_arguments
def load_pathfinder(
    split: str, *, count: Positive = 20_000, seed: Count = 0, most: Positive | None = None, **settings: Any
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """A part of `count` images (n, size, size) and labels (n,), which are drawn once and kept in the data folder.

    Args:
        split: "train", "validation" or "test": 80, 10 and 10 % of them.
        count: of all three together; the released sets have 200,000.
        seed: of the drawing.
        most: only the first of the part, so many at least: the rest need not be drawn.
        settings: those of `Setting`.
    """
    setting, part = checks_arguments(Setting)(**settings), part_of(split, SPLITS, count)
    check_size("images", count, setting.size**2)
    shape = f"{setting.size}-{setting.contour_length}-{setting.count}-{setting.dashes}"
    name = f"pathfinder-{seed}-{count}-{shape}"
    return drawn_part(name, partial(draw_images, setting), part, seed=seed, count=count, most=most)
