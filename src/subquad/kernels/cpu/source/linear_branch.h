// The first half of a block with linear attention, from its norm to its residual: see ops/branch_at_once.py. Two walks
// over the tokens, of which the first sums up keys and values and the second answers: neither writes down what it
// projects. Where tokens are many, the projection back is multiplied by the state before it is by tokens.
#pragma once
#include "branches.h"
#include "feature_maps.h"

// Where projected channels × tokens go: plus biases, features of the first `featured` channels, which are added to
// `totals`, W numbers for each of them, if there are any; absent tokens have no features
template <class To>
struct Projected {
    const float* bias;
    int feature;
    int64_t featured, count;
    TurnedTokens lie;
    To* rows;
    float* totals;
    template <int r, int v>
    void operator()(const vec (&sums)[r][v], int64_t row, int64_t column) const {
        UNROLLED for (int i = 0; i < r; i++) {
            const bool has_features = row + i < featured;
            vec total{};
            UNROLLED for (int j = 0; j < v; j++) {
                const int64_t t = column + j * W;
                vec value = sums[i][j] + (bias ? bias[row + i] : 0.0f);
                if (has_features) value = feature_of(value, feature);
                if (count - t < W) value = first_of(value, count - t);
                total += value;
                store(rows + lie.place(row + i, column) + j * W, value);
            }
            if (totals && has_features) store(totals + (row + i) * W, load(totals + (row + i) * W) + total);
        }
    }
};

inline bool is_branch(const Shape& shape, int64_t heads, int32_t feature) {
    return shape.heads == 1 && heads > 0 && shape.width % heads == 0 && (feature == RELU || feature == ELU);
}

// [Σ φ(k)ᵀ v, Σ φ(k)] of each head to `out`, (b, h, d, d + 1), of tokens (b, 1, n, c) and weights (2c, c)
template <class E>
Answer linear_branch_sums_of(
    Shape shape, Tokens<E> x, const Norm& norm, Tokens<E> weight, const Parameter& bias, Numbers out, int64_t heads_of,
    int32_t feature) {
    typedef Operand<E> P;
    typedef typename NormedTokens<E>::Single Single;
    if (!is_branch(shape, heads_of, feature)) return MISFIT;
    const int64_t c = shape.width, d = c / heads_of, row = padded(d), side = d + 1;
    if (!fits(shape, shape.keys, x) || !fits(c, norm.weight, norm.bias) || !fits(2 * c, bias)) return MISFIT;
    if (weight.count != 2 * c || weight.width != c || weight.token != c) return MISFIT;
    if (out.count != shape.batch * c * side) return MISFIT;
    Weights<E> weights(weight);
    const int64_t totals = c * row;  // behind the states of all heads, W numbers for each feature
    Sums sums(shape.threads, totals + c * W);
    parallel(shape.threads, [&](int me, int all) {
        weights.prepare(me, all);
        NormedTokens<E> around{c};
        const Unwritten<Single> rows(2 * c * T);
        Buffer<P> panel(deep<P>(T) * row);
        sums.gather_images(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            const int64_t columns = padded(piece.count), depth = deep<P>(columns);
            const TurnedTokens lie{2 * c, columns, columns, 1};  // side by side: they are a left side as well
            const Projected<Single> put{bias.data, feature, c, piece.count, lie, rows.data, sum + totals};
            multiply(2 * c, columns, deep<P>(c), weights.from(0), around.of(x, piece, norm), put);
            const Matrix<P> keys{reinterpret_cast<const P*>(rows.data), depth, 1};
            for (int64_t first = 0; first < c; first += d) {
                turn(keys.data + (c + first) * depth, depth, d, depth, panel.data(), row);
                const Matrix<P> own{keys.data + first * depth, depth, 1};
                multiply(d, row, depth, own, panel.data(), row, {sum + first * row, row}, true);
            }
        });
        heads(shape, me, all, [&](int64_t image) {
            float* to = out.data + image * c * side;
            std::fill(to, to + c * side, 0.0f);
            sums.each_sum(image, [&](const float* part) {
                for (int64_t i = 0; i < c; i++) {
                    for (int64_t j = 0; j < d; j++) to[i * side + j] += part[i * row + j];
                    to[i * side + d] += sum(load(part + totals + i * W));
                }
            });
        });
    });
    return DONE;
}

KERNEL(
    linear_branch_sums,
    (Shape shape, AnyTokens x, AnyNorm norm, AnyTokens weight, AnyNumbers bias, Numbers out, int64_t heads,
     int32_t feature),
    (shape, x, norm, weight, bias, out, heads, feature))

// A head's state S, turned, as what multiplies its queries and as what is multiplied by a projection, and Σ φ(k)
template <class P>
struct TurnedState {
    Buffer<float> rows, total;
    Buffer<P> left_room, right_room;
    Matrix<P> left;
    Panel<P> right;

    void set(const float* sums, int64_t d) {
        rows.assign(d * padded(d), 0.0f);
        total.resize(d);
        for (int64_t i = 0; i < d; i++, sums += d + 1) {
            for (int64_t j = 0; j < d; j++) rows[j * padded(d) + i] = sums[j];
            total[i] = sums[d];
        }
        left = lowered(rows.data(), padded(d), d, padded(d), left_room);
        right = packed(rows.data(), padded(d), d, padded(d), right_room);
    }
};

