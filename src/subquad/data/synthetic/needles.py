"""Needles in a haystack: two small marks somewhere on photographs or on noise, which point the same way or not.

Each mark says nothing alone, and they may be as far apart as the image is large: what answers has to carry something
from the one to the other, through all that lies between.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.data.archives import is_archive, unpack
from subquad.data.decoding import read_named_image
from subquad.data.synthetic.generation import check_size, drawn_part, part_of
from subquad.data.synthetic.pathfinder import SPLITS
from subquad.data.walking import find_images
from subquad.errors import SubquadError
from subquad.ranges import Count, Positive, checks_arguments

CLASSES = ("different", "same")

_SIDE = 8
"""Pixels of a side of a mark."""

_MOST_PHOTOGRAPHS = 256

Grey = NDArray[np.uint8]


@dataclass(frozen=True)
class Setting:
    """What is drawn.

    Attributes:
        size: pixels of a side.
        distance: pixels between the middles of the two marks at least, across or down, whichever is more.
        directions: that a mark's stripes may have, 2 or 4.
    """

    size: int = 64
    distance: int = 32
    directions: int = 4

    def __post_init__(self) -> None:
        if self.directions not in (2, 4):
            raise SubquadError(f"marks have 2 or 4 directions, got {self.directions}")
        most = self.size - _SIDE
        if not _SIDE <= self.distance <= most:
            raise SubquadError(
                f"on {self.size} px marks are {_SIDE} to {most} px apart at least, got {self.distance}: "
                "take a larger size"
            )


def marks(directions: int) -> Grey:
    """Stripes across, down and along both diagonals, black and white: (4, 8, 8), or the first two."""
    y, x = np.indices((_SIDE, _SIDE))
    every = np.stack([across // 2 % 2 for across in (y, x, y + x, y - x + _SIDE)])
    return (255 * every[:directions]).astype(np.uint8)


def draw_images(
    setting: Setting, photographs: Sequence[Grey], seed: int, chunk: int, count: int
) -> tuple[Grey, NDArray[np.int64]]:
    """The images (count, size, size) of a chunk and whether their marks are alike (count,), from a seed."""
    rng = np.random.default_rng([seed, chunk, setting.size, setting.distance, setting.directions])
    labels = rng.integers(0, 2, count)
    first = rng.integers(0, setting.directions, count)
    other = (first + rng.integers(1, setting.directions, count)) % setting.directions
    second = np.where(labels == 1, first, other)
    stripes = marks(setting.directions)
    images = np.empty((count, setting.size, setting.size), np.uint8)
    for image, *directions in zip(images, first, second, strict=True):
        image[:] = mosaic(photographs, setting.size, rng) if photographs else noise(setting.size, rng)
        for (y, x), direction in zip(_places(setting, rng), directions, strict=True):
            image[y : y + _SIDE, x : x + _SIDE] = stripes[direction]
    return images, labels


def _places(setting: Setting, rng: np.random.Generator) -> NDArray[np.int64]:
    """The upper left corners of two marks that are far enough apart, each pair as likely."""
    while True:
        corners = rng.integers(0, setting.size - _SIDE + 1, (2, 2))
        if np.abs(corners[0] - corners[1]).max() >= setting.distance:
            return corners


def mosaic(photographs: Sequence[Grey], size: int, rng: np.random.Generator) -> Grey:
    """A square of photographs side by side, each mirrored or not, cut at a random place."""
    height, width = photographs[0].shape
    down, across = -(-size // height) + 1, -(-size // width) + 1
    chosen = rng.integers(0, len(photographs), (down, across))
    mirrored = rng.integers(0, 2, (down, across)) == 1
    rows = [
        np.concatenate([photographs[i][:, :: -1 if flip else 1] for i, flip in zip(*row, strict=True)], axis=1)
        for row in zip(chosen, mirrored, strict=True)
    ]
    whole = np.concatenate(rows)
    y, x = rng.integers(0, height), rng.integers(0, width)
    return whole[y : y + size, x : x + size]


def noise(size: int, rng: np.random.Generator) -> Grey:
    """Noise whose spectrum falls with the frequency, as that of photographs does."""
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None])
    frequency[0, 0] = np.inf
    spectrum = np.fft.rfft2(rng.standard_normal((size, size))) / frequency
    image = np.fft.irfft2(spectrum, (size, size))
    return np.clip(128 + 48 * image / image.std(), 0, 255).astype(np.uint8)


@lru_cache(maxsize=1)
def _photographs(source: Path) -> tuple[Grey, ...]:
    """Photographs from all parts of a folder or archive in grey, all of the first one's size."""
    names = find_images(unpack(source) if is_archive(source) else source)
    if not names:
        raise SubquadError(f"there is no image in {source}")
    # scenes have maps of their classes beside them, in folders of another name
    names = [name for name in names if "images" in name.parts] or names
    names = names[:: -(-len(names) // _MOST_PHOTOGRAPHS)]
    images = [read_named_image(name).convert("L") for name in names]
    return tuple(np.asarray(image.resize(images[0].size)) for image in images)


@checks_arguments
def load_needles(
    split: str,
    *,
    count: Positive = 20_000,
    seed: Count = 0,
    most: Positive | None = None,
    photographs: Path | None = None,
    **settings: Any,
) -> tuple[Grey, NDArray[np.int64]]:
    """A part of `count` images (n, size, size) and labels (n,), which are drawn once and kept in the data folder.

    Args:
        split: "train", "validation" or "test": 80, 10 and 10 % of them.
        count: of all three together.
        seed: of the drawing.
        most: only the first of the part, so many at least: the rest need not be drawn.
        photographs: a folder or archive of images, of which 256 at most lie behind the marks; noise if left out. Of
            scenes with maps of their classes those in folders `images` are taken.
        settings: those of `Setting`.
    """
    setting, part = checks_arguments(Setting)(**settings), part_of(split, SPLITS, count)
    check_size("images", count, setting.size**2)
    behind = _photographs(photographs) if photographs else ()
    digest = zlib.crc32(b"".join(image.tobytes() for image in behind))
    name = f"needles-{seed}-{count}-{setting.size}-{setting.distance}-{setting.directions}-{digest:08x}"
    return drawn_part(name, partial(draw_images, setting, behind), part, seed=seed, count=count, most=most)
