// What stands on the map: agents' biases and agents themselves; see positions.py and ops/map_formulas.py.
#pragma once
#include "local.h"

// A bias of agents on the tokens of a map: written out, (h, n, a) any distance apart; or else the tables of which it is
// the sum: bilinear(block (h, a, side, side)) + rows (h, a, y) + columns (h, a, x), and (h, a, p) for the prefix.
template <class Table>
struct BiasOf {
    const float* written;
    int64_t head, token, agent;
    int64_t heads, tokens, agents;
    Table block, rows, columns, prefix;
    int64_t side;
    Map map;
};
typedef BiasOf<AnyNumbers> AnyBias;

struct Bias : BiasOf<Parameter> {
    Bias(const AnyBias& x)
        : BiasOf<Parameter>{x.written, x.head, x.token,   x.agent, x.heads,  x.tokens, x.agents,
                            x.block,   x.rows, x.columns, x.prefix, x.side, x.map} {}
};

inline bool fits(const Shape& shape, int64_t tokens, int64_t agents, const Bias& bias) {
    if (bias.written) return bias.heads == shape.heads && bias.tokens == tokens && bias.agents == agents;
    const int64_t pairs = shape.heads * agents;
    return bias.side > 0 && fits(tokens, bias.map) && fits(pairs * bias.side * bias.side, bias.block) &&
           fits(pairs * bias.map.height, bias.rows) && fits(pairs * bias.map.width, bias.columns) &&
           fits(pairs * bias.map.prefix, bias.prefix);
}

constexpr float LOWEST = -1e30f;

// The bias of one head as rows of agents; tables are summed where they are needed and never written out.
class BiasRows {
    const Bias& bias;
    const int64_t agents, width;
    int64_t of = -1, y_of = -1;
    Buffer<float> block, rows, columns, line;
    struct Between {
        int64_t left, right;
        float over;
    };
    Buffer<Between> across;  // where each column of the map lies among the block's

    // (agents, count) as (count, padded agents), `beyond` the agents
    void turn(const float* from, int64_t count, Buffer<float>& to, float beyond = 0) {
        to.resize(count * width, beyond);
        for (int64_t a = 0; a < agents; a++)
            for (int64_t i = 0; i < count; i++) to[i * width + a] = from[a * count + i];
    }

    // Where place i of `length` lies among the block's, as F.interpolate without aligned corners
    float between(int64_t i, int64_t length, int64_t& first, int64_t& second) const {
        const float place = std::max(0.0f, (i + 0.5f) * bias.side / length - 0.5f);
        first = std::min<int64_t>(int64_t(place), bias.side - 1);
        second = std::min(first + 1, bias.side - 1);
        return place - first;
    }

    void begin_head(int64_t h) {
        of = h, y_of = -1;
        turn(bias.block.data + h * agents * bias.side * bias.side, bias.side * bias.side, block);
        turn(bias.rows.data + h * agents * bias.map.height, bias.map.height, rows);
        turn(bias.columns.data + h * agents * bias.map.width, bias.map.width, columns, LOWEST);
        line.resize(bias.side * width);
        across.resize(bias.map.width);
        for (int64_t x = 0; x < bias.map.width; x++)
            across[x].over = between(x, bias.map.width, across[x].left, across[x].right);
    }

    void begin_row(int64_t y) {
        int64_t top, bottom;
        const float down = between(y_of = y, bias.map.height, top, bottom);
        for (int64_t s = 0; s < bias.side; s++)
            for (int64_t a = 0; a < width; a += W) {
                const vec upper = load(&block[(top * bias.side + s) * width + a]);
                const vec lower = load(&block[(bottom * bias.side + s) * width + a]);
                store(&line[s * width + a], upper + (lower - upper) * down + load(&rows[y * width + a]));
            }
    }

    void gathered(const float* from, int64_t apart, float* to) const {
        for (int64_t a = 0; a < agents; a++) to[a] = from[a * apart];
        for (int64_t a = agents; a < width; a++) to[a] = LOWEST;
    }

