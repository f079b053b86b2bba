"""What every mechanism attends to: the explicit weights of one query of an image, for several networks beside."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from subquad.analysis.explicit_attention import attention_weights
from subquad.analysis.margins import on_picture
from subquad.analysis.probes import LayerAttention, without_weights
from subquad.data import ImageDataset, placing
from subquad.errors import SubquadError
from subquad.runs import open_trained
from subquad.tasks.classification import images_of

SALIENT_CELLS = 8
"""Cells a side among which the query is chosen."""


@dataclass(frozen=True)
class QueryMaps:
    """One layer of several networks, asked by the same queries.

    Attributes:
        layer: which layer it is, in words.
        labels: the networks.
        pictures: the images as the first network sees them, cropped and at its size, with their classes.
        queries: where each image is asked, as shares of height and width.
        grid: rows and columns of the queries' grid.
        weights: weights[image][network], a map (y, x) of what the query takes from every place, over heads and streams.
    """

    layer: str
    labels: list[str]
    pictures: list[tuple[Image.Image, str]]
    queries: list[tuple[float, float]]
    grid: tuple[int, int]
    weights: list[list[NDArray[np.float32]]]


def query_maps(
    sources: Sequence[tuple[str, object]], log: Callable[[str], None] = lambda line: None, *, count: int = 4
) -> list[QueryMaps]:
    """Maps of a middle and the last layer, over the same held-out images for all networks that can be opened.

    Args:
        sources: a label and what `open_trained` takes, for each network.
        log: hears what could not be shown.
        count: images, of a class each.
    """
    layers_of: list[tuple[str, list[LayerAttention]]] = []
    stored: list[Image.Image] = []
    pictures: list[tuple[Image.Image, str]] = []
    queries: list[tuple[float, float]] = []
    for label, source in sources:
        try:
            trained = open_trained(source).image_network()  # type: ignore[arg-type]
            images = images_of(trained)
        except SubquadError as error:
            log(f"no attention maps of {label}: {error}")
            continue
        if reason := without_weights(trained.model):
            # layers that are not there would shift those behind them beside other networks' layers
            log(f"no attention maps of {label}: {reason}")
            continue
        if not pictures:
            chosen = _one_a_class(images, count)
            stored = [images.picture(k) for k in chosen]
            # a place of a map is one of what the network sees, not of what the crop leaves out
            seen, names = map(placing(trained.input), stored), [images.classes[images.labels[k]] for k in chosen]
            pictures = list(zip(seen, names, strict=True))
            queries = [_salient(picture) for picture, _ in pictures]
        batch = torch.stack([images.transform(picture) for picture in stored])  # type: ignore[misc]
        seen_by = attention_weights(trained.model, batch.to(trained.device))
        layers_of.append((label, [on_picture(layer, trained.model) for layer in seen_by]))
    common = _whole_map_layers([layers for _, layers in layers_of], len(pictures))
    if not common:
        if layers_of:
            log("no attention maps: in no layer do all of the networks attend to the whole image, on a map of one size")
        return []
    depth = " or ".join(map(str, sorted({len(layers) for _, layers in layers_of})))
    wanted = dict.fromkeys([common[len(common) // 2], common[-1]])
    return [
        QueryMaps(
            layer=f"layer {place + 1} of {depth}" + (", the last" if str(place + 1) == depth else ""),
            labels=[label for label, _ in layers_of],
            pictures=pictures,
            queries=queries,
            grid=layers_of[0][1][place].grid.shape,
            weights=[
                [_query_map(layers[place], k, query) for _, layers in layers_of] for k, query in enumerate(queries)
            ],
        )
        for place in wanted
    ]


def _whole_map_layers(networks: Sequence[Sequence[LayerAttention]], images: int) -> list[int]:
    """Layers where every network attends to the whole image at once, on one map: windows have none of it."""
    return [
        place
        for place, same in enumerate(zip(*networks, strict=False))
        if all(layer.weights.shape[0] == images and layer.grid.stands_on(same[0].grid) for layer in same)
    ]


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
    small = np.asarray(
        picture.convert("L").resize((SALIENT_CELLS, SALIENT_CELLS), Image.Resampling.BOX), dtype=np.float32
    )
    row, column = divmod(int(np.abs(small - small.mean()).argmax()), SALIENT_CELLS)
    return (row + 0.5) / SALIENT_CELLS, (column + 0.5) / SALIENT_CELLS
