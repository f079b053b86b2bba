// InLine attention: see ops/inline_formula.py, whose letters these are.
#pragma once
#include "tokens.h"

// A piece's tokens less their mean, as rows of padded width
template <class E>
void centred(
    const Tokens<E>& x, const Piece& piece, int64_t width, const float* mean, Buffer<float>& room, float* to) {
    const Rows rows = values_of(x, piece, width, room);
    const int64_t row = padded(width);
    for (int64_t t = 0; t < piece.count; t++)
        for (int64_t c = 0; c < row; c += W)
            store(to + t * row + c, load(rows.data + t * rows.row + c) - load(mean + c));
}

template <class E>
Answer inline_attention_of(Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<E> out) {
    if (!fits(shape, shape.queries, q, out) || !fits(shape, shape.keys, k, v)) return MISFIT;
    const int64_t d = shape.width, row = padded(d), size = (d + 1) * row;  // the covariance, then the mean of v
    const float scale = 1 / (std::sqrt(float(d)) * float(shape.keys));
    Sums means(shape.threads, row), sums(shape.threads, size);
    typedef Operand<E> P;
    const int64_t panel = deep<P>(d) * row;
    Buffer<float> states(shape.batch * shape.heads * size);
    Buffer<P> panels(shape.batch * shape.heads * panel);
    parallel(shape.threads, [&](int me, int all) {
        Buffer<float> room(T * row), spare, mean(row);
        Buffer<P> left, right;
        int64_t of = -1;
        // keys are centred before the product: subtracting afterwards cancels when they share a large mean
        means.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            const Rows keys = values_of(k, piece, d, spare);
            add_rows(keys.data, keys.row, piece.count, row, sum);
        });
        sums.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            if (of != piece.index) {
                std::fill(mean.begin(), mean.end(), 0.0f);
                means.each_sum(of = piece.index, [&](const float* part) {
                    for (int64_t c = 0; c < row; c++) mean[c] += part[c] / float(shape.keys);
                });
            }
            centred(k, piece, d, mean.data(), spare, room.data());
            const Panel<P> keys = packed(room.data(), row, piece.count, row, left), values = packed(v, piece, d, right);
            multiply(d, row, deep<P>(piece.count), keys.turned(), values.data, values.row, {sum, row}, true);
            const Rows rows = values_of(v, piece, d, spare);
            add_rows(rows.data, rows.row, piece.count, row, sum + d * row);
        });
        heads(shape, me, all, [&](int64_t index) {
            float* state = &states[index * size];
            sums.each_sum(index, [&](const float* part) {
                for (int64_t i = 0; i < d * row; i++) state[i] += part[i] * scale;
                for (int64_t i = d * row; i < size; i++) state[i] += part[i] / float(shape.keys);
            });
            pack(state, row, d, row, &panels[index * panel]);
        });
        pieces(shape, shape.queries, me, all, [&](const Piece& piece) {
            const Matrix<P> queries = lowered(q, piece, d, left);
            to_tokens(out, piece, d, spare, [&](Rows c) {
                repeat(&states[piece.index * size + d * row], piece.count, row, c);
                multiply(piece.count, row, deep<P>(d), queries, &panels[piece.index * panel], row, c, true);
            });
        });
    });
    return DONE;
}

KERNEL(
    inline_attention, (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyTokens out), (shape, q, k, v, out))

// With y = v̄ + q C, C = s (k - k̄)ᵀ v / n: dq = g Cᵀ, dC = qᵀ g, dv = s (k - k̄) dC / n + Σ g / n, dk = s (v - v̄) dCᵀ / n.
template <class E>
Answer inline_attention_gradient_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<E> grad, Tokens<E> dq, Tokens<E> dk, Tokens<E> dv) {
    if (!fits(shape, shape.queries, q, grad, dq) || !fits(shape, shape.keys, k, v, dk, dv)) return MISFIT;
    const int64_t d = shape.width, row = padded(d), square = d * row, all_heads = shape.batch * shape.heads;
    const float scale = 1 / (std::sqrt(float(d)) * float(shape.keys));
    Sums sums(shape.threads, 2 * row), states(shape.threads, square), grads(shape.threads, square + row);
    Buffer<float> means(all_heads * 2 * row), covariance(all_heads * square);
    Buffer<float> gradient(all_heads * (2 * square + row));  // dC, Σ g, dCᵀ
    parallel(shape.threads, [&](int me, int all) {
        Buffer<float> room(T * row), spare, other;
        sums.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            const Rows keys = values_of(k, piece, d, spare);
            add_rows(keys.data, keys.row, piece.count, row, sum);
            const Rows values = values_of(v, piece, d, spare);
            add_rows(values.data, values.row, piece.count, row, sum + row);
        });
        heads(shape, me, all, [&](int64_t index) {
            sums.each_sum(index, [&](const float* part) {
                for (int64_t i = 0; i < 2 * row; i++) means[index * 2 * row + i] += part[i] / float(shape.keys);
            });
        });
        states.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            centred(k, piece, d, &means[piece.index * 2 * row], spare, room.data());
            const Rows values = values_of(v, piece, d, spare);
            multiply(d, row, piece.count, {room.data(), 1, row}, values.data, values.row, {sum, row}, true);
        });
        heads(shape, me, all, [&](int64_t index) {
            Buffer<float> total(square);
            states.each_sum(index, [&](const float* part) {
                for (int64_t i = 0; i < square; i++) total[i] += part[i] * scale;
            });
            transpose(total.data(), d, d, &covariance[index * square]);
        });
        grads.gather(shape, shape.queries, me, all, [&](const Piece& piece, float* sum) {
            const Rows g = values_of(grad, piece, d, other);
            add_rows(g.data, g.row, piece.count, row, sum + square);
            const Strided queries = matrix_of(q, piece, d, spare);
            multiply(d, row, piece.count, {queries.data, 1, queries.row}, g.data, g.row, {sum, row}, true);
            to_tokens(dq, piece, d, spare, [&](Rows c) {
                multiply(piece.count, row, d, {g.data, g.row, 1}, &covariance[piece.index * square], row, c);
            });
        });
        heads(shape, me, all, [&](int64_t index) {
            float* to = &gradient[index * (2 * square + row)];
            grads.each_sum(index, [&](const float* part) {
                for (int64_t i = 0; i < square; i++) to[i] += part[i] * scale;
                for (int64_t i = square; i < square + row; i++) to[i] += part[i] / float(shape.keys);
            });
            transpose(to, d, d, to + square + row);
        });
        pieces(shape, shape.keys, me, all, [&](const Piece& piece) {
            const float *dc = &gradient[piece.index * (2 * square + row)], *mean = &means[piece.index * 2 * row];
            centred(k, piece, d, mean, spare, room.data());
            to_tokens(dv, piece, d, spare, [&](Rows c) {
                repeat(dc + square, piece.count, row, c);
                multiply(piece.count, row, d, {room.data(), row, 1}, dc, row, c, true);
            });
            centred(v, piece, d, mean + row, spare, room.data());
            to_tokens(dk, piece, d, spare, [&](Rows c) {
                multiply(piece.count, row, d, {room.data(), row, 1}, dc + square + row, row, c);
            });
        });
    });
    return DONE;
}

KERNEL(
    inline_attention_gradient,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyTokens grad, AnyTokens dq, AnyTokens dk, AnyTokens dv),
    (shape, q, k, v, grad, dq, dk, dv))
