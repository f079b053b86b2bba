"""Slides of pathology, some rows at a time, by OpenSlide where it is installed."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.errors import SubquadError


class SlideRows:
    """The finest level of a slide."""

    def __init__(self, path: Path) -> None:
        try:
            import openslide
        except (ImportError, OSError):
            raise SubquadError(f"{path} needs OpenSlide: pip install openslide-python openslide-bin") from None
        self.path = path
        try:
            self.slide: Any = openslide.OpenSlide(str(path))
        except Exception as error:
            raise SubquadError(f"{path} is no slide that can be read: {error}") from None
        width, height = self.slide.dimensions
        self.shape = height, width

    def read(self, first: int, behind: int) -> NDArray[Any]:
        """Give rows (y, x, 3); where nothing was scanned it is white."""
        region = np.asarray(self.slide.read_region((0, first), 0, (self.shape[1], behind - first)))
        colours, alpha = region[..., :3], region[..., 3:]
        return np.where(alpha == 0, np.uint8(255), colours)
