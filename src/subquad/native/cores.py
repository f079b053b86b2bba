"""The mechanisms as operators.

Letters: b batch, h heads, n tokens, d channels of a head, a agents, m landmarks.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from subquad.native.calls import bias_of, empty_tokens, long, operator, pointer_to, shape_of, tokens_of
from subquad.native.library import library

FEATURES = {"relu": 0, "elu": 1}


def _product(q: Any, k: Any, *rest: Any) -> int:
    """Two products of every token with a (d, d) state."""
    b, h, n, d = q
    return 2 * b * h * (n + k[2]) * d * d


@operator("linear_attention(Tensor q, Tensor k, Tensor v, str feature_map, float eps)", _product)
def linear_attention(q: Tensor, k: Tensor, v: Tensor, feature_map: str, eps: float) -> Tensor:
    """See subquad.ops.linear_attention."""
    out = empty_tokens(q)
    tokens = map(tokens_of, (q, k, v, out))
    library().linear_attention(shape_of(q, k), *tokens, ctypes.c_int32(FEATURES[feature_map]), ctypes.c_float(eps))
    return out


@operator("inline_attention(Tensor q, Tensor k, Tensor v)", _product)
def inline_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See subquad.ops.inline_attention."""
    out = empty_tokens(q)
    library().inline_attention(shape_of(q, k), *map(tokens_of, (q, k, v, out)))
    return out


@operator(
    "linear_attention_gradient(Tensor grad, Tensor q, Tensor k, Tensor v, str feature_map, float eps)",
    lambda grad, q, k, *rest: 3 * _product(q, k),
    shape=lambda grad, q, k, v, *rest: tuple(map(empty_tokens, (q, k, v))),
    result="(Tensor, Tensor, Tensor)",
)
def linear_attention_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, feature_map: str, eps: float
) -> tuple[Tensor, ...]:
    """Of `linear_attention`, to q, k and v."""
    grads = tuple(map(empty_tokens, (q, k, v)))
    tokens = map(tokens_of, (q, k, v, grad, *grads))
    library().linear_attention_gradient(
        shape_of(q, k), *tokens, ctypes.c_int32(FEATURES[feature_map]), ctypes.c_float(eps)
    )
    return grads


