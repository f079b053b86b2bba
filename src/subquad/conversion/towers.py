"""Where in a foreign network the attention layers stand, and which patch embedding their tokens come from."""

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from subquad.conversion.attention_layers import (
    Layer,
    host_of,
    layers_below,
    paths_in_pyramid,
    paths_of_layers,
    refuse_unknown,
    ways_to_maps,
)
from subquad.conversion.called_towers import found_by_a_call, may_be_asked, on_several_maps, told_by_a_call
from subquad.conversion.converted_attention import ConvertedAttention
from subquad.conversion.example_calls import Example
from subquad.conversion.families import converted_class
from subquad.conversion.grid_recorder import GridRecorder, is_called
from subquad.conversion.patch_embeddings import count_prefix, find_embedding, map_behind, reckons, root_of, stem_of
from subquad.conversion.pyramids import grids_of_layers, holder_of, in_common, resizing_behind
from subquad.conversion.sketched_calls import maps_of_calls
from subquad.conversion.tokens_order import chosen_origin
from subquad.conversion.tokens_origin import Origin
from subquad.conversion.tower import Tower, size_of, within
from subquad.errors import SubquadError, network_within
from subquad.grid import TokenGrid
from subquad.models.backbone import Backbone
from subquad.models.stated_inputs import image_channels
from subquad.models.variants import HOSTS

NOT_TAKEN = {
    "diffusers.models.transformers.transformer_hunyuan_video_framepack.HunyuanVideoFramepackTransformer3DModel": (
        "its tokens are those of several packs of frames, on maps of several sizes"
    ),
    "timm.models.crossvit.CrossVit": "its tokens stand on two maps, each with a class token that the other sees",
}
"""Networks whose layers are known, while their tokens stand otherwise than elsewhere, and why they are refused."""


def find_tower(
    model: nn.Module,
    *,
    img_size: tuple[int, ...] | None = None,
    prefix: int | None = None,
    given: Mapping[str, Any] | None = None,
) -> Tower:
    """The vision tower of a network: its last patch embedding's attention layers.

    Args:
        model: timm's, transformers', torchvision's, one of ours, or anything that is built of such layers.
        img_size: (height, width) that position parameters are made for, of a volume (depth, height, width); what the
            network says of itself if left out.
        prefix: tokens in front of the map; counted by the embedding's parameters if left out.
        given: the arguments of a call by name, of a network that takes more than images.

    Raises:
        SubquadError: there is no patch embedding, or there are no attention layers in blocks behind it, or all are of
            unknown kinds, of which it names one.
    """
    if not isinstance(model, nn.Module):
        opens = ": subquad.open_trained(…).model is that of a folder or file" if isinstance(model, str | Path) else ""
        hint = opens or network_within(model) or ": give its network, of a pipeline of diffusers `pipe.transformer`"
        raise SubquadError(f"a {type(model).__name__} is no network{hint}")
    if hasattr(model, "_orig_mod"):
        raise SubquadError("this network is compiled: give model._orig_mod, and compile what subquad.convert gives")
    modules = dict(model.named_modules())
    if already := [path for path, module in modules.items() if isinstance(module, ConvertedAttention)]:
        raise SubquadError(
            f"{already[0]} is converted already: take the network that it was made of, or subquad.restore(model) first"
        )
    for path, module in modules.items():
        if isinstance(module, Backbone):
            _refuse_given(given, module)
            return _own_tower(module, path, modules, within(img_size, 2))
    _refuse_by_name(modules)
    refuse_unknown("", modules)
    if (told := told_by_a_call(model, modules, img_size, prefix, given)) is not None:
        return told
    try:
        path, recorder = find_embedding(modules)
        root = root_of(path, modules)
    except SubquadError as error:
        if (found := found_by_a_call(model, modules, img_size, prefix)) is None:
            raise error from None
        return found
    if in_pyramid := paths_in_pyramid(root, modules):
        # one stage may hold the embedding, and others stand beside it
        root = holder_of([path, *paths_in_pyramid("", modules)], modules)
    refuse_unknown(root, modules)
    holder: Any = modules[root]
    img_size = within(img_size, recorder.most_sides(modules[path]))
    size = img_size or size_of(holder, model) or recorder.size_of(holder, modules[path])
    if size is None:
        raise SubquadError(f"{type(model).__name__} does not say which images it is made for: give img_size")
    ways = ways_to_maps(root, modules)
    if prefix is None:
        # a class token may come in behind the maps
        prefix = 0 if ways else count_prefix(holder, modules[path.rpartition(".")[0]])
    if in_pyramid and prefix:
        raise SubquadError(f"no tokens stand in front of the maps of a {type(holder).__name__}: leave prefix out")
    if ways:
        return _of_maps(root, modules, recorder, size, ways)
    if in_pyramid:
        return _pyramid(path, root, modules, recorder, size)
    try:
        stem = stem_of(path, root, modules, recorder)
    except SubquadError as error:
        if (found := found_by_a_call(model, modules, img_size, prefix)) is None:
            raise error from None
        return found
    whole = recorder.whole_size(getattr(holder, "config", None), size)
    grid = TokenGrid(*map_behind(stem, modules, recorder, whole), prefix)
    layers = tuple(layers_below(root, modules, grid))
    # layers that stand where they do whatever the image is: their maps are in their weights
    twice = TokenGrid(2 * grid.height, 2 * grid.width, prefix)
    stays = (a.grid == b.grid for a, b in zip(layers, layers_below(root, modules, twice), strict=True))
    if img_size not in (None, size_of(holder, model)) and any(stays):
        raise SubquadError(
            f"maps of {type(holder).__name__} have the sizes that it is made for: leave img_size out, and call "
            "set_input_size on the network instead"
        )
    example = None
    if may_be_asked([layer.path for layer in layers], modules):
        example = Example((image_channels(model), size[0], size[1]))
        if (found := on_several_maps(model, modules, example, prefix)) is not None:
            return found
        chosen_origin(model, [Origin(stem[-1], grid)], layers[0].path, example)
    return Tower(stem[-1], grid, layers, host_of(layers), recorder, example=example)


