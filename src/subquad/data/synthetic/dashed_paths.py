"""Dashes in many images at once: their stencils, the room there is, and contours that grow by a dash."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

LENGTH, MARGIN = 2, 1
"""Pixels of a dash, and between it and the next."""

TRIES = 3
FULL = 1.8
"""Where masks add up to this there is no room."""

REACH = 5
"""Pixels around its head that a stencil has."""

SIDE = 2 * REACH + 1


@dataclass(frozen=True)
class Stencils:
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
def stencils_of() -> tuple[Stencils, int]:
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
    return Stencils(ink, mask, near, angles, np.concatenate([whole, circle])), len(degrees)


def _draw_dash(angle: float) -> tuple[Any, Any, Any]:
    """Ink, mask and neighbourhood of a dash that ends in the middle."""
    fine = Image.new("F", (2 * SIDE, 2 * SIDE))
    head = 2 * REACH + 0.5
    tail = (head - (2 * LENGTH - 1) * math.cos(angle), head - (2 * LENGTH - 1) * math.sin(angle))
    ImageDraw.Draw(fine).line([tail, (head, head)], fill=1.0)
    # 0.6 at its brightest, as in the released images; what the filter leaves of its own around it is not seen there
    ink = 1.4 * np.asarray(fine.resize((SIDE, SIDE), Image.Resampling.LANCZOS))
    ink[ink < 0.01] = 0
    y, x = np.mgrid[: 4 * SIDE, : 4 * SIDE] / 4 - REACH - 0.375
    along = np.clip(-(x * math.cos(angle) + y * math.sin(angle)), 0, LENGTH)
    distance = np.hypot(x + along * math.cos(angle), y + along * math.sin(angle))

    def within(width: float) -> Any:
        return (distance <= width).reshape(SIDE, 4, SIDE, 4).mean((1, 3))

    return ink, within(MARGIN + 0.5), within(MARGIN + 1.5) > 0.5


class Canvas:
    """Many images in the making."""

    def __init__(self, count: int, size: int) -> None:
        # a frame as wide as a stencil, so that none is cut
        shape = (count, size + 2 * REACH, size + 2 * REACH)
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
        around = np.arange(SIDE)
        return rows[:, None, None], (head[:, 0, None] + around)[:, :, None], (head[:, 1, None] + around)[:, None, :]

    def room(self, rows: Any, head: Any, shape: Any) -> Any:
        """Where dashes of these stencils find room."""
        return (self.mask[self.at(rows, head)] + stencils_of()[0].mask[shape]).max((1, 2)) < FULL

    def draw(self, rows: Any, head: Any, shape: Any, brightness: float) -> None:
        """Draw the ink of dashes, each as bright as `brightness` where it covers a pixel whole."""
        place = self.at(rows, head)
        self.ink[place] = np.maximum(self.ink[place], brightness * stencils_of()[0].ink[shape])

    def occupy(self, rows: Any, head: Any, shape: Any) -> None:
        """Keep the room that dashes take, and what is near to them."""
        place, stencils = self.at(rows, head), stencils_of()[0]
        self.mask[place] = np.maximum(self.mask[place], stencils.mask[shape])
        self.near[place] = np.maximum(self.near[place], stencils.near[shape])


class Snakes:
    """One contour in each image: where its last dash ends and which stencil that is."""

    def __init__(self, tail: Any, head: Any, shape: Any) -> None:
        self.tail, self.head, self.shape = tail, head, shape

    def keep(self, chosen: Any) -> "Snakes":
        """Those of some images."""
        return Snakes(self.tail[chosen], self.head[chosen], self.shape[chosen])


def first_dash(canvas: Canvas, rng: np.random.Generator, rows: Any, tail: Any) -> tuple[Any, Any, Any]:
    """Stencil and head of a dash that begins at `tail`, and where it is inside."""
    shape = rng.integers(0, stencils_of()[1], len(rows))
    angle = stencils_of()[0].angle[shape]
    along = np.stack([np.sin(angle), np.cos(angle)], 1)
    head = tail + np.ceil(LENGTH * along - 0.5).astype(int)
    return shape, head, canvas.inside(head) & canvas.inside(head - np.ceil((LENGTH + MARGIN) * along).astype(int))


def grow(canvas: Canvas, rng: np.random.Generator, snakes: Snakes) -> tuple[Any, Any, Any]:
    """The next dash of each contour: where there is one, its stencil and its head."""
    stencils, first = stencils_of()
    angle = stencils.angle[snakes.shape]
    rows = np.arange(len(angle))
    pivot = snakes.head + np.ceil(MARGIN * np.stack([np.sin(angle), np.cos(angle)], 1) - 0.5).astype(int)
    heads = pivot[:, None] + stencils.step[None, first:]
    turn = np.abs(stencils.angle[None, first:] - angle[:, None])
    turn = np.minimum(turn, 2 * math.pi - turn)
    inside = canvas.inside(heads)
    y, x = np.moveaxis(np.where(inside[..., None], heads, 0) + REACH, -1, 0)
    likely = np.cos(np.minimum(turn, math.pi / 2)) ** 2 * inside * (1 - canvas.near[rows[:, None], y, x])
    total = likely.cumsum(1)
    is_placed = np.zeros(len(rows), bool)
    choice = np.zeros(len(rows), int)
    for _ in range(TRIES):
        open_rows = rows[~is_placed & (total[:, -1] > 1e-6)]
        drawn = (rng.random(len(open_rows))[:, None] * total[open_rows, -1:] >= total[open_rows]).sum(1)
        drawn = np.minimum(drawn, total.shape[1] - 1)
        good = canvas.room(open_rows, heads[open_rows, drawn], first + drawn)
        choice[open_rows[good]] = drawn[good]
        is_placed[open_rows[good]] = True
    return is_placed, first + choice, heads[rows, choice]
