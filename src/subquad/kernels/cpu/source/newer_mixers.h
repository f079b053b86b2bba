// As mixers.h, for focused attention and the mechanisms that came after the ones there.
#pragma once
#include "circulant.h"
#include "focused.h"
#include "mhla.h"
#include "mixers.h"
#include "polapp.h"
#include "ttt.h"

// Features of a piece of tokens, of all heads of an image, as rows of padded width side by side
template <class E>
void focused_rows(const Focus<E>& it, const Piece& piece, Buffer<float>& plain, float* to) {
    for (int64_t t = 0; t < piece.count; t++, to += it.size) {
        float norm, raised_norm;
        it.fill_in(piece.b, piece.first + t, plain.data(), to, norm, raised_norm);
        const float share = norm / raised_norm;
        for (int64_t c = 0; c < it.size; c += W) store(to + c, load(to + c) * share);
    }
}

// Keys have `positions` (h, n, d) added, and tokens are divided by softplus(temperature)
template <class E>
Answer focused_mixer_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, const Parameter& positions, const Parameter& temperature,
    float exponent, float eps, const Filters& filters, Map map, Tokens<E> out) {
    typedef Operand<E> P;
    const int64_t d = shape.width, row = padded(d), wide = shape.heads * row, n = shape.queries;
    const int64_t size = d * row + row, panel = deep<P>(d) * row;
    if (shape.keys != n || !temperature.data || !positions.data) return MISFIT;
    if (!fits(shape, n, q, k, v, out) || !fits(shape.heads * n * d, positions)) return MISFIT;
    if (!fits(shape.heads * d, temperature) || !fits(shape, filters) || !fits(n, map)) return MISFIT;
    Buffer<float> divisors(shape.heads * d);
    for (int64_t c = 0; c < shape.heads * d; c++) divisors[c] = softplus(temperature.data[c]);
    Focus<E> of_q{shape, q, exponent}, of_k{shape, k, exponent, positions.data};
    of_q.begin(numbers_of(divisors)), of_k.begin(numbers_of(divisors));
    const Shape tokens{shape.batch, 1, n, n, d, shape.threads};
    Sums sums(shape.threads, shape.heads * size);
    Buffer<float> means(shape.batch * shape.heads * row);
    Buffer<P> panels(shape.batch * shape.heads * panel);
    parallel(shape.threads, [&](int me, int all) {
        Buffer<float> room(T * wide), plain(wide), state(size), spare;
        Buffer<P> left, right;
        sums.gather_images(tokens, n, me, all, [&](const Piece& piece, float* sum) {
            focused_rows(of_k, piece, plain, room.data());
            for (int64_t h = 0; h < shape.heads; h++, sum += size) {
                const Piece own{0, piece.b, h, piece.first, piece.count};
                const float* rows = &room[h * row];
                add_rows(rows, wide, piece.count, row, sum + d * row);
                const Panel<P> keys = packed(rows, wide, piece.count, row, left), values = packed(v, own, d, right);
                multiply(d, row, deep<P>(piece.count), keys.turned(), values.data, values.row, {sum, row}, true);
            }
        });
        heads(shape, me, all, [&](int64_t index) {
            std::fill(state.begin(), state.end(), 0.0f);
            sums.each_sum(index / shape.heads, [&](const float* part) {
                part += index % shape.heads * size;
                for (int64_t i = 0; i < size; i++) state[i] += part[i] / float(n);
            });
            std::memcpy(&means[index * row], &state[d * row], row * sizeof(float));
            pack(state.data(), row, d, row, &panels[index * panel]);
        });
        const auto answer = [&](const Piece& piece) {
            focused_rows(of_q, piece, plain, room.data());
            for (int64_t h = 0; h < shape.heads; h++) {
                const int64_t index = piece.b * shape.heads + h;
                const Matrix<P> rows = lowered(&room[h * row], wide, piece.count, row, left);
                to_tokens(out, Piece{index, piece.b, h, piece.first, piece.count}, d, spare, [&](Rows y) {
                    multiply(piece.count, row, deep<P>(d), rows, &panels[index * panel], row, y);
                    for (int64_t t = 0; t < piece.count; t++) {
                        float* line = y.data + t * y.row;
                        const float share = 1 / (product(&room[t * wide + h * row], &means[index * row], row) + eps);
                        for (int64_t c = 0; c < row; c += W) store(line + c, load(line + c) * share);
                    }
                });
            }
        };
        if (shape.batch == 1) even_pieces(n, me, all, answer);
        else pieces(tokens, n, me, all, answer);
    });
    return finish(shape, v, {}, out, map, filters);
}

KERNEL(
    focused_mixer,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyNumbers positions, AnyNumbers temperature, float exponent,
     float eps, AnyFilters filters, Map map, AnyTokens out),
    (shape, q, k, v, positions, temperature, exponent, eps, filters, map, out))

// Spikiness is the sigmoid of what is learned, `same` and `opposite` (h, 2d)
template <class E>
Answer polapp_mixer_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<E> g, const Parameter& same, const Parameter& opposite,
    Turning turning, float eps, const Filters& filters, Map map, Tokens<E> out) {
    const int64_t count = 2 * shape.heads * shape.width;
    if (!fits(count, same, opposite) || !same.data || !opposite.data) return MISFIT;
    if (!fits(shape, filters) || !fits(shape, shape.queries, v, g) || !fits(shape.queries, map)) return MISFIT;
    Buffer<float> of_same(count), of_opposite(count);
    for (int64_t i = 0; i < count; i++) of_same[i] = sigmoid(same.data[i]), of_opposite[i] = sigmoid(opposite.data[i]);
    const Answer answer = polapp_attention_of<E>(
        shape, q, k, v, out, numbers_of(of_same), numbers_of(of_opposite), turning, eps);
    return answer ? answer : finish(shape, v, g, out, map, filters);
}

