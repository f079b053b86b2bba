"""Focused linear attention: linear attention whose features are sharpened without changing their norm. Linear in n.

    f(x) = ‖y‖ y³ / ‖y³‖,  y = (relu(x) + 1e-6) / t

FLatten Transformer, Han et al. 2023, arXiv 2308.00442, eq. 4-5. The norm runs over all channels, heads included.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad import kernels
from subquad.ops.image_by_image import by_image
from subquad.ops.linear_formula import feature_answers, feature_sums, feature_weights, mix_features
from subquad.ops.precision import in_fp32, kept_in_fp32

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
    # features are fp32 at least, whatever tokens are
    features = [kernels.compute(kernels.focus, _focused, (x, temperature), (power,), backend=backend) for x in (q, k)]
    operator, tensors, settings = kernels.linear_attention, (*features, v.to(features[0].dtype)), ("none", eps)
    # what has no kernel of the features has none of what is made of them
    optional = padding is None
    y = kernels.compute(operator, _mix, tensors, settings, (padding,), backend=backend, optional=optional)
    return y.to(q.dtype)


def _focused(x: Tensor, temperature: Tensor, power: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return by_image(lambda x: focus(x, temperature, power), wide)


@in_fp32
def _mix(q: Tensor, k: Tensor, v: Tensor, feature_map: str, eps: float, padding: Tensor | None = None) -> Tensor:
    return by_image(lambda *image: mix_features(*image, eps=eps), q, k, v, padding)


@kept_in_fp32
def focused_sums(k: Tensor, v: Tensor, temperature: Tensor, *, power: float) -> tuple[Tensor, Tensor]:
    """Of some keys and values (b, h, n, d) what `focused_answers` needs, to be added up over all of them."""
    return feature_sums(focus(k, temperature, power), v)


@in_fp32
def focused_answers(
    q: Tensor, temperature: Tensor, sums: Sequence[Tensor], count: int, *, power: float, eps: float = 1e-6
) -> Tensor:
    """`focused_attention` of some queries (b, h, n, d), from the sums over `count` keys."""
    return feature_answers(focus(q, temperature, power), sums, count, eps=eps)


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
    channels = (1, 3)
    # of its largest channel's power there is nothing left in the end, but by itself it would leave the range of fp32
    largest = x.detach().amax(dim=channels, keepdim=True)
    x = x / largest
    sharp = x**power
    return sharp * (largest * x.norm(dim=channels, keepdim=True) / sharp.norm(dim=channels, keepdim=True))
