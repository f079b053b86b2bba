"""PolaFormer++'s attention: kernels for forward and backward. The letters are those of subquad.ops.polapp_formula.

A state (2, d + 2, d) is all that queries see of the keys: for the positive and the negative halves of features K̃ᵀ v,
below it Σ K, and below that m, by which K is lowered. Splits have an m of their own and are brought to the largest.
`mean` is one over the number of keys.

Of a stream with f = 1 / (F·z + ε), y = f F̃ S and e = g Sᵀ: dF = f e turned back + dz z with dz = -f (y·g),
dS = F̃ᵀ (f g), dΣ = Σ dz F. Largest exponents divide out and are constants. The first half of the channels of g is one
stream's, the rest that of the other one, which sees negated queries.
"""

import triton
import triton.language as tl

from subquad.kernels.triton.state_kernels import partners_of, turned_back
from subquad.kernels.triton.tiles import (
    product,
    program,
    read,
    read_row,
    read_square,
    sums_over_tokens,
    write,
    write_row,
    write_square,
)


@triton.jit
def grown(x, less):
    """(e^x − 1) e^less for x from 0 on: without the difference where that would cancel; 0 where x is, whatever m."""
    series = 1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x * (1 / 5040))))))
    # where x is 0 `less` may be anything
    down = tl.exp(tl.minimum(less, 0.0))
    size = tl.where(x < 0.35, x * series * down, tl.exp(tl.minimum(x + less, 0.0)) - down)
    return tl.where(x > 0, size, x * 0.0)


@triton.jit
def positive(x):
    """What is positive of numbers; NaN stays NaN."""
    return tl.where(x < 0, 0.0, x)


@triton.jit
def read_with_partners(x, batch, head, rows, columns, count, TURN: tl.constexpr, D: tl.constexpr):
    """Tokens in fp32, and those that their channels are turned with, which are these where nothing turns."""
    tokens = read(x, batch, head, rows, columns, count, D).to(tl.float32)
    if TURN == "none":
        return tokens, tokens
    else:
        return tokens, read(x, batch, head, rows, partners_of(columns, TURN, D), count, D).to(tl.float32)


@triton.jit
def turned_by(features, others, cos, sin, batch, head, rows, columns, count, TURN: tl.constexpr, D: tl.constexpr):
    """Features, turned with those of their partners."""
    # what stands behind a return is compiled all the same, and there are no tables
    if TURN == "none":
        return features
    else:
        along = read(cos, batch, head, rows, columns, count, D).to(tl.float32)
        across = read(sin, batch, head, rows, columns, count, D).to(tl.float32)
        return features * along + others * across


@triton.jit
def lowered_keys(tokens, others, plus_most, minus_most):
    """K e^-m of both halves, and those of the partners, whose m is the same."""
    return (
        grown(positive(tokens), -plus_most[None, :]),
        grown(positive(-tokens), -minus_most[None, :]),
        grown(positive(others), -plus_most[None, :]),
        grown(positive(-others), -minus_most[None, :]),
    )


