"""A row of the table, the mechanisms by name, and their settings, put together."""

import inspect
import json
import numbers
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, get_origin

import torch

from subquad.attention import ATTENTION, traits_of
from subquad.errors import SubquadError, UnknownSettingError, reason_of, shown, unknown_name
from subquad.models.attention_names import Block, Names, parse_blocks, per_block
from subquad.models.backbone import Backbone
from subquad.models.layers import Mechanism
from subquad.models.networks import NETWORKS
from subquad.models.variants import HOSTS, VARIANTS, Variant
from subquad.ranges import Count, Positive, checks_arguments
from subquad.weights.links import TAGS, network_of

PER_STAGE = frozenset({"embed_dims", "num_heads", "mlp_ratios", "init_values"})
"""Arguments of pyramids with an entry for each stage."""


@checks_arguments
def assemble(
    name: str,
    *,
    attention: Names | None = None,
    img_size: Positive | tuple[Positive, Positive] | None = None,
    built_for: Positive | tuple[Positive, Positive] | None = None,
    in_chans: Positive = 3,
    num_classes: Count = 1000,
    depth: Positive | None = None,
    depths: Sequence[Positive] | None = None,
    device: Any = None,
    **settings: Any,
) -> Backbone:
    """Make a network of the tables with weights as they start; see `create_model` for the arguments and errors."""
    name = network_of(TAGS.get(name, name))
    network = NETWORKS.get(name)
    if network is None and name not in VARIANTS:
        raise unknown_name("model", name, NETWORKS.keys() | VARIANTS.keys())
    variant = VARIANTS[network.variant if network else name]
    host: Any = HOSTS[variant.host]
    settings = {key: value for key, value in settings.items() if value is not None}
    if depth is not None:
        depths = _depths_of(depth, depths, variant)
    given: dict[str, Any] = {"name": name, "attention": attention, "img_size": img_size, "in_chans": in_chans}
    given |= {"built_for": built_for, "num_classes": num_classes, "depths": depths, **settings}

    depths = tuple(depths) if depths is not None else variant.depths
    if not depths:
        raise SubquadError("depths is empty: every stage needs a block")
    if len(variant.depths) == 1 < len(depths):
        raise SubquadError(
            f"depths has {len(depths)} entries, and {name} has one stage: give depth={sum(depths)} for as many blocks"
        )
    if attention is not None and not host.takes_mechanisms:
        raise SubquadError(f"{name} has attention of its own and takes no other, got {attention!r}")
    if attention is None:
        attention = network.attention if network else "softmax"
    blocks = parse_blocks(attention, depths)
    own = inspect.signature(host).parameters
    check_names(settings, set(own), {mechanism for mechanism, _ in blocks})
    row = variant.arguments | (network.settings if network else {})
    if img_size is None:
        img_size = row.get("img_size", own["img_size"].default)
    arguments = {key: value for key, value in (row | settings).items() if key in own}
    arguments |= {"img_size": _pair(built_for or img_size), "in_chans": in_chans, "num_classes": num_classes}
    arguments |= _reach(host, arguments, [mechanism for mechanism, _ in blocks], depths)
    if "depths" in own:
        arguments["depths"] = depths
    _check_stages(arguments, own, depths)
    shared = {key: value for key, value in (row | settings).items() if key not in own}
    mechanisms = make_mechanisms(variant.host, blocks, depths, shared)
    with nullcontext() if device is None else _device(device):
        model = host(mechanisms, **arguments)
        if built_for is not None:
            model.set_input_size(img_size)
    # through JSON, so that a model made here and one restored from its file say the same
    model.creation = as_json({key: value for key, value in given.items() if value is not None})
    return model


