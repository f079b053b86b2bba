// Circulant attention, by Fourier transforms of W channels at a time: see ops/circulant_formula.py.
#pragma once
#include "tokens.h"

// e^(-2πi j / length) for all j, and the factors that a transform goes by
struct Waves {
    int64_t length;
    Buffer<float> cosines, sines;
    Buffer<int64_t> factors;

    explicit Waves(int64_t length) : length(length), cosines(length), sines(length) {
        for (int64_t j = 0; j < length; j++) {
            const double angle = 6.283185307179586 * double(j) / double(length);
            cosines[j] = float(std::cos(angle)), sines[j] = float(std::sin(angle));
        }
        int64_t rest = length;
        for (int64_t factor : {4, 2, 3})
            for (; rest % factor == 0; rest /= factor) factors.push_back(factor);
        for (int64_t factor = 5; rest > 1; factor += 2)
            for (; rest % factor == 0; rest /= factor) factors.push_back(factor);
    }
};

// Complex numbers of W channels each: real parts and, W numbers further, imaginary ones
constexpr int64_t BOTH = 2 * W;
struct Complex {
    vec re, im;
};
inline Complex complex_at(const float* p) { return {load(p), load(p + W)}; }
inline void put(float* p, Complex x) { store(p, x.re), store(p + W, x.im); }
inline Complex operator+(Complex x, Complex y) { return {x.re + y.re, x.im + y.im}; }
inline Complex operator-(Complex x, Complex y) { return {x.re - y.re, x.im - y.im}; }
inline Complex times_i(Complex x) { return {-x.im, x.re}; }
// x e^(-iφ) of the cosine and sine of φ
inline Complex turned_by(Complex x, float c, float s) { return {x.re * c + x.im * s, x.im * c - x.re * s}; }

// The transform of p numbers that lie `apart`, p odd: `to(k, b)` is told of each. Sums and differences of a number and its
// opposite one halve the products twice.
template <class To>
void odd_transform(const Waves& waves, int64_t p, const float* from, int64_t apart, float* room, To&& to) {
    const int64_t half = (p - 1) / 2, stride = waves.length / p;
    const Complex first = complex_at(from);
    Complex all = first;
    for (int64_t j = 1; j <= half; j++) {
        const Complex a = complex_at(from + j * apart), b = complex_at(from + (p - j) * apart), both = a + b;
        put(room + 2 * (j - 1) * BOTH, both), put(room + (2 * j - 1) * BOTH, a - b);
        all = all + both;
    }
    to(0, all);
    for (int64_t k = 1; k <= half; k++) {
        Complex even = first, odd{};
        for (int64_t j = 1, at = k; j <= half; j++, at = at + k >= p ? at + k - p : at + k) {
            const Complex both = complex_at(room + 2 * (j - 1) * BOTH), less = complex_at(room + (2 * j - 1) * BOTH);
            const float c = waves.cosines[at * stride], s = waves.sines[at * stride];
            even.re += both.re * c, even.im += both.im * c;
            odd.re += less.re * s, odd.im += less.im * s;
        }
        to(k, even - times_i(odd)), to(p - k, even + times_i(odd));
    }
}

// The transform of `waves.length` numbers side by side, one factor p after the other (Stockham's, of decimation in
// frequency): groups of p are transformed, turned, and put where the next step reads them. `other` has as much room, and
// so has `room`. Gives where it is in the end.
inline float* transform(const Waves& waves, float* x, float* other, float* room) {
    int64_t count = waves.length, group = 1;
    for (const int64_t p : waves.factors) {
        const int64_t m = count / p, apart = group * m * BOTH, turns = waves.length / count;
        for (int64_t j = 0; j < m; j++) {
            const float *cosines = waves.cosines.data(), *sines = waves.sines.data();
            for (int64_t q = 0; q < group; q++) {
                const float* from = x + (q + group * j) * BOTH;
                float* to = other + (q + group * p * j) * BOTH;
                const auto turned = [&](int64_t k, Complex b) {
                    const int64_t at = j * k * turns;
                    put(to + group * k * BOTH, at ? turned_by(b, cosines[at], sines[at]) : b);
                };
                if (p == 2) {
                    const Complex a = complex_at(from), b = complex_at(from + apart);
                    turned(0, a + b), turned(1, a - b);
                } else if (p == 4) {
                    const Complex a = complex_at(from), b = complex_at(from + apart);
                    const Complex c = complex_at(from + 2 * apart), d = complex_at(from + 3 * apart);
                    const Complex even = a + c, odd = b + d, less = a - c, other_less = times_i(b - d);
                    turned(0, even + odd), turned(1, less - other_less);
                    turned(2, even - odd), turned(3, less + other_less);
                } else {
                    odd_transform(waves, p, from, apart, room, turned);
                }
            }
        }
        std::swap(x, other);
        count = m, group *= p;
    }
    return x;
}

