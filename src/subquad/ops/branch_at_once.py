"""The first half of a block in few steps, from its norm to its residual, where kernels do that.

With linear attention it is two walks over the tokens, and what is projected is never written down:

    S = [Σ φ(k)ᵀ v, Σ φ(k)],  k, v of norm(x)        x + s · (P [φ(q) S / (φ(q)·Σ φ(k) + n ε)] + b),  q of norm(x)

With any mechanism it is what stands before and behind that: W norm(x) + b, and x + s · (P y + b). Each function gives
None where there is no kernel, as where gradients are wanted, autocast decides on dtypes or other processes hold tokens:
then the block goes its steps, which say what is computed (`linear_formula.py`).
"""

import torch
from torch import Tensor

from subquad import kernels, spread
from subquad.kernels import Operator


def linear_branch_sums(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    num_heads: int,
    norm_eps: float,
    feature_map: str,
) -> Tensor | None:
    """`linear_sums` (b, h, d, d + 1) of some tokens x (b, n, c); `weight` (2c, c) projects to keys and values."""
    tensors = x, norm_weight, norm_bias, weight, bias
    return _computed(kernels.linear_branch_sums, tensors, (num_heads, feature_map, norm_eps))


def linear_branch_answers(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sums: Tensor,
    proj: Tensor,
    proj_bias: Tensor | None,
    scale: Tensor | None,
    *,
    count: int,
    norm_eps: float,
    feature_map: str,
    eps: float = 1e-6,
) -> Tensor | None:
    """Some tokens (b, n, c) behind the residual, from the sums over `count` tokens; `weight` (c, c) is the queries'."""
    tensors = x, norm_weight, norm_bias, weight, bias, sums, proj, proj_bias, scale
    return _computed(kernels.linear_branch_answers, tensors, (count, feature_map, norm_eps, eps))


def norm_projection(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
    keeps: bool,
) -> Tensor | None:
    """W norm(x) + b of tokens x (b, n, c) with W = `weight` (m, c): (b, n, m); and norm(x) behind it, if it `keeps`."""
    return _computed(kernels.norm_projection, (x, norm_weight, norm_bias, weight, bias), (eps, keeps))


def projection_residual(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
) -> Tensor | None:
    """Give x + s · (P y + b) of tokens x (b, n, c) and y (b, n, m) with P = `weight` (c, m)."""
    return _computed(kernels.projection_residual, (x, y, weight, bias, scale), ())


def _computed(operator: Operator, tensors: tuple[Tensor | None, ...], settings: tuple[object, ...]) -> Tensor | None:
    device = tensors[0].device.type  # type: ignore[union-attr]
    if spread.is_spread() or (device != "meta" and torch.is_autocast_enabled(device)):
        return None
    return kernels.compute_if_possible(operator, tensors, settings)
