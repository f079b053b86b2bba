"""Calls of kernels that make tokens of queries, keys and values, and gradients to these.

Tokens are fp32 or bf16, and what is given back has the dtype of the first of them; parameters, states and whatever is
summed are fp32.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from subquad.kernels.cpu.library import kernel
from subquad.kernels.cpu.passing import of_one_dtype, shape_of, tokens_of
from subquad.kernels.declaring import empty_tokens


def answers(name: str, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
    """What the kernel `name` makes of tokens (b, h, n, d) and its other arguments, in the dtype of the queries."""
    dtype, (q, k, v) = q.dtype, of_one_dtype(q, k, v)
    out = empty_tokens(q)
    kernel(name, q.dtype)(shape_of(q, k), *map(tokens_of, (q, k, v, out)), *arguments)
    return out if out.dtype == dtype else out.to(dtype)


def mixed(name: str, tokens: Sequence[Tensor], *arguments: Any) -> Tensor:
    """What the kernel `name` of a whole mechanism makes of queries, keys or values, other tokens, and its arguments."""
    dtype, tokens = tokens[0].dtype, of_one_dtype(*tokens)
    out = empty_tokens(tokens[0])
    kernel(name, out.dtype)(shape_of(*tokens[:2]), *map(tokens_of, tokens), *arguments, tokens_of(out))
    return out if dtype == out.dtype else out.to(dtype)


def gradients(name: str, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Give what the kernel `name` makes of these: gradients to q, k and v, in the dtypes of what they are to."""
    given, (grad, q, k, v) = (q, k, v), of_one_dtype(grad, q, k, v)
    grads = tuple(map(empty_tokens, (q, k, v)))
    kernel(name, q.dtype)(shape_of(q, k), *map(tokens_of, (q, k, v, grad, *grads)), *arguments)
    return as_given(grads, given)


def as_given(grads: tuple[Tensor, ...], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gradients in the dtypes of what they are the gradients to."""
    return tuple(grad.to(tensor.dtype) for grad, tensor in zip(grads, tensors, strict=True))
