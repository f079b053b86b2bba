// The map of focused attention: see ops/focused_formula.py. Norms run over the channels of all heads of a token.
#pragma once
#include "feature_maps.h"
#include "mixer_parts.h"

// y = (x⁺ + 10⁻⁶) / t of a token, and (y / max y)^p, as rows of padded width for each head, with their norms. f has no
// need of the maximum's power, which is beyond the range of fp32 where p is large
template <class E>
struct Focus {
    const Shape& shape;
    const Tokens<E>& x;
    const float exponent;
    const float* positions;  // (h, n, d), added to the tokens, or none
    const int64_t d = shape.width, row = padded(d), size = shape.heads * row;
    Buffer<float> sharpness = Buffer<float>(size);  // 1 / t

    bool begin(const Numbers& temperature) {
        if (!fits(shape, shape.queries, x) || !fits(shape.heads * d, temperature)) return false;
        for (int64_t h = 0; h < shape.heads; h++)
            for (int64_t c = 0; c < d; c++) sharpness[h * row + c] = 1 / temperature.data[h * d + c];
        return true;
    }

    // A token's entry with its position
    vec placed(int64_t h, int64_t token, int64_t c, vec value) const {
        if (!positions) return value;
        const float* own = positions + (h * shape.queries + token) * d + c;
        return value + (d - c >= W ? load(own) : load(own, d - c));
    }

    void fill_in(int64_t b, int64_t token, float* y, float* raised, float& norm, float& raised_norm) const {
        vec highest{}, squares{}, raised_squares{};
        for (int64_t h = 0; h < shape.heads; h++)
            each_entry(x.at(b, h, token), d, [&](int64_t c, vec value) {
                const int64_t i = h * row + c;
                // beyond the width the sharpness is 0
                const vec one = (feature_of(placed(h, token, c, value), RELU) + 1e-6f) * load(&sharpness[i]);
                highest = max(one, highest);
                store(y + i, one);
            });
        const float top = largest(highest);
        for (int64_t i = 0; i < size; i += W) {
            const vec one = load(y + i) * (1 / top), sharp = exponent == 3 ? one * one * one : power(one, fill(exponent));
            squares += one * one, raised_squares += sharp * sharp;
            store(raised + i, sharp);
        }
        norm = top * std::sqrt(sum(squares)), raised_norm = std::sqrt(sum(raised_squares));
    }
};

// f = ‖y‖ y^p / ‖y^p‖
template <class E>
Answer focus_of(
    Shape shape, Tokens<E> x, Numbers temperature, const Parameter& positions, float exponent, Tokens<E> out) {
    Focus<E> it{shape, x, exponent, positions.data};
    if (!it.begin(temperature) || !fits(shape, shape.queries, out)) return MISFIT;
    if (!fits(shape.heads * shape.queries * it.d, positions)) return MISFIT;
    const Shape tokens{shape.batch, 1, shape.queries, shape.queries, shape.width, shape.threads};
    parallel(shape.threads, [&](int me, int all) {
        Buffer<float> y(it.size), raised(it.size);
        pieces(tokens, shape.queries, me, all, [&](const Piece& piece) {
            for (int64_t t = piece.first; t < piece.first + piece.count; t++) {
                float norm, raised_norm;
                it.fill_in(piece.b, t, y.data(), raised.data(), norm, raised_norm);
                for (int64_t h = 0; h < shape.heads; h++)
                    each_entry(&raised[h * it.row], it.d, [&](int64_t c, vec value) {
                        const vec result = value * (norm / raised_norm);
                        E* to = out.at(piece.b, h, t) + c;
                        it.d - c >= W ? store(to, result) : store(to, result, it.d - c);
                    });
            }
        });
    });
    return DONE;
}

KERNEL(
    focus, (Shape shape, AnyTokens x, Numbers temperature, AnyNumbers positions, float exponent, AnyTokens out),
    (shape, x, temperature, positions, exponent, out))

