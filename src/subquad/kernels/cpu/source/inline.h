// InLine attention: see ops/inline_formula.py, whose letters these are.
#pragma once
#include "mixer_parts.h"

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
    typedef Operand<E> P;
    const int64_t d = shape.width, row = padded(d), square = d * row, all_heads = shape.batch * shape.heads;
    const int64_t panel = deep<P>(d) * row;
    const float scale = 1 / (std::sqrt(float(d)) * float(shape.keys));
    Sums sums(shape.threads, 2 * row), states(shape.threads, square), grads(shape.threads, square + row);
    Buffer<float> means(all_heads * 2 * row), gradient(all_heads * row);  // Σ g
    Buffer<P> covariance(all_heads * panel), gradients(all_heads * 2 * panel);  // Cᵀ; dC and dCᵀ
    parallel(shape.threads, [&](int me, int all) {
        Buffer<float> room(T * row), spare, total(square), turned(d * row);
        Buffer<P> left, right;
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
            const Panel<P> keys = packed(room.data(), row, piece.count, row, left), values = packed(v, piece, d, right);
            multiply(d, row, deep<P>(piece.count), keys.turned(), values.data, values.row, {sum, row}, true);
        });
        heads(shape, me, all, [&](int64_t index) {
            std::fill(total.begin(), total.end(), 0.0f);
            states.each_sum(index, [&](const float* part) {
                for (int64_t i = 0; i < square; i++) total[i] += part[i] * scale;
            });
            transpose(total.data(), d, d, turned.data());
            pack(turned.data(), row, d, row, &covariance[index * panel]);
        });
        grads.gather(shape, shape.queries, me, all, [&](const Piece& piece, float* sum) {
            const Rows rows = values_of(grad, piece, d, spare);
            add_rows(rows.data, rows.row, piece.count, row, sum + square);
            const Panel<P> queries = packed(q, piece, d, left), g = packed(grad, piece, d, right);
            multiply(d, row, deep<P>(piece.count), queries.turned(), g.data, g.row, {sum, row}, true);
            const Matrix<P> rows_of_g = lowered(grad, piece, d, left);
            to_tokens(dq, piece, d, spare, [&](Rows c) {
                multiply(piece.count, row, deep<P>(d), rows_of_g, &covariance[piece.index * panel], row, c);
            });
        });
        heads(shape, me, all, [&](int64_t index) {
            std::fill(total.begin(), total.end(), 0.0f);
            grads.each_sum(index, [&](const float* part) {
                for (int64_t i = 0; i < square; i++) total[i] += part[i] * scale;
                for (int64_t c = 0; c < row; c++) gradient[index * row + c] += part[square + c] / float(shape.keys);
            });
            transpose(total.data(), d, d, turned.data());
            pack(total.data(), row, d, row, &gradients[2 * index * panel]);
            pack(turned.data(), row, d, row, &gradients[(2 * index + 1) * panel]);
        });
        pieces(shape, shape.keys, me, all, [&](const Piece& piece) {
            const P* dc = &gradients[2 * piece.index * panel];
            const float* mean = &means[piece.index * 2 * row];
            const auto rows_of = [&](const Tokens<E>& x, const float* mean) {
                centred(x, piece, d, mean, spare, room.data());
                return lowered(room.data(), row, piece.count, row, left);
            };
            const Matrix<P> keys = rows_of(k, mean);
            to_tokens(dv, piece, d, spare, [&](Rows c) {
                repeat(&gradient[piece.index * row], piece.count, row, c);
                multiply(piece.count, row, deep<P>(d), keys, dc, row, c, true);
            });
            const Matrix<P> values = rows_of(v, mean + row);
            to_tokens(dk, piece, d, spare, [&](Rows c) {
                multiply(piece.count, row, deep<P>(d), values, dc + panel, row, c);
            });
        });
    });
    return DONE;
}

KERNEL(
    inline_attention_gradient,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyTokens grad, AnyTokens dq, AnyTokens dk, AnyTokens dv),
    (shape, q, k, v, grad, dq, dk, dv))

// The MLP of a head, W₂ gelu(W₁ x̄ + b₁) + b₂, that gives nine taps for each channel: weights (h·d, d) and (9·h·d, d)
struct AnyPredictor {
    AnyNumbers first, first_bias, second, second_bias;
};

struct Predictor {
    Parameter first, first_bias, second, second_bias;
    Predictor(const AnyPredictor& x)
        : first(x.first), first_bias(x.first_bias), second(x.second), second_bias(x.second_bias) {}
};

inline float inner_product(const float* x, const float* y, int64_t width) {
    vec total{};
    int64_t c = 0;
    for (; c + W <= width; c += W) total += load(x + c) * load(y + c);
    if (c < width) total += load(x + c, width - c) * load(y + c, width - c);
    return sum(total);
}

// Taps (b, 9, h·d) from the mean of tokens x (b, 1, n, h·d)
template <class E>
void predict(const Shape& shape, const Tokens<E>& x, const Predictor& by, Buffer<float>& taps) {
    const int64_t d = shape.width, channels = shape.heads * d, row = padded(channels), nine = 9;
    const Shape tokens{shape.batch, 1, shape.queries, shape.queries, channels, shape.threads};
    Sums sums(shape.threads, row);
    taps.resize(shape.batch * nine * channels);
    parallel(shape.threads, [&](int me, int all) {
        Buffer<float> spare, mean(d), hidden(padded(d));
        sums.gather(tokens, shape.queries, me, all, [&](const Piece& piece, float* sum) {
            const Rows rows = values_of(x, piece, channels, spare);
            add_rows(rows.data, rows.row, piece.count, row, sum);
        });
        heads(shape, me, all, [&](int64_t index) {
            const int64_t b = index / shape.heads, first = index % shape.heads * d;
            std::fill(mean.begin(), mean.end(), 0.0f);
            sums.each_sum(b, [&](const float* part) {
                for (int64_t c = 0; c < d; c++) mean[c] += part[first + c] / float(shape.queries);
            });
            for (int64_t i = 0; i < d; i++)
                hidden[i] = inner_product(by.first.data + (first + i) * d, mean.data(), d) + by.first_bias.data[first + i];
            for (int64_t c = 0; c < d; c += W) store(&hidden[c], gelu(load(&hidden[c]), 0.0f));
            for (int64_t i = nine * first; i < nine * (first + d); i++)
                taps[(b * nine + i % nine) * channels + i / nine] =
                    inner_product(by.second.data + i * d, hidden.data(), d) + by.second_bias.data[i];
        });
    });
}

template <class E>
Answer inline_mixer_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<E> x, const Predictor& predictor, Map map,
    Tokens<E> out) {
    const int64_t d = shape.width, channels = shape.heads * d;
    if (!fits(Shape{shape.batch, 1, 0, 0, channels, 0}, shape.queries, x)) return MISFIT;
    if (!fits(channels * d, predictor.first) || !fits(channels, predictor.first_bias)) return MISFIT;
    if (!fits(9 * channels * d, predictor.second) || !fits(9 * channels, predictor.second_bias)) return MISFIT;
    if (!fits(shape, shape.queries, v) || !fits(shape.queries, map)) return MISFIT;
    if (const Answer answer = inline_attention_of<E>(shape, q, k, v, out)) return answer;
    Buffer<float> taps;
    predict(shape, x, predictor, taps);
    return add_branch<E>(shape, v, out, {}, out, map, numbers_of(taps), 9 * channels, {}, 3);
}

KERNEL(
    inline_mixer,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyTokens x, AnyPredictor predictor, Map map,
     AnyTokens out),
    (shape, q, k, v, x, predictor, map, out))
