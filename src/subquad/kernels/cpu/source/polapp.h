// PolaFormer++'s attention: see ops/polapp_formula.py, whose letters these are.
#pragma once
#include "feature_maps.h"
#include "mixer_parts.h"

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
    // To the half of its sign, of an entry that has one
    void add(vec value, vec more, float* to) const {
        float *positive = to + (turned_round ? row : 0), *negative = to + (turned_round ? 0 : row);
        store(positive, load(positive) + (value > vec{} ? more : vec{}));
        store(negative, load(negative) + (value < vec{} ? more : vec{}));
    }
};

// One stream of a piece's queries: rows F e^(m - m') of two halves, and of each ε e^-m' and m'
template <class E>
void polapp_queries(
    const Tokens<E>& q, const Piece& piece, int64_t width, const float* spikiness, const float* most, bool turned_round,
    float eps, float* to, float* eps_of, float* added) {
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
        added[t] = largest(high);
        eps_of[t] = std::max(eps * std::exp(-added[t]), 1.17549435e-38f);
        each_entry(from, width, [&](int64_t c, vec value) {
            const vec x = exponent(c, value), less = halves.choose(value, most + c) - added[t];
            halves.put(value, lowered_growth(x, exponential(x + less), exponential(less)), to + c);
        });
    }
}

// From the gradients of such rows, added, those of a piece's queries, rows of padded width, and of the spikiness
template <class E>
void through_polapp_queries(
    const Tokens<E>& q, const Piece& piece, int64_t width, const float* spikiness, const float* most, bool turned_round,
    const float* added, const float* grads, float* dq, float* dspikiness) {
    const Halves halves{padded(width), turned_round};
    for (int64_t t = 0; t < piece.count; t++, grads += 2 * halves.row, dq += halves.row)
        each_entry(q.at(piece.b, piece.h, piece.first + t), width, [&](int64_t c, vec value) {
            const vec s = halves.choose(value, spikiness + c), size = value > vec{} ? value : -value;
            const vec grown = exponential(size * s + (halves.choose(value, most + c) - added[t]));
            const vec dx = halves.choose(value, grads + c) * grown, ds = dx * size;
            const vec to_query = (value > vec{} ? dx : (value < vec{} ? -dx : vec{})) * s + (value - value);
            store(dq + c, load(dq + c) + to_query);
            halves.add(value, ds, dspikiness + c);
        });
}

// What the keys come to: m, e^-m, and means [K̃ᵀ v, K] of features lowered by e^-m, (wide × row) and a line
template <class E>
struct PolappKeys {
    const Shape& shape;
    const Tokens<E>&k, &v;
    const Turning& turning;
    const int64_t d = shape.width, row = padded(d), wide = 2 * row, total = wide * row, size = total + wide;
    // tables of as many channels as a head has turn both halves alike
    const bool alike = turning.cos.count == turning.heads * shape.queries * d;
    Sums exponents{shape.threads, wide}, sums{shape.threads, size};
    Buffer<float> most = of_all_heads(wide), down = of_all_heads(wide), states = of_all_heads(size);

    Buffer<float> of_all_heads(int64_t count) const { return Buffer<float>(shape.batch * shape.heads * count); }
    bool fits_all() const { return fits(shape, shape.keys, k, v) && fits(shape, alike ? d : 2 * d, turning); }
    void turn_rows(const Piece& piece, float* rows) const { turn<false>(turning, shape, piece, 2, rows, alike); }
    void turn_back(const Piece& piece, float* rows) const { turn<true>(turning, shape, piece, 2, rows, alike); }

    void features(const Piece& piece, float* to) const {
        const Halves halves{row, false};
        const float *m = &most[piece.index * wide], *lower = &down[piece.index * wide];
        for (int64_t t = 0; t < piece.count; t++, to += wide)
            each_entry(k.at(piece.b, piece.h, piece.first + t), d, [&](int64_t c, vec value) {
                const vec x = value > vec{} ? value : -value, both = exponential(x - halves.choose(value, m + c));
                halves.put(value, lowered_growth(x, both, halves.choose(value, lower + c)), to + c);
            });
    }

    // From the gradients of these those of a piece's keys, in place of their first halves
    void through_features(const Piece& piece, float* grads) const {
        const Halves halves{row, false};
        const float* m = &most[piece.index * wide];
        for (int64_t t = 0; t < piece.count; t++, grads += wide)
            each_entry(k.at(piece.b, piece.h, piece.first + t), d, [&](int64_t c, vec value) {
                const vec x = value > vec{} ? value : -value, both = exponential(x - halves.choose(value, m + c));
                const vec dx = halves.choose(value, grads + c) * both;
                store(grads + c, (value > vec{} ? dx : (value < vec{} ? -dx : vec{})) + (value - value));
            });
    }

