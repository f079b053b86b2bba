// All that lies between a layer's projections, in one call: the parts of these files one after the other, for the
// mechanisms of attention/. What parts have of each other is fp32 and never leaves the library.
#pragma once
#include "agent.h"
#include "inline.h"
#include "mlp.h"
#include "pola.h"
#include "soft.h"

// A local branch as a module has it: filters (count, size, size), biases (count). Channel c has filter c / each % count.
struct AnyFilters {
    AnyNumbers weight, bias;
    int64_t count, each, size;
};

struct Filters {
    Parameter weight, bias;
    int64_t count, each, size;
    Filters(const AnyFilters& x) : weight(x.weight), bias(x.bias), count(x.count), each(x.each), size(x.size) {}
};

inline bool fits(const Shape& shape, const Filters& it) {
    return it.weight.data && it.count > 0 && it.each > 0 && it.size % 2 == 1 && fits(it.count, it.bias) &&
           shape.heads * shape.width % (it.count * it.each) == 0 && fits(it.count * it.size * it.size, it.weight);
}

// out ← (out + the local branch of v) · g
template <class E>
Answer finish(
    const Shape& shape, const Tokens<E>& v, const Tokens<E>& g, const Tokens<E>& out, const Map& map,
    const Filters& filters) {
    const int64_t channels = shape.heads * shape.width, taps = filters.size * filters.size;
    Buffer<float> weight(taps * channels), bias(filters.bias.data ? channels : 0);
    for (int64_t c = 0; c < channels; c++) {
        const int64_t filter = c / filters.each % filters.count;
        for (int64_t i = 0; i < taps; i++) weight[i * channels + c] = filters.weight.data[filter * taps + i];
        if (filters.bias.data) bias[c] = filters.bias.data[filter];
    }
    const Numbers of_channels{weight.data(), taps * channels}, more{bias.empty() ? nullptr : bias.data(), channels};
    return add_branch<E>(shape, v, out, g, out, map, of_channels, 0, more, int32_t(filters.size));
}

// Tokens (b, h, count, d) that lie side by side
inline Tokens<float> few_tokens(const Shape& shape, int64_t count, Buffer<float>& room) {
    const int64_t head = count * shape.width;
    room.resize(shape.batch * shape.heads * head);
    return {room.data(), shape.heads * head, head, shape.width, shape.batch, shape.heads, count, shape.width};
}
inline Numbers numbers_of(Buffer<float>& room) { return {room.data(), int64_t(room.size())}; }

// The MLP of a head, W₂ gelu(W₁ x̄ + b₁) + b₂, that gives nine taps for each channel: weights (h·d, d) and (9·h·d, d)
struct AnyPredictor {
    AnyNumbers first, first_bias, second, second_bias;
};

struct Predictor {
    Parameter first, first_bias, second, second_bias;
    Predictor(const AnyPredictor& x)
        : first(x.first), first_bias(x.first_bias), second(x.second), second_bias(x.second_bias) {}
};

inline float inner_product(const float* x, const float* y, int64_t width) {
    vec total{};
    int64_t c = 0;
    for (; c + W <= width; c += W) total += load(x + c) * load(y + c);
    if (c < width) total += load(x + c, width - c) * load(y + c, width - c);
    return sum(total);
}

// Taps (b, 9, h·d) from the mean of tokens x (b, 1, n, h·d)
template <class E>
void predict(const Shape& shape, const Tokens<E>& x, const Predictor& by, Buffer<float>& taps) {
    const int64_t d = shape.width, channels = shape.heads * d, row = padded(channels), nine = 9;
    const Shape tokens{shape.batch, 1, shape.queries, shape.queries, channels, shape.threads};
    Sums sums(shape.threads, row);
    taps.resize(shape.batch * nine * channels);
    parallel(shape.threads, [&](int me, int all) {
        Buffer<float> spare, mean(d), hidden(padded(d));
        sums.gather(tokens, shape.queries, me, all, [&](const Piece& piece, float* sum) {
            const Rows rows = values_of(x, piece, channels, spare);
            add_rows(rows.data, rows.row, piece.count, row, sum);
        });
        heads(shape, me, all, [&](int64_t index) {
            const int64_t b = index / shape.heads, first = index % shape.heads * d;
            std::fill(mean.begin(), mean.end(), 0.0f);
            sums.each_sum(b, [&](const float* part) {
                for (int64_t c = 0; c < d; c++) mean[c] += part[first + c] / float(shape.queries);
            });
            for (int64_t i = 0; i < d; i++)
                hidden[i] = inner_product(by.first.data + (first + i) * d, mean.data(), d) + by.first_bias.data[first + i];
            for (int64_t c = 0; c < d; c += W) store(&hidden[c], gelu(load(&hidden[c]), 0.0f));
            for (int64_t i = nine * first; i < nine * (first + d); i++)
                taps[(b * nine + i % nine) * channels + i / nine] =
                    inner_product(by.second.data + i * d, hidden.data(), d) + by.second_bias.data[i];
        });
    });
}

