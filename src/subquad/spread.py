"""One image's tokens over several processes, a band of rows each: what formulas and hosts ask, whoever answers.

Where a process holds all tokens, which is where `over` was not entered, everything here gives back what it is given.
Else an exchange answers, that of `subquad.large` say: sums over tokens become those of all bands, maps get the rows
beside them. Nobody above or below needs to know how many processes there are.

Sums are of all processes in gradients as well: each gives the gradient of the sum of all processes' losses to what it
computed itself. So every process has to make the same calls, and a backward pass where one has one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from subquad.grid import TokenGrid

Part = Tensor | int


class Exchange(Protocol):
    """Who asks the other processes."""

    @property
    def index(self) -> int:
        """Which band this process holds, from the top."""

    @property
    def is_last(self) -> bool:
        """Whether it is the last one."""

    def sums(self, parts: Sequence[Part]) -> tuple[Tensor, ...]:
        """Each part, summed over processes, with gradients, of the dtype that it has."""

    def largest(self, x: Tensor) -> Tensor:
        """The largest of all processes for each entry, without gradients."""

    def with_borders(self, image: Tensor, above: int, below: int) -> Tensor:
        """A map (b, c, y, x) with rows of the bands beside it, with gradients; zeros outside of the whole map."""

    def grid_of(self, image: Tensor, prefix: int) -> TokenGrid:
        """The grid of a band (b, c, y, x) of a map that has `prefix` tokens in front."""


_current: Exchange | None = None


@contextmanager
def over(exchange: Exchange) -> Iterator[None]:
    """Tokens inside this context are spread: `exchange` knows the processes that hold the others."""
    global _current
    before, _current = _current, exchange
    try:
        yield
    finally:
        _current = before


def current() -> Exchange | None:
    """Who is asked, if tokens are spread."""
    return _current


def is_spread() -> bool:
    """Whether other processes hold tokens of the same images."""
    return _current is not None


def sums(*parts: Part) -> tuple[Any, ...]:
    """Sums over this process's tokens, made sums over all tokens; in one message."""
    return parts if _current is None else _current.sums(parts)


def total(x: Tensor) -> Tensor:
    """A sum over this process's tokens, made the sum over all tokens."""
    return x if _current is None else _current.sums([x])[0]


def largest(x: Tensor) -> Tensor:
    """The largest over this process's tokens, made the largest of all tokens; without gradients."""
    return x if _current is None else _current.largest(x)


def with_borders(image: Tensor, rows: int) -> tuple[Tensor, int]:
    """A map (b, c, y, x) with `rows` more above and below, and how many rows of zeros are still to be added."""
    return (image, rows) if _current is None else (_current.with_borders(image, rows, rows), 0)


def grid_of(image: Tensor, prefix: int) -> TokenGrid:
    """The grid that a map's tokens (b, c, y, x) stand on, behind `prefix` tokens, which the first band alone has."""
    height, width = image.shape[-2:]
    return TokenGrid(height, width, prefix) if _current is None else _current.grid_of(image, prefix)


def prefix_here(prefix: int) -> int:
    """How many of a network's prefix tokens this process holds: all, or none."""
    return prefix if _current is None or _current.index == 0 else 0


def first_token(x: Tensor) -> Tensor:
    """The first of all tokens (b, n, c), (b, c) for every process."""
    if _current is None:
        return x[:, 0]
    # of none the sum is zeros, which have a gradient as well: the other processes wait for it
    return total(x[:, : 1 if _current.index == 0 else 0].sum(dim=1))


def mean_token(x: Tensor) -> Tensor:
    """The mean of all tokens (b, n, c), (b, c) for every process."""
    if _current is None:
        return x.mean(dim=1)
    wide = torch.promote_types(x.dtype, torch.float32)
    summed, count = sums(x.sum(dim=1, dtype=wide), x.shape[1])
    return (summed / count).to(x.dtype)


def largest_token(x: Tensor) -> Tensor:
    """The largest of all tokens (b, n, c) in each channel, (b, c) for every process; equals share the gradient."""
    if _current is None:
        return x.amax(dim=1)
    is_largest = x == largest(x.detach().amax(dim=1, keepdim=True))
    summed, count = sums(x.where(is_largest, 0).sum(dim=1), is_largest.sum(dim=1))
    return (summed / count).to(x.dtype)
