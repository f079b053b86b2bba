// Features of tokens, what they make of a gradient, and their rotation: see ops/linear_formula.py and ops/nala_formula.py.
#pragma once
#include "tokens.h"

enum Feature { RELU, ELU, NONE, NALA };

// Rows of padded width that a token's features are: two where positive and negative entries stand apart
inline int64_t rows_of(int feature) { return feature == NALA ? 2 : 1; }

inline vec feature_of(vec x, int feature) {
    if (feature == NONE) return x;
    const vec above = max(vec{}, x);  // NaN stays
    return feature == RELU ? above : (x > vec{} ? x + 1.0f : exponential(x));
}

// φ of the piece's tokens, as rows of padded width; channels beyond the width get 0
template <class E>
void features(const Tokens<E>& x, const Piece& piece, int64_t width, int feature, float* to) {
    const int64_t row = padded(width);
    for (int64_t t = 0; t < piece.count; t++) {
        const E* from = x.at(piece.b, piece.h, piece.first + t);
        int64_t c = 0;
        for (; c + W <= width; c += W) store(to + t * row + c, feature_of(load(from + c), feature));
        if (c < width) {
            vec tail = feature_of(load(from + c, width - c), feature);
            for (int64_t i = width - c; i < W; i++) tail[i] = 0;
            store(to + t * row + c, tail);
        }
    }
}

// A token's entries as vectors: `use(c, value)`, zeros beyond the width
template <class E, class Use>
inline void each_entry(const E* from, int64_t width, Use&& use) {
    for (int64_t c = 0; c < width; c += W) use(c, width - c >= W ? load(from + c) : load(from + c, width - c));
}

// [(k⁺)³, (k⁻)³], each half of padded width; NaN stays, in both
template <class E>
void cubes(const Tokens<E>& k, const Piece& piece, int64_t width, float* to) {
    const int64_t row = padded(width);
    for (int64_t t = 0; t < piece.count; t++, to += 2 * row)
        each_entry(k.at(piece.b, piece.h, piece.first + t), width, [&](int64_t c, vec value) {
            const vec cube = value * value * value;
            store(to + c, value < vec{} ? vec{} : cube);
            store(to + row + c, value > vec{} ? vec{} : -cube);
        });
}

// Of each of a piece's queries its length r, tanh r, and its power p = 3 (tanh r + 1/2)
struct Lengths {
    float length[T], rate[T], power[T];

    template <class E>
    Lengths(const Tokens<E>& q, const Piece& piece, int64_t width) {
        std::fill(length, length + T, 1.0f);
        for (int64_t t = 0; t < piece.count; t++) {
            vec squares{};
            each_entry(q.at(piece.b, piece.h, piece.first + t), width, [&](int64_t, vec x) { squares += x * x; });
            const float square = sum(squares);
            length[t] = std::sqrt(square < 1.17549435e-38f ? 1.17549435e-38f : square);
        }
        for (int64_t t = 0; t < T; t += W) {
            const vec tanh = 1.0f - 2.0f / (exponential(load(length + t) * 2.0f) + 1.0f);
            store(rate + t, tanh);
            store(power + t, (tanh + 0.5f) * 3.0f);
        }
    }
};

// [(q⁺/r)^p, (q⁻/r)^p], each half of padded width; a query that is not of finite numbers has none
template <class E>
void raised_shares(const Tokens<E>& q, const Piece& piece, int64_t width, float* to) {
    const int64_t row = padded(width);
    const Lengths of(q, piece, width);
    for (int64_t t = 0; t < piece.count; t++, to += 2 * row) {
        const float share = 1 / of.length[t], lost = of.length[t] - of.length[t];
        const vec exponent = fill(of.power[t]);
        each_entry(q.at(piece.b, piece.h, piece.first + t), width, [&](int64_t c, vec value) {
            const vec raised = power_of<E>(value * share, exponent);
            store(to + c, (value > vec{} ? raised : vec{}) + lost);
            store(to + row + c, (value < vec{} ? raised : vec{}) + lost);
        });
    }
}

template <class E>
void query_features(const Tokens<E>& q, const Piece& piece, int64_t width, int feature, float* to) {
    feature == NALA ? raised_shares(q, piece, width, to) : features(q, piece, width, feature, to);
}
template <class E>
void key_features(const Tokens<E>& k, const Piece& piece, int64_t width, int feature, float* to) {
    feature == NALA ? cubes(k, piece, width, to) : features(k, piece, width, feature, to);
}

// Gradients of features, as rows, become those of the piece's tokens
template <class E, class To>
void through_features(
    const Tokens<E>& x, const Piece& piece, int64_t width, int feature, const float* grad, const Tokens<To>& to) {
    const int64_t row = padded(width);
    for (int64_t t = 0; t < piece.count; t++, grad += row) {
        To* dx = to.at(piece.b, piece.h, piece.first + t);
        each_entry(x.at(piece.b, piece.h, piece.first + t), width, [&](int64_t c, vec value) {
            const vec g = load(grad + c);
            const vec below = feature == NONE ? g : (feature == RELU ? vec{} : g * exponential(value));
            const vec result = value > vec{} ? g : below;
            width - c >= W ? store(dx + c, result) : store(dx + c, result, width - c);
        });
    }
}

