"""What every mechanism attends to: the explicit weights of one query, as small pictures beside the image."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from subquad.analysis import LayerAttention, attention_weights
from subquad.data import ImageDataset
from subquad.errors import SubquadError
from subquad.pages.page_parts import data_uri
from subquad.runs import open_trained
from subquad.runs.run_records import Group
from subquad.tasks.classification import images_of

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


def attention_maps(groups: Sequence[Group], log: Callable[[str], None], *, count: int = 4) -> list[MapTable]:
    """Tables for a middle and the last layer, over the same images for all groups that have kept their weights."""
    shown: list[tuple[str, list[LayerAttention]]] = []
    pictures: list[tuple[Image.Image, str]] = []
    queries: list[tuple[float, float]] = []
    for group in groups:
        try:
            trained = open_trained(group.first.path).image_network()
            images = images_of(trained)
        except SubquadError as error:
            log(f"no attention maps of {group.label}: {error}")
            continue
        if not pictures:
            chosen = _one_a_class(images, count)
            pictures = [(images.picture(k), images.classes[images.labels[k]]) for k in chosen]
            queries = [_salient(picture) for picture, _ in pictures]
        batch = torch.stack([images.transform(picture) for picture, _ in pictures])  # type: ignore[misc]
        shown.append((group.label, attention_weights(trained.model, batch.to(trained.device))))
    common = _whole_map_layers([layers for _, layers in shown], len(pictures))
    if not common:
        if shown:
            log("no attention maps: in no layer do all of the networks attend to the whole image")
        return []
    depth = len(shown[0][1])
    wanted = dict.fromkeys([common[len(common) // 2], common[-1]])
    return [_table(k, depth, shown, pictures, queries) for k in wanted]


def _whole_map_layers(networks: Sequence[Sequence[LayerAttention]], images: int) -> list[int]:
    """Layers where every network attends to the whole image at once, on one grid: windows have no map of it."""
    return [
        place
        for place, same in enumerate(zip(*networks, strict=False))
        if all(layer.weights.shape[0] == images and layer.grid == same[0].grid for layer in same)
    ]


def _table(
    place: int,
    depth: int,
    shown: Sequence[tuple[str, list[LayerAttention]]],
    pictures: Sequence[tuple[Image.Image, str]],
    queries: Sequence[tuple[float, float]],
) -> MapTable:
    rows = [[_query_map(layers[place], k, query) for _, layers in shown] for k, query in enumerate(queries)]
    signed = [bool(min(row[column].min() for row in rows) < 0) for column in range(len(shown))]
    grid = shown[0][1][place].grid
    return MapTable(
        layer=f"layer {place + 1} of {depth}" + (", the last" if place == depth - 1 else ""),
        labels=[label for label, _ in shown],
        signed=signed,
        images=[
            (data_uri(_marked(picture, query, grid.shape)), name)
            for (picture, name), query in zip(pictures, queries, strict=True)
        ],
        maps=[[data_uri(_coloured(cell, sign)) for cell, sign in zip(row, signed, strict=True)] for row in rows],
    )


def _query_map(layer: LayerAttention, image: int, query: tuple[float, float]) -> NDArray[np.float32]:
    """The weights of the query's token on all places of the map, averaged over heads and streams."""
    grid, keys = layer.grid, layer.kv_grid
    token = grid.prefix + int(query[0] * grid.height) * grid.width + int(query[1] * grid.width)
    row: Tensor = layer.weights[image, :, :, token, keys.prefix :].mean(dim=(0, 1))
    return row.reshape(keys.shape).float().cpu().numpy()


def _one_a_class(images: ImageDataset, count: int) -> list[int]:
    """The first whole image of each class, of as many classes as there are images to show."""
    firsts: dict[int, int] = {}
    for place, label in enumerate(images.labels):
        if label not in firsts and images[place] is not None:
            firsts[label] = place
        if len(firsts) == count:
            break
    return list(firsts.values())


def _salient(picture: Image.Image) -> tuple[float, float]:
    """Where to ask: the spot, as shares of height and width, that differs most from the picture's mean."""
    small = np.asarray(picture.convert("L").resize((8, 8), Image.Resampling.BOX), dtype=np.float32)
    row, column = divmod(int(np.abs(small - small.mean()).argmax()), 8)
    return (row + 0.5) / 8, (column + 0.5) / 8


def _marked(picture: Image.Image, query: tuple[float, float], shape: tuple[int, int]) -> Image.Image:
    """The picture with a frame around the query's patch."""
    big = picture.convert("RGB").resize((_SIDE, _SIDE), Image.Resampling.NEAREST)
    height, width = _SIDE / shape[0], _SIDE / shape[1]
    top, left = int(query[0] * shape[0]) * height, int(query[1] * shape[1]) * width
    pen = ImageDraw.Draw(big)
    pen.rectangle((left - 1, top - 1, left + width, top + height), outline=(0, 0, 0), width=1)
    pen.rectangle((left, top, left + width - 1, top + height - 1), outline=(255, 210, 0), width=2)
    return big


def _coloured(values: NDArray[np.float32], signed: bool) -> Image.Image:
    """Weights as colours: from 0 to the largest, or from minus to plus the largest."""
    top = float(np.abs(values).max()) or 1.0
    shares = values / top / 2 + 0.5 if signed else values.clip(0) / top
    anchors = _DIVERGING if signed else _SEQUENTIAL
    stops = [stop for stop, _ in anchors]
    channels = [np.interp(shares, stops, [colour[k] for _, colour in anchors]) for k in range(3)]
    image = Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))
    return image.resize((_SIDE, _SIDE), Image.Resampling.NEAREST)
