// Small matrix products, exponentials and powers on vectors of the compiler's own kind: no intrinsics but for bf16 and for
// the larger of two vectors, so that one source serves every processor that GCC or Clang knows.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include "buffers.h"

// W floats fill a vector register; a tile of R rows and V vectors, its V operands and a scalar fill the register file
#if defined(__AVX512F__)
constexpr int W = 16, V = 4, R = 6;
#elif defined(__AVX__)
constexpr int W = 8, V = 2, R = 6;
#else
constexpr int W = 4, V = 2, R = 5;
#endif
// Loops over registers, which must not stay loops
#if defined(__clang__)
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 64")
#endif
// Functions whose arguments are registers, which compilers leave apart where there are many
#define INLINED inline __attribute__((always_inline))
constexpr int T = 64;  // tokens that are worked on at a time: with their features and maps they stay in the L1 cache

typedef float vec __attribute__((vector_size(W * 4)));
typedef int32_t ivec __attribute__((vector_size(W * 4)));
typedef float loose __attribute__((vector_size(W * 4), aligned(4)));

inline vec load(const float* p) { return *reinterpret_cast<const loose*>(p); }
inline void store(float* p, vec x) { *reinterpret_cast<loose*>(p) = x; }
inline vec fill(float x) { return vec{} + x; }
inline int64_t padded(int64_t n) { return (n + W - 1) / W * W; }
inline vec as_float(ivec x) { vec y; std::memcpy(&y, &x, sizeof y); return y; }
inline ivec as_int(vec x) { ivec y; std::memcpy(&y, &x, sizeof y); return y; }

// The larger and the smaller of two; where one of them is NaN, the second. Of a comparison and a choice compilers make two
// instructions of AVX-512, where one does.
#if defined(__AVX512F__)
inline vec max(vec x, vec y) { return (vec)_mm512_max_ps((__m512)x, (__m512)y); }
inline vec min(vec x, vec y) { return (vec)_mm512_min_ps((__m512)x, (__m512)y); }
#else
inline vec max(vec x, vec y) { return x > y ? x : y; }
inline vec min(vec x, vec y) { return x < y ? x : y; }
#endif

// The first n, zeros beyond
inline vec first_of(vec x, int64_t n) {
    ivec places;
    UNROLLED for (int i = 0; i < W; i++) places[i] = i;
    return places < int32_t(n) ? x : vec{};
}

// Numbers of two vectors, those of the second counted from W
inline vec shuffled(vec first, vec second, ivec which) {
#if defined(__clang__)
    vec y;
    UNROLLED for (int i = 0; i < W; i++) y[i] = which[i] < W ? first[which[i]] : second[which[i] - W];
    return y;
#else
    return __builtin_shuffle(first, second, which);
#endif
}

// The upper half of a float. Tokens may be of these; whatever is computed of them is computed in fp32.
struct bf16 {
    uint16_t bits;
};
typedef uint16_t halves __attribute__((vector_size(W * 2)));
typedef uint16_t loose_halves __attribute__((vector_size(W * 2), aligned(2)));
typedef uint32_t uvec __attribute__((vector_size(W * 4)));

// Each as the lower half of a number; GCC makes several steps of the general form
inline ivec spread(halves x) {
#if defined(__AVX512F__)
    return (ivec)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__)
    return (ivec)_mm256_cvtepu16_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, ivec);
#endif
}

// Bytes as numbers, which GCC takes apart one by one
typedef uint8_t bytes __attribute__((vector_size(W)));
inline ivec spread(bytes x) {
#if defined(__AVX512F__)
    return (ivec)_mm512_cvtepu8_epi32((__m128i)x);
#elif defined(__AVX2__)
    return (ivec)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(&x)));
#else
    return __builtin_convertvector(x, ivec);
#endif
}

inline vec widened(halves x) { return as_float(spread(x) << 16); }

// To the nearest, of two to the even one; NaN stays
inline halves narrowed(vec x) {
    halves y;
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(&y, &rounded, sizeof y);
#else
    uvec bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uvec upper = bits >> 16, rounded = (bits + 0x7fff + (upper & 1)) >> 16;
    y = __builtin_convertvector(x == x ? rounded : upper | 0x40, halves);
#endif
    return y;
}

