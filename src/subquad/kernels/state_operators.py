"""Operators of attention by a state: sums over keys and values that every query is multiplied by.

Letters: b batch, h heads, n tokens, d channels of a head. The formulas are those of subquad.ops. The gradient of each
stands in front of it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.declaring import Operator, Settings, Tensors, empty_tokens, keeps, operator

QKV = {"q": "b h n d", "k": "b h m d", "v": "b h m d"}

GRAD = {"grad": "b h n d"}


def _product(q: Any, k: Any, *rest: Any) -> int:
    """Two products of every token with a (d, d) state."""
    b, h, n, d = q
    return 2 * b * h * (n + k[2]) * d * d


def like_qkv(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Room for the gradients to queries, keys and values."""
    return tuple(map(empty_tokens, (q, k, v)))


linear_attention_gradient = operator(
    "the gradient of linear attention",
    "linear_attention_gradient(Tensor grad, Tensor q, Tensor k, Tensor v, str feature_map, float eps)",
    GRAD | QKV,
    lambda grad, q, k, *rest: 3 * _product(q, k),
    shape=like_qkv,
    result="(Tensor, Tensor, Tensor)",
)

linear_attention = operator(
    "linear attention",
    "linear_attention(Tensor q, Tensor k, Tensor v, str feature_map, float eps)",
    QKV,
    _product,
    gradient=linear_attention_gradient,
    sums_in_fp32=True,
)


def _state(k: Tensor, rows: int, streams: int = 1) -> tuple[Tensor, ...]:
    """Room for the states (b·h, streams, rows, d) of keys (b, h, n, d), in fp32."""
    return (k.new_empty(k.shape[0] * k.shape[1], streams, rows, k.shape[3], dtype=torch.float32),)


keeps(linear_attention, {"state": "b*h 1 d+1 d"}, lambda q, k, *rest: _state(k, k.shape[3] + 1))

# of some keys and values [φ(k)ᵀ v, Σ φ(k)], (b, h, d, d + 1)
linear_sums = operator(
    "linear attention",
    "linear_sums(Tensor k, Tensor v, str feature_map)",
    {"k": "b h m d", "v": "b h m d"},
    lambda k, v, *rest: 2 * k[0] * k[1] * k[2] * k[3] ** 2,
    shape=lambda k, v, feature_map: k.new_empty(*k.shape[:2], k.shape[3], k.shape[3] + 1, dtype=torch.float32),
    sums_in_fp32=True,
    gives_fp32=True,
    needs_all_tokens=False,
)

# of some queries, from such sums over `count` keys
linear_answers = operator(
    "linear attention",
    "linear_answers(Tensor q, Tensor sums, int count, str feature_map, float eps)",
    {"q": "b h n d", "sums": "b h d d+1"},
    lambda q, *rest: 2 * q[0] * q[1] * q[2] * q[3] ** 2,
    sums_in_fp32=True,
    needs_all_tokens=False,
)

inline_attention_gradient = operator(
    "the gradient of InLine attention",
    "inline_attention_gradient(Tensor grad, Tensor q, Tensor k, Tensor v)",
    GRAD | QKV,
    lambda grad, q, k, *rest: 3 * _product(q, k),
    shape=like_qkv,
    result="(Tensor, Tensor, Tensor)",
)

inline_attention = operator(
    "InLine attention",
    "inline_attention(Tensor q, Tensor k, Tensor v)",
    QKV,
    _product,
    gradient=inline_attention_gradient,
    sums_in_fp32=True,
)

keeps(inline_attention, {"state": "b*h 1 d+3 d"}, lambda q, k, *rest: _state(k, k.shape[3] + 3))

TURNED = QKV | {"cos": "n d|h n d", "sin": "n d|h n d"}
"""Features may be turned by tables of a rotation, `interleaved` or not; see subquad.rope."""


