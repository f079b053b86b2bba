"""MLLA's linear attention: rotated features in the products, features as they were in the normaliser.

    q' = φ(q), k' = φ(k), φ = ELU + 1;  q̃, k̃ = their rotations
    o_i = q̃_i (Σ_j k̃_jᵀ v_j / n) / (q'_i·mean_j k'_j + ε)

Han et al. 2024, arXiv 2405.16605, section 4 and the released code. Linear in n: 2 n d² products a head. The normaliser
does not turn, so it stays positive; rows sum to 1 only where nothing is turned.
"""

from collections.abc import Sequence

from torch import Tensor

from subquad import kernels
from subquad.ops.image_by_image import by_image
from subquad.ops.linear_formula import FEATURE_MAPS, feature_answers, feature_sums, feature_weights, mix_features
from subquad.ops.precision import in_fp32, kept_in_fp32
from subquad.rope import Rotation, rotation_of, tables_of

SHAPES = kernels.mlla_attention.shapes.without("cos", "sin").extended(padding="b m")
WEIGHTS_SHAPES = SHAPES.without("v")

EPS = 1e-6
elu = FEATURE_MAPS["elu"]


def mlla_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Tensor | None = None,
    *,
    rotation: Rotation | None = None,
    backend: str | None = None,
) -> Tensor:
    """(b, h, n_q, d) from q (b, h, n_q, d), k and v (b, h, n_k, d); `padding` (b, n_k).

    `rotation` turns the features of queries and keys alike, which stand on one grid then; None turns nothing.
    """
    SHAPES.check(q, k, v, padding)
    cos, sin, interleaved = tables_of(rotation)
    tensors, settings = (q, k, v, cos, sin), (interleaved, EPS)
    return kernels.compute(kernels.mlla_attention, _mlla, tensors, settings, (padding,), backend=backend)


@in_fp32
def _mlla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    eps: float,
    padding: Tensor | None = None,
) -> Tensor:
    rotation = rotation_of(cos, sin, interleaved)

    def mix(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        return mix_features(elu(q), elu(k), v, padding, eps=eps, rotation=rotation)

    return by_image(mix, q, k, v, padding)


@kept_in_fp32
def mlla_sums(k: Tensor, v: Tensor, rotation: Rotation | None = None) -> tuple[Tensor, Tensor]:
    """Of some keys and values (b, h, n, d) what `mlla_answers` needs, to be added up over all of them."""
    return feature_sums(elu(k), v, rotation=rotation)


@in_fp32
def mlla_answers(q: Tensor, sums: Sequence[Tensor], count: int, rotation: Rotation | None = None) -> Tensor:
    """`mlla_attention` of some queries (b, h, n, d), from the sums over `count` keys."""
    return feature_answers(elu(q), sums, count, eps=EPS, rotation=rotation)


@in_fp32
def mlla_weights(q: Tensor, k: Tensor, padding: Tensor | None = None, *, rotation: Rotation | None = None) -> Tensor:
    """Explicit weights (b, h, n_q, n_k) of `mlla_attention`."""
    WEIGHTS_SHAPES.check(q, k, padding)
    return feature_weights(elu(q), elu(k), padding, rotation=rotation, eps=EPS)
