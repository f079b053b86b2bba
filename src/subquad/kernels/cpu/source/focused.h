// The map of focused attention: see ops/focused_formula.py. Norms run over the channels of all heads of a token.
#pragma once
#include "feature_maps.h"

// y = (x⁺ + 10⁻⁶) / t of a token, and (y / max y)^p, as rows of padded width for each head, with their norms. f has no
// need of the maximum's power, which is beyond the range of fp32 where p is large
template <class E>
struct Focus {
    const Shape& shape;
    const Tokens<E>& x;
    const float exponent;
    const float* positions = nullptr;  // (h, n, d), added to the tokens
    const int64_t d = shape.width, row = padded(d), size = shape.heads * row;
    Buffer<float> sharpness = Buffer<float>(size);  // 1 / t

    bool begin(const Numbers& temperature) {
        if (!fits(shape, shape.queries, x) || !fits(shape.heads * d, temperature)) return false;
        for (int64_t h = 0; h < shape.heads; h++)
            for (int64_t c = 0; c < d; c++) sharpness[h * row + c] = 1 / temperature.data[h * d + c];
        return true;
    }

    void fill_in(int64_t b, int64_t token, float* y, float* raised, float& norm, float& raised_norm) const {
        vec highest{}, squares{}, raised_squares{};
        for (int64_t h = 0; h < shape.heads; h++)
            each_entry(x.at(b, h, token), d, [&](int64_t c, vec value) {
                const int64_t i = h * row + c;
                if (positions) {
                    const float* own = positions + (h * shape.queries + token) * d + c;
                    value += d - c >= W ? load(own) : load(own, d - c);
                }
                // beyond the width the sharpness is 0
                const vec one = (feature_of(value, RELU) + 1e-6f) * load(&sharpness[i]);
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

// f = ‖y‖ y^p / ‖y^p‖ as tokens in fp32
template <class E>
Answer focus_of(Shape shape, Tokens<E> x, Numbers temperature, float exponent, Tokens<float> out) {
    Focus<E> it{shape, x, exponent};
    if (!it.begin(temperature) || !fits(shape, shape.queries, out)) return MISFIT;
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
                        float* to = out.at(piece.b, h, t) + c;
                        it.d - c >= W ? store(to, result) : store(to, result, it.d - c);
                    });
            }
        });
    });
    return DONE;
}

KERNEL(
    focus, (Shape shape, AnyTokens x, Numbers temperature, float exponent, Tokens<float> out),
    (shape, x, temperature, exponent, out))

// With s = y^p, a = ‖y‖, c = ‖s‖, D = Σ g s: dy = (g a / c - D a s / c³) p s / y + D y / (a c), dx = dy / t where x > 0,
// dt = -Σ dy y / t, (h, d)
template <class E>
Answer focus_gradient_of(
    Shape shape, Tokens<E> x, Numbers temperature, float exponent, Tokens<float> grad, Tokens<E> dx, Numbers dtemperature) {
    Focus<E> it{shape, x, exponent};
    if (!it.begin(temperature) || !fits(shape, shape.queries, grad) || !fits(shape, shape.queries, dx)) return MISFIT;
    if (!fits(shape.heads * it.d, dtemperature)) return MISFIT;
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
                        const vec value = rest >= W ? load(from) : load(from, rest);
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
    (Shape shape, AnyTokens x, Numbers temperature, float exponent, Tokens<float> grad, AnyTokens dx,
     Numbers dtemperature),
    (shape, x, temperature, exponent, grad, dx, dtemperature))
