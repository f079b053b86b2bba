// Softmax-free attention: see ops/soft_formula.py.
#pragma once
#include "maps.h"
#include "mixer_parts.h"

// κ(x, y) = exp(-|x - y|² / 2) of the piece's tokens, scaled, and the few, (count × padded a)
struct GaussianMap {
    Buffer<float> columns, norms, map, room;
    int64_t of = -1;

    // To `map`, or to another place
    template <class E>
    void fill_in(
        const Tokens<E>& x, const Piece& piece, const float* few, int64_t count, int64_t width, float scale,
        float* to = nullptr) {
        const int64_t row = padded(count);
        if (of != piece.index) {
            of = piece.index;
            as_columns(few + of * count * width, width, count, width, 1, columns);
            norms.assign(row, 1e30f);
            for (int64_t a = 0; a < count; a++) {
                norms[a] = 0;
                for (int64_t c = 0; c < width; c++) norms[a] += 0.5f * columns[c * row + a] * columns[c * row + a];
            }
            map.resize(T * row);
        }
        if (!to) to = map.data();
        const Strided tokens = matrix_of(x, piece, width, room);
        multiply(piece.count, row, width, tokens, columns.data(), row, {to, row});
        for (int64_t t = 0; t < piece.count; t++, to += row) {
            vec squares{};
            const float* token = tokens.data + t * tokens.row;
            for (int64_t c = 0; c < width; c += W) {
                const vec value = width - c >= W ? load(token + c) : load(token + c, width - c);
                squares += value * value;
            }
            const float norm = 0.5f * scale * scale * sum(squares);
            for (int64_t a = 0; a < row; a += W) {
                const vec exponent = load(to + a) * scale - norm - load(&norms[a]);
                // rounding can make the distance of near points slightly negative
                store(to + a, falling_exponential(exponent > vec{} ? vec{} : exponent));
            }
        }
    }
};

// out (b, h, m, d) = κ(scale x, landmarks)ᵀ v; the map (b, h, n, padded m) is kept where there is a place for it
template <class E>
Answer soft_gather_to(
    Shape shape, Tokens<E> x, Numbers landmarks, int64_t count, Tokens<E> v, float scale, Numbers out, float* kept) {
    if (!fits(shape, shape.keys, x, v)) return MISFIT;
    if (!fits(shape.batch * shape.heads * count * shape.width, landmarks, out)) return MISFIT;
    const int64_t d = shape.width, row = padded(d), columns = padded(count);
    Sums sums(shape.threads, count * row);
    parallel(shape.threads, [&](int me, int all) {
        GaussianMap kernel;
        Buffer<float> spare;
        sums.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            float* to = kept ? kept + (piece.index * shape.keys + piece.first) * columns : nullptr;
            kernel.fill_in(x, piece, landmarks.data, count, d, scale, to);
            const Rows rows = values_of(v, piece, d, spare);
            const Strided map{to ? to : kernel.map.data(), 1, columns};
            multiply(count, row, piece.count, map, rows.data, rows.row, {sum, row}, true);
        });
        heads(shape, me, all, [&](int64_t index) {
            float* to = out.data + index * count * d;
            std::fill(to, to + count * d, 0.0f);
            sums.each_sum(index, [&](const float* part) {
                for (int64_t a = 0; a < count; a++)
                    for (int64_t c = 0; c < d; c++) to[a * d + c] += part[a * row + c];
            });
        });
    });
    return DONE;
}

template <class E>
Answer soft_gather_of(
    Shape shape, Tokens<E> x, Numbers landmarks, int64_t count, Tokens<E> v, float scale, Numbers out) {
    return soft_gather_to(shape, x, landmarks, count, v, scale, out, nullptr);
}

KERNEL(
    soft_gather,
    (Shape shape, AnyTokens x, Numbers landmarks, int64_t count, AnyTokens v, float scale, Numbers out),
    (shape, x, landmarks, count, v, scale, out))

