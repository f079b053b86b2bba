"""Where every place of an image looks, in every layer: maps small enough to be put on a page."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from subquad.analysis.explicit_attention import visit_attention
from subquad.analysis.margins import on_picture
from subquad.analysis.probes import LayerAttention

MOST_PLACES = 16
"""Of a side of a map; larger ones are averaged over neighbours."""


@dataclass(frozen=True)
class Looking:
    """One layer's map of one image, the mean over heads and streams.

    Attributes:
        layer: counted from 1.
        mechanism: its name.
        queries, keys: height and width of the two maps.
        weights: (queries, keys) in steps of `scale`, from −127 to 127; the row of a class token is the last.
        scale: what a step is worth.
    """

    layer: int
    mechanism: str
    queries: tuple[int, int]
    keys: tuple[int, int]
    weights: NDArray[np.int8]
    scale: float

    @property
    def has_prefix(self) -> bool:
        """Whether there is a row of the class token."""
        return len(self.weights) > self.queries[0] * self.queries[1]


def looking(model: nn.Module, images: Tensor) -> list[list[Looking]]:
    """For each of the images (b, c, height, width) its layers, but for those that attend in windows."""
    by_image: list[list[Looking]] = [[] for _ in images]
    number = 0

    def visit(layer: LayerAttention) -> None:
        nonlocal number
        number += 1
        layer = on_picture(layer, model)
        if len(layer.weights) != len(images) or not layer.placed or layer.grid.num_places < 2:
            return
        for image, whole in zip(by_image, layer.weights, strict=True):
            image.append(small_map(layer, whole.mean((0, 1)), number))

    visit_attention(model, images, visit)
    return by_image


def small_map(layer: LayerAttention, weights: Tensor, number: int) -> Looking:
    """One image's map of a layer, from its `weights` (n_q, n_k) over heads and streams; `number` is the layer's."""
    grid, kv_grid = layer.grid, layer.kv_grid
    prefix = weights[: min(grid.prefix, 1), kv_grid.prefix :]
    rows = torch.cat([weights[grid.prefix :, kv_grid.prefix :], prefix]).float()
    # weight that falls on neighbours adds up, queries that are neighbours are averaged
    keys = _pooled(rows, kv_grid.shape)
    flat = keys.flatten(1)
    queries = _pooled(flat[: grid.num_places].mT, grid.shape)
    queries = queries * (queries.shape[-2:].numel() / grid.num_places)
    maps = torch.cat([queries.flatten(1).mT, flat[grid.num_places :]])
    scale = max(float(maps.abs().max()), 1e-12) / 127
    steps = (maps / scale).round().to(torch.int8).cpu().numpy()
    height, width = queries.shape[-2:]
    return Looking(number, layer.mechanism, (height, width), (keys.shape[-2], keys.shape[-1]), steps, scale)


def _pooled(rows: Tensor, shape: tuple[int, int]) -> Tensor:
    """Rows over the places of a map as maps (rows, y, x) of `MOST_PLACES` a side at most, of the same sums.

    What a place has goes to the cells that it lies in, as much to each as of it lies there: so all places count alike.
    """
    down, right = (_shares(side).to(rows) for side in shape)
    return down @ rows.unflatten(1, shape) @ right.mT


def _shares(side: int) -> Tensor:
    """How much of each of so many places lies in each cell, (cells, places)."""
    cells = min(side, MOST_PLACES)
    begin, first = torch.arange(cells)[:, None] * side, torch.arange(side)[None] * cells
    shared = torch.minimum(begin + side, first + cells) - torch.maximum(begin, first)
    return shared.clamp(min=0) / cells
