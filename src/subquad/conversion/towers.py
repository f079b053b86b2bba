"""Where in a foreign network the attention layers stand, and which patch embedding their tokens come from."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from subquad.attention.bricks import is_conv
from subquad.conversion.converted_attention import ConvertedAttention, is_quadratic
from subquad.conversion.families import converted_class
from subquad.conversion.families.twins import OF_LIBRARIES
from subquad.conversion.grid_recorder import GridRecorder, is_called
from subquad.conversion.image_recorder import ImageRecorder
from subquad.conversion.pyramids import (
    follows,
    grids_of_layers,
    holder_of,
    in_common,
    resizing_behind,
    stage_of,
)
from subquad.conversion.sketched_calls import maps_of_calls
from subquad.conversion.tokens_origin import Origin, chosen_origin, origins_of_tokens
from subquad.errors import SubquadError, network_within
from subquad.grid import TokenGrid
from subquad.models.backbone import Backbone
from subquad.models.layers import SelfAttention
from subquad.models.stated_inputs import OF_IMAGES, image_channels, said_size, size_of_weights
from subquad.models.variants import HOSTS

PREFIX_TOKENS = (
    "cls_token",
    "class_token",
    "cls_register_token",
    "class_embedding",
    "dist_token",
    "distillation_token",
    "reg_token",
    "register_tokens",
    "storage_tokens",
    "prefix_tokens",
)
"""Parameters (1, p, c) or (c,) of an embedding that put tokens in front of the map's."""

_BLOCK = re.compile(r"\d+$")
_CALLED_ATTENTION = re.compile(r"Attention|Attn|(MSA|MHSA|MHA)(?![a-z])")


LIBRARIES = OF_LIBRARIES - {"torch"}
"""Whose networks are known, and are refused for reasons of their own."""


@dataclass(frozen=True)
class Layer:
    """An attention layer in a block: its path, and the class of ours that may stand for it, if any.

    Attributes:
        grid: of its tokens, for images of the size that position parameters are made for.
        number: of its block, from 0; in one of our networks, within its stage.
    """

    path: str
    module: nn.Module
    block: nn.Module
    known: type[ConvertedAttention] | None
    grid: TokenGrid
    number: int

    @property
    def is_target(self) -> bool:
        """Whether it is meant where all are to be replaced."""
        return self.known is None or self.known.is_target(self.module, self.block, self.number)

    @property
    def family(self) -> type[ConvertedAttention]:
        """The class of ours that may stand for it.

        Raises:
            SubquadError: its kind is not known.
        """
        if self.known is None:
            raise SubquadError(
                f"{_named(self.path, self.module)}: leave its block out of `blocks`, or register a family "
                "(docs/convert.md)"
            )
        return self.known


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
    """

    embedding: str
    grid: TokenGrid
    layers: tuple[Layer, ...]
    host: str = "vit"
    recorder: type[GridRecorder] = GridRecorder
    resizing: tuple[str, ...] = ()
    patch: tuple[int, int] | None = None

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


def find_tower(model: nn.Module, *, img_size: tuple[int, ...] | None = None, prefix: int | None = None) -> Tower:
    """The vision tower of a network: its last patch embedding's attention layers.

    Args:
        model: timm's, transformers', torchvision's, one of ours, or anything that is built of such layers.
        img_size: (height, width) that position parameters are made for, of a volume (depth, height, width); what the
            network says of itself if left out.
        prefix: tokens in front of the map; counted by the embedding's parameters if left out.

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
    _refuse_unknown("", modules)
    try:
        path, recorder = _embedding(modules)
    except SubquadError as error:
        if (found := _found_by_a_call(model, modules, img_size, prefix)) is None:
            raise error from None
        return found
    root = _root_of(path, modules)
    if in_pyramid := _in_pyramid(root, modules):
        # one stage may hold the embedding, and others stand beside it
        root = holder_of([path, *_in_pyramid("", modules)], modules)
    _refuse_unknown(root, modules)
    holder: Any = modules[root]
    img_size = _within(img_size, recorder.most_sides(modules[path]))
    size = img_size or _size_of(holder, model) or recorder.size_of(holder, modules[path])
    if size is None:
        raise SubquadError(f"{type(model).__name__} does not say which images it is made for: give img_size")
    ways = _ways_to_maps(root, modules)
    if prefix is None:
        # a class token may come in behind the maps
        prefix = 0 if ways else _prefix_tokens(holder, modules[path.rpartition(".")[0]])
    if in_pyramid and prefix:
        raise SubquadError(f"no tokens stand in front of the maps of a {type(holder).__name__}: leave prefix out")
    if ways:
        return _of_maps(root, modules, recorder, size, ways)
    if in_pyramid:
        return _pyramid(path, root, modules, recorder, size)
    try:
        stem = _stem_of(path, root, modules, recorder)
    except SubquadError as error:
        if (found := _found_by_a_call(model, modules, img_size, prefix)) is None:
            raise error from None
        return found
    whole = recorder.whole_size(getattr(holder, "config", None), size)
    grid = TokenGrid(*_map_behind(stem, modules, recorder, whole), prefix)
    layers = tuple(_layers(root, modules, grid))
    # layers that stand where they do whatever the image is: their maps are in their weights
    twice = TokenGrid(2 * grid.height, 2 * grid.width, prefix)
    stays = (a.grid == b.grid for a, b in zip(layers, _layers(root, modules, twice), strict=True))
    if img_size not in (None, _size_of(holder, model)) and any(stays):
        raise SubquadError(
            f"maps of {type(holder).__name__} have the sizes that it is made for: leave img_size out, and call "
            "set_input_size on the network instead"
        )
    if _may_be_asked([layer.path for layer in layers], modules):
        image = (image_channels(model), size[0], size[1])
        chosen_origin(model, [Origin(stem[-1], grid)], layers[0].path, image)
    return Tower(stem[-1], grid, layers, _host_of(layers), recorder)