template <class E>
Answer inline_mixer_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<E> x, const Predictor& predictor, Map map,
    Tokens<E> out) {
    const int64_t d = shape.width, channels = shape.heads * d;
    if (!fits(Shape{shape.batch, 1, 0, 0, channels, 0}, shape.queries, x)) return MISFIT;
    if (!fits(channels * d, predictor.first) || !fits(channels, predictor.first_bias)) return MISFIT;
    if (!fits(9 * channels * d, predictor.second) || !fits(9 * channels, predictor.second_bias)) return MISFIT;
    if (!fits(shape, shape.queries, v) || !fits(shape.queries, map)) return MISFIT;
    if (const Answer answer = inline_attention_of<E>(shape, q, k, v, out)) return answer;
    Buffer<float> taps;
    predict(shape, x, predictor, taps);
    return add_branch<E>(shape, v, out, {}, out, map, numbers_of(taps), 9 * channels, {}, 3);
}

KERNEL(
    inline_mixer,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyTokens x, AnyPredictor predictor, Map map,
     AnyTokens out),
    (shape, q, k, v, x, predictor, map, out))

// Agents are means of the queries over `across` bins in each of `down` rows
template <class E>
Answer agent_mixer_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, const Bias& key_bias, const Bias& query_bias,
    const Filters& filters, Map map, int64_t down, int64_t across, Tokens<E> out) {
    if (!fits(shape, filters) || !fits(shape, shape.queries, v) || !fits(shape.queries, map)) return MISFIT;
    if (down < 1 || across < 1) return MISFIT;
    Buffer<float> room;
    if (pool_to(shape, q, map, down, across, few_tokens(shape, down * across, room))) return MISFIT;
    const Answer answer =
        agent_attention_of<E>(shape, q, numbers_of(room), down * across, k, v, key_bias, query_bias, {}, out);
    return answer ? answer : finish(shape, v, {}, out, map, filters);
}

KERNEL(
    agent_mixer,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyBias key_bias, AnyBias query_bias, AnyFilters filters,
     Map map, int64_t down, int64_t across, AnyTokens out),
    (shape, q, k, v, key_bias, query_bias, filters, map, down, across, out))

// Powers are 1 + alpha · sigmoid(power), and tokens are divided by softplus(temperature)
template <class E>
Answer pola_mixer_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<E> g, const Parameter& positions,
    const Parameter& power, const Parameter& temperature, float alpha, float eps, const Filters& filters, Map map,
    Tokens<E> out) {
    const int64_t channels = shape.heads * shape.width, head = shape.keys * shape.width;
    if (!fits(channels, power, temperature) || !power.data || !temperature.data) return MISFIT;
    if (!fits(shape.heads * head, positions) || !positions.data) return MISFIT;
    if (!fits(shape, filters) || !fits(shape, shape.queries, v, g) || !fits(shape.queries, map)) return MISFIT;
    Buffer<float> powers(channels), sharpness(channels);
    for (int64_t c = 0; c < channels; c++) {
        powers[c] = 1 + alpha * sigmoid(power.data[c]);
        sharpness[c] = 1 / softplus(temperature.data[c]);
    }
    // the same of all images
    const Tokens<float> places{positions.data, 0, head, shape.width, shape.batch, shape.heads, shape.keys, shape.width};
    const Answer answer =
        pola_attention_of<E>(shape, q, k, v, places, out, numbers_of(sharpness), numbers_of(powers), eps);
    return answer ? answer : finish(shape, v, g, out, map, filters);
}

KERNEL(
    pola_mixer,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyTokens g, AnyNumbers positions,
     AnyNumbers power, AnyNumbers temperature, float alpha, float eps, AnyFilters filters, Map map, AnyTokens out),
    (shape, q, k, v, g, positions, power, temperature, alpha, eps, filters, map, out))

