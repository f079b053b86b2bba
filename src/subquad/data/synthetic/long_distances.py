"""Images that are drawn, whose places have to be followed or compared over a distance that can be chosen."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from subquad.data.dataset import Source
from subquad.data.synthetic import needles, pathfinder, same_different
from subquad.errors import SubquadError, unknown_name
from subquad.reading import parse_settings


class _Drawn:
    """A reader of grey images in one array."""

    def __init__(self, images: NDArray[np.uint8], labels: Sequence[int], name: str):
        self._images, self._labels, self._name = images, labels, name

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self._images[index]), self._labels[index]

    def filename(self, index: int, absolute: bool = False) -> str:
        return f"{self._name}[{index}]"


class Drawing(NamedTuple):
    """What draws images and labels, their classes, the settings there are, and if `photographs` may lie behind."""

    load: Callable[..., Any]
    classes: tuple[str, ...]
    setting: type
    on_photographs: bool = False


DRAWN = {
    "pathfinder": Drawing(pathfinder.load_pathfinder, pathfinder.CLASSES, pathfinder.Setting),
    "same_different": Drawing(same_different.load_same_different, same_different.CLASSES, same_different.Setting),
    "needles": Drawing(needles.load_needles, needles.CLASSES, needles.Setting, on_photographs=True),
}
"""Data that are drawn, by name."""


def read_drawn(
    name: str, split: str, settings: str, data_dir: Path | None = None, *, most: int | None = None
) -> Source:
    """Images of `DRAWN`, as the settings "size=64,count=2000" have them, on photographs of `data_dir` if given.

    Where no more than `most` are wanted, no more need be drawn: of these at least, the first of the split.
    """
    load, classes, kind, on_photographs = DRAWN[name]
    if data_dir and not on_photographs:
        raise SubquadError(f"{name} is drawn and not read from {data_dir}: leave out data_dir")
    given = parse_settings(settings)
    for key, value in given.items():
        if key not in (known := {"count", "seed", *(field.name for field in fields(kind))}):
            raise unknown_name(f"setting of {name}", key, known)
        if type(value) is not int or value < 0:
            raise SubquadError(f"{key} of {name} is a whole number, got '{value}'")
    images, labels = load(split, most=most, **given, **({"photographs": data_dir} if data_dir else {}))
    return Source(_Drawn(images, labels.tolist(), name), classes, labels.tolist())