    // `finish(index)` when a head's state is there
    template <class P, class Finish>
    void gather(int me, int all, Finish&& finish) {
        Buffer<float> room(T * wide);
        Buffer<P> left, right;
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
            features(piece, room.data());
            add_rows(room.data(), wide, piece.count, wide, sum + total);
            turn_rows(piece, room.data());
            const Panel<P> keys = packed(room.data(), wide, piece.count, wide, left), values = packed(v, piece, d, right);
            multiply(wide, row, deep<P>(piece.count), keys.turned(), values.data, values.row, {sum, row}, true);
        });
        heads(shape, me, all, [&](int64_t index) {
            float* state = &states[index * size];
            sums.each_sum(index, [&](const float* part) {
                for (int64_t i = 0; i < size; i++) state[i] += part[i] / float(shape.keys);
            });
            finish(index);
        });
    }
};

// s of both streams, (2, h, 2 × padded width)
inline Buffer<float> padded_spikiness(const Shape& shape, Numbers same, Numbers opposite) {
    const int64_t d = shape.width, row = padded(d), count = 2 * shape.heads;
    Buffer<float> both(2 * count * row);
    for (int64_t i = 0; i < count; i++) {
        std::memcpy(&both[i * row], same.data + i * d, d * sizeof(float));
        std::memcpy(&both[(count + i) * row], opposite.data + i * d, d * sizeof(float));
    }
    return both;
}