// out = κ(scale x, landmarks) u, as tokens, from u (b, h, m, d), and from the map where it was kept
template <class E>
Answer soft_spread_from(
    Shape shape, Tokens<E> x, Numbers landmarks, int64_t count, Numbers u, float scale, Tokens<E> out,
    const float* kept) {
    if (!fits(shape, shape.queries, x, out)) return MISFIT;
    if (!fits(shape.batch * shape.heads * count * shape.width, landmarks, u)) return MISFIT;
    const int64_t d = shape.width, row = padded(d);
    parallel(shape.threads, [&](int me, int all) {
        GaussianMap kernel;
        Buffer<float> spare, few;
        int64_t of = -1;
        pieces(shape, shape.queries, me, all, [&](const Piece& piece) {
            if (of != piece.index) as_rows(u.data + (of = piece.index) * count * d, d, count, d, few);
            const float* from = kept + (piece.index * shape.queries + piece.first) * padded(count);
            if (!kept) kernel.fill_in(x, piece, landmarks.data, count, d, scale);
            to_tokens(out, piece, d, spare, [&](Rows c) {
                const Strided map{kept ? from : kernel.map.data(), padded(count), 1};
                multiply(piece.count, row, count, map, few.data(), row, c);
            });
        });
    });
    return DONE;
}

template <class E>
Answer soft_spread_of(
    Shape shape, Tokens<E> x, Numbers landmarks, int64_t count, Numbers u, float scale, Tokens<E> out) {
    return soft_spread_from(shape, x, landmarks, count, u, scale, out, nullptr);
}

KERNEL(
    soft_spread,
    (Shape shape, AnyTokens x, Numbers landmarks, int64_t count, Numbers u, float scale, AnyTokens out),
    (shape, x, landmarks, count, u, scale, out))

// What both maps have in common where they learn: with K the map, y the tokens that meet it and f what the few have,
// dE = (y fᵀ) ∘ K, dx = s (dE l - s x Σ dE), dl = s dEᵀ x - l Σ dE. Where tokens were gathered, y are they and f is the
// gradient: dy = K f. Where they were spread, y is the gradient and f what was spread: df = Kᵀ y. One of these is asked for.
template <class E>
Answer soft_gradient_of(
    Shape shape, Tokens<E> x, Numbers landmarks, int64_t count, Tokens<E> y, Numbers few, float scale, Tokens<E> dx,
    Numbers dlandmarks, Tokens<E> dy, Numbers dfew) {
    const int64_t d = shape.width, row = padded(d), columns = padded(count), matrix = count * row;
    if (!fits(shape, shape.queries, x, y, dx, dy)) return MISFIT;
    if (!fits(shape.batch * shape.heads * count * d, landmarks, few, dlandmarks, dfew)) return MISFIT;
    Sums sums(shape.threads, 2 * matrix + columns);  // dEᵀ x, Kᵀ y, Σ dE
    parallel(shape.threads, [&](int me, int all) {
        GaussianMap kernel;
        Buffer<float> landmark_rows, few_columns, few_rows, slopes(T * columns), spare, other, third;
        int64_t of = -1;
        sums.gather(shape, shape.queries, me, all, [&](const Piece& piece, float* sum) {
            if (of != piece.index) {
                of = piece.index;
                as_rows(landmarks.data + of * count * d, d, count, d, landmark_rows);
                as_columns(few.data + of * count * d, d, count, d, 1, few_columns);
                if (dy.data) as_rows(few.data + of * count * d, d, count, d, few_rows);
            }
            kernel.fill_in(x, piece, landmarks.data, count, d, scale);
            const Rows tokens = values_of(x, piece, d, other), met = values_of(y, piece, d, third);
            const Strided left{met.data, met.row, 1};
            multiply(piece.count, columns, d, left, few_columns.data(), columns, {slopes.data(), columns});
            float totals[T];
            for (int64_t t = 0; t < piece.count; t++) {
                vec total{};
                for (int64_t a = 0; a < columns; a += W) {
                    float *to = &slopes[t * columns + a], *all_tokens = sum + 2 * matrix + a;
                    const vec slope = load(to) * load(&kernel.map[t * columns + a]);
                    store(to, slope);
                    store(all_tokens, load(all_tokens) + slope);
                    total += slope;
                }
                totals[t] = ::sum(total) * scale;
            }
            to_tokens(dx, piece, d, spare, [&](Rows c) {
                multiply(piece.count, row, count, {slopes.data(), columns, 1}, landmark_rows.data(), row, c);
                for (int64_t t = 0; t < piece.count; t++)
                    for (int64_t i = 0; i < row; i += W) {
                        float* to = c.data + t * c.row + i;
                        store(to, (load(to) - load(tokens.data + t * tokens.row + i) * totals[t]) * scale);
                    }
            });
            multiply(count, row, piece.count, {slopes.data(), 1, columns}, tokens.data, tokens.row, {sum, row}, true);
            const Strided map{kernel.map.data(), columns, 1};
            if (dy.data)
                to_tokens(dy, piece, d, spare, [&](Rows c) {
                    multiply(piece.count, row, count, map, few_rows.data(), row, c);
                });
            if (dfew.data)
                multiply(count, row, piece.count, {map.data, 1, columns}, met.data, met.row, {sum + matrix, row}, true);
        });
        heads(shape, me, all, [&](int64_t index) {
            const int64_t first = index * count * d;
            std::fill(dlandmarks.data + first, dlandmarks.data + first + count * d, 0.0f);
            if (dfew.data) std::fill(dfew.data + first, dfew.data + first + count * d, 0.0f);
            sums.each_sum(index, [&](const float* part) {
                for (int64_t a = 0; a < count; a++)
                    for (int64_t c = 0; c < d; c++) {
                        const int64_t i = first + a * d + c;
                        dlandmarks.data[i] += scale * part[a * row + c] - landmarks.data[i] * part[2 * matrix + a];
                        if (dfew.data) dfew.data[i] += part[matrix + a * row + c];
                    }
            });
        });
    });
    return DONE;
}

