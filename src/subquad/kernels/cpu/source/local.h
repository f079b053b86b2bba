// The depthwise branch: see ops/map_formulas.py.
#pragma once
#include "activations.h"
#include "tokens.h"

struct Map {
    int64_t height, width, prefix;
};

inline bool fits(int64_t tokens, const Map& map) {
    return map.height > 0 && map.width > 0 && map.prefix >= 0 && map.height * map.width + map.prefix == tokens;
}

template <class E, class Act = Nothing>
struct Branch {
    Tokens<E> v, y, g, out;
    Map map;
    const float *weight, *bias;  // (taps, channels), (channels)
    int64_t channels;
    int kernel_size;
    Act act = {};
};

// `count` channels at c of X places of a row from x on. A value that is loaded serves all of them; with X > 1 channels are
// whole vectors, and what lies `outside` of the map is neither read nor written, if some of it may.
template <int X, int K, bool outside, class E, class Act>
inline void places(
    const Branch<E, Act>& it, int64_t b, int64_t h, int64_t row, int64_t x, int64_t c, int64_t channel, int64_t count) {
    const int size = K ? K : it.kernel_size, half = size / 2;
    const bool whole = count >= W;
    const auto read = [&](const auto* p) { return whole ? load(p) : load(p, count); };
    const int64_t top = std::max<int64_t>(0, row - half), bottom = std::min(it.map.height, row + half + 1);
    const int64_t token = it.map.prefix + row * it.map.width + x;
    const int64_t count_here = outside ? std::min<int64_t>(X, it.map.width - x) : X;
    vec sums[X];
    const vec bias = it.bias ? read(it.bias + channel) : vec{};
    UNROLLED
    for (int i = 0; i < X; i++)
        sums[i] = it.y.data && i < count_here ? read(it.y.at(b, h, token + i) + c) + bias : bias;
    for (int64_t r = top; r < bottom; r++) {
        const float* taps = it.weight + (r - row + half) * size * it.channels + channel;
        if constexpr (X > 1) {
            const E* line = it.v.at(b, h, it.map.prefix + r * it.map.width + x - half) + c;
            vec tap[K];
            UNROLLED
            for (int s = 0; s < K; s++) tap[s] = load(taps + s * it.channels);
            UNROLLED
            for (int s = 0; s < X + K - 1; s++) {
                if (outside && uint64_t(x - half + s) >= uint64_t(it.map.width)) continue;
                const vec value = load(line + s * it.v.token);
                UNROLLED
                for (int i = 0; i < X; i++)
                    if (s - i >= 0 && s - i < K) sums[i] += value * tap[s - i];
            }
        } else {
            const int64_t left = std::max<int64_t>(0, x - half), right = std::min(it.map.width, x + half + 1);
            const E* line = it.v.at(b, h, it.map.prefix + r * it.map.width + left) + c;
            for (int64_t s = left; s < right; s++, line += it.v.token)
                sums[0] += read(line) * read(taps + (s - x + half) * it.channels);
        }
    }
    UNROLLED
    for (int i = 0; i < X; i++) {
        if (outside && i >= count_here) continue;
        if (it.g.data) sums[i] *= read(it.g.at(b, h, token + i) + c);
        E* to = it.out.at(b, h, token + i) + c;
        whole ? store(to, it.act(sums[i])) : store(to, it.act(sums[i]), count);
    }
}

// One line of channels after the other: what a row's places share of it stays in the L1 cache
template <int K, class E, class Act>
inline void branch_row(const Branch<E, Act>& it, const Shape& shape, int64_t b, int64_t row) {
    constexpr int X = W == 16 ? 8 : 4, half = K / 2;  // as many sums at a time as keep the multipliers busy
    const int64_t width = it.map.width;
    for (int64_t h = 0; h < shape.heads; h++)
        for (int64_t c = 0; c < shape.width; c += W) {
            const int64_t channel = h * shape.width + c, count = shape.width - c;
            int64_t x = 0;
            if constexpr (K > 0)
                for (; count >= W && x < width; x += X)
                    if (x >= half && x + X + half <= width) places<X, K, false>(it, b, h, row, x, c, channel, W);
                    else if (x + X / 2 < width) places<X, K, true>(it, b, h, row, x, c, channel, W);
                    else places<X / 2, K, true>(it, b, h, row, x, c, channel, W);
            for (; x < width; x++) places<1, 0, false>(it, b, h, row, x, c, channel, count);
        }
}

