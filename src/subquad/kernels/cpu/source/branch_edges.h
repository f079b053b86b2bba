// What lies around any mechanism in a block: a norm with the projection behind it, and the projection back with its
// residual. See ops/branch_at_once.py.
#pragma once
#include "activations.h"
#include "branches.h"

// The channels of a projection that a thread computes: all of them, or those whose weights it has turned (`turn_panels`)
struct SomeChannels {
    int64_t first = 0, behind;
    SomeChannels(int64_t count) : behind(count) {}
    SomeChannels(int64_t count, int me, int all) {
        const int64_t parts = (count + PANEL - 1) / PANEL;
        first = parts * me / all * PANEL, behind = std::min(count, parts * (me + 1) / all * PANEL);
    }
};

// Where tokens × some channels of a projection go: plus biases, if there are any, behind an activation, to tokens from
// `first` on
template <class E, class Act>
struct Biased {
    Act act;
    const Tokens<E>& out;
    const int64_t first, channel, channels;
    const float* bias;
    template <int r, int v>
    void operator()(const vec (&sums)[r][v], int64_t row, int64_t column) const {
        UNROLLED for (int j = 0; j < v; j++) {
            const int64_t c = channel + column + j * W, n = channels - c;
            const vec more = !bias || n <= 0 ? vec{} : n >= W ? load(bias + c) : load(bias + c, n);
            UNROLLED for (int i = 0; i < r; i++) {
                E* to = out.at(0, 0, first + row + i) + c;
                if (n >= W) store(to, act(sums[i][j] + more));
                else if (n > 0) store(to, act(sums[i][j] + more), n);
            }
        }
    }
};

// out = act(W norm(x) + b) of tokens (1, 1, n, c) and weights (m, c); behind these m channels norm(x), where out has m + c.
// Without a norm it is x that is projected.
template <class E, class Act>
Answer norm_projection_with(
    Act act, Shape shape, Tokens<E> x, const Norm& norm, Tokens<E> weight, const Parameter& bias, Tokens<E> out) {
    typedef Operand<E> P;
    const int64_t c = shape.width, all_rows = weight.count, more = out.width - all_rows;
    if (!fits(shape, shape.queries, x) || !fits(c, norm.weight, norm.bias) || !fits(all_rows, bias)) return MISFIT;
    if (weight.width != c || weight.token != c || shape.batch * shape.heads != 1) return MISFIT;
    if (out.images * out.heads != 1 || out.count != x.count || (more != 0 && more != c)) return MISFIT;
    const bool has_norm = norm.weight.data && norm.bias.data;
    if (more && !has_norm) return MISFIT;
    constexpr int64_t part = PANEL;
    const int64_t depth = deep<P>(c);
    Buffer<P> panels(padded(all_rows, part) * depth);
    const bool by_channels = is_shared_by_channels<P>(shape.queries, all_rows * c, shape.threads);
    parallel(shape.threads, [&](int me, int all) {
        turn_panels(weight, me, all, panels.data());
        NormedTokens<E> around{c, many_tokens<P>(shape.queries, by_channels ? 1 : all)};
        Buffer<P> left;
        const auto project = [&](const Piece& piece, const SomeChannels& some) {
            const Matrix<P> tokens = has_norm ? around.left_of(x, piece, norm) : lowered(x, piece, c, left);
            for (int64_t from = some.first; from < some.behind; from += part) {
                const Biased<E, Act> put{act, out, piece.first, from, all_rows, bias.data};
                const int64_t columns = padded(std::min(part, all_rows - from));
                multiply(piece.count, columns, depth, tokens, Panel<P>{&panels[from * depth], part}, put);
            }
            // all threads of those that share channels have the same
            if (more && some.first == 0)
                for (int64_t t = 0; t < piece.count; t++)
                    copy(around.operands(t), c, out.at(0, 0, piece.first + t) + all_rows);
        };
        if (by_channels) return project({0, 0, 0, 0, shape.queries}, {all_rows, me, all});
        even_pieces<R>(
            shape.queries, me, all, [&](const Piece& piece) { project(piece, {all_rows}); }, around.most);
    });
    return DONE;
}

