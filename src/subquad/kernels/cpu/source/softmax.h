// Softmax attention: see ops/softmax_formula.py. Keys come a block at a time, and no map is written out.
#pragma once
#include "tokens.h"
#include <limits>

// Numbers of all pairs (b, h, n, m), any distance apart and 0 where an axis is shared; nothing where there is no data
template <class Number>
struct Pairs {
    const Number* data;
    int64_t batch, head, query, key;
    int64_t images, heads, queries, keys;  // how many there are
    const Number* at(const Piece& piece, int64_t t, int64_t m) const {
        return data + piece.b * batch + piece.h * head + (piece.first + t) * query + m * key;
    }
};

template <class Number>
bool fits(const Shape& shape, const Pairs<Number>& x) {
    return !x.data || (x.images == shape.batch && x.heads == shape.heads && x.queries == shape.queries && x.keys == shape.keys);
}

// The least score of what may be seen: beyond it is minus infinity
constexpr float LEAST = std::numeric_limits<float>::lowest();

// Scores of a query and `count` keys become the bias, times a factor; what is finite stays so
inline void begin_at(const float* bias, int64_t apart, int64_t count, float factor, float* scores) {
    int64_t m = 0;
    for (; apart == 1 && m + W <= count; m += W) {
        const vec x = load(bias + m), scaled = x * factor;
        store(scores + m, x >= fill(LEAST) & scaled < fill(LEAST) ? fill(LEAST) : scaled);
    }
    for (; m < count; m++) {
        const float x = bias[m * apart], scaled = x * factor;
        scores[m] = x >= LEAST && scaled < LEAST ? LEAST : scaled;
    }
}

// Those that are forbidden become minus infinity
inline void forbid(const bool* forbidden, int64_t apart, int64_t count, float* scores) {
    int64_t m = 0;
    for (; apart == 1 && m + W <= count; m += W) {
        bytes line;
        std::memcpy(&line, forbidden + m, W);
        store(scores + m, spread(line) != 0 ? fill(-INFINITY) : load(scores + m));
    }
    for (; m < count; m++)
        if (forbidden[m * apart]) scores[m] = -INFINITY;
}

// Keys and values of a head in blocks of T, as the right sides of products: keys as columns (deep(d) × T). Each thread has
// its own, which stay in its cache: several threads on one head do that little work twice.
template <class P>
struct KeyBlocks {
    const int64_t d, row, count, of_keys, of_values;
    Buffer<P> keys, values, room;
    int64_t of = -1;

    explicit KeyBlocks(const Shape& shape)
        : d(shape.width), row(padded(d)), count((shape.keys + T - 1) / T), of_keys(deep<P>(d) * T),
          of_values(deep<P>(T) * row), keys(count * of_keys), values(count * of_values) {}

    const P* keys_of(int64_t block) const { return &keys[block * of_keys]; }
    const P* values_of(int64_t block) const { return &values[block * of_values]; }

    template <class E>
    void take(const Shape& shape, const Tokens<E>& k, const Tokens<E>& v, const Piece& queries) {
        if (of == queries.index) return;
        of = queries.index;
        for (int64_t block = 0; block < count; block++) {
            const int64_t first = block * T;
            const Piece piece{of, queries.b, queries.h, first, std::min<int64_t>(T, shape.keys - first)};
            const Matrix<P> columns = lowered(k, piece, d, room);
            turn(columns.data, columns.row, piece.count, deep<P>(d), &keys[block * of_keys], T);
            const Panel<P> rows = packed(v, piece, d, room);
            for (int64_t i = 0; i < deep<P>(piece.count); i++)
                std::memcpy(&values[block * of_values + i * row], rows.data + i * rows.row, row * sizeof(P));
        }
    }
};

// e^x of a score, as an operand P of the product with values
template <class P>
vec weight_of(vec score) {
    if constexpr (std::is_same_v<P, float>) return exponential(score);
    else return rough_exponential(score);
}

