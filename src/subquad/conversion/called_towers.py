"""Towers of networks that say nothing of where tokens stand: a call shows on which map those of each layer do."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from subquad.conversion.attention_layers import host_of, layers_at, layers_below, paths_of_layers
from subquad.conversion.example_calls import Example, check_given
from subquad.conversion.families import converted_class
from subquad.conversion.image_recorder import SurroundingRecorder
from subquad.conversion.patch_embeddings import count_prefix, find_embedding
from subquad.conversion.pyramids import in_common
from subquad.conversion.tokens_order import check_rows, chosen_origin
from subquad.conversion.tokens_origin import Origins, origins_of_layers, origins_of_tokens
from subquad.conversion.tower import LIBRARIES, Tower, size_of, within
from subquad.diffusion.called_with import arguments_of
from subquad.errors import SubquadError
from subquad.models.stated_inputs import image_channels


def told_by_a_call(
    model: nn.Module, modules: dict[str, nn.Module], img_size: Any, prefix: int | None, given: Mapping[str, Any] | None
) -> Tower | None:
    """The tower of a network that a call is given of, or one is known of, or whose layers are handed maps; else None.

    Raises:
        SubquadError: what is given says nothing, or a call shows no tower.
    """
    if given is not None:
        check_given(given)
        _refuse_given_in_vain(model, modules, img_size)
        return _by_a_call(model, modules, Example(given=given), prefix)
    if (known := arguments_of(model, img_size)) is not None:
        return _by_a_call(model, modules, Example(given=known), prefix)
    if _hands_maps(modules):
        return _by_a_call(model, modules, _example_of_images(model, img_size), prefix)
    return None


def _by_a_call(model: nn.Module, modules: dict[str, nn.Module], example: Example, prefix: int | None) -> Tower:
    """The tower of a network of which a call shows on which map the tokens of each layer stand.

    Raises:
        SubquadError: it does not.
    """
    paths = list(paths_of_layers("", modules, anywhere=True))
    origins = _origins(model, modules, paths, example, prefix)
    if not origins.of:
        first = paths[0] if paths else "no attention layer"
        raise SubquadError(f"{first} is not called where a {type(model).__name__} is run for {example}")
    return _tower_of(model, modules, origins, example)


def found_by_a_call(model: Any, modules: dict[str, nn.Module], img_size: Any, prefix: int | None) -> Tower | None:
    """The tower of a network in which tokens come from the map of any part: a call shows from which.

    None where it may not be asked, or no map has a place for each token.

    Raises:
        SubquadError: the network does not say its size, or can't be run.
    """
    paths = list(paths_of_layers("", modules))
    known = [one for one in paths_of_layers("", modules, anywhere=True) if converted_class(modules[one]) is not None]
    if not known or _are_of_library(known, modules):
        return None
    example = _example_of_images(model, img_size)
    if not paths:
        return _by_a_call(model, modules, example, prefix)
    prefix = _prefix_of(paths, modules) if prefix is None else prefix
    if (several := on_several_maps(model, modules, example, prefix)) is not None:
        return several
    origins = origins_of_tokens(model, paths[0], example, prefix)
    if not origins:
        return None
    found = chosen_origin(model, origins, paths[0], example)
    layers = tuple(layers_below("", modules, found.grid))
    return Tower(found.path, found.grid, layers, host_of(layers), patch=found.patch, example=example)


def on_several_maps(
    model: nn.Module, modules: dict[str, nn.Module], example: Example, prefix: int | None
) -> Tower | None:
    """The tower of a network whose layers have tokens of several maps, as those of stages; None where all are alike."""
    try:
        origins = _origins(model, modules, list(paths_of_layers("", modules)), example, prefix)
    except SubquadError:
        # what a call can't show, others may know
        return None
    if len({origin.grid for origin in origins.of.values()}) < 2:
        return None
    return _tower_of(model, modules, origins, example)


def _origins(
    model: nn.Module, modules: dict[str, nn.Module], paths: Sequence[str], example: Example, prefix: int | None
) -> Origins:
    """What the tokens of the layers at some paths come from."""
    prefix = _prefix_of(paths, modules) if prefix is None else prefix
    families = {path: converted_class(modules[path]) for path in paths}
    ways = {
        path: one.way_to_map(modules[path]) if one.is_handed_maps else None
        for path, one in families.items()
        if one is not None
    }
    others = [path for path, one in families.items() if one is None]
    turning = [path for path, one in families.items() if one is not None and one.asks_for_calls]
    return origins_of_layers(model, ways, example, prefix, others=others, turning=turning)


def _tower_of(model: nn.Module, modules: dict[str, nn.Module], origins: Origins, example: Example) -> Tower:
    """That of layers whose tokens come from several maps."""
    if type(model).__module__.partition(".")[0] not in LIBRARIES:
        check_rows(model, origins.of, example)
    standing = {path: origin.grid for path, origin in origins.of.items()}
    there = set(paths_of_layers("", modules)) - origins.crossing
    paths = [one for one in paths_of_layers("", modules, anywhere=True) if one in there or one in origins.of]
    layers = tuple(layers_at(paths, modules, next(iter(standing.values())), standing))
    apart = {origin.path: origin for path, origin in origins.of.items() if origin.path != path}
    if not apart:
        listener = next(layer.known.listener for layer in layers if layer.path in origins.of and layer.known)
        return Tower("", layers[0].grid, layers, host_of(layers), listener, example=example)
    first, *others = apart
    grid = apart[first].grid
    return Tower(first, grid, layers, host_of(layers), SurroundingRecorder, tuple(others), example=example)


def _example_of_images(model: Any, img_size: Any) -> Example:
    """Images of the size that is asked for, or that a network says it is made for."""
    size = within(img_size, 2) or size_of(model, model)
    if size is None:
        raise SubquadError(
            f"a {type(model).__name__} has no patch embedding, a convolution whose stride is its kernel's size, and "
            "does not say which images it is made for: give img_size, for a call to show where its tokens stand"
        )
    return Example((image_channels(model), size[0], size[1]))


def _prefix_of(layers: Iterable[str], modules: dict[str, nn.Module]) -> int:
    """Tokens in front of a map, as the part that holds the blocks says it, or what holds that."""
    parts = in_common(layers)
    holders = (modules[".".join(parts[:length])] for length in range(len(parts), -1, -1))
    return next((count for one in holders if (count := count_prefix(one, None))), 0)


def _hands_maps(modules: dict[str, nn.Module]) -> bool:
    """Whether layers of a network of anybody's code are handed maps."""
    families = (converted_class(modules[path]) for path in paths_of_layers("", modules))
    return any(one is not None and one.stands_anywhere for one in families)


