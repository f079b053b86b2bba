"""Attention by a state of features that may be turned, MLLA's, MALA, RALA and NaLa: kernels for forward and backward.

A state (streams, d + 3, d) is all that queries see of the keys: for each half of the features φ̃(k)ᵀ v, of turned
ones, and below it Σ φ(k) of such that are not turned. NaLa's features have two halves. MALA takes off the values' mean,
which is in the row below. Of RALA the sums are weighed by softmax(s φ(k)·ḡ): there that row is s ḡ, of the mean of all
queries' features, and the last the logarithm of the weights' sum; splits are weighed by that and summed.

A rotation gives each channel x cos + x' sin of a partner x', whose features are made from what is read at its place.

With f = 1 / (z + ε) [+ 1], y = f φ̃(q) S [− z v̄]: e = f g Sᵀ, dz = −f² g·φ̃(q) S or −(f − 1)² g·φ̃(q) S − g·v̄,
dφq = e turned back + z̄ dz; dS = φ̃qᵀ (f g), dz̄ = Σ dz φq, dv̄ = −Σ z g; dφk = ω (v dSᵀ turned back + dz̄),
dv = ω φ̃k dS + dv̄ / n with ω = 1/n. Where ω is RALA's: h = φ̃k dS·v + φk·dz̄, dφk += ω (h − Σ ω h) s ḡ, and what
queries share is dḡ = s Σ ω (h − Σ ω h) φk.

Formulas: those of subquad.ops for each.
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
def partners_of(columns, TURN: tl.constexpr, D: tl.constexpr):
    """The channel that each is turned with."""
    if TURN == "pairs":
        return columns ^ 1
    half = tl.where(columns < D // 2, columns + D // 2, columns - D // 2)
    return tl.where(columns < D, half, columns)


@triton.jit
def features(x, KIND: tl.constexpr, QUERIES: tl.constexpr):
    """φ(x), and for NaLa the features of x's negative part."""
    if KIND == "elu":
        plus = tl.where(x > 0, x + 1, tl.exp(tl.minimum(x, 0.0)))
        return plus, plus
    if QUERIES:
        _, power, logarithm = direction(x)
        size = tl.where(x == 0, 0.0, tl.exp2(power[:, None] * logarithm))
    else:
        size = tl.abs(x * x * x)
    return tl.where(x > 0, size, 0.0), tl.where(x < 0, size, 0.0)


@triton.jit
def direction(x):
    """Of queries their norm, NaLa's power 3 (1/2 + tanh r), and log₂ |x| / r, which is 0 where x is."""
    norm = tl.sqrt(tl.maximum(tl.sum(x * x, axis=1), 1.1754943508222875e-38))
    # tanh r of r >= 0
    falling = tl.exp(-2 * norm)
    power = 3 * (0.5 + (1 - falling) / (1 + falling))
    return norm, power, tl.where(x == 0, 0.0, tl.log2(tl.where(x == 0, 1.0, tl.abs(x))) - tl.log2(norm)[:, None])


@triton.jit
def to_tokens(x, dplus, dminus, KIND: tl.constexpr, QUERIES: tl.constexpr):
    """The gradient to x from those to its features."""
    if KIND == "elu":
        return dplus * tl.where(x > 0, 1.0, tl.exp(tl.minimum(x, 0.0)))
    grown = tl.where(x > 0, dplus, tl.where(x < 0, -dminus, 0.0))
    if not QUERIES:
        return grown * 3 * x * x
    norm, power, logarithm = direction(x)
    safe = tl.where(x == 0, 1.0, x)
    size = tl.where(x == 0, 0.0, tl.exp2(power[:, None] * logarithm))
    # of |x|, whose sign is in `grown` already: once more makes it that of the feature
    gained = tl.where(x < 0, -grown, grown) * size
    falling = tl.exp(-2 * norm)
    tanh = (1 - falling) / (1 + falling)
    slope = 3 * (1 - tanh * tanh)
    of_norm = tl.sum(gained * (slope[:, None] * logarithm * 0.6931471805599453 - (power / norm)[:, None]), axis=1)
    return gained * power[:, None] / safe + x * (of_norm / norm)[:, None]