// Of a piece of queries: the largest scores so far, and sums of exponentials and of values weighed by them, from these
template <class P>
struct Weighing {
    const int64_t row;
    const float scale;
    Buffer<float> scores = Buffer<float>(T * T), total = Buffer<float>(T * W), values = Buffer<float>(T * row);
    Buffer<P> lower;
    float most[T];
    bool fresh = true;  // nothing is summed yet

    explicit Weighing(int64_t width) : row(padded(width)), scale(1 / std::sqrt(float(width))) {}

    void begin() {
        fresh = true;
        std::fill(most, most + T, LEAST);  // from it, what may not be seen is minus infinity
        std::fill(total.begin(), total.end(), 0.0f);
        std::fill(values.begin(), values.end(), 0.0f);
    }

    // Scores, divided by the scale, of a block of keys become weights; `columns` are their padded count. The largest of
    // all queries come first, as each is a chain of steps that wait for one another; of the first block nothing is summed.
    Matrix<P> weigh(int64_t queries, int64_t columns) {
        float tops[T];
        for (int64_t t = 0; t < queries; t++) {
            const float* line = &scores[t * T];
            vec high = load(line);
            for (int64_t m = W; m < columns; m += W) high = max(high, load(line + m));
            tops[t] = largest(high);
        }
        for (int64_t t = 0; t < queries; t++)
            if (!(tops[t] <= most[t])) rise(t, tops[t]);
        fresh = false;
        lower.resize(std::is_same_v<P, float> ? 0 : T * T / 2);
        for (int64_t t = 0; t < queries; t++) {
            float *line = &scores[t * T], *sum = &total[t * W];
            vec part{};
            for (int64_t m = 0; m < columns; m += W) {
                const vec weight = weight_of<P>((load(line + m) - most[t]) * scale);
                part += weight;
                if constexpr (std::is_same_v<P, float>) store(line + m, weight);
                else store(&lower[t * T / 2].first + m, weight);
            }
            store(sum, load(sum) + part);
        }
        if constexpr (std::is_same_v<P, float>) return {scores.data(), T, 1};
        else return {lower.data(), T / 2, 1};
    }

    // A query's largest score rises: of what was summed from a smaller one, if anything was, less is left
    void rise(int64_t t, float top) {
        const float before = std::exchange(most[t], top);
        if (fresh) return;
        const float less = std::exp((before - top) * scale);
        store(&total[t * W], load(&total[t * W]) * less);
        for (int64_t c = 0; c < row; c += W) store(&values[t * row + c], load(&values[t * row + c]) * less);
    }

    // A query that may see nothing gets zeros
    void finish(int64_t queries, Rows to) const {
        for (int64_t t = 0; t < queries; t++) {
            const float all = sum(load(&total[t * W])), share = all == 0 ? 0 : 1 / all;
            for (int64_t c = 0; c < row; c += W) store(to.data + t * to.row + c, load(&values[t * row + c]) * share);
        }
    }
};

// Scores of a piece's queries and `count` keys from the first on, divided by the scale, in rows of padded width; minus
// infinity for keys that are forbidden, and beyond
template <class P>
void scores_of(
    const Shape& shape, Matrix<P> queries, const Piece& piece, const P* keys, int64_t first, int64_t count,
    const Pairs<float>& bias, const Pairs<bool>& forbidden, float root, Rows to) {
    for (int64_t t = 0; bias.data && t < piece.count; t++)
        begin_at(bias.at(piece, t, first), bias.key, count, root, to.data + t * to.row);
    multiply(piece.count, padded(count), deep<P>(shape.width), queries, keys, T, to, bias.data != nullptr);
    for (int64_t t = 0; forbidden.data && t < piece.count; t++)
        forbid(forbidden.at(piece, t, first), forbidden.key, count, to.data + t * to.row);
    for (int64_t t = 0; count % W && t < piece.count; t++)
        std::fill(to.data + t * to.row + count, to.data + t * to.row + padded(count), -INFINITY);
}