    // Place x of row y of the map, whose line is there
    void from_tables(int64_t x, float* to) const {
        const auto [left, right, over] = across[x];
        for (int64_t a = 0; a < width; a += W) {
            const vec first = load(&line[left * width + a]), second = load(&line[right * width + a]);
            store(to + a, first + (second - first) * over + load(&columns[x * width + a]));
        }
    }

public:
    BiasRows(const Bias& bias, int64_t agents) : bias(bias), agents(agents), width(padded(agents)) {}

    // (count × padded agents); beyond the agents the lowest number, so that its exponential is 0
    void fill(const Piece& piece, float* map) {
        int64_t t = piece.first, end = piece.first + piece.count;
        if (bias.written) {
            for (; t < end; t++, map += width)
                gathered(bias.written + piece.h * bias.head + t * bias.token, bias.agent, map);
            return;
        }
        const int64_t prefix = bias.map.prefix;
        for (; t < std::min(end, prefix); t++, map += width)
            gathered(bias.prefix.data + piece.h * agents * prefix + t, prefix, map);
        if (t == end) return;
        if (of != piece.h) begin_head(piece.h);
        for (int64_t y = (t - prefix) / bias.map.width, x = (t - prefix) % bias.map.width; t < end; y++, x = 0) {
            if (y_of != y) begin_row(y);
            for (; x < bias.map.width && t < end; x++, t++, map += width) from_tables(x, map);
        }
    }
};

// Adaptive bins, `across` of them in each of `down` rows: they overlap where they do not divide the map.
struct Bin {
    int64_t top, bottom, left, right;
    float share;
    Bin(const Map& map, int64_t row, int64_t column, int64_t down, int64_t across)
        : top(row * map.height / down), bottom(((row + 1) * map.height + down - 1) / down),
          left(column * map.width / across), right(((column + 1) * map.width + across - 1) / across),
          share(1.0f / ((bottom - top) * (right - left))) {}
};

// out (b, h, a, d) = means of the tokens over the bins
template <class E, class To>
Answer pool_to(Shape shape, Tokens<E> x, Map map, int64_t down, int64_t across, Tokens<To> out) {
    const int64_t d = shape.width, total = shape.batch * shape.heads * down;
    if (!fits(shape, shape.queries, x) || !fits(shape.queries, map) || down < 1 || across < 1) return MISFIT;
    if (!fits(shape, down * across, out)) return MISFIT;
    parallel(shape.threads, [&](int me, int all) {
        for (int64_t i = total * me / all; i < total * (me + 1) / all; i++) {
            const int64_t index = i / down, b = index / shape.heads, h = index % shape.heads, row = i % down;
            for (int64_t column = 0; column < across; column++) {
                const Bin bin(map, row, column, down, across);
                To* to = out.at(b, h, row * across + column);
                for (int64_t c = 0; c < d; c += W) {
                    vec sums{};
                    for (int64_t r = bin.top; r < bin.bottom; r++)
                        for (int64_t s = bin.left; s < bin.right; s++) {
                            const E* from = x.at(b, h, map.prefix + r * map.width + s) + c;
                            sums += d - c >= W ? load(from) : load(from, d - c);
                        }
                    d - c >= W ? store(to + c, sums * bin.share) : store(to + c, sums * bin.share, d - c);
                }
            }
        }
    });
    return DONE;
}

template <class E>
Answer pool_of(Shape shape, Tokens<E> x, Map map, int64_t down, int64_t across, Tokens<E> out) {
    return pool_to(shape, x, map, down, across, out);
}

KERNEL(
    pool, (Shape shape, AnyTokens x, Map map, int64_t down, int64_t across, AnyTokens out),
    (shape, x, map, down, across, out))

