// PolaFormer's attention: see ops/pola_formula.py.
#pragma once
#include "mixer_parts.h"

// Rows [(x⁺)^p, (x⁻)^p] of x = (token + position) · sharpness, each half of padded width
template <class E>
void pola_features(
    const Tokens<E>& x, const Tokens<float>& positions, const Piece& piece, int64_t width, const float* sharpness,
    const float* powers, float* to) {
    const int64_t row = padded(width);
    for (int64_t t = 0; t < piece.count; t++) {
        const E* from = x.at(piece.b, piece.h, piece.first + t);
        const float* place = positions.data ? positions.at(piece.b, piece.h, piece.first + t) : nullptr;
        for (int64_t c = 0; c < row; c += W) {
            const int64_t n = width - c;
            vec value = n >= W ? load(from + c) : load(from + c, n);
            if (place) value += n >= W ? load(place + c) : load(place + c, n);
            value *= load(sharpness + c);
            const vec size = power_of<E>(value, load(powers + c));
            // NaN stays, in both halves
            store(to + t * 2 * row + c, value < vec{} ? vec{} : (value > vec{} ? size : value));
            store(to + t * 2 * row + row + c, value > vec{} ? vec{} : (value < vec{} ? size : value));
        }
    }
}

// `sharpness` (1 / temperature) and `powers` are (h, d). The first half of the values meets the same sign, the rest the
// opposite one: a state with the halves of its rows exchanged there serves both with the same query features.
template <class E>
struct Pola {
    const Shape& shape;
    const Tokens<E>&q, &k, &v;
    const Tokens<float>& positions;
    // rows of features; S (2 row × row), then Σ K̂, and Σ K̂ with its halves exchanged
    const int64_t d = shape.width, row = padded(d), wide = 2 * row, same = (d + 1) / 2, total = wide * row;
    const int64_t size = total + 2 * wide, all_heads = shape.batch * shape.heads;
    Buffer<float> states = Buffer<float>(all_heads * size), sharp = Buffer<float>(shape.heads * row);
    Buffer<float> exponents = Buffer<float>(shape.heads * row, 1.0f);

    bool begin(const Numbers& sharpness, const Numbers& powers) {
        if (!fits(shape, shape.queries, q) || !fits(shape, shape.keys, k, v, positions)) return false;
        if (!fits(shape.heads * d, sharpness, powers)) return false;
        for (int64_t h = 0; h < shape.heads; h++) {
            std::memcpy(&sharp[h * row], sharpness.data + h * d, d * sizeof(float));
            std::memcpy(&exponents[h * row], powers.data + h * d, d * sizeof(float));
        }
        return true;
    }
    void features(const Tokens<E>& x, const Tokens<float>& places, const Piece& piece, float* to) const {
        pola_features(x, places, piece, d, &sharp[piece.h * row], &exponents[piece.h * row], to);
    }
    const float* totals(const Piece& piece) const { return &states[piece.index * size + total]; }
    // Where the first half of the values meets what is at i, the rest meets what is there
    int64_t other(int64_t i) const { return i < row ? i + row : i - row; }

    template <class P>
    void gather_keys(Sums& sums, int me, int all) const {
        Buffer<float> room(T * wide);
        Buffer<P> left, right;
        sums.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            features(k, positions, piece, room.data());
            add_rows(room.data(), wide, piece.count, wide, sum + total);
            const Panel<P> keys = packed(room.data(), wide, piece.count, wide, left), values = packed(v, piece, d, right);
            multiply(wide, row, deep<P>(piece.count), keys.turned(), values.data, values.row, {sum, row}, true);
        });
    }
    void collect(Sums& sums, int64_t index) {
        float* state = &states[index * size];
        sums.each_sum(index, [&](const float* part) {
            for (int64_t i = 0; i < wide; i++) {
                for (int64_t c = 0; c < d; c++)
                    state[i * row + c] += part[(c < same ? i : other(i)) * row + c] / float(shape.keys);
                state[total + i] += part[total + i] / float(shape.keys);
                state[total + wide + i] += part[total + other(i)] / float(shape.keys);
            }
        });
    }
};