// `same` and `opposite` (h, 2d). The first half of the values meets queries as they are, the rest their negatives.
template <class E>
Answer polapp_attention_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<E> out, Numbers same, Numbers opposite, Turning turning,
    float eps) {
    typedef Operand<E> P;
    PolappKeys<E> keys{shape, k, v, turning};
    const int64_t d = keys.d, row = keys.row, wide = keys.wide, panel = deep<P>(wide) * row;
    if (!keys.fits_all() || !fits(shape, shape.queries, q, out) || !fits(shape.heads * 2 * d, same, opposite)) return MISFIT;
    const int64_t first = (d + 1) / 2, rest = first / W * W;  // where the second stream's product begins
    const Buffer<float> spikiness = padded_spikiness(shape, same, opposite);
    Buffer<P> panels(shape.batch * shape.heads * panel);
    parallel(shape.threads, [&](int me, int all) {
        Buffer<float> room(T * wide), second(T * row), spare;
        Buffer<P> left;
        keys.template gather<P>(me, all, [&](int64_t index) {
            pack(&keys.states[index * keys.size], row, wide, row, &panels[index * panel]);
        });
        pieces(shape, shape.queries, me, all, [&](const Piece& piece) {
            const auto stream = [&](bool turned_round) {
                const float* s = &spikiness[((turned_round ? shape.heads : 0) + piece.h) * wide];
                float eps_of[T], added[T];
                polapp_queries(q, piece, d, s, &keys.most[piece.index * wide], turned_round, eps, room.data(), eps_of, added);
                for (int64_t t = 0; t < piece.count; t++) {
                    float* x = &room[t * wide];
                    const float scale = 1 / (product(x, &keys.states[piece.index * keys.size + keys.total], wide) + eps_of[t]);
                    for (int64_t c = 0; c < wide; c += W) store(x + c, load(x + c) * scale);
                }
                keys.turn_rows(piece, room.data());
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

// Of each stream with f = 1 / (F·z + ε), y = f F̃ S and e = g Sᵀ: dF = f e turned back - f² (F̃·e) z, dS = F̃ᵀ (f g), dz =
// -Σ f² (F̃·e) F; of keys dK = (v dSᵀ turned back + dz) / n and dv = K̃ dS / n. Largest exponents divide out: constants.
template <class E>
Answer polapp_attention_gradient_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<E> grad, Tokens<E> dq, Tokens<E> dk, Tokens<E> dv,
    Numbers same, Numbers opposite, Numbers dsame, Numbers dopposite, Turning turning, float eps) {
    PolappKeys<E> keys{shape, k, v, turning};
    const int64_t d = keys.d, row = keys.row, wide = keys.wide, size = keys.size, total = keys.total, square = d * wide;
    if (!keys.fits_all() || !fits(shape, shape.queries, q, grad, dq) || !fits(shape, shape.keys, dk, dv)) return MISFIT;
    if (!fits(shape.heads * 2 * d, same, opposite, dsame, dopposite)) return MISFIT;
    const int64_t first = (d + 1) / 2, rest = first / W * W;
    const Buffer<float> spikiness = padded_spikiness(shape, same, opposite);
    // of a head dS and dz, and ds of both streams
    Sums grads(shape.threads, size + 2 * wide);
    Buffer<float> turned_states = keys.of_all_heads(square), turned_grads = keys.of_all_heads(square);
    Buffer<float> of_states = keys.of_all_heads(size);
    parallel(shape.threads, [&](int me, int all) {
        Buffer<float> room(T * wide), turned(T * wide), e(T * wide), scaled(T * row), to_queries(T * row), spare, other;
        keys.template gather<float>(
            me, all, [&](int64_t index) { transpose(&keys.states[index * size], wide, d, &turned_states[index * square]); });
        const auto turn_features = [&](const Piece& piece) {
            std::copy(room.begin(), room.begin() + piece.count * wide, turned.begin());
            keys.turn_rows(piece, turned.data());
        };
        grads.gather(shape, shape.queries, me, all, [&](const Piece& piece, float* sum) {
            const float *most = &keys.most[piece.index * wide], *z = &keys.states[piece.index * size + total];
            const Rows g = values_of(grad, piece, d, other);
            std::fill(to_queries.begin(), to_queries.end(), 0.0f);
            for (const bool turned_round : {false, true}) {
                const float* s = &spikiness[((turned_round ? shape.heads : 0) + piece.h) * wide];
                const int64_t from = turned_round ? first : 0, count = turned_round ? d - first : first;
                const int64_t begin = turned_round ? rest : 0, width = turned_round ? row - rest : padded(first);
                float eps_of[T], added[T];
                polapp_queries(q, piece, d, s, most, turned_round, eps, room.data(), eps_of, added);
                turn_features(piece);
                multiply(
                    piece.count, wide, count, Strided{g.data + from, g.row, 1}, &turned_states[piece.index * square + from * wide],
                    wide, {e.data(), wide});
                float dz[T];
                for (int64_t t = 0; t < piece.count; t++) {
                    float *line = &e[t * wide], *to = &scaled[t * row];
                    const float f = 1 / (product(&room[t * wide], z, wide) + eps_of[t]);
                    // without partners f is 1e38, and its square no number
                    dz[t] = -f * (f * product(&turned[t * wide], line, wide));
                    for (int64_t c = 0; c < wide; c += W) store(line + c, load(line + c) * f);
                    std::memset(to, 0, row * sizeof(float));
                    for (int64_t c = from; c < from + count; c++) to[c] = g.data[t * g.row + c] * f;
                }
                multiply(
                    wide, width, piece.count, Strided{turned.data(), 1, wide}, &scaled[begin], row, {sum + begin, row}, true);
                keys.turn_back(piece, e.data());
                for (int64_t t = 0; t < piece.count; t++)
                    for (int64_t c = 0; c < wide; c += W) {
                        float *line = &e[t * wide + c], *to = sum + total + c;
                        store(line, load(line) + load(z + c) * dz[t]);
                        store(to, load(to) + load(&room[t * wide + c]) * dz[t]);
                    }
                through_polapp_queries(
                    q, piece, d, s, most, turned_round, added, e.data(), to_queries.data(),
                    sum + size + (turned_round ? wide : 0));
            }
            for (int64_t t = 0; t < piece.count; t++)
                copy(&to_queries[t * row], d, dq.at(piece.b, piece.h, piece.first + t));
        });
        heads(shape, me, all, [&](int64_t index) {
            float* to = &of_states[index * size];
            grads.each_sum(index, [&](const float* part) {
                for (int64_t i = 0; i < size; i++) to[i] += part[i] / float(shape.keys);
            });
            transpose(to, wide, d, &turned_grads[index * square]);
        });
        pieces(shape, shape.keys, me, all, [&](const Piece& piece) {
            const float* ds = &of_states[piece.index * size];
            const Rows values = values_of(v, piece, d, other);
            multiply(
                piece.count, wide, d, Strided{values.data, values.row, 1}, &turned_grads[piece.index * square], wide,
                {e.data(), wide});
            keys.turn_back(piece, e.data());
            for (int64_t t = 0; t < piece.count; t++)
                for (int64_t c = 0; c < wide; c += W) store(&e[t * wide + c], load(&e[t * wide + c]) + load(ds + total + c));
            keys.through_features(piece, e.data());
            for (int64_t t = 0; t < piece.count; t++) copy(&e[t * wide], d, dk.at(piece.b, piece.h, piece.first + t));
            keys.features(piece, room.data());
            turn_features(piece);
            to_tokens(dv, piece, d, spare, [&](Rows c) {
                multiply(piece.count, row, wide, Strided{turned.data(), wide, 1}, ds, row, c);
            });
        });
    });
    std::fill(dsame.data, dsame.data + dsame.count, 0.0f);
    std::fill(dopposite.data, dopposite.data + dopposite.count, 0.0f);
    for (int64_t index = 0; index < shape.batch * shape.heads; index++)
        grads.each_sum(index, [&](const float* part) {
            for (int64_t half = 0; half < 2; half++)
                for (int64_t c = 0; c < d; c++) {
                    const int64_t to = (index % shape.heads * 2 + half) * d + c, from = size + half * row + c;
                    dsame.data[to] += part[from];
                    dopposite.data[to] += part[from + wide];
                }
        });
    return DONE;
}

KERNEL(
    polapp_attention_gradient,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyTokens grad, AnyTokens dq, AnyTokens dk, AnyTokens dv,
     Numbers same, Numbers opposite, Numbers dsame, Numbers dopposite, Turning turning, float eps),
    (shape, q, k, v, grad, dq, dk, dv, same, opposite, dsame, dopposite, turning, eps))

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
