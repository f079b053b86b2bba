"""Attention by way of a few others on CPUs: agents, landmarks, Newton's steps.

Letters: b batch, h heads, n tokens, d channels of a head, a agents, m landmarks.
"""

import ctypes

import torch
from torch import Tensor

from subquad.kernels import landmark_operators as operators
from subquad.kernels.cpu.calls import as_given
from subquad.kernels.cpu.library import kernel
from subquad.kernels.cpu.passing import (
    Bias,
    bias_of,
    bias_of_tables,
    long,
    numbers_of,
    of_one_dtype,
    parameter_of,
    shape_of,
    tokens_of,
)
from subquad.kernels.declaring import empty_tokens, implements


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