def _turned(name: str, title: str, products: int = 1, sums: int = 0) -> Operator:
    """Attention `name` of as many products with (d, d) states as linear attention has, and of sums over d channels."""

    def flops(q: Any, k: Any, *rest: Any) -> int:
        b, h, n, d = q
        return products * _product(q, k) + 2 * b * h * sums * n * d

    settings = "Tensor? cos, Tensor? sin, bool interleaved, float eps"
    gradient = operator(
        f"the gradient of {title}",
        f"{name}_gradient(Tensor grad, Tensor q, Tensor k, Tensor v, {settings})",
        GRAD | TURNED,
        lambda grad, *shapes: 3 * flops(*shapes),
        shape=like_qkv,
        result="(Tensor, Tensor, Tensor)",
    )

    def backward(
        compute: Callable[..., Any], grad: Tensor, tensors: Tensors, settings: Settings
    ) -> tuple[Tensor | None, ...]:
        return *compute(grad, *tensors, *settings), None, None

    attention = operator(
        title,
        f"{name}(Tensor q, Tensor k, Tensor v, {settings})",
        TURNED,
        flops,
        gradient=gradient,
        backward=backward,
        sums_in_fp32=True,
    )
    keeps(attention, {"state": f"b*h {products} d+3 d"}, lambda q, k, *rest: _state(k, k.shape[3] + 3, products))
    return attention


mlla_attention = _turned("mlla_attention", "MLLA's linear attention", sums=1)

mala_attention = _turned("mala_attention", "MALA", sums=1)

rala_attention = _turned("rala_attention", "RALA", sums=3)

nala_attention = _turned("nala_attention", "NaLa", products=2, sums=2)

WIDE_TABLES = "n d|h n d|n 2*d|h n 2*d"
"""Of both halves of features, or of one where these turn alike."""

POLAPP = QKV | {"same": "h 1 2*d", "opposite": "h 1 2*d", "cos": WIDE_TABLES, "sin": WIDE_TABLES}


def _polapp_product(q: Any, k: Any, *rest: Any) -> int:
    return 2 * _product(q, k) + 8 * q[0] * q[1] * q[2] * q[3]


def _like_parameter(parameter: Tensor) -> Tensor:
    """Room for its gradient: a sum over many tokens, in fp32."""
    return parameter.new_empty(parameter.shape, dtype=torch.float32)


# to q, k, v, same and opposite
polapp_attention_gradient = operator(
    "the gradient of PolaFormer++'s attention",
    "polapp_attention_gradient(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor same, Tensor opposite, Tensor? cos, "
    "Tensor? sin, bool interleaved, float eps)",
    GRAD | POLAPP,
    lambda grad, *shapes: 3 * _polapp_product(*shapes),
    shape=lambda grad, q, k, v, same, opposite, *rest: (
        *like_qkv(grad, q, k, v),
        *map(_like_parameter, (same, opposite)),
    ),
    result="(Tensor, Tensor, Tensor, Tensor, Tensor)",
)

polapp_attention = operator(
    "PolaFormer++'s attention",
    "polapp_attention(Tensor q, Tensor k, Tensor v, Tensor same, Tensor opposite, Tensor? cos, Tensor? sin, "
    "bool interleaved, float eps)",
    POLAPP,
    _polapp_product,
    gradient=polapp_attention_gradient,
    backward=lambda compute, grad, tensors, settings: (*compute(grad, *tensors, *settings), None, None),
    sums_in_fp32=True,
)

UNIT = {"w1": "h d d", "w2": "h d d"}

TRAINED = QKV | UNIT | {"cos": "n d|h n d", "sin": "n d|h n d"}


def _unit_product(q: Any, k: Any, *rest: Any) -> int:
    return _product(q, k) + _product(k, q) + 4 * q[0] * q[1] * k[2] * q[3] ** 2


# to q, k, v, w1 and w2
ttt_unit_gradient = operator(
    "the gradient of a gated unit trained on keys",
    "ttt_unit_gradient(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor w1, Tensor w2, Tensor? cos, Tensor? sin, "
    "bool interleaved, float loss_scale)",
    GRAD | TRAINED,
    lambda grad, *shapes: 3 * _unit_product(*shapes),
    shape=lambda grad, q, k, v, w1, w2, *rest: (*like_qkv(grad, q, k, v), *map(_like_parameter, (w1, w2))),
    result="(Tensor, Tensor, Tensor, Tensor, Tensor)",
)

