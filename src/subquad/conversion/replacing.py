"""A trained network with other attention: its layers replaced one by one, and put back."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from subquad.besides import Network
from subquad.conversion.attention_layers import Layer
from subquad.conversion.checkpointed_calls import listen_to_calls
from subquad.conversion.converted_attention import ConvertedAttention
from subquad.conversion.copied_calls import calls_of
from subquad.conversion.example_calls import as_outline, of_outline
from subquad.conversion.grid_recorder import listen, stop_listening
from subquad.conversion.tower import Tower
from subquad.conversion.towers import find_tower, other_towers
from subquad.copying import copied, refuse_held_forwards
from subquad.errors import SubquadError, reason_without_path, shown
from subquad.large.bands import is_split
from subquad.models.assembling import as_json, check_names, make_mechanisms
from subquad.models.attention_names import Block, Names, parse_blocks, split_names
from subquad.models.backbone import Backbone
from subquad.ranges import sides_of_images
from subquad.weights.digest import check_plain, digest_of
from subquad.weights.fitting import some


@dataclass(frozen=True)
class Conversion:
    """What was done to a network; its attribute `subquad_conversion`, and part of the note in a delta file.

    Attributes:
        attention: the mechanism of each replaced block, with its settings, by the block's number.
        paths: where the replaced layers stand, by the block's number.
        settings: of the mechanisms, for all blocks.
        num_blocks: of the network.
        grid: (height, width) of tokens that position parameters were made for, and prefix tokens.
        img_size, prefix: as they were given; None where the network says it itself.
        teacher: the digest of the network's weights before it was converted.
        embedding, resizing: paths of the modules that know where tokens stand: the first one, and in pyramids those
            that lead to each further map.
        given: the outline of what was given, see `example_calls.py`; None where that was nothing.
        creations: the arguments that made the network, or parts of it that hold replaced layers, by their paths; ""
            is the whole.
    """

    attention: dict[int, str]
    paths: dict[int, str]
    settings: dict[str, Any]
    num_blocks: int
    grid: tuple[int, int, int]
    teacher: str
    embedding: str
    img_size: tuple[int, ...] | None
    prefix: int | None
    creations: dict[str, dict[str, Any]] = field(default_factory=dict)
    resizing: tuple[str, ...] = ()
    given: dict[str, Any] | None = None

    @property
    def made_by(self) -> dict[str, Any]:
        """The arguments besides mechanisms that make a network like it of its teacher."""
        given = None if self.given is None else of_outline(self.given)
        return {"img_size": self.img_size, "prefix": self.prefix, "given": given}

    def as_note(self) -> dict[str, Any]:
        """As JSON can hold it."""
        note = asdict(self)
        return note | {
            "attention": {str(number): name for number, name in self.attention.items()},
            "paths": {str(number): path for number, path in self.paths.items()},
            "grid": list(self.grid),
            "resizing": list(self.resizing),
        }


@torch.inference_mode(False)
def convert(
    model: Network,
    attention: Names | Mapping[int, str] = "agent",
    *,
    blocks: Sequence[int] | None = None,
    img_size: int | tuple[int, ...] | None = None,
    prefix: int | None = None,
    given: Mapping[str, Any] | None = None,
    in_place: bool = False,
    **settings: Any,
) -> Network:
    """A trained network whose attention layers mix by another mechanism.

    Projections, norms, rotary positions and output projections are kept. What the mechanism adds starts so that it
    adds nothing: branches and positions of zeros, open gates. Nothing else of the network changes; `restore` gives
    the old one back. What the exchange costs is won back by `align` and `distil`, without labels.

    Args:
        model: a network of timm (ViT, DeiT, DINOv2, DINOv3, EVA, SigLIP, SAM, PVTv2, CAFormer, FastViT, MobileNetV4,
            CoAtNet), transformers (ViT, DeiT, DINOv2, DINOv3, SigLIP, CLIP, BEiT, DPT, RADIO, SAM, SegFormer and
            others), torchvision, or one built of `torch.nn.MultiheadAttention`; a Swin of theirs, whose converted
            blocks see the whole map unless the mechanism is quadratic; a transformer of diffusers (DiT, PixArt, SD3,
            Flux, Qwen-Image, Wan and others), whose text tokens are prefix tokens; a U-Net or an autoencoder of theirs,
            or anybody's, with attention of maps; or one of ours.
        attention: a mechanism, with settings if wanted, as "agent:num_agents=16"; one for each replaced block as
            "agent+linear"; or by the block's number.
        blocks: numbers of the blocks to replace, from 0, negative ones from the end. By default all, of SAM those that
            see the whole image.
        img_size: pixels, or (height, width), of volumes (depth, height, width), that position parameters are made for;
            by default the size that the network says it is made for. Other sizes work.
        prefix: tokens in front of the map; counted if left out.
        given: the arguments of a call of the network, by name, where it takes more than images, as a U-Net that takes
            a time: by these it is run, without changing it, to see on which map the tokens of each layer stand.
        in_place: change `model` itself instead of a copy. Converted layers have parameters of their own: an optimizer
            that was made before goes on with those of the old ones.
        settings: of the mechanisms.

    Returns:
        The converted network; `subquad_conversion` says what was done.

    Raises:
        SubquadError: a layer's kind is not known, or a name or number does not fit, in one line.
    """
    if is_split(model):
        # whether a mechanism can be spread is seen where a network is
        raise SubquadError("this network's tokens are spread over processes: convert it first, and split it then")
    size = None if img_size is None else sides_of_images(img_size)
    tower = find_tower(model, img_size=size, prefix=prefix, given=given)
    _check_weights_are_there(model)
    names = _by_block(tower, attention, blocks)
    chosen = parse_blocks(list(names.values()), [len(names)])
    check_names(settings, set(), {name for name, _ in chosen})
    mechanisms = _mechanisms(tower, dict(zip(names, chosen, strict=True)), settings)
    digest = digest_of(model.state_dict(), "")
    _check_can_be_copied([tower.layers[number] for number in names])
    if others := other_towers(model, tower):
        _say_others_stay(model, tower, others)
    if not in_place:
        model = _copied(model)
    else:
        _say_optimizers_are_old(model, [tower.layers[number].path for number in names])
    recorder = tower.make_recorder()
    modules = dict(model.named_modules())
    made: dict[str, ConvertedAttention] = {}
    calls = _calls(model, tower, [tower.layers[number] for number in mechanisms])
    for number, mechanism in mechanisms.items():
        layer = tower.layers[number]
        seen = calls.get(layer.path, {})
        made[layer.path] = _replacement(layer, modules[layer.path], mechanism, recorder=recorder, **seen)
    _keep_ties(model, made, modules)
    for path, module in made.items():
        put(modules, path, module)
    for path in (tower.embedding, *tower.resizing):
        listen(model, path, recorder)
    listen_to_calls(model, made, tower.embedding, recorder)
    conversion = Conversion(
        attention=dict(names),
        paths={number: tower.layers[number].path for number in names},
        settings=as_json(settings),
        num_blocks=len(tower.layers),
        grid=(tower.grid.height, tower.grid.width, tower.grid.prefix),
        teacher=digest,
        embedding=tower.embedding,
        img_size=size,
        prefix=prefix,
        creations=_creations(model, made),
        resizing=tower.resizing,
        given=None if given is None else as_outline(given),
    )
    noted: Any = model
    noted.subquad_conversion = conversion
    for path in conversion.creations:
        part: Any = model.get_submodule(path)
        # it is not what these arguments make
        part.creation = None
    return model


def _say_others_stay(model: nn.Module, tower: Tower, others: list[str]) -> None:
    """Warn of parts that could be converted as well, and are not."""
    warnings.warn(
        f"{some(others)} of this {type(model).__name__}, behind a patch embedding of its own, stays as it is, beside "
        f"{tower.embedding}: convert such parts one by one, by subquad.convert(part, in_place=True)",
        # whoever called `convert`, which has a decorator
        stacklevel=4,
    )


def _say_optimizers_are_old(model: nn.Module, paths: list[str]) -> None:
    """Warn where layers that are replaced have gradients, as within a training, whose optimizer knows the old ones."""
    inside = tuple(f"{path}." for path in paths)
    learning = [name for name, one in model.named_parameters() if one.grad is not None and name.startswith(inside)]
    if learning:
        warnings.warn(
            f"{some(learning)} have gradients, as within a training: the converted layers have parameters of their "
            "own, so make its optimizer anew behind subquad.convert",
            # as in `_say_others_stay`
            stacklevel=4,
        )


def restore(model: Network, *, strict: bool = True) -> Network:
    """Put the attention layers back that `convert` replaced, in place; returns the network as it was, to the bit.

    An optimizer that was made before knows the converted layers' parameters, and not those of the old ones.

    Args:
        model: converted.
        strict: raise where other parts of the network were trained since, so that it would not be what it was.

    Raises:
        SubquadError: nothing in it is converted; or the rest of it has changed, was quantized or sharded, and it is
            left as it is.
    """
    conversion = conversion_of(model)
    modules = dict(model.named_modules())
    converted = {path: one for path, one in modules.items() if isinstance(one, ConvertedAttention)}
    if strict:
        inside = tuple(f"{path}." for path in converted)
        check_plain({name: one for name, one in model.state_dict().items() if not name.startswith(inside)})
    for path, module in converted.items():
        put(modules, path, _beside(module))
    if strict and digest_of(model.state_dict(), "") != conversion.teacher:
        for path, module in converted.items():
            put(modules, path, module)
        raise SubquadError(
            "parts of the network that were not replaced have changed since it was converted: strict=False puts the "
            "attention layers back all the same"
        )
    for module in converted.values():
        _as_now(module.original, module)
    stop_listening(model)
    for path, arguments in conversion.creations.items():
        back: Any = model.get_submodule(path)
        back.creation = arguments
        if isinstance(back, Backbone):
            back.say_how_it_is()
    del model.subquad_conversion
    return model


def conversion_of(model: nn.Module) -> Conversion:
    """What was done to a network.

    Raises:
        SubquadError: it is not converted.
    """
    conversion = getattr(model, "subquad_conversion", None)
    if not isinstance(conversion, Conversion):
        raise SubquadError(f"this {type(model).__name__} is not converted: subquad.convert(model) makes one that is")
    return conversion


def check_teacher(student: nn.Module, teacher: nn.Module) -> None:
    """Raise where `teacher` can't be the network that `student` was made of.

    Raises:
        SubquadError: it is converted itself, as the student is where `convert` was told `in_place`; or it has other
            layers, or weights of other shapes.
    """
    modules, paths = dict(teacher.named_modules()), conversion_of(student).paths.values()
    if already := [path for path in paths if isinstance(modules.get(path), ConvertedAttention)]:
        raise SubquadError(
            f"{already[0]} of the teacher is converted, too: give the network as it was before subquad.convert, or "
            "leave `teacher` out"
        )
    inside = tuple(f"{path}." for path in paths)
    shapes = {name: tensor.shape for name, tensor in teacher.state_dict().items()}
    state = student.state_dict()
    differing = [path for path in paths if path not in modules]
    differing += [
        name for name, tensor in state.items() if shapes.get(name) != tensor.shape and not name.startswith(inside)
    ]
    # as of a deeper one, whose first layers are as large
    differing += [name for name in shapes if name not in state and not name.startswith(inside)]
    if differing:
        raise SubquadError(f"this teacher is another network than the student was made of: {some(differing)} differ")


def converted_layers(model: nn.Module) -> dict[int, ConvertedAttention]:
    """The replaced layers by the numbers of their blocks.

    Raises:
        SubquadError: the network is not converted, or blocks were taken from it since.
    """
    paths: dict[int, str] = conversion_of(model).paths
    modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    if gone := [path for path in paths.values() if path not in modules]:
        if moved := [path for path, part in modules.items() if isinstance(part, ConvertedAttention)]:
            _refuse_wrapped(model, gone[0], moved)
        raise SubquadError(
            f"this {type(model).__name__} has no {some(gone)} any more, converted as it was: take blocks away before "
            "subquad.convert"
        )
    return {number: modules[path] for number, path in paths.items()}


def _refuse_wrapped(model: nn.Module, gone: str, paths: Iterable[str]) -> None:
    """Raise where a layer is still there, within a wrapper that has been put around its block."""
    for path in paths:
        # names of the way to it, with others in between
        rest = iter(path.split("."))
        if path != gone and all(name in rest for name in gone.split(".")):
            raise SubquadError(
                f"{gone} is {path} by now, as where blocks of this {type(model).__name__} are wrapped: take the "
                "wrappers away, or load its weights into a student without (subquad.convert(teacher).load_state_dict)"
            )


def _by_block(tower: Tower, attention: Names | Mapping[int, str], blocks: Sequence[int] | None) -> dict[int, str]:
    """A mechanism's name for each block that is replaced."""
    count = len(tower.layers)
    if not isinstance(attention, str | Sequence | Mapping) or not all(
        isinstance(name, str) for name in (attention.values() if isinstance(attention, Mapping) else attention)
    ):
        raise SubquadError(f"attention is the name of a mechanism, or one for each block, got {shown(attention)}")
    if isinstance(attention, Mapping):
        if blocks is not None:
            raise SubquadError("blocks are named by the mapping `attention` already: leave `blocks` out")
        blocks = list(attention)
    if blocks is None:
        blocks = [number for number, layer in enumerate(tower.layers) if layer.is_target]
        _refuse_unknown(tower, blocks)
        if not blocks:
            raise SubquadError(
                f"none of the {count} attention layers sees the whole image ({tower.layers[0].path} sees a window): "
                "name those to convert by `blocks`"
            )
    numbers = _numbers(blocks, count)
    if isinstance(attention, Mapping):
        return dict(sorted(zip(numbers, attention.values(), strict=True)))
    entries = attention
    if isinstance(attention, str):
        entries = split_names(attention)
    names: list[Any] = [entries] * len(numbers) if isinstance(entries, str) else list(entries)
    if len(names) != len(numbers):
        raise SubquadError(f"attention has {len(names)} entries for {len(numbers)} blocks: give one for all or each")
    return dict(sorted(zip(numbers, names, strict=True)))


