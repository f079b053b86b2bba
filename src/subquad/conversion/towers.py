"""Where in a foreign network the attention layers stand, and which patch embedding their tokens come from."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from subquad.conversion.attention_layers import (
    Layer,
    host_of,
    layers_at,
    layers_below,
    paths_in_pyramid,
    paths_of_layers,
    refuse_unknown,
    ways_to_maps,
)
from subquad.conversion.converted_attention import ConvertedAttention, is_quadratic
from subquad.conversion.example_calls import Example, check_given
from subquad.conversion.families import converted_class
from subquad.conversion.families.diffusers_unets import example_of
from subquad.conversion.families.twins import OF_LIBRARIES
from subquad.conversion.grid_recorder import GridRecorder, is_called
from subquad.conversion.image_recorder import ImageRecorder, SurroundingRecorder
from subquad.conversion.patch_embeddings import count_prefix, find_embedding, map_behind, reckons, root_of, stem_of
from subquad.conversion.pyramids import grids_of_layers, holder_of, in_common, resizing_behind, stage_of
from subquad.conversion.sketched_calls import maps_of_calls
from subquad.conversion.tokens_origin import (
    Origin,
    Origins,
    check_rows,
    chosen_origin,
    origins_of_layers,
    origins_of_tokens,
)
from subquad.errors import SubquadError, network_within
from subquad.grid import TokenGrid
from subquad.models.backbone import Backbone
from subquad.models.layers import SelfAttention
from subquad.models.stated_inputs import OF_IMAGES, image_channels, said_size, size_of_weights
from subquad.models.variants import HOSTS

LIBRARIES = OF_LIBRARIES - {"torch"}
"""Whose networks are known, and are refused for reasons of their own."""


@dataclass(frozen=True)
class Tower:
    """A patch embedding and the attention layers behind it.

    Attributes:
        embedding: path of the module that knows where tokens stand, as the convolution that cuts an image into patches.
        grid: of the image that position parameters are made for, its prefix tokens included.
        layers: in the order of the blocks.
        host: the host whose usual settings mechanisms have here, see `Traits.in_hosts`.
        recorder: what listens to the embedding.
        resizing: paths of the convolutions behind it that lead from stage to stage, to which it listens as well.
        patch: (height, width) of the patches that the part at `embedding` cuts, where it is no module that shows it.
        example: what a network of anybody's code may be run for, to see what layers are handed.
    """

    embedding: str
    grid: TokenGrid
    layers: tuple[Layer, ...]
    host: str = "vit"
    recorder: type[GridRecorder] = GridRecorder
    resizing: tuple[str, ...] = ()
    patch: tuple[int, int] | None = None
    example: Example | None = None

    def make_recorder(self) -> GridRecorder:
        """One that listens to the embedding, for all layers."""
        if self.patch is not None:
            return ImageRecorder(self.grid.prefix, self.patch)
        return self.recorder(self.grid.prefix)

    @property
    def depths(self) -> list[int]:
        """Blocks of each stage."""
        return [len(stage) for stage in self.paths_by_stage]

    @property
    def is_plain(self) -> bool:
        """Whether every layer forms all pairs of the tokens of one map, and all blocks are alike."""
        forms_pairs = all(_mixes_quadratically(layer.module) for layer in self.layers)
        on_one_map = all(layer.is_target and layer.grid == self.grid for layer in self.layers)
        return forms_pairs and on_one_map and self.host == "vit"

    @property
    def paths_by_stage(self) -> list[list[str]]:
        """Where the layers of each stage stand."""
        stages = groupby((layer.path for layer in self.layers), key=stage_of)
        return [list(stage) for _, stage in stages]


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
            return _own_tower(module, path, modules, _within(img_size, 2))
    _refuse_by_name(modules)
    refuse_unknown("", modules)
    if given is not None:
        check_given(given)
        _refuse_given_in_vain(model, modules, img_size)
        return _by_a_call(model, modules, Example(given=given), prefix)
    if (example := example_of(model, img_size)) is not None:
        return _by_a_call(model, modules, example, prefix)
    if _hands_maps(modules):
        return _by_a_call(model, modules, _example_of(model, img_size), prefix)
    try:
        path, recorder = find_embedding(modules)
        root = root_of(path, modules)
    except SubquadError as error:
        if (found := _found_by_a_call(model, modules, img_size, prefix)) is None:
            raise error from None
        return found
    if in_pyramid := paths_in_pyramid(root, modules):
        # one stage may hold the embedding, and others stand beside it
        root = holder_of([path, *paths_in_pyramid("", modules)], modules)
    refuse_unknown(root, modules)
    holder: Any = modules[root]
    img_size = _within(img_size, recorder.most_sides(modules[path]))
    size = img_size or _size_of(holder, model) or recorder.size_of(holder, modules[path])
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
        if (found := _found_by_a_call(model, modules, img_size, prefix)) is None:
            raise error from None
        return found
    whole = recorder.whole_size(getattr(holder, "config", None), size)
    grid = TokenGrid(*map_behind(stem, modules, recorder, whole), prefix)
    layers = tuple(layers_below(root, modules, grid))
    # layers that stand where they do whatever the image is: their maps are in their weights
    twice = TokenGrid(2 * grid.height, 2 * grid.width, prefix)
    stays = (a.grid == b.grid for a, b in zip(layers, layers_below(root, modules, twice), strict=True))
    if img_size not in (None, _size_of(holder, model)) and any(stays):
        raise SubquadError(
            f"maps of {type(holder).__name__} have the sizes that it is made for: leave img_size out, and call "
            "set_input_size on the network instead"
        )
    example = None
    if _may_be_asked([layer.path for layer in layers], modules):
        example = Example((image_channels(model), size[0], size[1]))
        if (found := _on_several_maps(model, modules, example, prefix)) is not None:
            return found
        chosen_origin(model, [Origin(stem[-1], grid)], layers[0].path, example)
    return Tower(stem[-1], grid, layers, host_of(layers), recorder, example=example)


def other_towers(model: nn.Module, tower: Tower) -> list[str]:
    """Paths of parts with attention layers of known kinds behind a patch embedding of their own, beside a tower."""
    modules = dict(model.named_modules())
    inside = ".".join(in_common([tower.embedding, *(layer.path for layer in tower.layers)]))
    roots: dict[str, None] = {}
    in_blocks = next(paths_of_layers("", modules), None) is not None
    for path, module in modules.items():
        if not (tower.recorder.hears(module) or reckons(module)) or not in_blocks:
            continue
        root = root_of(path, modules)
        apart = inside and root and not f"{inside}.".startswith(f"{root}.") and not f"{root}.".startswith(f"{inside}.")
        if apart and any(converted_class(modules[one]) is not None for one in paths_of_layers(root, modules)):
            roots[root] = None
    return list(roots)


def made_for(model: nn.Module, paths: Iterable[str]) -> tuple[int, int] | None:
    """(height, width) of the images that the part of a network that holds `paths` is made for, if it says so."""
    return _size_of(_holder(model, paths), model)


def move_to(model: nn.Module, paths: Iterable[str], size: tuple[int, int]) -> None:
    """Have that part made for images of another size, as its own `set_input_size` does it."""
    _holder(model, paths).set_input_size(size)


def _holder(model: nn.Module, paths: Iterable[str]) -> Any:
    for module in model.modules():
        if isinstance(module, Backbone):
            return module
    return model.get_submodule(".".join(in_common(paths)))


def _mixes_quadratically(module: Any) -> bool:
    """Whether this layer's cost grows with n²; foreign ones do, ours say it."""
    return not isinstance(module, SelfAttention) or is_quadratic(module.inner)


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


