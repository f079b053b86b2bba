"""Agent attention on CPUs, of biases that are written out and of the tables of which they are sums.

Letters: b batch, h heads, n tokens, d channels of a head, a agents.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.kernels import landmark_operators as operators
from subquad.kernels import mixer_operators
from subquad.kernels.cpu.calls import as_given, mixed
from subquad.kernels.cpu.library import kernel
from subquad.kernels.cpu.passing import (
    Bias,
    BiasGradient,
    Kept,
    bias_of,
    bias_of_tables,
    filters_of,
    long,
    map_of,
    numbers_of,
    of_one_dtype,
    parameter_of,
    shape_of,
    tokens_of,
)
from subquad.kernels.declaring import OPERATORS, empty_tokens, implements

Given = tuple[Tensor, Tensor, Tensor, Tensor]
"""Queries, agents, keys and values."""


def _forward(given: Given, biases: Sequence[Bias], kept: Sequence[Tensor] = ()) -> Tensor:
    q, agents, k, v = given
    dtype, (q, k, v) = q.dtype, of_one_dtype(q, k, v)
    out = empty_tokens(q)
    few = parameter_of(agents), *long(agents.shape[2])
    kernel("agent_attention", q.dtype)(
        shape_of(q, k), tokens_of(q), *few, *map(tokens_of, (k, v)), *biases, _kept(kept), tokens_of(out)
    )
    return out.to(dtype)


def _backward(
    grad: Tensor, given: Given, biases: Sequence[Bias], of_biases: Sequence[BiasGradient], kept: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """To queries, agents, keys and values; those of the biases are written into `of_biases`."""
    q, agents, k, v = given
    grad, q, k, v = of_one_dtype(grad, q, k, v)
    dq, dk, dv = map(empty_tokens, (q, k, v))
    dagents = agents.new_empty(agents.shape, dtype=torch.float32)
    kernel("agent_attention_gradient", q.dtype)(
        shape_of(q, k),
        tokens_of(q),
        parameter_of(agents),
        *long(agents.shape[2]),
        *map(tokens_of, (k, v)),
        *biases,
        _kept(kept),
        *map(tokens_of, (grad, dq)),
        numbers_of(dagents),
        *map(tokens_of, (dk, dv)),
        *of_biases,
    )
    return as_given((dq, dagents, dk, dv), given)


def _kept(tensors: Sequence[Tensor]) -> Kept:
    numbers = tuple(map(parameter_of, tensors))
    kept = Kept(*numbers)
    kept.owner = numbers
    return kept


def _written(biases: Sequence[Tensor]) -> tuple[Bias, ...]:
    return tuple(map(bias_of, biases))


def _tables(tables: Sequence[Any]) -> tuple[Bias, ...]:
    return bias_of_tables(*tables[:4]), bias_of_tables(*tables[4:])


@implements(operators.agent_attention, "native")
def agent_attention(q: Tensor, agents: Tensor, k: Tensor, v: Tensor, *biases: Tensor) -> Tensor:
    """Biases of keys and queries are (h, a, n)."""
    return _forward((q, agents, k, v), _written(biases))


@implements(operators.agent_attention_gradient, "native")
def agent_attention_gradient(
    grad: Tensor, q: Tensor, agents: Tensor, k: Tensor, v: Tensor, key_bias: Tensor, query_bias: Tensor
) -> tuple[Tensor, ...]:
    """Give the gradients of `agent_attention`; those of the biases are (h, n, a)."""
    biases = key_bias, query_bias
    # of each image, (b, h, n, a), summed in the end
    rooms = tuple(x.new_empty(*x.shape[:3], agents.shape[2], dtype=torch.float32) for x in (k, q))
    of_biases = tuple(BiasGradient(numbers_of(room)) for room in rooms)
    grads = _backward(grad, (q, agents, k, v), _written(biases), of_biases)
    summed = tuple(room[0] if len(room) == 1 else room.sum(dim=0) for room in rooms)
    return *grads, *as_given(summed, biases)


@implements(operators.agent_attention_of_tables, "native")
def agent_attention_of_tables(q: Tensor, agents: Tensor, k: Tensor, v: Tensor, *tables: Tensor | None) -> Tensor:
    """A bias is the sum of block (h, a, s, s), rows (h, a, y) and columns (h, a, x); prefix (h, a, p)."""
    return _forward((q, agents, k, v), _tables(tables))


@implements(OPERATORS["agent_attention_of_tables_keeping"], "native")
def agent_attention_of_tables_keeping(
    q: Tensor, agents: Tensor, k: Tensor, v: Tensor, *tables: Tensor | None
) -> tuple[Tensor, ...]:
    """Give what agents collected beside it, as `keeps` has it."""
    kept = operators.collected(agents, 2)
    return _forward((q, agents, k, v), _tables(tables), kept), *kept


@implements(OPERATORS["agent_attention_of_tables_keeping_gradient"], "native")
@implements(operators.agent_attention_of_tables_gradient, "native")
def agent_attention_of_tables_gradient(
    grad: Tensor, q: Tensor, agents: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """Give the gradients of `agent_attention_of_tables`; that of a prefix that is not there has no numbers.

    `rest` is the tables and, if it was kept, what agents collected.
    """
    tables, kept = rest[:8], rest[8:]
    like = tuple(agents.new_empty(0) if table is None else table for table in tables)
    rooms = tuple(table.new_empty(table.shape, dtype=torch.float32) for table in like)
    numbers = tuple(None if table is None else room for table, room in zip(tables, rooms, strict=True))
    of_biases = tuple(BiasGradient(numbers_of(None), *map(numbers_of, half)) for half in (numbers[:4], numbers[4:]))
    grads = _backward(grad, (q, agents, k, v), _tables(tables), of_biases, kept)
    return *grads, *as_given(rooms, like)


@implements(mixer_operators.agent_mixer, "native")
def agent_mixer(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """Behind the tokens stand the tables of both biases, the local branch, and `shape`, `bins` and `filters`."""
    *tables, weight, bias, shape, bins, filters = rest
    biases, branch = (bias_of_tables(*tables[:4]), bias_of_tables(*tables[4:])), filters_of(weight, bias, filters, q)
    return mixed("agent_mixer", (q, k, v), *biases, branch, map_of(q, shape), *long(*bins))
