// What both halves of a block have around their core: a norm in front, products with weights as they lie, a residual
// behind. Everything between is turned, channels × tokens, so that weights are read as they lie in memory, a number or a
// pair for a row of tokens.
#pragma once
#include "tokens.h"

// Some rows of weights as the left side of a product: where they lie, or in `room`
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

// All weights (rows × width) as the left side of products: where they lie, or as all threads `prepare` them
template <class E>
class Weights {
    typedef Operand<E> P;
    typedef std::conditional_t<std::is_same_v<P, pair>, bf16, float> Single;
    const Tokens<E> given;
    const bool lie = std::is_same_v<E, P> || (std::is_same_v<P, pair> && given.width % 2 == 0);
    const int64_t row = deep<P>(lie ? given.width : padded(given.width));
    Unwritten<P> room;

public:
    explicit Weights(const Tokens<E>& weights) : given(weights), room(lie ? 0 : given.count * row) {}

    void prepare(int me, int all) {
        if (lie) return;
        for (int64_t i = given.count * me / all; i < given.count * (me + 1) / all; i++) {
            Single* to = reinterpret_cast<Single*>(room.data + i * row);
            copy(given.data + i * given.width, given.width, to);
            if (given.width % 2) to[given.width] = Single{};  // the other one of the last pair
        }
        barrier();
    }

    // From this row and operand on
    Matrix<P> from(int64_t first, int64_t operand = 0) const {
        const P* data = lie ? reinterpret_cast<const P*>(given.data) : room.data;
        return {data + first * row + operand, row, 1};
    }
};

// How a piece of turned tokens lies that weights are multiplied by, channels × tokens, PANEL of these behind others
struct TurnedTokens {
    int64_t channels, columns;
    int64_t row = std::min(columns, PANEL), reach = columns > PANEL ? channels : 1;
    template <class P>
    Panel<P> at(const P* data, int64_t channel = 0) const { return {data + channel * row, row, reach}; }
    Rows into(float* data, int64_t channel = 0) const { return {data + channel * row, row, reach}; }
    int64_t place(int64_t channel, int64_t column) const {
        return channel * row + column / PANEL * PANEL * reach + column % PANEL;
    }
};

// Turned tokens in fp32 as the right side of a product, of `channels` channels: where they lie, or in `room`
inline Panel<float> right_of(const TurnedTokens& lie, const float* rows, int64_t, Buffer<float>&) { return lie.at(rows); }
inline Panel<pair> right_of(const TurnedTokens& lie, const float* rows, int64_t channels, Buffer<pair>& room) {
    static_assert(std::is_same_v<Operand<bf16>, float> || PANEL >= T);  // pairs are packed of one panel
    return packed(rows, lie.row, channels, lie.columns, room);
}

// Rows as the right side of a product with weights, with zeros beyond `count`
template <class P>
Panel<P> turn_tokens(Matrix<P> rows, int64_t count, int64_t depth, P* to) {
    const TurnedTokens lie{depth, padded(count)};
    for (int64_t t = 0; t < count; t += PANEL)
        turn(rows.data + t * rows.row, rows.row, std::min(PANEL, count - t), depth, to + lie.place(0, t), lie.row);
    for (int64_t i = 0; count < lie.columns && i < depth; i++)
        std::fill_n(to + lie.place(i, count), lie.columns - count, P{});
    return lie.at(to);
}

inline int64_t padded(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Weights turned, PANEL rows of them behind others, by all threads: where tokens are the left side, as they are to lie when
// they are projected
template <class E, class P>
void turn_panels(const Tokens<E>& weights, int me, int all, P* panels) {
    const int64_t parts = (weights.count + PANEL - 1) / PANEL, depth = deep<P>(weights.width);
    Buffer<P> room;
    for (int64_t i = parts * me / all; i < parts * (me + 1) / all; i++) {
        const int64_t first = i * PANEL, count = std::min(PANEL, weights.count - first);
        const Matrix<P> some = weights_of(weights.data + first * weights.width, count, weights.width, room);
        turn(some.data, some.row, count, depth, panels + first * depth, PANEL);
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

// How many of a thread's tokens weights meet at a time, whole panels: in squares they are multiplied faster than they come
// from far caches
template <class P>
int64_t many_tokens(int64_t tokens, int64_t threads) {
#if defined(HAS_SQUARES)
    if (std::is_same_v<P, pair> && has_squares()) return std::clamp<int64_t>(padded(tokens / threads + W, PANEL), T, 4 * T);
#endif
    return T;
}

// Whether threads share the weights, each some channels of all tokens, rather than the tokens: where these are few, each
// would read all weights for its share of them
template <class P>
bool is_shared_by_channels(int64_t tokens, int64_t weights, int threads) {
    constexpr int64_t near = 1 << 19;  // half of an L2 cache
    return threads > 1 && tokens <= 4 * T && weights > near && many_tokens<P>(tokens, 1) > T;
}

// What surrounds a half of a block, a piece of tokens at a time: their norm before it, the residual behind it
template <class E>
struct NormedTokens {
    typedef Operand<E> P;
    typedef std::conditional_t<std::is_same_v<P, pair>, bf16, float> Single;
    const int64_t width, most = T, row = padded(width);  // `most` are the tokens of a piece
    Unwritten<float> rows{size_t(most * row)};
    Unwritten<P> left{size_t(deep<P>(most * row))}, turned{size_t(deep<P>(width) * most)};

    // A piece behind its norm, as the right side of a product with weights, (deep(c) × padded(count))
    Panel<P> of(const Tokens<E>& x, const Piece& piece, const Norm& norm) {
        return turn_tokens(left_of(x, piece, norm), piece.count, deep<P>(width), turned.data);
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
        // the other one of a token's last pair
        for (t = 0; width % 2 && t < piece.count; t++) to(t)[width] = Single{};
        return {left.data, deep<P>(row), 1};
    }

    // One of the piece's tokens behind its norm, as it is multiplied
    Single* operands(int64_t t) { return reinterpret_cast<Single*>(left.data + t * deep<P>(row)); }

    // out = x + scale · (branch + bias) of a piece, of its branch (channels × columns)
    void add(
        const float* branch, int64_t columns, const Tokens<E>& x, const Piece& piece, const Numbers& bias,
        const Numbers& scale, const Tokens<E>& out) {
        turn(branch, columns, width, piece.count, rows.data, row);
        for (int64_t t = 0; t < piece.count; t++) {
            const E* from = x.at(piece.b, 0, piece.first + t);
            E* to = out.at(piece.b, 0, piece.first + t);
            for (int64_t c = 0; c < width; c += W) {
                const int64_t n = width - c;
                const auto read = [&](const auto* p) { return n >= W ? load(p + c) : load(p + c, n); };
                vec added = load(rows.data + t * row + c);
                if (bias.data) added += read(bias.data);
                if (scale.data) added *= read(scale.data);
                added += read(from);
                n >= W ? store(to + c, added) : store(to + c, added, n);
            }
        }
    }
};
