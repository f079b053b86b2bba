"""Calls of foreign networks without numbers, which show where tokens stand."""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from subquad.conversion.example_calls import Example
from subquad.errors import SubquadError, reason_without_path
from subquad.grid import TokenGrid

MAKERS = nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d
"""What gives maps (b, c, y, x)."""

IMAGES = 2
"""In a call without numbers: of a single image norms of batches have nothing to say in training."""


def maps_of_calls(
    network: nn.Module, layers: Mapping[str, Callable[[Tensor], TokenGrid]], example: Example
) -> dict[str, TokenGrid]:
    """Where the tokens of layers stand that are handed maps: what each says of the first that reaches it, if one does.

    The network is run for that, without numbers, whatever makes the maps.

    Args:
        network: which takes what the example is of.
        layers: what says it, by paths below the network.
        example: of a call.

    Raises:
        SubquadError: the network can't be run so, or calls none of them.
    """
    seen: dict[str, TokenGrid] = {}

    def seen_at(path: str) -> Any:
        def hook(module: nn.Module, arguments: Any) -> None:
            seen.setdefault(path, layers[path](arguments[0]))

        return hook

    run_sketched(
        network, example, [network.get_submodule(path).register_forward_pre_hook(seen_at(path)) for path in layers]
    )
    if not seen:
        raise SubquadError(f"{next(iter(layers))} is not called where a {type(network).__name__} is run for images")
    return seen


def run_sketched(network: nn.Module, example: Example, handles: Iterable[RemovableHandle]) -> None:
    """Run a network for an example, without numbers, and take the hooks away that hear of it.

    What its code sets on its modules is set back.

    Raises:
        SubquadError: it can't be run so.
    """
    before = [(part, dict(vars(part))) for part in network.modules()]
    try:
        try:
            _run_on(network, example, lambda one: one.detach().to("meta"))
        except Exception:
            # tensors that are neither parameters nor buffers stay where they are, and do not go with those
            _set_back(before)
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                _run_on(network, example, mode.from_tensor)
    except Exception as error:
        raise SubquadError(
            f"a {type(network).__name__} can't be run for {example}, to see where its tokens stand: "
            f"{reason_without_path(error)[:200]}; {_what_else(example)}"
        ) from None
    finally:
        for handle in handles:
            handle.remove()
        _set_back(before)


def _what_else(example: Example) -> str:
    if example.given is not None:
        return "give what a call of it takes, by name"
    return "if it is made for others, give img_size, and if it takes more than images, what a call takes by `given`"


def _run_on(network: nn.Module, example: Example, without_numbers: Callable[[Tensor], Tensor]) -> None:
    # each once where it is registered: of modules of several names PyTorch puts the wrong tensors back
    state = {
        f"{path}.{name}".lstrip("."): without_numbers(one)
        for path, part in network.named_modules()
        for name, one in chain(part._parameters.items(), part._buffers.items())
        if one is not None
    }
    like = next((one for one in state.values() if one.is_floating_point()), torch.empty(0, device="meta"))
    with torch.no_grad():
        sizes = example.call(IMAGES, torch.empty(0, dtype=like.dtype, device="meta"))
        call = sizes.with_tensors(lambda one: torch.empty_like(one, device=like.device))
        functional_call(network, state, call.args, call.kwargs, tie_weights=False)


def _set_back(attributes: Iterable[tuple[nn.Module, dict[str, Any]]]) -> None:
    for part, own in attributes:
        now = vars(part)
        if own.keys() != now.keys() or any(value is not now[name] for name, value in own.items()):
            vars(part).clear()
            vars(part).update(own)
