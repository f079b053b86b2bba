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

ACTIVATIONS = ("gelu", "silu", "nothing")
"""What kernels have behind a projection or a filter."""


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
    keeps: bool = False,
    activation: str = "nothing",
) -> Tensor | None:
    """W norm(x) + b of tokens x (b, n, c) with W = `weight` (m, c): (b, n, m); and norm(x) behind it, if it `keeps`.

    What is projected goes through an `activation`: "gelu", "silu" or "nothing". Raises ValueError for another.
    """
    _check_activation(activation)
    return _computed(kernels.norm_projection, (x, norm_weight, norm_bias, weight, bias), (eps, keeps, activation))


def projection(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """W x + b of tokens x (b, n, c) with W = `weight` (m, c): (b, n, m)."""
    return _computed(kernels.norm_projection, (x, None, None, weight, bias), (0.0, False, "nothing"))


def map_filter(
    x: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[int, int], *, adds: bool, activation: str = "nothing"
) -> Tensor | None:
    """A depthwise convolution, `weight` (c, k, k), of tokens (b, n, c) on their map of `shape`, zeros around it.

    `adds` adds the tokens themselves; what is then there goes through an `activation`, as in `norm_projection`. Tokens
    in front of the map stay where it adds, and are 0 where it does not.
    """
    _check_activation(activation)
    return _computed(kernels.map_filter, (x, weight, bias), (shape, adds, activation))


def projection_residual(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
) -> Tensor | None:
    """Give x + s · (P y + b) of tokens x (b, n, c) and y (b, n, m) with P = `weight` (c, m)."""
    return _computed(kernels.projection_residual, (x, y, weight, bias, scale), ())


def _check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, not {activation!r}")


def _computed(operator: Operator, tensors: tuple[Tensor | None, ...], settings: tuple[object, ...]) -> Tensor | None:
    device = tensors[0].device.type  # type: ignore[union-attr]
    if spread.is_spread() or (device != "meta" and torch.is_autocast_enabled(device)):
        return None
    return kernels.compute_if_possible(operator, tensors, settings)