@operator(
    "inline_attention_gradient(Tensor grad, Tensor q, Tensor k, Tensor v)",
    lambda grad, q, k, *rest: 3 * _product(q, k),
    shape=lambda grad, q, k, v: tuple(map(empty_tokens, (q, k, v))),
    result="(Tensor, Tensor, Tensor)",
)
def inline_attention_gradient(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Of `inline_attention`, to q, k and v."""
    grads = tuple(map(empty_tokens, (q, k, v)))
    library().inline_attention_gradient(shape_of(q, k), *map(tokens_of, (q, k, v, grad, *grads)))
    return grads


@operator(
    "polar_attention(Tensor q, Tensor k, Tensor v, Tensor power, Tensor? temperature, Tensor? positions, float eps)",
    lambda *shapes: 2 * _product(*shapes),
)
def polar_attention(
    q: Tensor, k: Tensor, v: Tensor, power: Tensor, temperature: Tensor | None, positions: Tensor | None, eps: float
) -> Tensor:
    """`power` and `temperature` (h, 1, d), `positions` (h, n_k, d)."""
    out = empty_tokens(q)
    sharpness = torch.ones_like(power) if temperature is None else temperature.reciprocal()
    places = None if positions is None else positions.expand(len(q), -1, -1, -1)
    library().polar_attention(
        shape_of(q, k),
        *map(tokens_of, (q, k, v, places, out)),
        pointer_to(sharpness.contiguous()),
        pointer_to(power.contiguous()),
        ctypes.c_float(eps),
    )
    return out


def _two_maps(q: Any, few: Any, k: Any, *rest: Any) -> int:
    """Two maps between tokens and a few others, each with two products."""
    b, h, n, d = q
    return 4 * b * h * (n + k[2]) * few[2] * d


@operator(
    "agent_attention(Tensor q, Tensor agents, Tensor k, Tensor v, Tensor[] key_bias, Tensor[] query_bias)", _two_maps
)
def agent_attention(
    q: Tensor, agents: Tensor, k: Tensor, v: Tensor, key_bias: list[Tensor], query_bias: list[Tensor]
) -> Tensor:
    """`agents` (b, h, a, d); a bias is (h, a, n), or block (h, a, s, s), rows (h, a, y), columns (h, a, x), prefix."""
    out = empty_tokens(q)
    library().agent_attention(
        shape_of(q, k),
        tokens_of(q),
        pointer_to(agents.contiguous()),
        *long(agents.shape[2]),
        *map(tokens_of, (k, v)),
        *map(bias_of, (key_bias, query_bias)),
        tokens_of(out),
    )
    return out


def _agent_gradients(
    grad: Tensor, q: Tensor, agents: Tensor, k: Tensor, v: Tensor, key_bias: Tensor, query_bias: Tensor
) -> tuple[Tensor, ...]:
    dq, dk, dv = map(empty_tokens, (q, k, v))
    dkey_bias, dquery_bias = (x.new_empty(*x.shape[:3], agents.shape[2]) for x in (k, q))
    return dq, agents.new_empty(agents.shape), dk, dv, dkey_bias, dquery_bias


@operator(
    "agent_attention_gradient(Tensor grad, Tensor q, Tensor agents, Tensor k, Tensor v, Tensor key_bias, "
    "Tensor query_bias)",
    lambda grad, q, agents, k, *rest: 4 * q[0] * q[1] * q[3] * agents[2] * (2 * q[2] + 2 * k[2]),
    shape=_agent_gradients,
    result="(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def agent_attention_gradient(
    grad: Tensor, q: Tensor, agents: Tensor, k: Tensor, v: Tensor, key_bias: Tensor, query_bias: Tensor
) -> tuple[Tensor, ...]:
    """Of `agent_attention` to all but the biases (h, a, n), and to these as (b, h, n, a)."""
    grads = _agent_gradients(grad, q, agents, k, v, key_bias, query_bias)
    dq, dagents, dk, dv, dkey_bias, dquery_bias = grads
    library().agent_attention_gradient(
        shape_of(q, k),
        tokens_of(q),
        pointer_to(agents.contiguous()),
        *long(agents.shape[2]),
        *map(tokens_of, (k, v)),
        *(bias_of([bias]) for bias in (key_bias, query_bias)),
        *map(tokens_of, (grad, dq)),
        pointer_to(dagents),
        *map(tokens_of, (dk, dv)),
        *map(pointer_to, (dkey_bias, dquery_bias)),
    )
    return grads


def _one_map(q: Any, few: Any, *rest: Any) -> int:
    """A map between tokens and a few others, and a product with it."""
    return 4 * q[0] * q[1] * q[2] * few[2] * q[3]


@operator(
    "gaussian_gather(Tensor x, Tensor landmarks, Tensor v, float scale)",
    _one_map,
    shape=lambda x, landmarks, v, scale: landmarks.new_empty(landmarks.shape),
)
def gaussian_gather(x: Tensor, landmarks: Tensor, v: Tensor, scale: float) -> Tensor:
    """κ(scale·x, landmarks)ᵀ v: (b, h, m, d)."""
    out = landmarks.new_empty(landmarks.shape)
    few = pointer_to(landmarks.contiguous()), *long(landmarks.shape[2])
    library().gaussian_gather(shape_of(x, v), tokens_of(x), *few, tokens_of(v), ctypes.c_float(scale), pointer_to(out))
    return out


@operator("gaussian_spread(Tensor x, Tensor landmarks, Tensor u, float scale)", _one_map)
def gaussian_spread(x: Tensor, landmarks: Tensor, u: Tensor, scale: float) -> Tensor:
    """κ(scale·x, landmarks) u: (b, h, n, d)."""
    out = empty_tokens(x)
    few = pointer_to(landmarks.contiguous()), *long(landmarks.shape[2]), pointer_to(u.contiguous())
    library().gaussian_spread(shape_of(x, x), tokens_of(x), *few, ctypes.c_float(scale), tokens_of(out))
    return out


@operator(
    "newton_inverse(Tensor gram, Tensor alpha, int steps)",
    lambda gram, alpha, steps: 4 * steps * torch.Size(gram).numel() * gram[-1],
    shape=lambda gram, alpha, steps: gram.new_empty(gram.shape),
)
def newton_inverse(gram: Tensor, alpha: Tensor, steps: int) -> Tensor:
    """From `alpha` (..., 1, 1) times `gram` (..., m, m), ridge included."""
    out, m = gram.new_empty(gram.shape), gram.shape[-1]
    library().newton_inverse(
        pointer_to(gram.contiguous()),
        pointer_to(alpha.contiguous()),
        *long(gram.numel() // m**2, m),
        ctypes.c_int32(steps),
        pointer_to(out),
        ctypes.c_int32(torch.get_num_threads()),
    )
    return out


@operator(
    "newton_inverse_gradient(Tensor grad, Tensor gram, Tensor alpha, int steps)",
    lambda grad, gram, alpha, steps: 8 * steps * torch.Size(gram).numel() * gram[-1],
    shape=lambda grad, gram, alpha, steps: (gram.new_empty(gram.shape), alpha.new_empty(alpha.shape)),
    result="(Tensor, Tensor)",
)
def newton_inverse_gradient(grad: Tensor, gram: Tensor, alpha: Tensor, steps: int) -> tuple[Tensor, ...]:
    """Of `newton_inverse`, to gram and alpha; both matrices are symmetric."""
    grads, m = (gram.new_empty(gram.shape), alpha.new_empty(alpha.shape)), gram.shape[-1]
    library().newton_inverse_gradient(
        *(pointer_to(x.contiguous()) for x in (grad, gram, alpha)),
        *long(gram.numel() // m**2, m),
        ctypes.c_int32(steps),
        *map(pointer_to, grads),
        ctypes.c_int32(torch.get_num_threads()),
    )
    return grads
