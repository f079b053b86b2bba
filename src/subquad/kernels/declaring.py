"""How an operator `subquad::…` of PyTorch is declared, and how a backend says that it computes it.

An operator is declared once: its name, the shapes that it takes and gives, what it counts as. Backends implement it
for a device. Results are tokens (b, h, n, d) that lie in memory as (b, n, h, d), as the next projection wants them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from subquad.kernels.shapes import Shapes

NAMESPACE = torch.library.Library("subquad", "FRAGMENT")

Operator = Any
"""An operator: torch.ops.subquad.<name>."""

TITLES: dict[str, str] = {}
"""What every operator is called where a person reads."""

SHAPES: dict[str, Shapes] = {}
"""The shapes of every operator's tensors, which stand first among its arguments."""

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
    takes: dict[str, str],
    flops: Callable[..., int] = lambda *shapes: 0,
    shape: Callable[..., Any] | None = like_tokens,
    result: str = "Tensor",
) -> Operator:
    """`subquad::name` of a schema: the shapes of its tensors, what it counts as from them, and empty results."""
    name = schema.partition("(")[0]
    TITLES[name], SHAPES[name], IMPLEMENTED[name] = title, Shapes(title, **takes), set()
    NAMESPACE.define(f"{schema} -> {result}")

    def without_running(*arguments: Any) -> Any:
        check_arguments(name, arguments)
        return None if shape is None else shape(*arguments)

    torch.library.register_fake(f"subquad::{name}", without_running, lib=NAMESPACE)
    packet = getattr(torch.ops.subquad, name)
    register_flop_formula(packet)(lambda *shapes, out_shape=None, **settings: flops(*shapes))
    return packet


def check_arguments(name: str, arguments: tuple[Any, ...]) -> None:
    """Raise where the tensors among an operator's arguments do not fit each other."""
    tensors = [value for value in arguments if value is None or isinstance(value, Tensor)]
    SHAPES[name].check(*tensors)


def shapes_of(operator: Operator) -> Shapes:
    """The shapes of an operator's tensors."""
    return SHAPES[name_of(operator)]


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
