// A gated unit trained on keys and values: see ops/ttt_formula.py, whose letters these are.
#pragma once
#include "feature_maps.h"

inline vec sigmoid(vec x) { return 1.0f / (1.0f + exponential(-x)); }

// A head's two matrices (d × padded d) as the right sides of products
template <class P>
struct Unit {
    const int64_t d, row = padded(d), panel = deep<P>(d) * row;
    std::vector<P> panels = std::vector<P>(2 * panel);
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
    std::vector<float> learned(all_heads * 2 * matrix);
    parallel(shape.threads, [&](int me, int all) {
        std::vector<float> room(T * row), straight(T * row), gate(T * row), spare;
        std::vector<P> left, right;
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
                        store(y.data + t * y.row + c, load(&straight[t * row + c]) * x * sigmoid(x));
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
