"""What tokens come from in a network of anybody's code: the last map in front of its attention layers, and which way.

A call without numbers shows of which map the tokens are as many, whatever makes it; a call with numbers, whether they
stand row by row: of a place that is changed, the token changes most that should stand there.

Letters: b batch, c channels, n tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from subquad.conversion.checkpointed_calls import first_tensor
from subquad.conversion.copied_calls import EnoughSeenError, run_copied
from subquad.conversion.sketched_calls import IMAGES, run_sketched
from subquad.errors import SubquadError
from subquad.grid import TokenGrid

MAKERS = nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d
"""What gives maps (b, c, y, x)."""


MOST_IN_FRONT = 16
"""Tokens in front of a map that nothing names, which are taken for such."""


@dataclass(frozen=True)
class Origin:
    """What a layer's tokens come from.

    Attributes:
        path: of the convolution or pooling that gives a map, or of the part that is handed what patches are cut of.
        grid: of the tokens, those in front included.
        patch: (height, width) of patches that code without a module cuts for a linear layer; None behind a map.
    """

    path: str
    grid: TokenGrid
    patch: tuple[int, int] | None = None


def origins_of_tokens(network: nn.Module, layer: str, image: tuple[int, int, int], prefix: int) -> list[Origin]:
    """The last map before a layer is called that has a place for each of its tokens; of patches all that may be cut.

    The network is run for that, without numbers: so the way from an image to tokens may be any. A map is what a
    convolution or a pooling gives, or the patches that a linear layer is handed.

    Args:
        network: which takes images.
        layer: its path.
        image: (channels, height, width).
        prefix: tokens in front of the map.

    Returns:
        None of them where no map in front of the layer has as many places.

    Raises:
        SubquadError: the network can't be run so, or has a few tokens more than places.
    """
    sketch = _Sketch(layer, prefix)
    handles = []
    for path, part in network.named_modules():
        handles.append(part.register_forward_pre_hook(sketch.enters(path), with_kwargs=True))
        handles.append(part.register_forward_hook(sketch.leaves(path)))
    run_sketched(network, image, handles)
    if found := sketch.maps_with(0):
        return found
    for more in range(1, MOST_IN_FRONT + 1):
        if around := sketch.maps_with(more):
            raise SubquadError(
                f"{layer} is called with {sketch.count} tokens, and its map has {around[0].grid.num_places} places: "
                f"give prefix={prefix + more} if the others stand in front of it"
            )
    return []


class _Sketch:
    """What is heard of a call: the maps in front of a layer, and how many tokens that is handed."""

    def __init__(self, layer: str, prefix: int) -> None:
        self.layer, self.prefix = layer, prefix
        self.maps: list[list[Origin]] = []
        self.count: int | None = None
        self._handed: list[tuple[str, torch.Size]] = []

    def maps_with(self, more: int) -> list[Origin]:
        """The last map of which the layer has so many more tokens than `prefix` and its places."""
        fitting = ([one for one in map_ if one.grid.num_tokens + more == self.count] for map_ in reversed(self.maps))
        return next(filter(None, fitting), [])

    def enters(self, path: str) -> Any:
        def hook(module: nn.Module, arguments: Any, named: Any) -> None:
            x = first_tensor(arguments, named)
            if not path:
                # a call that failed on its way is made once more
                self._handed.clear()
            if x is None or self.count is not None:
                return
            if x.dim() == 4:
                self._handed.append((path, x.shape))
            elif x.dim() == 3 and path == self.layer:
                self.count = _tokens_in(x)
            elif x.dim() == 3 and isinstance(module, nn.Linear) and self._handed:
                holder, (_, channels, *sides) = self._handed[-1]
                cuts = _cuts(sides, module.in_features / channels)
                self.maps.append([Origin(holder, self._grid(*map_), patch) for map_, patch in cuts])

        return hook

    def leaves(self, path: str) -> Any:
        def hook(module: nn.Module, arguments: Any, given: Any) -> None:
            if self._handed and self._handed[-1][0] == path:
                self._handed.pop()
            if self.count is None and isinstance(module, MAKERS) and isinstance(given, Tensor) and given.dim() == 4:
                self.maps.append([Origin(path, self._grid(*given.shape[-2:]))])

        return hook

    def _grid(self, height: int, width: int) -> TokenGrid:
        return TokenGrid(height, width, self.prefix)


def _tokens_in(x: Tensor) -> int:
    """How many tokens (b, n, c) are, or (n, b, c), as some have them."""
    return x.shape[0] if x.shape[1] == IMAGES else x.shape[1]


def _cuts(sides: Sequence[int], area: float) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Maps (rows, columns) of patches of so many pixels, and (height, width) of these; squares first."""
    whole = round(area)
    patches = [(y, whole // y) for y in range(1, whole + 1) if whole == area and whole % y == 0]
    cuts = [((sides[0] // y, sides[1] // x), (y, x)) for y, x in patches if y <= sides[0] and x <= sides[1]]
    return sorted(cuts, key=lambda cut: cut[1][0] != cut[1][1])


PROBED = 5
"""Places that are changed."""


def chosen_origin(network: nn.Module, origins: Sequence[Origin], layer: str, image: tuple[int, int, int]) -> Origin:
    """That on which a layer's tokens stand row by row, or the first where that is not known.

    The network is run for it, up to the layer, for images of random numbers that differ in one place each. Of networks
    that can't be copied or have no numbers yet, and behind other modules, it is not known.

    Args:
        network: which takes images.
        origins: of which the layer's tokens may be.
        layer: its path.
        image: (channels, height, width).

    Raises:
        SubquadError: they stand so on none.
    """
    refusals = []
    for origin in origins:
        refusal = _refusal(network, origin, layer, image)
        if refusal is None:
            return origin
        refusals.append(refusal)
    raise refusals[0]


def _refusal(network: nn.Module, origin: Origin, layer: str, image: tuple[int, int, int]) -> SubquadError | None:
    """What is to be said where tokens do not stand row by row on a map."""
    places = _some_places(origin.grid)
    handed = None
    if origin.patch is not None or isinstance(network.get_submodule(origin.path), MAKERS):
        handed = _tokens_of_changed(network, origin, layer, image, places)
    if handed is None or handed.shape[1] != origin.grid.num_tokens:
        # of other numbers of tokens the first call says so
        return None
    changes = (handed[1:] - handed[:1]).float().square().sum(dim=-1)
    for (y, x), found in zip(places, changes.argmax(dim=-1).tolist(), strict=True):
        if found != origin.grid.prefix + y * origin.grid.width + x:
            return SubquadError(
                f"the tokens of a {type(network).__name__} do not stand row by row, which mechanisms that know of "
                f"neighbours count on: token {found} of {layer} is that of row {y}, column {x} of "
                f"{origin.path or 'the image'}; {origin.grid.prefix} tokens stand in front"
            )
    return None


def _some_places(grid: TokenGrid) -> list[tuple[int, int]]:
    """(row, column), corners and others."""
    height, width = int(grid.height), int(grid.width)
    drawn = ((height * step // PROBED, width * (2 * step + 1) // (2 * PROBED)) for step in range(PROBED))
    return list(dict.fromkeys([(0, 0), (0, width - 1), (height - 1, 0), *drawn]))


def _tokens_of_changed(
    network: nn.Module, origin: Origin, layer: str, image: tuple[int, int, int], places: list[tuple[int, int]]
) -> Tensor | None:
    """Tokens (b, n, c) of an image as it is, and of images of which a place of the map is changed each.

    None where the network can't be run so.
    """
    handed: list[Tensor] = []

    def change(map_: Tensor) -> Tensor:
        height, width = origin.patch or (1, 1)
        changed = map_.clone()
        for number, (y, x) in enumerate(places, start=1):
            part = changed[number, :, y * height : (y + 1) * height, x * width : (x + 1) * width]
            part += 3 * torch.randn_like(part)
        return changed

    def in_front(module: nn.Module, arguments: Any, named: Any) -> Any:
        return (change(arguments[0]), *arguments[1:]), named

    def behind(module: nn.Module, arguments: Any, given: Tensor) -> Tensor:
        return change(given)

    def reached(module: nn.Module, arguments: Any, named: Any) -> None:
        x = first_tensor(arguments, named)
        assert x is not None
        handed.append(x if x.shape[0] == len(places) + 1 else x.transpose(0, 1))
        raise EnoughSeenError

    def listen(twin: nn.Module) -> None:
        part = twin.get_submodule(origin.path)
        if origin.patch is None:
            part.register_forward_hook(behind)
        else:
            part.register_forward_pre_hook(in_front, with_kwargs=True)
        twin.get_submodule(layer).register_forward_pre_hook(reached, with_kwargs=True)

    run_copied(network, image, len(places) + 1, listen)
    return handed[0] if handed else None
