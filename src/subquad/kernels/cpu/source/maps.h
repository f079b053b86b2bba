// What agents and landmarks have in common: a few vectors that all tokens meet.
#pragma once
#include <memory>
#include "tokens.h"

constexpr int64_t MOST_KEPT = 1 << 21;  // numbers of maps that are kept for a second use, 8 MB

// The few as columns, (d × padded a), scaled
inline void as_columns(const float* few, int64_t row, int64_t count, int64_t width, float scale, Buffer<float>& to) {
    const int64_t columns = padded(count);
    to.assign(width * columns, 0.0f);
    for (int64_t a = 0; a < count; a++)
        for (int64_t c = 0; c < width; c++) to[c * columns + a] = few[a * row + c] * scale;
}

// Rows of `width` numbers, padded with zeros
inline void as_rows(const float* few, int64_t row, int64_t count, int64_t width, Buffer<float>& to) {
    to.assign(count * padded(width), 0.0f);
    for (int64_t a = 0; a < count; a++) std::memcpy(&to[a * padded(width)], few + a * row, width * sizeof(float));
}
