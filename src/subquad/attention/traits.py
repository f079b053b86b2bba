"""What is known of a mechanism beside what it computes: said in its own file, read by whoever needs it."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from subquad.errors import SubquadError, shown, unknown_name

QuietStart = Callable[[Any], object]
"""Sets what a fresh mechanism adds to its mixing to nothing, in place."""

KeyRemoval = Callable[[Tensor, Tensor], Tensor]
"""Weights (b, h, s, n_q, n_k) and removed pairs (n_q, n_k) to the weights over the keys that are left."""

REFUSABLE = ("padding", "prefix", "kv_grid")
"""What a mechanism may refuse to honour, see `Traits.refuses`."""

HOST_NAMES = ("vit", "pvt", "pvt_v2", "swin", "cswin", "softnet", "lavit", "lavit_vit", "mllanet", "mavit", "hvit3")
"""The keys of `subquad.models.HOSTS`, a room that knows this one: so traits are checked when they are said."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The attribute `traits` of a mechanism's class; without it these defaults hold.

    Attributes:
        label: its name for people, in listings and titles.
        quadratic: whether its cost grows with n²: hosts confine it to windows, stripes or fewer keys then.
        cost: how its cost grows, for listings, where it is neither n nor, being quadratic, n²: "n log n".
        pools: whether it pools over parts of the grid, as agents and landmarks do: the same tokens at the head of a
            longer row are answered differently, so sequences are filled up to the network's length.
        key_removal: what its explicit weights become when keys are removed, see `key_removal.py`. None where nobody
            has said: analysis refuses to remove keys then.
        in_hosts: settings that it has in a host, by the host's name, unless told otherwise; a tuple has an entry for
            each stage.
        start_quietly: what lets a fresh one stand in for another mechanism as nearly as it can, before anything is
            trained: local branches, positions and biases of zeros. None where nothing needs to be done.
        start_values: parameters by name with numbers worth trying, all entries of a parameter alike: conversion
            takes those whose answer is nearest to that of the layer which is replaced.
        feature_width: how many features become of each channel of a head before it is turned by `rotation`: the host
            forms angles for as many. Of use to a mechanism that has `rotation` among its inputs.
        extra_heads: heads beyond `num_heads` whose q, k, v and g the host projects as well; what `forward` gives has
            as many more, and the output projection reads them all.
        gate: what its gate `g` becomes before it is multiplied with, SiLU say; None where it stays as it is.
        open_gate: the number of `g` that lets everything through, because it multiplies by 1.
        no_weights: why it has no explicit attention, as the end of "… has no explicit weights: "; empty where it has.
            Its `weights` raises a SubquadError that says so.
        spreads: whether it computes over all tokens what several processes hold together: its sums over tokens go
            through `subquad.spread`, its tables through grids. Others are refused by `subquad.split_tokens`.
        no_streaming: why it can't answer a grid piece by piece, as the end of "… can't be streamed: "; empty where it
            can, see `subquad.attention.sweeps`.
        refuses: what it can't honour and why, by name: "padding", "prefix" (tokens that stand nowhere on the map),
            "kv_grid" (keys on another grid than the queries). It raises a SubquadError where it meets one, a prefix
            and grids already when it is made; who wants to know before reads it here.
        colour: on pages and pictures, as "#d55e00". Made of its name where it is empty.

    Raises:
        SubquadError: for a value of another kind.
    """

    label: str = ""
    quadratic: bool = False
    cost: str = ""
    pools: bool = False
    key_removal: KeyRemoval | None = None
    in_hosts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    start_quietly: QuietStart | None = None
    start_values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    feature_width: int = 1
    extra_heads: int = 0
    gate: Callable[[Tensor], Tensor] | None = None
    open_gate: float = 1.0
    no_weights: str = ""
    spreads: bool = False
    no_streaming: str = ""
    refuses: Mapping[str, str] = field(default_factory=dict)
    colour: str = ""

    def __post_init__(self) -> None:
        for name, good, what in (
            ("label", isinstance(self.label, str), "text"),
            ("quadratic", isinstance(self.quadratic, bool), "True or False"),
            ("cost", isinstance(self.cost, str), "text"),
            ("pools", isinstance(self.pools, bool), "True or False"),
            ("key_removal", self.key_removal is None or callable(self.key_removal), "a function or None"),
            ("in_hosts", _is_table(self.in_hosts), "settings by the names of hosts"),
            ("start_quietly", self.start_quietly is None or callable(self.start_quietly), "a function or None"),
            ("start_values", _are_numbers(self.start_values), "tuples of numbers by the names of parameters"),
            ("feature_width", _is_count(self.feature_width) and self.feature_width > 0, "a number above 0"),
            ("extra_heads", _is_count(self.extra_heads), "a number of heads"),
            ("gate", self.gate is None or callable(self.gate), "a function or None"),
            ("open_gate", _is_number(self.open_gate), "a number"),
            ("no_weights", isinstance(self.no_weights, str), "text"),
            ("spreads", isinstance(self.spreads, bool), "True or False"),
            ("no_streaming", isinstance(self.no_streaming, str), "text"),
            ("refuses", _are_reasons(self.refuses), f"reasons by name: {', '.join(REFUSABLE)}"),
            ("colour", isinstance(self.colour, str) and _is_colour(self.colour), 'written as "#d55e00"'),
        ):
            if not good:
                raise SubquadError(f"a mechanism's {name} is {what}, got {shown(getattr(self, name))}")
        for name in self.in_hosts:
            if name not in HOST_NAMES:
                # its settings would be passed over
                raise unknown_name("host in a mechanism's in_hosts:", str(name), HOST_NAMES)


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(settings, Mapping) for settings in value.values())


def _are_numbers(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(numbers, tuple) and numbers and all(isinstance(one, int | float) for one in numbers)
        for numbers in value.values()
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_reasons(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        name in REFUSABLE and isinstance(reason, str) and reason for name, reason in value.items()
    )


def _is_colour(text: str) -> bool:
    return not text or re.fullmatch("#[0-9a-f]{6}", text) is not None


def traits_of(mechanism: Any) -> Traits:
    """The traits of a mechanism's class, or of a module of it."""
    return getattr(mechanism, "traits", Traits())
