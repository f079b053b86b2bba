"""Calls of foreign networks without numbers, which show where tokens stand and what they come from."""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from subquad.errors import SubquadError, reason_without_path
from subquad.grid import TokenGrid


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

    _run_sketched(
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
    _run_sketched(network, image, handles)
    return found[0] if found else None


def _run_sketched(network: nn.Module, image: tuple[int, int, int], handles: Iterable[RemovableHandle]) -> None:
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