KERNEL(
    soft_gradient,
    (Shape shape, AnyTokens x, Numbers landmarks, int64_t count, AnyTokens y, Numbers few, float scale, AnyTokens dx,
     Numbers dlandmarks, AnyTokens dy, Numbers dfew),
    (shape, x, landmarks, count, y, few, scale, dx, dlandmarks, dy, dfew))

// c (m × padded m) += a b, a few columns of a at a time: with all at once rounding errors are half as large again
inline void add_product(int64_t m, const float* a, const float* b, float* c) {
    constexpr int64_t few = 32;
    const int64_t row = padded(m);
    for (int64_t k = 0; k < m; k += few)
        multiply(m, row, std::min(few, m - k), {a + k, row, 1}, b + k * row, row, {c, row}, true);
}

// y (m × padded m) ← its symmetric part
inline void symmetric(int64_t m, const float* x, float* y) {
    const int64_t row = padded(m);
    for (int64_t r = 0; r < m; r++)
        for (int64_t c = 0; c < m; c++) y[r * row + c] = 0.5f * (x[r * row + c] + x[c * row + r]);
}

// Newton's steps Y ← Y + Y (I - A Y) of one matrix, kept symmetric
struct Newton {
    const int64_t m, row = padded(m);
    Buffer<float> negative, y, rest = Buffer<float>(m * row), next;  // -A, Y
    explicit Newton(int64_t m) : m(m) {}

    void begin(const float* gram, float start) {
        as_rows(gram, m, m, m, y);
        negative = y;
        for (float& value : negative) value = -value;
        for (float& value : y) value *= start;
    }

    // All steps; rounding makes it unsymmetric only slowly. Each squares the rest I - A Y: where that is small, this one
    // and the next leave nothing of it that fp32 could tell, and the others would change nothing.
    void run(const float* gram, float start, int64_t steps) {
        begin(gram, start);
        for (int64_t i = 0; i < steps; i++) {
            step(i % 4 == 3 || i + 1 == steps);
            if (i + 2 < steps && rest_is_small()) steps = i + 2;
        }
    }

    // Whether its largest row sum was below 1e-3 in front of the step: (1e-3)⁴ is left after the next
    bool rest_is_small() const {
        for (int64_t r = 0; r < m; r++) {
            vec total{};
            for (int64_t c = 0; c < row; c += W) {
                const vec x = load(&rest[r * row + c]);
                total += x > vec{} ? x : -x;
            }
            if (!(sum(total) < 1e-3f)) return false;
        }
        return true;
    }

    void step(bool keep_symmetric) {
        std::fill(rest.begin(), rest.end(), 0.0f);
        for (int64_t r = 0; r < m; r++) rest[r * row + r] = 1;
        add_product(m, negative.data(), y.data(), rest.data());
        next = y;
        add_product(m, y.data(), rest.data(), next.data());
        if (keep_symmetric) symmetric(m, next.data(), y.data());
        else y.swap(next);
    }
};