inline vec load(const bf16* p) { return widened(*reinterpret_cast<const loose_halves*>(p)); }
inline void store(bf16* p, vec x) { *reinterpret_cast<loose_halves*>(p) = narrowed(x); }

inline vec load(const float* p, int64_t n) {
    vec x{};
    std::memcpy(&x, p, std::min<int64_t>(n, W) * sizeof(float));
    return x;
}
inline void store(float* p, vec x, int64_t n) { std::memcpy(p, &x, std::min<int64_t>(n, W) * sizeof(float)); }
inline vec load(const bf16* p, int64_t n) {
    halves x{};
    std::memcpy(&x, p, std::min<int64_t>(n, W) * sizeof(bf16));
    return widened(x);
}
inline void store(bf16* p, vec x, int64_t n) {
    const halves y = narrowed(x);
    std::memcpy(p, &y, std::min<int64_t>(n, W) * sizeof(bf16));
}

// Of `count` numbers, which may be any
template <class From, class To>
inline void copy(const From* from, int64_t count, To* to) {
    int64_t c = 0;
    for (; c + W <= count; c += W) store(to + c, load(from + c));
    if (c < count) store(to + c, load(from + c, count - c), count - c);
}

// The numbers of a vector become one, halves at a time
template <int n, class Vector, class Join>
inline float joined(Vector x, Join&& join) {
    if constexpr (n == 1) {
        float y;
        std::memcpy(&y, &x, sizeof y);
        return y;
    } else if constexpr (n == 2) {
        float y[2];
        std::memcpy(y, &x, sizeof y);
        return join(y[0], y[1]);
    } else {
        typedef float half __attribute__((vector_size(n * 2)));
        half y[2];
        std::memcpy(y, &x, sizeof y);
        return joined<n / 2>(join(y[0], y[1]), join);
    }
}
inline float sum(vec x) {
    return joined<W>(x, [](auto a, auto b) { return a + b; });
}
inline float largest(vec x) {
    return joined<W>(x, [](auto a, auto b) { return a > b ? a : b; });
}

// Numbers of two vectors in turn, `some` of each, from the first or the second half of every four
template <int some>
inline vec in_turn(vec first, vec second, int half) {
    ivec which;
    UNROLLED for (int j = 0; j < W; j++) {
        const int place = j % 4, from = some == 1 ? place / 2 : place % 2;
        const bool is_second = some == 1 ? place % 2 : place / 2;
        which[j] = (is_second ? W : 0) + j - place + 2 * half + from;
    }
    return shuffled(first, second, which);
}

// Blocks of `step` numbers right of the diagonal of blocks twice as wide change places with those left of it
template <int step>
INLINED void exchange(vec (&rows)[W]) {
    if constexpr (step < W) {
        ivec upper, lower;  // which numbers of both rows, those of the second counted from W
        UNROLLED for (int j = 0; j < W; j++) {
            upper[j] = j & step ? W + j - step : j;
            lower[j] = j & step ? W + j : j + step;
        }
        UNROLLED for (int i = 0; i < W; i++) {
            if (i & step) continue;
            const vec first = rows[i], second = rows[i + step];
            rows[i] = shuffled(first, second, upper);
            rows[i + step] = shuffled(first, second, lower);
        }
        exchange<2 * step>(rows);
    }
}

// Vectors as the rows of a square become its columns: four by four first, by shuffles that processors have
INLINED void turn_square(vec (&rows)[W]) {
    UNROLLED for (int i = 0; i < W; i += 4) {
        const vec a = in_turn<1>(rows[i], rows[i + 1], 0), b = in_turn<1>(rows[i], rows[i + 1], 1);
        const vec c = in_turn<1>(rows[i + 2], rows[i + 3], 0), d = in_turn<1>(rows[i + 2], rows[i + 3], 1);
        rows[i] = in_turn<2>(a, c, 0), rows[i + 1] = in_turn<2>(a, c, 1);
        rows[i + 2] = in_turn<2>(b, d, 0), rows[i + 3] = in_turn<2>(b, d, 1);
    }
    exchange<4>(rows);
}

