// MHLA: a state for each block of the map, and answers of each block's queries from states that were mixed for it: see
// ops/mhla_formula.py.
#pragma once
#include "feature_maps.h"
#include "mixer_parts.h"

constexpr float LEAST_FEATURE = 1e-6f, NORM_EPS = 1.1920929e-07f;

// A map in rows × columns of blocks whose sides differ by one token at most; prefix tokens are a block in front
struct Blocks {
    int64_t height, width, rows, columns;

    int64_t prefix(int64_t tokens) const { return tokens - height * width; }
    int64_t count(int64_t tokens) const { return rows * columns + (prefix(tokens) > 0); }
    bool fits(int64_t tokens) const {
        return height > 0 && width > 0 && rows > 0 && columns > 0 && tokens >= height * width;
    }
    // The tokens of a block, in order
    void tokens(int64_t all, int64_t block, Buffer<int64_t>& to) const {
        const int64_t front = prefix(all);
        to.clear();
        if (front && block-- == 0) {
            for (int64_t t = 0; t < front; t++) to.push_back(t);
            return;
        }
        const int64_t r = block / columns, c = block % columns;
        for (int64_t y = r * height / rows; y < (r + 1) * height / rows; y++)
            for (int64_t x = c * width / columns; x < (c + 1) * width / columns; x++) to.push_back(front + y * width + x);
    }
};

// Blocks of all images, shared among threads, T of a block's tokens at a time: `begin(b, block)`, then
// `function(b, index, count)` for each part, then `end(b, block)`
template <class Begin, class Function, class End>
void each_block(const Shape& shape, int64_t n, const Blocks& blocks, int me, int all, Begin&& begin, Function&& function, End&& end) {
    const int64_t m = blocks.count(n);
    Buffer<int64_t> index;
    for (int64_t i = shape.batch * m * me / all; i < shape.batch * m * (me + 1) / all; i++) {
        const int64_t b = i / m, block = i % m;
        blocks.tokens(n, block, index);
        begin(b, block);
        for (int64_t first = 0; first < int64_t(index.size()); first += T)
            function(b, &index[first], std::min<int64_t>(T, int64_t(index.size()) - first));
        end(b, block);
    }
}

// 1 / sqrt(mean x² + ε) of tokens over the channels of all heads
template <class E>
void shares_of(const Shape& shape, const Tokens<E>& x, int64_t b, const int64_t* index, int64_t count, float* shares) {
    for (int64_t t = 0; t < count; t++) {
        vec squares{};
        for (int64_t h = 0; h < shape.heads; h++) {
            const E* from = x.at(b, h, index[t]);
            for (int64_t c = 0; c < shape.width; c += W) {
                const vec value = shape.width - c >= W ? load(from + c) : load(from + c, shape.width - c);
                squares += value * value;
            }
        }
        shares[t] = 1 / std::sqrt(sum(squares) / float(shape.heads * shape.width) + NORM_EPS);
    }
}

// ReLU of normed tokens of a head, and a floor under it, as rows of padded width with zeros beyond it
template <class E>
void block_features(
    const Shape& shape, const Tokens<E>& x, int64_t b, int64_t h, const int64_t* index, int64_t count, const float* shares,
    const float* scale, float* to) {
    const int64_t d = shape.width, row = padded(d);
    for (int64_t t = 0; t < count; t++) {
        const E* from = x.at(b, h, index[t]);
        for (int64_t c = 0; c < d; c += W) {
            const int64_t n = d - c;
            const vec value = n >= W ? load(from + c) * load(scale + c) : load(from + c, n) * load(scale + c, n);
            const vec scaled = value * shares[t];
            vec feature = (scaled < vec{} ? vec{} : scaled) + LEAST_FEATURE;
            for (int64_t i = n; i < W; i++) feature[i] = 0;
            store(to + t * row + c, feature);
        }
    }
}