@triton.jit
def turned_features(
    x,
    cos,
    sin,
    batch,
    head,
    rows,
    columns,
    count,
    KIND: tl.constexpr,
    QUERIES: tl.constexpr,
    TURN: tl.constexpr,
    D: tl.constexpr,
):
    """Tokens in fp32, their features and these turned: (x, φ⁺, φ⁻, φ̃⁺, φ̃⁻)."""
    tokens = read(x, batch, head, rows, columns, count, D).to(tl.float32)
    plus, minus = features(tokens, KIND, QUERIES)
    # what stands behind a return is compiled all the same, and there are no tables
    if TURN == "none":
        return tokens, plus, minus, plus, minus
    else:
        others = read(x, batch, head, rows, partners_of(columns, TURN, D), count, D).to(tl.float32)
        other_plus, other_minus = features(others, KIND, QUERIES)
        along = read(cos, batch, head, rows, columns, count, D).to(tl.float32)
        across = read(sin, batch, head, rows, columns, count, D).to(tl.float32)
        turned_plus, turned_minus = plus * along + other_plus * across, minus * along + other_minus * across
        return tokens, plus, minus, turned_plus, turned_minus


@triton.jit
def turned_back(
    left,
    state,
    scale,
    cos,
    sin,
    batch,
    head,
    rows,
    columns,
    count,
    TURN: tl.constexpr,
    D: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Give left Sᵀ, turned back; of a partner it is the product with S whose rows stand at their partners' places."""
    straight = product(left, tl.trans(read_square(state, columns, D) * scale), DOT, PRECISION)
    if TURN == "none":
        return straight
    else:
        partners = partners_of(columns, TURN, D)
        inside = (partners[:, None] < D) & (columns[None, :] < D)
        swapped = tl.load(state + partners[:, None] * D + columns[None, :], mask=inside, other=0.0) * scale
        crossed = product(left, tl.trans(swapped), DOT, PRECISION)
        along = read(cos, batch, head, rows, columns, count, D).to(tl.float32)
        across = read(sin, batch, head, rows, partners, count, D).to(tl.float32)
        return straight * along + crossed * across


@triton.jit
def read_state(state, columns, scale, mean, STREAMS: tl.constexpr, D: tl.constexpr):
    """A head's state: S and Σ φ(k) of both halves times `scale`, and the row of values times `mean`."""
    other = state + (STREAMS - 1) * (D + 3) * D
    return (
        read_square(state, columns, D) * scale,
        read_row(state, D, columns, D) * scale,
        read_square(other, columns, D) * scale,
        read_row(other, D, columns, D) * scale,
        read_row(state, D + 1, columns, D) * mean,
    )


@triton.jit
def query_sum_kernel(
    q,
    sums,
    heads,
    count,
    splits,
    chunk,
    KIND: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Σ φ(q) of a split."""
    split, batch, head = program(splits, heads)
    columns, total = tl.arange(0, BLOCK_D), tl.zeros((BLOCK_D,), tl.float32)
    for start in range(split * chunk, tl.minimum(count, (split + 1) * chunk), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        plus, _ = features(read(q, batch, head, rows, columns, count, D).to(tl.float32), KIND, True)
        total += tl.sum(tl.where(rows[:, None] < count, plus, 0.0), axis=0)
    write_row(sums, tl.program_id(0).to(tl.int64), total, columns, D)


@triton.jit
def state_kernel(
    k,
    v,
    cos,
    sin,
    mean_query,
    state,
    normalizer,
    heads,
    count,
    splits,
    chunk,
    KIND: tl.constexpr,
    STREAMS: tl.constexpr,
    FORM: tl.constexpr,
    TURN: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Keys and values of a split to its sums; where these are weighed, to means and the logarithm of the weights."""
    split, batch, head = program(splits, heads)
    columns = tl.arange(0, BLOCK_D)
    plus_state, minus_state = tl.zeros((BLOCK_D, BLOCK_D), tl.float32), tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    plus_sum, minus_sum = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    value_sum = tl.zeros((BLOCK_D,), tl.float32)
    highest, weight = tl.full((1,), float("-inf"), tl.float32), tl.zeros((1,), tl.float32)
    for start in range(split * chunk, tl.minimum(count, (split + 1) * chunk), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        _, plus, minus, turned_plus, turned_minus = turned_features(
            k, cos, sin, batch, head, rows, columns, count, KIND, False, TURN, D
        )
        present = rows < count
        share = tl.where(present, 1.0, 0.0)
        values = read(v, batch, head, rows, columns, count, D)
        if FORM == "weighed":
            scores = tl.sum(plus * read_row(mean_query, batch * heads + head, columns, D)[None, :], axis=1)
            scores = tl.where(present, scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, axis=0))
            share, kept = tl.exp(scores - higher), tl.exp(highest - higher)
            weight, highest = weight * kept + tl.sum(share, axis=0), higher
            plus_state, plus_sum = plus_state * kept[:, None], plus_sum * kept
        plus_state += sums_over_tokens(values, turned_plus * share[:, None], DOT, PRECISION)
        plus_sum += tl.sum(plus * share[:, None], axis=0)
        if STREAMS == 2:
            minus_state += sums_over_tokens(values, turned_minus * share[:, None], DOT, PRECISION)
            minus_sum += tl.sum(minus * share[:, None], axis=0)
        if FORM == "subtracted":
            value_sum += tl.sum(values.to(tl.float32), axis=0)
    place = tl.program_id(0).to(tl.int64)
    state += place * (STREAMS * (D + 3) * D)
    if FORM == "weighed":
        plus_state, plus_sum = plus_state / weight[:, None], plus_sum / weight
        tl.store(normalizer + place + tl.arange(0, 1), highest + tl.log(weight))
    write_square(state, tl.trans(plus_state), columns, D)
    write_row(state, D, plus_sum, columns, D)
    write_row(state, D + 1, value_sum, columns, D)
    if STREAMS == 2:
        write_square(state + (D + 3) * D, tl.trans(minus_state), columns, D)
        write_row(state + (D + 3) * D, D, minus_sum, columns, D)


@triton.jit
def answers_kernel(
    q,
    out,
    cos,
    sin,
    state,
    heads,
    count,
    splits,
    chunk,
    scale,
    mean,
    eps,
    KIND: tl.constexpr,
    STREAMS: tl.constexpr,
    FORM: tl.constexpr,
    TURN: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Queries of a split to outputs; of all keys' state features are read times `scale` and values times `mean`."""
    split, batch, head = program(splits, heads)
    columns = tl.arange(0, BLOCK_D)
    state += (batch * heads + head) * (STREAMS * (D + 3) * D)
    plus_state, plus_sum, minus_state, minus_sum, value = read_state(state, columns, scale, mean, STREAMS, D)
    for start in range(split * chunk, tl.minimum(count, (split + 1) * chunk), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        _, plus, minus, turned_plus, turned_minus = turned_features(
            q, cos, sin, batch, head, rows, columns, count, KIND, True, TURN, D
        )
        z, y = tl.sum(plus * plus_sum[None, :], axis=1), product(turned_plus, plus_state, DOT, PRECISION)
        if STREAMS == 2:
            z += tl.sum(minus * minus_sum[None, :], axis=1)
            y += product(turned_minus, minus_state, DOT, PRECISION)
        factor = 1 / tl.where(rows < count, z + eps, 1.0)
        if FORM == "subtracted":
            y = y * (1 + factor)[:, None] - z[:, None] * value[None, :]
        else:
            y *= factor[:, None]
        write(out, y, batch, head, rows, columns, count, D)


@triton.jit
def query_gradient_kernel(
    grad,
    q,
    dq,
    cos,
    sin,
    state,
    dmean,
    dstate,
    heads,
    count,
    splits,
    chunk,
    scale,
    mean,
    eps,
    KIND: tl.constexpr,
    STREAMS: tl.constexpr,
    FORM: tl.constexpr,
    TURN: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of a split's outputs to its queries and its share of those to the state as it is read.

    Each is absent where it is not wanted; `dmean` (b·h, d) is a gradient that all queries' features share.
    """
    split, batch, head = program(splits, heads)
    columns = tl.arange(0, BLOCK_D)
    state += (batch * heads + head) * (STREAMS * (D + 3) * D)
    other = state + (STREAMS - 1) * (D + 3) * D
    plus_state, plus_sum, minus_state, minus_sum, value = read_state(state, columns, scale, mean, STREAMS, D)
    dplus_state, dminus_state = tl.zeros((BLOCK_D, BLOCK_D), tl.float32), tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    dplus_sum, dminus_sum = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    dvalue = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(split * chunk, tl.minimum(count, (split + 1) * chunk), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        x, plus, minus, turned_plus, turned_minus = turned_features(
            q, cos, sin, batch, head, rows, columns, count, KIND, True, TURN, D
        )
        z, y = tl.sum(plus * plus_sum[None, :], axis=1), product(turned_plus, plus_state, DOT, PRECISION)
        if STREAMS == 2:
            z += tl.sum(minus * minus_sum[None, :], axis=1)
            y += product(turned_minus, minus_state, DOT, PRECISION)
        # where there is no query its gradient is zeros, and so is all that follows of it
        given = read(grad, batch, head, rows, columns, count, D)
        grads = given.to(tl.float32)
        inverse = 1 / tl.where(rows < count, z + eps, 1.0)
        dz = -inverse * inverse * tl.sum(y * grads, axis=1)
        factor = inverse
        if FORM == "subtracted":
            factor = 1 + inverse
            dz -= tl.sum(grads * value[None, :], axis=1)
            dvalue -= tl.sum(grads * z[:, None], axis=0)
        if dstate is not None:
            dplus_state += sums_over_tokens(given, turned_plus * factor[:, None], DOT, PRECISION)
            dplus_sum += tl.sum(plus * dz[:, None], axis=0)
            if STREAMS == 2:
                dminus_state += sums_over_tokens(given, turned_minus * factor[:, None], DOT, PRECISION)
                dminus_sum += tl.sum(minus * dz[:, None], axis=0)
        if dq is not None:
            dplus = turned_back(
                given, state, scale, cos, sin, batch, head, rows, columns, count, TURN, D, DOT, PRECISION
            )
            dplus = dplus * factor[:, None] + dz[:, None] * plus_sum[None, :]
            dminus = dplus
            if STREAMS == 2:
                dminus = turned_back(
                    given, other, scale, cos, sin, batch, head, rows, columns, count, TURN, D, DOT, PRECISION
                )
                dminus = dminus * factor[:, None] + dz[:, None] * minus_sum[None, :]
            if dmean is not None:
                dplus += read_row(dmean, batch * heads + head, columns, D)[None, :]
            write(dq, to_tokens(x, dplus, dminus, KIND, True), batch, head, rows, columns, count, D)
    if dstate is not None:
        dstate += tl.program_id(0).to(tl.int64) * (STREAMS * (D + 3) * D)
        write_square(dstate, tl.trans(dplus_state), columns, D)
        write_row(dstate, D, dplus_sum, columns, D)
        write_row(dstate, D + 1, dvalue, columns, D)
        if STREAMS == 2:
            write_square(dstate + (D + 3) * D, tl.trans(dminus_state), columns, D)
            write_row(dstate + (D + 3) * D, D, dminus_sum, columns, D)


@triton.jit
def key_gradient_kernel(
    k,
    v,
    dk,
    dv,
    cos,
    sin,
    state,
    dstate,
    lost,
    dmean,
    heads,
    count,
    splits,
    chunk,
    scale,
    mean,
    KIND: tl.constexpr,
    STREAMS: tl.constexpr,
    FORM: tl.constexpr,
    TURN: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients of the state to a split's keys and values.

    Where keys are weighed, also its share of Σ ω (h − Σ ω h) φk; `lost` (b·h) is Σ ω h.
    """
    split, batch, head = program(splits, heads)
    columns, image = tl.arange(0, BLOCK_D), batch * heads + head
    state += image * (STREAMS * (D + 3) * D)
    dstate += image * (STREAMS * (D + 3) * D)
    dother = dstate + (STREAMS - 1) * (D + 3) * D
    dplus_state, dplus_sum, dminus_state, dminus_sum, dvalue = read_state(dstate, columns, scale, mean, STREAMS, D)
    of_mean = tl.zeros((BLOCK_D,), tl.float32)
    if FORM == "weighed":
        mean_query = read_row(state, D + 1, columns, D)
        total, loss = tl.load(state + (D + 2) * D), tl.load(lost + image)
    for start in range(split * chunk, tl.minimum(count, (split + 1) * chunk), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        x, plus, _, turned_plus, turned_minus = turned_features(
            k, cos, sin, batch, head, rows, columns, count, KIND, False, TURN, D
        )
        values = read(v, batch, head, rows, columns, count, D)
        dvalues = product(turned_plus, dplus_state, DOT, PRECISION)
        dplus = turned_back(values, dstate, scale, cos, sin, batch, head, rows, columns, count, TURN, D, DOT, PRECISION)
        dplus += dplus_sum[None, :]
        dminus = dplus
        if STREAMS == 2:
            dvalues += product(turned_minus, dminus_state, DOT, PRECISION)
            dminus = turned_back(
                values, dother, scale, cos, sin, batch, head, rows, columns, count, TURN, D, DOT, PRECISION
            )
            dminus += dminus_sum[None, :]
        if FORM == "subtracted":
            dvalues += dvalue[None, :]
        if FORM == "weighed":
            scores = tl.sum(plus * mean_query[None, :], axis=1) - total
            share = tl.where(rows < count, tl.exp(tl.where(rows < count, scores, 0.0)), 0.0)
            slope = tl.sum(dvalues * values.to(tl.float32), axis=1) + tl.sum(plus * dplus_sum[None, :], axis=1)
            slope = share * (slope - loss)
            dvalues *= share[:, None]
            dplus = dplus * share[:, None] + slope[:, None] * mean_query[None, :]
            of_mean += tl.sum(plus * slope[:, None], axis=0)
        write(dk, to_tokens(x, dplus, dminus, KIND, False), batch, head, rows, columns, count, D)
        write(dv, dvalues, batch, head, rows, columns, count, D)
    if FORM == "weighed":
        write_row(dmean, tl.program_id(0).to(tl.int64), of_mean, columns, D)