// out = act(([y +] depthwise of v [+ bias]) [· g]). Weights are (taps, h·d) for each image, `weight_batch` numbers apart (0
// for the same); tokens of the prefix have no place on the map and get y [· g] or 0.
template <class E, class Act = Nothing>
Answer add_branch(
    Shape shape, Tokens<E> v, Tokens<E> y, Tokens<E> g, Tokens<E> out, Map map, Numbers weight, int64_t weight_batch,
    Numbers bias, int32_t kernel_size, Act act = {}) {
    const int64_t channels = shape.heads * shape.width, taps = int64_t(kernel_size) * kernel_size * channels;
    const int64_t kernels = weight_batch ? shape.batch : 1;
    if (!fits(shape, shape.queries, v, y, g, out) || !fits(shape.queries, map) || !fits(taps * kernels, weight)) return MISFIT;
    if (!fits(channels, bias) || kernel_size % 2 == 0 || (weight_batch && weight_batch != taps)) return MISFIT;
    const Branch<E, Act> it{v, y, g, out, map, weight.data, bias.data, shape.heads * shape.width, kernel_size, act};
    const auto side_by_side = [&](const Tokens<E>& x) { return !x.data || x.head == shape.width; };
    if (side_by_side(v) && side_by_side(y) && side_by_side(g) && side_by_side(out))
        shape.width *= shape.heads, shape.heads = 1;  // longer lines
    const int64_t rows = map.height + (map.prefix > 0), total = shape.batch * rows;
    parallel(shape.threads, [&](int me, int all) {
        Branch<E, Act> mine = it;
        for (int64_t i = total * me / all; i < total * (me + 1) / all; i++) {
            const int64_t b = i / rows, row = i % rows - (map.prefix > 0);
            mine.weight = weight.data + b * weight_batch;
            if (row < 0) {
                for (int64_t t = 0; t < map.prefix; t++)
                    for (int64_t h = 0; h < shape.heads; h++)
                        for (int64_t c = 0; c < shape.width; c += W) {
                            const int64_t count = shape.width - c;
                            vec sums = y.data ? load(y.at(b, h, t) + c, count) : vec{};
                            if (g.data) sums *= load(g.at(b, h, t) + c, count);
                            store(out.at(b, h, t) + c, sums, count);
                        }
            } else if (kernel_size == 3) branch_row<3>(mine, shape, b, row);
            else if (kernel_size == 5) branch_row<5>(mine, shape, b, row);
            else if (kernel_size == 7) branch_row<7>(mine, shape, b, row);
            else if (kernel_size == 9) branch_row<9>(mine, shape, b, row);
            else branch_row<0>(mine, shape, b, row);
        }
    });
    return DONE;
}

// The same with weights as a module has them: (h·d, taps), of each of `kernels` images, or, where that is 0, of all
template <class E>
Answer local_branch_of(
    Shape shape, Tokens<E> v, Tokens<E> y, Tokens<E> g, Tokens<E> out, Map map, const Parameter& weight, int64_t kernels,
    const Parameter& bias, int32_t kernel_size, int32_t activation) {
    const int64_t channels = shape.heads * shape.width, taps = int64_t(kernel_size) * kernel_size;
    const int64_t count = std::max<int64_t>(kernels, 1) * channels * taps;
    if ((kernels && kernels != shape.batch) || !weight.data || !fits(count, weight)) return MISFIT;
    Buffer<float> turned(count);
    for (int64_t i = 0; i < count; i += channels * taps)
        turn(weight.data + i, taps, channels, taps, &turned[i], channels);
    const Numbers as_read{turned.data(), count};
    const int64_t apart = kernels ? channels * taps : 0;
    return with_activation_behind<E>(activation, [&](auto act) {
        return add_branch<E>(shape, v, y, g, out, map, as_read, apart, bias, kernel_size, act);
    });
}

KERNEL(
    local_branch,
    (Shape shape, AnyTokens v, AnyTokens y, AnyTokens g, AnyTokens out, Map map, AnyNumbers weight, int64_t kernels,
     AnyNumbers bias, int32_t kernel_size, int32_t activation),
    (shape, v, y, g, out, map, weight, kernels, bias, kernel_size, activation))