// [Σ kᵀ v, Σ k] of features of each block to `out`, (b, h, m, d, d + 1)
template <class E>
Answer mhla_sums_of(Shape shape, Tokens<E> k, Tokens<E> v, Numbers scale, Numbers out, Blocks blocks) {
    typedef Operand<E> P;
    const int64_t d = shape.width, row = padded(d), side = d + 1, n = shape.keys;
    if (!fits(shape, n, k, v) || !blocks.fits(n) || !fits(shape.heads * d, scale)) return MISFIT;
    const int64_t m = blocks.count(n), size = d * row + row;
    if (out.count != shape.batch * shape.heads * m * d * side) return MISFIT;
    parallel(shape.threads, [&](int me, int all) {
        Buffer<float> states(shape.heads * size), features(T * row), values(T * row);
        Buffer<P> left, right;
        float shares[T];
        each_block(
            shape, n, blocks, me, all, [&](int64_t, int64_t) { std::fill(states.begin(), states.end(), 0.0f); },
            [&](int64_t b, const int64_t* index, int64_t count) {
                shares_of(shape, k, b, index, count, shares);
                for (int64_t h = 0; h < shape.heads; h++) {
                    float* state = &states[h * size];
                    block_features(shape, k, b, h, index, count, shares, scale.data + h * d, features.data());
                    for (int64_t t = 0; t < count; t++) copy(v.at(b, h, index[t]), d, &values[t * row]);
                    add_rows(features.data(), row, count, row, state + d * row);
                    const Panel<P> keys = packed(features.data(), row, count, row, left);
                    const Panel<P> panel = packed(values.data(), row, count, row, right);
                    multiply(d, row, deep<P>(count), keys.turned(), panel.data, panel.row, {state, row}, true);
                }
            },
            [&](int64_t b, int64_t block) {
                for (int64_t h = 0; h < shape.heads; h++) {
                    const float* state = &states[h * size];
                    float* to = out.data + ((b * shape.heads + h) * m + block) * d * side;
                    for (int64_t i = 0; i < d; i++) {
                        copy(state + i * row, d, to + i * side);
                        to[i * side + d] = state[d * row + i];
                    }
                }
            });
    });
    return DONE;
}

KERNEL(
    mhla_sums, (Shape shape, AnyTokens k, AnyTokens v, Numbers scale, Numbers out, Blocks blocks),
    (shape, k, v, scale, out, blocks))

// q [S, z] of features, S / z, with the states (b, h, m, d, d + 1) that were mixed for each block
template <class E>
Answer mhla_answers_of(Shape shape, Tokens<E> q, Numbers states, Numbers scale, Tokens<E> out, Blocks blocks) {
    typedef Operand<E> P;
    const int64_t d = shape.width, row = padded(d), side = d + 1, n = shape.queries, panel = deep<P>(d) * row;
    if (!fits(shape, n, q, out) || !blocks.fits(n) || !fits(shape.heads * d, scale)) return MISFIT;
    const int64_t m = blocks.count(n);
    if (states.count != shape.batch * shape.heads * m * d * side) return MISFIT;
    parallel(shape.threads, [&](int me, int all) {
        Buffer<float> state(d * row), sums(shape.heads * row), features(T * row), answers(T * row);
        Buffer<P> panels(shape.heads * panel), left;
        float shares[T];
        each_block(
            shape, n, blocks, me, all,
            [&](int64_t b, int64_t block) {
                for (int64_t h = 0; h < shape.heads; h++) {
                    const float* from = states.data + ((b * shape.heads + h) * m + block) * d * side;
                    for (int64_t i = 0; i < d; i++) {
                        copy(from + i * side, d, &state[i * row]);
                        sums[h * row + i] = from[i * side + d];
                    }
                    pack(state.data(), row, d, row, &panels[h * panel]);
                }
            },
            [&](int64_t b, const int64_t* index, int64_t count) {
                shares_of(shape, q, b, index, count, shares);
                for (int64_t h = 0; h < shape.heads; h++) {
                    block_features(shape, q, b, h, index, count, shares, scale.data + h * d, features.data());
                    const Matrix<P> rows = lowered(features.data(), row, count, row, left);
                    multiply(count, row, deep<P>(d), rows, &panels[h * panel], row, {answers.data(), row});
                    for (int64_t t = 0; t < count; t++) {
                        float* line = &answers[t * row];
                        const float share = 1 / (product(&features[t * row], &sums[h * row], row) + LEAST_FEATURE);
                        for (int64_t c = 0; c < row; c += W) store(line + c, load(line + c) * share);
                        copy(line, d, out.at(b, h, index[t]));
                    }
                }
            },
            [](int64_t, int64_t) {});
    });
    return DONE;
}

KERNEL(
    mhla_answers, (Shape shape, AnyTokens q, Numbers states, Numbers scale, AnyTokens out, Blocks blocks),
    (shape, q, states, scale, out, blocks))

