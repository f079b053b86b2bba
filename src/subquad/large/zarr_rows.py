"""Arrays of zarr, some rows at a time: by themselves, or the finest of a group's pyramid, as OME-Zarr has it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.errors import SubquadError, reason_without_path
from subquad.large.array_rows import ArrayRows
from subquad.large.kept_bands import KeptBands

ZARR_MARKS = ("zarr.json", ".zarray", ".zgroup")
"""Files that a folder of zarr has."""


class ZarrRows:
    """An array (y, x, channels) or (y, x); of a group the finest level of its pyramid, else its array of the name 0."""

    def __init__(self, path: Path) -> None:
        try:
            import zarr
        except ImportError:
            raise SubquadError(f"{path} needs the package zarr: pip install 'subquad[large]'") from None
        try:
            stored: Any = zarr.open(str(path), mode="r")
            scales = _scales(stored)
            array = stored if hasattr(stored, "ndim") else stored.get(scales[0]["path"] if scales else "0")
            axes = "" if scales is None else scales[0]["axes"]
            held = [] if array is stored else [name for name, _ in stored.arrays()]
        except Exception as error:
            raise SubquadError(f"{path} is no zarr array that can be read: {reason_without_path(error)}") from None
        if array is None or not hasattr(array, "ndim"):
            names = ", ".join(str(path / name) for name in held[:5]) or "none"
            raise SubquadError(f"{path} is a group of zarr without a pyramid: name one of its arrays ({names})")
        turned = _Turned(array, axes or "yxc"[: array.ndim], path)
        self.shape = ArrayRows(turned, path).shape
        self.read = KeptBands(path, self.shape, turned.tall, ArrayRows(turned).read).read


def _scales(stored: Any) -> list[dict[str, Any]] | None:
    """Levels of a group's pyramid, the finest first, each with its path and the letters of its axes."""
    notes = dict(stored.attrs)
    several = notes.get("ome", notes).get("multiscales") if not hasattr(stored, "ndim") else None
    if not several:
        return None
    # the axes of its first versions have no names
    axes = "".join(axis["name"] if isinstance(axis, dict) else axis for axis in several[0].get("axes", "tczyx"))
    return [{"path": level["path"], "axes": axes.lower()} for level in several[0]["datasets"]]


class _Turned:
    """An array whose axes are named, as one (y, x, channels) or (y, x) that is cut by rows."""

    def __init__(self, array: Any, axes: str, name: object) -> None:
        others = {axis: size for axis, size in zip(axes, array.shape, strict=False) if axis not in "yxc" and size > 1}
        if len(axes) != array.ndim or "y" not in axes or "x" not in axes or others:
            sizes: Sequence[str] = [f"{size} {axis}" for axis, size in zip(axes, array.shape, strict=False)]
            raise SubquadError(
                f"{name} has {' × '.join(sizes) or array.shape}, and one image is streamed: write the one of them that "
                "you mean (y, x, channels)"
            )
        self.array, self.axes, self.dtype = array, axes, array.dtype
        kept = [axis for axis in "yxc" if axis in axes]
        self.shape = tuple(array.shape[axes.index(axis)] for axis in kept)
        self.order = [[axis for axis in axes if axis in kept].index(axis) for axis in kept]
        self.tall = array.chunks[axes.index("y")]

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        cut = tuple(rows if axis == "y" else slice(None) if axis in "xc" else 0 for axis in self.axes)
        return np.asarray(self.array[cut]).transpose(self.order)