KERNEL(
    polapp_mixer,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyTokens g, AnyNumbers same, AnyNumbers opposite,
     Turning turning, float eps, AnyFilters filters, Map map, AnyTokens out),
    (shape, q, k, v, g, same, opposite, turning, eps, filters, map, out))

// Tokens of some heads, from `first` on
template <class E>
Tokens<E> heads_of(Tokens<E> x, int64_t first, int64_t count) {
    x.data += first * x.head;
    x.heads = count;
    return x;
}

// The last heads, as many as `filter` (e·d, 3, 3) is of, train it on their map, the others units `w1` and `w2` (h, d, d)
template <class E>
Answer ttt_mixer_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, const Parameter& w1, const Parameter& w2, const Parameter& filter,
    Turning turning, float scale, Map map, Tokens<E> out) {
    constexpr int64_t taps = 9;
    const int64_t d = shape.width, n = shape.queries, extra = filter.count / (taps * d), units = shape.heads - extra;
    if (shape.keys != n || !fits(shape, n, q, k, v, out) || !fits(n, map)) return MISFIT;
    if (!w1.data || !w2.data || !filter.data || extra < 1 || units < 1 || filter.count != extra * d * taps) return MISFIT;
    Shape some = shape;
    some.heads = units;
    const auto unit_of = [&](const Tokens<E>& x) { return heads_of(x, 0, units); };
    const Answer answer =
        ttt_unit_of<E>(some, unit_of(q), unit_of(k), unit_of(v), unit_of(out), w1, w2, turning, scale / float(n));
    if (answer) return answer;
    some.heads = extra;
    const auto filter_of = [&](const Tokens<E>& x) { return heads_of(x, units, extra); };
    const int64_t channels = extra * d, places = map.height * map.width;
    Buffer<float> weights(shape.batch * taps * channels);
    const Answer gathered =
        local_branch_gradient_of<E>(some, filter_of(k), filter_of(v), map, numbers_of(weights), taps * channels, {}, 3);
    if (gathered) return gathered;
    for (int64_t b = 0; b < shape.batch; b++)
        for (int64_t c = 0; c < channels; c++) {
            float* step = &weights[b * taps * channels + c];
            float squares = 0;
            for (int64_t i = 0; i < taps; i++) {
                float& one = step[i * channels];
                one *= scale / float(places);
                squares += one * one;
            }
            const float damping = 1 / (std::sqrt(squares) + 1);
            for (int64_t i = 0; i < taps; i++)
                step[i * channels] = filter.data[c * taps + i] + step[i * channels] * damping;
        }
    return add_branch<E>(
        some, filter_of(q), {}, {}, filter_of(out), map, numbers_of(weights), taps * channels, {}, 3);
}

KERNEL(
    ttt_mixer,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyNumbers w1, AnyNumbers w2, AnyNumbers filter,
     Turning turning, float scale, Map map, AnyTokens out),
    (shape, q, k, v, w1, w2, filter, turning, scale, map, out))

KERNEL(
    circulant_mixer,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyTokens g, int64_t height, int64_t width, AnyTokens out),
    (shape, q, k, v, g, height, width, out))

// Each block of queries has all states (b, h, m, entries), by its row of `mixing` (m, m), no number of which is below `least`
inline void mix_states(
    const Shape& shape, const Parameter& mixing, float least, int64_t m, const Buffer<float>& states, Buffer<float>& mixed) {
    const int64_t total = shape.batch * shape.heads * m, entries = int64_t(states.size()) / std::max<int64_t>(total, 1);
    parallel(shape.threads, [&](int me, int all) {
        for (int64_t i = total * me / all; i < total * (me + 1) / all; i++) {
            float* to = &mixed[i * entries];
            for (int64_t j = 0; j < m; j++) {
                const float* from = &states[(i / m * m + j) * entries];
                const float weight = std::max(mixing.data[i % m * m + j], least);
                for (int64_t c = 0; c < entries; c++) to[c] += weight * from[c];
            }
        }
    });
}

template <class E>
Answer mhla_mixer_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, const Parameter& mixing, const Parameter& q_scale,
    const Parameter& k_scale, float least, const Filters& filters, Blocks blocks, Tokens<E> out) {
    const int64_t d = shape.width, n = shape.queries;
    if (shape.keys != n || !blocks.fits(n) || !mixing.data || !q_scale.data || !k_scale.data) return MISFIT;
    const int64_t m = blocks.count(n), count = shape.batch * shape.heads * m * d * (d + 1);
    if (!fits(m * m, mixing) || !fits(shape, filters) || !fits(shape, n, q, k, v, out)) return MISFIT;
    Buffer<float> states(count), mixed(count);
    Answer answer = mhla_sums_of<E>(shape, k, v, k_scale, numbers_of(states), blocks);
    if (answer) return answer;
    mix_states(shape, mixing, least, m, states, mixed);
    answer = mhla_answers_of<E>(shape, q, numbers_of(mixed), q_scale, out, blocks);
    if (answer) return answer;
    return finish(shape, v, {}, out, Map{blocks.height, blocks.width, blocks.prefix(n)}, filters);
}

KERNEL(
    mhla_mixer,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyNumbers mixing, AnyNumbers q_scale, AnyNumbers k_scale,
     float least, AnyFilters filters, Blocks blocks, AnyTokens out),
    (shape, q, k, v, mixing, q_scale, k_scale, least, filters, blocks, out))
