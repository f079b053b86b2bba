"""Agent and softmax-free attention: kernels for maps between many tokens and a few others, agents or landmarks.

A map's entry is w = exp(l). For a softmax l = s f·x + bias less what makes it sum to 1, over the tokens where these are
gathered, over the few where it is spread; for a Gaussian l = −‖f − s x‖² / 2. Gathering is w v, (b, h, f, d), from
splits of the tokens; spreading is wᵀ u, (b, h, n, d). Tiles of a map are (few, tokens) where tokens are gathered and
(tokens, few) elsewhere: in the order in which the product that follows reads its left side.

Formulas: subquad.ops.agent_formula and subquad.ops.soft_formula.
"""

import triton
import triton.language as tl

from subquad.kernels.triton.tiles import as_multiplied, product, program, read, sums_over_tokens, write


@triton.jit
def logarithms(
    few,
    x,
    bias,
    head,
    places,
    rows,
    few_count,
    count,
    scale,
    GAUSS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The tile (f, n) of l, or (n, f) `BY_TOKEN`, before a softmax; −∞ where there is nothing."""
    if BY_TOKEN:
        logits = product(x, tl.trans(few), DOT, PRECISION) * scale
        place, row = places[None, :], rows[:, None]
    else:
        logits = product(few, tl.trans(x), DOT, PRECISION) * scale
        place, row = places[:, None], rows[None, :]
    present = (place < few_count) & (row < count)
    if GAUSS:
        few, x = few.to(tl.float32), x.to(tl.float32) * scale
        of_few, of_tokens = tl.sum(few * few, axis=1), tl.sum(x * x, axis=1)
        squares = of_tokens[:, None] + of_few[None, :] if BY_TOKEN else of_few[:, None] + of_tokens[None, :]
        # rounding can make the distance of near points slightly negative
        logits = -0.5 * tl.maximum(squares - 2 * logits, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        at = bias.data + head * bias.head + place.to(tl.int64) * bias.few + row.to(tl.int64) * bias.token
        logits += tl.load(at, mask=present, other=0.0).to(tl.float32)
    return tl.where(present, logits, float("-inf"))


@triton.jit
def finite(highest):
    """What a softmax subtracts: 0 where all is forbidden or absent."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def gather_kernel(
    few,
    k,
    v,
    bias,
    out,
    normalizer,
    heads,
    few_count,
    count,
    splits,
    chunk,
    scale,
    GAUSS: tl.constexpr,
    FEW: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Tokens of a split to a block of the few; of a softmax also the logarithm of the weights' sum."""
    split, batch, head = program(splits, heads)
    columns, places = tl.arange(0, BLOCK_D), tl.program_id(1) * FEW + tl.arange(0, FEW)
    agents = read(few, batch, head, places, columns, few_count, D)
    gathered = tl.zeros((FEW, BLOCK_D), tl.float32)
    highest, weight = tl.full((FEW,), float("-inf"), tl.float32), tl.zeros((FEW,), tl.float32)
    for start in range(split * chunk, tl.minimum(count, (split + 1) * chunk), BLOCK):
        rows = start + tl.arange(0, BLOCK)
        x, values = read(k, batch, head, rows, columns, count, D), read(v, batch, head, rows, columns, count, D)
        logits = logarithms(agents, x, bias, head, places, rows, few_count, count, scale, GAUSS, False, DOT, PRECISION)
        if GAUSS:
            gathered += product(tl.exp(logits), values, DOT, PRECISION)
        else:
            higher = finite(tl.maximum(highest, tl.max(logits, axis=1)))
            weights, kept = tl.exp(logits - higher[:, None]), tl.exp(highest - higher)
            gathered = gathered * kept[:, None] + product(weights, values, DOT, PRECISION)
            weight, highest = weight * kept + tl.sum(weights, axis=1), higher
    if not GAUSS:
        # a split all of whose tokens a bias forbids has no part in the sum of splits
        weight, empty = tl.where(weight == 0, 1.0, weight), weight == 0
        gathered = gathered / weight[:, None]
        at = normalizer + tl.program_id(0).to(tl.int64) * few_count + places
        tl.store(at, tl.where(empty, float("-inf"), highest + tl.log(weight)), mask=places < few_count)
    at = out + (tl.program_id(0).to(tl.int64) * few_count + places[:, None]) * D + columns[None, :]
    tl.store(at, gathered, mask=(places[:, None] < few_count) & (columns[None, :] < D))


@triton.jit
def spread_kernel(
    q,
    few,
    u,
    bias,
    out,
    heads,
    few_count,
    count,
    blocks,
    scale,
    GAUSS: tl.constexpr,
    FEW: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The few to a block of tokens."""
    block, batch, head = program(blocks, heads)
    columns, rows = tl.arange(0, BLOCK_D), block * BLOCK + tl.arange(0, BLOCK)
    x = read(q, batch, head, rows, columns, count, D)
    y = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    highest, weight = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, few_count, FEW):
        places = first + tl.arange(0, FEW)
        agents = read(few, batch, head, places, columns, few_count, D)
        values = read(u, batch, head, places, columns, few_count, D)
        logits = logarithms(agents, x, bias, head, places, rows, few_count, count, scale, GAUSS, True, DOT, PRECISION)
        if GAUSS:
            y += product(tl.exp(logits), values, DOT, PRECISION)
        else:
            higher = finite(tl.maximum(highest, tl.max(logits, axis=1)))
            weights, kept = tl.exp(logits - higher[:, None]), tl.exp(highest - higher)
            y = y * kept[:, None] + product(weights, values, DOT, PRECISION)
            weight, highest = weight * kept + tl.sum(weights, axis=1), higher
    if not GAUSS:
        y = y / tl.where(weight == 0, 1.0, weight)[:, None]
    write(out, y, batch, head, rows, columns, count, D)


@triton.jit
def gradient_kernel(
    x,
    values,
    few,
    few_values,
    bias,
    normalizer,
    losses,
    dx,
    dvalues,
    dfew,
    dfew_values,
    dbias,
    heads,
    few_count,
    count,
    splits,
    chunk,
    images,
    each,
    scale,
    GAUSS: tl.constexpr,
    GATHER: tl.constexpr,
    ALL: tl.constexpr,
    FEW: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of a split's tokens and a block of the few, whose shares are summed.

    An entry's gradient is dw = few_values·values: where tokens are gathered, values are theirs and few_values are the
    gradient of what was gathered; where the few are spread, values are the output's gradient and few_values theirs.
    A program goes through `each` images one after the other, whose gradients of a bias (groups, h, n, f) it adds up.
    `ALL` says that the block is all of the few.
    """
    split, group, head = program(splits, heads)
    part = tl.program_id(1)
    columns, places = tl.arange(0, BLOCK_D), part * FEW + tl.arange(0, FEW)
    for batch in range(group * each, tl.minimum(images, (group + 1) * each)):
        agents = read(few, batch, head, places, columns, few_count, D)
        of_few = read(few_values, batch, head, places, columns, few_count, D)
        dagents, dof_few = tl.zeros((BLOCK_D, FEW), tl.float32), tl.zeros((BLOCK_D, FEW), tl.float32)
        pulls = tl.zeros((FEW,), tl.float32)
        if GATHER and not GAUSS:
            image = (batch * heads + head) * few_count
            total = tl.load(normalizer + image + places, mask=places < few_count, other=0.0)
            loss = tl.load(losses + image + places, mask=places < few_count, other=0.0)
        for start in range(split * chunk, tl.minimum(count, (split + 1) * chunk), BLOCK):
            rows = start + tl.arange(0, BLOCK)
            tokens = read(x, batch, head, rows, columns, count, D)
            of_tokens = read(values, batch, head, rows, columns, count, D)
            logits = logarithms(
                agents, tokens, bias, head, places, rows, few_count, count, scale, GAUSS, True, DOT, PRECISION
            )
            dweights = product(of_tokens, tl.trans(of_few), DOT, PRECISION)
            if GAUSS:
                weights = tl.exp(logits)
                dlogits = as_multiplied(weights * dweights, PRECISION)
            elif GATHER:
                weights = tl.exp(logits - total[None, :])
                dlogits = weights * (dweights - loss[None, :])
            elif ALL:
                weights = tl.exp(logits - finite(tl.max(logits, axis=1))[:, None])
                weight = tl.sum(weights, axis=1)
                weights = weights / tl.where(weight == 0, 1.0, weight)[:, None]
                dlogits = weights * (dweights - tl.sum(weights * dweights, axis=1)[:, None])
            else:
                # the softmax runs over all of the few, of which this program has a block
                highest, weight = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.float32)
                lost = tl.zeros((BLOCK,), tl.float32)
                for first in range(0, few_count, FEW):
                    others = first + tl.arange(0, FEW)
                    theirs = logarithms(
                        read(few, batch, head, others, columns, few_count, D),
                        tokens,
                        bias,
                        head,
                        others,
                        rows,
                        few_count,
                        count,
                        scale,
                        GAUSS,
                        True,
                        DOT,
                        PRECISION,
                    )
                    their_values = read(few_values, batch, head, others, columns, few_count, D)
                    moved = product(of_tokens, tl.trans(their_values), DOT, PRECISION)
                    higher = finite(tl.maximum(highest, tl.max(theirs, axis=1)))
                    shares, kept = tl.exp(theirs - higher[:, None]), tl.exp(highest - higher)
                    weight, lost = weight * kept + tl.sum(shares, axis=1), lost * kept + tl.sum(shares * moved, axis=1)
                    highest = higher
                weight = tl.where(weight == 0, 1.0, weight)
                weights = tl.exp(logits - highest[:, None]) / weight[:, None]
                dlogits = weights * (dweights - (lost / weight)[:, None])
            dtokens = product(dlogits, agents, DOT, PRECISION) * scale
            dagents += sums_over_tokens(tokens, dlogits, DOT, PRECISION) * scale
            if GAUSS:
                # −(f − s x)² / 2 also pulls each of the two to zero
                dtokens -= tl.sum(dlogits, axis=1)[:, None] * tokens.to(tl.float32) * (scale * scale)
                pulls += tl.sum(dlogits, axis=0)
            write(dx, dtokens, part * images + batch, head, rows, columns, count, D)
            if GATHER:
                dtheirs = product(weights, of_few, DOT, PRECISION)
                write(dvalues, dtheirs, part * images + batch, head, rows, columns, count, D)
            else:
                dof_few += sums_over_tokens(of_tokens, weights, DOT, PRECISION)
            if dbias is not None:
                pair = ((group * heads + head) * count + rows[:, None]) * few_count + places[None, :]
                present = (places[None, :] < few_count) & (rows[:, None] < count)
                # of the group's first image there is nothing before
                added = (places[None, :] < tl.where(batch > group * each, few_count, 0)) & (rows[:, None] < count)
                before = tl.load(dbias + pair, mask=added, other=0.0)
                tl.store(dbias + pair, before + dlogits, mask=present)
        if GAUSS:
            dagents -= pulls[None, :] * tl.trans(agents.to(tl.float32))
        at = (((batch * heads + head) * splits + split) * few_count + places[None, :]) * D + columns[:, None]
        inside = (places[None, :] < few_count) & (columns[:, None] < D)
        tl.store(dfew + at, dagents, mask=inside)
        if not GATHER:
            tl.store(dfew_values + at, dof_few, mask=inside)
        if dbias is not None:
            # other threads of this program add to what these have written
            tl.debug_barrier()
