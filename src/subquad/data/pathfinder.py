"""Pathfinder: are two discs joined by a dashed path, among dashed paths that distract?

Linsley et al. 2018 (arXiv 1805.08315), Kim et al. 2019 (arXiv 1906.01558); the sets of the Long Range Arena (Tay et al.
2020, arXiv 2011.04006) have contours of 6, 9 and 14 dashes on 32×32 pixels. Drawn here by rules of our own after their
description: the statistics of the released images are met (`tests/data/test_pathfinder.py`), the images are others.

A contour is a chain of dashes of 2 pixels, each near the direction of the last. Two contours grow at a time, from tails
that are near each other; one disc marks the tail of the one, the other its head (joined) or the head of the other.
Thousands of attempts are made at once, since few of them find room.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from subquad.data.generated import draw_many, kept, part_of
from subquad.errors import SubquadError

CLASSES = ("apart", "joined")

LENGTH, MARGIN = 2, 1
"""Pixels of a dash, and between it and the next."""

TAILS_APART = 7
TARGET, DISTRACTOR = 1.5, 2.0
"""Brightness of dashes, before all is stretched to 255: discs have 1."""

TRIES, DISTRACTOR_TRIES = 3, 5
FULL = 1.8
"""Where masks add up to this there is no room."""

_REACH = 5
_SIDE = 2 * _REACH + 1
_ATTEMPTS = 4096


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
        if self.size < 24:
            raise SubquadError(f"paths need an image of at least 24 pixels, got {self.size}")
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
        """Of a distractor."""
        return self.distractor_length or max(1, self.contour_length // 3)

    @property
    def count(self) -> int:
        """Of distractors."""
        return round(20 / self.dashes * (self.size / 32) ** 2) if self.distractors is None else self.distractors


@dataclass(frozen=True)
class _Stencils:
    """Pictures of a dash, a row for each direction, on a square around its head.

    Attributes:
        ink: its brightness.
        mask: the room it takes.
        near: the room that no other head may be in.
        angle: its direction in radians.
        step: from the point it turns about to its head, in pixels.
    """

    ink: NDArray[np.float32]
    mask: NDArray[np.float32]
    near: NDArray[np.float32]
    angle: NDArray[np.float64]
    step: NDArray[np.int64]


@lru_cache
def _stencils() -> tuple[_Stencils, int]:
    """All directions in whole degrees, then those to the pixels of a circle; and how many the first are."""
    degrees = np.deg2rad(np.arange(-180, 180))
    radius = LENGTH + MARGIN
    fine = np.linspace(0, 2 * math.pi, 8 * radius * 4, endpoint=False)
    circle = np.unique(
        np.stack([np.rint(radius * np.sin(fine)), np.rint(radius * np.cos(fine))], 1).astype(int), axis=0
    )
    angles = np.concatenate([degrees, np.arctan2(circle[:, 0], circle[:, 1])])
    whole = np.ceil(radius * np.stack([np.sin(degrees), np.cos(degrees)], 1) - 0.5).astype(int)
    drawn = [_draw_dash(angle) for angle in angles]
    ink, mask, near = (np.stack(parts).astype(np.float32) for parts in zip(*drawn, strict=True))
    return _Stencils(ink, mask, near, angles, np.concatenate([whole, circle])), len(degrees)


def _draw_dash(angle: float) -> tuple[Any, Any, Any]:
    """Ink, mask and neighbourhood of a dash that ends in the middle."""
    fine = Image.new("F", (2 * _SIDE, 2 * _SIDE))
    head = 2 * _REACH + 0.5
    tail = (head - (2 * LENGTH - 1) * math.cos(angle), head - (2 * LENGTH - 1) * math.sin(angle))
    ImageDraw.Draw(fine).line([tail, (head, head)], fill=1.0)
    # 0.6 at its brightest, as in the released images; what the filter leaves of its own around it is not seen there
    ink = 1.4 * np.asarray(fine.resize((_SIDE, _SIDE), Image.Resampling.LANCZOS))
    ink[ink < 0.01] = 0
    y, x = np.mgrid[: 4 * _SIDE, : 4 * _SIDE] / 4 - _REACH - 0.375
    along = np.clip(-(x * math.cos(angle) + y * math.sin(angle)), 0, LENGTH)
    distance = np.hypot(x + along * math.cos(angle), y + along * math.sin(angle))

    def within(width: float) -> Any:
        return (distance <= width).reshape(_SIDE, 4, _SIDE, 4).mean((1, 3))

    return ink, within(MARGIN + 0.5), within(MARGIN + 1.5) > 0.5


class _Canvas:
    """Many images in the making."""

    def __init__(self, count: int, size: int) -> None:
        # a frame as wide as a stencil, so that none is cut
        shape = (count, size + 2 * _REACH, size + 2 * _REACH)
        self.size = size
        self.ink, self.mask, self.near = (np.zeros(shape, np.float32) for _ in range(3))

    def keep(self, chosen: Any) -> None:
        """Go on with some of them."""
        self.ink, self.mask, self.near = self.ink[chosen], self.mask[chosen], self.near[chosen]

    def inside(self, place: Any) -> Any:
        """Which places (…, 2) are not on the border."""
        return ((place >= 1) & (place < self.size - 1)).all(-1)

    def at(self, rows: Any, head: Any) -> tuple[Any, Any, Any]:
        """Indices of the squares around heads (k, 2) of images."""
        around = np.arange(_SIDE)
        return rows[:, None, None], (head[:, 0, None] + around)[:, :, None], (head[:, 1, None] + around)[:, None, :]

    def room(self, rows: Any, head: Any, shape: Any) -> Any:
        """Where dashes of these stencils find room."""
        return (self.mask[self.at(rows, head)] + _stencils()[0].mask[shape]).max((1, 2)) < FULL

    def draw(self, rows: Any, head: Any, shape: Any, brightness: float) -> None:
        """Their ink."""
        place = self.at(rows, head)
        self.ink[place] = np.maximum(self.ink[place], brightness * _stencils()[0].ink[shape])

    def occupy(self, rows: Any, head: Any, shape: Any) -> None:
        """The room they take."""
        place, stencils = self.at(rows, head), _stencils()[0]
        self.mask[place] = np.maximum(self.mask[place], stencils.mask[shape])
        self.near[place] = np.maximum(self.near[place], stencils.near[shape])


class _Snakes:
    """One contour in each image: where its last dash ends and which stencil that is."""

    def __init__(self, tail: Any, head: Any, shape: Any) -> None:
        self.tail, self.head, self.shape = tail, head, shape

    def keep(self, chosen: Any) -> "_Snakes":
        """Those of some images."""
        return _Snakes(self.tail[chosen], self.head[chosen], self.shape[chosen])


def draw_images(setting: Setting, seed: int, chunk: int, count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The images (count, size, size) of a chunk and whether their discs are joined (count,), from a seed."""
    rng = np.random.default_rng([seed, chunk, setting.size, setting.contour_length])
    found = _join(list(_take(_pairs(rng, setting), count)))
    canvas, first, second = found.canvas, found.first, found.second
    canvas.keep(slice(count))
    # where the markers are drawn is kept free of distractors already
    labels = rng.integers(0, 2, count)
    swap = rng.integers(0, 2, count).astype(bool)[:, None]
    first, second = first.keep(slice(count)), second.keep(slice(count))
    tail = np.where(swap, second.tail, first.tail)
    own, other = np.where(swap, second.head, first.head), np.where(swap, first.head, second.head)
    for _ in range(setting.count):
        _distract(canvas, rng, setting)
    _discs(canvas, np.stack([tail, np.where(labels[:, None] == 1, own, other)], 1))
    frame = slice(_REACH, -_REACH)
    ink = canvas.ink[:, frame, frame]
    return np.rint(255 * ink / ink.max((1, 2), keepdims=True)).astype(np.uint8), labels


