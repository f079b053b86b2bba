"""Saying no to what a mechanism can't honour: `Traits.refuses`, where it meets it."""

from typing import Any

from torch import Tensor

from subquad.attention.traits import traits_of
from subquad.errors import SubquadError
from subquad.grid import TokenGrid
from subquad.tracing import is_traced


def refuse(mechanism: Any, *, grid: TokenGrid, kv_grid: TokenGrid, padding: Tensor | None = None) -> None:
    """Raise a SubquadError, in one line with the reason, where a mechanism meets what its traits refuse.

    Called with its grids when it is made, with its padding as well at each call. Padding that is nowhere is none.
    """
    traits = traits_of(mechanism)
    for refused, reason in traits.refuses.items():
        what = _MEETS[refused](grid, kv_grid, padding)
        if what:
            raise SubquadError(f"{traits.label or type(mechanism).__name__} attention refuses {what}: {reason}")


def _prefix(grid: TokenGrid, kv_grid: TokenGrid, padding: Tensor | None) -> str:
    count = max(grid.prefix, kv_grid.prefix)
    return f"{count} prefix token{'s' if count > 1 else ''}" if count else ""


def _kv_grid(grid: TokenGrid, kv_grid: TokenGrid, padding: Tensor | None) -> str:
    return "" if grid == kv_grid else f"queries on a grid of {grid} that attend to one of {kv_grid}"


def _padding(grid: TokenGrid, kv_grid: TokenGrid, padding: Tensor | None) -> str:
    if padding is None:
        return ""
    if is_traced() or padding.is_meta:
        return "padding, which nobody can look into where a network is compiled or exported"
    absent = int(padding.sum())
    return f"padding ({absent} of {padding.numel()} tokens are absent)" if absent else ""


_MEETS = {"prefix": _prefix, "kv_grid": _kv_grid, "padding": _padding}
