"""Attention that knows the map its tokens lie on, on CPUs.

Letters: b batch, h heads, n tokens, m blocks, d channels of a head.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from subquad.kernels import grid_operators as operators
from subquad.kernels import mixer_operators
from subquad.kernels.cpu.calls import answers, as_given, gradients, mixed
from subquad.kernels.cpu.library import kernel
from subquad.kernels.cpu.passing import (
    Blocks,
    as_it_lies,
    filters_of,
    long,
    numbers_of,
    of_one_dtype,
    parameter_of,
    shape_of,
    tokens_of,
)
from subquad.kernels.declaring import empty_tokens, implements


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
    dk, dv, dscale = empty_tokens(k), empty_tokens(v), scale.new_empty(scale.shape, dtype=torch.float32)
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
    dq, dstates, dscale = empty_tokens(q), *(x.new_empty(x.shape, dtype=torch.float32) for x in (states, scale))
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
    return answers("circulant_attention", q, k, v, *long(*shape))


@implements(operators.circulant_attention_gradient, "native")
def circulant_attention_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, shape: Sequence[int]
) -> tuple[Tensor, ...]:
    """Give the gradients of `circulant_attention` to q, k and v."""
    return gradients("circulant_attention_gradient", grad, q, k, v, *long(*shape))


@implements(mixer_operators.circulant_mixer, "native")
def circulant_mixer(q: Tensor, k: Tensor, v: Tensor, g: Tensor, shape: list[int]) -> Tensor:
    """Tokens of a map without prefix."""
    return mixed("circulant_mixer", (q, k, v, g), *long(*shape))


@implements(mixer_operators.mhla_mixer, "native")
def mhla_mixer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shape: list[int],
    pieces: list[int],
    least: float,
    filters: str,
) -> Tensor:
    """`mixing` (i, i) as it is learned, the scales (h, 1, d)."""
    learned, branch = map(as_it_lies, (mixing, q_scale, k_scale)), filters_of(weight, bias, filters, q)
    return mixed("mhla_mixer", (q, k, v), *learned, ctypes.c_float(least), branch, Blocks(*shape, *pieces))