def other_towers(model: nn.Module, tower: Tower) -> list[str]:
    """Paths of parts with attention layers of known kinds behind a patch embedding of their own, beside a tower."""
    modules = dict(model.named_modules())
    inside = ".".join(in_common([tower.embedding, *(layer.path for layer in tower.layers)]))
    roots: dict[str, None] = {}
    for path, module in modules.items():
        if not (tower.recorder.hears(module) or _reckons(module)):
            continue
        root = _root_of(path, modules)
        apart = inside and root and not f"{inside}.".startswith(f"{root}.") and not f"{root}.".startswith(f"{inside}.")
        if apart and any(converted_class(modules[one]) is not None for one in _candidates(root, modules)):
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
    paths = list(_candidates(root, modules))
    chain = resizing_behind(embedding, root, modules, recorder, paths)
    maps = accumulate(chain, lambda before, path: recorder.map_from(modules[path], before), initial=size)
    # a class token may come in with the map of the last stage
    holders = [modules[one.rpartition(".")[0]] for one in chain]
    sides = list(maps)[1:]
    grids = [TokenGrid(y, x, _prefix_tokens(None, one)) for (y, x), one in zip(sides, holders, strict=True)]
    standing = grids_of_layers(paths, chain, modules, grids)
    layers = tuple(_layers(root, modules, grids[0], standing))
    return Tower(embedding, grids[0], layers, _host_of(layers), recorder, tuple(chain[1:]))


def _ways_to_maps(root: str, modules: dict[str, nn.Module]) -> dict[str, Callable[[Tensor], TokenGrid]]:
    """What says on which map tokens stand, for each layer below `root` that is handed maps."""
    families = {path: converted_class(modules[path]) for path in _candidates(root, modules)}
    return {path: one.map_under for path, one in families.items() if one is not None and one.is_handed_maps}