// The gradient of the weights, (taps, channels) of an image or, with `weight_batch` 0, of all, and of the bias
template <int K, class E>
inline void branch_gradient(
    const Branch<E>& it, const Tokens<E>& grad, int64_t b, int64_t h, int64_t c, int64_t channel, int64_t count,
    float* weight, float* bias) {
    constexpr int half = K / 2;
    const bool whole = count >= W;
    const auto read = [&](const auto* p) { return whole ? load(p) : load(p, count); };
    const auto add = [&](float* p, vec x) { whole ? store(p, load(p) + x) : store(p, load(p, count) + x, count); };
    const int64_t width = it.map.width;
    for (int64_t row = 0; row < it.map.height; row++) {
        const E* from = grad.at(b, h, it.map.prefix + row * width) + c;
        vec total{};
        for (int64_t x = 0; bias && x < width; x++) total += read(from + x * grad.token);
        if (bias) add(bias + channel, total);
        for (int64_t r = std::max<int64_t>(0, row - half); r < std::min(it.map.height, row + half + 1); r++) {
            const E* line = it.v.at(b, h, it.map.prefix + r * width) + c;
            vec sums[K]{};
            const auto clipped = [&](int64_t x) {
                const vec g = read(from + x * grad.token);
                for (int s = 0; s < K; s++)
                    if (x + s >= half && x + s - half < width) sums[s] += g * read(line + (x + s - half) * it.v.token);
            };
            int64_t x = 0;
            for (; x < std::min<int64_t>(half, width); x++) clipped(x);
            if (whole)
                for (; x + half < width; x++) {
                    const vec g = load(from + x * grad.token);
                    UNROLLED
                    for (int s = 0; s < K; s++) sums[s] += g * load(line + (x + s - half) * it.v.token);
                }
            for (; x < width; x++) clipped(x);
            for (int s = 0; s < K; s++) add(weight + ((r - row + half) * K + s) * it.channels + channel, sums[s]);
        }
    }
}

template <class E>
Answer local_branch_gradient_of(
    Shape shape, Tokens<E> v, Tokens<E> grad, Map map, Numbers weight, int64_t weight_batch, Numbers bias,
    int32_t kernel_size) {
    const int64_t channels = shape.heads * shape.width, size = int64_t(kernel_size) * kernel_size * channels;
    const int64_t kernels = weight_batch ? shape.batch : 1;
    if (!fits(shape, shape.queries, v, grad) || !fits(shape.queries, map) || !fits(size * kernels, weight)) return MISFIT;
    if (!fits(channels, bias) || kernel_size % 2 == 0 || kernel_size > 9) return MISFIT;
    if (weight_batch && weight_batch != size) return MISFIT;
    const Branch<E> it{v, {}, {}, {}, map, nullptr, nullptr, shape.heads * shape.width, kernel_size};
    if (v.head == shape.width && grad.head == shape.width) shape.width *= shape.heads, shape.heads = 1;
    const int64_t parts = (shape.width + W - 1) / W, total = shape.heads * parts;
    parallel(shape.threads, [&](int me, int all) {
        for (int64_t i = total * me / all; i < total * (me + 1) / all; i++)
            for (int64_t b = 0; b < shape.batch; b++) {
                const int64_t h = i / parts, c = i % parts * W, channel = h * shape.width + c, count = shape.width - c;
                float* taps = weight.data + b * weight_batch;
                if (kernel_size == 1) branch_gradient<1>(it, grad, b, h, c, channel, count, taps, bias.data);
                if (kernel_size == 3) branch_gradient<3>(it, grad, b, h, c, channel, count, taps, bias.data);
                if (kernel_size == 5) branch_gradient<5>(it, grad, b, h, c, channel, count, taps, bias.data);
                if (kernel_size == 7) branch_gradient<7>(it, grad, b, h, c, channel, count, taps, bias.data);
                if (kernel_size == 9) branch_gradient<9>(it, grad, b, h, c, channel, count, taps, bias.data);
            }
    });
    return DONE;
}

KERNEL(
    local_branch_gradient,
    (Shape shape, AnyTokens v, AnyTokens grad, Map map, Numbers weight, int64_t weight_batch, Numbers bias,
     int32_t kernel_size),
    (shape, v, grad, map, weight, weight_batch, bias, kernel_size))
