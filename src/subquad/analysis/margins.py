"""What of a map lies on the picture, where a network puts a margin around its images (`image_margin`)."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from subquad.analysis.probes import LayerAttention
from subquad.grid import TokenGrid
from subquad.models.vit import PatchEmbed


def on_picture(layer: LayerAttention, model: nn.Module) -> LayerAttention:
    """A layer's attention between the places of the picture: pages lay maps over it.

    What is taken from the margin, and its own queries, are left out; rows are then less than 1 in sum.
    """
    embed = next((one for one in model.modules() if isinstance(one, PatchEmbed) and one.margin), None)
    places = 0 if embed is None else embed.margin // embed.patch_size
    if not places or min(*layer.grid.shape, *layer.kv_grid.shape) <= 2 * places:
        return layer
    weights = _inner(_inner(layer.weights, layer.kv_grid, places).mT, layer.grid, places).mT
    return replace(
        layer, weights=weights, grid=_smaller(layer.grid, places), kv_grid=_smaller(layer.kv_grid, places), inputs={}
    )


def _inner(rows: Tensor, grid: TokenGrid, places: int) -> Tensor:
    """Rows (…, n) over the tokens of a map without so many places at each side of it."""
    on_map = torch.arange(grid.num_places, device=rows.device).view(grid.shape)[places:-places, places:-places]
    in_front = torch.arange(grid.prefix, device=rows.device)
    return rows.index_select(-1, torch.cat([in_front, grid.prefix + on_map.flatten()]))


def _smaller(grid: TokenGrid, places: int) -> TokenGrid:
    return TokenGrid(grid.height - 2 * places, grid.width - 2 * places, grid.prefix)
