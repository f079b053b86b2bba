// The first half of a block with linear attention, from its norm to its residual: see ops/branch_at_once.py. Two walks
// over the tokens, of which the first sums up keys and values and the second answers: neither writes down what it
// projects.
#pragma once
#include "branches.h"
#include "feature_maps.h"

// Channels × tokens of a piece, plus biases, features of the first `featured` channels; no features of absent tokens
inline void biased(
    float* rows, int64_t channels, int64_t featured, const Numbers& bias, int feature, int64_t count, int64_t columns) {
    for (int64_t i = 0; i < channels; i++) {
        const vec more = fill(bias.data ? bias.data[i] : 0);
        float* row = rows + i * columns;
        for (int64_t t = 0; t < columns; t += W) {
            const vec value = load(row + t) + more;
            store(row + t, i < featured ? feature_of(value, feature) : value);
        }
        if (i < featured)
            for (int64_t t = count; t < columns; t++) row[t] = 0;
    }
}

inline bool is_branch(const Shape& shape, int64_t heads, int32_t feature) {
    return shape.heads == 1 && heads > 0 && shape.width % heads == 0 && (feature == RELU || feature == ELU);
}

// [Σ φ(k)ᵀ v, Σ φ(k)] of each head to `out`, (b, h, d, d + 1), of tokens (b, 1, n, c) and weights (2c, c)
template <class E>
Answer linear_branch_sums_of(
    Shape shape, Tokens<E> x, Norm norm, Tokens<E> weight, Numbers bias, Numbers out, int64_t heads_of, int32_t feature) {
    typedef Operand<E> P;
    if (!is_branch(shape, heads_of, feature)) return MISFIT;
    const int64_t c = shape.width, d = c / heads_of, row = padded(d), side = d + 1;
    if (!fits(shape, shape.keys, x) || !fits(c, norm.weight, norm.bias) || !fits(2 * c, bias)) return MISFIT;
    if (weight.count != 2 * c || weight.width != c || weight.token != c) return MISFIT;
    if (out.count != shape.batch * heads_of * d * side) return MISFIT;
    Buffer<P> room;
    const Matrix<P> weights = weights_of(weight.data, 2 * c, c, room);
    const int64_t totals = c * row;  // behind the states of all heads
    Sums sums(shape.threads, totals + c);
    parallel(shape.threads, [&](int me, int all) {
        NormedTokens<E> around{c};
        Buffer<float> projected(2 * c * T);
        Buffer<P> keys, values, panel(deep<P>(T) * row);
        sums.gather_images(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            const int64_t columns = padded(piece.count), depth = deep<P>(columns);
            multiply(2 * c, columns, deep<P>(c), weights, around.of(x, piece, norm), columns, {projected.data(), columns});
            biased(projected.data(), 2 * c, c, bias, feature, piece.count, columns);
            for (int64_t first = 0; first < c; first += d) {
                const float *k = &projected[first * columns], *v = k + c * columns;
                const Matrix<P> rows = lowered(v, columns, d, columns, values);
                turn(rows.data, rows.row, d, depth, panel.data(), row);
                multiply(d, row, depth, lowered(k, columns, d, columns, keys), panel.data(), row, {sum + first * row, row}, true);
            }
            for (int64_t i = 0; i < c; i++) {
                vec total{};
                for (int64_t t = 0; t < columns; t += W) total += load(&projected[i * columns + t]);
                sum[totals + i] += ::sum(total);
            }
        });
        heads(shape, me, all, [&](int64_t image) {
            float* to = out.data + image * c * side;
            std::fill(to, to + c * side, 0.0f);
            sums.each_sum(image, [&](const float* part) {
                for (int64_t i = 0; i < c; i++) {
                    for (int64_t j = 0; j < d; j++) to[i * side + j] += part[i * row + j];
                    to[i * side + d] += part[totals + i];
                }
            });
        });
    });
    return DONE;
}

KERNEL(
    linear_branch_sums,
    (Shape shape, AnyTokens x, Norm norm, AnyTokens weight, Numbers bias, Numbers out, int64_t heads, int32_t feature),
    (shape, x, norm, weight, bias, out, heads, feature))

