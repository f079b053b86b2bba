"""Attention by a state on CPUs. Letters: b batch, h heads, n tokens, d channels of a head."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from subquad.kernels import state_operators as operators
from subquad.kernels.cpu.calls import answers, as_given, gradients
from subquad.kernels.cpu.library import kernel
from subquad.kernels.cpu.passing import (
    as_it_lies,
    long,
    numbers_of,
    of_one_dtype,
    parameter_of,
    shape_of,
    tokens_of,
    turning_of,
)
from subquad.kernels.declaring import Operator, empty_tokens, implements

FEATURES = {"relu": 0, "elu": 1, "none": 2, "nala": 3}

FORMS = {"divided": 0, "subtracted": 1, "weighed": 2}
"""What the states.h of kernels knows of: features of tokens, and what is made of their products."""


def _settings(feature: str, form: str, eps: float, tables: tuple[Tensor | None, ...] = (None, None)) -> tuple[Any, ...]:
    """The arguments of the kernels of states behind their tokens."""
    return turning_of(*tables), *_named(feature, form), ctypes.c_float(eps)


def _named(feature: str, form: str) -> tuple[ctypes.c_int32, ctypes.c_int32]:
    return ctypes.c_int32(FEATURES[feature]), ctypes.c_int32(FORMS[form])


@implements(operators.linear_attention, "native")
def linear_attention(q: Tensor, k: Tensor, v: Tensor, feature_map: str, eps: float) -> Tensor:
    """See subquad.ops.linear_attention."""
    return answers("state_attention", q, k, v, *_settings(feature_map, "divided", eps))


@implements(operators.linear_sums, "native")
def linear_sums(k: Tensor, v: Tensor, feature_map: str) -> Tensor:
    """[φ(k)ᵀ v, Σ φ(k)]: (b, h, d, d + 1), in fp32."""
    k, v = of_one_dtype(k, v)
    out = k.new_empty(*k.shape[:2], k.shape[3], k.shape[3] + 1, dtype=torch.float32)
    feature = ctypes.c_int32(FEATURES[feature_map])
    kernel("linear_sums", k.dtype)(shape_of(k, k), *map(tokens_of, (k, v)), numbers_of(out), feature)
    return out


@implements(operators.linear_answers, "native")
def linear_answers(q: Tensor, sums: Tensor, count: int, feature_map: str, eps: float) -> Tensor:
    """Queries (b, h, n, d) with sums (b, h, d, d + 1)."""
    out, feature = empty_tokens(q), ctypes.c_int32(FEATURES[feature_map])
    tokens = tokens_of(q), parameter_of(sums), tokens_of(out)
    kernel("linear_answers", q.dtype)(shape_of(q, q), *tokens, *long(count), feature, ctypes.c_float(eps))
    return out


@implements(operators.linear_attention_gradient, "native")
def linear_attention_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, feature_map: str, eps: float
) -> tuple[Tensor, ...]:
    """Give the gradients of `linear_attention` to q, k and v."""
    return gradients("state_attention_gradient", grad, q, k, v, *_settings(feature_map, "divided", eps))


def _no_pairs(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> str | None:
    *_, cos, _, interleaved, _ = rest
    return why_not_turned(q, k, cos, interleaved)


def _no_pairs_of_both(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> str | None:
    *_, cos, _, interleaved, _ = rest
    return why_not_turned(q, k, cos, interleaved, pieces=2)


def why_not_turned(q: Tensor, k: Tensor, cos: Tensor | None, interleaved: bool, pieces: int = 1) -> str | None:
    """Why the kernels can't turn features, of so many pieces of a head's channels, by a rotation's tables.

    None where they can, or there is no rotation.
    """
    if cos is None:
        return None
    if cos.shape[-1] not in (q.shape[3], pieces * q.shape[3]):
        return f"it turns heads of {q.shape[3]} channels by tables of as many, and these have {cos.shape[-1]}"
    if not interleaved:
        return "it turns pairs of neighbours, and these are of two halves"
    if q.shape[2] != k.shape[2]:
        return "queries and keys that are turned stand on one grid"
    return None


def _implement_turned(operator: Operator, feature: str, form: str) -> None:
    """Let the kernels of states compute an operator whose features may be turned, and its gradient."""
    assert operator.gradient is not None

    @implements(operator, "native", cannot=_no_pairs)
    def forward(
        q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool, eps: float
    ) -> Tensor:
        return answers("state_attention", q, k, v, *_settings(feature, form, eps, (cos, sin)))

    @implements(operator.gradient, "native")
    def gradient(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        cos, sin, _, eps = rest
        return gradients("state_attention_gradient", grad, q, k, v, *_settings(feature, form, eps, (cos, sin)))


_implement_turned(operators.mlla_attention, "elu", "divided")

_implement_turned(operators.mala_attention, "elu", "subtracted")

_implement_turned(operators.rala_attention, "elu", "weighed")

_implement_turned(operators.nala_attention, "nala", "divided")


@implements(operators.focused_attention, "native")
def focused_attention(
    q: Tensor, k: Tensor, v: Tensor, temperature: Tensor, positions: Tensor | None, power: float, eps: float
) -> Tensor:
    """`temperature` (h, 1, d), `positions` (h, n_k, d)."""
    dtype, (q, k, v) = q.dtype, of_one_dtype(q, k, v)
    features = _focused(q, temperature, None, power), _focused(k, temperature, positions, power)
    return answers("feature_attention", *features, v, ctypes.c_float(eps)).to(dtype)


@implements(operators.focused_attention_gradient, "native")
def focused_attention_gradient(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor,
    positions: Tensor | None,
    power: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Give the gradients of `focused_attention` to q, k, v and temperature."""
    given, (grad, q, k, v) = (q, k, v), of_one_dtype(grad, q, k, v)
    features = _focused(q, temperature, None, power), _focused(k, temperature, positions, power)
    # those to features in fp32: most of one makes a token's features longer or shorter, of which nothing is left
    of_features, dv = [empty_tokens(x, torch.float32) for x in (q, k)], empty_tokens(v)
    tokens = map(tokens_of, (*features, v, grad, *of_features, dv))
    kernel("feature_attention_gradient", q.dtype)(shape_of(q, k), *tokens, ctypes.c_float(eps))
    dq, of_queries = _through_focus(of_features[0], q, temperature, None, power)
    dk, of_keys = _through_focus(of_features[1], k, temperature, positions, power)
    return *as_given((dq, dk, dv), given), of_queries + of_keys


