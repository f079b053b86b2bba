"""The second half of a transformer block in one step: its norm, its MLP and its residual.

    x + s · (W₂ gelu(W₁ norm(x) + b₁) + b₂)

GELU is x Φ(x), or one of its approximations, which SigLIP and CLIP have. Between one product and the next everything
stays in a processor's cache: what is left of norm, GELU and sum is the arithmetic. 4 n c m products.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad import kernels

SHAPES = kernels.mlp.shapes

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * (1.702 * x).sigmoid(),
}
"""GELU, and what others compute for it (Hendrycks and Gimpel, arXiv 1606.08415)."""


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
    activation: str = "gelu",
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """(b, n, c) from x (b, n, c); W₁ = `first` (m, c), W₂ = `second` (c, m), `scale` (c,) of LayerScale.

    Raises ValueError where shapes don't fit, and for an activation that is none of `ACTIVATIONS`.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    tensors = x, norm_weight, norm_bias, first, first_bias, second, second_bias, scale
    SHAPES.check(*tensors)
    # a kernel has one dtype for tokens and weights, autocast another for products than for sums
    lowered = x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
    cannot = "autocast decides on dtypes step by step" if lowered else None
    if any(one is None for one in tensors[:-1]):
        cannot = "it has no factors or no biases somewhere"
    return kernels.compute(kernels.mlp, _mlp, tensors, (activation, eps), backend=backend, cannot=cannot)


def _mlp(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    first: Tensor,
    first_bias: Tensor,
    second: Tensor,
    second_bias: Tensor,
    scale: Tensor | None,
    activation: str,
    eps: float,
) -> Tensor:
    hidden = F.linear(F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps), first, first_bias)
    y = F.linear(ACTIVATIONS[activation](hidden), second, second_bias)
    return x + (y if scale is None else y * scale)
