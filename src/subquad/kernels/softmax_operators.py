"""The operator of softmax attention. Letters: b batch, h heads, n queries, m keys, d channels of a head."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from subquad.kernels.declaring import Settings, Tensors, empty_tokens, operator
from subquad.kernels.state_operators import GRAD

TOKENS = {"q": "b h n d", "k": "b h m d", "v": "b h m d"}
PAIRS = {"bias": "?b ?h ?n ?m", "forbidden": "?b ?h ?n ?m"}


def is_shared(bias: Tensor, q: Tensor, k: Tensor) -> bool:
    """Whether a bias is of all images, and has a number for each of their pairs."""
    return bias.shape == (1, *q.shape[1:3], k.shape[2])


def _products(q: Any, k: Any, count: int) -> int:
    return 2 * count * q[0] * q[1] * q[2] * k[2] * q[3]


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, forbidden: Tensor | None
) -> tuple[Tensor, ...]:
    shape = bias.shape if bias is not None and is_shared(bias, q, k) else (0,)
    return *map(empty_tokens, (q, k, v)), (q if bias is None else bias).new_empty(shape)


# to q, k, v and the bias; of no numbers where there is no bias that images share
softmax_attention_gradient = operator(
    "the gradient of softmax attention",
    "softmax_attention_gradient(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? forbidden)",
    GRAD | TOKENS | PAIRS,
    lambda grad, q, k, *rest: _products(q, k, 5),
    shape=_gradients,
    result="(Tensor, Tensor, Tensor, Tensor)",
)


def _backward(
    gradient: Callable[..., Any], grad: Tensor, tensors: Tensors, settings: Settings
) -> tuple[Tensor | None, ...]:
    *grads, dbias = gradient(grad, *tensors)
    return *grads, dbias if dbias.numel() else None, None


# Σ softmax(s q·k + bias) v, where a query sees no key that is forbidden to it; zeros where it sees none
softmax_attention = operator(
    "softmax attention",
    "softmax_attention(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? forbidden)",
    TOKENS | PAIRS,
    lambda q, k, *rest: _products(q, k, 2),
    gradient=softmax_attention_gradient,
    backward=_backward,
    sums_in_fp32=True,
    masks=("forbidden",),
)
