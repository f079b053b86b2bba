"""The mechanisms' operators on CPUs.

Letters: b batch, h heads, n tokens, d channels of a head, a agents, m landmarks. Tokens are fp32 or bf16, and what is
given back has the dtype of the first of them; parameters, states and whatever is summed are fp32.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.kernels import mixing_operators as operators
from subquad.kernels.cpu.library import kernel
from subquad.kernels.cpu.passing import (
    Bias,
    Blocks,
    bias_of,
    bias_of_tables,
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


def _answers(name: str, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
    """What the kernel `name` makes of tokens (b, h, n, d) and its other arguments, in the dtype of the queries."""
    dtype, (q, k, v) = q.dtype, of_one_dtype(q, k, v)
    out = empty_tokens(q)
    kernel(name, q.dtype)(shape_of(q, k), *map(tokens_of, (q, k, v, out)), *arguments)
    return out if out.dtype == dtype else out.to(dtype)


def _gradients(name: str, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Give what the kernel `name` makes of these: gradients to q, k and v, in the dtypes of what they are to."""
    given, (grad, q, k, v) = (q, k, v), of_one_dtype(grad, q, k, v)
    grads = tuple(map(empty_tokens, (q, k, v)))
    kernel(name, q.dtype)(shape_of(q, k), *map(tokens_of, (q, k, v, grad, *grads)), *arguments)
    return as_given(grads, given)


def _settings(feature: str, form: str, eps: float, tables: tuple[Tensor | None, ...] = (None, None)) -> tuple[Any, ...]:
    """The arguments of the kernels of states behind their tokens."""
    return turning_of(*tables), *_named(feature, form), ctypes.c_float(eps)


def _named(feature: str, form: str) -> tuple[ctypes.c_int32, ctypes.c_int32]:
    return ctypes.c_int32(FEATURES[feature]), ctypes.c_int32(FORMS[form])


@implements(operators.linear_attention, "native")
def linear_attention(q: Tensor, k: Tensor, v: Tensor, feature_map: str, eps: float) -> Tensor:
    """See subquad.ops.linear_attention."""
    return _answers("state_attention", q, k, v, *_settings(feature_map, "divided", eps))


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
    return _gradients("state_attention_gradient", grad, q, k, v, *_settings(feature_map, "divided", eps))


