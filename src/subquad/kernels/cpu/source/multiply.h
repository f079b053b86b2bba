// Products of matrices by what computes them best.
#pragma once
#include "squares.h"

// The same in `width` columns, a multiple of W; depth counts operands. In a tile whose rows are pairs, two by two, the
// first row is even: R is, where there are pairs.
template <class P, class Put>
void multiply(int64_t rows, int64_t width, int64_t depth, Matrix<P> a, Panel<P> b, const Put& put) {
#if defined(HAS_SQUARES)
    if constexpr (std::is_same_v<P, pair>)
        if (squares_take(rows, width, depth, a)) return multiply_in_squares(rows, width, depth, a, b, put);
#endif
    if (width <= PANEL) return Product<P, Put>{depth, a, b, put}.all_columns(0, rows, width);
    // as many rows at a time as stay in the L2 cache while they meet all panels
    constexpr int64_t kept = 96 << 10;
    const int64_t some = std::max<int64_t>(1, kept / (2 * R * depth * int64_t(sizeof(P)))) * 2 * R;
    const Product<P, Put> product{depth, a, b, put};
    for (int64_t row = 0; row < rows; row += some) product.all_columns(row, std::min(row + some, rows), width);
}

// c (rows × width) = [c +] a (rows × depth) b (depth × width)
template <class P>
void multiply(int64_t rows, int64_t width, int64_t depth, Matrix<P> a, Panel<P> b, Rows c, bool add = false) {
    multiply(rows, width, depth, a, b, Into{c, add});
}
template <class P>
void multiply(int64_t rows, int64_t width, int64_t depth, Matrix<P> a, const P* b, int64_t ldb, Rows c, bool add = false) {
    multiply(rows, width, depth, a, Panel<P>{b, ldb}, Into{c, add});
}