def _refuse_unknown(tower: Tower, blocks: Sequence[int]) -> None:
    """Raise where some of the layers that are meant are of no known kind, and say which are."""
    known = [number for number in blocks if tower.layers[number].known is not None]
    if known and len(known) < len(blocks):
        first = next(tower.layers[number] for number in blocks if number not in known)
        raise SubquadError(
            f"{first.named}: leave its block out by blocks={known}, which are of known kinds, or register a family "
            "(docs/convert.md)"
        )


def _numbers(blocks: Any, count: int) -> list[int]:
    """Numbers of blocks, of any type of whole numbers, counted from the first one."""
    try:
        numbers = [index(number) for number in blocks]
    except TypeError:
        numbers = []
    there = {number % count for number in numbers if -count <= number < count}
    if not numbers or len(there) < len(numbers):
        raise SubquadError(f"blocks are numbers from 0 to {count - 1}, each once and at least one, got {shown(blocks)}")
    return [number % count for number in numbers]


def _check_weights_are_there(model: nn.Module) -> None:
    state = model.state_dict()
    check_plain(state)
    for name, tensor in state.items():
        if tensor.is_meta:
            raise SubquadError(
                f"{name} is on the device meta, without numbers: load the network's weights, then convert"
            )


def _check_can_be_copied(layers: Sequence[Layer]) -> None:
    """Raise where a tensor has a gradient to what it was computed of, or a part's `forward` holds that part.

    PyTorch copies none of the first, and copies of the second call the old part; parts are always copied.

    Others of the network hinder only a copy of all of it, see `_copied`.
    """
    for layer in layers:
        # what was put onto the layer itself is refused where it is replaced
        parts = (one for one in layer.module.named_modules(prefix=layer.path) if one[1] is not layer.module)
        refuse_held_forwards(parts, "take it away, or put it there behind subquad.convert")
        for path, module in layer.module.named_modules(prefix=layer.path):
            for name, tensor in (vars(module) | module._buffers).items():
                if isinstance(tensor, Tensor) and not tensor.is_leaf:
                    raise SubquadError(
                        f"{path}.{name} is computed of other tensors, as by pruning or weight norms, and can't be "
                        "copied with its gradient: call the network once under torch.no_grad(), or make it permanent "
                        "by torch.nn.utils.prune.remove, and convert it then"
                    )


