"""The second half of a transformer block in one step: its norm, its MLP and its residual.

    x + s · (W₂ gelu(W₁ norm(x) + b₁) + b₂)

Between one product and the next everything stays in a processor's cache: what is left of norm, GELU and sum is the
arithmetic. 4 n c m products.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad import kernels

SHAPES = kernels.mlp.shapes


def mlp_branch(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    first: Tensor,
    first_bias: Tensor,
    second: Tensor,
    second_bias: Tensor,
    scale: Tensor | None = None,
    *,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """(b, n, c) from x (b, n, c); W₁ = `first` (m, c), W₂ = `second` (c, m), `scale` (c,) of LayerScale."""
    tensors = x, norm_weight, norm_bias, first, first_bias, second, second_bias, scale
    # a kernel has one dtype for tokens and weights, autocast another for products than for sums
    lowered = x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
    SHAPES.check(*tensors)
    cannot = "autocast decides on dtypes step by step" if lowered else None
    return kernels.compute(kernels.mlp, _mlp, tensors, (eps,), backend=backend, cannot=cannot)


def _mlp(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    first: Tensor,
    first_bias: Tensor,
    second: Tensor,
    second_bias: Tensor,
    scale: Tensor | None,
    eps: float,
) -> Tensor:
    hidden = F.gelu(F.linear(F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps), first, first_bias))
    y = F.linear(hidden, second, second_bias)
    return x + (y if scale is None else y * scale)