def _of_maps(
    root: str,
    modules: dict[str, nn.Module],
    recorder: type[GridRecorder],
    size: tuple[int, ...],
    ways: dict[str, Callable[[Tensor], TokenGrid]],
) -> Tower:
    """A network whose layers are handed maps: these are their grids, whatever stands in front of them."""
    within = len(root) + 1 if root else 0
    height, width = size
    image = (image_channels(modules[root]), height, width)
    seen = maps_of_calls(modules[root], {path[within:]: way for path, way in ways.items()}, image)
    # what is called in training alone stands where the layer in front of it does: calls say where
    standing = {path: seen[path[within:]] for path in ways if path[within:] in seen}
    layers = tuple(_layers(root, modules, next(iter(standing.values())), standing))
    return Tower(root, layers[0].grid, layers, _host_of(layers), recorder)


def _in_pyramid(root: str, modules: dict[str, nn.Module]) -> list[str]:
    """Paths of the layers below `root` that stand in stages which convolutions lead to."""
    families = {path: converted_class(modules[path]) for path in _candidates(root, modules)}
    return [
        path for path, family in families.items() if family is not None and (family.in_pyramid or family.is_handed_maps)
    ]


def _host_of(layers: Iterable[Layer]) -> str:
    return min((layer.known.host for layer in layers if layer.known is not None), default="vit")


def _own_tower(backbone: Backbone, root: str, modules: dict[str, nn.Module], img_size: Any) -> Tower:
    """One of our networks: a grid for each stage."""
    embedding = f"{root}.{backbone.first_conv}".lstrip(".")
    sizes = backbone.grids(img_size or backbone.img_size)
    grids = [TokenGrid(*one.shape, stage.grid.prefix) for one, stage in zip(sizes, backbone.stages, strict=True)]
    layers: list[Layer] = []
    for number, grid in enumerate(grids):
        layers.extend(_layers(f"{root}.stages.{number}".lstrip("."), modules, grid))
    if not layers:
        raise SubquadError(f"{type(backbone).__name__} has no attention layers that could be replaced")
    host = next((name for name, cls in HOSTS.items() if isinstance(backbone, cls)), "vit")
    return Tower(embedding, grids[0], tuple(layers), host)


def _embedding(modules: dict[str, nn.Module]) -> tuple[str, type[GridRecorder]]:
    """The first module that knows where tokens stand, and what the families that are there listen to it with."""
    families = [family for module in modules.values() if (family := converted_class(module)) is not None]
    recorders = dict.fromkeys(family.listener for family in families) or {GridRecorder: None}
    for path, module in modules.items():
        for recorder in recorders:
            if _reckons(module):
                return f"{path}.proj".lstrip("."), recorder
            if recorder.hears(module):
                return path, recorder
    instead = ": subquad.diffusion.apply_agent_attention is for U-Nets" if hasattr(modules[""], "down_blocks") else ""
    none = "" if next(_candidates("", modules), None) else "attention layers in numbered blocks, and no "
    raise SubquadError(
        f"the network has no {none}patch embedding, a convolution whose stride is its kernel's size{instead}"
    )


def _reckons(module: Any) -> bool:
    """Whether this is an embedding of timm's: it says how many tokens an image has, and `proj` gives the map of them.

    In front of that there may be a stem of any kind, as of hybrids, and `proj` may be an identity then.
    """
    reckons = callable(getattr(module, "dynamic_feat_size", None))
    return reckons and isinstance(module._modules.get("proj"), nn.Conv2d | nn.Identity)


def _stem_of(path: str, root: str, modules: dict[str, nn.Module], recorder: type[GridRecorder]) -> list[str]:
    """Paths of the convolutions that make tokens of an image, the one at `path` and those it is chained with.

    Raises:
        SubquadError: what changes the size of a map in front of the blocks is no such chain.
    """
    # what is no convolution is told where tokens stand, whatever is in front of it
    if _reckons(modules[path.rpartition(".")[0]]) or not isinstance(modules[path], nn.Conv2d):
        return [path]
    before, behind = _resizing(path, root, modules)
    stem = [*before, path]
    for one in behind:
        # what does not take the channels of the last convolution stands beside, as of another input
        if follows(modules[one], modules[stem[-1]]):
            stem.append(one)
    chained = all(follows(modules[one], modules[earlier]) for earlier, one in pairwise(stem))
    if chained and all(is_conv(modules[one]) for one in stem[:-1]) and recorder.hears(modules[stem[-1]]):
        return stem
    others = ", ".join(one for one in stem if one != path)
    raise SubquadError(
        f"{others} beside the patch embedding {path} changes the size of the map in front of the blocks: where tokens "
        "stand is known behind convolutions alone, the last with a stride of its kernel's size"
    )