def _found_by_a_call(model: Any, modules: dict[str, nn.Module], img_size: Any, prefix: int | None) -> Tower | None:
    """The tower of a network in which tokens come from the map of any part: a call shows from which.

    None where it may not be asked, or no map has a place for each token.

    Raises:
        SubquadError: the network does not say its size, or can't be run.
    """
    paths = list(paths_of_layers("", modules))
    known = [one for one in paths_of_layers("", modules, anywhere=True) if converted_class(modules[one]) is not None]
    if not known or _are_of_library(known, modules):
        return None
    example = _example_of(model, img_size)
    if not paths:
        return _by_a_call(model, modules, example, prefix)
    prefix = _prefix_of(paths, modules) if prefix is None else prefix
    if (several := _on_several_maps(model, modules, example, prefix)) is not None:
        return several
    origins = origins_of_tokens(model, paths[0], example, prefix)
    if not origins:
        return None
    found = chosen_origin(model, origins, paths[0], example)
    layers = tuple(layers_below("", modules, found.grid))
    return Tower(found.path, found.grid, layers, host_of(layers), patch=found.patch, example=example)


def _example_of(model: Any, img_size: Any) -> Example:
    """Images of the size that is asked for, or that a network says it is made for."""
    size = _within(img_size, 2) or _size_of(model, model)
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
    paths = list(paths_of_layers("", modules))
    families = (converted_class(modules[path]) for path in paths)
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


def _on_several_maps(
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


def _may_be_asked(layers: Sequence[str], modules: dict[str, nn.Module]) -> bool:
    """Whether a network may be run to see where the tokens of these layers stand: where its code is anybody's."""
    families = (converted_class(modules[path]) for path in layers)
    is_anybodys = any(family is not None and family.is_anybodys for family in families)
    return is_anybodys and not _are_of_library(layers, modules)


def _are_of_library(layers: Sequence[str], modules: dict[str, nn.Module]) -> bool:
    """Whether what holds these layers is known, and refused for reasons of its own."""
    parts = in_common(layers)
    holders = (modules[".".join(parts[:length])] for length in range(len(parts) + 1))
    return any(type(one).__module__.partition(".")[0] in LIBRARIES for one in holders)


def _refuse_by_name(modules: dict[str, nn.Module]) -> None:
    """Raise where one of these is a network of `NOT_TAKEN`."""
    for module in modules.values():
        for name, reason in NOT_TAKEN.items():
            if is_called(module, name):
                raise SubquadError(f"a {name.rpartition('.')[2]} can't be converted: {reason}")


def _within(size: tuple[int, ...] | None, most: int) -> tuple[int, ...] | None:
    """A size that was asked for; raises a SubquadError where it has more sides than the network's images."""
    if size is not None and len(size) > most:
        raise SubquadError(
            f"img_size has {len(size)} sides, {size}, and this network takes images: give height and width"
        )
    return size


def _size_of(root: Any, model: Any) -> tuple[int, int] | None:
    """(height, width) of the images, or of what else a network is handed, that it says it is made for."""
    # configurations first: networks of diffusers warn where they are asked for what stands there
    config = getattr(model, "config", None)
    holders = (getattr(root, "patch_embed", None), getattr(root, "config", None), root, model)
    for holder in (*holders, getattr(config, "vision_config", None)):
        size = said_size(holder, (*OF_IMAGES, "sample_size", "crop_size"))
        if size is not None:
            return size
        height, width = (getattr(holder, f"sample_{side}", None) for side in ("height", "width"))
        if isinstance(height, int) and isinstance(width, int):
            return height, width
    return size_of_weights(root)
