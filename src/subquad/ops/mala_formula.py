"""Magnitude-aware linear attention: normalised by scaling and subtracting. Linear in n: 2 n d² products a head.

    s_ij = d^-1/2 φ(q_i)·φ(k_j)    z_i = mean_j s_ij    φ = ELU + 1
    w_ij = (1/n) (s̃_ij (1 + 1/(z_i + ε)) − z_i)    o_i = Σ_j w_ij v_j

Fan et al. 2025, arXiv 2507.00698, in the scaling of the released code. s̃ is s of turned features where there is a
rotation, else s: then rows sum to z/(z + ε), that is 1. A rotation leaves z as it is, and rows sum to anything. Entries
may be negative either way.
"""

from collections.abc import Sequence

from torch import Tensor

from subquad import kernels
from subquad.ops.image_by_image import by_image
from subquad.ops.linear_formula import FEATURE_MAPS
from subquad.ops.padding import count_tokens, mean_token, totals, zero_padding
from subquad.ops.precision import in_fp32, kept_in_fp32
from subquad.rope import Rotation, rotation_of, tables_of, turned

SHAPES = kernels.mala_attention.shapes.without("cos", "sin").extended(padding="b m")
WEIGHTS_SHAPES = SHAPES.without("v")

elu = FEATURE_MAPS["elu"]


def mala_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Tensor | None = None,
    rotation: Rotation | None = None,
    *,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """(b, h, n_q, d) from q (b, h, n_q, d), k and v (b, h, n_k, d); `padding` (b, n_k)."""
    SHAPES.check(q, k, v, padding)
    cos, sin, interleaved = tables_of(rotation)
    tensors, settings = (q, k, v, cos, sin), (interleaved, eps)
    return kernels.compute(kernels.mala_attention, _mala, tensors, settings, (padding,), backend=backend)


@in_fp32
def _mala(
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
        count, *sums = totals(v, padding, *mala_sums(k, v, padding, rotation))
        return mala_answers(q, sums, count, rotation, eps=eps)

    return by_image(mix, q, k, v, padding)


@kept_in_fp32
def mala_sums(
    k: Tensor, v: Tensor, padding: Tensor | None = None, rotation: Rotation | None = None
) -> tuple[Tensor, ...]:
    """Of some keys and values (b, h, n, d) what `mala_answers` needs, to be added up: Σ φ(k), Σ v and Σ φ̃(k)ᵀ v."""
    k, v = zero_padding(elu(k), padding), zero_padding(v, padding)
    (keys,) = turned(rotation, k)
    return k.sum(dim=-2, keepdim=True), v.sum(dim=-2, keepdim=True), keys.mT @ v


@in_fp32
def mala_answers(
    q: Tensor, sums: Sequence[Tensor], count: Tensor | int, rotation: Rotation | None = None, *, eps: float = 1e-6
) -> Tensor:
    """`mala_attention` of some queries (b, h, n, d), from the sums over `count` keys."""
    of_keys, of_values, products = sums
    scale, q = q.shape[-1] ** -0.5, elu(q)
    z = scale * q @ (of_keys / count).mT
    (q,) = turned(rotation, q)
    return q @ (products * (scale / count)) * (1 + 1 / (z + eps)) - z * (of_values / count)


@in_fp32
def mala_weights(
    q: Tensor,
    k: Tensor,
    padding: Tensor | None = None,
    rotation: Rotation | None = None,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """Explicit weights (b, h, n_q, n_k) of `mala_attention`."""
    WEIGHTS_SHAPES.check(q, k, padding)
    scale = q.shape[-1] ** -0.5
    q, k = elu(q), zero_padding(elu(k), padding)
    z = scale * q @ mean_token(k, padding).mT
    q, k = turned(rotation, q, k)
    weights = (scale * q @ k.mT * (1 + 1 / (z + eps)) - z) / count_tokens(k, padding)
    return weights if padding is None else weights.masked_fill(padding[:, None, None, :], 0)
