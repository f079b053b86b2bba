"""Focused linear attention: linear attention whose features are sharpened without changing their norm. Linear in n.

    f(x) = ‖y‖ y³ / ‖y³‖,  y = (relu(x) + 1e-6) / t

FLatten Transformer, Han et al. 2023, arXiv 2308.00442, eq. 4-5. The norm runs over all channels, heads included.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad import kernels
from subquad.ops.image_by_image import by_image
from subquad.ops.linear_formula import feature_weights, mix_features
from subquad.ops.precision import in_fp32

SHAPES = kernels.Shapes("focused attention", q="b h n d", k="b h m d", v="b h m d", temperature="h 1 d", padding="b m")
WEIGHTS_SHAPES = SHAPES.without("v")


def focused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor,
    padding: Tensor | None = None,
    *,
    power: float,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """(b, h, n_q, d) from q (b, h, n_q, d), k and v (b, h, n_k, d), t = `temperature` (h, 1, d); `padding` (b, n_k)."""
    SHAPES.check(q, k, v, temperature, padding)
    settings, cannot = (power,), None if padding is None else "it knows no padding"
    by_q, by_k = (
        kernels.choose(kernels.focus, (x, temperature), settings, backend=backend, cannot=cannot) for x in (q, k)
    )
    if by_q is None or by_k is None:
        return _focused(q, k, v, temperature, padding, power=power, eps=eps)
    features = (kernels.run(kernels.focus, by_q, _focus, (x, temperature), settings) for x in (q, k))
    return kernels.run(kernels.linear_attention, by_q, _mix, (*features, v), ("none", eps)).to(q.dtype)


def _focus(x: Tensor, temperature: Tensor, power: float) -> Tensor:
    return focus(x.to(torch.promote_types(x.dtype, torch.float32)), temperature, power)


@in_fp32
def _mix(q: Tensor, k: Tensor, v: Tensor, feature_map: str, eps: float) -> Tensor:
    return mix_features(q, k, v, None, eps=eps)


@in_fp32
def _focused(
    q: Tensor, k: Tensor, v: Tensor, temperature: Tensor, padding: Tensor | None, *, power: float, eps: float
) -> Tensor:
    def mix(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        return mix_features(focus(q, temperature, power), focus(k, temperature, power), v, padding, eps=eps)

    return by_image(mix, q, k, v, padding)


@in_fp32
def focused_weights(
    q: Tensor, k: Tensor, temperature: Tensor, padding: Tensor | None = None, *, power: float, eps: float = 1e-6
) -> Tensor:
    """Explicit weights (b, h, n_q, n_k) of `focused_attention`."""
    WEIGHTS_SHAPES.check(q, k, temperature, padding)
    return feature_weights(focus(q, temperature, power), focus(k, temperature, power), padding, eps=eps)


def focus(x: Tensor, temperature: Tensor, power: float) -> Tensor:
    """The focusing map of (b, h, n, d) heads."""
    x = (F.relu(x) + 1e-6) / temperature
    sharp = x**power
    channels = (1, 3)
    return sharp * (x.norm(dim=channels, keepdim=True) / sharp.norm(dim=channels, keepdim=True))
