// The MLP of a block with its norm and its residual: see ops/mlp_formula.py.
#pragma once
#include "activations.h"
#include "branches.h"

// Where hidden channels × tokens go: plus their biases, behind the activation, as the right side of the next product
template <class E, class Act>
struct Activated {
    Act act;
    const float* bias;
    Operand<E>* features;
    TurnedTokens lie;
    template <int r, int v>
    void operator()(const vec (&sums)[r][v], int64_t row, int64_t column) const {
        constexpr int step = std::is_same_v<Operand<E>, pair> ? 2 : 1;
        UNROLLED for (int i = 0; i < r; i += step)
            UNROLLED for (int j = 0; j < v; j++) {
                Operand<E>* to = features + lie.place(deep<Operand<E>>(row + i), column) + j * W;
                const vec first = act(sums[i][j] + bias[row + i]);
                if constexpr (step == 1) store(to, first);
                else store_two(to, lie.row, first, i + 1 < r ? act(sums[i + 1][j] + bias[row + i + 1]) : vec{});
            }
    }
};

// out = x + scale · (W₂ act(W₁ norm(x) + b₁) + b₂) of tokens (1, 1, n, c), weights (hidden, c) and (c, hidden)
template <class E, class Act>
Answer mlp_with(
    Act act, Shape shape, Tokens<E> x, const Norm& norm, Tokens<E> first, const Parameter& first_bias, Tokens<E> second,
    const Parameter& second_bias, const Parameter& scale, Tokens<E> out) {
    typedef Operand<E> P;
    const int64_t d = shape.width, hidden = first.count;
    if (!fits(shape, shape.queries, x, out) || !fits(d, norm.weight, norm.bias, second_bias, scale)) return MISFIT;
    if (!fits(hidden, first_bias) || first.width != d || second.width != hidden || second.count != d) return MISFIT;
    if (first.token != d || second.token != hidden || shape.batch * shape.heads != 1) return MISFIT;
    Weights<E> inner(first), outer(second);
    constexpr int64_t part = 192;  // hidden channels at a time: they stay in the L2 cache; even, as pairs have it
    Buffer<float> shared_sums;
    Buffer<P> shared_features;
    const bool by_channels = is_shared_by_channels<P>(shape.queries, d * hidden, shape.threads);
    Buffer<const float*> parts(shape.threads);  // the threads' sums, where they share channels
    const int64_t alone = by_channels ? shape.queries : for_each_thread(shape.queries, d * hidden * W, shape.threads);
    if (alone < shape.queries) shared_sums.resize(d * T), shared_features.resize(deep<P>(hidden) * T);
    parallel(shape.threads, [&](int me, int all) {
        inner.prepare(me, all);
        outer.prepare(me, all);
        NormedTokens<E> around{d, many_tokens<P>(alone, by_channels ? 1 : all)};
        const Unwritten<float> sums(d * around.most);
        const Unwritten<P> features(deep<P>(part) * around.most);
        // what some of the hidden channels give
        const auto branch = [&](const Piece& piece, int64_t first_channel, int64_t behind) {
            const int64_t columns = padded(piece.count);
            const Panel<P> tokens = around.of(x, piece, norm);
            const TurnedTokens lie{deep<P>(part), columns};
            for (int64_t from = first_channel; from < behind; from += part) {
                const int64_t count = std::min(part, behind - from);
                const Activated<E, Act> activated{act, first_bias.data + from, features.data, lie};
                multiply(count, columns, deep<P>(d), inner.from(from), tokens, activated);
                const Matrix<P> some = outer.from(0, deep<P>(from));
                const Panel<P> right = lie.at(features.data);
                multiply(d, columns, deep<P>(count), some, right, {sums.data, columns}, from > first_channel);
            }
        };
        const Share inside{hidden, me, all}, outside{d, me, all};
        if (by_channels) {
            const int64_t columns = padded(shape.queries), first_token = columns / W * me / all * W;
            const int64_t behind = columns / W * (me + 1) / all * W;
            branch({0, 0, 0, 0, shape.queries}, inside.from, inside.from + inside.count);
            if (!inside.count) std::fill_n(sums.data, d * columns, 0.0f);
            parts[me] = sums.data;
            barrier();
            for (int other = 0; other < all; other++)
                for (int64_t i = 0; other != me && i < d * columns; i += columns)
                    for (int64_t t = first_token; t < behind; t += W)
                        store(sums.data + i + t, load(sums.data + i + t) + load(parts[other] + i + t));
            const Piece mine{0, 0, 0, first_token, std::min(behind, shape.queries) - first_token};
            around.add(sums.data + first_token, columns, x, mine, second_bias, scale, out);
            return barrier();  // others read these sums
        }
        even_pieces(alone, me, all, [&](const Piece& piece) {
            branch(piece, 0, hidden);
            around.add(sums.data, padded(piece.count), x, piece, second_bias, scale, out);
        }, around.most);
        shared_pieces(alone, shape.queries, [&](const Piece& piece) {
            const int64_t columns = padded(piece.count);
            const Panel<P> tokens = around.of(x, piece, norm);
            const TurnedTokens lie{deep<P>(hidden), columns};
            P* const to = shared_features.data() + lie.place(deep<P>(inside.from), 0);
            const Activated<E, Act> activated{act, first_bias.data + inside.from, to, lie};
            multiply(inside.count, columns, deep<P>(d), inner.from(inside.from), tokens, activated);
            barrier();
            const Rows branch{shared_sums.data() + outside.from * columns, columns};
            const Panel<P> right = lie.at(shared_features.data());
            multiply(outside.count, columns, deep<P>(hidden), outer.from(outside.from), right, branch);
            barrier();
            if (me == 0) around.add(shared_sums.data(), columns, x, piece, second_bias, scale, out);
            barrier();
        });
    });
    return DONE;
}

template <class E>
Answer mlp_of(
    Shape shape, Tokens<E> x, const Norm& norm, Tokens<E> first, const Parameter& first_bias, Tokens<E> second,
    const Parameter& second_bias, const Parameter& scale, Tokens<E> out, int32_t activation) {
    return with_activation<E>(activation, [&](auto act) {
        return mlp_with(act, shape, x, norm, first, first_bias, second, second_bias, scale, out);
    });
}

KERNEL(
    mlp,
    (Shape shape, AnyTokens x, AnyNorm norm, AnyTokens first, AnyNumbers first_bias, AnyTokens second,
     AnyNumbers second_bias, AnyNumbers scale, AnyTokens out, int32_t activation),
    (shape, x, norm, first, first_bias, second, second_bias, scale, out, activation))