// Elements of four bytes, `height` rows of `width` that lie `apart`, to `width` rows of `height`
template <class Element>
void turn(const Element* from, int64_t apart, int64_t height, int64_t width, Element* to, int64_t to_apart) {
    static_assert(sizeof(Element) == sizeof(float));
    const int64_t squares = height / W * W, across = width / W * W;
    for (int64_t i = 0; i < squares; i += W)
        for (int64_t j = 0; j < across; j += W) {
            vec rows[W];
            UNROLLED for (int k = 0; k < W; k++) std::memcpy(&rows[k], from + (i + k) * apart + j, sizeof(vec));
            turn_square(rows);
            UNROLLED for (int k = 0; k < W; k++) std::memcpy(to + (j + k) * to_apart + i, &rows[k], sizeof(vec));
        }
    for (int64_t i = 0; i < height; i++)
        for (int64_t j = i < squares ? across : 0; j < width; j++) to[j * to_apart + i] = from[i * apart + j];
}

// Each number in the place of the one beside it, two by two
inline vec neighbours(vec x) {
    typedef uint64_t twos __attribute__((vector_size(W * 4)));
    twos both;
    std::memcpy(&both, &x, sizeof both);
    both = both >> 32 | both << 32;
    std::memcpy(&x, &both, sizeof x);
    return x;
}