// out = x + scale · (P y + b), y = φ(q) [Σ φ(k)ᵀ v] / (φ(q)·Σ φ(k) + n ε), of n = `count` keys
template <class E>
Answer linear_branch_answers_of(
    Shape shape, Tokens<E> x, const Norm& norm, Tokens<E> weight, const Parameter& bias, Numbers sums, Tokens<E> proj,
    const Parameter& proj_bias, const Parameter& scale, Tokens<E> out, int64_t heads_of, int64_t count, int32_t feature,
    float eps) {
    typedef Operand<E> P;
    typedef typename NormedTokens<E>::Single Single;
    if (!is_branch(shape, heads_of, feature)) return MISFIT;
    const int64_t c = shape.width, d = c / heads_of;
    if (!fits(shape, shape.queries, x, out) || !fits(c, norm.weight, norm.bias, bias, proj_bias, scale)) return MISFIT;
    for (const Tokens<E>& one : {weight, proj})
        if (one.count != c || one.width != c || one.token != c) return MISFIT;
    if (sums.count != shape.batch * c * (d + 1) || count < 1) return MISFIT;
    Weights<E> queries(weight), behind(proj);
    Buffer<TurnedState<P>> states(shape.batch * heads_of);
    // P Sᵀ of all heads once, rather than Sᵀ and P for each query: of fewer than some six times as many as channels it
    // takes longer; pairs must not be of two heads
    const bool early = shape.queries > 6 * c && (std::is_same_v<P, float> || d % 2 == 0);
    Buffer<Single> merged(early ? shape.batch * c * c : 0);
    const float floor = eps * float(count);
    // rows of P Sᵀ, of each image: a head's columns, and what a vector is longer, over which the next head writes
    const auto merge = [&](int64_t first, int64_t rows) {
        const int64_t row = c + W;
        Buffer<float> products(rows * row);
        for (int64_t image = 0; image < shape.batch; image++) {
            for (int64_t h = 0; h < heads_of; h++) {
                const Matrix<P> own = behind.from(first, deep<P>(h * d));
                const Panel<P>& state = states[image * heads_of + h].right;
                multiply(rows, padded(d), deep<P>(d), own, state.data, state.row, {&products[h * d], row});
            }
            for (int64_t i = 0; i < rows; i++) copy(&products[i * row], c, &merged[(image * c + first + i) * c]);
        }
    };
    parallel(shape.threads, [&](int me, int all) {
        queries.prepare(me, all);
        behind.prepare(me, all);
        for (int64_t i = me; i < int64_t(states.size()); i += all) states[i].set(sums.data + i * d * (d + 1), d);
        barrier();
        if (early) merge(c * me / all, c * (me + 1) / all - c * me / all);
        barrier();
        NormedTokens<E> around{c};
        const Unwritten<float> features(c * T), answers(c * T);
        Buffer<P> room;
        const auto answer = [&](const Piece& piece) {
            const int64_t columns = padded(piece.count);
            const TurnedTokens lie{c, columns};
            const Projected<float> put{bias.data, feature, c, columns, lie, features.data, nullptr};
            multiply(c, columns, deep<P>(c), queries.from(0), around.of(x, piece, norm), put);
            for (int64_t h = 0; h < heads_of; h++) {
                const TurnedState<P>& state = states[piece.b * heads_of + h];
                const float* q = features.data + lie.place(h * d, 0);
                float* y = (early ? features : answers).data + lie.place(h * d, 0);
                vec factors[T / W];
                for (int64_t t = 0; t < columns; t += W) {
                    vec z = fill(floor);
                    for (int64_t i = 0; i < d; i++) z += load(q + lie.place(i, t)) * state.total[i];
                    factors[t / W] = 1.0f / z;
                }
                if (!early) multiply(d, columns, deep<P>(d), state.left, right_of(lie, q, d, room), lie.into(y));
                for (int64_t t = 0; t < columns; t += W)
                    for (int64_t i = 0; i < d; i++)
                        store(y + lie.place(i, t), load(y + lie.place(i, t)) * factors[t / W]);
            }
            float *from = (early ? features : answers).data, *to = (early ? answers : features).data;
            const Matrix<P> own{reinterpret_cast<const P*>(merged.data() + piece.b * c * c), deep<P>(c), 1};
            multiply(c, columns, deep<P>(c), early ? own : behind.from(0), right_of(lie, from, c, room), {to, columns});
            around.add(to, columns, x, piece, proj_bias, scale, out);
        };
        if (shape.batch == 1) even_pieces(shape.queries, me, all, answer);
        else pieces(shape, shape.queries, me, all, answer);
    });
    return DONE;
}

KERNEL(
    linear_branch_answers,
    (Shape shape, AnyTokens x, AnyNorm norm, AnyTokens weight, AnyNumbers bias, Numbers sums, AnyTokens proj,
     AnyNumbers proj_bias, AnyNumbers scale, AnyTokens out, int64_t heads, int64_t count, int32_t feature, float eps),
    (shape, x, norm, weight, bias, sums, proj, proj_bias, scale, out, heads, count, feature, eps))
