"""Sums weighted by a softmax over tokens that come part by part: with the largest score so far, as in online softmax.

A state is (m, Σ e^(s − m) x, …): the largest score m, and sums of anything that broadcasts against it.

Letters: a rows of scores, n tokens, d channels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def weighted_sums(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of scores (…, a, n) and values (…, n, d): m (…, a, 1), Σ e^(s − m) (…, a, 1) and Σ e^(s − m) v (…, a, d)."""
    most = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - most)
    return most, weights.sum(dim=-1, keepdim=True), weights @ v


def merge_weighted(state: Sequence[Tensor], other: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Make one state of those of two parts."""
    most = torch.maximum(state[0], other[0])
    own, others = torch.exp(state[0] - most), torch.exp(other[0] - most)
    return most, *(x * own + y * others for x, y in zip(state[1:], other[1:], strict=True))