@dataclass
class _Pair:
    canvas: _Canvas
    first: _Snakes
    second: _Snakes


def _take(pairs: Iterator[_Pair], count: int) -> Iterator[_Pair]:
    """As many batches as hold `count` images."""
    while count > 0:
        pair = next(pairs)
        count -= len(pair.canvas.ink)
        yield pair


def _join(pairs: list[_Pair]) -> _Pair:
    canvas = _Canvas(0, pairs[0].canvas.size)
    for name in ("ink", "mask", "near"):
        setattr(canvas, name, np.concatenate([getattr(pair.canvas, name) for pair in pairs]))
    snakes = [
        _Snakes(
            *(np.concatenate([getattr(getattr(p, who), part) for p in pairs]) for part in ("tail", "head", "shape"))
        )
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
                snakes: _Snakes = getattr(pair, who)
                grown, shape, head = _grow(pair.canvas, rng, snakes)
                # the last dash takes its room only now: the new one begins beside it
                rows = np.arange(len(grown))
                pair.canvas.occupy(rows, snakes.head, snakes.shape)
                pair.canvas.draw(rows[grown], head[grown], shape[grown], TARGET)
                setattr(pair, who, _Snakes(snakes.tail, head, shape))
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
    canvas = _Canvas(_ATTEMPTS, setting.size)
    middle = 2 * TAILS_APART
    low, high = (middle, setting.size - middle) if setting.size > 2 * middle else (setting.size // 2,) * 2
    first_tail = rng.integers(low, max(high, low + 1), (_ATTEMPTS, 2))
    direction = np.deg2rad(rng.integers(-180, 180, _ATTEMPTS))
    away = TAILS_APART * np.stack([np.sin(direction), np.cos(direction)], 1)
    snakes = []
    rows = np.arange(_ATTEMPTS)
    fits = np.ones(_ATTEMPTS, bool)
    for tail in (first_tail, first_tail + np.ceil(away).astype(int)):
        shape, head, good = _first_dash(canvas, rng, rows, tail)
        fits &= good
        head = head.clip(0, setting.size - 1)
        canvas.draw(rows, head, shape, TARGET)
        snakes.append(_Snakes(tail, head, shape))
    canvas.occupy(rows, snakes[0].head, snakes[0].shape)
    fits &= canvas.room(rows, snakes[1].head, snakes[1].shape)
    # each grows on from its own last dash, which takes its room when the next is there; the other's must show
    canvas.occupy(rows, snakes[1].head, snakes[1].shape)
    canvas.keep(fits)
    return _Pair(canvas, snakes[0].keep(fits), snakes[1].keep(fits))


def _first_dash(canvas: _Canvas, rng: np.random.Generator, rows: Any, tail: Any) -> tuple[Any, Any, Any]:
    """Stencil and head of a dash that begins at `tail`, and where it is inside."""
    shape = rng.integers(0, _stencils()[1], len(rows))
    angle = _stencils()[0].angle[shape]
    along = np.stack([np.sin(angle), np.cos(angle)], 1)
    head = tail + np.ceil(LENGTH * along - 0.5).astype(int)
    return shape, head, canvas.inside(head) & canvas.inside(head - np.ceil((LENGTH + MARGIN) * along).astype(int))


def _grow(canvas: _Canvas, rng: np.random.Generator, snakes: _Snakes) -> tuple[Any, Any, Any]:
    """The next dash of each contour: where there is one, its stencil and its head."""
    stencils, first = _stencils()
    angle = stencils.angle[snakes.shape]
    rows = np.arange(len(angle))
    pivot = snakes.head + np.ceil(MARGIN * np.stack([np.sin(angle), np.cos(angle)], 1) - 0.5).astype(int)
    heads = pivot[:, None] + stencils.step[None, first:]
    turn = np.abs(stencils.angle[None, first:] - angle[:, None])
    turn = np.minimum(turn, 2 * math.pi - turn)
    inside = canvas.inside(heads)
    y, x = np.moveaxis(np.where(inside[..., None], heads, 0) + _REACH, -1, 0)
    likely = np.cos(np.minimum(turn, math.pi / 2)) ** 2 * inside * (1 - canvas.near[rows[:, None], y, x])
    total = likely.cumsum(1)
    found = np.zeros(len(rows), bool)
    choice = np.zeros(len(rows), int)
    for _ in range(TRIES):
        open_rows = rows[~found & (total[:, -1] > 1e-6)]
        drawn = (rng.random(len(open_rows))[:, None] * total[open_rows, -1:] >= total[open_rows]).sum(1)
        drawn = np.minimum(drawn, total.shape[1] - 1)
        good = canvas.room(open_rows, heads[open_rows, drawn], first + drawn)
        choice[open_rows[good]] = drawn[good]
        found[open_rows[good]] = True
    return found, first + choice, heads[rows, choice]


def _distract(canvas: _Canvas, rng: np.random.Generator, setting: Setting) -> None:
    """One more contour in every image that has room for it."""
    left = np.arange(len(canvas.ink))
    for _ in range(DISTRACTOR_TRIES):
        part = _Canvas(0, canvas.size)
        part.ink, part.mask, part.near = canvas.ink[left], canvas.mask[left], canvas.near[left]
        rows = np.arange(len(left))
        tail = rng.integers(1, canvas.size - 1, (len(left), 2))
        shape, head, good = _first_dash(part, rng, rows, tail)
        head = head.clip(0, canvas.size - 1)
        good &= part.room(rows, head, shape)
        part.draw(rows, head, shape, DISTRACTOR)
        snakes = _Snakes(tail, head, shape)
        for _ in range(setting.dashes - 1):
            grown, shape, head = _grow(part, rng, snakes)
            good &= grown
            part.occupy(rows, snakes.head, snakes.shape)
            head = head.clip(0, canvas.size - 1)
            part.draw(rows, head, shape, DISTRACTOR)
            snakes = _Snakes(tail, head, shape)
        part.occupy(rows, snakes.head, snakes.shape)
        done = left[good]
        canvas.ink[done], canvas.mask[done], canvas.near[done] = part.ink[good], part.mask[good], part.near[good]
        left = left[~good]
        if not len(left):
            return


def _discs(canvas: _Canvas, places: Any) -> None:
    """Markers (n, 2, 2) of radius 1.5."""
    y, x = np.mgrid[:_SIDE, :_SIDE] - _REACH
    disc = (np.hypot(y, x) <= 1.5).astype(np.float32)
    rows = np.arange(len(canvas.ink))
    for place in places.swapaxes(0, 1):
        at = canvas.at(rows, place)
        canvas.ink[at] = np.maximum(canvas.ink[at], disc)


SPLITS = {"train": 0.8, "validation": 0.1, "test": 0.1}
"""Shares of the released sets."""


def load_pathfinder(
    split: str, *, count: int = 20_000, seed: int = 0, **settings: Any
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """A part of `count` images (n, size, size) and labels (n,), which are drawn once and kept in the data folder.

    Args:
        split: "train", "validation" or "test": 80, 10 and 10 % of them.
        count: of all three together; the released sets have 200,000.
        seed: of the drawing.
        settings: those of `Setting`.
    """
    setting, part = Setting(**settings), part_of(split, SPLITS, count)
    shape = f"{setting.size}-{setting.contour_length}-{setting.count}-{setting.dashes}"
    whole = kept(f"pathfinder-{seed}-{count}-{shape}", lambda: draw_many(partial(draw_images, setting), seed, count))
    return whole["images"][part], whole["labels"][part]
