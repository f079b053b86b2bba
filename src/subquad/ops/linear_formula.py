"""Linear attention: o_i = φ(q_i) (Σ_j φ(k_j)ᵀ v_j / n) / (φ(q_i)·mean_j φ(k_j) + ε).

Katharopoulos et al. 2020, arXiv 2006.16236, eq. 5, with sums written as means so that they stay in range.
Linear in n: 2 n d² products a head.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad import kernels
from subquad.errors import unknown_name
from subquad.ops.image_by_image import by_image
from subquad.ops.padding import count_tokens, totals, zero_padding
from subquad.ops.precision import in_fp32, kept_in_fp32
from subquad.rope import Rotation, turned

SHAPES = kernels.linear_attention.shapes.extended(padding="b m")
WEIGHTS_SHAPES = SHAPES.without("v")


def elu_and_one(x: Tensor) -> Tensor:
    """ELU + 1, e^x below 0, without the difference of nearly equal numbers that e^x - 1 + 1 is."""
    positive = F.relu(x)
    # 0 above 0, where e^x may be no number; the slope at 0 is 1
    return (x - positive).exp() + positive


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "elu": elu_and_one,
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
    check_feature_map(feature_map)
    return kernels.compute(
        kernels.linear_attention, _linear, (q, k, v), (feature_map, eps), (padding,), backend=backend
    )


@in_fp32
def _linear(q: Tensor, k: Tensor, v: Tensor, feature_map: str, eps: float, padding: Tensor | None = None) -> Tensor:
    feature = FEATURE_MAPS[feature_map]

    def mix(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        return mix_features(feature(q), feature(k), v, padding, eps=eps)

    return by_image(mix, q, k, v, padding)


def check_feature_map(name: str) -> None:
    """Raise SubquadError for a name that is none of FEATURE_MAPS."""
    if name not in FEATURE_MAPS:
        raise unknown_name("feature_map", name, FEATURE_MAPS)


def linear_sums(k: Tensor, v: Tensor, *, feature_map: str = "relu") -> Tensor:
    """[φ(k)ᵀ v, Σ φ(k)] (b, h, d, d + 1) of some keys and values (b, h, n, d), to be added up; fp32 at least."""
    return kernels.compute(kernels.linear_sums, _linear_sums, (k, v), (feature_map,))


@kept_in_fp32
def _linear_sums(k: Tensor, v: Tensor, feature_map: str) -> Tensor:
    total, products = feature_sums(FEATURE_MAPS[feature_map](k), v)
    return torch.cat([products, total.mT], dim=-1)


def linear_answers(q: Tensor, sums: Tensor, count: int, *, feature_map: str = "relu", eps: float = 1e-6) -> Tensor:
    """`linear_attention` of some queries (b, h, n, d), from the sums (b, h, d, d + 1) over `count` keys."""
    return kernels.compute(kernels.linear_answers, _linear_answers, (q, sums), (count, feature_map, eps))


@in_fp32
def _linear_answers(q: Tensor, sums: Tensor, count: int, feature_map: str, eps: float) -> Tensor:
    return feature_answers(FEATURE_MAPS[feature_map](q), (sums[..., -1:].mT, sums[..., :-1]), count, eps=eps)


@in_fp32
def linear_weights(
    q: Tensor, k: Tensor, padding: Tensor | None = None, *, feature_map: str = "relu", eps: float = 1e-6
) -> Tensor:
    """Explicit weights (b, h, n_q, n_k) of `linear_attention`."""
    WEIGHTS_SHAPES.check(q, k, padding)
    check_feature_map(feature_map)
    feature = FEATURE_MAPS[feature_map]
    return feature_weights(feature(q), feature(k), padding, eps=eps)


def mix_features(
    q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, *, eps: float, rotation: Rotation | None = None
) -> Tensor:
    """Linear attention of features that are already non-negative; the divisor's are not turned by `rotation`."""
    count, *sums = totals(v, padding, *feature_sums(k, v, padding, rotation=rotation))
    return feature_answers(q, sums, count, eps=eps, rotation=rotation)


def feature_sums(
    k: Tensor, v: Tensor, padding: Tensor | None = None, *, rotation: Rotation | None = None
) -> tuple[Tensor, Tensor]:
    """Σ k (b, h, 1, d) and Σ kᵀ v (b, h, d, e) of features of keys, the latter of turned ones."""
    k = zero_padding(k, padding)
    total = k.sum(dim=-2, keepdim=True)
    (k,) = turned(rotation, k)
    return total, k.mT @ zero_padding(v, padding)


def feature_answers(
    q: Tensor, sums: Sequence[Tensor], count: Tensor | int, *, eps: float, rotation: Rotation | None = None
) -> Tensor:
    """What features of queries (b, h, n, d) get of the sums over `count` keys, those of `feature_sums`."""
    total, products = sums
    normalizer = q @ (total / count).mT
    (q,) = turned(rotation, q)
    return q @ (products / count) / (normalizer + eps)


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
