// PolaFormer's attention: see ops/pola_formula.py.
#pragma once
#include "tokens.h"

// Rows [(x⁺)^p, (x⁻)^p] of x = (token + position) · sharpness, each half of padded width
template <class E>
void pola_features(
    const Tokens<E>& x, const Tokens<float>& positions, const Piece& piece, int64_t width, const float* sharpness,
    const float* powers, float* to) {
    const int64_t row = padded(width);
    for (int64_t t = 0; t < piece.count; t++) {
        const E* from = x.at(piece.b, piece.h, piece.first + t);
        const float* place = positions.data ? positions.at(piece.b, piece.h, piece.first + t) : nullptr;
        for (int64_t c = 0; c < row; c += W) {
            const int64_t n = width - c;
            vec value = n >= W ? load(from + c) : load(from + c, n);
            if (place) value += n >= W ? load(place + c) : load(place + c, n);
            value *= load(sharpness + c);
            const vec size = power(value, load(powers + c));
            // NaN stays, in both halves
            store(to + t * 2 * row + c, value < vec{} ? vec{} : (value > vec{} ? size : value));
            store(to + t * 2 * row + row + c, value > vec{} ? vec{} : (value < vec{} ? size : value));
        }
    }
}

// `sharpness` (1 / temperature) and `powers` are (h, d). The first half of the values meets the same sign, the rest the
// opposite one: a state with the halves of its rows exchanged there serves both with the same query features.
template <class E>
Answer pola_attention_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<float> positions, Tokens<E> out, Numbers sharpness,
    Numbers powers, float eps) {
    if (!fits(shape, shape.queries, q, out) || !fits(shape, shape.keys, k, v, positions)) return MISFIT;
    if (!fits(shape.heads * shape.width, sharpness, powers)) return MISFIT;
    const int64_t d = shape.width, row = padded(d), same = (d + 1) / 2, size = 2 * row * (row + 1);
    Sums sums(shape.threads, size);  // Σ K̂ᵀ v (2 row × row), then Σ K̂ (2 row)
    std::vector<float> states(shape.batch * shape.heads * (size + 2 * row));  // mixed, Σ K̂ and Σ K̂ exchanged
    typedef Operand<E> P;
    const int64_t panel = deep<P>(2 * row) * row;
    std::vector<P> panels(shape.batch * shape.heads * panel);
    std::vector<float> sharp(shape.heads * row), exponents(shape.heads * row, 1.0f);
    for (int64_t h = 0; h < shape.heads; h++) {
        std::memcpy(&sharp[h * row], sharpness.data + h * d, d * sizeof(float));
        std::memcpy(&exponents[h * row], powers.data + h * d, d * sizeof(float));
    }
    parallel(shape.threads, [&](int me, int all) {
        std::vector<float> room(T * 2 * row), spare;
        std::vector<P> left, right;
        sums.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            pola_features(k, positions, piece, d, &sharp[piece.h * row], &exponents[piece.h * row], room.data());
            add_rows(room.data(), 2 * row, piece.count, 2 * row, sum + 2 * row * row);
            const Panel<P> keys = packed(room.data(), 2 * row, piece.count, 2 * row, left);
            const Panel<P> values = packed(v, piece, d, right);
            multiply(2 * row, row, deep<P>(piece.count), keys.turned(), values.data, values.row, {sum, row}, true);
        });
        heads(shape, me, all, [&](int64_t index) {
            float* state = &states[index * (size + 2 * row)];
            float* total = state + 2 * row * row;
            sums.each_sum(index, [&](const float* part) {
                for (int64_t i = 0; i < 2 * row; i++) {
                    const int64_t other = i < row ? i + row : i - row;
                    for (int64_t c = 0; c < d; c++)
                        state[i * row + c] += part[(c < same ? i : other) * row + c] / float(shape.keys);
                    total[i] += part[2 * row * row + i] / float(shape.keys);
                    total[2 * row + i] += part[2 * row * row + other] / float(shape.keys);
                }
            });
            pack(state, row, 2 * row, row, &panels[index * panel]);
        });
        pieces(shape, shape.queries, me, all, [&](const Piece& piece) {
            const float* total = &states[piece.index * (size + 2 * row) + 2 * row * row];
            pola_features(q, {}, piece, d, &sharp[piece.h * row], &exponents[piece.h * row], room.data());
            const Matrix<P> queries = lowered(room.data(), 2 * row, piece.count, 2 * row, left);
            to_tokens(out, piece, d, spare, [&](Rows c) {
                multiply(piece.count, row, deep<P>(2 * row), queries, &panels[piece.index * panel], row, c);
                for (int64_t t = 0; t < piece.count; t++) {
                    const float* x = &room[t * 2 * row];
                    const float first = 1 / (product(x, total, 2 * row) + eps);
                    const float rest = 1 / (product(x, total + 2 * row, 2 * row) + eps);
                    float* y = c.data + t * c.row;
                    for (int64_t i = 0; i < same; i++) y[i] *= first;
                    for (int64_t i = same; i < d; i++) y[i] *= rest;
                }
            });
        });
    });
    return DONE;
}

KERNEL(
    pola_attention,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, Tokens<float> positions, AnyTokens out, Numbers sharpness,
     Numbers powers, float eps),
    (shape, q, k, v, positions, out, sharpness, powers, eps))
