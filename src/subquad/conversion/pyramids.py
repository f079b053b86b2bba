"""Foreign networks of several stages, a convolution in front of each: on which map the layers of each stage stand."""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain, groupby, takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from subquad.conversion.grid_recorder import GridRecorder
from subquad.errors import SubquadError, reason_without_path
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


def maps_of_calls(
    network: nn.Module, layers: Mapping[str, Callable[[Tensor], TokenGrid]], image: tuple[int, int, int]
) -> dict[str, TokenGrid]:
    """Where the tokens of layers stand that are handed maps: what each says of the first that reaches it, if one does.

    The network is run for that, without numbers, whatever makes the maps.

    Args:
        network: which takes images.
        layers: what says it, by paths below the network.
        image: (channels, height, width).

    Raises:
        SubquadError: the network can't be run so, or calls none of them.
    """
    seen: dict[str, TokenGrid] = {}

    def seen_at(path: str) -> Any:
        def hook(module: nn.Module, arguments: Any) -> None:
            seen.setdefault(path, layers[path](arguments[0]))

        return hook

    run_sketched(
        network, image, [network.get_submodule(path).register_forward_pre_hook(seen_at(path)) for path in layers]
    )
    if not seen:
        raise SubquadError(f"{next(iter(layers))} is not called where a {type(network).__name__} is run for images")
    return seen


def map_in_front(
    network: nn.Module, layer: str, image: tuple[int, int, int], prefix: int
) -> tuple[str, TokenGrid] | None:
    """The last convolution or pooling before a layer is called whose map has a place for each of its tokens.

    The network is run for that, without numbers: so the way from an image to tokens may be any.

    Args:
        network: which takes images.
        layer: its path.
        image: (channels, height, width).
        prefix: tokens in front of the map.

    Returns:
        Its path and its grid; None where no map in front of the layer has as many places.

    Raises:
        SubquadError: the network can't be run so.
    """
    maps: dict[str, tuple[int, int]] = {}
    found: list[tuple[str, TokenGrid]] = []
    called = False

    def hears(path: str) -> Any:
        def hook(module: nn.Module, arguments: Any, given: Any) -> None:
            if not called and isinstance(given, Tensor) and given.dim() == 4:
                maps.pop(path, None)
                maps[path] = given.shape[-2], given.shape[-1]

        return hook

    def tokens_come(module: nn.Module, arguments: Any, named: Any) -> None:
        nonlocal called
        x = next((one for one in (*arguments, *named.values()) if isinstance(one, Tensor)), None)
        if not called and x is not None and x.dim() == 3:
            fitting = [path for path, (y, x_) in maps.items() if y * x_ + prefix == x.shape[1]]
            found.extend((path, TokenGrid(*maps[path], prefix)) for path in fitting[-1:])
        called = True

    makers = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)
    handles = [
        one.register_forward_hook(hears(path)) for path, one in network.named_modules() if isinstance(one, makers)
    ]
    handles.append(network.get_submodule(layer).register_forward_pre_hook(tokens_come, with_kwargs=True))
    run_sketched(network, image, handles)
    return found[0] if found else None


def run_sketched(network: nn.Module, image: tuple[int, int, int], handles: Iterable[RemovableHandle]) -> None:
    """Run a network for images (channels, height, width), without numbers, and take the hooks away that hear of it.

    Raises:
        SubquadError: it can't be run so.
    """
    tensors = chain(network.named_parameters(), network.named_buffers())
    state = {name: one.detach().to("meta") for name, one in tensors}
    dtype = next((one.dtype for one in state.values() if one.is_floating_point()), torch.float32)
    # of a single image norms of batches have nothing to say in training
    sketched = torch.empty(2, *image, dtype=dtype, device="meta")
    try:
        with torch.no_grad():
            functional_call(network, state, (sketched,))
    except Exception as error:
        raise SubquadError(
            f"a {type(network).__name__} can't be run for images of {image[1]}×{image[2]} px, to see where its stages "
            f"stand: {reason_without_path(error)[:200]}; if it is made for others, give img_size"
        ) from None
    finally:
        for handle in handles:
            handle.remove()


def stage_of(path: str) -> str:
    """What the paths of a stage's layers have in common: all before the number of the block."""
    parts = path.split(".")
    if len(parts) > 1 and parts[-1].isdigit() and parts[-2].isdigit():
        # of the layer in a block that is a list of its parts
        parts = parts[:-1]
    return ".".join(parts[: max((i for i, part in enumerate(parts) if part.isdigit()), default=0)])