@triton.jit
def polapp_state_kernel(
    k,
    v,
    cos,
    sin,
    other_cos,
    other_sin,
    state,
    heads,
    count,
    splits,
    chunk,
    TURN: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Keys and values of a split to its state; m grows on the way, and what was summed is lowered with it."""
    split, batch, head = program(splits, heads)
    columns = tl.arange(0, BLOCK_D)
    plus_state, minus_state = tl.zeros((BLOCK_D, BLOCK_D), tl.float32), tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    plus_sum, minus_sum = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    plus_most, minus_most = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    for start in range(split * chunk, tl.minimum(count, (split + 1) * chunk), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        tokens, others = read_with_partners(k, batch, head, rows, columns, count, TURN, D)
        higher_plus = tl.maximum(plus_most, tl.max(tl.maximum(tokens, others), axis=0))
        higher_minus = tl.maximum(minus_most, tl.max(tl.maximum(-tokens, -others), axis=0))
        plus_kept, minus_kept = tl.exp(plus_most - higher_plus), tl.exp(minus_most - higher_minus)
        plus_most, minus_most = higher_plus, higher_minus
        plus, minus, other_plus, other_minus = lowered_keys(tokens, others, plus_most, minus_most)
        plus_sum = plus_sum * plus_kept + tl.sum(plus, axis=0)
        minus_sum = minus_sum * minus_kept + tl.sum(minus, axis=0)
        plus = turned_by(plus, other_plus, cos, sin, batch, head, rows, columns, count, TURN, D)
        minus = turned_by(minus, other_minus, other_cos, other_sin, batch, head, rows, columns, count, TURN, D)
        values = read(v, batch, head, rows, columns, count, D)
        plus_state = plus_state * plus_kept[None, :] + sums_over_tokens(values, plus, DOT, PRECISION)
        minus_state = minus_state * minus_kept[None, :] + sums_over_tokens(values, minus, DOT, PRECISION)
    state += tl.program_id(0).to(tl.int64) * (2 * (D + 2) * D)
    write_square(state, tl.trans(plus_state), columns, D)
    write_row(state, D, plus_sum, columns, D)
    write_row(state, D + 1, plus_most, columns, D)
    state += (D + 2) * D
    write_square(state, tl.trans(minus_state), columns, D)
    write_row(state, D, minus_sum, columns, D)
    write_row(state, D + 1, minus_most, columns, D)


@triton.jit
def lowered_queries(
    tokens, others, plus_most, minus_most, plus_spike, minus_spike, other_plus_spike, other_minus_spike
):
    """F e^(m - m') of both halves, those of the partners, m', and F's exponentials alone, for its gradient."""
    plus, minus = positive(tokens) * plus_spike[None, :], positive(-tokens) * minus_spike[None, :]
    higher = tl.where(plus > 0, plus + plus_most[None, :], tl.where(minus > 0, minus + minus_most[None, :], 0.0))
    added = tl.max(higher, axis=1)
    plus_less, minus_less = plus_most[None, :] - added[:, None], minus_most[None, :] - added[:, None]
    other_plus = positive(others) * other_plus_spike[None, :]
    other_minus = positive(-others) * other_minus_spike[None, :]
    return (
        grown(plus, plus_less),
        grown(minus, minus_less),
        grown(other_plus, plus_less),
        grown(other_minus, minus_less),
        added,
        # of the half that an entry is in
        tl.exp(tl.where(plus > 0, plus + plus_less, tl.where(minus > 0, minus + minus_less, float("-inf")))),
    )


@triton.jit
def stream_features(
    tokens,
    others,
    spikes,
    state,
    cos,
    sin,
    other_cos,
    other_sin,
    batch,
    head,
    rows,
    columns,
    count,
    TURN: tl.constexpr,
    D: tl.constexpr,
):
    """A stream's F of both halves, these turned, m' and F's exponentials; `spikes` are (h, 2, d)."""
    partners = columns if TURN == "none" else partners_of(columns, TURN, D)
    plus, minus, other_plus, other_minus, added, slope = lowered_queries(
        tokens,
        others,
        read_row(state, D + 1, columns, D),
        read_row(state + (D + 2) * D, D + 1, columns, D),
        read_row(spikes, 2 * head, columns, D),
        read_row(spikes, 2 * head + 1, columns, D),
        read_row(spikes, 2 * head, partners, D),
        read_row(spikes, 2 * head + 1, partners, D),
    )
    turned_plus = turned_by(plus, other_plus, cos, sin, batch, head, rows, columns, count, TURN, D)
    turned_minus = turned_by(minus, other_minus, other_cos, other_sin, batch, head, rows, columns, count, TURN, D)
    return plus, minus, turned_plus, turned_minus, added, slope


@triton.jit
def divisor(plus, minus, added, state, columns, mean, eps, D: tl.constexpr):
    """F·z + ε, lowered as F is."""
    plus_sum, minus_sum = read_row(state, D, columns, D), read_row(state + (D + 2) * D, D, columns, D)
    z = tl.sum(plus * (plus_sum * mean)[None, :] + minus * (minus_sum * mean)[None, :], axis=1)
    return z + tl.maximum(eps * tl.exp(-added), 1.1754943508222875e-38)


@triton.jit
def polapp_answers_kernel(
    q,
    out,
    cos,
    sin,
    other_cos,
    other_sin,
    same,
    opposite,
    state,
    heads,
    count,
    splits,
    chunk,
    mean,
    eps,
    TURN: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Queries of a split to outputs."""
    split, batch, head = program(splits, heads)
    columns = tl.arange(0, BLOCK_D)
    state += (batch * heads + head) * (2 * (D + 2) * D)
    plus_state = read_square(state, columns, D) * mean
    minus_state = read_square(state + (D + 2) * D, columns, D) * mean
    for start in range(split * chunk, tl.minimum(count, (split + 1) * chunk), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        tokens, others = read_with_partners(q, batch, head, rows, columns, count, TURN, D)
        plus, minus, turned_plus, turned_minus, added, _ = stream_features(
            tokens, others, same, state, cos, sin, other_cos, other_sin, batch, head, rows, columns, count, TURN, D
        )
        z = divisor(plus, minus, added, state, columns, mean, eps, D)
        first = product(turned_plus / z[:, None], plus_state, DOT, PRECISION)
        first += product(turned_minus / z[:, None], minus_state, DOT, PRECISION)
        plus, minus, turned_plus, turned_minus, added, _ = stream_features(
            -tokens,
            -others,
            opposite,
            state,
            cos,
            sin,
            other_cos,
            other_sin,
            batch,
            head,
            rows,
            columns,
            count,
            TURN,
            D,
        )
        z = divisor(plus, minus, added, state, columns, mean, eps, D)
        rest = product(turned_plus / z[:, None], plus_state, DOT, PRECISION)
        rest += product(turned_minus / z[:, None], minus_state, DOT, PRECISION)
        both = tl.where(columns[None, :] < (D + 1) // 2, first, rest)
        write(out, both, batch, head, rows, columns, count, D)


@triton.jit
def polapp_query_gradient_kernel(
    grad,
    q,
    dq,
    cos,
    sin,
    other_cos,
    other_sin,
    spikes,
    state,
    dstate,
    heads,
    count,
    splits,
    chunk,
    mean,
    eps,
    STREAM: tl.constexpr,
    TURN: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What a split's gradients come to in one stream: of queries, added to the other one's, and of the state as read.

    `dstate` (2, d + 2, d) of a split is dS and dΣ of both halves, and that of the spikiness below.
    """
    split, batch, head = program(splits, heads)
    columns = tl.arange(0, BLOCK_D)
    state += (batch * heads + head) * (2 * (D + 2) * D)
    other = state + (D + 2) * D
    # the half of the values that this stream weighs
    own = (columns < (D + 1) // 2) if STREAM == 0 else (columns >= (D + 1) // 2)
    plus_state, minus_state = read_square(state, columns, D) * mean, read_square(other, columns, D) * mean
    dplus_state, dminus_state = tl.zeros((BLOCK_D, BLOCK_D), tl.float32), tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    dplus_sum, dminus_sum = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    dplus_spike, dminus_spike = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    for start in range(split * chunk, tl.minimum(count, (split + 1) * chunk), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        tokens, others = read_with_partners(q, batch, head, rows, columns, count, TURN, D)
        given = read(grad, batch, head, rows, columns, count, D)
        grads = tl.where(own[None, :], given.to(tl.float32), 0.0)
        if STREAM == 1:
            tokens, others = -tokens, -others
        plus, minus, turned_plus, turned_minus, added, slope = stream_features(
            tokens, others, spikes, state, cos, sin, other_cos, other_sin, batch, head, rows, columns, count, TURN, D
        )
        inverse = 1 / divisor(plus, minus, added, state, columns, mean, eps, D)
        y = product(turned_plus * inverse[:, None], plus_state, DOT, PRECISION)
        y += product(turned_minus * inverse[:, None], minus_state, DOT, PRECISION)
        dz = -inverse * tl.sum(y * grads, axis=1)
        dplus_state += sums_over_tokens(given, turned_plus * inverse[:, None], DOT, PRECISION)
        dminus_state += sums_over_tokens(given, turned_minus * inverse[:, None], DOT, PRECISION)
        dplus_sum += tl.sum(plus * dz[:, None], axis=0)
        dminus_sum += tl.sum(minus * dz[:, None], axis=0)
        dplus = turned_back(grads, state, mean, cos, sin, batch, head, rows, columns, count, TURN, D, DOT, PRECISION)
        dplus = dplus * inverse[:, None] + dz[:, None] * (read_row(state, D, columns, D) * mean)[None, :]
        dminus = turned_back(
            grads, other, mean, other_cos, other_sin, batch, head, rows, columns, count, TURN, D, DOT, PRECISION
        )
        dminus = dminus * inverse[:, None] + dz[:, None] * (read_row(other, D, columns, D) * mean)[None, :]
        dplus, dminus = tl.where(tokens > 0, dplus * slope, 0.0), tl.where(tokens < 0, dminus * slope, 0.0)
        dplus_spike += tl.sum(dplus * tokens, axis=0)
        dminus_spike -= tl.sum(dminus * tokens, axis=0)
        more = dplus * read_row(spikes, 2 * head, columns, D)[None, :]
        more -= dminus * read_row(spikes, 2 * head + 1, columns, D)[None, :]
        if STREAM == 1:
            more = read(dq, batch, head, rows, columns, count, D).to(tl.float32) - more
        write(dq, more, batch, head, rows, columns, count, D)
    dstate += tl.program_id(0).to(tl.int64) * (2 * (D + 2) * D)
    # of the other half's values there are sums as well, which are the other stream's
    write_square(dstate, tl.where(own[None, :], tl.trans(dplus_state), 0.0), columns, D)
    write_row(dstate, D, dplus_sum, columns, D)
    write_row(dstate, D + 1, dplus_spike, columns, D)
    dstate += (D + 2) * D
    write_square(dstate, tl.where(own[None, :], tl.trans(dminus_state), 0.0), columns, D)
    write_row(dstate, D, dminus_sum, columns, D)
    write_row(dstate, D + 1, dminus_spike, columns, D)


@triton.jit
def polapp_key_gradient_kernel(
    k,
    v,
    dk,
    dv,
    cos,
    sin,
    other_cos,
    other_sin,
    state,
    dstate,
    heads,
    count,
    splits,
    chunk,
    mean,
    TURN: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients of the state, of both streams together, to a split's keys and values."""
    split, batch, head = program(splits, heads)
    columns, image = tl.arange(0, BLOCK_D), batch * heads + head
    state += image * (2 * (D + 2) * D)
    dstate += image * (2 * (D + 2) * D)
    dother = dstate + (D + 2) * D
    plus_most, minus_most = read_row(state, D + 1, columns, D), read_row(state + (D + 2) * D, D + 1, columns, D)
    for start in range(split * chunk, tl.minimum(count, (split + 1) * chunk), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        tokens, others = read_with_partners(k, batch, head, rows, columns, count, TURN, D)
        values = read(v, batch, head, rows, columns, count, D)
        plus, minus, other_plus, other_minus = lowered_keys(tokens, others, plus_most, minus_most)
        plus = turned_by(plus, other_plus, cos, sin, batch, head, rows, columns, count, TURN, D)
        minus = turned_by(minus, other_minus, other_cos, other_sin, batch, head, rows, columns, count, TURN, D)
        dvalues = product(plus, read_square(dstate, columns, D) * mean, DOT, PRECISION)
        dvalues += product(minus, read_square(dother, columns, D) * mean, DOT, PRECISION)
        write(dv, dvalues, batch, head, rows, columns, count, D)
        dplus = turned_back(values, dstate, mean, cos, sin, batch, head, rows, columns, count, TURN, D, DOT, PRECISION)
        dplus += (read_row(dstate, D, columns, D) * mean)[None, :]
        dminus = turned_back(
            values, dother, mean, other_cos, other_sin, batch, head, rows, columns, count, TURN, D, DOT, PRECISION
        )
        dminus += (read_row(dother, D, columns, D) * mean)[None, :]
        plus_slope = tl.exp(tl.minimum(tokens - plus_most[None, :], 0.0))
        minus_slope = tl.exp(tl.minimum(-tokens - minus_most[None, :], 0.0))
        dkeys = tl.where(tokens > 0, dplus * plus_slope, tl.where(tokens < 0, -dminus * minus_slope, 0.0))
        write(dk, dkeys, batch, head, rows, columns, count, D)
