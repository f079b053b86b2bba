// Linear and InLine attention: see ops/linear_formula.py and ops/inline_formula.py, whose letters these are.
#pragma once
#include "tokens.h"

// One line as each of `count` rows
inline void repeat(const float* line, int64_t count, int64_t width, Rows to) {
    for (int64_t t = 0; t < count; t++)
        for (int64_t c = 0; c < width; c += W) store(to.data + t * to.row + c, load(line + c));
}

enum Feature { RELU, ELU };

inline vec feature_of(vec x, int feature) {
    const vec above = x < vec{} ? vec{} : x;  // NaN stays
    return feature == RELU ? above : (x > vec{} ? x + 1.0f : exponential(x));
}

// φ of the piece's tokens, as rows of padded width; channels beyond the width get 0
template <class E>
void features(const Tokens<E>& x, const Piece& piece, int64_t width, int feature, float* to) {
    const int64_t row = padded(width);
    for (int64_t t = 0; t < piece.count; t++) {
        const E* from = x.at(piece.b, piece.h, piece.first + t);
        int64_t c = 0;
        for (; c + W <= width; c += W) store(to + t * row + c, feature_of(load(from + c), feature));
        if (c < width) {
            vec tail = feature_of(load(from + c, width - c), feature);
            for (int64_t i = width - c; i < W; i++) tail[i] = 0;
            store(to + t * row + c, tail);
        }
    }
}

template <class E>
Answer linear_attention_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<E> out, int32_t feature, float eps) {
    if (!fits(shape, shape.queries, q, out) || !fits(shape, shape.keys, k, v)) return MISFIT;
    const int64_t d = shape.width, row = padded(d), size = (d + 1) * row;  // Σ φ(k)ᵀ v, then Σ φ(k)
    Sums sums(shape.threads, size);
    typedef Operand<E> P;
    const int64_t panel = deep<P>(d) * row;
    std::vector<float> states(shape.batch * shape.heads * size);
    std::vector<P> panels(shape.batch * shape.heads * panel);
    parallel(shape.threads, [&](int me, int all) {
        std::vector<float> room(T * row), spare;
        std::vector<P> left, right;
        sums.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            features(k, piece, d, feature, room.data());
            add_rows(room.data(), row, piece.count, row, sum + d * row);
            const Panel<P> keys = packed(room.data(), row, piece.count, row, left), values = packed(v, piece, d, right);
            multiply(d, row, deep<P>(piece.count), keys.turned(), values.data, values.row, {sum, row}, true);
        });
        heads(shape, me, all, [&](int64_t index) {
            float* state = &states[index * size];
            sums.each_sum(index, [&](const float* part) {
                for (int64_t i = 0; i < size; i++) state[i] += part[i] / float(shape.keys);
            });
            pack(state, row, d, row, &panels[index * panel]);
        });
        pieces(shape, shape.queries, me, all, [&](const Piece& piece) {
            const float* total = &states[piece.index * size + d * row];
            features(q, piece, d, feature, room.data());
            for (int64_t t = 0; t < piece.count; t++) {
                float* x = &room[t * row];
                const float scale = 1 / (product(x, total, row) + eps);
                for (int64_t c = 0; c < row; c += W) store(x + c, load(x + c) * scale);
            }
            const Matrix<P> queries = lowered(room.data(), row, piece.count, row, left);
            to_tokens(out, piece, d, spare, [&](Rows c) {
                multiply(piece.count, row, deep<P>(d), queries, &panels[piece.index * panel], row, c);
            });
        });
    });
    return DONE;
}

KERNEL(
    linear_attention, (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyTokens out, int32_t feature, float eps),
    (shape, q, k, v, out, feature, eps))

// The transpose of a (width × padded width) matrix; what is beyond `width` stays as it was
inline void transpose(const float* from, int64_t width, float* to) {
    const int64_t row = padded(width);
    for (int64_t i = 0; i < width; i++)
        for (int64_t j = 0; j < width; j++) to[j * row + i] = from[i * row + j];
}

// A piece's rows of gradient times the derivative of φ at x, in place
template <class E>
void through_feature(const Tokens<E>& x, const Piece& piece, int64_t width, int feature, Rows grad) {
    for (int64_t t = 0; t < piece.count; t++) {
        const E* from = x.at(piece.b, piece.h, piece.first + t);
        for (int64_t c = 0; c < width; c += W) {
            const int64_t n = width - c;
            const vec value = n >= W ? load(from + c) : load(from + c, n), g = load(grad.data + t * grad.row + c);
            const vec below = feature == RELU ? vec{} : g * exponential(value);
            store(grad.data + t * grad.row + c, value > vec{} ? g : below);
        }
    }
}

