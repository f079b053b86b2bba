// PolaFormer++'s attention: see ops/polapp_formula.py, whose letters these are.
#pragma once
#include "feature_maps.h"

// (e^x - 1) e^-m for x from 0 on, of e^(x - m) and e^-m: without the difference where that would cancel
inline vec lowered_growth(vec x, vec both, vec down) {
    vec y = fill(1.0f / 5040);
    y = y * x + 1.0f / 720;
    y = y * x + 1.0f / 120;
    y = y * x + 1.0f / 24;
    y = y * x + 1.0f / 6;
    y = y * x + 0.5f;
    y = y * x + 1.0f;
    return x < fill(0.35f) ? y * x * down : both - down;
}

// An entry is its size in the half of its sign, in the other one with `turned_round`, and NaN in both
struct Halves {
    const int64_t row;
    const bool turned_round;

    vec choose(vec value, const float* halves) const {
        return (value > vec{}) ^ (turned_round ? -1 : 0) ? load(halves) : load(halves + row);
    }
    void put(vec value, vec feature, float* to) const {
        const vec none = value - value;
        float *positive = to + (turned_round ? row : 0), *negative = to + (turned_round ? 0 : row);
        store(positive, value > vec{} ? feature : none);
        store(negative, value < vec{} ? feature : none);
    }
};

// One stream of a piece's queries: rows F e^(m - m') of two halves, and of each ε e^-m'
template <class E>
void polapp_queries(
    const Tokens<E>& q, const Piece& piece, int64_t width, const float* spikiness, const float* most, bool turned_round,
    float eps, float* to, float* eps_of) {
    const Halves halves{padded(width), turned_round};
    for (int64_t t = 0; t < piece.count; t++, to += 2 * halves.row) {
        const E* from = q.at(piece.b, piece.h, piece.first + t);
        vec high{};
        const auto exponent = [&](int64_t c, vec value) {
            return (value > vec{} ? value : -value) * halves.choose(value, spikiness + c);
        };
        each_entry(from, width, [&](int64_t c, vec value) {
            const vec x = exponent(c, value);
            high = max(x > vec{} ? x + halves.choose(value, most + c) : vec{}, high);
        });
        const float added = largest(high);
        eps_of[t] = std::max(eps * std::exp(-added), 1.17549435e-38f);
        each_entry(from, width, [&](int64_t c, vec value) {
            const vec x = exponent(c, value), less = halves.choose(value, most + c) - added;
            halves.put(value, lowered_growth(x, exponential(x + less), exponential(less)), to + c);
        });
    }
}