def _focused(x: Tensor, temperature: Tensor, positions: Tensor | None, power: float) -> Tensor:
    """Features of tokens (b, h, n, d)."""
    out, parameters = empty_tokens(x), (parameter_of(temperature), as_it_lies(positions))
    kernel("focus", x.dtype)(shape_of(x, x), tokens_of(x), *parameters, ctypes.c_float(power), tokens_of(out))
    return out


def _through_focus(
    grad: Tensor, x: Tensor, temperature: Tensor, positions: Tensor | None, power: float
) -> tuple[Tensor, Tensor]:
    """Gradients of features, in fp32, become those of tokens and of the temperature."""
    dx, dtemperature = empty_tokens(x), temperature.new_empty(temperature.shape, dtype=torch.float32)
    kernel("focus_gradient", x.dtype)(
        shape_of(x, x),
        tokens_of(x),
        parameter_of(temperature),
        as_it_lies(positions),
        ctypes.c_float(power),
        *map(tokens_of, (grad, dx)),
        numbers_of(dtemperature),
    )
    return dx, dtemperature


@implements(operators.inline_attention, "native")
def inline_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See subquad.ops.inline_attention."""
    return answers("inline_attention", q, k, v)


@implements(operators.inline_attention_gradient, "native")
def inline_attention_gradient(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Give the gradients of `inline_attention` to q, k and v."""
    return gradients("inline_attention_gradient", grad, q, k, v)


