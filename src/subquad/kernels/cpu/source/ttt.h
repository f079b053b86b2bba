// A gated unit trained on keys and values: see ops/ttt_formula.py, whose letters these are.
#pragma once
#include "feature_maps.h"
#include "local.h"

// A head's two matrices (d × padded d) as the right sides of products
template <class P>
struct Unit {
    const int64_t d, row = padded(d), panel = deep<P>(d) * row;
    Buffer<P> panels = Buffer<P>(2 * panel);
    explicit Unit(int64_t d) : d(d) {}

    void begin(const float* rows, int64_t apart, int which) { pack(rows, apart, d, d, &panels[which * panel]); }
    void apply(int64_t count, Matrix<P> x, float* straight, float* gate) const {
        multiply(count, row, deep<P>(d), x, &panels[0], row, {straight, row});
        multiply(count, row, deep<P>(d), x, &panels[panel], row, {gate, row});
    }
};

template <class E>
Answer ttt_unit_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<E> out, Numbers w1, Numbers w2, Turning turning,
    float scale) {
    typedef Operand<E> P;
    const int64_t d = shape.width, row = padded(d), matrix = d * row, all_heads = shape.batch * shape.heads;
    if (!fits(shape, shape.queries, q, out) || !fits(shape, shape.keys, k, v) || !fits(shape, d, turning)) return MISFIT;
    if (!fits(shape.heads * d * d, w1, w2)) return MISFIT;
    Sums sums(shape.threads, 2 * matrix);
    Buffer<float> learned(all_heads * 2 * matrix);
    parallel(shape.threads, [&](int me, int all) {
        Buffer<float> room(T * row), straight(T * row), gate(T * row), spare;
        Buffer<P> left, right;
        Unit<P> unit(d);
        int64_t of = -1;
        const auto turned = [&](const Tokens<E>& x, const Piece& piece) {
            features(x, piece, d, NONE, room.data());
            turn<false>(turning, shape, piece, 1, room.data());
        };
        sums.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            if (of != piece.h) {
                of = piece.h;
                unit.begin(w1.data + of * d * d, d, 0);
                unit.begin(w2.data + of * d * d, d, 1);
            }
            turned(k, piece);
            unit.apply(piece.count, lowered(room.data(), row, piece.count, row, left), straight.data(), gate.data());
            const Rows values = values_of(v, piece, d, spare);
            for (int64_t t = 0; t < piece.count; t++)
                for (int64_t c = 0; c < row; c += W) {
                    float *a = &straight[t * row + c], *b = &gate[t * row + c];
                    const vec value = load(values.data + t * values.row + c), x = load(b), share = sigmoid(x);
                    // what SiLU gives, and its slope
                    store(b, value * load(a) * share * (1.0f + x * (1.0f - share)));
                    store(a, value * x * share);
                }
            const Panel<P> keys = packed(room.data(), row, piece.count, row, left);
            for (int i = 0; i < 2; i++) {
                const Panel<P> one = packed((i ? gate : straight).data(), row, piece.count, row, right);
                multiply(d, row, deep<P>(piece.count), keys.turned(), one.data, one.row, {sum + i * matrix, row}, true);
            }
        });
        heads(shape, me, all, [&](int64_t index) {
            float* to = &learned[index * 2 * matrix];
            sums.each_sum(index, [&](const float* part) {
                for (int64_t i = 0; i < 2 * matrix; i++) to[i] += part[i] * scale;
            });
            for (int i = 0; i < 2; i++, to += matrix) {
                const float* start = (i ? w2 : w1).data + index % shape.heads * d * d;
                for (int64_t c = 0; c < d; c++) {
                    float square = 0;
                    for (int64_t r = 0; r < d; r++) square += to[r * row + c] * to[r * row + c];
                    const float damping = 1 / (std::sqrt(square) + 1);
                    for (int64_t r = 0; r < d; r++) to[r * row + c] = start[r * d + c] + to[r * row + c] * damping;
                }
            }
        });
        of = -1;
        pieces(shape, shape.queries, me, all, [&](const Piece& piece) {
            if (of != piece.index) {
                of = piece.index;
                for (int i = 0; i < 2; i++) unit.begin(&learned[(2 * of + i) * matrix], row, i);
            }
            turned(q, piece);
            to_tokens(out, piece, d, spare, [&](Rows y) {
                unit.apply(piece.count, lowered(room.data(), row, piece.count, row, left), straight.data(), gate.data());
                for (int64_t t = 0; t < piece.count; t++)
                    for (int64_t c = 0; c < row; c += W) {
                        const vec x = load(&gate[t * row + c]);
                        store(y.data + t * y.row + c, load(&straight[t * row + c]) * silu(x));
                    }
            });
        });
    });
    return DONE;
}

KERNEL(
    ttt_unit,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyTokens out, Numbers w1, Numbers w2, Turning turning,
     float scale),
    (shape, q, k, v, out, w1, w2, turning, scale))

