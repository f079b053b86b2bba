// What both halves of a block have around their core: a norm in front, products with weights as they lie, a residual
// behind. Everything between is turned, channels × tokens, so that weights are read as they lie in memory, a number or a
// pair for a row of tokens.
#pragma once
#include "tokens.h"

// Weights (rows × width) as the left side of a product: where they lie, or in `room`
inline Matrix<float> weights_of(const float* weight, int64_t, int64_t width, std::vector<float>&) {
    return {weight, width, 1};
}
inline Matrix<float> weights_of(const bf16* weight, int64_t rows, int64_t width, std::vector<float>& room) {
    return matrix_of(weight, width, rows, width, room);
}
inline Matrix<pair> weights_of(const bf16* weight, int64_t rows, int64_t width, std::vector<pair>& room) {
    if (width % 2 == 0) return {reinterpret_cast<const pair*>(weight), width / 2, 1};
    return lowered(weight, width, rows, width, room);
}

// Rows of tokens as the right side of a product with weights, (deep(width) × columns), with zeros beyond `count`
template <class P>
void turn(Matrix<P> rows, int64_t count, int64_t depth, int64_t columns, P* to) {
    if (count < columns) std::memset(static_cast<void*>(to), 0, depth * columns * sizeof(P));
    for (int64_t t = 0; t < count; t++)
        for (int64_t k = 0; k < depth; k++) to[k * columns + t] = rows.data[t * rows.row + k];
}

struct Norm {
    Numbers weight, bias;
    float eps;
};

// One token less its mean over its deviation, as `padded` floats
template <class E>
void normed(const E* from, int64_t width, const Norm& norm, float* to) {
    copy(from, width, to);
    for (int64_t c = width; c < padded(width); c++) to[c] = 0;
    vec total{}, squares{};
    for (int64_t c = 0; c < width; c += W) total += load(to + c);
    const float mean = sum(total) / float(width);
    for (int64_t c = 0; c < width; c += W) {
        vec rest = load(to + c) - mean;
        for (int64_t i = width - c; i < W; i++) rest[i] = 0;
        store(to + c, rest);
        squares += rest * rest;
    }
    const float share = 1 / std::sqrt(sum(squares) / float(width) + norm.eps);
    for (int64_t c = 0; c < width; c += W) {
        const bool whole = width - c >= W;
        const float *weight = norm.weight.data + c, *bias = norm.bias.data + c;
        const vec scale = whole ? load(weight) : load(weight, width - c), more = whole ? load(bias) : load(bias, width - c);
        store(to + c, load(to + c) * share * scale + more);
    }
}

// Tokens of a piece behind their norm, as the right side of a product with weights, (deep(c) × padded(count))
template <class E>
struct NormedTokens {
    typedef Operand<E> P;
    const int64_t width, row = padded(width);
    std::vector<float> rows = std::vector<float>(T * row);
    std::vector<P> left, turned = std::vector<P>(deep<P>(width) * T);

    const P* of(const Tokens<E>& x, const Piece& piece, const Norm& norm) {
        for (int64_t t = 0; t < piece.count; t++) normed(x.at(piece.b, 0, piece.first + t), width, norm, &rows[t * row]);
        turn(lowered(rows.data(), row, piece.count, row, left), piece.count, deep<P>(width), padded(piece.count), turned.data());
        return turned.data();
    }

    // out = x + scale · (branch + bias) of a piece, of its branch (channels × padded(count))
    void add(
        const float* branch, const Tokens<E>& x, const Piece& piece, const Numbers& bias, const Numbers& scale,
        const Tokens<E>& out) {
        const int64_t columns = padded(piece.count);
        for (int64_t c = 0; c < width; c++)
            for (int64_t t = 0; t < piece.count; t++) rows[t * row + c] = branch[c * columns + t];
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