// A query's scores, divided by the scale, become P, and dP becomes dL
template <class P>
void to_slopes(float* scores, float* slopes, int64_t width, float scale) {
    vec high = fill(LEAST), total{}, lost{};
    for (int64_t m = 0; m < width; m += W) high = max(high, load(scores + m));
    const float most = largest(high);
    for (int64_t m = 0; m < width; m += W) {
        const vec weight = weight_of<P>((load(scores + m) - most) * scale);
        store(scores + m, weight);
        total += weight;
    }
    const float all = sum(total), share = all == 0 ? 0 : 1 / all;
    for (int64_t m = 0; m < width; m += W) {
        const vec weight = load(scores + m) * share;
        store(scores + m, weight);
        lost += weight * load(slopes + m);
    }
    const float mean = sum(lost);
    for (int64_t m = 0; m < width; m += W) store(slopes + m, load(scores + m) * (load(slopes + m) - mean));
}

template <class E>
Answer softmax_attention_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, const Pairs<float>& bias, const Pairs<bool>& forbidden,
    Tokens<E> out) {
    if (!fits(shape, shape.queries, q, out) || !fits(shape, shape.keys, k, v)) return MISFIT;
    if (!fits(shape, bias) || !fits(shape, forbidden)) return MISFIT;
    typedef Operand<E> P;
    const float root = std::sqrt(float(shape.width));
    parallel(shape.threads, [&](int me, int all) {
        KeyBlocks<P> blocks(shape);
        Weighing<P> it(shape.width);
        Buffer<float> spare;
        Buffer<P> room;
        float* scores = it.scores.data();
        pieces(shape, shape.queries, me, all, [&](const Piece& piece) {
            blocks.take(shape, k, v, piece);
            it.begin();
            const Matrix<P> queries = lowered(q, piece, shape.width, room);
            for (int64_t block = 0; block < blocks.count; block++) {
                const int64_t first = block * T, count = std::min<int64_t>(T, shape.keys - first);
                scores_of(shape, queries, piece, blocks.keys_of(block), first, count, bias, forbidden, root, {scores, T});
                const Matrix<P> weights = it.weigh(piece.count, padded(count));
                multiply(
                    piece.count, it.row, deep<P>(count), weights, blocks.values_of(block), it.row,
                    {it.values.data(), it.row}, true);
            }
            to_tokens(out, piece, shape.width, spare, [&](Rows to) { it.finish(piece.count, to); });
        });
    });
    return DONE;
}

KERNEL(
    softmax_attention,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, Pairs<float> bias, Pairs<bool> forbidden, AnyTokens out),
    (shape, q, k, v, bias, forbidden, out))

