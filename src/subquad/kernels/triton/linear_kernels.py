"""Linear attention and PolaFormer's, whose features have two halves: kernels for forward and backward.

A state (streams, d + 1, d) is all that queries see of the keys: for each half of the features φ(k)ᵀ v, and below it the
features' sum; means over the tokens are taken where it is read. Keys are reduced to it in one pass, in splits of the
sequence that are summed; queries read it in another. Backward, queries make the state's gradient, and keys read that.

Formulas: subquad.ops.linear_formula and subquad.ops.pola_formula.
"""

import triton
import triton.language as tl

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
def read_tempered(x, positions, sharpness, batch, head, rows, columns, count, D: tl.constexpr):
    """The tile of (x + positions) · sharpness, in fp32."""
    tile = read(x, batch, head, rows, columns, count, D).to(tl.float32)
    if positions is not None:
        tile += read(positions, batch, head, rows, columns, count, D).to(tl.float32)
    if sharpness is not None:
        tile *= read_row(sharpness, head, columns, D)[None, :]
    return tile


@triton.jit
def features(x, power, head, columns, KIND: tl.constexpr, D: tl.constexpr):
    """φ(x), and for PolaFormer the features of x's negative part."""
    if KIND == "pola":
        logarithm = tl.log2(tl.where(x == 0, 1.0, tl.abs(x)))
        size = tl.where(x == 0, 0.0, tl.exp2(read_row(power, head, columns, D)[None, :] * logarithm))
        return tl.where(x < 0, 0.0, size), tl.where(x < 0, size, 0.0)
    if KIND == "elu":
        plus = tl.where(x > 0, x + 1, tl.exp(tl.minimum(x, 0.0)))
        return plus, plus
    plus = tl.where(x < 0, 0.0, x)
    return plus, plus


@triton.jit
def to_tokens(x, dplus, dminus, power, head, columns, KIND: tl.constexpr, D: tl.constexpr):
    """The gradient to x from those to its features, and that to the powers of each token."""
    if KIND == "pola":
        p = read_row(power, head, columns, D)[None, :]
        logarithm = tl.log2(tl.where(x == 0, 1.0, tl.abs(x)))
        grown = tl.where(x < 0, dminus, dplus)
        # at 0 a power above 1 has neither slope nor growth
        slope = tl.where(x == 0, 0.0, p * tl.exp2((p - 1) * logarithm))
        growth = tl.where(x == 0, 0.0, tl.exp2(p * logarithm) * logarithm * 0.6931471805599453)
        return tl.where(x < 0, -grown, grown) * slope, grown * growth
    if KIND == "elu":
        dx = dplus * tl.where(x > 0, 1.0, tl.exp(tl.minimum(x, 0.0)))
        return dx, dx
    dx = tl.where(x > 0, dplus, 0.0)
    return dx, dx


