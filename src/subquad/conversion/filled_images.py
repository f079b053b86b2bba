"""Images of a batch that are filled up to one size: each is mixed on the map that it has itself.

Mechanisms that pool over parts of a map, and such as know no padding, would answer otherwise by how far one is filled.

Letters: b batch, h heads, n tokens, d channels of a head.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from subquad.attention import traits_of
from subquad.grid import TokenGrid


def rectangles(padding: Tensor, grid: TokenGrid) -> dict[tuple[int, int], list[int]] | None:
    """The numbers of the images (b, n) that fill the same (rows, columns) in the first corner of a map; read.

    `padding` is True for tokens that are absent. An image without one that is there has 0×0. None where an image is no
    rectangle, or lacks a prefix token.
    """
    present = ~padding
    image = present[:, grid.prefix :].unflatten(1, grid.shape)
    heights, widths = image.any(2).sum(1), image.any(1).sum(1)
    rows, columns = (torch.arange(side, device=padding.device) for side in grid.shape)
    filled = (rows < heights[:, None])[:, :, None] & (columns < widths[:, None])[:, None]
    if not torch.equal(filled, image) or not bool(present[:, : grid.prefix].all()):
        return None
    found: dict[tuple[int, int], list[int]] = {}
    for number, (height, width) in enumerate(torch.stack([heights, widths], 1).tolist()):
        found.setdefault((height, width), []).append(number)
    return found


def mixed_apart(mechanism: Any, supply: Mapping[str, Tensor | None], grid: TokenGrid) -> Tensor | None:
    """What a mechanism makes of each image on its own map, (b, h, n, d), zeros for absent tokens.

    None where it answers padded images as it answers them alone, or where what is there is no rectangle.
    """
    padding, traits = supply["padding"], traits_of(mechanism)
    assert padding is not None
    needs = traits.pools or "padding" in traits.refuses
    if not needs or type(grid) is not TokenGrid or "rotation" in mechanism.inputs or supply["mask"] is not None:
        return None
    keys = supply["k"]
    images = rectangles(padding, grid) if keys is not None and len(keys) == len(padding) else None
    if images is None or (grid.prefix and (0, 0) in images):
        return None
    device, result = padding.device, None
    for (height, width), numbers in images.items():
        if not height:
            continue
        place = torch.arange(height, device=device)[:, None] * grid.width + torch.arange(width, device=device)
        place = torch.cat([torch.arange(grid.prefix, device=device), grid.prefix + place.flatten()])
        chosen = torch.tensor(numbers, device=device)
        own = TokenGrid(height, width, grid.prefix)
        tokens = {name: _taken(supply[name], chosen, place) for name in mechanism.inputs}
        y = mechanism(**tokens, grid=own, kv_grid=own)
        if result is None:
            result = y.new_zeros(len(padding), y.shape[1], grid.num_tokens, y.shape[3])
        result[chosen[:, None], :, place] = y.transpose(1, 2)
    return result


def _taken(tokens: Tensor | None, images: Tensor, places: Tensor) -> Tensor | None:
    """Tokens (b, n, c) or (b, h, n, d) of some images at some places."""
    if tokens is None or tokens.dtype == torch.bool:
        return None
    dim = tokens.dim() - 2
    return tokens.index_select(0, images).index_select(dim, places)
