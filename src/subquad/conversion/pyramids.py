"""Foreign networks of several stages, a convolution in front of each: on which map the layers of each stage stand."""

from collections.abc import Iterable, Mapping
from itertools import groupby, takewhile
from typing import Any

from torch import nn

from subquad.conversion.grid_recorder import GridRecorder
from subquad.grid import TokenGrid


def in_common(paths: Iterable[str]) -> list[str]:
    """The names that several paths begin with."""
    places = zip(*(path.split(".") for path in paths), strict=False)
    return [names[0] for names in takewhile(lambda names: len(set(names)) == 1, places)]


def holder_of(paths: Iterable[str], modules: Mapping[str, nn.Module]) -> str:
    """Path of the smallest module that holds others and is called itself, as lists of modules are not."""
    parts = in_common(paths)
    while parts and isinstance(modules[".".join(parts)], nn.ModuleList | nn.ModuleDict):
        parts = parts[:-1]
    return ".".join(parts)


def resizing_behind(
    first: str, root: str, modules: Mapping[str, nn.Module], recorder: type[GridRecorder], layers: Iterable[str]
) -> list[str]:
    """Paths of the convolutions that lead from map to map, of those below `root` outside the layers: `first`, and on.

    Each takes the channels that the one before gave; others stand beside, as of another input.
    """
    inside = tuple(f"{path}." for path in layers)
    names = [path for path in modules if not root or path.startswith(f"{root}.")]
    chain = [first]
    for path in names[names.index(first) + 1 :]:
        module = modules[path]
        if path.startswith(inside) or not isinstance(module, nn.Conv2d) or not recorder.hears(module):
            continue
        if follows(module, modules[chain[-1]]) and module.groups == 1:
            chain.append(path)
    return chain


def follows(module: Any, before: Any) -> bool:
    """Whether a convolution takes what another one gives; a pooling takes anything."""
    return not isinstance(module, nn.Conv2d) or module.in_channels == getattr(before, "out_channels", None)


def grids_of_layers(
    layers: Iterable[str], chain: list[str], modules: Mapping[str, nn.Module], grids: list[TokenGrid]
) -> dict[str, TokenGrid]:
    """Where the tokens of each layer stand: on the map of the last convolution in front of its stage.

    Some networks list all their convolutions before all their stages: there each stage has its own.
    """
    order = {path: place for place, path in enumerate(modules)}
    stages = [list(stage) for _, stage in groupby(layers, key=stage_of)]
    in_front = [sum(order[path] < order[stage[0]] for path in chain) for stage in stages]
    if in_front[0] == len(chain) == len(stages):
        in_front = list(range(1, len(chain) + 1))
    return {path: grids[max(number, 1) - 1] for stage, number in zip(stages, in_front, strict=True) for path in stage}


def stage_of(path: str) -> str:
    """What the paths of a stage's layers have in common: all before the number of the block."""
    parts = path.split(".")
    if len(parts) > 1 and parts[-1].isdigit() and parts[-2].isdigit():
        # of the layer in a block that is a list of its parts
        parts = parts[:-1]
    return ".".join(parts[: max((i for i, part in enumerate(parts) if part.isdigit()), default=0)])
