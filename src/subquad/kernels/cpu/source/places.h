// What stands on the map: agents' biases and agents themselves; see positions.py and ops/map_formulas.py.
#pragma once
#include "local.h"
#include "maps.h"

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

// Where place i of `length` lies among `side` places of a block, as F.interpolate without aligned corners
struct Between {
    int64_t first, second;
    float over;
    Between() = default;
    Between(int64_t i, int64_t length, int64_t side) {
        const float place = std::max(0.0f, (i + 0.5f) * side / length - 0.5f);
        first = std::min<int64_t>(int64_t(place), side - 1);
        second = std::min(first + 1, side - 1);
        over = place - first;
    }
    static void line(int64_t length, int64_t side, Buffer<Between>& to) {
        to.resize(length);
        for (int64_t i = 0; i < length; i++) to[i] = Between(i, length, side);
    }
};

// The bias of one head, times a factor, as rows of agents; tables are summed where they are needed and never written out.
class BiasRows {
    // One head's tables, a row of agents for each place, in which images meet them again
    struct Head {
        Buffer<float> block, rows, columns;
    };
    const Bias& bias;
    const int64_t agents, width;
    const float factor;
    int64_t of = -1, y_of = -1;
    std::vector<Head> heads;
    Buffer<float> line;
    Buffer<Between> across;  // where each column of the map lies among the block's

    void begin_head(int64_t h) {
        of = h, y_of = -1;
        heads.resize(bias.block.count / (agents * bias.side * bias.side));
        Head& head = heads[h];
        if (!head.block.empty()) return;
        const auto turned = [&](const Parameter& table, int64_t count, Buffer<float>& to) {
            as_columns(table.data + h * agents * count, count, agents, count, factor, to);
        };
        turned(bias.block, bias.side * bias.side, head.block);
        turned(bias.rows, bias.map.height, head.rows);
        turned(bias.columns, bias.map.width, head.columns);
        for (int64_t x = 0; x < bias.map.width; x++)
            std::fill(&head.columns[x * width + agents], &head.columns[x * width] + width, LOWEST);
        line.resize(bias.side * width);
        Between::line(bias.map.width, bias.side, across);
    }

    void begin_row(int64_t y) {
        const auto [top, bottom, down] = Between(y_of = y, bias.map.height, bias.side);
        const auto& [block, rows, columns] = heads[of];
        for (int64_t s = 0; s < bias.side; s++)
            for (int64_t a = 0; a < width; a += W) {
                const vec upper = load(&block[(top * bias.side + s) * width + a]);
                const vec lower = load(&block[(bottom * bias.side + s) * width + a]);
                store(&line[s * width + a], upper + (lower - upper) * down + load(&rows[y * width + a]));
            }
    }

    void gathered(const float* from, int64_t apart, float* to) const {
        for (int64_t a = 0; a < agents; a++) to[a] = from[a * apart] * factor;
        for (int64_t a = agents; a < width; a++) to[a] = LOWEST;
    }

    // Place x of row y of the map, whose line is there
    void from_tables(int64_t x, float* to) const {
        const auto [left, right, over] = across[x];
        const Buffer<float>& columns = heads[of].columns;
        for (int64_t a = 0; a < width; a += W) {
            const vec first = load(&line[left * width + a]), second = load(&line[right * width + a]);
            store(to + a, first + (second - first) * over + load(&columns[x * width + a]));
        }
    }

public:
    BiasRows(const Bias& bias, int64_t agents, float factor)
        : bias(bias), agents(agents), width(padded(agents)), factor(factor) {}

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

// The gradient of a bias: of one that is written out for each image, (b, h, n, a); else of its tables, over all images.
struct BiasGradient {
    Numbers images, block, rows, columns, prefix;
};

inline bool fits(
    const Shape& shape, int64_t tokens, int64_t agents, const Bias& bias, const BiasGradient& gradient) {
    if (!fits(shape, tokens, agents, bias)) return false;
    if (bias.written)
        return gradient.images.data && fits(shape.batch * shape.heads * tokens * agents, gradient.images);
    const int64_t pairs = shape.heads * agents;
    return gradient.block.data && fits(pairs * bias.side * bias.side, gradient.block) && gradient.rows.data &&
           fits(pairs * bias.map.height, gradient.rows) && gradient.columns.data &&
           fits(pairs * bias.map.width, gradient.columns) && (!bias.map.prefix || gradient.prefix.data) &&
           fits(pairs * bias.map.prefix, gradient.prefix);
}

// A thread's share of a bias's gradient. Tables' is summed for each head, in rows of agents: prefix, rows, columns, block.
class BiasSums {
    const Bias& bias;
    const BiasGradient& gradient;
    const int64_t agents, width, tokens;
    Buffer<float> line;
    Buffer<Between> across;

