"""Images that are stored in bands of rows, of tiles, strips or chunks: a band is decoded once, not for every read."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.errors import SubquadError

MOST_WHOLE = 178_956_970
"""Pixels that are decoded at once, 0.5 GB of bytes, where a format can't be read by rows: as many as Pillow opens."""
LEAST_ROWS = 64
"""Rows of a band at least: of strips of a row each a band is so many."""
KEPT = 2
"""Bands that are kept: who looks at rows above those that were read before needs the one before the last."""


class KeptBands:
    """Rows of an image whose file is decoded a band of rows at a time.

    Args:
        name: of the image, for messages.
        shape: (height, width) in pixels.
        tall: rows that the file stores together.
        decode: gives rows from the first to before the last, (y, x, channels).

    Raises:
        SubquadError: so many pixels are stored together that they can't be decoded at once.
    """

    def __init__(
        self, name: object, shape: tuple[int, int], tall: int, decode: Callable[[int, int], NDArray[Any]]
    ) -> None:
        tall = max(1, min(tall, shape[0]))
        if tall * shape[1] > MOST_WHOLE:
            raise SubquadError(
                f"{name} stores {tall:,} rows of {shape[1]:,} pixels together, which are decoded at once, up to "
                f"{MOST_WHOLE:,} pixels: write it in tiles or chunks of some hundred rows"
            )
        self.shape, self.decode = shape, decode
        self.tall = tall * -(-LEAST_ROWS // tall)
        self.kept: dict[int, NDArray[Any]] = {}

    def read(self, first: int, behind: int) -> NDArray[Any]:
        """Give rows (y, x, channels)."""
        parts = []
        for number in range(first // self.tall, -(-behind // self.tall)):
            top = number * self.tall
            parts.append(self._band(number)[max(0, first - top) : behind - top])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _band(self, number: int) -> NDArray[Any]:
        band = self.kept.pop(number, None)
        if band is None:
            top = number * self.tall
            band = self.decode(top, min(top + self.tall, self.shape[0]))
        self.kept[number] = band
        while len(self.kept) > KEPT:
            # the one that was asked for least recently
            del self.kept[next(iter(self.kept))]
        return band