def _resizing(path: str, root: str, modules: dict[str, nn.Module]) -> tuple[list[str], list[str]]:
    """What changes the size of maps in front of the blocks below `root`, before the module at `path` and behind it."""
    blocks = next(_candidates(root, modules))
    inside = [one for one in modules if not root or one.startswith(f"{root}.")]
    front = inside[: inside.index(blocks)]
    if path not in front:
        return [], []
    place = front.index(path)
    before, behind = (
        [one for one in part if _changes_size(modules[one])] for part in (front[:place], front[place + 1 :])
    )
    return before, behind


def _changes_size(module: Any) -> bool:
    """Whether maps leave a convolution or a pooling with another number of rows than they entered it with."""
    stride = getattr(module, "stride", 1)
    pools = isinstance(module, nn.MaxPool2d | nn.AvgPool2d)
    return (pools or isinstance(module, nn.Conv2d)) and stride not in (1, (1, 1))


def _found_by_a_call(model: Any, modules: dict[str, nn.Module], img_size: Any, prefix: int | None) -> Tower | None:
    """The tower of a network in which tokens come from the map of any convolution: a call shows from which.

    None where it may not be asked, or no map has a place for each token.

    Raises:
        SubquadError: the network does not say its size, or can't be run.
    """
    paths = list(_candidates("", modules))
    if not _may_be_asked(paths, modules):
        return None
    size = _within(img_size, 2) or _size_of(model, model)
    if size is None:
        raise SubquadError(
            f"a {type(model).__name__} has no patch embedding, a convolution whose stride is its kernel's size, and "
            "does not say which images it is made for: give img_size, for a call to show where its tokens stand"
        )
    if prefix is None:
        # of the part that holds the blocks, or of what holds that
        parts = in_common(paths)
        holders = (modules[".".join(parts[:length])] for length in range(len(parts), -1, -1))
        prefix = next((count for one in holders if (count := _prefix_tokens(one, None))), 0)
    image = (image_channels(model), size[0], size[1])
    origins = origins_of_tokens(model, paths[0], image, prefix)
    if not origins:
        return None
    found = chosen_origin(model, origins, paths[0], image)
    layers = tuple(_layers("", modules, found.grid))
    return Tower(found.path, found.grid, layers, _host_of(layers), patch=found.patch)


def _may_be_asked(layers: Sequence[str], modules: dict[str, nn.Module]) -> bool:
    """Whether a network may be run to see where the tokens of these layers stand: where its code is anybody's."""
    parts = in_common(layers)
    holders = (modules[".".join(parts[:length])] for length in range(len(parts) + 1))
    of_library = any(type(one).__module__.partition(".")[0] in LIBRARIES for one in holders)
    families = (converted_class(modules[path]) for path in layers)
    return not of_library and any(family is not None and family.is_anybodys for family in families)


def _map_behind(
    stem: list[str], modules: dict[str, nn.Module], recorder: type[GridRecorder], size: Any
) -> tuple[int, int]:
    """Rows and columns of the tokens of an image of this (height, width), or what else the recorder is to know."""
    embedding: Any = modules[stem[-1].rpartition(".")[0]]
    if not _reckons(embedding):
        return reduce(lambda before, path: recorder.map_from(modules[path], before), stem, size)
    height, width = embedding.dynamic_feat_size(size)
    if min(height, width) < 1:
        raise SubquadError(f"images of {size[0]}×{size[1]} px hold no patch of {embedding.patch_size}")
    return height, width


def _refuse_by_name(modules: dict[str, nn.Module]) -> None:
    """Raise where one of these is a network of `NOT_TAKEN`."""
    for module in modules.values():
        for name, reason in NOT_TAKEN.items():
            if is_called(module, name):
                raise SubquadError(f"a {name.rpartition('.')[2]} can't be converted: {reason}")


