// Maps between tokens and a few others (agents, landmarks): see ops/agent.py and ops/gaussian.py.
#pragma once
#include "places.h"

// The few as columns, (d × padded a), scaled
inline void as_columns(const float* few, int64_t row, int64_t count, int64_t width, float scale, std::vector<float>& to) {
    const int64_t columns = padded(count);
    to.assign(width * columns, 0.0f);
    for (int64_t a = 0; a < count; a++)
        for (int64_t c = 0; c < width; c++) to[c * columns + a] = few[a * row + c] * scale;
}

// Rows of `width` numbers, padded with zeros
inline void as_rows(const float* few, int64_t row, int64_t count, int64_t width, std::vector<float>& to) {
    to.assign(count * padded(width), 0.0f);
    for (int64_t a = 0; a < count; a++) std::memcpy(&to[a * padded(width)], few + a * row, width * sizeof(float));
}

// Agents (b, h, a, d) side by side in memory; a softmax over tokens, then one over agents.
extern "C" void agent_attention(
    Shape shape, Tokens q, const float* agents, int64_t count, Tokens k, Tokens v, Bias key_bias, Bias query_bias,
    Tokens out) {
    const int64_t d = shape.width, row = padded(d), columns = padded(count), size = count * row + 2 * columns;
    const float scale = 1 / std::sqrt(float(d));
    Sums sums(shape.threads, size);  // Σ e^(l - m) v, the largest l so far m, Σ e^(l - m)
    std::vector<float> values(shape.batch * shape.heads * count * row);
    parallel(shape.threads, [&](int me, int all) {
        std::vector<float> map(T * columns), few, spare;
        BiasRows of_keys(key_bias, count), of_queries(query_bias, count);
        int64_t of = -1;
        const auto logits = [&](const Tokens& tokens, BiasRows& bias, const Piece& piece) {
            if (of != piece.index) as_columns(agents + (of = piece.index) * count * d, d, count, d, scale, few);
            bias.fill(piece, map.data());
            const Strided x{tokens.at(piece.b, piece.h, piece.first), tokens.token, 1};
            multiply(piece.count, columns, d, x, few.data(), columns, {map.data(), columns}, true);
        };
        sums.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            float *most = sum + count * row, *total = most + columns;
            if (total[0] == 0) std::fill(most, total, -1e38f);
            logits(k, of_keys, piece);
            for (int64_t a = 0; a < columns; a += W) {
                vec high = load(most + a);
                for (int64_t t = 0; t < piece.count; t++) high = max(high, load(&map[t * columns + a]));
                const vec shrink = falling_exponential(load(most + a) - high);
                vec part{};
                for (int64_t t = 0; t < piece.count; t++) {
                    const vec weight = falling_exponential(load(&map[t * columns + a]) - high);
                    store(&map[t * columns + a], weight);
                    part += weight;
                }
                store(most + a, high);
                store(total + a, load(total + a) * shrink + part);
                for (int64_t i = 0; i < W && a + i < count; i++)
                    if (shrink[i] != 1)
                        for (int64_t c = 0; c < row; c += W)
                            store(sum + (a + i) * row + c, load(sum + (a + i) * row + c) * shrink[i]);
            }
            const Rows rows = values_of(v, piece, d, spare);
            multiply(count, row, piece.count, {map.data(), 1, columns}, rows.data, rows.row, {sum, row}, true);
        });
        heads(shape, me, all, [&](int64_t index) {
            float* to = &values[index * count * row];
            for (int64_t a = 0; a < count; a++) {
                float most = -1e38f, total = 0;
                sums.each_sum(index, [&](const float* part) { most = std::max(most, part[count * row + a]); });
                sums.each_sum(index, [&](const float* part) {
                    const float share = std::exp(part[count * row + a] - most);
                    total += part[count * row + columns + a] * share;
                    for (int64_t c = 0; c < row; c++) to[a * row + c] += part[a * row + c] * share;
                });
                for (int64_t c = 0; c < row; c++) to[a * row + c] /= total;
            }
        });
        pieces(shape, shape.queries, me, all, [&](const Piece& piece) {
            logits(q, of_queries, piece);
            for (int64_t t = 0; t < piece.count; t++) {
                float* x = &map[t * columns];
                vec high = load(x), total{};
                for (int64_t a = W; a < columns; a += W) high = max(high, load(x + a));
                const float most = largest(high);
                for (int64_t a = 0; a < columns; a += W) {
                    const vec weight = falling_exponential(load(x + a) - most);
                    store(x + a, weight);
                    total += weight;
                }
                const float share = 1 / sum(total);
                for (int64_t a = 0; a < columns; a += W) store(x + a, load(x + a) * share);
            }
            to_tokens(out, piece, d, spare, [&](Rows c) {
                multiply(piece.count, row, count, {map.data(), columns, 1}, &values[piece.index * count * row], row, c);
            });
        });
    });
}

// κ(x, y) = exp(-|x - y|² / 2) of the piece's tokens, scaled, and the few, (count × padded a)
struct GaussianMap {
    std::vector<float> columns, norms, map;
    int64_t of = -1;