def other_towers(model: nn.Module, tower: Tower) -> list[str]:
    """Paths of parts with attention layers of known kinds behind a patch embedding of their own, beside a tower."""
    modules = dict(model.named_modules())
    inside = ".".join(in_common([tower.embedding, *(layer.path for layer in tower.layers)]))
    roots: dict[str, None] = {}
    if next(paths_of_layers("", modules), None) is None:
        return []
    for path, module in modules.items():
        if not (tower.recorder.hears(module) or reckons(module)):
            continue
        root = root_of(path, modules)
        apart = inside and root and not f"{inside}.".startswith(f"{root}.") and not f"{root}.".startswith(f"{inside}.")
        if apart and any(converted_class(modules[one]) is not None for one in paths_of_layers(root, modules)):
            roots[root] = None
    return list(roots)


def made_for(model: nn.Module, paths: Iterable[str]) -> tuple[int, int] | None:
    """(height, width) of the images that the part of a network that holds `paths` is made for, if it says so."""
    return size_of(_holder(model, paths), model)


def move_to(model: nn.Module, paths: Iterable[str], size: tuple[int, int]) -> None:
    """Have that part made for images of another size, as its own `set_input_size` does it."""
    _holder(model, paths).set_input_size(size)


def _holder(model: nn.Module, paths: Iterable[str]) -> Any:
    for module in model.modules():
        if isinstance(module, Backbone):
            return module
    return model.get_submodule(".".join(in_common(paths)))


def _pyramid(
    embedding: str,
    root: str,
    modules: dict[str, nn.Module],
    recorder: type[GridRecorder],
    size: tuple[int, ...],
) -> Tower:
    """A network of stages that convolutions lead to: a grid for each."""
    paths = list(paths_of_layers(root, modules))
    chain = resizing_behind(embedding, root, modules, recorder, paths)
    maps = accumulate(chain, lambda before, path: recorder.map_from(modules[path], before), initial=size)
    # a class token may come in with the map of the last stage
    holders = [modules[one.rpartition(".")[0]] for one in chain]
    sides = list(maps)[1:]
    grids = [TokenGrid(y, x, count_prefix(None, one)) for (y, x), one in zip(sides, holders, strict=True)]
    standing = grids_of_layers(paths, chain, modules, grids)
    layers = tuple(layers_below(root, modules, grids[0], standing))
    return Tower(embedding, grids[0], layers, host_of(layers), recorder, tuple(chain[1:]))


def _of_maps(
    root: str,
    modules: dict[str, nn.Module],
    recorder: type[GridRecorder],
    size: tuple[int, ...],
    ways: dict[str, Callable[[Tensor], TokenGrid]],
) -> Tower:
    """A network whose layers are handed maps: these are their grids, whatever stands in front of them."""
    height, width = size
    example = Example((image_channels(modules[root]), height, width))
    try:
        standing = _maps_within(root, modules, example, ways)
    except SubquadError:
        # a part may be handed something else than images, by what stands around it
        if not root:
            raise
        standing = _maps_within("", modules, example, ways)
    layers = tuple(layers_below(root, modules, next(iter(standing.values())), standing))
    return Tower(root, layers[0].grid, layers, host_of(layers), recorder)


def _maps_within(
    root: str,
    modules: dict[str, nn.Module],
    example: Example,
    ways: dict[str, Callable[[Tensor], TokenGrid]],
) -> dict[str, TokenGrid]:
    """Where the tokens of layers stand where the part at `root` is called for images."""
    within = len(root) + 1 if root else 0
    seen = maps_of_calls(modules[root], {path[within:]: way for path, way in ways.items()}, example)
    # what is called in training alone stands where the layer in front of it does: calls say where
    return {path: seen[path[within:]] for path in ways if path[within:] in seen}


def _own_tower(backbone: Backbone, root: str, modules: dict[str, nn.Module], img_size: Any) -> Tower:
    """One of our networks: a grid for each stage."""
    embedding = f"{root}.{backbone.first_conv}".lstrip(".")
    sizes = backbone.grids(img_size or backbone.img_size)
    grids = [TokenGrid(*one.shape, stage.grid.prefix) for one, stage in zip(sizes, backbone.stages, strict=True)]
    layers: list[Layer] = []
    for number, grid in enumerate(grids):
        layers.extend(layers_below(f"{root}.stages.{number}".lstrip("."), modules, grid))
    if not layers:
        raise SubquadError(f"{type(backbone).__name__} has no attention layers that could be replaced")
    host = next((name for name, cls in HOSTS.items() if isinstance(backbone, cls)), "vit")
    return Tower(embedding, grids[0], tuple(layers), host)


def _refuse_given(given: Any, backbone: Backbone) -> None:
    """Raise where a call is given of one of our networks, which take images."""
    if given is not None:
        raise SubquadError(
            f"where tokens of a {type(backbone).__name__} of ours stand is known: leave `given` out, and say img_size "
            "if it is to be another"
        )


def _refuse_by_name(modules: dict[str, nn.Module]) -> None:
    """Raise where one of these is a network of `NOT_TAKEN`."""
    for module in modules.values():
        for name, reason in NOT_TAKEN.items():
            if is_called(module, name):
                raise SubquadError(f"a {name.rpartition('.')[2]} can't be converted: {reason}")
