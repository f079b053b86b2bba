"""Operators of attention that knows the map its tokens lie on: MHLA's blocks, circulant attention.

Letters: b batch, h heads, n tokens, m blocks, d channels of a head. The formulas are those of subquad.ops. The gradient
of each stands in front of it.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from subquad.kernels.declaring import empty_tokens, operator
from subquad.kernels.state_operators import GRAD, like_qkv

STATES_OF_BLOCKS = {"states": "b h m d d+1"}

SCALED = {"scale": "h 1 d"}

mhla_sums_gradient = operator(
    "the gradient of MHLA's states",
    "mhla_sums_gradient(Tensor grad, Tensor k, Tensor v, Tensor scale, int[] shape, int[] pieces)",
    {"grad": "b h m d d+1", "k": "b h n d", "v": "b h n d"} | SCALED,
    lambda grad, k, *rest: 4 * k[0] * k[1] * k[2] * k[3] * (k[3] + 1),
    shape=lambda grad, k, v, scale, *rest: (empty_tokens(k), empty_tokens(v), scale.new_empty(scale.shape)),
    result="(Tensor, Tensor, Tensor)",
)

# of each block of a map in `pieces`, (rows, columns), [Σ kᵀ v, Σ k] of features; prefix tokens are a block in front
mhla_sums = operator(
    "MHLA",
    "mhla_sums(Tensor k, Tensor v, Tensor scale, int[] shape, int[] pieces)",
    {"k": "b h n d", "v": "b h n d"} | SCALED,
    lambda k, *rest: 2 * k[0] * k[1] * k[2] * k[3] * (k[3] + 1),
    shape=lambda k, v, scale, shape, pieces: empty_states_of_blocks(k, shape, pieces),
    gradient=mhla_sums_gradient,
    sums_in_fp32=True,
    gives_fp32=True,
    needs_all_tokens=False,
)

mhla_answers_gradient = operator(
    "the gradient of MHLA's answers",
    "mhla_answers_gradient(Tensor grad, Tensor q, Tensor states, Tensor scale, int[] shape, int[] pieces)",
    GRAD | {"q": "b h n d"} | STATES_OF_BLOCKS | SCALED,
    lambda grad, q, *rest: 4 * q[0] * q[1] * q[2] * q[3] * (q[3] + 1),
    shape=lambda grad, q, states, scale, *rest: (
        empty_tokens(q),
        states.new_empty(states.shape, dtype=torch.float32),
        scale.new_empty(scale.shape),
    ),
    result="(Tensor, Tensor, Tensor)",
)

# of the states that were mixed for each block of queries
mhla_answers = operator(
    "MHLA",
    "mhla_answers(Tensor q, Tensor states, Tensor scale, int[] shape, int[] pieces)",
    {"q": "b h n d"} | STATES_OF_BLOCKS | SCALED,
    lambda q, *rest: 2 * q[0] * q[1] * q[2] * q[3] * (q[3] + 1),
    gradient=mhla_answers_gradient,
    sums_in_fp32=True,
    needs_all_tokens=False,
)


def empty_states_of_blocks(k: Any, shape: Sequence[int], pieces: Sequence[int]) -> Any:
    """Room for the states (b, h, m, d, d + 1) of the blocks that keys (b, h, n, d) are cut into."""
    b, h, n, d = k.shape
    blocks = pieces[0] * pieces[1] + (n > shape[0] * shape[1])
    return k.new_empty(b, h, blocks, d, d + 1, dtype=torch.float32)


def transform_flops(q: Any, count: int) -> int:
    """Operations of so many real Fourier transforms of all channels over n tokens, 2.5 n log₂ n each."""
    b, h, n, d = q
    return int(2.5 * b * h * n * d * math.log2(max(n, 2))) * count


circulant_attention_gradient = operator(
    "the gradient of circulant attention",
    "circulant_attention_gradient(Tensor grad, Tensor q, Tensor k, Tensor v, int[] shape)",
    GRAD | {"q": "b h n d", "k": "b h n d", "v": "b h n d"},
    lambda grad, q, *rest: transform_flops(q, 15),
    shape=like_qkv,
    result="(Tensor, Tensor, Tensor)",
)

# on a map of `shape`, (rows, columns)
circulant_attention = operator(
    "circulant attention",
    "circulant_attention(Tensor q, Tensor k, Tensor v, int[] shape)",
    {"q": "b h n d", "k": "b h n d", "v": "b h n d"},
    lambda q, *rest: transform_flops(q, 6),
    gradient=circulant_attention_gradient,
    sums_in_fp32=True,
)