// Maps of W channels, and what is worked on them with
struct Torus {
    const int64_t height, width, places = height * width;
    Waves rows{height}, columns{width};
    int64_t longest = std::max(height, width);

    struct Room {
        Buffer<float> map, line, other, more;
    };
    Room room() const {
        const auto numbers = [](int64_t count) { return Buffer<float>(count * BOTH); };
        return {numbers(places), numbers(longest), numbers(longest), numbers(longest)};
    }

    void transform_map(Room& room) const {
        for (int64_t y = 0; y < height; y++) {
            float* line = &room.map[y * width * BOTH];
            const float* done = transform(columns, line, room.other.data(), room.more.data());
            if (done != line) std::memcpy(line, done, width * BOTH * sizeof(float));
        }
        for (int64_t x = 0; x < width; x++) {
            float* top = &room.map[x * BOTH];
            for (int64_t y = 0; y < height; y++)
                std::memcpy(&room.line[y * BOTH], top + y * width * BOTH, BOTH * sizeof(float));
            const float* done = transform(rows, room.line.data(), room.other.data(), room.more.data());
            for (int64_t y = 0; y < height; y++)
                std::memcpy(top + y * width * BOTH, done + y * BOTH, BOTH * sizeof(float));
        }
    }

    // As real parts Σ_i x_i y_(i+δ) for each offset δ, or Σ_i x_i y_(δ-i), of functions of places. The transform of both is
    // that of x + i y, told apart by its symmetry; a real one is transformed back by its conjugate's.
    template <bool correlated, class X, class Y>
    void combine(Room& room, X&& x_of, Y&& y_of) const {
        vec most_x{}, most_y{};
        for (int64_t i = 0; i < places; i++) {
            const vec x = x_of(i), y = y_of(i);
            most_x = max(x < vec{} ? -x : x, most_x), most_y = max(y < vec{} ? -y : y, most_y);
        }
        // errors are as large as the larger of both makes them: by powers of two, exactly, each is brought to 1 to 2
        const vec x_scale = to_one(most_x), y_scale = to_one(most_y);
        for (int64_t i = 0; i < places; i++) put(&room.map[i * BOTH], {x_of(i) * x_scale, y_of(i) * y_scale});
        combine_map<correlated>(room);
        for (int64_t i = 0; i < places; i++) store(real(room, i), load(real(room, i)) / x_scale / y_scale);
    }

    // The power of two that brings numbers, of which `most` is the largest, to 1 to 2; of nothing it may be any
    static vec to_one(vec most) {
        constexpr int32_t one = 1 << 23;
        const auto exponent = as_int(most) & 0x7f800000;
        return as_float(254 * one - (exponent < 253 * one ? exponent : exponent * 0 + 253 * one));
    }

    template <bool correlated>
    void combine_map(Room& room) const {
        transform_map(room);
        const float share = 0.25f / float(places);
        for (int64_t y = 0; y < height; y++)
            for (int64_t x = 0; x < width; x++) {
                const int64_t at = y * width + x, opposite = (y ? height - y : 0) * width + (x ? width - x : 0);
                if (at > opposite) continue;
                const Complex a = complex_at(&room.map[at * BOTH]), b = complex_at(&room.map[opposite * BOTH]);
                const Complex one{(a.re + b.re) * share, (a.im - b.im) * share}, two{a.im + b.im, b.re - a.re};
                // conjugates of conj(X) Y, and of X Y
                const Complex product = correlated ? Complex{one.re * two.re + one.im * two.im, one.im * two.re - one.re * two.im}
                                                   : Complex{one.re * two.re - one.im * two.im, -one.im * two.re - one.re * two.im};
                put(&room.map[opposite * BOTH], {product.re, -product.im});
                put(&room.map[at * BOTH], product);
            }
        transform_map(room);
    }

    float* real(Room& room, int64_t place) const { return &room.map[place * BOTH]; }

    // The softmax over all offsets of the real parts times n^-½, beside each other in `weights`
    void softmax(Room& room, float* weights) const {
        const float scale = 1 / std::sqrt(float(places));
        vec most = fill(-INFINITY), total{};
        for (int64_t i = 0; i < places; i++) {
            const vec score = load(real(room, i));
            most = score > most ? score : most;
        }
        for (int64_t i = 0; i < places; i++) {
            // subtracted first: what a fused product leaves of the rounding of large scores is more than e^x takes
            const vec weight = exponential((load(real(room, i)) - most) * scale);
            store(weights + i * W, weight);
            total += weight;
        }
        for (int64_t i = 0; i < places; i++) store(weights + i * W, load(weights + i * W) / total);
    }
};

