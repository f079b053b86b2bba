"""InLine attention: linear attention normalised by subtraction. Linear in n: 2 n d² products a head, no division.

    w_ij = 1/n + (s/n) q_i·(k_j − k̄)        o_i = v̄ + s q_i Cov(k, v),  s = d^-1/2

Han et al. 2024, arXiv 2412.06590, eq. 5 (φ = identity, in the released scaling).
Rows sum to 1, entries may be negative.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subquad import kernels, spread
from subquad.ops.padding import at_least_one, count_here, count_tokens, mean_token, zero_padding
from subquad.ops.precision import in_fp32, kept_in_fp32

SHAPES = kernels.inline_attention.shapes.extended(padding="b m")
WEIGHTS_SHAPES = SHAPES.without("v")


def inline_attention(
    q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """(b, h, n_q, d) from q (b, h, n_q, d), k and v (b, h, n_k, d); `padding` (b, n_k)."""
    SHAPES.check(q, k, v, padding)
    return kernels.compute(kernels.inline_attention, _inline, (q, k, v), (), (padding,), backend=backend)


@in_fp32
def _inline(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None = None) -> Tensor:
    return inline_answers(q, _of_all(inline_sums(k, v, padding)))


@kept_in_fp32
def inline_sums(k: Tensor, v: Tensor, padding: Tensor | None = None) -> tuple[Any, ...]:
    """Of some keys and values (b, h, n, d): how many they are, k̄ and Σ v (b, h, 1, d), and Σ (k − k̄)ᵀ v (b, h, d, d).

    `merge_inline` makes one state of those of two parts.
    """
    # keys are centred before the product: subtracting afterwards cancels when they share a large mean
    k, v = (zero_padding(x, padding) for x in (k, v))
    count = count_here(k, padding)
    mean = k.sum(dim=-2, keepdim=True) / at_least_one(count)
    return count, mean, v.sum(dim=-2, keepdim=True), zero_padding(k - mean, padding).mT @ v


def merge_inline(state: Sequence[Any], other: Sequence[Any]) -> tuple[Any, ...]:
    """Make one state of those of two parts."""
    (count, mean, *_), (more, other_mean, *_) = state, other
    centre = mean + (other_mean - mean) * (more / (count + more))
    return count + more, centre, *map(torch.add, _centred(centre, state), _centred(centre, other))


def _of_all(state: Sequence[Any]) -> Sequence[Any]:
    """The state of the keys of all processes, from that of this one's."""
    if not spread.is_spread():
        return state
    count, mean, *_ = state
    of_all, key_sum = spread.sums(count, mean * count)
    centre = key_sum / at_least_one(of_all)
    return of_all, centre, *spread.sums(*_centred(centre, state))


def _centred(centre: Tensor, state: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Σ v and Σ (k − c)ᵀ v for another centre c of the keys."""
    _, mean, value_sum, products = state
    return value_sum, products + (mean - centre).mT @ value_sum


@in_fp32
def inline_answers(q: Tensor, sums: Sequence[Any]) -> Tensor:
    """`inline_attention` of some queries (b, h, n, d), from the state of all keys."""
    count, _, value_sum, products = sums
    count = at_least_one(count)
    return value_sum / count + q @ (products / count * q.shape[-1] ** -0.5)


@in_fp32
def inline_weights(q: Tensor, k: Tensor, padding: Tensor | None = None) -> Tensor:
    """Explicit weights (b, h, n_q, n_k) of `inline_attention`."""
    WEIGHTS_SHAPES.check(q, k, padding)
    k = k - mean_token(k, padding)
    weights = (1 + q @ k.mT * q.shape[-1] ** -0.5) / count_tokens(k, padding)
    return weights if padding is None else weights.masked_fill(padding[:, None, None, :], 0)
