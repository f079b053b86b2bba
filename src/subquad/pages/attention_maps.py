"""What every mechanism attends to, as small pictures beside the image."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from subquad.analysis import QueryMaps
from subquad.pages.page_parts import data_uri, size_within

_SIDE = 112
_SEQUENTIAL = [
    (0, (12, 7, 43)),
    (0.25, (82, 18, 124)),
    (0.5, (182, 54, 121)),
    (0.75, (251, 136, 97)),
    (1, (252, 253, 191)),
]
_DIVERGING = [
    (0, (33, 102, 172)),
    (0.25, (146, 197, 222)),
    (0.5, (247, 247, 247)),
    (0.75, (244, 165, 130)),
    (1, (178, 24, 43)),
]


@dataclass(frozen=True)
class MapTable:
    """Pictures as data URIs: a row an image, a column a mechanism.

    Attributes:
        layer: which layer is shown, in words.
        labels: the mechanisms.
        signed: which of them have negative weights here.
        images: the images, the query marked, and their classes.
        maps: maps[row][column].
    """

    layer: str
    labels: list[str]
    signed: list[bool]
    images: list[tuple[str, str]]
    maps: list[list[str]]


def drawn_maps(asked: QueryMaps) -> MapTable:
    """The table of one layer; a mechanism that has negative weights here has them in two colours."""
    columns = range(len(asked.labels))
    signed = [bool(min(row[column].min() for row in asked.weights) < 0) for column in columns]
    return MapTable(
        layer=asked.layer,
        labels=asked.labels,
        signed=signed,
        images=[
            (data_uri(_marked(picture, query, asked.grid)), name)
            for (picture, name), query in zip(asked.pictures, asked.queries, strict=True)
        ],
        maps=[
            [data_uri(_coloured(cell, two, size_within(_SIDE, picture))) for cell, two in zip(row, signed, strict=True)]
            for row, (picture, _) in zip(asked.weights, asked.pictures, strict=True)
        ],
    )


def _marked(picture: Image.Image, query: tuple[float, float], shape: tuple[int, int]) -> Image.Image:
    """The picture with a frame around the query's patch."""
    big = picture.convert("RGB").resize(size_within(_SIDE, picture), Image.Resampling.NEAREST)
    height, width = big.height / shape[0], big.width / shape[1]
    top, left = int(query[0] * shape[0]) * height, int(query[1] * shape[1]) * width
    # patches of large grids are smaller than a pixel, and no frame is
    height, width = max(height, 1), max(width, 1)
    pen = ImageDraw.Draw(big)
    pen.rectangle((left - 1, top - 1, left + width, top + height), outline=(0, 0, 0), width=1)
    pen.rectangle((left, top, left + width - 1, top + height - 1), outline=(255, 210, 0), width=2)
    return big


def _coloured(values: NDArray[np.float32], signed: bool, size: tuple[int, int]) -> Image.Image:
    """Weights as colours, of a picture's width and height: from 0 to the largest, or from minus to plus the largest."""
    top = float(np.abs(values).max()) or 1.0
    shares = values / top / 2 + 0.5 if signed else values.clip(0) / top
    anchors = _DIVERGING if signed else _SEQUENTIAL
    stops = [stop for stop, _ in anchors]
    channels = [np.interp(shares, stops, [colour[k] for _, colour in anchors]) for k in range(3)]
    image = Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))
    return image.resize(size, Image.Resampling.NEAREST)
