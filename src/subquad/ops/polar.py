"""Polarity-aware linear attention: same-sign and opposite-sign similarities in two streams. Linear in n: 4 n d² a head.

    K̂ = [(k⁺)^p, (k⁻)^p]   Q̂ = [(q⁺)^p, (q⁻)^p]   Q̌ = Q̂ with its halves swapped
    o₁ = Q̂ (K̂ᵀ v₁ / n) / (Q̂·mean K̂ + ε)          o₂ = Q̌ (K̂ᵀ v₂ / n) / (Q̌·mean K̂ + ε)

PolaFormer, Meng et al. 2025, arXiv 2501.15061, eq. 5-8; v₁ and v₂ are the halves of each head's channels.
"""

import torch
from torch import Tensor

from subquad.ops.linear import feature_weights
from subquad.ops.padding import count_tokens, zero_padding
from subquad.ops.precision import in_fp32


@in_fp32
def polar_attention(
    q: Tensor, k: Tensor, v: Tensor, power: Tensor, padding: Tensor | None = None, *, eps: float = 1e-6
) -> Tensor:
    """(b, h, n_q, d) from q (b, h, n_q, d), k and v (b, h, n_k, d), p = `power` (h, 1, d); `padding` (b, n_k)."""
    q, k = polar_features(q, power), zero_padding(polar_features(k, power), padding)
    count = count_tokens(k, padding)
    state = k.mT @ zero_padding(v, padding) / count
    mean = (k.sum(dim=-2, keepdim=True) / count).mT
    # swapping the halves of the state's rows does what swapping the query's would: both streams share one product
    swap, same = q.shape[-1] // 2, (v.shape[-1] + 1) // 2
    state = torch.cat([state[..., :same], state[..., same:].roll(swap, dims=-2)], dim=-1)
    normalizers = q @ torch.cat([mean, mean.roll(swap, dims=-2)], dim=-1) + eps
    first, second = (q @ state).split([same, v.shape[-1] - same], dim=-1)
    return torch.cat([first / normalizers[..., :1], second / normalizers[..., 1:]], dim=-1)


@in_fp32
def polar_weights(q: Tensor, k: Tensor, power: Tensor, padding: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """Explicit weights (b, h, 2, n_q, n_k) of `polar_attention`: the same-sign stream, then the opposite-sign one."""
    q, k = polar_features(q, power), polar_features(k, power)
    swapped = q.roll(q.shape[-1] // 2, dims=-1)
    return torch.stack([feature_weights(x, k, padding, eps=eps) for x in (q, swapped)], dim=2)


def polar_features(x: Tensor, power: Tensor) -> Tensor:
    """[(x⁺)^p, (x⁻)^p]: (b, h, n, d) -> (b, h, n, 2d); one power an element, its sign says in which half it lands."""
    magnitude = x.abs().pow(power)
    zero = magnitude.new_zeros(())
    return torch.cat([torch.where(x > 0, magnitude, zero), torch.where(x < 0, magnitude, zero)], dim=-1)
