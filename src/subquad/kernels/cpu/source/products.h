// Products of matrices, a tile of vectors at a time.
#pragma once
#include "tiles.h"

// A matrix whose rows and columns lie any distance apart.
template <class P>
struct Matrix {
    const P* data;
    int64_t row, column;
};
typedef Matrix<float> Strided;

constexpr int64_t PANEL = V * W;  // columns of a tile

// The right side of a product, or, taken from its columns, the left one. Columns lie side by side; or PANEL of them do, and
// those of the next panel behind all rows of this one, so that a panel begins at its first column times `reach`. That is as
// a tile reads them: of rows of 64 numbers it needs one line of the cache in four, and these push one another out.
template <class P>
struct Panel {
    const P* data;
    int64_t row, reach = 1;
    Matrix<P> turned() const { return {data, 1, row}; }
};
// Where results go, likewise
struct Rows {
    float* data;
    int64_t row, reach = 1;
};

// What becomes of the sums of a tile, whose first stands in this row and column: they are stored, or added to what is there
struct Into {
    Rows c;
    bool add;
    template <int r, int v>
    void operator()(const vec (&sums)[r][v], int64_t row, int64_t column) const {
        UNROLLED for (int i = 0; i < r; i++)
            UNROLLED for (int j = 0; j < v; j++) {
                float* to = c.data + (row + i) * c.row + column * c.reach + j * W;
                // added at the end: a long sum rounds once for all of these
                store(to, add ? load(to) + sums[i][j] : sums[i][j]);
            }
    }
};

// Sums of some rows from `first` on and of a panel's columns, side by side, as far as they have been taken somewhere else
struct Begun {
    const float* sums = nullptr;
    int64_t first = 0, depth = 0;
};

// a (rows × depth) b (depth × width), of which `put` gets tile after tile
template <class P, class Put>
struct Product {
    const int64_t depth;
    const Matrix<P> a;
    const Panel<P> b;
    const Put& put;
    // of pairs alone, so that numbers have nothing to ask
    static constexpr bool may_be_begun = std::is_same_v<P, pair>;
    struct NeverBegun {};
    const std::conditional_t<may_be_begun, Begun, NeverBegun> begun{};

    template <int r, int v>
    void tile(int64_t row, int64_t column) const {
        const P *left = a.data + row * a.row, *right = b.data + column * b.reach;
        vec sums[r][v];
        UNROLLED for (int i = 0; i < r; i++)
            UNROLLED for (int j = 0; j < v; j++) sums[i][j] = vec{};
        int64_t k = 0;
        if constexpr (may_be_begun) {
            if (begun.sums) {
                UNROLLED for (int i = 0; i < r; i++)
                    UNROLLED for (int j = 0; j < v; j++)
                        sums[i][j] = load(begun.sums + ((row - begun.first + i) * v + j) * W);
                k = begun.depth;
            } else if (a.column == 1 && column == 0) {
                fetch(left + r * a.row, r);  // of twice as many bytes it costs more than it brings
            }
        }
        for (; k < depth; k++) {
            decltype(load(right)) line[v];
            UNROLLED for (int j = 0; j < v; j++) line[j] = load(right + k * b.row + j * W);
            UNROLLED for (int i = 0; i < r; i++) {
                const P x = left[i * a.row + k * a.column];
                UNROLLED for (int j = 0; j < v; j++) accumulate(sums[i][j], x, line[j]);
            }
        }
        put(sums, row, column);
    }

    // The rows that come next: weights that nobody has read since the last call are far away
    void fetch(const P* from, int64_t rows) const {
        for (int64_t i = 0; i < rows; i++, from += a.row)
            for (int64_t k = 0; k < depth; k += 64 / int64_t(sizeof(P))) __builtin_prefetch(from + k);
    }

    template <int r, int v>
    void last_rows(int64_t rows, int64_t row, int64_t column) const {
        if constexpr (r > 0) {
            if (rows == r) tile<r, v>(row, column);
            else last_rows<r - 1, v>(rows, row, column);
        }
    }

    template <int v>
    void columns(int64_t row, int64_t behind, int64_t column) const {
        // few columns leave registers for twice as many rows, which keep the multipliers busy
        if constexpr (2 * v <= V)
            for (; row + 2 * R <= behind; row += 2 * R) tile<2 * R, v>(row, column);
        for (; row + R <= behind; row += R) tile<R, v>(row, column);
        last_rows<R - 1, v>(behind - row, row, column);
    }

    // Of the rows before `behind` the columns of one panel, or of what is left of one
    void panel(int64_t row, int64_t behind, int64_t column, int64_t width) const {
        if (width == PANEL) return columns<V>(row, behind, column);
        if constexpr (V == 4) {
            if (width == 3 * W) return columns<3>(row, behind, column);
            if (width == 2 * W) return columns<2>(row, behind, column);
        }
        columns<1>(row, behind, column);
    }

    // Of the rows before `behind` all columns
    void all_columns(int64_t row, int64_t behind, int64_t width) const {
        int64_t j = 0;
        for (; j + PANEL <= width; j += PANEL) columns<V>(row, behind, j);
        if (j < width) panel(row, behind, j, width - j);
    }
};