ttt_unit = operator(
    "a gated unit trained on keys",
    "ttt_unit(Tensor q, Tensor k, Tensor v, Tensor w1, Tensor w2, Tensor? cos, Tensor? sin, bool interleaved, "
    "float loss_scale)",
    TRAINED,
    _unit_product,
    gradient=ttt_unit_gradient,
    backward=lambda compute, grad, tensors, settings: (*compute(grad, *tensors, *settings), None, None),
    sums_in_fp32=True,
)

FOCUSED = QKV | {"temperature": "h 1 d", "positions": "h m d"}

# to q, k, v and temperature; positions have the sum of k's over the batch
focused_attention_gradient = operator(
    "the gradient of focused attention",
    "focused_attention_gradient(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor temperature, Tensor? positions, "
    "float power, float eps)",
    GRAD | FOCUSED,
    lambda grad, *shapes: 3 * _product(*shapes),
    shape=lambda grad, q, k, v, temperature, *rest: (*like_qkv(grad, q, k, v), _like_parameter(temperature)),
    result="(Tensor, Tensor, Tensor, Tensor)",
)


def _of_positions(dk: Tensor, positions: Tensor | None) -> Tensor | None:
    """The gradient to positions, which are added to the keys of every image, from that to these."""
    if positions is None:
        return None
    # a sum over a single one is three times as slow as a copy
    return dk[0].to(positions.dtype, copy=True) if len(dk) == 1 else dk.sum(dim=0, dtype=torch.float32)


def _focused_backward(
    gradient: Callable[..., Any], grad: Tensor, tensors: Tensors, settings: Settings
) -> tuple[Tensor | None, ...]:
    dq, dk, dv, dtemperature = gradient(grad, *tensors, *settings)
    return dq, dk, dv, dtemperature, _of_positions(dk, tensors[-1])


focused_attention = operator(
    "focused attention",
    "focused_attention(Tensor q, Tensor k, Tensor v, Tensor temperature, Tensor? positions, float power, float eps)",
    FOCUSED,
    _product,
    gradient=focused_attention_gradient,
    backward=_focused_backward,
    sums_in_fp32=True,
)

POLAR = QKV | {"power": "h 1 d", "temperature": "h 1 d", "positions": "h m d"}


def _pola_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, power: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return *like_qkv(grad, q, k, v), _like_parameter(power), _like_parameter(power)


# to q, k, v, power and temperature; positions have the sum of k's over the batch
pola_attention_gradient = operator(
    "the gradient of PolaFormer's attention",
    "pola_attention_gradient(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor power, Tensor? temperature, "
    "Tensor? positions, float eps)",
    GRAD | POLAR,
    lambda grad, *shapes: 6 * _product(*shapes),
    shape=_pola_gradients,
    result="(Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _pola_backward(
    gradient: Callable[..., Any], grad: Tensor, tensors: Tensors, settings: Settings
) -> tuple[Tensor | None, ...]:
    dq, dk, dv, dpower, dtemperature = gradient(grad, *tensors, *settings)
    *_, temperature, positions = tensors
    return dq, dk, dv, dpower, None if temperature is None else dtemperature, _of_positions(dk, positions)


pola_attention = operator(
    "PolaFormer's attention",
    "pola_attention(Tensor q, Tensor k, Tensor v, Tensor power, Tensor? temperature, Tensor? positions, float eps)",
    POLAR,
    lambda *shapes: 2 * _product(*shapes),
    gradient=pola_attention_gradient,
    backward=_pola_backward,
    sums_in_fp32=True,
)

keeps(pola_attention, {"state": "b*h 2 d+1 d"}, lambda q, k, *rest: _state(k, k.shape[3] + 1, 2))