// A head's learned matrices U = W + D, D = T / (‖T‖ + 1) by columns with T = scale Σ kᵀ [v SiLU(b), v a SiLU'(b)], a = k W₁
// and b = k W₂. With y = p SiLU(r), p = q U₁ and r = q U₂: dp = g SiLU(r), dr = g p SiLU'(r), dU = qᵀ [dp, dr]; dT = dU /
// (‖T‖ + 1) - T (T·dU) / (‖T‖ (‖T‖ + 1)²); e = k scale dT; dv = e₁ SiLU(b) + e₂ a SiLU'(b), da = e₂ v SiLU'(b), db = e₁ v
// SiLU'(b) + e₂ v a SiLU''(b); dW = dU + kᵀ [da, db]
template <class E>
Answer ttt_unit_gradient_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<E> grad, Tokens<E> dq, Tokens<E> dk, Tokens<E> dv, Numbers w1,
    Numbers w2, Numbers dw1, Numbers dw2, Turning turning, float scale) {
    const int64_t d = shape.width, row = padded(d), matrix = d * row, both = 2 * matrix, all_heads = shape.batch * shape.heads;
    if (!fits(shape, shape.queries, q, grad, dq) || !fits(shape, shape.keys, k, v, dk, dv)) return MISFIT;
    if (!fits(shape, d, turning) || !fits(shape.heads * d * d, w1, w2, dw1, dw2)) return MISFIT;
    Sums sums(shape.threads, both), of_learned(shape.threads, both), of_start(shape.threads, both);
    // W and Wᵀ of each head; U and Uᵀ, T, dU, and the gradients of the sums and their transposes, of each head of an image
    const auto heads_of = [&](int64_t count) { return Buffer<float>(count * both); };
    Buffer<float> start = heads_of(shape.heads), start_turned = heads_of(shape.heads), step = heads_of(all_heads);
    Buffer<float> learned = heads_of(all_heads), learned_turned = heads_of(all_heads), dlearned = heads_of(all_heads);
    Buffer<float> dsums = heads_of(all_heads), dsums_turned = heads_of(all_heads);
    for (int64_t i = 0; i < shape.heads * 2; i++) {
        const float* from = (i % 2 ? w2 : w1).data + i / 2 * d * d;
        for (int64_t r = 0; r < d; r++) std::memcpy(&start[i * matrix + r * row], from + r * d, d * sizeof(float));
        transpose(&start[i * matrix], d, d, &start_turned[i * matrix]);
    }
    parallel(shape.threads, [&](int me, int all) {
        Buffer<float> x(T * row), a(T * row), b(T * row), e1(T * row), e2(T * row), to(T * row), spare, other;
        const auto turned = [&](const Tokens<E>& tokens, const Piece& piece) {
            features(tokens, piece, d, NONE, x.data());
            turn<false>(turning, shape, piece, 1, x.data());
        };
        const auto times = [&](const Piece& piece, const Buffer<float>& left, const float* right, Buffer<float>& y, bool add) {
            multiply(piece.count, row, d, Strided{left.data(), row, 1}, right, row, {y.data(), row}, add);
        };
        const auto add_product = [&](const Piece& piece, const Buffer<float>& y, float* sum) {
            multiply(d, row, piece.count, Strided{x.data(), 1, row}, y.data(), row, {sum, row}, true);
        };
        const auto each = [&](const Piece& piece, const Rows& rows, auto&& use) {
            for (int64_t t = 0; t < piece.count; t++)
                for (int64_t c = 0; c < row; c += W) {
                    const int64_t at = t * row + c;
                    const vec gate = load(&b[at]), share = sigmoid(gate);
                    use(at, load(rows.data + t * rows.row + c), load(&a[at]), gate, share, share * (1.0f + gate * (1.0f - share)));
                }
        };
        const auto give = [&](const Piece& piece, const Tokens<E>& tokens) {
            for (int64_t t = 0; t < piece.count; t++)
                copy(&to[t * row], d, tokens.at(piece.b, piece.h, piece.first + t));
        };
        sums.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            turned(k, piece);
            times(piece, x, &start[piece.h * both], a, false);
            times(piece, x, &start[piece.h * both + matrix], b, false);
            each(piece, values_of(v, piece, d, spare), [&](int64_t at, vec value, vec straight, vec gate, vec share, vec slope) {
                store(&e1[at], value * gate * share);
                store(&e2[at], value * straight * slope);
            });
            add_product(piece, e1, sum);
            add_product(piece, e2, sum + matrix);
        });
        // `use(c, length)` of the columns of both matrices, W at a time
        const auto columns_of = [&](const float* of, auto&& use) {
            for (int64_t c = 0; c < both; c = c % matrix + W < row ? c + W : c - c % matrix + matrix) {
                vec length{};
                for (int64_t r = 0; r < d; r++) length += load(of + c + r * row) * load(of + c + r * row);
                for (int64_t i = 0; i < W; i++) length[i] = std::sqrt(length[i]);
                use(c, length);
            }
        };
        const auto both_turned = [&](const Buffer<float>& from, int64_t index, Buffer<float>& turned_round) {
            for (int64_t i = 0; i < 2; i++)
                transpose(&from[index * both + i * matrix], d, d, &turned_round[index * both + i * matrix]);
        };
        heads(shape, me, all, [&](int64_t index) {
            float *t = &step[index * both], *u = &learned[index * both];
            const float* w = &start[index % shape.heads * both];
            sums.each_sum(index, [&](const float* part) {
                for (int64_t i = 0; i < both; i++) t[i] += part[i] * scale;
            });
            columns_of(t, [&](int64_t c, vec length) {
                const vec damping = 1.0f / (length + 1.0f);
                for (int64_t r = 0; r < d; r++)
                    store(u + c + r * row, load(w + c + r * row) + load(t + c + r * row) * damping);
            });
            both_turned(learned, index, learned_turned);
        });
        of_learned.gather(shape, shape.queries, me, all, [&](const Piece& piece, float* sum) {
            const float *u = &learned[piece.index * both], *back = &learned_turned[piece.index * both];
            turned(q, piece);
            times(piece, x, u, a, false);
            times(piece, x, u + matrix, b, false);
            each(piece, values_of(grad, piece, d, spare), [&](int64_t at, vec g, vec straight, vec gate, vec share, vec slope) {
                store(&e1[at], g * gate * share);
                store(&e2[at], g * straight * slope);
            });
            add_product(piece, e1, sum);
            add_product(piece, e2, sum + matrix);
            times(piece, e1, back, to, false);
            times(piece, e2, back + matrix, to, true);
            turn<true>(turning, shape, piece, 1, to.data());
            give(piece, dq);
        });
        heads(shape, me, all, [&](int64_t index) {
            float *du = &dlearned[index * both], *ds = &dsums[index * both];
            const float* t = &step[index * both];
            of_learned.each_sum(index, [&](const float* part) {
                for (int64_t i = 0; i < both; i++) du[i] += part[i];
            });
            columns_of(t, [&](int64_t c, vec length) {
                const vec damping = 1.0f / (length + 1.0f);
                vec along{};
                for (int64_t r = 0; r < d; r++) along += load(t + c + r * row) * load(du + c + r * row);
                const vec down = length > vec{} ? along * damping * damping / length : vec{};
                for (int64_t r = 0; r < d; r++)
                    store(ds + c + r * row, (load(du + c + r * row) * damping - load(t + c + r * row) * down) * scale);
            });
            both_turned(dsums, index, dsums_turned);
        });
        of_start.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            const float *w = &start[piece.h * both], *w_back = &start_turned[piece.h * both];
            const float *ds = &dsums[piece.index * both], *ds_back = &dsums_turned[piece.index * both];
            turned(k, piece);
            times(piece, x, w, a, false);
            times(piece, x, w + matrix, b, false);
            const Rows values = values_of(v, piece, d, spare);
            each(piece, values, [&](int64_t at, vec value, vec straight, vec gate, vec share, vec slope) {
                store(&e1[at], value * gate * share);
                store(&e2[at], value * straight * slope);
            });
            times(piece, e1, ds_back, to, false);
            times(piece, e2, ds_back + matrix, to, true);
            times(piece, x, ds, e1, false);
            times(piece, x, ds + matrix, e2, false);
            other.resize(T * row);
            each(piece, values, [&](int64_t at, vec value, vec straight, vec gate, vec share, vec slope) {
                const vec first = load(&e1[at]), second = load(&e2[at]);
                const vec bend = share * (1.0f - share) * (2.0f + gate * (1.0f - 2.0f * share));
                store(&other[at], first * gate * share + second * straight * slope);
                store(&a[at], second * value * slope);
                store(&b[at], value * (first * slope + second * straight * bend));
            });
            for (int64_t t = 0; t < piece.count; t++) copy(&other[t * row], d, dv.at(piece.b, piece.h, piece.first + t));
            add_product(piece, a, sum);
            add_product(piece, b, sum + matrix);
            times(piece, a, w_back, to, true);
            times(piece, b, w_back + matrix, to, true);
            turn<true>(turning, shape, piece, 1, to.data());
            give(piece, dk);
        });
    });
    for (int64_t i = 0; i < shape.heads * 2; i++) {
        float* to = (i % 2 ? dw2 : dw1).data + i / 2 * d * d;
        std::fill(to, to + d * d, 0.0f);
        const auto add = [&](const float* part) {
            for (int64_t r = 0; r < d; r++)
                for (int64_t c = 0; c < d; c++) to[r * d + c] += part[i % 2 * matrix + r * row + c];
        };
        for (int64_t index = i / 2; index < all_heads; index += shape.heads) {
            add(&dlearned[index * both]);
            of_start.each_sum(index, add);
        }
    }
    return DONE;
}

KERNEL(
    ttt_unit_gradient,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyTokens grad, AnyTokens dq, AnyTokens dk, AnyTokens dv, Numbers w1,
     Numbers w2, Numbers dw1, Numbers dw2, Turning turning, float scale),
    (shape, q, k, v, grad, dq, dk, dv, w1, w2, dw1, dw2, turning, scale))

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