    void fill_in(const Tokens& x, const Piece& piece, const float* few, int64_t count, int64_t width, float scale) {
        const int64_t row = padded(count);
        if (of != piece.index) {
            of = piece.index;
            as_columns(few + of * count * width, width, count, width, 1, columns);
            norms.assign(row, 1e30f);
            for (int64_t a = 0; a < count; a++) {
                norms[a] = 0;
                for (int64_t c = 0; c < width; c++) norms[a] += 0.5f * columns[c * row + a] * columns[c * row + a];
            }
            map.resize(T * row);
        }
        const float* first = x.at(piece.b, piece.h, piece.first);
        multiply(piece.count, row, width, {first, x.token, 1}, columns.data(), row, {map.data(), row});
        for (int64_t t = 0; t < piece.count; t++) {
            vec squares{};
            const float* token = first + t * x.token;
            for (int64_t c = 0; c < width; c += W) {
                const vec value = width - c >= W ? load(token + c) : load(token + c, width - c);
                squares += value * value;
            }
            const float norm = 0.5f * scale * scale * sum(squares);
            for (int64_t a = 0; a < row; a += W) {
                const vec exponent = load(&map[t * row + a]) * scale - norm - load(&norms[a]);
                // rounding can make the distance of near points slightly negative
                store(&map[t * row + a], falling_exponential(exponent > vec{} ? vec{} : exponent));
            }
        }
    }
};

// out (b, h, m, d) = κ(x, landmarks)ᵀ v, or with `spread` tokens = κ(x, landmarks) u from u in the place of `out`
extern "C" void gaussian_gather(
    Shape shape, Tokens x, const float* landmarks, int64_t count, Tokens v, float scale, float* out) {
    const int64_t d = shape.width, row = padded(d);
    Sums sums(shape.threads, count * row);
    parallel(shape.threads, [&](int me, int all) {
        GaussianMap kernel;
        std::vector<float> spare;
        sums.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            kernel.fill_in(x, piece, landmarks, count, d, scale);
            const Rows rows = values_of(v, piece, d, spare);
            const Strided map{kernel.map.data(), 1, padded(count)};
            multiply(count, row, piece.count, map, rows.data, rows.row, {sum, row}, true);
        });
        heads(shape, me, all, [&](int64_t index) {
            float* to = out + index * count * d;
            std::fill(to, to + count * d, 0.0f);
            sums.each_sum(index, [&](const float* part) {
                for (int64_t a = 0; a < count; a++)
                    for (int64_t c = 0; c < d; c++) to[a * d + c] += part[a * row + c];
            });
        });
    });
}

extern "C" void gaussian_spread(
    Shape shape, Tokens x, const float* landmarks, int64_t count, const float* u, float scale, Tokens out) {
    const int64_t d = shape.width, row = padded(d);
    parallel(shape.threads, [&](int me, int all) {
        GaussianMap kernel;
        std::vector<float> spare, few;
        int64_t of = -1;
        pieces(shape, shape.queries, me, all, [&](const Piece& piece) {
            if (of != piece.index) as_rows(u + (of = piece.index) * count * d, d, count, d, few);
            kernel.fill_in(x, piece, landmarks, count, d, scale);
            to_tokens(out, piece, d, spare, [&](Rows c) {
                const Strided map{kernel.map.data(), padded(count), 1};
                multiply(piece.count, row, count, map, few.data(), row, c);
            });
        });
    });
}

// c (m × padded m) += a b, a few columns of a at a time: with all at once rounding errors are half as large again
inline void add_product(int64_t m, const float* a, const float* b, float* c) {
    constexpr int64_t few = 32;
    const int64_t row = padded(m);
    for (int64_t k = 0; k < m; k += few)
        multiply(m, row, std::min(few, m - k), {a + k, row, 1}, b + k * row, row, {c, row}, true);
}

// `steps` Newton steps Y ← Y + Y (I - A Y), kept symmetric, from start[i]·A; A (matrices, m, m) with its ridge
extern "C" void newton_inverse(
    const float* gram, const float* start, int64_t matrices, int64_t m, int32_t steps, float* out, int32_t threads) {
    const int64_t row = padded(m);
    parallel(threads, [&](int me, int all) {
        std::vector<float> negative, y, rest(m * row), next;
        for (int64_t i = me; i < matrices; i += all) {
            as_rows(gram + i * m * m, m, m, m, y);
            negative = y;
            for (float& value : negative) value = -value;
            for (float& value : y) value *= start[i];
            for (int step = 0; step < steps; step++) {
                std::fill(rest.begin(), rest.end(), 0.0f);
                for (int64_t r = 0; r < m; r++) rest[r * row + r] = 1;
                add_product(m, negative.data(), y.data(), rest.data());
                next = y;
                add_product(m, y.data(), rest.data(), next.data());
                if (step % 4 != 3 && step + 1 != steps) y.swap(next);  // it gets unsymmetric only slowly
                else
                    for (int64_t r = 0; r < m; r++)
                        for (int64_t c = 0; c < m; c++) y[r * row + c] = 0.5f * (next[r * row + c] + next[c * row + r]);
            }
            for (int64_t r = 0; r < m; r++) std::memcpy(out + (i * m + r) * m, &y[r * row], m * sizeof(float));
        }
    });
}
