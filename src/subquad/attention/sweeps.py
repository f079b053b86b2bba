"""How a mechanism answers a grid piece by piece: what it sums up over all tokens, then what each row is answered.

A mechanism that can do so has a method

    def streaming(self, grid) -> Streaming

that says how, for a grid of any size whose tokens are never all there. One that can't says why in its
`Traits.no_streaming`. Whoever walks over the tokens (`subquad.large`) makes one sweep for each of `Streaming.sums`,
merges what the parts give, and then asks for the answers of each part.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from subquad.attention.contract import of_another_forward
from subquad.attention.traits import traits_of
from subquad.errors import SubquadError, shown
from subquad.grid import TokenGrid

State = tuple[Tensor, ...]
"""What has been summed up over tokens."""


def add_up(state: State, other: State) -> State:
    """Sums over some tokens and over others, of both."""
    return tuple(map(torch.add, state, other))


@dataclass(frozen=True)
class Sweep:
    """One walk over all tokens, some rows at a time.

    Attributes:
        inputs: of the mechanism's inputs those that it needs of the rows themselves.
        compute: called with the rows (`GridRows`), the states of all sweeps before, and the inputs by name.
        beside: inputs that it needs of so many rows above and below as well, as far as the grid has them.
        merge: makes one state of those of two parts.
    """

    inputs: tuple[str, ...]
    compute: Callable[..., Any]
    beside: dict[str, int] = field(default_factory=dict)
    merge: Callable[[State, State], State] = add_up

    @property
    def wanted(self) -> dict[str, int]:
        """Inputs that it needs, each with how many rows above and below."""
        return dict.fromkeys(self.inputs, 0) | self.beside

    @property
    def reach(self) -> int:
        """Rows that are looked at above and below."""
        return max(self.beside.values(), default=0)


@dataclass(frozen=True)
class Streaming:
    """What a mechanism sums up, a sweep after the other, and how it answers (b, h, n, d) the queries of some rows."""

    sums: tuple[Sweep, ...]
    answers: Sweep


@dataclass(frozen=True)
class Branch:
    """A block's first half, from its norm to its residual, in two steps; a mechanism may have one as `branch`.

    Each gives None where no kernel computes it, and the block goes its own steps.

    Attributes:
        sums: of some tokens (b, n, c), the weights of the norm and those of keys and values, see `ops.branch_at_once`.
        answers: some tokens behind the residual, from such sums over `count`.
    """

    sums: Callable[..., Tensor | None]
    answers: Callable[..., Tensor | None]


def streaming_of(mechanism: Any, grid: TokenGrid) -> Streaming:
    """How a mechanism answers `grid` piece by piece.

    Raises:
        SubquadError: it can't, in one line that says why.
    """
    make = getattr(mechanism, "streaming", None)
    traits = traits_of(mechanism)
    if make is None or traits.no_streaming:
        name = traits.label or type(mechanism).__name__
        reason = traits.no_streaming or "it has no method `streaming` (docs/adding-a-mechanism.md)"
        raise SubquadError(f"{name} attention can't be streamed: {reason}")
    if (parent := of_another_forward(type(mechanism), "streaming")) is not None:
        name = type(mechanism).__name__
        raise SubquadError(
            f"{name} attention can't be streamed: its forward is not {parent}'s, and its streaming is; give it one of "
            f"its own, or where it computes the same write streaming = {parent}.streaming in {name} "
            "(docs/adding-a-mechanism.md)"
        )
    streaming = make(grid)
    if not isinstance(streaming, Streaming):
        raise SubquadError(
            f"{type(mechanism).__name__}.streaming is to give a Streaming of subquad.attention.sweeps, got "
            f"{shown(streaming)} (docs/adding-a-mechanism.md)"
        )
    return streaming