// Of a gradient g in fp32, as little of it may be left. With s = y^p, a = ‖y‖, c = ‖s‖, D = Σ g s: dy = (g a / c - D a s / c³) p s / y + D y / (a c), dx = dy / t where x > 0,
// dt = -Σ dy y / t, (h, d)
template <class E>
Answer focus_gradient_of(
    Shape shape, Tokens<E> x, Numbers temperature, const Parameter& positions, float exponent, Tokens<float> grad,
    Tokens<E> dx, Numbers dtemperature) {
    Focus<E> it{shape, x, exponent, positions.data};
    if (!it.begin(temperature) || !fits(shape, shape.queries, grad) || !fits(shape, shape.queries, dx)) return MISFIT;
    if (!fits(shape.heads * it.d, dtemperature)) return MISFIT;
    if (!fits(shape.heads * shape.queries * it.d, positions)) return MISFIT;
    const Shape tokens{shape.batch, 1, shape.queries, shape.queries, shape.width, shape.threads};
    Sums sums(shape.threads, it.size);
    parallel(shape.threads, [&](int me, int all) {
        Buffer<float> y(it.size), raised(it.size);
        sums.gather(tokens, shape.queries, me, all, [&](const Piece& piece, float* sum) {
            for (int64_t t = piece.first; t < piece.first + piece.count; t++) {
                float a, c;
                it.fill_in(piece.b, t, y.data(), raised.data(), a, c);
                vec products{};
                for (int64_t h = 0; h < shape.heads; h++)
                    each_entry(grad.at(piece.b, h, t), it.d, [&](int64_t i, vec g) { products += g * load(&raised[h * it.row + i]); });
                const float share = ::sum(products) / c / a, less = share * (a / c) * (a / c);
                for (int64_t h = 0; h < shape.heads; h++)
                    each_entry(grad.at(piece.b, h, t), it.d, [&](int64_t i, vec g) {
                        const int64_t at = h * it.row + i, rest = it.d - i;
                        const vec one = load(&y[at]), s = load(&raised[at]), sharp = load(&it.sharpness[at]);
                        const vec slope = one > vec{} ? (g * (a / c) - s * less) * s * exponent / one + one * share : vec{};
                        store(sum + at, load(sum + at) - slope * one * sharp);
                        const E* from = x.at(piece.b, h, t) + i;
                        E* to = dx.at(piece.b, h, t) + i;
                        const vec value = it.placed(h, t, i, rest >= W ? load(from) : load(from, rest));
                        const vec result = value > vec{} ? slope * sharp : vec{};
                        rest >= W ? store(to, result) : store(to, result, rest);
                    });
            }
        });
    });
    std::fill(dtemperature.data, dtemperature.data + dtemperature.count, 0.0f);
    for (int64_t b = 0; b < shape.batch; b++)
        sums.each_sum(b, [&](const float* part) {
            for (int64_t h = 0; h < shape.heads; h++)
                for (int64_t c = 0; c < it.d; c++) dtemperature.data[h * it.d + c] += part[h * it.row + c];
        });
    return DONE;
}

KERNEL(
    focus_gradient,
    (Shape shape, AnyTokens x, Numbers temperature, AnyNumbers positions, float exponent, Tokens<float> grad,
     AnyTokens dx, Numbers dtemperature),
    (shape, x, temperature, positions, exponent, grad, dx, dtemperature))

// Features of a piece of tokens, of all heads of an image, as rows of padded width side by side
template <class E>
void focused_rows(const Focus<E>& it, const Piece& piece, Buffer<float>& plain, float* to) {
    for (int64_t t = 0; t < piece.count; t++, to += it.size) {
        float norm, raised_norm;
        it.fill_in(piece.b, piece.first + t, plain.data(), to, norm, raised_norm);
        const float share = norm / raised_norm;
        for (int64_t c = 0; c < it.size; c += W) store(to + c, load(to + c) * share);
    }
}

