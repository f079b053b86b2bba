"""Sums weighted by a softmax over tokens that come part by part: with the largest score so far, as in online softmax.

A state is (m, Σ e^(s − m) x, …): the largest score m, without gradients, and sums of anything that broadcasts against
it. What is computed of a state is the same for any m: only quotients of its sums count, or products with e^m.

Letters: a rows of scores, n tokens, d channels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from subquad import spread
from subquad.tracing import surely


def largest(scores: Tensor, dim: int) -> Tensor:
    """The largest scores along an axis, which stays with one entry, without gradients; 0 of none."""
    scores = scores.detach()
    if surely(scores.shape[dim] == 0):
        return scores.sum(dim=dim, keepdim=True)
    return scores.amax(dim=dim, keepdim=True)


def raised(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Of scores (…, a, n) the largest, m (…, a, 1), and e^(s − m) (…, a, n)."""
    most = largest(scores, dim=-1)
    return most, torch.exp(scores - most)


def merge_weighted(state: Sequence[Tensor], other: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Make one state of those of two parts."""
    most = torch.maximum(state[0], other[0])
    return most, *map(torch.add, _relative_to(most, state), _relative_to(most, other))


def relative_to_all(state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A state with the largest score of all processes, so that its sums can be added up over these: `spread.sums`."""
    if not spread.is_spread():
        return tuple(state)
    most = spread.largest(state[0])
    return most, *_relative_to(most, state)


def _relative_to(most: Tensor, state: Sequence[Tensor]) -> list[Tensor]:
    """The sums of a state, as they are for another m."""
    share = torch.exp(state[0] - most)
    return [x * share for x in state[1:]]
