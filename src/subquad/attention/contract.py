"""The part of the contract that shows without computing: what a class lacks to be a mechanism, in one line."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from subquad.attention.traits import Traits, traits_of
from subquad.errors import SubquadError, shown
from subquad.grid import TokenGrid

VOCABULARY = ("q", "k", "v", "g", "x", "rotation", "padding", "mask")
"""What a host can supply, in the order of its fused projection; see `ATTENTION`."""

NEEDED = ("q", "v", "padding")
"""Without these there are no queries, no values, or no sequences of different lengths."""


class Mechanism(nn.Module):
    """What an entry of `ATTENTION` is to a type checker: nothing derives from it, and nothing is made of it."""

    inputs: tuple[str, ...]
    traits: Traits

    def __init__(self, dim: int, num_heads: int, *, grid: TokenGrid, kv_grid: TokenGrid, **settings: Any) -> None:
        raise NotImplementedError

    def __call__(self, *tokens: Any, grid: TokenGrid, kv_grid: TokenGrid, **named: Any) -> Tensor:
        raise NotImplementedError

    def weights(self, *tokens: Any, grid: TokenGrid, kv_grid: TokenGrid, **named: Any) -> Tensor:
        raise NotImplementedError


def check_mechanism(name: str, cls: Any) -> None:
    """Raise a SubquadError that says all of what a class lacks to be the mechanism `name`."""
    if not isinstance(name, str) or re.fullmatch("[a-z][a-z0-9_]*", name) is None:
        raise SubquadError(
            f"an attention's name is of small letters, digits and _, as it stands in flags and files; got {shown(name)}"
        )
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        raise SubquadError(f"attention '{name}' is to be a class derived from torch.nn.Module, got {shown(cls)}")
    if faults := list(_faults(cls)):
        raise SubquadError(
            f"{cls.__name__} can't be attention '{name}': {'; '.join(faults)} (docs/adding-a-mechanism.md)"
        )


def _faults(cls: Any) -> Iterator[str]:
    inputs = getattr(cls, "inputs", None)
    if not isinstance(inputs, tuple) or list(inputs) != [word for word in VOCABULARY if word in inputs]:
        yield f"inputs is a tuple of the words {' '.join(VOCABULARY)}, in this order, got {shown(inputs)}"
        inputs = None
    elif missing := [word for word in NEEDED if word not in inputs]:
        refused = ", which is handed to one that refuses it, too" if "padding" in missing else ""
        yield f"inputs lacks {' '.join(missing)}{refused}"
    for method, words in (("forward", inputs), ("weights", inputs and tuple(w for w in inputs if w != "v"))):
        function = getattr(cls, method, None)
        if not callable(function) or function is getattr(nn.Module, method, None):
            yield f"it has no method {method}"
        elif words and not _takes(function, words):
            yield f"{method} takes (self, {', '.join(words)}, *, grid, kv_grid), got {inspect.signature(function)}"
    shows_none = getattr(traits_of(cls), "no_weights", "")
    if not shows_none and (parent := of_another_forward(cls, "weights")) is not None:
        yield (
            f"its forward is not {parent}'s, and its weights are: give it weights of its own, or where they are the "
            f"same write weights = {parent}.weights in the class"
        )
    for method in ("streaming", "differs_on"):
        function = getattr(cls, method, None)
        if function is not None and not (callable(function) and _takes_one(function)):
            yield f"{method}, where it has one, is a method that takes (self, grid), got {shown(function)}"
    yield from _faults_of_constructor(cls)
    traits = traits_of(cls)
    if not isinstance(traits, Traits):
        yield "traits is a subquad.Traits"
        return
    for host, settings in traits.in_hosts.items():
        if unknown := [key for key in settings if key not in inspect.signature(cls).parameters]:
            yield f"traits set {', '.join(unknown)} in {host}, which __init__ does not take"


def of_another_forward(cls: type, method: str) -> str | None:
    """The name of the class that a mechanism has this method from, where it has its forward from a later one.

    What such a method says is of another formula, as far as anybody knows; a class that says it anew vouches for it.
    """
    line = [one for one in cls.__mro__ if {method, "forward"} & vars(one).keys()]
    first = line[0] if line else cls
    if "forward" not in vars(first) or method in vars(first):
        return None
    return next((one.__name__ for one in line if method in vars(one)), None)


def _takes(function: Any, words: tuple[str, ...]) -> bool:
    parameters = inspect.signature(function).parameters
    keywords = tuple(name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY)
    return tuple(parameters) == ("self", *words, "grid", "kv_grid") and keywords == ("grid", "kv_grid")


def _takes_one(function: Any) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    return True


def _faults_of_constructor(cls: Any) -> Iterator[str]:
    parameters = list(inspect.signature(cls).parameters.values())
    own = [one for one in parameters if one.name not in ("dim", "num_heads", "grid", "kv_grid")]
    keywords = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
    if [one.name for one in parameters[:2]] != ["dim", "num_heads"] or not {"grid", "kv_grid"} <= keywords:
        yield "__init__ takes (self, dim, num_heads, *, grid, kv_grid, its settings)"
    elif bad := [one.name for one in own if one.kind is not one.KEYWORD_ONLY or one.default is one.empty]:
        yield f"settings have defaults and are given by keyword, which is not so of {', '.join(bad)}"
