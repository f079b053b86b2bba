"""Linear attention: o_i = φ(q_i) (Σ_j φ(k_j)ᵀ v_j / n) / (φ(q_i)·mean_j φ(k_j) + ε).

Katharopoulos et al. 2020, arXiv 2006.16236, eq. 5, with sums written as means so that they stay in range.
Linear in n: 2 n d² products a head.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from subquad import kernels
from subquad.ops.image_by_image import by_image
from subquad.ops.padding import count_tokens, totals, zero_padding
from subquad.ops.precision import in_fp32
from subquad.rope import Rotation, turned

SHAPES = kernels.linear_attention.shapes.extended(padding="b m")
WEIGHTS_SHAPES = SHAPES.without("v")

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "elu": lambda x: F.elu(x) + 1,
}


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Tensor | None = None,
    *,
    feature_map: str = "relu",
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """(b, h, n_q, d) from q (b, h, n_q, d), k and v (b, h, n_k, d); `padding` (b, n_k)."""
    SHAPES.check(q, k, v, padding)
    return kernels.compute(
        kernels.linear_attention, _linear, (q, k, v), (feature_map, eps), (padding,), backend=backend
    )


@in_fp32
def _linear(q: Tensor, k: Tensor, v: Tensor, feature_map: str, eps: float, padding: Tensor | None = None) -> Tensor:
    feature = FEATURE_MAPS[feature_map]

    def mix(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        return mix_features(feature(q), feature(k), v, padding, eps=eps)

    return by_image(mix, q, k, v, padding)


@in_fp32
def linear_weights(
    q: Tensor, k: Tensor, padding: Tensor | None = None, *, feature_map: str = "relu", eps: float = 1e-6
) -> Tensor:
    """Explicit weights (b, h, n_q, n_k) of `linear_attention`."""
    WEIGHTS_SHAPES.check(q, k, padding)
    feature = FEATURE_MAPS[feature_map]
    return feature_weights(feature(q), feature(k), padding, eps=eps)


def mix_features(
    q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, *, eps: float, rotation: Rotation | None = None
) -> Tensor:
    """Linear attention of features that are already non-negative; the divisor's are not turned by `rotation`."""
    k = zero_padding(k, padding)
    queries, keys = turned(rotation, q, k)
    count, key_sum, state = totals(v, padding, k.sum(dim=-2, keepdim=True), keys.mT @ zero_padding(v, padding))
    return queries @ (state / count) / (q @ (key_sum / count).mT + eps)


def feature_weights(
    q: Tensor, k: Tensor, padding: Tensor | None, *, eps: float, rotation: Rotation | None = None
) -> Tensor:
    """Explicit weights of `mix_features`."""
    k, count = zero_padding(k, padding), count_tokens(k, padding)
    products = q @ k.mT / count
    normalizer = products.sum(dim=-1, keepdim=True)
    if rotation is not None:
        products = rotation.turn(q) @ rotation.turn(k).mT / count
    return products / (normalizer + eps)
