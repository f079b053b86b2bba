"""Focused linear attention: linear attention whose features are sharpened without changing their norm. Linear in n.

    f(x) = ‖y‖ y³ / ‖y³‖,  y = (relu(x) + 1e-6) / t

FLatten Transformer, Han et al. 2023, arXiv 2308.00442, eq. 4-5. The norm runs over all channels, heads included.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from subquad import kernels
from subquad.ops.image_by_image import by_image
from subquad.ops.linear_formula import feature_answers, feature_sums, feature_weights, mix_features
from subquad.ops.precision import in_fp32, kept_in_fp32

SHAPES = kernels.focused_attention.shapes.extended(padding="b m")
WEIGHTS_SHAPES = SHAPES.without("v")


def focused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor,
    padding: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    power: float,
    eps: float = 1e-6,
    backend: str | None = None,
) -> Tensor:
    """(b, h, n_q, d) from q (b, h, n_q, d), k and v (b, h, n_k, d), t = `temperature` (h, 1, d); `padding` (b, n_k).

    `positions` (h, n_k, d) are added to the keys.
    """
    SHAPES.check(q, k, v, temperature, positions, padding)
    tensors = q, k, v, temperature, positions
    operator, settings = kernels.focused_attention, (power, eps)
    return kernels.compute(operator, _focused_attention, tensors, settings, (padding,), backend=backend)


@in_fp32
def _focused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor,
    positions: Tensor | None,
    power: float,
    eps: float,
    padding: Tensor | None = None,
) -> Tensor:
    k = k if positions is None else k + positions

    def mix(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
        return mix_features(focus(q, temperature, power), focus(k, temperature, power), v, padding, eps=eps)

    return by_image(mix, q, k, v, padding)


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
    q: Tensor,
    k: Tensor,
    temperature: Tensor,
    padding: Tensor | None = None,
    positions: Tensor | None = None,
    *,
    power: float,
    eps: float = 1e-6,
) -> Tensor:
    """Explicit weights (b, h, n_q, n_k) of `focused_attention`."""
    WEIGHTS_SHAPES.check(q, k, temperature, positions, padding)
    k = k if positions is None else k + positions
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