def _refuse_unknown(root: str, modules: dict[str, nn.Module]) -> None:
    """Raise where there are attention layers below `root`, and all are of kinds that are not known."""
    paths = list(_candidates(root, modules))
    if paths and all(converted_class(modules[path]) is None for path in paths):
        raise SubquadError(f"{_named(paths[0], modules[paths[0]])}: register a family for it (docs/convert.md)")


def _named(path: str, module: nn.Module) -> str:
    cls = type(module)
    return f"{path} is a {cls.__module__}.{cls.__qualname__}, an attention layer that is not known here"


def _root_of(embedding: str, modules: dict[str, nn.Module]) -> str:
    """The smallest part of the network that is or holds the embedding, and holds blocks with attention."""
    parts = embedding.split(".")
    for length in range(len(parts), -1, -1):
        root = ".".join(parts[:length])
        if next(_candidates(root, modules), None) is not None:
            return root
    kinds = [type(module) for path, module in modules.items() if _BLOCK.search(path) and list(module.children())]
    blocks = next(
        (
            f", and {cls.__module__}.{cls.__qualname__} holds none, or one that computes something else than softmax "
            "attention of tokens alone, for which a family can be registered (docs/convert.md)"
            for cls in kinds
            if "Block" in cls.__name__
        ),
        "",
    )
    raise SubquadError(f"no blocks with attention layers stand behind the patch embedding {embedding}{blocks}")


def _candidates(root: str, modules: dict[str, nn.Module]) -> Iterator[str]:
    """Paths of attention layers below `root` that are or belong to one of several blocks, and hold no other."""
    known: list[str] = []
    for path, module in modules.items():
        inside = path.startswith(f"{root}.") if root else bool(path)
        if not inside or any(path.startswith(f"{outer}.") for outer in known):
            continue
        own = path[len(root) :].strip(".").split(".")
        family = converted_class(module)
        # a class of a family may stand for a block itself
        is_block = family is not None and own[-1].isdigit()
        if not is_block and not any(_BLOCK.search(part) for part in own[:-1]):
            continue
        if family is not None and not family.is_self_attention(module, modules[path.rpartition(".")[0]], path):
            continue
        if family is not None or (_is_called_attention(module) and not _holds_attention(module)):
            known.append(path)
            yield path


def _is_called_attention(module: nn.Module) -> bool:
    return _CALLED_ATTENTION.search(type(module).__name__) is not None


def _holds_attention(module: nn.Module) -> bool:
    """Whether a module is a wrapper of attention layers, or has nothing to learn."""
    inner = [part for part in module.modules() if part is not module]
    return not any(True for _ in module.parameters()) or any(
        converted_class(part) is not None or _is_called_attention(part) for part in inner
    )


def _layers(
    root: str, modules: dict[str, nn.Module], grid: TokenGrid, standing: Mapping[str, TokenGrid] | None = None
) -> Iterator[Layer]:
    """The layers below `root`; on `standing` where that is given, or where their families say from `grid`."""
    for number, path in enumerate(_candidates(root, modules)):
        module = modules[path]
        family = converted_class(module)
        own = grid if standing is None else standing.get(path, grid)
        if family is not None:
            grid = family.grid_behind(module, own)
            own = family.grid_of(module, own)
            own = TokenGrid(*own.shape, own.prefix + family.tokens_beside(module, number))
        # a block itself stands in a list of them, which knows nothing
        block = modules[holder_of([path.rpartition(".")[0]], modules)]
        yield Layer(path, module, block, family, own, number)


def _prefix_tokens(root: Any, embedding: Any) -> int:
    if isinstance(number := getattr(root, "num_prefix_tokens", None), int):
        return number
    count, seen = 0, set()
    for holder in (root, getattr(root, "embeddings", None), embedding):
        for name in PREFIX_TOKENS:
            token = getattr(holder, name, None)
            if isinstance(token, nn.Parameter) and id(token) not in seen:
                seen.add(id(token))
                count += token.shape[-2] if token.dim() > 1 else 1
    return count


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
