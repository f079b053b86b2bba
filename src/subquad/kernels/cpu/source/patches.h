// What a plain network begins with: patches of an image, projected, with positions, behind prefix tokens. See
// ops/patch_formula.py.
#pragma once
#include "branches.h"

// Where patches × some channels of their projection go: plus biases and positions, to tokens from `first` on
template <class E>
struct Placed {
    const Tokens<E>& out;
    const E* positions;  // of the first token; channels lie side by side
    const int64_t image, first, channel, channels;
    const float* bias;
    template <int r, int v>
    void operator()(const vec (&sums)[r][v], int64_t row, int64_t column) const {
        UNROLLED for (int j = 0; j < v; j++) {
            const int64_t c = channel + column + j * W, n = channels - c;
            if (n <= 0) continue;
            const auto read = [&](const auto* p) { return n >= W ? load(p + c) : load(p + c, n); };
            const vec more = bias ? read(bias) : vec{};
            UNROLLED for (int i = 0; i < r; i++) {
                vec x = sums[i][j] + more;
                if (positions) x += read(positions + (row + i) * channels);
                E* to = out.at(image, 0, first + row + i) + c;
                n >= W ? store(to, x) : store(to, x, n);
            }
        }
    }
};

// The numbers of a patch, channel by channel and row by row, from the image's rows that lie as tokens of a channel; zeros
// beyond the image
template <class E, class To>
void gather_patch(const Tokens<E>& image, int64_t b, int64_t top, int64_t left, int64_t side, To* to) {
    const int64_t rows = std::min(side, image.count - top), columns = std::min(side, image.width - left);
    for (int64_t channel = 0; channel < image.heads; channel++)
        for (int64_t y = 0; y < side; y++, to += side) {
            if (y >= rows || columns < side) std::fill(to, to + side, To{});
            if (y < rows) copy(image.at(b, channel, top + y) + left, columns, to);
        }
}

// out (b, 1, m + n, c) = [prefix (m, c); W patches + b] + positions, of the patches alone or of all tokens
template <class E>
Answer patch_tokens_of(
    Shape shape, Tokens<E> image, int64_t side, Tokens<E> weight, const Parameter& bias, Tokens<E> prefix,
    Tokens<E> positions, Tokens<E> out) {
    typedef Operand<E> P;
    typedef std::conditional_t<std::is_same_v<P, pair>, bf16, float> Single;
    const int64_t c = shape.width, before = prefix.data ? prefix.count : 0;
    if (side < 1 || image.images != shape.batch) return MISFIT;
    const int64_t across = (image.width + side - 1) / side, count = (image.count + side - 1) / side * across;
    const int64_t numbers = image.heads * side * side;
    if (shape.heads != 1 || shape.queries != before + count || !fits(shape, shape.queries, out)) return MISFIT;
    if (weight.count != c || weight.width != numbers || weight.token != numbers || !fits(c, bias)) return MISFIT;
    if (prefix.data && (prefix.width != c || prefix.token != c)) return MISFIT;
    const bool of_all = positions.count == before + count;
    if (positions.data && (positions.width != c || positions.token != c || (!of_all && positions.count != count)))
        return MISFIT;
    constexpr int64_t part = PANEL;
    const int64_t depth = deep<P>(numbers), row = padded(numbers);
    Buffer<P> panels(padded(c, part) * depth);
    parallel(shape.threads, [&](int me, int all) {
        turn_panels(weight, me, all, panels.data());
        Buffer<Single> patches(T * row);
        const Matrix<P> left{reinterpret_cast<const P*>(patches.data()), deep<P>(row), 1};
        const auto embed = [&](const Piece& piece) {
            for (int64_t t = 0; t < piece.count; t++) {
                const int64_t place = piece.first + t;
                gather_patch(image, piece.b, place / across * side, place % across * side, side, &patches[t * row]);
            }
            const E* places = positions.data ? positions.data + (piece.first + (of_all ? before : 0)) * c : nullptr;
            for (int64_t from = 0; from < c; from += part) {
                const Placed<E> put{out, places, piece.b, before + piece.first, from, c, bias.data};
                const Panel<P> right{&panels[from * depth], part};
                multiply(piece.count, padded(std::min(part, c - from)), depth, left, right, put);
            }
        };
        if (shape.batch == 1) even_pieces(count, me, all, embed);
        else pieces(shape, count, me, all, embed);
        for (int64_t b = me; b < shape.batch; b += all)
            for (int64_t t = 0; t < before; t++)
                for (int64_t i = 0; i < c; i += W) {
                    const int64_t n = std::min<int64_t>(W, c - i);
                    vec x = load(prefix.data + t * c + i, n);
                    if (positions.data && of_all) x += load(positions.data + t * c + i, n);
                    store(out.at(b, 0, t) + i, x, n);
                }
    });
    return DONE;
}

KERNEL(
    patch_tokens,
    (Shape shape, AnyTokens image, int64_t side, AnyTokens weight, AnyNumbers bias, AnyTokens prefix,
     AnyTokens positions, AnyTokens out),
    (shape, image, side, weight, bias, prefix, positions, out))
