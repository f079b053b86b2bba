// What lies around any mechanism in a block: a norm with the projection behind it, and the projection back with its
// residual. See ops/branch_at_once.py.
#pragma once
#include "branches.h"

// out = W norm(x) + b of tokens (1, 1, n, c) and weights (m, c); behind these m channels norm(x), where out has m + c
template <class E>
Answer norm_projection_of(Shape shape, Tokens<E> x, Norm norm, Tokens<E> weight, Numbers bias, Tokens<E> out) {
    typedef Operand<E> P;
    const int64_t c = shape.width, all_rows = weight.count, more = out.width - all_rows;
    if (!fits(shape, shape.queries, x) || !fits(c, norm.weight, norm.bias) || !fits(all_rows, bias)) return MISFIT;
    if (weight.width != c || weight.token != c || shape.batch * shape.heads != 1) return MISFIT;
    if (out.images * out.heads != 1 || out.count != x.count || (more != 0 && more != c)) return MISFIT;
    Buffer<P> room;
    const Matrix<P> weights = weights_of(weight.data, all_rows, c, room);
    constexpr int64_t part = 192;  // rows of weights at a time: what they make stays in the L2 cache
    parallel(shape.threads, [&](int me, int all) {
        NormedTokens<E> around{c};
        Buffer<float> some(part * T), rows(T * part);
        even_pieces(shape.queries, me, all, [&](const Piece& piece) {
            const int64_t columns = padded(piece.count);
            const P* tokens = around.of(x, piece, norm);
            for (int64_t from = 0; from < all_rows; from += part) {
                const int64_t count = std::min(part, all_rows - from);
                const Matrix<P> these{weights.data + from * weights.row, weights.row, 1};
                multiply(count, columns, deep<P>(c), these, tokens, columns, {some.data(), columns});
                turn(some.data(), columns, count, piece.count, rows.data(), part);
                for (int64_t t = 0; t < piece.count; t++)
                    add_bias(&rows[t * part], count, bias.data ? bias.data + from : nullptr, out.at(0, 0, piece.first + t) + from);
            }
            if (more)
                for (int64_t t = 0; t < piece.count; t++)
                    copy(around.operands(t), c, out.at(0, 0, piece.first + t) + all_rows);
        });
    });
    return DONE;
}

KERNEL(
    norm_projection,
    (Shape shape, AnyTokens x, Norm norm, AnyTokens weight, Numbers bias, AnyTokens out),
    (shape, x, norm, weight, bias, out))

// out = x + scale · (W y + b) of tokens x (1, 1, n, c), y (1, 1, n, m) and weights (c, m)
template <class E>
Answer projection_residual_of(
    Shape shape, Tokens<E> x, Tokens<E> y, Tokens<E> weight, Numbers bias, Numbers scale, Tokens<E> out) {
    typedef Operand<E> P;
    const int64_t c = shape.width, m = y.width;
    if (!fits(shape, shape.queries, x, out) || !fits(c, bias, scale) || shape.batch * shape.heads != 1) return MISFIT;
    if (y.images * y.heads != 1 || y.count != x.count) return MISFIT;
    if (weight.count != c || weight.width != m || weight.token != m) return MISFIT;
    Buffer<P> room;
    const Matrix<P> weights = weights_of(weight.data, c, m, room);
    parallel(shape.threads, [&](int me, int all) {
        NormedTokens<E> around{c};
        Buffer<float> branch(c * T);
        Buffer<P> left, turned(deep<P>(m) * T);
        even_pieces(shape.queries, me, all, [&](const Piece& piece) {
            const int64_t columns = padded(piece.count), depth = deep<P>(m);
            const Matrix<P> rows = lowered(y, piece, m, left);
            if (piece.count < columns) std::fill(turned.begin(), turned.end(), P{});
            turn(rows.data, rows.row, piece.count, depth, turned.data(), columns);
            multiply(c, columns, depth, weights, turned.data(), columns, {branch.data(), columns});
            around.add(branch.data(), x, piece, bias, scale, out);
        });
    });
    return DONE;
}

KERNEL(
    projection_residual,
    (Shape shape, AnyTokens x, AnyTokens y, AnyTokens weight, Numbers bias, Numbers scale, AnyTokens out),
    (shape, x, y, weight, bias, scale, out))
