// Linear attention some tokens at a time: the sums of some keys, and answers from those of all: see ops/linear_formula.py.
#pragma once
#include "states.h"

// [Σ φ(k)ᵀ v, Σ φ(k)] of each head to `out`, (d, d + 1)
template <class E>
Answer linear_sums_of(Shape shape, Tokens<E> k, Tokens<E> v, Numbers out, int32_t feature) {
    const Turning still{};
    StateAttention<E> it{shape, k, k, v, still, feature, DIVIDED, 0};
    const int64_t d = it.d, row = it.row, side = d + 1;
    if (!it.fits_all() || it.several != 1 || out.count != it.all_heads() * d * side) return MISFIT;
    Sums queries(shape.threads, it.wide), sums(shape.threads, it.size);
    const float count = float(shape.keys);
    parallel(shape.threads, [&](int me, int all) {
        it.template gather_keys<Operand<E>>(sums, queries, me, all);
        heads(shape, me, all, [&](int64_t index) {
            it.collect(sums, index);
            const float* state = &it.states[index * it.size];
            for (int64_t i = 0; i < d; i++) {
                float* to = out.data + (index * d + i) * side;
                for (int64_t c = 0; c < d; c++) to[c] = state[i * row + c] * count;
                to[d] = state[it.total + i] * count;
            }
        });
    });
    return DONE;
}

KERNEL(linear_sums, (Shape shape, AnyTokens k, AnyTokens v, Numbers out, int32_t feature), (shape, k, v, out, feature))

// φ(q) [Σ φ(k)ᵀ v] / (φ(q)·Σ φ(k) + n ε), n = `count` keys
template <class E>
Answer linear_answers_of(
    Shape shape, Tokens<E> q, Numbers sums, Tokens<E> out, int64_t count, int32_t feature, float eps) {
    typedef Operand<E> P;
    const Turning still{};
    StateAttention<E> it{shape, q, q, q, still, feature, DIVIDED, eps * float(count)};
    const int64_t d = it.d, row = it.row, side = d + 1, panel = deep<P>(d) * row;
    if (!it.fits_all() || it.several != 1 || !fits(shape, shape.queries, out) || count < 1 ||
        sums.count != it.all_heads() * d * side)
        return MISFIT;
    Buffer<P> panels(it.all_heads() * panel);
    parallel(shape.threads, [&](int me, int all) {
        Buffer<float> room(T * row), spare;
        Buffer<P> left;
        heads(shape, me, all, [&](int64_t index) {
            float* state = &it.states[index * it.size];
            for (int64_t i = 0; i < d; i++) {
                const float* from = sums.data + (index * d + i) * side;
                for (int64_t c = 0; c < d; c++) state[i * row + c] = from[c];
                state[it.total + i] = from[d];
            }
            pack(state, row, d, row, &panels[index * panel]);
        });
        pieces(shape, shape.queries, me, all, [&](const Piece& piece) {
            float z[T], factors[T];
            query_features(q, piece, d, feature, room.data());
            it.factors_of(piece, room.data(), z, factors);
            const Matrix<P> features = lowered(room.data(), row, piece.count, row, left);
            to_tokens(out, piece, d, spare, [&](Rows c) {
                multiply(piece.count, row, deep<P>(d), features, &panels[piece.index * panel], row, c);
                it.finish(piece, c, z, factors);
            });
        });
    });
    return DONE;
}

KERNEL(
    linear_answers,
    (Shape shape, AnyTokens q, Numbers sums, AnyTokens out, int64_t count, int32_t feature, float eps),
    (shape, q, sums, out, count, feature, eps))