// With P = softmax(s q kᵀ + bias) and g the gradient of P v: dv = Pᵀ g, dP = g vᵀ, dL = P ∘ (dP - Σ P ∘ dP), which is the
// bias's, summed over images; dq = s dL k, dk = s dLᵀ q. A piece's whole rows of P and dP are there at once.
template <class E>
Answer softmax_attention_gradient_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, const Pairs<float>& bias, const Pairs<bool>& forbidden,
    Tokens<E> grad, Tokens<E> dq, Tokens<E> dk, Tokens<E> dv, Numbers dbias) {
    if (!fits(shape, shape.queries, q, grad, dq) || !fits(shape, shape.keys, k, v, dk, dv)) return MISFIT;
    if (!fits(shape, bias) || !fits(shape, forbidden)) return MISFIT;
    const int64_t d = shape.width, row = padded(d), of_bias = shape.heads * shape.queries * shape.keys;
    if (!fits(of_bias, dbias)) return MISFIT;
    typedef Operand<E> P;
    const int64_t size = shape.keys * row;
    const float root = std::sqrt(float(d)), scale = 1 / root;
    Sums sums(shape.threads, 2 * size);  // dk and dv
    Buffer<Buffer<float>> of_biases(shape.threads);
    parallel(shape.threads, [&](int me, int all) {
        KeyBlocks<P> keys(shape), values(shape);
        const int64_t blocks = keys.count, width = blocks * T;
        Buffer<float> scores(T * width), slopes(T * width), spare, &own_bias = of_biases[me];
        Buffer<P> room, left, right;
        if (dbias.data) own_bias.assign(of_bias, 0.0f);
        const auto each_block = [&](auto&& function) {
            for (int64_t block = 0; block < blocks; block++)
                function(block, block * T, std::min<int64_t>(T, shape.keys - block * T));
        };
        sums.gather(shape, shape.queries, me, all, [&](const Piece& piece, float* sum) {
            keys.take(shape, k, k, piece);
            values.take(shape, v, v, piece);
            const Matrix<P> queries = lowered(q, piece, d, room);
            each_block([&](int64_t block, int64_t first, int64_t count) {
                scores_of(shape, queries, piece, keys.keys_of(block), first, count, bias, forbidden, root, {&scores[first], width});
            });
            const Matrix<P> rows = lowered(grad, piece, d, room);
            each_block([&](int64_t block, int64_t first, int64_t count) {
                multiply(piece.count, padded(count), deep<P>(d), rows, values.keys_of(block), T, {&slopes[first], width});
            });
            for (int64_t t = 0; t < piece.count; t++)
                to_slopes<P>(&scores[t * width], &slopes[t * width], padded(shape.keys), scale);
            for (int64_t t = 0; dbias.data && t < piece.count; t++) {
                float* to = &own_bias[(piece.h * shape.queries + piece.first + t) * shape.keys];
                for (int64_t m = 0; m < shape.keys; m++) to[m] += slopes[t * width + m];
            }
            to_tokens(dq, piece, d, spare, [&](Rows c) {
                each_block([&](int64_t block, int64_t first, int64_t count) {
                    const Matrix<P> line = lowered(&slopes[first], width, piece.count, padded(count), left);
                    multiply(piece.count, row, deep<P>(count), line, keys.values_of(block), row, c, block > 0);
                });
                for (int64_t t = 0; t < piece.count; t++)
                    for (int64_t c0 = 0; c0 < row; c0 += W) store(c.data + t * c.row + c0, load(c.data + t * c.row + c0) * scale);
            });
            const auto add_turned = [&](const Buffer<float>& map, const Tokens<E>& x, float* to) {
                const Panel<P> tokens = packed(x, piece, d, right);
                each_block([&](int64_t, int64_t first, int64_t count) {
                    const Panel<P> turned = packed(&map[first], width, piece.count, padded(count), left);
                    multiply(count, row, deep<P>(piece.count), turned.turned(), tokens.data, tokens.row, {to + first * row, row}, true);
                });
            };
            add_turned(slopes, q, sum);
            add_turned(scores, grad, sum + size);
        });
        heads(shape, me, all, [&](int64_t index) {
            const auto finish = [&](int64_t from, const Tokens<E>& to, float factor) {
                spare.assign(size, 0.0f);
                sums.each_sum(index, [&](const float* part) {
                    for (int64_t i = 0; i < size; i += W) store(&spare[i], load(&spare[i]) + load(part + from + i) * factor);
                });
                for (int64_t m = 0; m < shape.keys; m++)
                    copy(&spare[m * row], d, to.at(index / shape.heads, index % shape.heads, m));
            };
            finish(0, dk, scale);
            finish(size, dv, 1);
        });
        for (int64_t i = of_bias * me / all; dbias.data && i < of_bias * (me + 1) / all; i++) {
            dbias.data[i] = 0;
            for (const auto& part : of_biases) dbias.data[i] += part.empty() ? 0 : part[i];
        }
    });
    return DONE;
}

KERNEL(
    softmax_attention_gradient,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, Pairs<float> bias, Pairs<bool> forbidden, AnyTokens grad,
     AnyTokens dq, AnyTokens dk, AnyTokens dv, Numbers dbias),
    (shape, q, k, v, bias, forbidden, grad, dq, dk, dv, dbias))