@implements(operators.pola_attention, "native")
def pola_attention(
    q: Tensor, k: Tensor, v: Tensor, power: Tensor, temperature: Tensor | None, positions: Tensor | None, eps: float
) -> Tensor:
    """`power` and `temperature` (h, 1, d), `positions` (h, n_k, d)."""
    dtype, (q, k, v) = q.dtype, of_one_dtype(q, k, v)
    out, places = empty_tokens(q), _of_all_images(positions, q)
    kernel("pola_attention", q.dtype)(
        shape_of(q, k),
        *map(tokens_of, (q, k, v, places, out)),
        *map(parameter_of, (_sharpness(power, temperature), power)),
        ctypes.c_float(eps),
    )
    return out.to(dtype)


@implements(operators.pola_attention_gradient, "native")
def pola_attention_gradient(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: Tensor,
    temperature: Tensor | None,
    positions: Tensor | None,
    eps: float,
) -> tuple[Tensor, ...]:
    """Give the gradients of `pola_attention` to q, k, v, power and temperature."""
    given, (grad, q, k, v) = (q, k, v), of_one_dtype(grad, q, k, v)
    grads, sharpness = tuple(map(empty_tokens, (q, k, v))), _sharpness(power, temperature)
    places = _of_all_images(positions, q)
    of_parameters = tuple(power.new_empty(power.shape, dtype=torch.float32) for _ in range(2))
    kernel("pola_attention_gradient", q.dtype)(
        shape_of(q, k),
        *map(tokens_of, (q, k, v, places, grad, *grads)),
        *map(parameter_of, (sharpness, power)),
        *map(numbers_of, of_parameters),
        ctypes.c_float(eps),
    )
    dpower, dsharpness = of_parameters
    return *as_given(grads, given), dpower, -dsharpness * sharpness.square()


def _sharpness(power: Tensor, temperature: Tensor | None) -> Tensor:
    """What tokens are multiplied by, (h, 1, d)."""
    return torch.ones_like(power, dtype=torch.float32) if temperature is None else temperature.float().reciprocal()


def _of_all_images(positions: Tensor | None, q: Tensor) -> Tensor | None:
    return None if positions is None else positions.float().contiguous().expand(len(q), -1, -1, -1)


@implements(operators.ttt_unit, "native", cannot=_no_pairs)
def ttt_unit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    loss_scale: float,
) -> Tensor:
    """`w1` and `w2` (h, d, d); the inner loss is a mean over keys, times `loss_scale`."""
    weights = map(parameter_of, (w1, w2))
    return answers("ttt_unit", q, k, v, *weights, turning_of(cos, sin), ctypes.c_float(loss_scale / k.shape[2]))


@implements(operators.ttt_unit_gradient, "native")
def ttt_unit_gradient(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w1: Tensor,
    w2: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    loss_scale: float,
) -> tuple[Tensor, ...]:
    """Give the gradients of `ttt_unit` to q, k, v, w1 and w2."""
    of_weights = tuple(w.new_empty(w.shape, dtype=torch.float32) for w in (w1, w2))
    weights = *map(parameter_of, (w1, w2)), *map(numbers_of, of_weights)
    arguments = *weights, turning_of(cos, sin), ctypes.c_float(loss_scale / k.shape[2])
    return *gradients("ttt_unit_gradient", grad, q, k, v, *arguments), *of_weights


@implements(operators.polapp_attention, "native", cannot=_no_pairs_of_both)
def polapp_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    same: Tensor,
    opposite: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    eps: float,
) -> Tensor:
    """`same` and `opposite` (h, 1, 2d)."""
    spikiness = map(parameter_of, (same, opposite))
    return answers("polapp_attention", q, k, v, *spikiness, turning_of(cos, sin), ctypes.c_float(eps))


@implements(operators.polapp_attention_gradient, "native")
def polapp_attention_gradient(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    same: Tensor,
    opposite: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    eps: float,
) -> tuple[Tensor, ...]:
    """Give the gradients of `polapp_attention` to q, k, v, same and opposite."""
    of_spikiness = tuple(s.new_empty(s.shape, dtype=torch.float32) for s in (same, opposite))
    spikiness = *map(parameter_of, (same, opposite)), *map(numbers_of, of_spikiness)
    arguments = *spikiness, turning_of(cos, sin), ctypes.c_float(eps)
    return *gradients("polapp_attention_gradient", grad, q, k, v, *arguments), *of_spikiness
