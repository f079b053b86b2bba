"""What is computed again in the backward pass, with the parameters that it was computed with at first.

`torch.func.functional_call` puts tensors in the place of parameters for one call, and has taken them away when the
backward pass asks for what checkpointing did not keep: gradients would be of two networks at once, without a word.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from subquad.tracing import is_traced

PLAIN = (Tensor, nn.Parameter)


def computed_again(owner: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `function(*args, **kwargs)` gives; what its gradient needs is computed again in the backward pass.

    `owner` is the module whose parameters, and those of all within it, the function reads.
    """
    if is_traced():
        # parameters are inputs of what is compiled
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
    as_now = _AsTheyAre(owner)
    return checkpoint(function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), as_now), **kwargs)


class _AsTheyAre:
    """A context, as often as it is entered, in which a module has the parameters that it has where this is made."""

    def __init__(self, owner: nn.Module) -> None:
        self._held = [(place, name, tensor) for place in _places(owner) for name, tensor in place.items()]
        self._others: list[list[tuple[dict[str, Any], str, Any]]] = []

    def __enter__(self) -> None:
        now = [(place, name, place.get(name), held) for place, name, held in self._held]
        others = [(place, name, other, held) for place, name, other, held in now if _stands_for(other, held)]
        self._others.append([(place, name, other) for place, name, other, _ in others])
        for place, name, _, held in others:
            place[name] = held

    def __exit__(self, *error: object) -> None:
        for place, name, other in self._others.pop():
            place[name] = other


def _places(owner: nn.Module) -> Iterator[dict[str, Any]]:
    """Where a module and those within it have their parameters and buffers."""
    for module in owner.modules():
        yield module._parameters
        yield module._buffers


def _stands_for(other: Any, held: Any) -> bool:
    """Whether a tensor is in another's place: shards, which come and go in a backward pass, are of other shapes."""
    if other is held or type(other) not in PLAIN or type(held) not in PLAIN:
        return False
    return other.shape == held.shape and other.dtype == held.dtype
