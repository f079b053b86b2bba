"""Rank-augmented linear attention: keys weighted by a softmax against the mean query. Linear in n: 2 n d² + 2 n d.

    ḡ = mean_i φ(q_i)    ω = softmax_j(d^-1/2 ḡ·φ(k_j))    φ = ELU + 1
    w_ij = ω_j φ̃(q_i)·φ̃(k_j) / (Σ_m ω_m φ(q_i)·φ(k_m) + ε)    o_i = Σ_j w_ij v_j

Fan et al. 2025, arXiv 2411.07635, in the scaling of the released code, which has n·ω and 1/n where ω stands here: the
product n·ω·φ(k) leaves the range of fp16. φ̃ are turned features where there is a rotation; the divisor is of those that
are not turned. The mean is over all queries: what one gets depends on the others.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from subquad import kernels, spread
from subquad.ops.image_by_image import by_image
from subquad.ops.linear_formula import FEATURE_MAPS
from subquad.ops.padding import mean_token, totals, zero_padding
from subquad.ops.precision import in_fp32, kept_in_fp32
from subquad.ops.weighted_sums import raised, relative_to_all
from subquad.rope import Rotation, rotation_of, tables_of, turned

SHAPES = kernels.rala_attention.shapes.without("cos", "sin").extended(padding="b m", query_padding="b n")
WEIGHTS_SHAPES = SHAPES.without("v")

elu = FEATURE_MAPS["elu"]


def rala_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Tensor | None = None,
    query_padding: Tensor | None = None,
    rotation: Rotation | None = None,
    *,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """(b, h, n_q, d) from q (b, h, n_q, d), k and v (b, h, n_k, d).

    `padding` (b, n_k) are keys that are absent, `query_padding` (b, n_q) queries.
    """
    SHAPES.check(q, k, v, padding, query_padding)
    cos, sin, interleaved = tables_of(rotation)
    tensors, settings, beyond = (q, k, v, cos, sin), (interleaved, eps), (padding, query_padding)
    return kernels.compute(kernels.rala_attention, _rala, tensors, settings, beyond, backend=backend)


@in_fp32
def _rala(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    eps: float,
    padding: Tensor | None = None,
    query_padding: Tensor | None = None,
) -> Tensor:
    rotation = rotation_of(cos, sin, interleaved)

    def mix(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, query_padding: Tensor | None) -> Tensor:
        count, query_sum = totals(q, query_padding, rala_query_sum(q, query_padding))
        most, *sums = relative_to_all(rala_sums(k, v, query_sum / count, rotation, padding))
        return rala_answers(q, (most, *spread.sums(*sums)), rotation, eps=eps)

    return by_image(mix, q, k, v, padding, query_padding)


@kept_in_fp32
def rala_query_sum(q: Tensor, padding: Tensor | None = None) -> Tensor:
    """Σ φ(q) (b, h, 1, d) of some queries (b, h, n, d), to be added up over all of them."""
    return zero_padding(elu(q), padding).sum(dim=-2, keepdim=True)


@kept_in_fp32
def rala_sums(
    k: Tensor, v: Tensor, mean_query: Tensor, rotation: Rotation | None = None, padding: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Of some keys and values (b, h, n, d), and ḡ (b, h, 1, d), what `rala_answers` needs, by `merge_weighted`.

    The state has m and Σ e^(s − m) (b, h, 1, 1), and with these weights Σ φ(k) (b, h, 1, d) and Σ φ̃(k)ᵀ v (b, h, d, d).
    """
    k, v = elu(k), zero_padding(v, padding)
    scores = mean_query @ k.mT * k.shape[-1] ** -0.5
    if padding is not None:
        # the lowest number, not -inf: of no keys at all the weights are those of keys without features
        scores = scores.masked_fill(padding[:, None, None], torch.finfo(scores.dtype).min)
    most, weights = raised(scores)
    weighted = zero_padding(k, padding) * weights.mT
    (keys,) = turned(rotation, weighted)
    return most, weights.sum(dim=-1, keepdim=True), weighted.sum(dim=-2, keepdim=True), keys.mT @ v


@in_fp32
def rala_answers(q: Tensor, sums: Sequence[Tensor], rotation: Rotation | None = None, *, eps: float = 1e-6) -> Tensor:
    """`rala_attention` of some queries (b, h, n, d), from the state of all keys."""
    _, total, keys, products = sums
    # the largest score has a weight of 1: less is of no keys at all
    q, total = elu(q), total.clamp(min=1)
    (queries,) = turned(rotation, q)
    return queries @ (products / total) / (q @ (keys / total).mT + eps)


@in_fp32
def rala_weights(
    q: Tensor,
    k: Tensor,
    padding: Tensor | None = None,
    query_padding: Tensor | None = None,
    rotation: Rotation | None = None,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """Explicit weights (b, h, n_q, n_k) of `rala_attention`."""
    WEIGHTS_SHAPES.check(q, k, padding, query_padding)
    q, k = elu(q), zero_padding(elu(k), padding)
    shares = key_shares(q, k, padding, query_padding)
    normalizer = q @ (k.mT @ shares)
    q, k = turned(rotation, q, k)
    return q @ (k * shares).mT / (normalizer + eps)


def key_shares(q: Tensor, k: Tensor, padding: Tensor | None, query_padding: Tensor | None) -> Tensor:
    """ω (b, h, n_k, 1) of features of queries and keys; zero for keys that are not there."""
    scores = k @ mean_token(q, query_padding).mT * q.shape[-1] ** -0.5
    if padding is None:
        return scores.softmax(dim=-2)
    absent = padding[:, None, :, None]
    return scores.masked_fill(absent, float("-inf")).softmax(dim=-2).masked_fill(absent, 0)