def _copied(model: Network) -> Network:
    try:
        return copied(model, "take it away, by disable_cache() for instance, or take in_place=True")
    except (RuntimeError, TypeError) as error:
        raise SubquadError(
            f"this {type(model).__name__} can't be copied, take in_place=True: {reason_without_path(error)[:120]}"
        ) from None


def _keep_ties(model: nn.Module, made: Mapping[str, nn.Module], modules: Mapping[str, nn.Module]) -> None:
    """Let new layers share the weights that the old ones share, with each other and with the rest of the network."""
    replaced = tuple(f"{path}." for path in made)
    whole = model.named_parameters(remove_duplicate=False)
    shared = {id(one): one for name, one in whole if not name.startswith(replaced)}
    for path, layer in made.items():
        old = dict(modules[path].named_parameters(remove_duplicate=False))
        for name, own in list(layer.named_parameters(remove_duplicate=False)):
            tied = shared.setdefault(id(old[name]), own) if name in old else own
            if tied is not own and tied.shape == own.shape:
                owner, _, last = name.rpartition(".")
                layer.get_submodule(owner)._parameters[last] = tied


def old_layer(layer: ConvertedAttention) -> nn.Module:
    """What a converted layer stands for, on its device and in its mode, with weights of the types of its own by now."""
    original = _beside(layer)
    _as_now(original, layer)
    return original