def _refuse_given_in_vain(model: Any, modules: dict[str, nn.Module], img_size: Any) -> None:
    """Raise where a call shows nothing that is not known, or a size stands beside it."""
    if img_size is not None:
        raise SubquadError("what is given has its sizes: leave img_size out")
    if type(model).__module__.partition(".")[0] in LIBRARIES:
        try:
            path, _ = find_embedding(modules)
        except SubquadError:
            return
        raise SubquadError(
            f"where tokens of a {type(model).__name__} stand is known, by its {path}: leave `given` out, and say "
            "img_size if it is to be another"
        )


def may_be_asked(layers: Sequence[str], modules: dict[str, nn.Module]) -> bool:
    """Whether a network may be run to see where the tokens of these layers stand: where its code is anybody's."""
    families = (converted_class(modules[path]) for path in layers)
    is_anybodys = any(family is not None and family.is_anybodys for family in families)
    return is_anybodys and not _are_of_library(layers, modules)


def _are_of_library(layers: Sequence[str], modules: dict[str, nn.Module]) -> bool:
    """Whether what holds these layers is known, and refused for reasons of its own."""
    parts = in_common(layers)
    holders = (modules[".".join(parts[:length])] for length in range(len(parts) + 1))
    return any(type(one).__module__.partition(".")[0] in LIBRARIES for one in holders)