inline void copy_out(int64_t m, const float* from, float* to) {
    for (int64_t r = 0; r < m; r++) std::memcpy(to + r * m, from + r * padded(m), m * sizeof(float));
}

// From start[i]·A; A (matrices, m, m) with its ridge
template <class>
Answer newton_inverse_of(
    Numbers gram, Numbers start, int64_t matrices, int64_t m, int32_t steps, Numbers out, int32_t threads) {
    if (!fits(matrices * m * m, gram, out) || !fits(matrices, start) || steps < 0) return MISFIT;
    parallel(threads, [&](int me, int all) {
        Newton newton(m);
        for (int64_t i = me; i < matrices; i += all) {
            newton.run(gram.data + i * m * m, start.data[i], steps);
            copy_out(m, newton.y.data(), out.data + i * m * m);
        }
    });
    return DONE;
}

KERNEL(
    newton_inverse,
    (Numbers gram, Numbers start, int64_t matrices, int64_t m, int32_t steps, Numbers out, int32_t threads),
    (gram, start, matrices, m, steps, out, threads))

// All of G, the gradient of Y, are symmetric: G ← 2 G - (A Y G + its transpose), dA = -Σ Y G Y over the steps, and at the
// start Y = αA: dA += αG, dα = Σ G ∘ A.
template <class>
Answer newton_inverse_gradient_of(
    Numbers grad, Numbers gram, Numbers start, int64_t matrices, int64_t m, int32_t steps, Numbers dgram,
    Numbers dstart, int32_t threads) {
    if (!fits(matrices * m * m, grad, gram, dgram) || !fits(matrices, start, dstart) || steps < 0) return MISFIT;
    const int64_t row = padded(m), size = m * row;
    parallel(threads, [&](int me, int all) {
        Newton newton(m);
        Buffer<float> history(steps * size), g(size), given, a(size), b(size), total;
        for (int64_t i = me; i < matrices; i += all) {
            newton.begin(gram.data + i * m * m, start.data[i]);
            // steps that change nothing have no gradient either: G ← 2 G - 2 G
            int64_t taken = steps;
            for (int64_t step = 0; step < taken; step++) {
                std::copy(newton.y.begin(), newton.y.end(), history.begin() + step * size);
                newton.step(true);
                if (step + 2 < taken && newton.rest_is_small()) taken = step + 2;
            }
            as_rows(grad.data + i * m * m, m, m, m, given);
            symmetric(m, given.data(), g.data());
            total.assign(size, 0.0f);
            for (int64_t step = taken; step-- > 0;) {
                const float* y = &history[step * size];
                std::fill(a.begin(), a.end(), 0.0f);
                add_product(m, g.data(), y, a.data());
                std::fill(b.begin(), b.end(), 0.0f);
                add_product(m, y, a.data(), b.data());
                for (int64_t j = 0; j < size; j++) total[j] -= b[j];
                // -G Y A, and what it is mirrored: a stands for G Y still
                std::fill(b.begin(), b.end(), 0.0f);
                add_product(m, a.data(), newton.negative.data(), b.data());
                symmetric(m, b.data(), a.data());
                for (int64_t j = 0; j < size; j++) g[j] = 2 * (g[j] + a[j]);
            }
            float product = 0;
            for (int64_t j = 0; j < size; j++) {
                product -= g[j] * newton.negative[j];
                total[j] += start.data[i] * g[j];
            }
            dstart.data[i] = product;
            copy_out(m, total.data(), dgram.data + i * m * m);
        }
    });
    return DONE;
}

KERNEL(
    newton_inverse_gradient,
    (Numbers grad, Numbers gram, Numbers start, int64_t matrices, int64_t m, int32_t steps, Numbers dgram,
     Numbers dstart, int32_t threads),
    (grad, gram, start, matrices, m, steps, dgram, dstart, threads))

// Landmarks from what a convolution made of their windows: gelu(norm(scale · x)), in place
inline void make_landmarks(const Shape& shape, const Tokens<float>& x, float scale, const Norm& norm) {
    const int64_t d = shape.width;
    Buffer<float> line(padded(d));
    for (int64_t i = 0; i < shape.batch * shape.heads * x.count; i++) {
        float* token = x.data + i * d;
        for (int64_t c = 0; c < d; c++) token[c] *= scale;
        normed<1, float, float>({token}, d, norm, {line.data()});
        for (int64_t c = 0; c < d; c += W) store(&line[c], gelu(load(&line[c]), 0.0f));
        copy(line.data(), d, token);
    }
}

