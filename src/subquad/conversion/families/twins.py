"""Twins of foreign layers, which answer random tokens, so that numbers tell what such a layer computes.

A twin has its layer's class and attributes, and random weights: of those that are trained several formulas may give the
same, and a layer's own hooks, generators and device are nobody's business here.
"""

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from math import prod, sqrt
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

Found = TypeVar("Found")

OF_LIBRARIES = frozenset({"diffusers", "subquad", "timm", "torch", "torchvision", "transformers"})
"""Whose layers have rows of their own: what stands around them is known, and why others are refused."""

MOST_KINDS = 256
TOLERANCE = 1e-4
"""Of the largest number of an answer: both are computed in fp32."""

_OF_MODULES = frozenset(vars(nn.Module()))


class Remembered(Generic[Found]):
    """Finds out something of layers, once of all that compute alike.

    Args:
        find: gives it of a layer, without looking at its weights; None where there is nothing.
    """

    def __init__(self, find: Callable[[nn.Module], Found | None]) -> None:
        self.find = find
        self._by_kind: dict[Hashable, Found | None] = {}
        self._by_layer: WeakKeyDictionary[nn.Module, Found | None] = WeakKeyDictionary()

    def __call__(self, layer: nn.Module) -> Found | None:
        """What is found of a layer."""
        kind = _kind_of(layer)
        known: Any = self._by_layer if kind is None else self._by_kind
        key: Any = layer if kind is None else kind
        if key not in known:
            if len(self._by_kind) > MOST_KINDS:
                self._by_kind.clear()
            with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
                torch.default_generator.manual_seed(0)
                known[key] = self.find(layer)
        found: Found | None = known[key]
        return found


def _kind_of(layer: nn.Module) -> Hashable | None:
    """What layers that compute alike have in common; None where a part has attributes that can't be compared."""
    kinds = []
    for name, part in layer.named_modules(remove_duplicate=False):
        own = attributes_of(part)
        if not all(_is_plain(value) for value in own.values()):
            return None
        shapes = tuple((key, None if one is None else one.shape) for key, one in part._parameters.items())
        kinds.append((name, type(part), tuple(sorted(own.items(), key=lambda item: item[0])), shapes))
    return tuple(kinds)


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str | None) or (type(value) is tuple and all(map(_is_plain, value)))


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """What a module has besides its parts, parameters, buffers and hooks."""
    return {name: value for name, value in vars(module).items() if name not in _OF_MODULES}


def twin_of(layer: nn.Module, *, remembers: bool = True) -> Any:
    """A layer of the same class and attributes, in evaluation and in fp32 on the CPU.

    One that does not remember has None where its layer has tensors among its attributes. Where both answer alike, these
    are what the last call left, and no biases.
    """
    twin = copy.copy(layer)
    if not remembers:
        kept = {name: None for name, value in attributes_of(layer).items() if isinstance(value, Tensor)}
        twin.__dict__.update(kept)
    # what it appends to is its own
    own = attributes_of(twin).items()
    twin.__dict__.update({name: copy.copy(one) for name, one in own if isinstance(one, list | dict | set | deque)})
    twin._modules = {name: None if part is None else _fresh(part) for name, part in layer._modules.items()}
    twin._parameters = {name: None if one is None else _random(one) for name, one in layer._parameters.items()}
    twin._buffers = {name: None if one is None else as_twins_have_it(one) for name, one in layer._buffers.items()}
    _listened_to_by_nobody(twin)
    return twin.eval()


def twin_if_any(layer: nn.Module) -> Any | None:
    """A layer's twin; None where weights are computed of others, which can't be copied."""
    try:
        return twin_of(layer)
    except RuntimeError:
        return None


def _fresh(part: nn.Module) -> nn.Module:
    fresh = copy.deepcopy(part, {id(one): _random(one) for one in part.parameters()})
    for module in fresh.modules():
        buffers = {name: as_twins_have_it(one) for name, one in module._buffers.items() if one is not None}
        module._buffers.update(buffers)
        _listened_to_by_nobody(module)
    return fresh


def _listened_to_by_nobody(module: nn.Module) -> None:
    module.__dict__.update({name: OrderedDict() for name in _OF_MODULES if name.endswith("_hooks")})


def as_twins_have_it(tensor: Tensor) -> Tensor:
    """A copy on the device, and of fractions in the precision, of the tokens that a twin is asked about."""
    copied = tensor.detach().clone() if tensor.is_meta else tensor.detach().to("cpu", copy=True)
    return copied.float() if copied.is_floating_point() else copied


def _random(like: Tensor) -> nn.Parameter:
    """Weights by which scores are as different from each other as those of trained layers; factors and biases."""
    if like.dim() < 2:
        return nn.Parameter(torch.rand(like.shape, device="cpu", dtype=torch.float32) + 0.5)
    weights = torch.randn(like.shape, device="cpu", dtype=torch.float32)
    return nn.Parameter(weights * 1.5 / sqrt(prod(like.shape[1:])))


def random_tokens(images: int, tokens: int, channels: int) -> Tensor:
    """(images, tokens, channels)."""
    return torch.randn(images, tokens, channels, device="cpu", dtype=torch.float32)


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two answers are the same but for rounding."""
    return one.shape == other.shape and bool((one - other).abs().max() <= TOLERANCE * other.abs().max())