// The gradient to the half of an entry's sign, with the sign of its size's slope
inline vec of_its_sign(vec value, const float* grad, int64_t row) {
    return value > vec{} ? load(grad) : (value < vec{} ? -load(grad + row) : vec{});
}

template <class E, class To>
void through_cubes(const Tokens<E>& k, const Piece& piece, int64_t width, const float* grad, const Tokens<To>& to) {
    const int64_t row = padded(width);
    for (int64_t t = 0; t < piece.count; t++, grad += 2 * row) {
        To* dk = to.at(piece.b, piece.h, piece.first + t);
        each_entry(k.at(piece.b, piece.h, piece.first + t), width, [&](int64_t c, vec value) {
            const vec result = of_its_sign(value, grad + c, row) * value * value * 3.0f;
            width - c >= W ? store(dk + c, result) : store(dk + c, result, width - c);
        });
    }
}

// With F = (|q|/r)^p: dq = ± G p F / |q| + (q / r) dr, dr = Σ G F (ln(|q|/r) p' - p / r), p' = 3 (1 - tanh² r)
template <class E, class To>
void through_raised_shares(
    const Tokens<E>& q, const Piece& piece, int64_t width, const float* grad, const Tokens<To>& to) {
    const int64_t row = padded(width);
    const Lengths of(q, piece, width);
    Buffer<float> raised(row);
    for (int64_t t = 0; t < piece.count; t++, grad += 2 * row) {
        const E* from = q.at(piece.b, piece.h, piece.first + t);
        To* dq = to.at(piece.b, piece.h, piece.first + t);
        const float share = 1 / of.length[t], p = of.power[t], slope = 3 * (1 - of.rate[t] * of.rate[t]);
        vec losses{};
        each_entry(from, width, [&](int64_t c, vec value) {
            const vec size = (value > vec{} ? value : -value) * share, f = power_of<E>(size, fill(p));
            const vec g = value > vec{} ? load(grad + c) : (value < vec{} ? load(grad + row + c) : vec{});
            losses += f > vec{} ? g * f * (logarithm(size) * slope - p * share) : vec{};
            store(&raised[c], f);
        });
        const float lost = sum(losses) * share;
        each_entry(from, width, [&](int64_t c, vec value) {
            const vec f = load(&raised[c]);
            const vec own = f > vec{} ? of_its_sign(value, grad + c, row) * f * p / (value > vec{} ? value : -value) : vec{};
            const vec result = own + value * lost;
            width - c >= W ? store(dq + c, result) : store(dq + c, result, width - c);
        });
    }
}

template <class E, class To>
void through_query_features(
    const Tokens<E>& q, const Piece& piece, int64_t width, int feature, const float* grad, const Tokens<To>& to) {
    feature == NALA ? through_raised_shares(q, piece, width, grad, to) : through_features(q, piece, width, feature, grad, to);
}
template <class E, class To>
void through_key_features(
    const Tokens<E>& k, const Piece& piece, int64_t width, int feature, const float* grad, const Tokens<To>& to) {
    feature == NALA ? through_cubes(k, piece, width, grad, to) : through_features(k, piece, width, feature, grad, to);
}

// Tables of a rotation that turns pairs of neighbours, (n, c), or (h, n, c) with as many `heads`; see rope.py
struct Turning {
    Numbers cos, sin;
    int64_t heads;
};

// Whether its tables are of `width` channels
inline bool fits(const Shape& shape, int64_t width, const Turning& it) {
    if (!it.cos.data) return !it.sin.data;
    return shape.queries == shape.keys && shape.width % 2 == 0 && (it.heads == 1 || it.heads == shape.heads) &&
           it.sin.data && fits(it.heads * shape.queries * width, it.cos, it.sin);
}

// Rows of a piece's features, several of padded width for each token, turned in place, or turned back; tables are of one
// of these rows, which all turn alike, or of all
template <bool back>
void turn(const Turning& it, const Shape& shape, const Piece& piece, int64_t several, float* rows, bool alike = true) {
    if (!it.cos.data) return;
    const int64_t width = shape.width, row = padded(width), channels = alike ? width : several * width;
    int64_t place = ((it.heads > 1 ? piece.h * shape.queries : 0) + piece.first) * channels;
    for (int64_t t = 0; t < piece.count; t++, place += channels, rows += several * row)
        for (int64_t i = 0; i < several; i++) {
            const float *cos = it.cos.data + place + (alike ? 0 : i * width), *sin = it.sin.data + (cos - it.cos.data);
            each_entry(cos, width, [&](int64_t c, vec cosine) {
                const vec sine = width - c >= W ? load(sin + c) : load(sin + c, width - c);
                float* at = rows + i * row + c;
                const vec x = load(at);
                store(at, x * cosine + (back ? neighbours(x * sine) : neighbours(x) * sine));
            });
        }
}