// x (b, h, m, d) ← Y x, with Newton's inverse Y of κ(l, l) + ridge from `start` / (largest row sum)² of it
inline void solve(
    const Shape& shape, const Tokens<float>& landmarks, int64_t steps, float ridge, float start, Buffer<float>& x) {
    const int64_t d = shape.width, m = landmarks.count, row = padded(m);
    parallel(shape.threads, [&](int me, int all) {
        GaussianMap kernel;
        Newton newton(m);
        Buffer<float> gram(m * m), right, spare(m * padded(d));
        heads(shape, me, all, [&](int64_t index) {
            float largest = 0;
            for (int64_t first = 0; first < m; first += T) {
                const Piece piece{index, index / shape.heads, index % shape.heads, first, std::min<int64_t>(T, m - first)};
                kernel.fill_in(landmarks, piece, landmarks.data, m, d, 1);
                for (int64_t t = 0; t < piece.count; t++) {
                    float total = 0, *to = &gram[(first + t) * m];
                    for (int64_t a = 0; a < m; a++) total += to[a] = kernel.map[t * row + a];
                    largest = std::max(largest, total);
                    to[first + t] += ridge;
                }
            }
            newton.run(gram.data(), start / (largest * largest), steps);
            as_rows(&x[index * m * d], d, m, d, right);
            multiply(m, padded(d), m, {newton.y.data(), row, 1}, right.data(), padded(d), {spare.data(), padded(d)});
            for (int64_t a = 0; a < m; a++) std::memcpy(&x[(index * m + a) * d], &spare[a * padded(d)], d * sizeof(float));
        });
    });
}

// `windows` (d, d, down, across) are those of a convolution as a module has them
template <class E>
Answer soft_mixer_of(
    Shape shape, Tokens<E> q, Tokens<E> v, const Parameter& windows, const Norm& norm, float scale, int64_t steps,
    float ridge, float start, const Filters& filters, Map map, int64_t down, int64_t across, Tokens<E> out) {
    const int64_t d = shape.width, places = down * across;
    if (!fits(shape, shape.queries, q, v) || !fits(shape.queries, map) || !fits(shape, filters)) return MISFIT;
    if (down < 1 || across < 1 || map.height < down || map.width < across || steps < 0) return MISFIT;
    if (!fits(places * d * d, windows) || !fits(d, norm.weight, norm.bias)) return MISFIT;
    const int64_t count = map.height / down * (map.width / across);
    Buffer<float> weights(places * d * d), points, gathered;
    // as products want them, (down, across, d, d of landmarks)
    for (int64_t c = 0; c < d; c++) turn(windows.data + c * places, d * places, d, places, &weights[c * d], d * d);
    const Tokens<float> landmarks = few_tokens(shape, count, points);
    if (convolve_windows_to(shape, q, map, down, across, numbers_of(weights), landmarks)) return MISFIT;
    make_landmarks(shape, landmarks, scale, norm);
    gathered.resize(points.size());
    // both maps are one: it is kept where it stays in the caches
    const int64_t entries = shape.batch * shape.heads * shape.queries * padded(count);
    const std::unique_ptr<float[]> kept(entries > MOST_KEPT ? nullptr : new float[entries]);
    const Numbers few = numbers_of(points), solved = numbers_of(gathered);
    Answer answer = soft_gather_to(shape, q, few, count, v, scale, solved, kept.get());
    if (answer) return answer;
    solve(shape, landmarks, steps, ridge, start, gathered);
    answer = soft_spread_from(shape, q, few, count, solved, scale, out, kept.get());
    return answer ? answer : finish(shape, v, {}, out, map, filters);
}

KERNEL(
    soft_mixer,
    (Shape shape, AnyTokens q, AnyTokens v, AnyNumbers windows, AnyNorm norm, float scale, int64_t steps, float ridge,
     float start, AnyFilters filters, Map map, int64_t down, int64_t across, AnyTokens out),
    (shape, q, v, windows, norm, scale, steps, ridge, start, filters, map, down, across, out))
