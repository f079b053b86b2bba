"""Polarity-aware linear attention: same-sign and opposite-sign similarities in two streams. Linear in n: 4 n d² a head.

    K̂ = [(k⁺)^p, (k⁻)^p]   Q̂ = [(q⁺)^p, (q⁻)^p]   Q̌ = Q̂ with its halves swapped
    o₁ = Q̂ (K̂ᵀ v₁ / n) / (Q̂·mean K̂ + ε)          o₂ = Q̌ (K̂ᵀ v₂ / n) / (Q̌·mean K̂ + ε)

PolaFormer, Meng et al. 2025, arXiv 2501.15061, eq. 5-8; v₁ and v₂ are the halves of each head's channels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from subquad import kernels
from subquad.ops.image_by_image import by_image
from subquad.ops.linear_formula import feature_weights
from subquad.ops.padding import totals, zero_padding
from subquad.ops.precision import in_fp32, kept_in_fp32
from subquad.tracing import is_exporting

SHAPES = kernels.pola_attention.shapes.extended(padding="b m")
WEIGHTS_SHAPES = SHAPES.without("v")


def pola_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: Tensor,
    padding: Tensor | None = None,
    temperature: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """(b, h, n_q, d) from q (b, h, n_q, d), k and v (b, h, n_k, d), p = `power` (h, 1, d); `padding` (b, n_k).

    `positions` (h, n_k, d) are added to the keys, then queries and keys divided by `temperature` (h, 1, d).
    """
    SHAPES.check(q, k, v, power, temperature, positions, padding)
    tensors = q, k, v, power, temperature, positions
    return kernels.compute(kernels.pola_attention, _pola, tensors, (eps,), (padding,), backend=backend)


@in_fp32
def _pola(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: Tensor,
    temperature: Tensor | None,
    positions: Tensor | None,
    eps: float,
    padding: Tensor | None = None,
) -> Tensor:
    q, k = _tempered(q, k, temperature, positions)
    return by_image(lambda *image: _two_streams(*image, power=power, eps=eps), q, k, v, padding)


def _tempered(q: Tensor, k: Tensor, temperature: Tensor | None, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    k = k if positions is None else k + positions
    return (q, k) if temperature is None else (q / temperature, k / temperature)


def _two_streams(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, *, power: Tensor, eps: float) -> Tensor:
    count, *sums = totals(k, padding, *_sums(k, v, padding, power=power))
    return _answers(q, sums, count, power=power, eps=eps)


def _sums(k: Tensor, v: Tensor, padding: Tensor | None, *, power: Tensor) -> tuple[Tensor, ...]:
    k, v = zero_padding(signed_power(k, power), padding), zero_padding(v, padding)
    return tuple(_state(half.relu(), v) for half in (k, -k))


def _answers(q: Tensor, sums: Sequence[Tensor], count: Tensor | int, *, power: Tensor, eps: float) -> Tensor:
    q, same = signed_power(q, power), sums[0].shape[-1] // 2
    above, below = (state / count for state in sums)
    # both streams share one product with q⁺ and one with q⁻; their normalisers are its last two columns
    y = q.relu() @ _cross(above, below, same) + (-q).relu() @ _cross(below, above, same)
    scales = 1 / (y[..., -2:] + eps)
    return torch.cat([y[..., :same] * scales[..., :1], y[..., same:-2] * scales[..., 1:]], dim=-1)


@kept_in_fp32
def pola_sums(k: Tensor, v: Tensor, power: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
    """Of some keys, with their positions, and values (b, h, n, d) what `pola_answers` needs, to be added up."""
    return _sums(k / temperature, v, None, power=power)


@in_fp32
def pola_answers(
    q: Tensor, power: Tensor, temperature: Tensor, sums: Sequence[Tensor], count: int, *, eps: float = 1e-6
) -> Tensor:
    """`pola_attention` of some queries (b, h, n, d), from the sums over `count` keys."""
    return _answers(q / temperature, sums, count, power=power, eps=eps)


def _state(k: Tensor, v: Tensor) -> Tensor:
    """[kᵀv, Σk]: (b, h, d, d + 1)."""
    return torch.cat([k.mT @ v, k.sum(dim=-2, keepdim=True).mT], dim=-1)


def _cross(state: Tensor, other: Tensor, same: int) -> Tensor:
    """What the query's half of one sign meets: its own sign for the first `same` values, the other for the rest."""
    return torch.cat([state[..., :same], other[..., same:-1], state[..., -1:], other[..., -1:]], dim=-1)


def signed_power(x: Tensor, power: Tensor) -> Tensor:
    """|x|^p with the sign of x: its positive part is (x⁺)^p, and that of its negative (x⁻)^p."""
    raised = x.abs().pow(power)
    # formats of networks know no sign to copy; of a zero it does not matter
    return torch.where(x < 0, -raised, raised) if is_exporting() else raised.copysign(x)


@in_fp32
def pola_weights(
    q: Tensor,
    k: Tensor,
    power: Tensor,
    padding: Tensor | None = None,
    temperature: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """Explicit weights (b, h, 2, n_q, n_k) of `pola_attention`: the same-sign stream, then the opposite-sign one."""
    WEIGHTS_SHAPES.check(q, k, power, temperature, positions, padding)
    q, k = (pola_features(x, power) for x in _tempered(q, k, temperature, positions))
    swapped = q.roll(q.shape[-1] // 2, dims=-1)
    return torch.stack([feature_weights(x, k, padding, eps=eps) for x in (q, swapped)], dim=2)


def pola_features(x: Tensor, power: Tensor) -> Tensor:
    """[(x⁺)^p, (x⁻)^p]: (b, h, n, d) -> (b, h, n, 2d)."""
    x = signed_power(x, power)
    return torch.cat([x.relu(), (-x).relu()], dim=-1)
