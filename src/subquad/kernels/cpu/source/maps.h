// What agents and landmarks have in common: a few vectors that all tokens meet.
#pragma once
#include <memory>
#include "tokens.h"

constexpr int64_t MOST_KEPT = 1 << 21;  // numbers of maps that are kept for a second use, 8 MB

// The few as columns, (d × padded a), scaled; beyond them the buffer keeps the zeros that it began with
inline void as_columns(const float* few, int64_t row, int64_t count, int64_t width, float scale, Buffer<float>& to) {
    const int64_t columns = padded(count);
    to.resize(width * columns);
    turn(few, row, count, width, to.data(), columns);
    for (int64_t i = 0; scale != 1 && i < width * columns; i += W) store(&to[i], load(&to[i]) * scale);
}

// Rows of `width` numbers, padded with zeros
inline void as_rows(const float* few, int64_t row, int64_t count, int64_t width, Buffer<float>& to) {
    to.resize(count * padded(width));
    for (int64_t a = 0; a < count; a++) {
        float *from = &to[a * padded(width)], *end = from + padded(width);
        std::fill(std::copy(few + a * row, few + a * row + width, from), end, 0.0f);
    }
}