// From the gradients of a block's features, rows of each head in turn that are T lines apart, those of the tokens x, to
// dx, and of the scale, added: with n = x r, r = (mean x² + ε)^-½ over all heads and z = n s, u = s dφ where z > 0, dx =
// r u - r³ x (u·x) / (h d) and ds = Σ n dφ
template <class E>
void block_features_gradient(
    const Shape& shape, const Tokens<E>& x, int64_t b, const int64_t* index, int64_t count, const float* shares,
    const float* scale, const float* grads, const Tokens<E>& dx, float* dscale) {
    const int64_t d = shape.width, row = padded(d);
    Buffer<float> room(shape.heads * row);
    for (int64_t t = 0; t < count; t++) {
        const float share = shares[t];
        vec dots{};
        for (int64_t h = 0; h < shape.heads; h++)
            each_entry(x.at(b, h, index[t]), d, [&](int64_t c, vec value) {
                const int64_t n = d - c;
                const float* from = scale + h * d + c;
                const vec s = n >= W ? load(from) : load(from, n), grad = load(grads + (h * T + t) * row + c);
                const vec live = value * s * share <= vec{} ? vec{} : grad, u = live * s, ds = live * value * share;
                store(&room[h * row + c], u);
                dots += u * value;
                float* to = dscale + h * row + c;
                store(to, load(to) + ds);
            });
        const float down = share * share * share * sum(dots) / float(shape.heads * d);
        for (int64_t h = 0; h < shape.heads; h++) {
            float* line = &room[h * row];
            each_entry(x.at(b, h, index[t]), d, [&](int64_t c, vec value) {
                store(line + c, load(line + c) * share - value * down);
            });
            copy(line, d, dx.at(b, h, index[t]));
        }
    }
}

// The gradients of a scale, each thread's (h × padded width) after the other, as one
inline void sum_scales(const Shape& shape, const Buffer<float>& all, Numbers to) {
    const int64_t d = shape.width, row = padded(d), size = shape.heads * row;
    std::fill(to.data, to.data + to.count, 0.0f);
    for (size_t first = 0; first < all.size(); first += size)
        for (int64_t h = 0; h < shape.heads; h++)
            for (int64_t c = 0; c < d; c++) to.data[h * d + c] += all[first + h * row + c];
}

// dv = φ dS, dφ = v dSᵀ + dz, of the gradients [dS, dz] to the states
template <class E>
Answer mhla_sums_gradient_of(
    Shape shape, Numbers grads, Tokens<E> k, Tokens<E> v, Numbers scale, Tokens<E> dk, Tokens<E> dv, Numbers dscale,
    Blocks blocks) {
    const int64_t d = shape.width, row = padded(d), side = d + 1, n = shape.keys;
    if (!fits(shape, n, k, v, dk, dv) || !blocks.fits(n) || !fits(shape.heads * d, scale, dscale)) return MISFIT;
    const int64_t m = blocks.count(n), size = d * row, of_thread = shape.heads * row;
    if (grads.count != shape.batch * shape.heads * m * d * side) return MISFIT;
    Buffer<float> scales(shape.threads * of_thread);
    parallel(shape.threads, [&](int me, int all) {
        Buffer<float> states(shape.heads * size), turned(shape.heads * size), sums(shape.heads * row);
        Buffer<float> features(T * row), values(T * row), given(shape.heads * T * row);
        float shares[T];
        each_block(
            shape, n, blocks, me, all,
            [&](int64_t b, int64_t block) {
                for (int64_t h = 0; h < shape.heads; h++) {
                    const float* from = grads.data + ((b * shape.heads + h) * m + block) * d * side;
                    for (int64_t i = 0; i < d; i++) {
                        copy(from + i * side, d, &states[h * size + i * row]);
                        sums[h * row + i] = from[i * side + d];
                    }
                    transpose(&states[h * size], d, d, &turned[h * size]);
                }
            },
            [&](int64_t b, const int64_t* index, int64_t count) {
                shares_of(shape, k, b, index, count, shares);
                for (int64_t h = 0; h < shape.heads; h++) {
                    block_features(shape, k, b, h, index, count, shares, scale.data + h * d, features.data());
                    multiply(count, row, d, Strided{features.data(), row, 1}, &states[h * size], row, {values.data(), row});
                    for (int64_t t = 0; t < count; t++) {
                        copy(&values[t * row], d, dv.at(b, h, index[t]));
                        copy(v.at(b, h, index[t]), d, &features[t * row]);
                    }
                    float* to = &given[h * T * row];
                    repeat(&sums[h * row], count, row, {to, row});
                    multiply(count, row, d, Strided{features.data(), row, 1}, &turned[h * size], row, {to, row}, true);
                }
                block_features_gradient(
                    shape, k, b, index, count, shares, scale.data, given.data(), dk, &scales[me * of_thread]);
            },
            [](int64_t, int64_t) {});
    });
    sum_scales(shape, scales, dscale);
    return DONE;
}

