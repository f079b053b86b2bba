"""Norm-aware linear attention: a query's direction to a power that grows with its norm. Linear in n: 4 n d² a head.

    r_i = ‖q_i‖    p_i = 3 (0.5 + tanh r_i)    Q = [(q⁺/r)^p, (q⁻/r)^p]    K = [(k⁺)³, (k⁻)³]
    w_ij = Q̃_i·K̃_j / (Σ_m Q_i·K_m + n ε)       o_i = Σ_j w_ij v_j

Meng et al., arXiv 2506.21137, as released. x⁺ and x⁻ are the positive parts of x and -x. Q̃ and K̃ are turned features
where there is a rotation, both halves alike; the divisor is of those that are not turned. ε counts: short queries and
cubed keys make it a percent of the divisor where their entries are about a tenth.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from subquad import kernels
from subquad.ops.image_by_image import by_image
from subquad.ops.linear_formula import feature_answers, feature_sums, feature_weights, mix_features
from subquad.ops.precision import in_fp32, kept_in_fp32
from subquad.rope import Rotation, rotation_of, tables_of

SHAPES = kernels.nala_attention.shapes.without("cos", "sin").extended(padding="b m")
WEIGHTS_SHAPES = SHAPES.without("v")

LONGEST_POWER, LEAST_SHARE = 3.0, 0.5
"""λ and τ of p = λ (τ + tanh r): 1.5 to 4.5. Keys are raised to λ."""


def nala_attention(
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
    return kernels.compute(kernels.nala_attention, _nala, tensors, settings, (padding,), backend=backend)


@in_fp32
def _nala(
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
        return mix_features(query_features(q), key_features(k), v, padding, rotation=rotation, eps=eps)

    return by_image(mix, q, k, v, padding)


@kept_in_fp32
def nala_sums(k: Tensor, v: Tensor, rotation: Rotation | None = None) -> tuple[Tensor, Tensor]:
    """Of some keys and values (b, h, n, d) what `nala_answers` needs, to be added up over all of them."""
    return feature_sums(key_features(k), v, rotation=rotation)


@in_fp32
def nala_answers(
    q: Tensor, sums: Sequence[Tensor], count: int, rotation: Rotation | None = None, *, eps: float = 1e-6
) -> Tensor:
    """`nala_attention` of some queries (b, h, n, d), from the sums over `count` keys."""
    return feature_answers(query_features(q), sums, count, rotation=rotation, eps=eps)


@in_fp32
def nala_weights(
    q: Tensor,
    k: Tensor,
    padding: Tensor | None = None,
    rotation: Rotation | None = None,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """Explicit weights (b, h, n_q, n_k) of `nala_attention`."""
    WEIGHTS_SHAPES.check(q, k, padding)
    return feature_weights(query_features(q), key_features(k), padding, rotation=rotation, eps=eps)


def query_features(q: Tensor) -> Tensor:
    """[(q⁺/r)^p, (q⁻/r)^p]: (b, h, n, d) -> (b, h, n, 2d); zeros for a query of zeros."""
    # of the square, so that the gradient of a query of zeros is zero
    norm = q.square().sum(dim=-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny).sqrt()
    raised = (q.abs() / norm).pow(LONGEST_POWER * (LEAST_SHARE + norm.tanh()))
    return torch.cat([raised.where(q > 0, 0), raised.where(q < 0, 0)], dim=-1)


def key_features(k: Tensor) -> Tensor:
    """[(k⁺)³, (k⁻)³]: (b, h, n, d) -> (b, h, n, 2d)."""
    cubed = k.pow(LONGEST_POWER)
    return torch.cat([cubed.relu(), (-cubed).relu()], dim=-1)