template <class E>
Answer pola_attention_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<float> positions, Tokens<E> out, Numbers sharpness,
    Numbers powers, float eps) {
    typedef Operand<E> P;
    Pola<E> it{shape, q, k, v, positions};
    if (!it.begin(sharpness, powers) || !fits(shape, shape.queries, out)) return MISFIT;
    const int64_t d = it.d, row = it.row, wide = it.wide, same = it.same, panel = deep<P>(wide) * row;
    Sums sums(shape.threads, it.size);
    Buffer<P> panels(it.all_heads * panel);
    parallel(shape.threads, [&](int me, int all) {
        Buffer<float> room(T * wide), spare;
        Buffer<P> left;
        it.template gather_keys<P>(sums, me, all);
        heads(shape, me, all, [&](int64_t index) {
            it.collect(sums, index);
            pack(&it.states[index * it.size], row, wide, row, &panels[index * panel]);
        });
        pieces(shape, shape.queries, me, all, [&](const Piece& piece) {
            const float* totals = it.totals(piece);
            it.features(q, {}, piece, room.data());
            const Matrix<P> queries = lowered(room.data(), wide, piece.count, wide, left);
            to_tokens(out, piece, d, spare, [&](Rows c) {
                multiply(piece.count, row, deep<P>(wide), queries, &panels[piece.index * panel], row, c);
                for (int64_t t = 0; t < piece.count; t++) {
                    const float* x = &room[t * wide];
                    const float first = 1 / (product(x, totals, wide) + eps);
                    const float rest = 1 / (product(x, totals + wide, wide) + eps);
                    float* y = c.data + t * c.row;
                    for (int64_t i = 0; i < same; i++) y[i] *= first;
                    for (int64_t i = same; i < d; i++) y[i] *= rest;
                }
            });
        });
    });
    return DONE;
}

KERNEL(
    pola_attention,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, Tokens<float> positions, AnyTokens out, Numbers sharpness,
     Numbers powers, float eps),
    (shape, q, k, v, positions, out, sharpness, powers, eps))

// Gradients e of features become those of tokens; sums have those to the powers and to sharpness, (2 × padded d)
template <class E>
void through_pola_features(
    const Tokens<E>& x, const Tokens<float>& positions, const Piece& piece, int64_t width, const float* sharpness,
    const float* powers, const float* features, const float* e, const Tokens<E>& dx, float* sums) {
    const int64_t row = padded(width);
    for (int64_t t = 0; t < piece.count; t++, features += 2 * row, e += 2 * row) {
        const E* from = x.at(piece.b, piece.h, piece.first + t);
        const float* place = positions.data ? positions.at(piece.b, piece.h, piece.first + t) : nullptr;
        E* to = dx.at(piece.b, piece.h, piece.first + t);
        for (int64_t c = 0; c < width; c += W) {
            const int64_t n = width - c;
            vec token = n >= W ? load(from + c) : load(from + c, n);
            if (place) token += n >= W ? load(place + c) : load(place + c, n);
            const vec value = token * load(sharpness + c), size = value > vec{} ? value : -value;
            const vec f = value > vec{} ? load(features + c) : load(features + row + c);
            const vec g = f * (value > vec{} ? load(e + c) : load(e + row + c));
            // of |x| to the power: p |x|^p / |x|, and ln |x| |x|^p
            const vec slope = f > vec{} ? g * load(powers + c) / (value > vec{} ? size : -size) : vec{};
            store(sums + c, load(sums + c) + (f > vec{} ? g * logarithm(size) : vec{}));
            store(sums + row + c, load(sums + row + c) + slope * token);
            const vec result = slope * load(sharpness + c);
            n >= W ? store(to + c, result) : store(to + c, result, n);
        }
    }
}