    void add(const float* slopes, float* sums) const {
        for (int64_t a = 0; a < width; a += W) store(sums + a, load(sums + a) + load(slopes + a));
    }

    // Adds row y's line, of what is left and right of its places, to the rows and the block
    void end_row(int64_t y, float* rows, float* block) const {
        const auto [top, bottom, down] = Between(y, bias.map.height, bias.side);
        for (int64_t s = 0; s < bias.side; s++)
            for (int64_t a = 0; a < width; a += W) {
                const vec slope = load(&line[s * width + a]), lower = slope * down;
                float *row = &rows[y * width + a], *above = &block[(top * bias.side + s) * width + a];
                store(row, load(row) + slope);
                store(above, load(above) + (slope - lower));
                float* below = &block[(bottom * bias.side + s) * width + a];
                store(below, load(below) + lower);
            }
    }

public:
    BiasSums(const Bias& bias, const BiasGradient& gradient, int64_t agents, int64_t tokens)
        : bias(bias), gradient(gradient), agents(agents), width(padded(agents)), tokens(tokens) {}

    // Numbers that a head has of it
    int64_t size() const {
        const Map& map = bias.map;
        return bias.written ? 0 : (map.prefix + map.height + map.width + bias.side * bias.side) * width;
    }

    // Of the slopes of a piece's tokens, (count × padded agents)
    void add(const Piece& piece, const float* slopes, float* sums) {
        int64_t t = piece.first, end = piece.first + piece.count;
        if (bias.written) {
            float* to = gradient.images.data + (piece.index * tokens + t) * agents;
            for (; t < end; t++, slopes += width, to += agents) std::memcpy(to, slopes, agents * sizeof(float));
            return;
        }
        const Map& map = bias.map;
        float *rows = sums + map.prefix * width, *columns = rows + map.height * width, *block = columns + map.width * width;
        if (across.empty()) Between::line(map.width, bias.side, across);
        for (; t < std::min(end, map.prefix); t++, slopes += width) add(slopes, sums + t * width);
        for (int64_t y = (t - map.prefix) / map.width, x = (t - map.prefix) % map.width; t < end; y++, x = 0) {
            line.assign(bias.side * width, 0.0f);
            for (; x < map.width && t < end; x++, t++, slopes += width) {
                const auto [left, right, over] = across[x];
                add(slopes, columns + x * width);
                for (int64_t a = 0; a < width; a += W) {
                    const vec slope = load(slopes + a), later = slope * over;
                    float *first = &line[left * width + a], *second = &line[right * width + a];
                    store(first, load(first) + (slope - later));
                    store(second, load(second) + later);
                }
            }
            end_row(y, rows, block);
        }
    }

    // Head h of the tables: `each_sum(function)` goes through what all threads have of it
    template <class Each>
    void finish(int64_t h, Each&& each_sum) {
        if (bias.written) return;
        Buffer<float> sums(size());
        each_sum([&](const float* part) {
            for (int64_t i = 0; i < size(); i += W) store(&sums[i], load(&sums[i]) + load(part + i));
        });
        const float* from = sums.data();
        const auto turned = [&](const Numbers& to, int64_t count) {
            for (int64_t i = 0; i < count; i++, from += width)
                for (int64_t a = 0; a < agents; a++) to.data[(h * agents + a) * count + i] = from[a];
        };
        turned(gradient.prefix, bias.map.prefix);
        turned(gradient.rows, bias.map.height);
        turned(gradient.columns, bias.map.width);
        turned(gradient.block, bias.side * bias.side);
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