@triton.jit
def state_kernel(
    k,
    v,
    positions,
    power,
    sharpness,
    state,
    heads,
    count,
    splits,
    chunk,
    KIND: tl.constexpr,
    STREAMS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Keys and values of a split to its state."""
    split, batch, head = program(splits, heads)
    columns = tl.arange(0, BLOCK_D)
    plus_state, minus_state = tl.zeros((BLOCK_D, BLOCK_D), tl.float32), tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    plus_sum, minus_sum = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    for start in range(split * chunk, tl.minimum(count, (split + 1) * chunk), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        x = read_tempered(k, positions, sharpness, batch, head, rows, columns, count, D)
        plus, minus = features(x, power, head, columns, KIND, D)
        plus = tl.where(rows[:, None] < count, plus, 0.0)
        values = read(v, batch, head, rows, columns, count, D)
        plus_state += sums_over_tokens(values, plus, DOT, PRECISION)
        plus_sum += tl.sum(plus, axis=0)
        if STREAMS == 2:
            minus_state += sums_over_tokens(values, minus, DOT, PRECISION)
            minus_sum += tl.sum(minus, axis=0)
    state += tl.program_id(0).to(tl.int64) * (STREAMS * (D + 1) * D)
    write_square(state, tl.trans(plus_state), columns, D)
    write_row(state, D, plus_sum, columns, D)
    if STREAMS == 2:
        write_square(state + (D + 1) * D, tl.trans(minus_state), columns, D)
        write_row(state + (D + 1) * D, D, minus_sum, columns, D)


@triton.jit
def read_state(state, columns, scale, STREAMS: tl.constexpr, D: tl.constexpr):
    """What features of one and of the other sign meet, (d, d) each, and the sums of the keys' features, times scale.

    The first half of PolaFormer's values is weighed by keys of the query's own sign, the rest by those of the other.
    """
    plus, plus_sum = read_square(state, columns, D) * scale, read_row(state, D, columns, D) * scale
    if STREAMS == 1:
        return plus, plus, plus_sum, plus_sum
    other = state + (D + 1) * D
    minus, minus_sum = read_square(other, columns, D) * scale, read_row(other, D, columns, D) * scale
    same = (columns < (D + 1) // 2)[None, :]
    return tl.where(same, plus, minus), tl.where(same, minus, plus), plus_sum, minus_sum


@triton.jit
def normalizers(plus, minus, plus_sum, minus_sum, present, columns, eps, STREAMS: tl.constexpr, D: tl.constexpr):
    """1 over the sum of a query's weights, for each of its values; 0 where there is no query."""
    own = tl.sum(plus * plus_sum[None, :], axis=1)
    if STREAMS == 1:
        weight = tl.broadcast_to(own[:, None], plus.shape) + eps
    else:
        own += tl.sum(minus * minus_sum[None, :], axis=1)
        cross = tl.sum(plus * minus_sum[None, :] + minus * plus_sum[None, :], axis=1)
        weight = tl.where((columns < (D + 1) // 2)[None, :], own[:, None], cross[:, None]) + eps
    return tl.where(present, 1 / tl.where(present, weight, 1.0), 0.0)


@triton.jit
def spread_kernel(
    q,
    out,
    power,
    sharpness,
    state,
    heads,
    count,
    splits,
    chunk,
    scale,
    eps,
    KIND: tl.constexpr,
    STREAMS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Queries of a split to outputs; `state` is that of all keys."""
    split, batch, head = program(splits, heads)
    columns = tl.arange(0, BLOCK_D)
    state += (batch * heads + head) * (STREAMS * (D + 1) * D)
    plus_state, minus_state, plus_sum, minus_sum = read_state(state, columns, scale, STREAMS, D)
    for start in range(split * chunk, tl.minimum(count, (split + 1) * chunk), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        x = read_tempered(q, None, sharpness, batch, head, rows, columns, count, D)
        plus, minus = features(x, power, head, columns, KIND, D)
        y = product(plus, plus_state, DOT, PRECISION)
        if STREAMS == 2:
            y += product(minus, minus_state, DOT, PRECISION)
        present = rows[:, None] < count
        y *= normalizers(plus, minus, plus_sum, minus_sum, present, columns, eps, STREAMS, D)
        write(out, y, batch, head, rows, columns, count, D)


@triton.jit
def spread_gradient_kernel(
    grad,
    q,
    dq,
    power,
    sharpness,
    state,
    dstate,
    dparameters,
    heads,
    count,
    splits,
    chunk,
    scale,
    eps,
    KIND: tl.constexpr,
    STREAMS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of a split's outputs to its queries, its share of the state (of means) and of power and sharpness."""
    split, batch, head = program(splits, heads)
    columns = tl.arange(0, BLOCK_D)
    state += (batch * heads + head) * (STREAMS * (D + 1) * D)
    plus_state, minus_state, plus_sum, minus_sum = read_state(state, columns, scale, STREAMS, D)
    same = (columns < (D + 1) // 2)[None, :]
    dplus_state, dminus_state = tl.zeros((BLOCK_D, BLOCK_D), tl.float32), tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    dplus_sum, dminus_sum = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    dpower, dsharpness = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    for start in range(split * chunk, tl.minimum(count, (split + 1) * chunk), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        x = read_tempered(q, None, sharpness, batch, head, rows, columns, count, D)
        plus, minus = features(x, power, head, columns, KIND, D)
        y = product(plus, plus_state, DOT, PRECISION)
        if STREAMS == 2:
            y += product(minus, minus_state, DOT, PRECISION)
        present = rows[:, None] < count
        weight = normalizers(plus, minus, plus_sum, minus_sum, present, columns, eps, STREAMS, D)
        grads = read(grad, batch, head, rows, columns, count, D)
        weighed = grads.to(tl.float32) * weight
        # what each normaliser takes off
        loss = weighed * y * weight
        if STREAMS == 2:
            dplus = product(weighed, tl.trans(plus_state), DOT, PRECISION)
        else:
            # all values of a query have the same weight: outside, what is taken off below cancels as it should
            dplus = product(grads, tl.trans(plus_state), DOT, PRECISION) * weight
        dminus = dplus
        if STREAMS == 2:
            own, cross = tl.sum(tl.where(same, loss, 0.0), axis=1), tl.sum(tl.where(same, 0.0, loss), axis=1)
            dplus -= own[:, None] * plus_sum[None, :] + cross[:, None] * minus_sum[None, :]
            dminus = product(weighed, tl.trans(minus_state), DOT, PRECISION)
            dminus -= own[:, None] * minus_sum[None, :] + cross[:, None] * plus_sum[None, :]
            dplus_sum -= tl.sum(plus * own[:, None] + minus * cross[:, None], axis=0)
            dminus_sum -= tl.sum(minus * own[:, None] + plus * cross[:, None], axis=0)
            dplus_state += product(tl.trans(plus), weighed, DOT, PRECISION)
            dminus_state += product(tl.trans(minus), weighed, DOT, PRECISION)
        else:
            own = tl.sum(loss, axis=1)
            dplus -= own[:, None] * plus_sum[None, :]
            dplus_sum -= tl.sum(plus * own[:, None], axis=0)
            dplus_state += sums_over_tokens(grads, plus * weight, DOT, PRECISION)
        dx, growth = to_tokens(x, dplus, dminus, power, head, columns, KIND, D)
        if KIND == "pola":
            dpower += tl.sum(growth, axis=0)
            dsharpness += tl.sum(dx * x, axis=0)
            dx *= read_row(sharpness, head, columns, D)[None, :]
        write(dq, dx, batch, head, rows, columns, count, D)
    place = tl.program_id(0).to(tl.int64)
    dstate += place * (STREAMS * (D + 1) * D)
    if STREAMS == 2:
        other = dstate + (D + 1) * D
        write_square(dstate, tl.where(same, dplus_state, dminus_state), columns, D)
        write_square(other, tl.where(same, dminus_state, dplus_state), columns, D)
        write_row(other, D, dminus_sum, columns, D)
        write_row(dparameters, 2 * place, dpower, columns, D)
        write_row(dparameters, 2 * place + 1, dsharpness, columns, D)
    else:
        write_square(dstate, tl.trans(dplus_state), columns, D)
    write_row(dstate, D, dplus_sum, columns, D)


@triton.jit
def state_gradient_kernel(
    k,
    v,
    dk,
    dv,
    positions,
    power,
    sharpness,
    dstate,
    dparameters,
    heads,
    count,
    splits,
    chunk,
    scale,
    KIND: tl.constexpr,
    STREAMS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient of the state to a split's keys and values, and its share of that to power and sharpness."""
    split, batch, head = program(splits, heads)
    columns = tl.arange(0, BLOCK_D)
    dstate += (batch * heads + head) * (STREAMS * (D + 1) * D)
    dplus_state, dplus_sum = read_square(dstate, columns, D) * scale, read_row(dstate, D, columns, D) * scale
    dminus_state, dminus_sum = dplus_state, dplus_sum
    if STREAMS == 2:
        other = dstate + (D + 1) * D
        dminus_state, dminus_sum = read_square(other, columns, D) * scale, read_row(other, D, columns, D) * scale
    dpower, dsharpness = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    for start in range(split * chunk, tl.minimum(count, (split + 1) * chunk), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        x = read_tempered(k, positions, sharpness, batch, head, rows, columns, count, D)
        plus, minus = features(x, power, head, columns, KIND, D)
        values = read(v, batch, head, rows, columns, count, D)
        dvalues = product(plus, dplus_state, DOT, PRECISION)
        dplus = product(values, tl.trans(dplus_state), DOT, PRECISION) + dplus_sum[None, :]
        dminus = dplus
        if STREAMS == 2:
            dvalues += product(minus, dminus_state, DOT, PRECISION)
            dminus = product(values, tl.trans(dminus_state), DOT, PRECISION) + dminus_sum[None, :]
        dx, growth = to_tokens(x, dplus, dminus, power, head, columns, KIND, D)
        if KIND == "pola":
            # absent tokens have x = 0 and neither slope nor growth
            dpower += tl.sum(growth, axis=0)
            dsharpness += tl.sum(dx * x, axis=0)
            dx *= read_row(sharpness, head, columns, D)[None, :]
        write(dk, dx, batch, head, rows, columns, count, D)
        write(dv, dvalues, batch, head, rows, columns, count, D)
    if STREAMS == 2:
        place = 2 * tl.program_id(0).to(tl.int64)
        write_row(dparameters, place, dpower, columns, D)
        write_row(dparameters, place + 1, dsharpness, columns, D)
