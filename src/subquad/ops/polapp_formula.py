"""PolaFormer++: same-sign and opposite-sign similarities of exponentials, a stream each. Linear in n: 4 n d² a head.

    F₁ = e^(s₁ [q⁺, q⁻]) − 1    F₂ = e^(s₂ [q⁻, q⁺]) − 1    K = e^[k⁺, k⁻] − 1
    o_t = F̃_t (K̃ᵀ v_t / n) / (F_t·mean K + ε),  t = 1, 2

Meng et al., successor of arXiv 2501.15061, as released. x⁺ and x⁻ are the positive parts of x and -x, s one number for
each feature, v₁ and v₂ the halves of each head's channels. F̃ and K̃ are turned features, all 2d of them one vector,
where there is a rotation; the divisor is of those that are not turned.

What overflows divides out. With m the largest exponent of the keys, one for each feature, or for two that turn
together, K e^-m and F e^m have the same products, and with m' the largest exponent of F e^m, one for each query,
F e^(m-m') and ε e^-m' have the same quotient. (e^x − 1) e^-m is (1 − e^-x) e^(x-m): no step leaves the range of fp32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from subquad import kernels
from subquad.ops.image_by_image import by_image
from subquad.ops.padding import count_tokens, totals, zero_padding
from subquad.ops.precision import in_fp32, kept_in_fp32
from subquad.ops.weighted_sums import largest, relative_to_all
from subquad.rope import Rotation, rotation_of, tables_of, turned

SHAPES = kernels.polapp_attention.shapes.without("cos", "sin").extended(padding="b m")
WEIGHTS_SHAPES = SHAPES.without("v")


def polapp_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    same: Tensor,
    opposite: Tensor,
    padding: Tensor | None = None,
    rotation: Rotation | None = None,
    *,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """(b, h, n_q, d) from q (b, h, n_q, d), k and v (b, h, n_k, d); `padding` (b, n_k).

    `same` and `opposite` (h, 1, 2d) are s of the two streams.
    """
    SHAPES.check(q, k, v, same, opposite, padding)
    cos, sin, interleaved = tables_of(rotation)
    tensors, settings = (q, k, v, same, opposite, cos, sin), (interleaved, eps)
    return kernels.compute(kernels.polapp_attention, _polapp, tensors, settings, (padding,), backend=backend)


@in_fp32
def _polapp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    same: Tensor,
    opposite: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    eps: float,
    padding: Tensor | None = None,
) -> Tensor:
    rotation = rotation_of(cos, sin, interleaved)

    def mix(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        most, *sums = relative_to_all(polapp_sums(k, v, padding, rotation))
        count, *sums = totals(v, padding, *sums)
        return polapp_answers(q, same, opposite, (most, *sums), count, rotation, eps=eps)

    return by_image(mix, q, k, v, padding)


@kept_in_fp32
def polapp_sums(
    k: Tensor, v: Tensor, padding: Tensor | None = None, rotation: Rotation | None = None
) -> tuple[Tensor, ...]:
    """Of some keys and values (b, h, n, d): m (b, h, 1, 2d), Σ K e^-m, and Σ vᵀ K̃ (b, h, d, 2d) with K̃ of K e^-m.

    `merge_weighted` makes one state of those of two parts: each feature has its own largest exponent.
    """
    k, most = key_features(k, padding, rotation)
    total = k.sum(dim=-2, keepdim=True)
    (keys,) = turned(rotation, k)
    return most, total, zero_padding(v, padding).mT @ keys


@in_fp32
def polapp_answers(
    q: Tensor,
    same: Tensor,
    opposite: Tensor,
    sums: Sequence[Tensor],
    count: Tensor | int,
    rotation: Rotation | None = None,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """`polapp_attention` of some queries (b, h, n, d), from the state of `count` keys."""
    most, total, products = sums
    mean, width = total / count, products.shape[-2]
    values = (products / count).mT.tensor_split([(width + 1) // 2], dim=-1)
    streams = []
    for x, s, part in zip((q, -q), (same, opposite), values, strict=True):
        features, scaled_eps = query_features(x, s, most, eps)
        (queries,) = turned(rotation, features)
        streams.append(queries @ part / (features @ mean.mT + scaled_eps))
    return torch.cat(streams, dim=-1)


@in_fp32
def polapp_weights(
    q: Tensor,
    k: Tensor,
    same: Tensor,
    opposite: Tensor,
    padding: Tensor | None = None,
    rotation: Rotation | None = None,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """Explicit weights (b, h, 2, n_q, n_k) of `polapp_attention`: the same-sign stream, then the opposite-sign one."""
    WEIGHTS_SHAPES.check(q, k, same, opposite, padding)
    k, most = key_features(k, padding, rotation)
    count = count_tokens(k, padding)
    mean = k.sum(dim=-2, keepdim=True) / count
    (keys,) = turned(rotation, k)
    streams = []
    for x, s in ((q, same), (-q, opposite)):
        features, scaled_eps = query_features(x, s, most, eps)
        (queries,) = turned(rotation, features)
        streams.append(queries @ keys.mT / count / (features @ mean.mT + scaled_eps))
    return torch.stack(streams, dim=2)


def key_features(k: Tensor, padding: Tensor | None, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
    """K e^-m (b, h, n_k, 2d) of the keys that are there, zeros of others, and m (b, h, 1, 2d)."""
    exponents = halves(zero_padding(k, padding))
    most = alike_in_pairs(largest(exponents, dim=-2), rotation)
    return scaled_exponentials(exponents, most), most


def query_features(q: Tensor, s: Tensor, most: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """F e^(m - m') (b, h, n_q, 2d) and ε e^-m' (b, h, n_q, 1), m those of the keys, m' the largest exponent then."""
    exponents = halves(q) * s
    added = (exponents.detach() + most).where(exponents > 0, 0).amax(dim=-1, keepdim=True)
    # of no keys and no query at all, 0 / ε
    return scaled_exponentials(exponents, added - most), (eps * torch.exp(-added)).clamp(min=torch.finfo(q.dtype).tiny)


def halves(x: Tensor) -> Tensor:
    """[x⁺, x⁻]: (b, h, n, d) -> (b, h, n, 2d)."""
    return torch.cat([x.relu(), (-x).relu()], dim=-1)


def scaled_exponentials(exponents: Tensor, most: Tensor) -> Tensor:
    """(e^x − 1) e^-m for x up to m but for a rounding; zeros where x is 0, whatever m."""
    return -torch.expm1(-exponents) * torch.exp((exponents - most).clamp(max=1))


def alike_in_pairs(most: Tensor, rotation: Rotation | None) -> Tensor:
    """The larger of the two numbers of each pair of features (b, h, 1, 2d) that turns, for both of them."""
    if rotation is None:
        return most
    pieces = most.unflatten(-1, (-1, min(rotation.cos.shape[-1], most.shape[-1])))
    axis, shape = (-1, (-1, 2)) if rotation.interleaved else (-2, (2, -1))
    pairs = pieces.unflatten(-1, shape)
    return pairs.amax(dim=axis, keepdim=True).expand_as(pairs).flatten(-3)