def _beside(layer: ConvertedAttention) -> nn.Module:
    original = layer.original
    # quantized layers may have no parameters
    original.to(next(layer.parameters(), next(original.parameters())).device)
    return original.train(layer.training)


def _as_now(original: nn.Module, module: nn.Module) -> None:
    """Let the weights of an old layer have types, and gradients, as those of the one in its place have by now."""
    now, learning = module.state_dict(), dict(module.named_parameters())
    for name, parameter in original.named_parameters():
        if name in learning:
            parameter.requires_grad_(learning[name].requires_grad)
    for name, tensor in (*original.named_parameters(), *original.named_buffers()):
        if name in now:
            tensor.data = tensor.data.to(now[name].dtype)


def _mechanisms(tower: Tower, chosen: Mapping[int, Block], settings: dict[str, Any]) -> dict[int, Any]:
    """The mechanism of each replaced block, set as it is in hosts of this kind; lists have an entry for each stage."""
    anything = next(iter(chosen.values()))
    blocks = [chosen.get(number, anything) for number in range(len(tower.layers))]
    made = make_mechanisms(tower.host, blocks, tower.depths, settings)
    return {number: made[number] for number in chosen}


def _creations(model: nn.Module, replaced: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The arguments that made a network, and those of its parts that hold one of these paths."""
    said = {path: getattr(part, "creation", None) for path, part in model.named_modules()}
    return {
        path: arguments
        for path, arguments in said.items()
        if isinstance(arguments, dict) and arguments and any(not path or one.startswith(f"{path}.") for one in replaced)
    }


def _calls(model: nn.Module, tower: Tower, layers: Iterable[Layer]) -> dict[str, dict[str, Any]]:
    """For layers that ask for it: what they are handed where the network is run, and what went wrong."""
    asking = [layer.path for layer in layers if layer.known is not None and layer.known.asks_for_calls]
    if not asking or tower.example is None:
        return {}
    calls, wrong = calls_of(model, asking, tower.example)
    return {path: {"call": calls.get(path), "wrong": wrong} for path in asking}


def _replacement(layer: Layer, original: nn.Module, mechanism: Any, **more: Any) -> ConvertedAttention:
    family = layer.family
    if family.others_see and not layer.is_target:
        raise SubquadError(
            f"{layer.path} sees {family.others_see}, and stays as it is: leave its block out of `blocks`"
        )
    try:
        return family(original, mechanism, grid=layer.grid, **more)
    except SubquadError as error:
        raise SubquadError(f"{layer.path}: {error}") from None


def put(modules: Mapping[str, nn.Module], path: str, module: nn.Module) -> None:
    """Let `module` stand at `path`, with the hooks of what stood there, and its parts with those of the old ones.

    What stood in several places is replaced in all of them; `modules` are those of the network, by their paths.
    """
    parent, _, name = path.rpartition(".")
    old = modules[parent]._modules[name]
    assert old is not None
    parts = dict(old.named_modules())
    for inside, part in module.named_modules():
        if not inside or type(part) is type(parts.get(inside)):
            _share_hooks(part, parts[inside])
    exchange(modules.values(), old, module)


def exchange(parents: Iterable[nn.Module], old: nn.Module, new: nn.Module) -> None:
    """Let a module stand wherever another one does in some modules."""
    for parent in parents:
        for name in [name for name, part in parent._modules.items() if part is old]:
            parent._modules[name] = new


HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    # no table, but whether backward hooks are of the kind that sees inputs and outputs
    "_is_full_backward_hook",
)
"""Where PyTorch keeps the hooks of a module that are called as it is."""


def _share_hooks(module: nn.Module, old: nn.Module) -> None:
    """Let a module have the hooks of an old one: the very tables, in which their handles remove them."""
    for name in HOOKS:
        setattr(module, name, getattr(old, name))
