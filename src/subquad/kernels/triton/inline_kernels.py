"""InLine attention: kernels for forward and backward.

A state (d + 3, d) is all that queries see of the keys: Σ (k − r)ᵀ v for a reference r near the keys' mean, so that
nothing cancels where they share a large one, then Σ (k − r), Σ v and r itself. Splits of the sequence share r and their
states are summed.

Formulas: subquad.ops.inline_formula.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.declaring import empty_tokens
from subquad.kernels.triton.launch import split_of, tile_of, total
from subquad.kernels.triton.tiles import (
    product,
    program,
    read,
    read_row,
    read_square,
    sums_over_tokens,
    tokens_of,
    write,
    write_row,
    write_square,
)


@triton.jit
def state_kernel(
    k,
    v,
    state,
    heads,
    count,
    splits,
    chunk,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Keys and values of a split to its state."""
    split, batch, head = program(splits, heads)
    columns = tl.arange(0, BLOCK_D)
    first = read(k, batch, head, tl.arange(0, BLOCK), columns, count, D).to(tl.float32)
    reference = tl.sum(first, axis=0) / tl.minimum(count, BLOCK)
    products = tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    key_sum, value_sum = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    for start in range(split * chunk, tl.minimum(count, (split + 1) * chunk), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        keys = read(k, batch, head, rows, columns, count, D).to(tl.float32)
        keys = tl.where(rows[:, None] < count, keys - reference[None, :], 0.0)
        values = read(v, batch, head, rows, columns, count, D)
        products += sums_over_tokens(values, keys, DOT, PRECISION)
        key_sum += tl.sum(keys, axis=0)
        value_sum += tl.sum(values.to(tl.float32), axis=0)
    state += tl.program_id(0).to(tl.int64) * ((D + 3) * D)
    write_square(state, tl.trans(products), columns, D)
    write_row(state, D, key_sum, columns, D)
    write_row(state, D + 1, value_sum, columns, D)
    # splits are summed, and it is the same in all of them
    write_row(state, D + 2, tl.where(split == 0, reference, 0.0), columns, D)


@triton.jit
def spread_kernel(
    q,
    out,
    state,
    heads,
    count,
    splits,
    chunk,
    mean,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Queries of a split to outputs; `mean` is 1 over the number of keys."""
    split, batch, head = program(splits, heads)
    columns = tl.arange(0, BLOCK_D)
    state += (batch * heads + head) * ((D + 3) * D)
    value = read_row(state, D + 1, columns, D) * mean
    # keys' mean lies off the reference by `away`
    away = read_row(state, D, columns, D) * mean
    covariance = (read_square(state, columns, D) * mean - away[:, None] * value[None, :]) * scale
    for start in range(split * chunk, tl.minimum(count, (split + 1) * chunk), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        queries = read(q, batch, head, rows, columns, count, D)
        y = product(queries, covariance, DOT, PRECISION) + value[None, :]
        write(out, y, batch, head, rows, columns, count, D)


@triton.jit
def spread_gradient_kernel(
    grad,
    q,
    dq,
    state,
    dstate,
    heads,
    count,
    splits,
    chunk,
    mean,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of a split's outputs to its queries, and its share of those to covariance (d, d) and mean value."""
    split, batch, head = program(splits, heads)
    columns = tl.arange(0, BLOCK_D)
    state += (batch * heads + head) * ((D + 3) * D)
    value, away = read_row(state, D + 1, columns, D) * mean, read_row(state, D, columns, D) * mean
    covariance = (read_square(state, columns, D) * mean - away[:, None] * value[None, :]) * scale
    dcovariance, dvalue = tl.zeros((BLOCK_D, BLOCK_D), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    for start in range(split * chunk, tl.minimum(count, (split + 1) * chunk), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        queries = read(q, batch, head, rows, columns, count, D)
        grads = read(grad, batch, head, rows, columns, count, D)
        dqueries = product(grads, tl.trans(covariance), DOT, PRECISION)
        write(dq, dqueries, batch, head, rows, columns, count, D)
        dcovariance += sums_over_tokens(queries, grads, DOT, PRECISION)
        dvalue += tl.sum(grads.to(tl.float32), axis=0)
    dstate += tl.program_id(0).to(tl.int64) * ((D + 1) * D)
    write_square(dstate, dcovariance * scale, columns, D)
    write_row(dstate, D, dvalue, columns, D)


@triton.jit
def state_gradient_kernel(
    k,
    v,
    dk,
    dv,
    state,
    dstate,
    heads,
    count,
    splits,
    chunk,
    mean,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients of covariance and mean value to a split's keys and values."""
    split, batch, head = program(splits, heads)
    columns = tl.arange(0, BLOCK_D)
    state += (batch * heads + head) * ((D + 3) * D)
    dstate += (batch * heads + head) * ((D + 1) * D)
    key = read_row(state, D + 2, columns, D) + read_row(state, D, columns, D) * mean
    value = read_row(state, D + 1, columns, D) * mean
    dcovariance, dvalue = read_square(dstate, columns, D) * mean, read_row(dstate, D, columns, D) * mean
    for start in range(split * chunk, tl.minimum(count, (split + 1) * chunk), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        keys = read(k, batch, head, rows, columns, count, D).to(tl.float32) - key[None, :]
        values = read(v, batch, head, rows, columns, count, D).to(tl.float32) - value[None, :]
        dkeys = product(values, tl.trans(dcovariance), DOT, PRECISION)
        dvalues = product(keys, dcovariance, DOT, PRECISION) + dvalue[None, :]
        write(dk, dkeys, batch, head, rows, columns, count, D)
        write(dv, dvalues, batch, head, rows, columns, count, D)


def inline_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See subquad.ops.inline_attention."""
    return inline_attention_keeping(q, k, v)[0]


def inline_attention_keeping(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same, and the state of all keys (b·h, 1, d + 3, d), in fp32."""
    b, h, n, d = q.shape
    state, tile, out = _state(k, v), tile_of("inline.spread", q), empty_tokens(q)
    split = split_of(q, tile["BLOCK"])
    numbers = h, n, *split, 1 / k.shape[2], d**-0.5
    spread_kernel[b * h * split.pieces,](tokens_of(q), tokens_of(out), state, *numbers, **tile)
    return out, state


def inline_attention_gradient(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """To q, k and v."""
    return inline_attention_keeping_gradient(grad, q, k, v, _state(k, v))


def inline_attention_keeping_gradient(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Tensor
) -> tuple[Tensor, ...]:
    """The same, from the state that was kept: keys and values are read once."""
    (b, h, n, d), mean, state = q.shape, 1 / k.shape[2], state.contiguous()
    dq, dk, dv = map(empty_tokens, (q, k, v))
    of_queries, of_keys = (tile_of(f"inline.{name}", x, heavy=1) for name, x in (("dq", q), ("dk", k)))
    queries, keys = split_of(q, of_queries["BLOCK"]), split_of(k, of_keys["BLOCK"])
    dstate = state.new_empty(b * h, queries.pieces, d + 1, d)
    spread_gradient_kernel[b * h * queries.pieces,](
        *map(tokens_of, (grad, q, dq)), state, dstate, h, n, *queries, mean, d**-0.5, **of_queries
    )
    state_gradient_kernel[b * h * keys.pieces,](
        *map(tokens_of, (k, v, dk, dv)), state, total(dstate), h, k.shape[2], *keys, mean, **of_keys
    )
    return dq, dk, dv


def _state(k: Tensor, v: Tensor) -> Tensor:
    """(b·h, 1, d + 3, d) of all keys, in fp32."""
    b, h, n, d = k.shape
    tile = tile_of("inline.state", k)
    split = split_of(k, tile["BLOCK"])
    state = k.new_empty(b * h, split.pieces, d + 3, d, dtype=torch.float32)
    state_kernel[b * h * split.pieces,](tokens_of(k), tokens_of(v), state, h, n, *split, **tile)
    return total(state)[:, None]
