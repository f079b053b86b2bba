"""Whether tokens stand row by row on the map that they come from: of a changed place the right token changes most.

A network of anybody's code is run for that with random numbers, up to its layers.

Letters: b batch, c channels, n tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from subquad.conversion.checkpointed_calls import first_tensor
from subquad.conversion.copied_calls import EnoughSeenError, run_copied
from subquad.conversion.example_calls import Example
from subquad.conversion.sketched_calls import MAKERS
from subquad.conversion.tokens_origin import Origin
from subquad.errors import SubquadError
from subquad.grid import TokenGrid

PROBED = 5
"""Places that are changed."""


MOST_PAIRS = 2**26
"""Of tokens of a batch, whose scores a network forms in each head where it is run through all of its layers."""


def chosen_origin(network: nn.Module, origins: Sequence[Origin], layer: str, example: Example) -> Origin:
    """That on which a layer's tokens stand row by row, or the first where that is not known.

    The network is run for it, up to the layer, for images of random numbers that differ in one place each. Of networks
    that can't be copied or have no numbers yet, and behind other modules, it is not known.

    Args:
        network: which takes what the example is of.
        origins: of which the layer's tokens may be.
        layer: its path.
        example: of a call.

    Raises:
        SubquadError: they stand so on none.
    """
    refusals = []
    for origin in origins:
        refusal = _refusal(network, origin, layer, example)
        if refusal is None:
            return origin
        refusals.append(refusal)
    raise refusals[0]


def _refusal(network: nn.Module, origin: Origin, layer: str, example: Example) -> SubquadError | None:
    """What is to be said where tokens do not stand row by row on a map."""
    handed = None
    if origin.patch is not None or isinstance(network.get_submodule(origin.path), MAKERS):
        handed = _tokens_of_changed(network, origin, layer, example, _some_places(origin.grid))
    return None if handed is None else _refusal_of(network, origin, layer, handed)


def _refusal_of(network: nn.Module, origin: Origin, layer: str, handed: Tensor) -> SubquadError | None:
    """The same of tokens (b, n, c) of a map as it is, and of those of which `_some_places` are changed each."""
    places = _some_places(origin.grid)[: len(handed) - 1]
    if handed.shape[1] != origin.grid.num_tokens:
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


def check_rows(network: nn.Module, origins: Mapping[str, Origin], example: Example) -> None:
    """Raise where tokens of one of some layers do not stand row by row on its map, as far as that is known.

    The network is run once for all of them, see `chosen_origin`: at each map what its places were changed to further
    in front is forgotten.

    Args:
        network: which takes what the example is of.
        origins: for each layer, by its path.
        example: of a call.

    Raises:
        SubquadError: they do not.
    """
    apart = {layer: origin for layer, origin in origins.items() if origin.path != layer}
    for layer, handed in _tokens_behind(network, apart, example).items():
        if (refusal := _refusal_of(network, apart[layer], layer, handed)) is not None:
            raise refusal


def _tokens_behind(network: nn.Module, origins: Mapping[str, Origin], example: Example) -> dict[str, Tensor]:
    """Tokens (b, n, c) of each layer, of an example as it is, and of some of which a place of the layer's map differs.

    Those of a few layers, or of none, where the network can't be run so.
    """
    tokens = max((int(one.grid.num_tokens) for one in origins.values()), default=1)
    probed = MOST_PAIRS // tokens**2 - 1
    if probed < 1:
        return {}
    places = {one.path: _some_places(one.grid)[:probed] for one in origins.values()}
    most = max((len(some) for some in places.values()), default=0)
    handed: dict[str, Tensor] = {}

    def listen(twin: nn.Module) -> None:
        for origin in {one.path: one for one in origins.values()}.values():
            _hook_change(twin, origin, partial(_changed_of_first, places=places[origin.path]))
        for layer in origins:
            twin.get_submodule(layer).register_forward_pre_hook(reached(layer), with_kwargs=True)

    def reached(layer: str) -> Any:
        def hook(module: nn.Module, arguments: Any, named: Any) -> None:
            x = first_tensor(arguments, named)
            if x is not None and layer not in handed:
                count = len(places[origins[layer].path]) + 1
                handed[layer] = (x if x.shape[0] == most + 1 else x.transpose(0, 1))[:count]
            if len(handed) == len(origins):
                raise EnoughSeenError

        return hook

    if origins:
        run_copied(network, example, most + 1, listen)
    return handed


def _changed(map_: Tensor, places: Sequence[tuple[int, int]], patch: tuple[int, int] = (1, 1)) -> Tensor:
    """A batch (b, c, y, x) of which all but the first differ in a place each."""
    changed = map_.clone(memory_format=torch.contiguous_format)
    # the maps of a volume stand below one another
    maps = changed.flatten(2, 3) if changed.dim() == 5 else changed
    for number, (y, x) in enumerate(places, start=1):
        part = maps[number, :, y * patch[0] : (y + 1) * patch[0], x * patch[1] : (x + 1) * patch[1]]
        part += 3 * torch.randn_like(part)
    return changed


def _changed_of_first(map_: Tensor, places: Sequence[tuple[int, int]]) -> Tensor:
    """The same of the first of a batch alone."""
    return _changed(map_[:1].expand_as(map_), places)


def _hook_change(twin: nn.Module, origin: Origin, change: Callable[[Tensor], Tensor]) -> None:
    """Let a network be run on with the map of an origin changed."""

    def in_front(module: nn.Module, arguments: Any, named: Any) -> Any:
        if arguments:
            return (change(arguments[0]), *arguments[1:]), named
        first = next(iter(named))
        return arguments, named | {first: change(named[first])}

    def behind(module: nn.Module, arguments: Any, given: Tensor) -> Tensor:
        return change(given)

    part = twin.get_submodule(origin.path)
    if origin.patch is None:
        part.register_forward_hook(behind)
    else:
        part.register_forward_pre_hook(in_front, with_kwargs=True)


def _tokens_of_changed(
    network: nn.Module, origin: Origin, layer: str, example: Example, places: list[tuple[int, int]]
) -> Tensor | None:
    """Tokens (b, n, c) of an image as it is, and of images of which a place of the map is changed each.

    None where the network can't be run so.
    """
    handed: list[Tensor] = []

    def reached(module: nn.Module, arguments: Any, named: Any) -> None:
        x = first_tensor(arguments, named)
        assert x is not None
        handed.append(x if x.shape[0] == len(places) + 1 else x.transpose(0, 1))
        raise EnoughSeenError

    def listen(twin: nn.Module) -> None:
        _hook_change(twin, origin, lambda map_: _changed(map_, places, origin.patch or (1, 1)))
        twin.get_submodule(layer).register_forward_pre_hook(reached, with_kwargs=True)

    run_copied(network, example, len(places) + 1, listen)
    return handed[0] if handed else None