def as_json(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments as they come back from a file; numbers of numpy are numbers."""

    def number(value: Any) -> int | float:
        if isinstance(value, numbers.Integral):
            return int(value)
        if isinstance(value, numbers.Real):
            return float(value)
        raise SubquadError(f"settings are numbers, texts and lists of them, got {shown(value)}")

    return json.loads(json.dumps(arguments, default=number))


def make_mechanisms(
    host: str, blocks: Sequence[Block], depths: Sequence[int], settings: dict[str, Any]
) -> list[Mechanism]:
    """The mechanism of each block, with its own settings, with those of `settings` it knows, else the host's usual."""
    shared = {key: per_block(value, depths, key) for key, value in settings.items()}
    stages = [s for s, depth in enumerate(depths) for _ in range(depth)]
    return [
        _mechanism(
            *block,
            usual=_usual(host, block[0], stages[i], depths),
            shared={key: values[i] for key, values in shared.items()},
        )
        for i, block in enumerate(blocks)
    ]


def _reach(host: Any, arguments: dict[str, Any], names: list[str], depths: Sequence[int]) -> dict[str, Any]:
    """How far each block sees: as given, or confined by the host where its mechanism is quadratic."""
    reach = {}
    for key, default in host.default_reach(arguments["img_size"]).items():
        value = arguments.get(key)
        if isinstance(value, Sequence):
            entries = per_block(value, depths, key)
            reach[key] = [host.everything if entry is None else entry for entry in entries]
            continue
        sizes = _for_stages(default, depths) if value is None else [value] * len(depths)
        confined = [size for size, depth in zip(sizes, depths, strict=True) for _ in range(depth)]
        reach[key] = [
            size if traits_of(ATTENTION[name]).quadratic else host.everything
            for size, name in zip(confined, names, strict=True)
        ]
    return reach


def _usual(host: str, mechanism: str, stage: int, depths: Sequence[int]) -> dict[str, Any]:
    """The settings that a mechanism has in a host, at a stage."""
    in_hosts = traits_of(ATTENTION[mechanism]).in_hosts
    return {
        key: _for_stages(value, depths)[stage] if isinstance(value, tuple) else value
        for key, value in in_hosts.get(host, {}).items()
    }


def _for_stages(table: Sequence[Any], depths: Sequence[int]) -> list[Any]:
    """A table for four stages, for a network of more or fewer: what counts is how far a stage is from the last."""
    return [table[max(s + len(table) - len(depths), 0)] for s in range(len(depths))]


def _check_stages(arguments: dict[str, Any], own: Any, depths: Sequence[int]) -> None:
    """Arguments that have an entry for each stage: as many as there are stages; one number stands for all."""
    given = [value for key, value in arguments.items() if key in PER_STAGE and isinstance(value, Sequence)]
    # the host's own entries are as many as it usually has stages; beside sizes of fewer the first of them stand
    few = len(depths) if any(len(value) == len(depths) for value in given) else None
    for key in sorted(PER_STAGE & own.keys()):
        if get_origin(own[key].annotation) is not Sequence:
            continue
        # and where all are alike they hold for any number
        usual = own[key].default
        value = arguments.get(key, usual[0] if len(set(usual)) == 1 else usual[:few])
        arguments[key] = [value] * len(depths) if not isinstance(value, Sequence) else value
        if len(arguments[key]) != len(depths):
            raise SubquadError(f"{key} has {len(value)} entries for {len(depths)} stages: give one for each")


def _depths_of(depth: int, depths: Sequence[int] | None, variant: Variant) -> tuple[int]:
    """What `depth` blocks are for each stage, of a network that has one."""
    if depths is not None:
        raise SubquadError(f"depth is {depth} and depths is {tuple(depths)}: give one of them")
    if (stages := len(variant.depths)) != 1:
        raise SubquadError(f"depth is the number of blocks of one stage, and there are {stages}: give depths")
    return (depth,)


def settings_of(mechanism: str) -> dict[str, Any]:
    """A mechanism's own settings and their defaults."""
    parameters = inspect.signature(ATTENTION[mechanism]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}


def check_names(settings: dict[str, Any], own: set[str], mechanisms: set[str]) -> None:
    """Raise for a setting that neither a host, which takes `own`, nor one of its mechanisms takes."""
    known = (own | {key for mechanism in mechanisms for key in settings_of(mechanism)}) - {"attention"}
    for key in settings:
        if key not in known:
            used = ", ".join(sorted(mechanisms))
            raise unknown_name(f"setting (of this model with {used} attention)", key, known, UnknownSettingError)


def _mechanism(name: str, settings: dict[str, Any], *, usual: dict[str, Any], shared: dict[str, Any]) -> Mechanism:
    """The class `name` with its own settings, with those of the shared ones that it knows, else with the usual ones."""
    known = settings_of(name)
    for key in settings:
        if key not in known:
            raise unknown_name(f"setting of {name} attention", key, known, UnknownSettingError)
    fitting = {key: value for key, value in shared.items() if key in known and value is not None}
    return partial(ATTENTION[name], **(usual | fitting | settings))


def _device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SubquadError(f"device {shown(device)} is none: {reason_of(error).partition('. ')[0]}") from None


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size[0], size[1]) if isinstance(size, Sequence) else (size, size)