// dx = the shares that a token's bins have of their gradients (b, h, a, d), 0 for tokens of the prefix
template <class E>
Answer pool_gradient_of(Shape shape, Tokens<E> grad, Map map, int64_t down, int64_t across, Tokens<E> dx) {
    const int64_t d = shape.width, padding = padded(d);
    if (!fits(shape, shape.queries, dx) || !fits(shape.queries, map) || down < 1 || across < 1) return MISFIT;
    if (!fits(shape, down * across, grad)) return MISFIT;
    parallel(shape.threads, [&](int me, int all) {
        Buffer<float> line(std::max(map.width, map.prefix) * padding);
        const auto finish = [&](int64_t b, int64_t h, int64_t first, int64_t count) {
            for (int64_t t = 0; t < count; t++) copy(&line[t * padding], d, dx.at(b, h, first + t));
        };
        heads(shape, me, all, [&](int64_t index) {
            const int64_t b = index / shape.heads, h = index % shape.heads;
            std::fill(line.begin(), line.end(), 0.0f);
            finish(b, h, 0, map.prefix);
            for (int64_t y = 0; y < map.height; y++) {
                std::fill(line.begin(), line.end(), 0.0f);
                for (int64_t row = 0; row < down; row++)
                    for (int64_t column = 0; column < across; column++) {
                        const Bin bin(map, row, column, down, across);
                        if (y < bin.top || y >= bin.bottom) break;
                        const E* from = grad.at(b, h, row * across + column);
                        for (int64_t c = 0; c < d; c += W) {
                            const vec share = load(from + c, d - c) * bin.share;
                            for (int64_t s = bin.left; s < bin.right; s++) {
                                float* to = &line[s * padding + c];
                                store(to, load(to) + share);
                            }
                        }
                    }
                finish(b, h, map.prefix + y * map.width, map.width);
            }
        });
    });
    return DONE;
}

KERNEL(
    pool_gradient, (Shape shape, AnyTokens grad, Map map, int64_t down, int64_t across, AnyTokens dx),
    (shape, grad, map, down, across, dx))

// out (b, h, m, d) = a convolution of each head's map whose windows lie side by side: `weight` (down, across, d, d_out)
// for windows of down × across places; what fills no window is left out.
template <class E, class To>
Answer convolve_windows_to(
    Shape shape, Tokens<E> x, Map map, int64_t down, int64_t across, Numbers weights, Tokens<To> out) {
    if (!fits(shape, shape.queries, x) || !fits(shape.queries, map) || down < 1 || across < 1) return MISFIT;
    const int64_t d = shape.width, row = padded(d), high = map.height / down, wide = map.width / across;
    if (!fits(down * across * d * d, weights) || !fits(shape, high * wide, out)) return MISFIT;
    const float* weight = weights.data;
    Buffer<float> spare;
    if (row != d) {
        spare.assign(down * across * d * row, 0.0f);
        for (int64_t i = 0; i < down * across * d; i++) std::memcpy(&spare[i * row], weight + i * d, d * sizeof(float));
        weight = spare.data();
    }
    const int64_t total = shape.batch * shape.heads * high;
    parallel(shape.threads, [&](int me, int all) {
        Buffer<float> sums(wide * row), room;
        for (int64_t unit = total * me / all; unit < total * (me + 1) / all; unit++) {
            const int64_t b = unit / high / shape.heads, h = unit / high % shape.heads, y = unit % high;
            std::fill(sums.begin(), sums.end(), 0.0f);
            for (int64_t i = 0; i < down; i++)
                for (int64_t j = 0; j < across; j++) {
                    const int64_t first = map.prefix + (y * down + i) * map.width + j;
                    const Strided a = matrix_of(x.at(b, h, first), across * x.token, wide, d, room);
                    multiply(wide, row, d, a, weight + (i * across + j) * d * row, row, {sums.data(), row}, true);
                }
            for (int64_t m = 0; m < wide; m++) copy(&sums[m * row], d, out.at(b, h, y * wide + m));
        }
    });
    return DONE;
}

template <class E>
Answer convolve_windows_of(
    Shape shape, Tokens<E> x, Map map, int64_t down, int64_t across, Numbers weights, Tokens<E> out) {
    return convolve_windows_to(shape, x, map, down, across, weights, out);
}

KERNEL(
    convolve_windows,
    (Shape shape, AnyTokens x, Map map, int64_t down, int64_t across, Numbers weights, AnyTokens out),
    (shape, x, map, down, across, weights, out))
