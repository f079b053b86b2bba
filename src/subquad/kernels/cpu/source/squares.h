// Products of pairs by the unit for matrices that some processors have (AMX of Intel's), where the system lets a process
// have it: it adds the products of 16 rows and 16 columns of up to 16 pairs to a square of sums by one instruction.
#pragma once
#include "products.h"
#if defined(__AVX512BF16__) && defined(__AVX512VL__) && defined(__linux__)
#define HAS_SQUARES
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define IN_SQUARES __attribute__((target("amx-tile,amx-bf16")))
constexpr int SIDE = 16;

inline bool has_squares() {
    static const bool granted = [] {
        unsigned a, b, c, features;
        constexpr unsigned unit = 1u << 24 | 1u << 22;  // AMX-TILE and AMX-BF16
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &features) || (features & unit) != unit) return false;
        constexpr long permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
        return syscall(SYS_arch_prctl, permission, tile_data) == 0;
    }();
    return granted;
}

// Whether it is worth while: the left side may be turned, but not lie any other way
inline bool squares_take(int64_t rows, int64_t width, int64_t depth, const Matrix<pair>& a) {
    return rows * width * depth >= 4 * SIDE * SIDE * SIDE / 2 && depth >= 4 && (a.column == 1 || a.row == 1) && has_squares();
}

// Compilers are not told which memory the unit's instructions read: here all of it has been written
inline void memory_is_read() { __asm__ volatile("" ::: "memory"); }

// The registers: 0 to 3 are squares of sums, two by two, 4 and 5 rows of the left side, 6 and 7 columns of the right
struct alignas(64) SquareShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    // Of a square's rows, of those of the one below, and of so many pairs at a time
    IN_SQUARES SquareShapes(int64_t upper, int64_t lower, int64_t step) {
        for (int i = 0; i < 2; i++) {
            const uint8_t height = uint8_t(i ? lower : upper);
            for (int j = 0; height && j < 2; j++) rows[2 * i + j] = height, bytes[2 * i + j] = 4 * SIDE;
            if (height) rows[4 + i] = height, bytes[4 + i] = uint16_t(4 * step);
            rows[6 + i] = uint8_t(step), bytes[6 + i] = 4 * SIDE;
        }
        memory_is_read();
        _tile_loadconfig(this);
    }
};

// What this thread's registers are shaped for. Nobody else shapes them while `parallel` runs, to whose end they stay so.
struct ShapedSquares {
    bool stay = false;
    int64_t rows = 0, step = 0;

    IN_SQUARES void shape(int64_t wanted_rows, int64_t wanted_step) {
        if (rows == wanted_rows && step == wanted_step) return;
        rows = wanted_rows, step = wanted_step;
        SquareShapes(std::min<int64_t>(rows, SIDE), std::max<int64_t>(rows - SIDE, 0), step);
    }
    IN_SQUARES void give_back() {
        if (rows) _tile_release();
        rows = step = 0;
    }
};

inline ShapedSquares& shaped_squares() {
    thread_local ShapedSquares own;
    return own;
}

struct WhileSquaresStay {
    WhileSquaresStay() { shaped_squares().stay = true; }
    WhileSquaresStay(const WhileSquaresStay&) = delete;
    ~WhileSquaresStay() {
        shaped_squares().stay = false;
        shaped_squares().give_back();
    }
};

// One or two squares down and across of `steps` times `step` pairs, to rows that lie `apart`
template <int down, int across>
IN_SQUARES void sum_squares(
    const pair* left, int64_t left_row, const pair* right, int64_t right_row, int64_t steps, int64_t step, float* sums,
    int64_t apart) {
    memory_is_read();
    _tile_zero(0);
    if constexpr (across == 2) _tile_zero(1);
    if constexpr (down == 2) _tile_zero(2);
    if constexpr (down == 2 && across == 2) _tile_zero(3);
    for (int64_t i = 0; i < steps; i++, left += step, right += step * right_row) {
        _tile_loadd(4, left, 4 * left_row);
        _tile_loadd(6, right, 4 * right_row);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (across == 2) {
            _tile_loadd(7, right + SIDE, 4 * right_row);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (down == 2) {
            _tile_loadd(5, left + SIDE * left_row, 4 * left_row);
            _tile_dpbf16ps(2, 5, 6);
        }
        if constexpr (down == 2 && across == 2) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 4 * apart);
    if constexpr (across == 2) _tile_stored(1, sums + SIDE, 4 * apart);
    if constexpr (down == 2) _tile_stored(2, sums + SIDE * apart, 4 * apart);
    if constexpr (down == 2 && across == 2) _tile_stored(3, sums + SIDE * apart + SIDE, 4 * apart);
}

// `multiply` of pairs: two squares of rows at a time, and of these a panel of columns after the other
template <class Put>
IN_SQUARES void multiply_in_squares(
    int64_t rows, int64_t width, int64_t depth, Matrix<pair> a, Panel<pair> b, const Put& put) {
    constexpr int64_t some = 2 * SIDE;
    constexpr bool is_stored = std::is_same_v<Put, Into>;
    // as many pairs in each step, so that what is left of the depth is next to nothing
    const int64_t steps = (depth + SIDE - 1) / SIDE, step = depth / steps;
    const bool lies = a.column == 1;
    Unwritten<pair> turned(lies ? 0 : some * depth);
    alignas(64) float sums[some * PANEL];
    ShapedSquares& registers = shaped_squares();
    for (int64_t row = 0; row < rows; row += some) {
        const int64_t count = std::min(some, rows - row), lower = std::max<int64_t>(0, count - SIDE);
        registers.shape(count, step);
        const pair* left = lies ? a.data + row * a.row : turned.data;
        const int64_t left_row = lies ? a.row : depth;
        if (!lies) turn(a.data + row, a.column, depth, count, turned.data, depth);
        for (int64_t column = 0; column < width; column += PANEL) {
            const int64_t here = std::min(PANEL, width - column);
            const pair* right = b.data + column * b.reach;
            float* to = sums;
            int64_t apart = here;
            bool done = false;  // where all sums are
            if constexpr (is_stored)
                if ((done = !put.add && steps * step == depth))
                    to = put.c.data + row * put.c.row + column * put.c.reach, apart = put.c.row;
            for (int64_t j = 0; j < here; j += 2 * SIDE, right += 2 * SIDE) {
                const auto sum = here - j == SIDE ? (lower ? sum_squares<2, 1> : sum_squares<1, 1>)
                                                  : (lower ? sum_squares<2, 2> : sum_squares<1, 2>);
                sum(left, left_row, right, b.row, steps, step, to + j, apart);
            }
            const Begun begun{sums, row, steps * step};
            if (!done) Product<pair, Put>{depth, a, b, put, begun}.panel(row, row + count, column, here);
        }
    }
    if (!registers.stay) registers.give_back();
}
#endif