// Keys have `positions` (h, n, d) added, and tokens are divided by softplus(temperature)
template <class E>
Answer focused_mixer_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, const Parameter& positions, const Parameter& temperature,
    float exponent, float eps, const Filters& filters, Map map, Tokens<E> out) {
    typedef Operand<E> P;
    const int64_t d = shape.width, row = padded(d), wide = shape.heads * row, n = shape.queries;
    const int64_t size = d * row + row, panel = deep<P>(d) * row;
    if (shape.keys != n || !temperature.data || !positions.data) return MISFIT;
    if (!fits(shape, n, q, k, v, out) || !fits(shape.heads * n * d, positions)) return MISFIT;
    if (!fits(shape.heads * d, temperature) || !fits(shape, filters) || !fits(n, map)) return MISFIT;
    Buffer<float> divisors(shape.heads * d);
    for (int64_t c = 0; c < shape.heads * d; c++) divisors[c] = softplus(temperature.data[c]);
    Focus<E> of_q{shape, q, exponent, nullptr}, of_k{shape, k, exponent, positions.data};
    of_q.begin(numbers_of(divisors)), of_k.begin(numbers_of(divisors));
    const Shape tokens{shape.batch, 1, n, n, d, shape.threads};
    Sums sums(shape.threads, shape.heads * size);
    Buffer<float> means(shape.batch * shape.heads * row);
    Buffer<P> panels(shape.batch * shape.heads * panel);
    parallel(shape.threads, [&](int me, int all) {
        Buffer<float> room(T * wide), plain(wide), state(size), spare;
        Buffer<P> left, right;
        sums.gather_images(tokens, n, me, all, [&](const Piece& piece, float* sum) {
            focused_rows(of_k, piece, plain, room.data());
            for (int64_t h = 0; h < shape.heads; h++, sum += size) {
                const Piece own{0, piece.b, h, piece.first, piece.count};
                const float* rows = &room[h * row];
                add_rows(rows, wide, piece.count, row, sum + d * row);
                const Panel<P> keys = packed(rows, wide, piece.count, row, left), values = packed(v, own, d, right);
                multiply(d, row, deep<P>(piece.count), keys.turned(), values.data, values.row, {sum, row}, true);
            }
        });
        heads(shape, me, all, [&](int64_t index) {
            std::fill(state.begin(), state.end(), 0.0f);
            sums.each_sum(index / shape.heads, [&](const float* part) {
                part += index % shape.heads * size;
                for (int64_t i = 0; i < size; i++) state[i] += part[i] / float(n);
            });
            std::memcpy(&means[index * row], &state[d * row], row * sizeof(float));
            pack(state.data(), row, d, row, &panels[index * panel]);
        });
        const auto answer = [&](const Piece& piece) {
            focused_rows(of_q, piece, plain, room.data());
            for (int64_t h = 0; h < shape.heads; h++) {
                const int64_t index = piece.b * shape.heads + h;
                const Matrix<P> rows = lowered(&room[h * row], wide, piece.count, row, left);
                to_tokens(out, Piece{index, piece.b, h, piece.first, piece.count}, d, spare, [&](Rows y) {
                    multiply(piece.count, row, deep<P>(d), rows, &panels[index * panel], row, y);
                    for (int64_t t = 0; t < piece.count; t++) {
                        float* line = y.data + t * y.row;
                        const float share = 1 / (product(&room[t * wide + h * row], &means[index * row], row) + eps);
                        for (int64_t c = 0; c < row; c += W) store(line + c, load(line + c) * share);
                    }
                });
            }
        };
        if (shape.batch == 1) even_pieces(n, me, all, answer);
        else pieces(tokens, n, me, all, answer);
    });
    return finish(shape, v, {}, out, map, filters);
}

KERNEL(
    focused_mixer,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyNumbers positions, AnyNumbers temperature, float exponent,
     float eps, AnyFilters filters, Map map, AnyTokens out),
    (shape, q, k, v, positions, temperature, exponent, eps, filters, map, out))