// What a head's queries are multiplied by, turned, and Σ φ(k)
template <class P>
struct TurnedState {
    Buffer<float> rows, total;
    Buffer<P> room;
    Matrix<P> left;

    void set(const float* sums, int64_t d) {
        rows.assign(d * padded(d), 0.0f);
        total.resize(d);
        for (int64_t i = 0; i < d; i++, sums += d + 1) {
            for (int64_t j = 0; j < d; j++) rows[j * padded(d) + i] = sums[j];
            total[i] = sums[d];
        }
        left = lowered(rows.data(), padded(d), d, padded(d), room);
    }
};

// out = x + scale · (P y + b), y = φ(q) [Σ φ(k)ᵀ v] / (φ(q)·Σ φ(k) + n ε), of n = `count` keys
template <class E>
Answer linear_branch_answers_of(
    Shape shape, Tokens<E> x, Norm norm, Tokens<E> weight, Numbers bias, Numbers sums, Tokens<E> proj, Numbers proj_bias,
    Numbers scale, Tokens<E> out, int64_t heads_of, int64_t count, int32_t feature, float eps) {
    typedef Operand<E> P;
    if (!is_branch(shape, heads_of, feature)) return MISFIT;
    const int64_t c = shape.width, d = c / heads_of;
    if (!fits(shape, shape.queries, x, out) || !fits(c, norm.weight, norm.bias, bias, proj_bias, scale)) return MISFIT;
    for (const Tokens<E>& one : {weight, proj})
        if (one.count != c || one.width != c || one.token != c) return MISFIT;
    if (sums.count != shape.batch * c * (d + 1) || count < 1) return MISFIT;
    Buffer<P> query_room, proj_room;
    const Matrix<P> queries = weights_of(weight.data, c, c, query_room), behind = weights_of(proj.data, c, c, proj_room);
    Buffer<TurnedState<P>> states(shape.batch * heads_of);
    const float floor = eps * float(count);
    parallel(shape.threads, [&](int me, int all) {
        for (int64_t i = me; i < int64_t(states.size()); i += all) states[i].set(sums.data + i * d * (d + 1), d);
        barrier();
        NormedTokens<E> around{c};
        Buffer<float> projected(c * T), answers(c * T);
        Buffer<P> features;
        const auto answer = [&](const Piece& piece) {
            const int64_t columns = padded(piece.count);
            const Rows out_of{projected.data(), columns};
            multiply(c, columns, deep<P>(c), queries, around.of(x, piece, norm), columns, out_of);
            biased(projected.data(), c, c, bias, feature, piece.count, columns);
            for (int64_t h = 0; h < heads_of; h++) {
                const TurnedState<P>& state = states[piece.b * heads_of + h];
                const float* q = &projected[h * d * columns];
                float* y = &answers[h * d * columns];
                const Panel<P> panel = packed(q, columns, d, columns, features);
                multiply(d, columns, deep<P>(d), state.left, panel.data, panel.row, {y, columns});
                for (int64_t t = 0; t < columns; t += W) {
                    vec z = fill(floor);
                    for (int64_t i = 0; i < d; i++) z += load(q + i * columns + t) * state.total[i];
                    const vec factor = 1.0f / z;
                    for (int64_t i = 0; i < d; i++) store(y + i * columns + t, load(y + i * columns + t) * factor);
                }
            }
            const Panel<P> panel = packed(answers.data(), columns, c, columns, features);
            multiply(c, columns, deep<P>(c), behind, panel.data, panel.row, out_of);
            around.add(projected.data(), x, piece, proj_bias, scale, out);
        };
        if (shape.batch == 1) even_pieces(shape.queries, me, all, answer);
        else pieces(shape, shape.queries, me, all, answer);
    });
    return DONE;
}

KERNEL(
    linear_branch_answers,
    (Shape shape, AnyTokens x, Norm norm, AnyTokens weight, Numbers bias, Numbers sums, AnyTokens proj, Numbers proj_bias,
     Numbers scale, AnyTokens out, int64_t heads, int64_t count, int32_t feature, float eps),
    (shape, x, norm, weight, bias, sums, proj, proj_bias, scale, out, heads, count, feature, eps))