// `same` and `opposite` (h, 2d). The first half of the values meets queries as they are, the rest their negatives.
template <class E>
Answer polapp_attention_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<E> out, Numbers same, Numbers opposite, Turning turning,
    float eps) {
    const int64_t d = shape.width, row = padded(d), wide = 2 * row, size = wide * row + wide;
    if (!fits(shape, shape.queries, q, out) || !fits(shape, shape.keys, k, v)) return MISFIT;
    // tables of as many channels as a head has turn both halves alike
    const bool alike = turning.cos.count == turning.heads * shape.queries * d;
    if (!fits(shape.heads * 2 * d, same, opposite) || !fits(shape, alike ? d : 2 * d, turning)) return MISFIT;
    typedef Operand<E> P;
    const int64_t all_heads = shape.batch * shape.heads, panel = deep<P>(wide) * row;
    const int64_t first = (d + 1) / 2, rest = first / W * W;  // where the second stream's product begins
    Sums exponents(shape.threads, wide), sums(shape.threads, size);
    std::vector<float> most(all_heads * wide), down(all_heads * wide), states(all_heads * size);
    std::vector<float> spikiness(2 * shape.heads * wide);
    std::vector<P> panels(all_heads * panel);
    for (int64_t i = 0; i < shape.heads * 2; i++) {
        std::memcpy(&spikiness[i * row], same.data + i * d, d * sizeof(float));
        std::memcpy(&spikiness[shape.heads * wide + i * row], opposite.data + i * d, d * sizeof(float));
    }
    parallel(shape.threads, [&](int me, int all) {
        std::vector<float> room(T * wide), second(T * row), spare;
        std::vector<P> left, right;
        const Halves halves{row, false};
        exponents.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* high) {
            for (int64_t t = 0; t < piece.count; t++)
                each_entry(k.at(piece.b, piece.h, piece.first + t), d, [&](int64_t c, vec value) {
                    store(high + c, max(value, load(high + c)));
                    store(high + row + c, max(-value, load(high + row + c)));
                });
        });
        heads(shape, me, all, [&](int64_t index) {
            float* m = &most[index * wide];
            exponents.each_sum(index, [&](const float* part) {
                for (int64_t i = 0; i < wide; i++) m[i] = std::max(m[i], part[i]);
            });
            // features that turn together are lowered alike
            if (turning.cos.data)
                for (int64_t i = 0; i < wide; i += 2) m[i] = m[i + 1] = std::max(m[i], m[i + 1]);
            for (int64_t c = 0; c < wide; c += W) store(&down[index * wide + c], exponential(-load(m + c)));
        });
        sums.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            const float *m = &most[piece.index * wide], *lower = &down[piece.index * wide];
            for (int64_t t = 0; t < piece.count; t++)
                each_entry(k.at(piece.b, piece.h, piece.first + t), d, [&](int64_t c, vec value) {
                    const vec x = value > vec{} ? value : -value, both = exponential(x - halves.choose(value, m + c));
                    halves.put(value, lowered_growth(x, both, halves.choose(value, lower + c)), &room[t * wide + c]);
                });
            add_rows(room.data(), wide, piece.count, wide, sum + wide * row);
            turn<false>(turning, shape, piece, 2, room.data(), alike);
            const Panel<P> keys = packed(room.data(), wide, piece.count, wide, left), values = packed(v, piece, d, right);
            multiply(wide, row, deep<P>(piece.count), keys.turned(), values.data, values.row, {sum, row}, true);
        });
        heads(shape, me, all, [&](int64_t index) {
            float* state = &states[index * size];
            sums.each_sum(index, [&](const float* part) {
                for (int64_t i = 0; i < size; i++) state[i] += part[i] / float(shape.keys);
            });
            pack(state, row, wide, row, &panels[index * panel]);
        });
        pieces(shape, shape.queries, me, all, [&](const Piece& piece) {
            const auto stream = [&](bool turned_round) {
                const float* s = &spikiness[((turned_round ? shape.heads : 0) + piece.h) * wide];
                float eps_of[T];
                polapp_queries(q, piece, d, s, &most[piece.index * wide], turned_round, eps, room.data(), eps_of);
                for (int64_t t = 0; t < piece.count; t++) {
                    float* x = &room[t * wide];
                    const float scale = 1 / (product(x, &states[piece.index * size + wide * row], wide) + eps_of[t]);
                    for (int64_t c = 0; c < wide; c += W) store(x + c, load(x + c) * scale);
                }
                turn<false>(turning, shape, piece, 2, room.data(), alike);
                return lowered(room.data(), wide, piece.count, wide, left);
            };
            const P* state = &panels[piece.index * panel];
            to_tokens(out, piece, d, spare, [&](Rows c) {
                multiply(piece.count, padded(first), deep<P>(wide), stream(false), state, row, c);
                multiply(piece.count, row - rest, deep<P>(wide), stream(true), state + rest, row, {second.data(), row});
                for (int64_t t = 0; t < piece.count; t++)
                    std::memcpy(c.data + t * c.row + first, &second[t * row + first - rest], (d - first) * sizeof(float));
            });
        });
    });
    return DONE;
}

KERNEL(
    polapp_attention,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyTokens out, Numbers same, Numbers opposite, Turning turning,
     float eps),
    (shape, q, k, v, out, same, opposite, turning, eps))