template <class E>
Answer norm_projection_of(
    Shape shape, Tokens<E> x, const Norm& norm, Tokens<E> weight, const Parameter& bias, Tokens<E> out,
    int32_t activation) {
    return with_activation_behind<E>(
        activation, [&](auto act) { return norm_projection_with(act, shape, x, norm, weight, bias, out); });
}

KERNEL(
    norm_projection,
    (Shape shape, AnyTokens x, AnyNorm norm, AnyTokens weight, AnyNumbers bias, AnyTokens out, int32_t activation),
    (shape, x, norm, weight, bias, out, activation))

// Where tokens × some channels of the projection back go: plus biases, times scales, to the tokens that they are added to
template <class E>
struct Added {
    const Tokens<E>&x, &out;
    const int64_t first, channel, channels;
    const float *bias, *scale;
    template <int r, int v>
    void operator()(const vec (&sums)[r][v], int64_t row, int64_t column) const {
        UNROLLED for (int j = 0; j < v; j++) {
            const int64_t c = channel + column + j * W, n = channels - c;
            if (n <= 0) continue;
            const auto read = [&](const auto* p) { return n >= W ? load(p + c) : load(p + c, n); };
            const vec more = bias ? read(bias) : vec{}, factor = scale ? read(scale) : fill(1);
            UNROLLED for (int i = 0; i < r; i++) {
                const vec y = read(x.at(0, 0, first + row + i)) + (sums[i][j] + more) * factor;
                E* to = out.at(0, 0, first + row + i) + c;
                n >= W ? store(to, y) : store(to, y, n);
            }
        }
    }
};

// out = x + scale · (W y + b) of tokens x (1, 1, n, c), y (1, 1, n, m) and weights (c, m)
template <class E>
Answer projection_residual_of(
    Shape shape, Tokens<E> x, Tokens<E> y, Tokens<E> weight, const Parameter& bias, const Parameter& scale,
    Tokens<E> out) {
    typedef Operand<E> P;
    const int64_t c = shape.width, m = y.width;
    if (!fits(shape, shape.queries, x, out) || !fits(c, bias, scale) || shape.batch * shape.heads != 1) return MISFIT;
    if (y.images * y.heads != 1 || y.count != x.count) return MISFIT;
    if (weight.count != c || weight.width != m || weight.token != m) return MISFIT;
    const int64_t depth = deep<P>(m);
    Buffer<P> panels(padded(c, PANEL) * depth);
    const bool by_channels = is_shared_by_channels<P>(shape.queries, c * m, shape.threads);
    parallel(shape.threads, [&](int me, int all) {
        turn_panels(weight, me, all, panels.data());
        Buffer<P> left;
        const auto project = [&](const Piece& piece, const SomeChannels& some) {
            const Matrix<P> tokens = lowered(y, piece, m, left);
            for (int64_t from = some.first; from < some.behind; from += PANEL) {
                const Added<E> put{x, out, piece.first, from, c, bias.data, scale.data};
                const Panel<P> right{&panels[from * depth], PANEL};
                multiply(piece.count, padded(std::min(PANEL, c - from)), depth, tokens, right, put);
            }
        };
        if (by_channels) return project({0, 0, 0, 0, shape.queries}, {c, me, all});
        even_pieces<R>(
            shape.queries, me, all, [&](const Piece& piece) { project(piece, {c}); }, many_tokens<P>(shape.queries, all));
    });
    return DONE;
}

KERNEL(
    projection_residual,
    (Shape shape, AnyTokens x, AnyTokens y, AnyTokens weight, AnyNumbers bias, AnyNumbers scale, AnyTokens out),
    (shape, x, y, weight, bias, scale, out))