KERNEL(
    mhla_sums_gradient,
    (Shape shape, Numbers grads, AnyTokens k, AnyTokens v, Numbers scale, AnyTokens dk, AnyTokens dv, Numbers dscale,
     Blocks blocks),
    (shape, grads, k, v, scale, dk, dv, dscale, blocks))

// With f = 1 / (φ·z + ε) and e = g Sᵀ: dφ = f e - f² (φ·e) z, dS = Σ φᵀ (f g), dz = -Σ f² (φ·e) φ
template <class E>
Answer mhla_answers_gradient_of(
    Shape shape, Tokens<E> grad, Tokens<E> q, Numbers states, Numbers scale, Tokens<E> dq, Numbers dstates, Numbers dscale,
    Blocks blocks) {
    const int64_t d = shape.width, row = padded(d), side = d + 1, n = shape.queries;
    if (!fits(shape, n, grad, q, dq) || !blocks.fits(n) || !fits(shape.heads * d, scale, dscale)) return MISFIT;
    const int64_t m = blocks.count(n), size = d * row, of_thread = shape.heads * row;
    if (states.count != shape.batch * shape.heads * m * d * side || dstates.count != states.count) return MISFIT;
    Buffer<float> scales(shape.threads * of_thread);
    parallel(shape.threads, [&](int me, int all) {
        Buffer<float> state(size), turned(shape.heads * size), sums(shape.heads * row), dsums(shape.heads * row);
        Buffer<float> gradients(shape.heads * size), features(T * row), grads(T * row), given(shape.heads * T * row);
        float shares[T];
        each_block(
            shape, n, blocks, me, all,
            [&](int64_t b, int64_t block) {
                std::fill(gradients.begin(), gradients.end(), 0.0f);
                std::fill(dsums.begin(), dsums.end(), 0.0f);
                for (int64_t h = 0; h < shape.heads; h++) {
                    const float* from = states.data + ((b * shape.heads + h) * m + block) * d * side;
                    for (int64_t i = 0; i < d; i++) {
                        copy(from + i * side, d, &state[i * row]);
                        sums[h * row + i] = from[i * side + d];
                    }
                    transpose(state.data(), d, d, &turned[h * size]);
                }
            },
            [&](int64_t b, const int64_t* index, int64_t count) {
                shares_of(shape, q, b, index, count, shares);
                for (int64_t h = 0; h < shape.heads; h++) {
                    float *to = &given[h * T * row], *z = &sums[h * row], *dz = &dsums[h * row];
                    block_features(shape, q, b, h, index, count, shares, scale.data + h * d, features.data());
                    for (int64_t t = 0; t < count; t++) copy(grad.at(b, h, index[t]), d, &grads[t * row]);
                    multiply(count, row, d, Strided{grads.data(), row, 1}, &turned[h * size], row, {to, row});
                    for (int64_t t = 0; t < count; t++) {
                        float *line = to + t * row, *feature = &features[t * row], *g = &grads[t * row];
                        const float f = 1 / (product(feature, z, row) + LEAST_FEATURE);
                        const float of_sum = -f * f * product(feature, line, row);
                        for (int64_t c = 0; c < row; c += W) {
                            store(line + c, load(line + c) * f + load(z + c) * of_sum);
                            store(dz + c, load(dz + c) + load(feature + c) * of_sum);
                            store(g + c, load(g + c) * f);
                        }
                    }
                    multiply(
                        d, row, count, Strided{features.data(), 1, row}, grads.data(), row, {&gradients[h * size], row}, true);
                }
                block_features_gradient(
                    shape, q, b, index, count, shares, scale.data, given.data(), dq, &scales[me * of_thread]);
            },
            [&](int64_t b, int64_t block) {
                for (int64_t h = 0; h < shape.heads; h++) {
                    float* to = dstates.data + ((b * shape.heads + h) * m + block) * d * side;
                    for (int64_t i = 0; i < d; i++) {
                        copy(&gradients[h * size + i * row], d, to + i * side);
                        to[i * side + d] = dsums[h * row + i];
                    }
                }
            });
    });
    sum_scales(shape, scales, dscale);
    return DONE;
}

KERNEL(
    mhla_answers_gradient,
    (Shape shape, AnyTokens grad, AnyTokens q, Numbers states, Numbers scale, AnyTokens dq, Numbers dstates, Numbers dscale,
     Blocks blocks),
    (shape, grad, q, states, scale, dq, dstates, dscale, blocks))

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
