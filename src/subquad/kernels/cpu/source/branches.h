// What both halves of a block have around their core: a norm in front, products with weights as they lie, a residual
// behind. Everything between is turned, channels × tokens, so that weights are read as they lie in memory, a number or a
// pair for a row of tokens.
#pragma once
#include "tokens.h"

// Weights (rows × width) as the left side of a product: where they lie, or in `room`
inline Matrix<float> weights_of(const float* weight, int64_t, int64_t width, Buffer<float>&) {
    return {weight, width, 1};
}
inline Matrix<float> weights_of(const bf16* weight, int64_t rows, int64_t width, Buffer<float>& room) {
    return matrix_of(weight, width, rows, width, room);
}
inline Matrix<pair> weights_of(const bf16* weight, int64_t rows, int64_t width, Buffer<pair>& room) {
    if (width % 2 == 0) return {reinterpret_cast<const pair*>(weight), width / 2, 1};
    return lowered(weight, width, rows, width, room);
}

// Rows as the right side of a product with weights, (depth × columns), with zeros beyond `count`
template <class P>
void turn_tokens(Matrix<P> rows, int64_t count, int64_t depth, int64_t columns, Buffer<P>& to) {
    if (count < columns) std::fill(to.begin(), to.end(), P{});
    turn(rows.data, rows.row, count, depth, to.data(), columns);
}

constexpr int64_t PANEL = V * W;  // rows of weights that are turned side by side, as many as a tile has columns
inline int64_t padded(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Weights (rows × depth) turned, PANEL of them behind others, by all threads: where tokens are the left side, as they are
// to lie when they are projected
template <class P>
void turn_panels(const Matrix<P>& weights, int64_t rows, int64_t depth, int me, int all, P* panels) {
    const int64_t parts = (rows + PANEL - 1) / PANEL;
    for (int64_t i = parts * me / all; i < parts * (me + 1) / all; i++) {
        const int64_t first = i * PANEL, count = std::min(PANEL, rows - first);
        turn(weights.data + first * weights.row, weights.row, count, depth, panels + first * depth, PANEL);
    }
    barrier();
}

struct AnyNorm {
    AnyNumbers weight, bias;
    float eps;
};

struct Norm {
    Parameter weight, bias;
    float eps;
    Norm(const AnyNorm& x) : weight(x.weight), bias(x.bias), eps(x.eps) {}
};

// Tokens less their mean over their deviation, as `padded` floats, or numbers rounded to bf16: some at a time, as what each
// of them sums up is waited for
template <int some, class E, class To>
void normed(const E* const (&from)[some], int64_t width, const Norm& norm, To* const (&to)[some]) {
    const int64_t whole = width / W * W, left = width - whole;
    const auto rest = [&](int i) { return load(from[i] + whole, left); };
    vec sums[some]{};
    for (int64_t c = 0; c < whole; c += W)
        UNROLLED for (int i = 0; i < some; i++) sums[i] += load(from[i] + c);
    float means[some], shares[some];
    UNROLLED for (int i = 0; i < some; i++) {
        if (left) sums[i] += rest(i);
        means[i] = sum(sums[i]) / float(width);
        sums[i] = vec{};
    }
    for (int64_t c = 0; c < whole; c += W)
        UNROLLED for (int i = 0; i < some; i++) {
            const vec x = load(from[i] + c) - means[i];
            sums[i] += x * x;
        }
    UNROLLED for (int i = 0; i < some; i++) {
        if (left) {
            const vec x = first_of(rest(i) - means[i], left);
            sums[i] += x * x;
        }
        shares[i] = 1 / std::sqrt(sum(sums[i]) / float(width) + norm.eps);
    }
    const float *weight = norm.weight.data, *bias = norm.bias.data;
    for (int64_t c = 0; c < whole; c += W)
        UNROLLED for (int i = 0; i < some; i++)
            store(to[i] + c, (load(from[i] + c) - means[i]) * shares[i] * load(weight + c) + load(bias + c));
    if (left)
        UNROLLED for (int i = 0; i < some; i++)
            store(to[i] + whole, (rest(i) - means[i]) * shares[i] * load(weight + whole, left) + load(bias + whole, left));
}

// What surrounds a half of a block, a piece of tokens at a time: their norm before it, the residual behind it
template <class E>
struct NormedTokens {
    typedef Operand<E> P;
    typedef std::conditional_t<std::is_same_v<P, pair>, bf16, float> Single;
    const int64_t width, row = padded(width);
    Buffer<float> rows = Buffer<float>(T * row);
    Buffer<P> left = Buffer<P>(deep<P>(T * row)), turned = Buffer<P>(deep<P>(width) * T);

    // A piece behind its norm, as the right side of a product with weights, (deep(c) × padded(count))
    const P* of(const Tokens<E>& x, const Piece& piece, const Norm& norm) {
        turn_tokens(left_of(x, piece, norm), piece.count, deep<P>(width), padded(piece.count), turned);
        return turned.data();
    }

    // The same as a left side, (count × deep(c))
    Matrix<P> left_of(const Tokens<E>& x, const Piece& piece, const Norm& norm) {
        const auto from = [&](int64_t t) -> const E* { return x.at(piece.b, 0, piece.first + t); };
        const auto to = [&](int64_t t) { return operands(t); };
        int64_t t = 0;
        for (; t + 4 <= piece.count; t += 4)
            normed<4>(
                {from(t), from(t + 1), from(t + 2), from(t + 3)}, width, norm, {to(t), to(t + 1), to(t + 2), to(t + 3)});
        for (; t < piece.count; t++) normed<1>({from(t)}, width, norm, {to(t)});
        return {left.data(), deep<P>(row), 1};
    }

    // One of the piece's tokens behind its norm, as it is multiplied
    Single* operands(int64_t t) { return reinterpret_cast<Single*>(&left[t * deep<P>(row)]); }

    // out = x + scale · (branch + bias) of a piece, of its branch (channels × padded(count))
    void add(
        const float* branch, const Tokens<E>& x, const Piece& piece, const Numbers& bias, const Numbers& scale,
        const Tokens<E>& out) {
        const int64_t columns = padded(piece.count);
        turn(branch, columns, width, piece.count, rows.data(), row);
        for (int64_t t = 0; t < piece.count; t++) {
            const E* from = x.at(piece.b, 0, piece.first + t);
            E* to = out.at(piece.b, 0, piece.first + t);
            for (int64_t c = 0; c < width; c += W) {
                const int64_t n = width - c;
                const auto read = [&](const auto* p) { return n >= W ? load(p + c) : load(p + c, n); };
                vec added = load(&rows[t * row + c]);
                if (bias.data) added += read(bias.data);
                if (scale.data) added *= read(scale.data);
                added += read(from);
                n >= W ? store(to + c, added) : store(to + c, added, n);
            }
        }
    }
};