// With y = (Q̂ S) / (Q̂·z + ε), in two halves of columns with a z each: e = (g / den) Sᵀ, dz = -Σ (Q̂·e / den) Q̂, e of a
// half alone; dQ̂ = e - Σ (Q̂·e / den) z; dS = Q̂ᵀ (g / den), whose halves are exchanged back; dK̂ = (v dSᵀ + dz) / n,
// dv = K̂ dS / n. `dpowers` and `dsharpness` are (h, d).
template <class E>
Answer pola_attention_gradient_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<float> positions, Tokens<E> grad, Tokens<E> dq,
    Tokens<E> dk, Tokens<E> dv, Numbers sharpness, Numbers powers, Numbers dpowers, Numbers dsharpness, float eps) {
    Pola<E> it{shape, q, k, v, positions};
    if (!it.begin(sharpness, powers) || !fits(shape, shape.queries, grad, dq)) return MISFIT;
    if (!fits(shape, shape.keys, dk, dv) || !fits(shape.heads * shape.width, dpowers, dsharpness)) return MISFIT;
    const int64_t d = it.d, row = it.row, wide = it.wide, same = it.same, square = d * wide;
    Sums sums(shape.threads, it.size), grads(shape.threads, it.size);
    Sums of_queries(shape.threads, wide), of_keys(shape.threads, wide);
    Buffer<float> gradients(it.states.size()), turned(it.all_heads * square), turned_gradients(turned.size());
    parallel(shape.threads, [&](int me, int all) {
        Buffer<float> room(T * wide), e(T * wide), scaled(T * row), spare, other;
        it.template gather_keys<float>(sums, me, all);
        heads(shape, me, all, [&](int64_t index) {
            it.collect(sums, index);
            transpose(&it.states[index * it.size], wide, d, &turned[index * square]);
        });
        // what the queries' pieces give to the states is kept by the same threads as what they give to the parameters
        of_queries.begin(shape, shape.queries, me, all);
        grads.gather(shape, shape.queries, me, all, [&](const Piece& piece, float* sum) {
            const float *totals = it.totals(piece), *state = &turned[piece.index * square];
            it.features(q, {}, piece, room.data());
            const Rows g = values_of(grad, piece, d, other);
            float first[T], rest[T], kept[T];
            for (int64_t t = 0; t < piece.count; t++) {
                const float *x = &room[t * wide], *from = g.data + t * g.row;
                first[t] = 1 / (product(x, totals, wide) + eps);
                rest[t] = 1 / (product(x, totals + wide, wide) + eps);
                for (int64_t c = 0; c < row; c++) scaled[t * row + c] = from[c] * (c < same ? first[t] : rest[t]);
            }
            multiply(piece.count, wide, same, {scaled.data(), row, 1}, state, wide, {e.data(), wide});
            for (int64_t t = 0; t < piece.count; t++) kept[t] = product(&room[t * wide], &e[t * wide], wide);
            const Strided opposite{scaled.data() + same, row, 1};
            multiply(piece.count, wide, d - same, opposite, state + same * wide, wide, {e.data(), wide}, true);
            for (int64_t t = 0; t < piece.count; t++) {
                float *line = &e[t * wide], *x = &room[t * wide], *dz = sum + it.total;
                const float second = (kept[t] - product(x, line, wide)) * rest[t], one = -kept[t] * first[t];
                for (int64_t c = 0; c < wide; c += W) {
                    store(dz + c, load(dz + c) + load(x + c) * one);
                    store(dz + wide + c, load(dz + wide + c) + load(x + c) * second);
                    store(line + c, load(line + c) + load(totals + c) * one + load(totals + wide + c) * second);
                }
            }
            multiply(wide, row, piece.count, {room.data(), 1, wide}, scaled.data(), row, {sum, row}, true);
            float* parameters = of_queries.of(me, piece.index);
            const float *sharp = &it.sharp[piece.h * row], *exponents = &it.exponents[piece.h * row];
            through_pola_features(q, {}, piece, d, sharp, exponents, room.data(), e.data(), dq, parameters);
        });
        heads(shape, me, all, [&](int64_t index) {
            float* to = &gradients[index * it.size];
            grads.each_sum(index, [&](const float* part) {
                for (int64_t i = 0; i < wide; i++) {
                    for (int64_t c = 0; c < d; c++)
                        to[(c < same ? i : it.other(i)) * row + c] += part[i * row + c] / float(shape.keys);
                    to[it.total + i] += part[it.total + i] / float(shape.keys);
                    to[it.total + it.other(i)] += part[it.total + wide + i] / float(shape.keys);
                }
            });
            transpose(to, wide, d, &turned_gradients[index * square]);
        });
        of_keys.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            const float* state = &gradients[piece.index * it.size];
            it.features(k, positions, piece, room.data());
            to_tokens(dv, piece, d, spare, [&](Rows c) {
                multiply(piece.count, row, wide, {room.data(), wide, 1}, state, row, c);
            });
            const Strided values = matrix_of(v, piece, d, other);
            repeat(state + it.total, piece.count, wide, {e.data(), wide});
            multiply(piece.count, wide, d, values, &turned_gradients[piece.index * square], wide, {e.data(), wide}, true);
            const float *sharp = &it.sharp[piece.h * row], *exponents = &it.exponents[piece.h * row];
            through_pola_features(k, positions, piece, d, sharp, exponents, room.data(), e.data(), dk, sum);
        });
    });
    std::fill(dpowers.data, dpowers.data + dpowers.count, 0.0f);
    std::fill(dsharpness.data, dsharpness.data + dsharpness.count, 0.0f);
    for (Sums* from : {&of_queries, &of_keys})
        for (int64_t index = 0; index < it.all_heads; index++)
            from->each_sum(index, [&](const float* part) {
                for (int64_t c = 0, to = index % shape.heads * d; c < d; c++, to++)
                    dpowers.data[to] += part[c], dsharpness.data[to] += part[row + c];
            });
    return DONE;
}

KERNEL(
    pola_attention_gradient,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, Tokens<float> positions, AnyTokens grad, AnyTokens dq,
     AnyTokens dk, AnyTokens dv, Numbers sharpness, Numbers powers, Numbers dpowers, Numbers dsharpness, float eps),
    (shape, q, k, v, positions, grad, dq, dk, dv, sharpness, powers, dpowers, dsharpness, eps))

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
