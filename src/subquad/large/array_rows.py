"""Arrays of pixels, some rows at a time, in memory and in files of numpy."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.errors import SubquadError, reason_without_path

CHANNELS = (1, 3, 4)
"""Of a pixel: grey, colours, colours with transparency."""


def check_range(name: object, dtype: np.dtype[Any]) -> None:
    """Raise where nothing says which number is white; of bits, bytes, 16 bits and fractions it is known."""
    if dtype.kind not in "buf" or (dtype.kind == "u" and dtype.itemsize > 2) or dtype.itemsize > 8:
        raise SubquadError(
            f"{name} has pixels of {dtype.name}, whose range is not known: make them uint8, uint16 or fractions, 0 to 1"
        )


class ArrayRows:
    """An array (y, x, channels), or (y, x) of grey; a numpy array, or anything that is cut like one."""

    def __init__(self, array: Any, name: object = "an array") -> None:
        shape, dtype = tuple(array.shape), np.dtype(array.dtype)
        if len(shape) not in (2, 3) or (len(shape) == 3 and shape[2] not in CHANNELS):
            first = len(shape) == 3 and shape[0] in CHANNELS
            how = "move its channels behind, .transpose(1, 2, 0)" if first else "write grey or three colours"
            raise SubquadError(f"{name} is {shape}, and an image is (y, x) or (y, x, 1, 3 or 4): {how}")
        check_range(name, dtype)
        self.array, self.shape = array, (shape[0], shape[1])

    def read(self, first: int, behind: int) -> NDArray[Any]:
        """Give a view, or what the array makes of a slice."""
        rows = np.asarray(self.array[first:behind])
        return rows[..., None] if rows.ndim == 2 else rows


class NpyRows:
    """A file of numpy, mapped anew for each read: what is no longer mapped does not count as this process's memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shape = ArrayRows(self._mapped(), path).shape

    def _mapped(self) -> NDArray[Any]:
        try:
            array: NDArray[Any] = np.load(self.path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # of a damaged header numpy raises anything
            raise SubquadError(
                f"{self.path} is no file of numpy that can be read: {reason_without_path(error)}"
            ) from None
        return array

    def read(self, first: int, behind: int) -> NDArray[Any]:
        """Give a copy."""
        return ArrayRows(self._mapped()).read(first, behind).copy()
