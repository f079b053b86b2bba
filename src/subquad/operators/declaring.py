"""How an operator `subquad::…` of PyTorch is declared, and how a backend says that it computes it.

An operator is declared once: its name, its results' shapes without running, what it counts as. Backends implement it
for a device. Results are tokens (b, h, n, d) that lie in memory as (b, n, h, d), as the next projection wants them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

NAMESPACE = torch.library.Library("subquad", "FRAGMENT")

Operator = Any
"""An operator: torch.ops.subquad.<name>."""

TITLES: dict[str, str] = {}
"""What every operator is called where a person reads."""

IMPLEMENTED: dict[str, set[str]] = {}
"""The backends that have kernels for an operator, by its name."""


def empty_tokens(like: Tensor) -> Tensor:
    """Room for tokens (b, h, n, d), each token's heads side by side."""
    b, h, n, d = like.shape
    return like.new_empty(b, n, h, d).transpose(1, 2)


def like_tokens(first: Tensor, *rest: Any) -> Tensor:
    """The shape of most results: tokens like the first argument's."""
    return empty_tokens(first)


def operator(
    title: str,
    schema: str,
    flops: Callable[..., int] = lambda *shapes: 0,
    shape: Callable[..., Any] | None = like_tokens,
    result: str = "Tensor",
) -> Operator:
    """`subquad::name` of a schema: what it counts as from its arguments' shapes, and empty results."""
    name = schema.partition("(")[0]
    TITLES[name], IMPLEMENTED[name] = title, set()
    NAMESPACE.define(f"{schema} -> {result}")
    torch.library.register_fake(f"subquad::{name}", shape or (lambda *given: None), lib=NAMESPACE)
    packet = getattr(torch.ops.subquad, name)
    register_flop_formula(packet)(lambda *shapes, out_shape=None, **settings: flops(*shapes))
    return packet


def implements(operator: Operator, backend: str, *devices: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function compute `operator` on `devices`, "cpu" or "cuda", for `backend`."""
    name = name_of(operator)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for device in devices:
            NAMESPACE.impl(name, function, device.upper())
        IMPLEMENTED[name].add(backend)
        return function

    return register


def name_of(operator: Operator) -> str:
    """The operator's name, without its namespace."""
    return operator.__name__


def has_kernel(operator: Operator, backend: str) -> bool:
    """Whether `backend` has a kernel for `operator`."""
    return backend in IMPLEMENTED[name_of(operator)]


def has_gradient(operator: Operator, backend: str) -> bool:
    """Whether `backend` has a kernel for the operator's gradient."""
    return backend in IMPLEMENTED.get(f"{name_of(operator)}_gradient", ())


def kernels_by_title() -> dict[str, dict[str, str]]:
    """What has kernels, by its title and backend: "yes", or "forward" where a gradient is computed by PyTorch."""
    found: dict[str, dict[str, str]] = {}
    for name, backends in IMPLEMENTED.items():
        if name.endswith("_gradient"):
            continue
        for backend in backends:
            # a title may stand for several operators, the last of which is the one with a gradient
            learned = backend in IMPLEMENTED.get(f"{name}_gradient", ())
            found.setdefault(TITLES[name], {})[backend] = "yes" if learned else "forward"
    return found
