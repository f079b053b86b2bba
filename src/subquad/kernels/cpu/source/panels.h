// Rows of numbers as the operands of products; see `Operand`.
#pragma once
#include "multiply.h"

// How many operands `count` numbers along the depth are
template <class P>
constexpr int64_t deep(int64_t count) {
    return std::is_same_v<P, pair> ? (count + 1) / 2 : count;
}

inline halves halves_at(const float* p) { return narrowed(load(p)); }
inline halves halves_at(const bf16* p) { return *reinterpret_cast<const loose_halves*>(p); }
inline halves halves_at(const float* p, int64_t n) { return narrowed(load(p, n)); }
inline halves halves_at(const bf16* p, int64_t n) {
    halves x{};
    std::memcpy(&x, p, std::min<int64_t>(n, W) * sizeof(bf16));
    return x;
}

// One of the first and one of the second, and so on
inline ivec side_by_side(halves first, halves second) { return spread(first) | spread(second) << 16; }

// Two rows of numbers as operands of which a column is the depth: side by side, or one behind the other
inline void store_two(pair* to, int64_t, vec first, vec second) {
    const ivec both = side_by_side(narrowed(first), narrowed(second));
    std::memcpy(to, &both, sizeof both);
}
inline void store_two(float* to, int64_t row, vec first, vec second) { store(to, first), store(to + row, second); }

// Rows that lie `apart` as operands of which a column is the depth, (deep(count) × padded width), with zeros beyond
template <class From>
void pack(const From* rows, int64_t apart, int64_t count, int64_t width, pair* to) {
    for (int64_t t = 0; t < count; t += 2)
        for (int64_t c = 0; c < width; c += W, to += W) {
            const From* from = rows + t * apart + c;
            const auto read = [&](const From* p) { return width - c >= W ? halves_at(p) : halves_at(p, width - c); };
            const halves second = t + 1 < count ? read(from + apart) : halves{};
            const ivec both = side_by_side(read(from), second);
            std::memcpy(to, &both, sizeof both);
        }
}
inline void pack(const float* rows, int64_t apart, int64_t count, int64_t width, float* to) {
    for (int64_t t = 0; t < count; t++, to += padded(width)) std::memcpy(to, rows + t * apart, width * sizeof(float));
}

// The same of a piece's rows of floats, whose width is padded: where they lie, or in `room`
inline Panel<float> packed(const float* rows, int64_t apart, int64_t, int64_t, Buffer<float>&) {
    return {rows, apart};
}
inline Panel<pair> packed(const float* rows, int64_t apart, int64_t count, int64_t width, Buffer<pair>& room) {
    room.resize(std::max<int64_t>(room.size(), deep<pair>(count) * padded(width)));
    pack(rows, apart, count, width, room.data());
    return {room.data(), padded(width)};
}

// Rows of floats of padded width as operands of which a row is the depth: where they lie, or in `room`
inline Matrix<float> lowered(const float* rows, int64_t apart, int64_t, int64_t, Buffer<float>&) {
    return {rows, apart, 1};
}
template <class From>
Matrix<pair> lowered(const From* rows, int64_t apart, int64_t count, int64_t width, Buffer<pair>& room) {
    const int64_t row = padded(width) / 2;
    room.resize(std::max<int64_t>(room.size(), count * row));
    for (int64_t t = 0; t < count; t++) {
        bf16* to = &room[t * row].first;
        for (int64_t c = 0; c < width; c += W) {
            const From* from = rows + t * apart + c;
            const halves line = width - c >= W ? halves_at(from) : halves_at(from, width - c);
            std::memcpy(to + c, &line, sizeof line);
        }
    }
    return {room.data(), row, 1};
}
