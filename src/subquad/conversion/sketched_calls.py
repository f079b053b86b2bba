"""Calls of foreign networks without numbers, which show where tokens stand."""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from subquad.errors import SubquadError, reason_without_path
from subquad.grid import TokenGrid

IMAGES = 2
"""In a call without numbers: of a single image norms of batches have nothing to say in training."""


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


def run_sketched(network: nn.Module, image: tuple[int, int, int], handles: Iterable[RemovableHandle]) -> None:
    """Run a network for images (channels, height, width), without numbers, and take the hooks away that hear of it.

    What its code sets on its modules is set back.

    Raises:
        SubquadError: it can't be run so.
    """
    before = [(part, dict(vars(part))) for part in network.modules()]
    try:
        try:
            _run_on(network, image, lambda one: one.detach().to("meta"))
        except Exception:
            # tensors that are neither parameters nor buffers stay where they are, and do not go with those
            _set_back(before)
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                _run_on(network, image, mode.from_tensor)
    except Exception as error:
        raise SubquadError(
            f"a {type(network).__name__} can't be run for images of {image[1]}×{image[2]} px, to see where its tokens "
            f"stand: {reason_without_path(error)[:200]}; if it is made for others, give img_size"
        ) from None
    finally:
        for handle in handles:
            handle.remove()
        _set_back(before)


def _run_on(network: nn.Module, image: tuple[int, int, int], without_numbers: Callable[[Tensor], Tensor]) -> None:
    tensors = chain(network.named_parameters(), network.named_buffers())
    state = {name: without_numbers(one) for name, one in tensors}
    like = next((one for one in state.values() if one.is_floating_point()), torch.empty(0, device="meta"))
    with torch.no_grad():
        functional_call(network, state, (torch.empty(IMAGES, *image, dtype=like.dtype, device=like.device),))


def _set_back(attributes: Iterable[tuple[nn.Module, dict[str, Any]]]) -> None:
    for part, own in attributes:
        now = vars(part)
        if own.keys() != now.keys() or any(value is not now[name] for name, value in own.items()):
            vars(part).clear()
            vars(part).update(own)