// What products are computed of: numbers; or, of tokens in bf16 where the processor multiplies them two by two, pairs of
// neighbours along the depth, so that there is half as much of it.
struct pair {
    bf16 first, second;
};
inline void accumulate(vec& sums, float x, vec line) { sums += x * line; }
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
typedef ivec pairs;
template <class E>
using Operand = std::conditional_t<std::is_same_v<E, bf16>, pair, float>;
inline void accumulate(vec& sums, pair x, pairs line) {
    int32_t both;
    std::memcpy(&both, &x, sizeof both);
    sums = (vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)line, (__m512bh)_mm512_set1_epi32(both));
}
inline pairs load(const pair* p) {
    pairs x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
#else
template <class E>
using Operand = float;
#endif

// Whole numbers, of |x| < 2^22, and numbers times 2^whole, from -126 to 127: by an instruction where there is one
#if defined(__AVX512F__)
inline vec nearest(vec x) { return (vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vec shifted(vec x, vec whole) { return (vec)_mm512_scalef_ps((__m512)x, (__m512)whole); }
#else
inline vec nearest(vec x) { const vec magic = fill(12582912.0f); return (x + magic) - magic; }
inline vec shifted(vec x, vec whole) { return x * as_float((__builtin_convertvector(whole, ivec) + 127) << 23); }
#endif

// 2^whole e^rest for whole numbers from -126 to 127 and rests within ± ln 2 / 2, to 1 ulp
inline vec scaled_exponential(vec whole, vec rest) {
    vec y = fill(1.0f / 720);
    y = y * rest + 1.0f / 120;
    y = y * rest + 1.0f / 24;
    y = y * rest + 1.0f / 6;
    y = y * rest + 0.5f;
    y = y * rest + 1.0f;
    y = y * rest + 1.0f;
    return shifted(y, whole);
}

// e^x for x up to 0, 1.6e-38 below -87; NaN stays NaN
inline vec falling_exponential(vec x) {
    const vec y = max(fill(-87.0f), x), whole = nearest(y * 1.442695040888963f);
    return scaled_exponential(whole, (y - whole * 0.693359375f) + whole * 2.12194440e-4f);  // ln 2 in two parts
}

// e^x, 0 below the smallest normal number; NaN stays NaN
inline vec exponential(vec x) {
    const vec y = min(fill(88.0f), x), whole = nearest(y * 1.442695040888963f);
    const vec value = scaled_exponential(whole, (y - whole * 0.693359375f) + whole * 2.12194440e-4f);
    return x < fill(-87.0f) ? vec{} : value;
}

#if defined(__AVX512F__)
// 2^x up to 2^127, to 3e-6 where it is a normal number, and 1 at 0; NaN stays NaN
inline vec rough_power_of_two(vec x) {
    const vec y = max(fill(-200.0f), min(fill(127.0f), x)), whole = nearest(y), rest = y - whole;
    vec power = fill(0.00958285292f);
    power = power * rest + 0.0559064253f;
    power = power * rest + 0.240240986f;
    power = power * rest + 0.693124193f;
    return shifted(power * rest + 1.0f, whole);
}
#endif

// e^x up to e^88, to 3e-6 where it is a normal number, and 1 at 0; NaN stays NaN. A thousandth of what is rounded off
// where it becomes bf16, by half as many steps.
inline vec rough_exponential(vec x) {
#if defined(__AVX512F__)
    return rough_power_of_two(x * 1.442695040888963f);
#else
    return exponential(x);
#endif
}

inline vec sigmoid(vec x) { return 1.0f / (1.0f + exponential(-x)); }
inline vec silu(vec x) { return x * sigmoid(x); }
inline float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }
inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// ln m of numbers m · 2^whole, which are normal and above 0, with m from sqrt ½ to sqrt 2
inline vec mantissa_logarithm(vec x, vec& whole) {
    const ivec bits = as_int(x);
    vec m = as_float((bits & 0x007fffff) | 0x3f800000);
    const ivec above = m > fill(1.41421356f);  // -1 where true
    m = above ? m * 0.5f : m;
    whole = __builtin_convertvector((bits >> 23) - 127 - above, vec);
    const vec s = (m - 1.0f) / (m + 1.0f), s2 = s * s;  // ln m = 2 artanh s
    vec log = fill(2.0f / 9);
    log = log * s2 + 2.0f / 7;
    log = log * s2 + 2.0f / 5;
    log = log * s2 + 2.0f / 3;
    log = log * s2 + 2.0f;
    return log * s;
}

// ln x for normal numbers above 0
inline vec logarithm(vec x) {
    vec whole;
    const vec part = mantissa_logarithm(x, whole);
    return part + whole * 0.693147180559945f;
}

// |x|^p for p > 0, to some ulps: p log2|x| with the whole part of the logarithm kept apart
inline vec power(vec x, vec p) {
    const vec size = as_float(as_int(x) & 0x7fffffff), smallest = fill(1.17549435e-38f);
    vec e;
    const vec log = mantissa_logarithm(size < smallest ? smallest : size, e), product = p * e;
    const vec whole = nearest(max(fill(-126.0f), product < fill(127.0f) ? product : fill(127.0f)));
    // (p e - whole) is exact enough where it matters: both are near each other
    vec part = (product - whole) + p * (log * 1.442695040888963f);
    const vec more = nearest(part);
    const vec bounded = whole + more, limit = fill(127.0f), floor = fill(-126.0f);
    const vec y = scaled_exponential(
        bounded > limit ? limit : (bounded < floor ? floor : bounded), (part - more) * 0.693147180559945f);
    // what is infinite stays so, that no number is made of it
    return (size < smallest) | (bounded < floor) ? vec{} : (size > fill(3.40282347e38f) ? size : y);
}

// The same to 2e-5 for p up to 8, for what becomes bf16: in half as many steps and without a division
inline vec rough_power(vec x, vec p) {
#if defined(__AVX512F__)
    const vec size = as_float(as_int(x) & 0x7fffffff), smallest = fill(1.17549435e-38f);
    const vec m = (vec)_mm512_getmant_ps((__m512)size, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_zero), rest = m - 1.0f;
    const vec e = __builtin_convertvector((as_int(size) - as_int(m)) >> 23, vec);
    vec log = fill(-0.145179270f);  // log2(1 + rest) / rest, from -1/4 to 1/2
    log = log * rest + 0.292726697f;
    log = log * rest - 0.371069282f;
    log = log * rest + 0.481645584f;
    log = log * rest - 0.721094549f;
    log = log * rest + 1.442681551f;
    const vec y = p * (log * rest + e);
    return (size < smallest) | (y < fill(-126.0f)) ? vec{} : (size > fill(3.40282347e38f) ? size : rough_power_of_two(y));
#else
    return power(x, p);
#endif
}

// |x|^p of tokens' features, as exact as what products are computed of
template <class E>
vec power_of(vec x, vec p) {
    if constexpr (std::is_same_v<Operand<E>, float>) return power(x, p);
    else return rough_power(x, p);
}
