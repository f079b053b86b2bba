// Tokens turned by where they stand: see rope.py
#pragma once
#include "feature_maps.h"

// What is left of a row, a vector of it at most
template <class E>
inline void put(E* to, vec x, int64_t left) { left >= W ? store(to, x) : store(to, x, left); }

template <class E>
Answer turned_of(const Shape& shape, const Tokens<E>& x, const Turning& it, int32_t interleaved, const Tokens<E>& out) {
    const int64_t n = shape.queries, width = shape.width, half = width / 2;
    if (!x.data || !out.data || !it.cos.data || !fits(shape, n, x, out) || !fits(shape, width, it)) return MISFIT;
    parallel(shape.threads, [&](int me, int all) {
        // with the halves of a token the other way around, the partner of a channel lies where that one does
        Buffer<float> swapped(padded(width));
        pieces(shape, n, me, all, [&](const Piece& piece) {
            for (int64_t t = piece.first; t < piece.first + piece.count; t++) {
                const E* from = x.at(piece.b, piece.h, t);
                E* to = out.at(piece.b, piece.h, t);
                const int64_t place = ((it.heads > 1 ? piece.h * n : 0) + t) * width;
                if (!interleaved) {
                    each_entry(from, half, [&](int64_t c, vec value) { put(&swapped[half + c], value, half - c); });
                    each_entry(from + half, half, [&](int64_t c, vec value) { put(&swapped[c], value, half - c); });
                }
                const float *cos = it.cos.data + place, *sin = it.sin.data + place;
                each_entry(cos, width, [&](int64_t c, vec cosine) {
                    const int64_t left = width - c;
                    const vec value = left >= W ? load(from + c) : load(from + c, left);
                    const vec sine = left >= W ? load(sin + c) : load(sin + c, left);
                    put(to + c, value * cosine + (interleaved ? neighbours(value) : load(&swapped[c])) * sine, left);
                });
            }
        });
    });
    return DONE;
}
KERNEL(
    turned, (Shape shape, AnyTokens x, Turning turning, int32_t interleaved, AnyTokens out),
    (shape, x, turning, interleaved, out))