// With y = φq S / (φq·z + ε): e = (g / den) Sᵀ, dφq = e - (φq·e / den) z, dS = φqᵀ (g / den), dz = -Σ (φq·e / den) φq
// and from them dφk = (v dSᵀ + dz) / n, dv = φk dS / n.
template <class E>
Answer linear_attention_gradient_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<E> grad, Tokens<E> dq, Tokens<E> dk, Tokens<E> dv,
    int32_t feature, float eps) {
    if (!fits(shape, shape.queries, q, grad, dq) || !fits(shape, shape.keys, k, v, dk, dv)) return MISFIT;
    const int64_t d = shape.width, row = padded(d), size = (d + 1) * row, square = d * row;
    Sums sums(shape.threads, size), grads(shape.threads, size);
    std::vector<float> states(shape.batch * shape.heads * (size + square)), turned(states.size());
    // S or dS with z or dz behind, then its transpose
    const auto collect = [&](Sums& from, std::vector<float>& to, int me, int all) {
        heads(shape, me, all, [&](int64_t index) {
            float* state = &to[index * (size + square)];
            from.each_sum(index, [&](const float* part) {
                for (int64_t i = 0; i < size; i++) state[i] += part[i] / float(shape.keys);
            });
            transpose(state, d, state + size);
        });
    };
    parallel(shape.threads, [&](int me, int all) {
        std::vector<float> room(T * row), scaled(T * row), dz(row), spare, other;
        sums.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            features(k, piece, d, feature, room.data());
            const Rows values = values_of(v, piece, d, spare);
            multiply(d, row, piece.count, {room.data(), 1, row}, values.data, values.row, {sum, row}, true);
            add_rows(room.data(), row, piece.count, row, sum + square);
        });
        collect(sums, states, me, all);
        grads.gather(shape, shape.queries, me, all, [&](const Piece& piece, float* sum) {
            const float *state = &states[piece.index * (size + square)], *z = state + square;
            features(q, piece, d, feature, room.data());
            const Rows g = values_of(grad, piece, d, other);
            float scales[T];
            for (int64_t t = 0; t < piece.count; t++) {
                scales[t] = 1 / (product(&room[t * row], z, row) + eps);
                for (int64_t c = 0; c < row; c += W)
                    store(&scaled[t * row + c], load(g.data + t * g.row + c) * scales[t]);
            }
            to_tokens(dq, piece, d, spare, [&](Rows e) {
                multiply(piece.count, row, d, {scaled.data(), row, 1}, state + size, row, e);
                std::fill(dz.begin(), dz.end(), 0.0f);
                for (int64_t t = 0; t < piece.count; t++) {
                    const float lost = -product(&room[t * row], e.data + t * e.row, row) * scales[t];
                    for (int64_t c = 0; c < row; c += W) {
                        float* to = e.data + t * e.row + c;
                        store(&dz[c], load(&dz[c]) + load(&room[t * row + c]) * lost);
                        store(to, load(to) + load(z + c) * lost);
                    }
                }
                through_feature(q, piece, d, feature, e);
            });
            for (int64_t c = 0; c < row; c += W) store(sum + square + c, load(sum + square + c) + load(&dz[c]));
            multiply(d, row, piece.count, {room.data(), 1, row}, scaled.data(), row, {sum, row}, true);
        });
        collect(grads, turned, me, all);
        pieces(shape, shape.keys, me, all, [&](const Piece& piece) {
            const float* state = &turned[piece.index * (size + square)];
            features(k, piece, d, feature, room.data());
            to_tokens(dv, piece, d, spare, [&](Rows c) {
                multiply(piece.count, row, d, {room.data(), row, 1}, state, row, c);
            });
            to_tokens(dk, piece, d, spare, [&](Rows c) {
                repeat(state + square, piece.count, row, c);
                multiply(piece.count, row, d, matrix_of(v, piece, d, other), state + size, row, c, true);
                through_feature(k, piece, d, feature, c);
            });
        });
    });
    return DONE;
}

KERNEL(
    linear_attention_gradient,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyTokens grad, AnyTokens dq, AnyTokens dk, AnyTokens dv,
     int32_t feature, float eps),
    (shape, q, k, v, grad, dq, dk, dv, feature, eps))

// A piece's tokens less their mean, as rows of padded width
template <class E>
void centred(
    const Tokens<E>& x, const Piece& piece, int64_t width, const float* mean, std::vector<float>& room, float* to) {
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
    std::vector<float> states(shape.batch * shape.heads * size);
    std::vector<P> panels(shape.batch * shape.heads * panel);
    parallel(shape.threads, [&](int me, int all) {
        std::vector<float> room(T * row), spare, mean(row);
        std::vector<P> left, right;
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
    std::vector<float> means(all_heads * 2 * row), covariance(all_heads * square);
    std::vector<float> gradient(all_heads * (2 * square + row));  // dC, Σ g, dCᵀ
    parallel(shape.threads, [&](int me, int all) {
        std::vector<float> room(T * row), spare, other;
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
            std::vector<float> total(square);
            states.each_sum(index, [&](const float* part) {
                for (int64_t i = 0; i < square; i++) total[i] += part[i] * scale;
            });
            transpose(total.data(), d, &covariance[index * square]);
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
            transpose(to, d, to + square + row);
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
