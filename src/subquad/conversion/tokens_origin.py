"""What tokens come from in a network of anybody's code: the last map in front of its attention layers.

A call without numbers shows of which map the tokens are as many, whatever makes it; `tokens_order.py` asks whether they
stand there row by row. In networks of several maps, as U-Nets, each layer has its own: the one that is handed to what
stands around it, else the last one in front.

Letters: b batch, c channels, n tokens.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from subquad.conversion.attention_layers import is_one_of_several
from subquad.conversion.checkpointed_calls import first_tensor
from subquad.conversion.example_calls import Example
from subquad.conversion.sketched_calls import IMAGES, MAKERS, run_sketched
from subquad.errors import SubquadError
from subquad.grid import TokenGrid

Way = Callable[[Tensor], TokenGrid]
"""What says where the tokens of a map stand that a layer is called with."""


MOST_IN_FRONT = 16
"""Tokens in front of a map that nothing names, which are taken for such."""


@dataclass(frozen=True)
class Origin:
    """What a layer's tokens come from.

    Attributes:
        path: of the convolution or pooling that gives a map, or of the part that is handed what patches are cut of;
            the layer's own where that is handed a map itself.
        grid: of the tokens, those in front included.
        patch: (height, width) of patches that code without a module cuts for a linear layer; None behind a map.
    """

    path: str
    grid: TokenGrid
    patch: tuple[int, int] | None = None


def origins_of_tokens(network: nn.Module, layer: str, example: Example, prefix: int) -> list[Origin]:
    """The last map before a layer is called that has a place for each of its tokens; of patches all that may be cut.

    The network is run for that, without numbers: so the way from an image to tokens may be any. A map is what a
    convolution or a pooling gives, or the patches that a linear layer is handed.

    Args:
        network: which takes what the example is of.
        layer: its path.
        example: of a call.
        prefix: tokens in front of the map.

    Returns:
        None of them where no map in front of the layer has as many places.

    Raises:
        SubquadError: the network can't be run so, or has a few tokens more than places.
    """
    seen = _sketched(network, {layer: None}, example, prefix).get(layer)
    return [] if seen is None else seen.maps_in_front(layer)


class Origins(NamedTuple):
    """What the tokens of some layers come from, by the paths of these, and which layers see other tokens than those."""

    of: dict[str, Origin]
    crossing: frozenset[str]


def origins_of_layers(
    network: nn.Module,
    layers: Mapping[str, Way | None],
    example: Example,
    prefix: int,
    *,
    others: Collection[str] = (),
    turning: Collection[str] = (),
) -> Origins:
    """What the tokens of each of some layers come from, as far as the layers are called; see `origins_of_tokens`.

    Args:
        network: which takes what the example is of.
        layers: for each, by its path, what says where the tokens of a call stand, if it is handed maps.
        example: of a call.
        prefix: tokens in front of each map.
        others: of which nothing is asked but whether they see other tokens, as those of a text.
        turning: of the layers those that are handed positions, which are no other tokens.

    Raises:
        SubquadError: the network can't be run so, or one of these, in a block, has tokens that no map has a place for.
    """
    found: dict[str, Origin] = {}
    heard = _sketched(network, dict.fromkeys(others) | dict(layers), example, prefix)
    crossing = frozenset(layer for layer, seen in heard.items() if seen.crosses and layer not in turning)
    for layer, seen in heard.items():
        if layer in crossing or layer in others:
            continue
        if seen.map is not None:
            found[layer] = Origin(layer, seen.map)
        elif origins := seen.around or seen.maps_in_front(layer):
            found[layer] = origins[0]
        elif is_one_of_several(layer):
            raise SubquadError(
                f"{layer} is called with {seen.count} tokens, and no map in front of it has as many places: leave its "
                "block out of `blocks`, or register a family (docs/convert.md)"
            )
    return Origins(found, crossing)


@dataclass(frozen=True)
class _Seen:
    """What is heard of the first call of a layer.

    Attributes:
        count: of its tokens.
        map: where they stand, if it is handed a map.
        maps: what was in front of it, the last one last, with all cuts of each.
        around: of the maps with as many places, those that are handed to what stands around it, the innermost first.
        prefix: tokens in front of each.
        crosses: whether it is handed other tokens, too.
    """

    count: int
    map: TokenGrid | None
    maps: tuple[list[Origin], ...]
    around: tuple[Origin, ...]
    prefix: int
    crosses: bool

    def maps_in_front(self, layer: str) -> list[Origin]:
        """The last map with a place for each token; raises a SubquadError where there are a few tokens more."""
        if found := self._with(0):
            return found
        for more in range(1, MOST_IN_FRONT + 1):
            if around := self._with(more):
                raise SubquadError(
                    f"{layer} is called with {self.count} tokens, and its map has {around[0].grid.num_places} places: "
                    f"give prefix={self.prefix + more} if the others stand in front of it"
                )
        return []

    def _with(self, more: int) -> list[Origin]:
        """The last map of which the layer has so many more tokens than `prefix` and its places."""
        fitting = ([one for one in map_ if one.grid.num_tokens + more == self.count] for map_ in reversed(self.maps))
        return next(filter(None, fitting), [])


def _sketched(network: nn.Module, layers: Mapping[str, Way | None], example: Example, prefix: int) -> dict[str, _Seen]:
    """What is heard of the layers where a network is run for an example, without numbers."""
    sketch = _Sketch(layers, prefix)
    handles = []
    for path, part in network.named_modules():
        handles.append(part.register_forward_pre_hook(sketch.enters(path), with_kwargs=True))
        handles.append(part.register_forward_hook(sketch.leaves(path)))
    run_sketched(network, example, handles)
    return sketch.seen


class _Sketch:
    """What is heard of a call: the maps in front of some layers, and what these are handed."""

    def __init__(self, layers: Mapping[str, Way | None], prefix: int) -> None:
        self.layers, self.prefix = layers, prefix
        self.seen: dict[str, _Seen] = {}
        self.maps: list[list[Origin]] = []
        self._handed: list[tuple[str, torch.Size]] = []

    @property
    def _has_all(self) -> bool:
        return len(self.seen) == len(self.layers)

    def enters(self, path: str) -> Any:
        def hook(module: nn.Module, arguments: Any, named: Any) -> None:
            x = first_tensor(arguments, named)
            if not path:
                # a call that failed on its way is made once more
                self._handed.clear()
            if x is None or self._has_all:
                return
            if path in self.layers and x.dim() in (3, 4):
                self.seen.setdefault(path, self._seen(path, x, (*arguments, *named.values())))
            if x.dim() in (4, 5):
                # the maps of a volume stand below one another
                self._handed.append((path, x.shape if x.dim() == 4 else x.flatten(2, 3).shape))
            elif x.dim() == 3 and isinstance(module, nn.Linear) and self._handed and path not in self.layers:
                holder, (_, channels, *sides) = self._handed[-1]
                cuts = _cuts(sides, module.in_features / channels)
                self.maps.append([Origin(holder, self._grid(*map_), patch) for map_, patch in cuts])

        return hook

    def leaves(self, path: str) -> Any:
        def hook(module: nn.Module, arguments: Any, given: Any) -> None:
            if self._handed and self._handed[-1][0] == path:
                self._handed.pop()
            if not self._has_all and isinstance(module, MAKERS) and isinstance(given, Tensor) and given.dim() == 4:
                self.maps.append([Origin(path, self._grid(*given.shape[-2:]))])

        return hook

    def _seen(self, path: str, x: Tensor, handed: Iterable[Any]) -> _Seen:
        way = self.layers[path]
        map_ = None if way is None else way(x)
        count = _tokens_in(x) if map_ is None else int(map_.num_places)
        around = [Origin(one, self._grid(*shape[2:]), (1, 1)) for one, shape in reversed(self._handed)]
        fitting = tuple(one for one in around if one.grid.num_tokens == count and path.startswith(f"{one.path}."))
        tensors = [one for one in handed if isinstance(one, Tensor) and one.dim() == 3 == x.dim()]
        crosses = any(one is not x and len(one) == len(x) for one in tensors)
        return _Seen(count, map_, tuple(self.maps), fitting, self.prefix, crosses)

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