def _no_pairs(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> str | None:
    *_, cos, _, interleaved, _ = rest
    if cos is None:
        return None
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
        return _answers("state_attention", q, k, v, *_settings(feature, form, eps, (cos, sin)))

    @implements(operator.gradient, "native")
    def gradient(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        cos, sin, _, eps = rest
        return _gradients("state_attention_gradient", grad, q, k, v, *_settings(feature, form, eps, (cos, sin)))


_implement_turned(operators.mlla_attention, "elu", "divided")
_implement_turned(operators.mala_attention, "elu", "subtracted")
_implement_turned(operators.rala_attention, "elu", "weighed")
_implement_turned(operators.nala_attention, "nala", "divided")


@implements(operators.focus, "native")
def focus(x: Tensor, temperature: Tensor, power: float) -> Tensor:
    """In fp32; see subquad.ops.focused_attention."""
    out = empty_tokens(x).float()
    kernel("focus", x.dtype)(
        shape_of(x, x), tokens_of(x), parameter_of(temperature), ctypes.c_float(power), tokens_of(out)
    )
    return out


@implements(operators.focus_gradient, "native")
def focus_gradient(grad: Tensor, x: Tensor, temperature: Tensor, power: float) -> tuple[Tensor, ...]:
    """Give the gradients of `focus` to x and temperature."""
    grad, dx = grad.float(), empty_tokens(x)
    dtemperature = temperature.new_empty(temperature.shape, dtype=torch.float32)
    kernel("focus_gradient", x.dtype)(
        shape_of(x, x),
        tokens_of(x),
        parameter_of(temperature),
        ctypes.c_float(power),
        *map(tokens_of, (grad, dx)),
        numbers_of(dtemperature),
    )
    return dx, dtemperature


@implements(operators.inline_attention, "native")
def inline_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See subquad.ops.inline_attention."""
    return _answers("inline_attention", q, k, v)


@implements(operators.inline_attention_gradient, "native")
def inline_attention_gradient(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Give the gradients of `inline_attention` to q, k and v."""
    return _gradients("inline_attention_gradient", grad, q, k, v)


def as_given(grads: tuple[Tensor, ...], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gradients in the dtypes of what they are the gradients to."""
    return tuple(grad.to(tensor.dtype) for grad, tensor in zip(grads, tensors, strict=True))


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
    return None if positions is None else positions.float().expand(len(q), -1, -1, -1)


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
    return _answers("ttt_unit", q, k, v, *weights, turning_of(cos, sin), ctypes.c_float(loss_scale / k.shape[2]))


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
    of_weights = tuple(torch.empty_like(w, dtype=torch.float32) for w in (w1, w2))
    weights = *map(parameter_of, (w1, w2)), *map(numbers_of, of_weights)
    arguments = *weights, turning_of(cos, sin), ctypes.c_float(loss_scale / k.shape[2])
    return *_gradients("ttt_unit_gradient", grad, q, k, v, *arguments), *of_weights


@implements(operators.polapp_attention, "native", cannot=_no_pairs)
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
    return _answers("polapp_attention", q, k, v, *spikiness, turning_of(cos, sin), ctypes.c_float(eps))


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
    of_spikiness = tuple(torch.empty_like(s, dtype=torch.float32) for s in (same, opposite))
    spikiness = *map(parameter_of, (same, opposite)), *map(numbers_of, of_spikiness)
    arguments = *spikiness, turning_of(cos, sin), ctypes.c_float(eps)
    return *_gradients("polapp_attention_gradient", grad, q, k, v, *arguments), *of_spikiness


@implements(operators.mhla_sums, "native")
def mhla_sums(k: Tensor, v: Tensor, scale: Tensor, shape: Sequence[int], pieces: Sequence[int]) -> Tensor:
    """States of blocks, in fp32."""
    k, v = of_one_dtype(k, v)
    out = operators.empty_states_of_blocks(k, shape, pieces)
    given = *map(tokens_of, (k, v)), parameter_of(scale), numbers_of(out), Blocks(*shape, *pieces)
    kernel("mhla_sums", k.dtype)(shape_of(k, k), *given)
    return out


@implements(operators.mhla_sums_gradient, "native")
def mhla_sums_gradient(
    grad: Tensor, k: Tensor, v: Tensor, scale: Tensor, shape: Sequence[int], pieces: Sequence[int]
) -> tuple[Tensor, ...]:
    """Give the gradients of `mhla_sums` to k, v and scale, of those to the states."""
    given, (k, v) = (k, v), of_one_dtype(k, v)
    dk, dv, dscale = empty_tokens(k), empty_tokens(v), torch.empty_like(scale, dtype=torch.float32)
    tokens = *map(tokens_of, (k, v)), parameter_of(scale), *map(tokens_of, (dk, dv))
    kernel("mhla_sums_gradient", k.dtype)(
        shape_of(k, k), parameter_of(grad), *tokens, numbers_of(dscale), Blocks(*shape, *pieces)
    )
    return as_given((dk, dv, dscale), (*given, scale))


@implements(operators.mhla_answers, "native")
def mhla_answers(q: Tensor, states: Tensor, scale: Tensor, shape: Sequence[int], pieces: Sequence[int]) -> Tensor:
    """Queries (b, h, n, d) with mixed states (b, h, m, d, d + 1)."""
    out = empty_tokens(q)
    given = tokens_of(q), parameter_of(states), parameter_of(scale), tokens_of(out), Blocks(*shape, *pieces)
    kernel("mhla_answers", q.dtype)(shape_of(q, q), *given)
    return out


@implements(operators.mhla_answers_gradient, "native")
def mhla_answers_gradient(
    grad: Tensor, q: Tensor, states: Tensor, scale: Tensor, shape: Sequence[int], pieces: Sequence[int]
) -> tuple[Tensor, ...]:
    """Give the gradients of `mhla_answers` to q, states and scale."""
    dtype, (grad, q) = q.dtype, of_one_dtype(grad, q)
    dq, dstates, dscale = empty_tokens(q), *(torch.empty_like(x, dtype=torch.float32) for x in (states, scale))
    kernel("mhla_answers_gradient", q.dtype)(
        shape_of(q, q),
        *map(tokens_of, (grad, q)),
        *map(parameter_of, (states, scale)),
        tokens_of(dq),
        *map(numbers_of, (dstates, dscale)),
        Blocks(*shape, *pieces),
    )
    return dq.to(dtype), dstates, dscale.to(scale.dtype)


@implements(operators.circulant_attention, "native")
def circulant_attention(q: Tensor, k: Tensor, v: Tensor, shape: Sequence[int]) -> Tensor:
    """Tokens (b, h, n, d) of a map."""
    return _answers("circulant_attention", q, k, v, *long(*shape))


@implements(operators.circulant_attention_gradient, "native")
def circulant_attention_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, shape: Sequence[int]
) -> tuple[Tensor, ...]:
    """Give the gradients of `circulant_attention` to q, k and v."""
    return _gradients("circulant_attention_gradient", grad, q, k, v, *long(*shape))


def _agent_attention(q: Tensor, agents: Tensor, k: Tensor, v: Tensor, key_bias: Bias, query_bias: Bias) -> Tensor:
    dtype, (q, k, v) = q.dtype, of_one_dtype(q, k, v)
    out = empty_tokens(q)
    few = parameter_of(agents), *long(agents.shape[2])
    kernel("agent_attention", q.dtype)(
        shape_of(q, k), tokens_of(q), *few, *map(tokens_of, (k, v)), key_bias, query_bias, tokens_of(out)
    )
    return out.to(dtype)


@implements(operators.agent_attention, "native")
def agent_attention(q: Tensor, agents: Tensor, k: Tensor, v: Tensor, key_bias: Tensor, query_bias: Tensor) -> Tensor:
    """`agents` (b, h, a, d), biases (h, a, n)."""
    return _agent_attention(q, agents, k, v, bias_of(key_bias), bias_of(query_bias))


@implements(operators.agent_attention_of_tables, "native")
def agent_attention_of_tables(
    q: Tensor,
    agents: Tensor,
    k: Tensor,
    v: Tensor,
    key_block: Tensor,
    key_rows: Tensor,
    key_columns: Tensor,
    key_prefix: Tensor | None,
    query_block: Tensor,
    query_rows: Tensor,
    query_columns: Tensor,
    query_prefix: Tensor | None,
) -> Tensor:
    """A bias is the sum of block (h, a, s, s), rows (h, a, y) and columns (h, a, x); prefix (h, a, p)."""
    key_bias = bias_of_tables(key_block, key_rows, key_columns, key_prefix)
    query_bias = bias_of_tables(query_block, query_rows, query_columns, query_prefix)
    return _agent_attention(q, agents, k, v, key_bias, query_bias)


@implements(operators.agent_attention_gradient, "native")
def agent_attention_gradient(
    grad: Tensor, q: Tensor, agents: Tensor, k: Tensor, v: Tensor, key_bias: Tensor, query_bias: Tensor
) -> tuple[Tensor, ...]:
    """Give the gradients of `agent_attention` with biases (h, a, n), whose own are (h, n, a)."""
    given, (grad, q, k, v) = (q, agents, k, v, key_bias, query_bias), of_one_dtype(grad, q, k, v)
    dq, dk, dv = map(empty_tokens, (q, k, v))
    dagents = agents.new_empty(agents.shape, dtype=torch.float32)
    # biases' own of each image, (b, h, n, a), are summed in the end
    dbiases = tuple(x.new_empty(*x.shape[:3], agents.shape[2], dtype=torch.float32) for x in (k, q))
    kernel("agent_attention_gradient", q.dtype)(
        shape_of(q, k),
        tokens_of(q),
        parameter_of(agents),
        *long(agents.shape[2]),
        *map(tokens_of, (k, v)),
        *map(bias_of, (key_bias, query_bias)),
        *map(tokens_of, (grad, dq)),
        numbers_of(dagents),
        *map(tokens_of, (dk, dv)),
        *map(numbers_of, dbiases),
    )
    summed = (bias[0] if len(bias) == 1 else bias.sum(dim=0) for bias in dbiases)
    return as_given((dq, dagents, dk, dv, *summed), given)


@implements(operators.soft_gather, "native")
def soft_gather(x: Tensor, landmarks: Tensor, v: Tensor, scale: float) -> Tensor:
    """κ(scale·x, landmarks)ᵀ v: (b, h, m, d), in fp32."""
    x, v = of_one_dtype(x, v)
    out = landmarks.new_empty(landmarks.shape, dtype=torch.float32)
    few = parameter_of(landmarks), *long(landmarks.shape[2])
    kernel("soft_gather", x.dtype)(
        shape_of(x, v), tokens_of(x), *few, tokens_of(v), ctypes.c_float(scale), numbers_of(out)
    )
    return out


@implements(operators.soft_spread, "native")
def soft_spread(x: Tensor, landmarks: Tensor, u: Tensor, scale: float) -> Tensor:
    """κ(scale·x, landmarks) u: (b, h, n, d)."""
    out = empty_tokens(x)
    few = parameter_of(landmarks), *long(landmarks.shape[2]), parameter_of(u)
    kernel("soft_spread", x.dtype)(shape_of(x, x), tokens_of(x), *few, ctypes.c_float(scale), tokens_of(out))
    return out


def _soft_gradient(
    x: Tensor, landmarks: Tensor, y: Tensor, few: Tensor, scale: float, *, gathered: bool
) -> tuple[Tensor, ...]:
    """To x and the landmarks, and to `y` (b, h, n, d) where these were gathered, else to `few` (b, h, m, d)."""
    given, (x, y) = (x, y), of_one_dtype(x, y)
    dx, dy = empty_tokens(x), empty_tokens(y) if gathered else None
    dlandmarks = landmarks.new_empty(landmarks.shape, dtype=torch.float32)
    dfew = None if gathered else torch.empty_like(dlandmarks)
    kernel("soft_gradient", x.dtype)(
        shape_of(x, y),
        tokens_of(x),
        parameter_of(landmarks),
        *long(landmarks.shape[2]),
        tokens_of(y),
        parameter_of(few),
        ctypes.c_float(scale),
        tokens_of(dx),
        numbers_of(dlandmarks),
        tokens_of(dy),
        numbers_of(dfew),
    )
    last, like = (dy, given[1]) if dy is not None else (dfew, few)
    assert last is not None
    return as_given((dx, dlandmarks, last), (given[0], landmarks, like))


@implements(operators.soft_gather_gradient, "native")
def soft_gather_gradient(grad: Tensor, x: Tensor, landmarks: Tensor, v: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Give the gradients of `soft_gather` to x, landmarks and v."""
    return _soft_gradient(x, landmarks, v, grad, scale, gathered=True)


@implements(operators.soft_spread_gradient, "native")
def soft_spread_gradient(grad: Tensor, x: Tensor, landmarks: Tensor, u: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Give the gradients of `soft_spread` to x, landmarks and u."""
    return _soft_gradient(x, landmarks, grad, u, scale, gathered=False)


@implements(operators.newton_inverse, "native")
def newton_inverse(gram: Tensor, alpha: Tensor, steps: int) -> Tensor:
    """From `alpha` (..., 1, 1) times `gram` (..., m, m), ridge included; in fp32 throughout."""
    out, m = gram.new_empty(gram.shape, dtype=torch.float32), gram.shape[-1]
    kernel("newton_inverse")(
        *map(parameter_of, (gram, alpha)),
        *long(gram.numel() // m**2, m),
        ctypes.c_int32(steps),
        numbers_of(out),
        ctypes.c_int32(torch.get_num_threads()),
    )
    return out.to(gram.dtype)


@implements(operators.newton_inverse_gradient, "native")
def newton_inverse_gradient(grad: Tensor, gram: Tensor, alpha: Tensor, steps: int) -> tuple[Tensor, ...]:
    """Give the gradients of `newton_inverse` to gram and alpha; both matrices are symmetric."""
    grads, m = tuple(x.new_empty(x.shape, dtype=torch.float32) for x in (gram, alpha)), gram.shape[-1]
    kernel("newton_inverse_gradient")(
        *map(parameter_of, (grad, gram, alpha)),
        *long(gram.numel() // m**2, m),
        ctypes.c_int32(steps),
        *map(numbers_of, grads),
        ctypes.c_int32(torch.get_num_threads()),
    )
    return as_given(grads, (gram, alpha))