// Landmarks from what a convolution made of their windows: gelu(norm(scale · x)), in place
inline void make_landmarks(const Shape& shape, const Tokens<float>& x, float scale, const Norm& norm) {
    const int64_t d = shape.width;
    Buffer<float> line(padded(d));
    for (int64_t i = 0; i < shape.batch * shape.heads * x.count; i++) {
        float* token = x.data + i * d;
        for (int64_t c = 0; c < d; c++) token[c] *= scale;
        normed<1, float, float>({token}, d, norm, {line.data()});
        for (int64_t c = 0; c < d; c += W) store(&line[c], gelu(load(&line[c]), 0.0f));
        copy(line.data(), d, token);
    }
}

// x (b, h, m, d) ← Y x, with Newton's inverse Y of κ(l, l) + ridge from `start` / (largest row sum)² of it
inline void solve(
    const Shape& shape, const Tokens<float>& landmarks, int64_t steps, float ridge, float start, Buffer<float>& x) {
    const int64_t d = shape.width, m = landmarks.count, row = padded(m);
    parallel(shape.threads, [&](int me, int all) {
        GaussianMap kernel;
        Newton newton(m);
        Buffer<float> gram(m * m), right, spare(m * padded(d));
        heads(shape, me, all, [&](int64_t index) {
            float largest = 0;
            for (int64_t first = 0; first < m; first += T) {
                const Piece piece{index, index / shape.heads, index % shape.heads, first, std::min<int64_t>(T, m - first)};
                kernel.fill_in(landmarks, piece, landmarks.data, m, d, 1);
                for (int64_t t = 0; t < piece.count; t++) {
                    float total = 0, *to = &gram[(first + t) * m];
                    for (int64_t a = 0; a < m; a++) total += to[a] = kernel.map[t * row + a];
                    largest = std::max(largest, total);
                    to[first + t] += ridge;
                }
            }
            newton.run(gram.data(), start / (largest * largest), steps);
            as_rows(&x[index * m * d], d, m, d, right);
            multiply(m, padded(d), m, {newton.y.data(), row, 1}, right.data(), padded(d), {spare.data(), padded(d)});
            for (int64_t a = 0; a < m; a++) std::memcpy(&x[(index * m + a) * d], &spare[a * padded(d)], d * sizeof(float));
        });
    });
}

// `windows` (d, d, down, across) are those of a convolution as a module has them
template <class E>
Answer soft_mixer_of(
    Shape shape, Tokens<E> q, Tokens<E> v, const Parameter& windows, const Norm& norm, float scale, int64_t steps,
    float ridge, float start, const Filters& filters, Map map, int64_t down, int64_t across, Tokens<E> out) {
    const int64_t d = shape.width, places = down * across;
    if (!fits(shape, shape.queries, q, v) || !fits(shape.queries, map) || !fits(shape, filters)) return MISFIT;
    if (down < 1 || across < 1 || map.height < down || map.width < across || steps < 0) return MISFIT;
    if (!fits(places * d * d, windows) || !fits(d, norm.weight, norm.bias)) return MISFIT;
    const int64_t count = map.height / down * (map.width / across);
    Buffer<float> weights(places * d * d), points, gathered;
    // as products want them, (down, across, d, d of landmarks)
    for (int64_t c = 0; c < d; c++) turn(windows.data + c * places, d * places, d, places, &weights[c * d], d * d);
    const Tokens<float> landmarks = few_tokens(shape, count, points);
    if (convolve_windows_to(shape, q, map, down, across, numbers_of(weights), landmarks)) return MISFIT;
    make_landmarks(shape, landmarks, scale, norm);
    gathered.resize(points.size());
    // both maps are one: it is kept where it stays in the caches
    const int64_t entries = shape.batch * shape.heads * shape.queries * padded(count);
    const std::unique_ptr<float[]> kept(entries > MOST_KEPT ? nullptr : new float[entries]);
    const Numbers few = numbers_of(points), solved = numbers_of(gathered);
    Answer answer = soft_gather_to(shape, q, few, count, v, scale, solved, kept.get());
    if (answer) return answer;
    solve(shape, landmarks, steps, ridge, start, gathered);
    answer = soft_spread_from(shape, q, few, count, solved, scale, out, kept.get());
    return answer ? answer : finish(shape, v, {}, out, map, filters);
}

KERNEL(
    soft_mixer,
    (Shape shape, AnyTokens q, AnyTokens v, AnyNumbers windows, AnyNorm norm, float scale, int64_t steps, float ridge,
     float start, AnyFilters filters, Map map, int64_t down, int64_t across, AnyTokens out),
    (shape, q, v, windows, norm, scale, steps, ridge, start, filters, map, down, across, out))