// Up to W channels of a head of an image
template <class E>
struct Channels {
    const Tokens<E>& x;
    int64_t b, h, first;
    int64_t count() const { return std::min<int64_t>(W, x.width - first); }
    vec operator()(int64_t place) const {
        const E* from = x.at(b, h, place) + first;
        return count() == W ? load(from) : load(from, count());
    }
    void write(int64_t place, vec value) const {
        E* to = x.at(b, h, place) + first;
        count() == W ? store(to, value) : store(to, value, count());
    }
};

// Numbers of W channels side by side
struct Vectors {
    const float* data;
    vec operator()(int64_t place) const { return load(data + place * W); }
};

template <class Function>
void each_channels(const Shape& shape, int me, int all, Function&& function) {
    const int64_t parts = (shape.width + W - 1) / W, total = shape.batch * shape.heads * parts;
    for (int64_t i = total * me / all; i < total * (me + 1) / all; i++)
        function(i / parts / shape.heads, i / parts % shape.heads, i % parts * W);
}

// Times SiLU of a gate, where there is one
template <class E>
Answer circulant_mixer_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<E> g, int64_t height, int64_t width, Tokens<E> out) {
    if (height < 1 || width < 1 || height * width != shape.queries || shape.queries != shape.keys) return MISFIT;
    if (!fits(shape, shape.queries, q, k, v, g, out)) return MISFIT;
    const Torus torus{height, width};
    parallel(shape.threads, [&](int me, int all) {
        Torus::Room room = torus.room();
        Buffer<float> weights(torus.places * W);
        each_channels(shape, me, all, [&](int64_t b, int64_t h, int64_t first) {
            const Channels<E> of_q{q, b, h, first}, of_k{k, b, h, first}, of_v{v, b, h, first};
            const Channels<E> of_g{g, b, h, first}, of_out{out, b, h, first};
            torus.combine<true>(room, of_q, of_k);
            torus.softmax(room, weights.data());
            torus.combine<true>(room, Vectors{weights.data()}, of_v);
            for (int64_t i = 0; i < torus.places; i++) {
                const vec value = load(torus.real(room, i));
                of_out.write(i, g.data ? value * silu(of_g(i)) : value);
            }
        });
    });
    return DONE;
}

template <class E>
Answer circulant_attention_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<E> out, int64_t height, int64_t width) {
    return circulant_mixer_of<E>(shape, q, k, v, {}, height, width, out);
}

KERNEL(
    circulant_attention,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyTokens out, int64_t height, int64_t width),
    (shape, q, k, v, out, height, width))

// dw_δ = Σ_i g_i v_(i+δ), da = w (dw - Σ w dw) n^-½, dv_j = Σ_δ w_δ g_(j-δ), dk_j = Σ_δ da_δ q_(j-δ), dq_i = Σ_δ da_δ k_(i+δ)
template <class E>
Answer circulant_attention_gradient_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<E> grad, Tokens<E> dq, Tokens<E> dk, Tokens<E> dv,
    int64_t height, int64_t width) {
    if (height < 1 || width < 1 || height * width != shape.queries || shape.queries != shape.keys) return MISFIT;
    if (!fits(shape, shape.queries, q, k, v, grad, dq, dk, dv)) return MISFIT;
    const Torus torus{height, width};
    parallel(shape.threads, [&](int me, int all) {
        Torus::Room room = torus.room();
        Buffer<float> weights(torus.places * W), slopes(torus.places * W);
        each_channels(shape, me, all, [&](int64_t b, int64_t h, int64_t first) {
            const Channels<E> of_q{q, b, h, first}, of_k{k, b, h, first}, of_grad{grad, b, h, first};
            const Vectors weight{weights.data()}, slope{slopes.data()};
            const auto give = [&](const Tokens<E>& x) {
                const Channels<E> to{x, b, h, first};
                for (int64_t i = 0; i < torus.places; i++) to.write(i, load(torus.real(room, i)));
            };
            torus.combine<true>(room, of_q, of_k);
            torus.softmax(room, weights.data());
            torus.combine<true>(room, of_grad, Channels<E>{v, b, h, first});
            vec mean{};
            for (int64_t i = 0; i < torus.places; i++) mean += weight(i) * load(torus.real(room, i));
            const float scale = 1 / std::sqrt(float(torus.places));
            for (int64_t i = 0; i < torus.places; i++)
                store(&slopes[i * W], weight(i) * (load(torus.real(room, i)) - mean) * scale);
            torus.combine<false>(room, weight, of_grad);
            give(dv);
            torus.combine<false>(room, slope, of_q);
            give(dk);
            torus.combine<true>(room, slope, of_k);
            give(dq);
        });
    });
    return DONE;
}

KERNEL(
    circulant_attention_gradient,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyTokens grad, AnyTokens dq, AnyTokens dk, AnyTokens dv,
     int64_t height, int64_t width),
    (shape, q, k, v, grad, dq, dk, dv, height, width))

KERNEL(
    circulant_mixer,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyTokens g, int64_t height, int64_t width, AnyTokens out),
    (shape, q, k, v, g, height, width, out))
