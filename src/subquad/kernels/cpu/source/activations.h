// What MLPs have between their products.
#pragma once
#include "tiles.h"

// x Φ(x), with 1 - erf = (a₁ t + … + a₅ t⁵) e^(-y²), t = 1 / (1 + p y), within 1.5e-7 (Abramowitz and Stegun 7.1.26)
inline vec gelu(vec x, float) {
    const vec size = as_float(as_int(x) & 0x7fffffff), t = 1.0f / (size * (0.3275911f * 0.70710678f) + 1.0f);
    vec y = fill(1.061405429f);
    y = y * t - 1.453152027f;
    y = y * t + 1.421413741f;
    y = y * t - 0.284496736f;
    y = y * t + 0.254829592f;
    y = y * t * 0.5f * falling_exponential(x * x * -0.5f);
    return x * (x > vec{} ? 1.0f - y : y);
}

// The same within 7e-5, for what is rounded to bf16: Φ(x) = ½ + x P(x²) up to |x| = 4.5, where it is 0 or 1
inline vec gelu(vec x, bf16) {
    const vec y = min(fill(4.5f), max(fill(-4.5f), x)), u = y * y;
    vec p = fill(3.000004132e-11f);
    p = p * u - 3.283909668e-09f;
    p = p * u + 1.580256166e-07f;
    p = p * u - 4.431682549e-06f;
    p = p * u + 8.120968737e-05f;
    p = p * u - 0.001036253128f;
    p = p * u + 0.009580652867f;
    p = p * u - 0.0659772688f;
    p = p * u + 0.3987085731f;
    return x * (y * p + 0.5f);
}

// GELU, and x σ(a x + b x³), which are its other forms and SiLU
template <class E>
struct Gelu {
    vec operator()(vec x) const { return gelu(x, E{}); }
};
struct Nothing {
    vec operator()(vec x) const { return x; }
};
template <class E>
struct SigmoidWeighted {
    float linear, cubic;
    vec operator()(vec x) const {
        const vec y = x * (x * x * cubic + linear);
        if constexpr (std::is_same_v<E, float>) return x * sigmoid(y);
        else return x / (1.0f + rough_exponential(-y));
    }
};
enum Activation : int32_t { GELU, GELU_TANH, QUICK_GELU, NOTHING, SILU };

// `function(act)` with the GELU of this number, which is known where sums are still in registers
template <class E, class Function>
Answer with_activation(int32_t number, Function&& function) {
    switch (number) {
        case GELU: return function(Gelu<E>{});
        case GELU_TANH: return function(SigmoidWeighted<E>{1.5957691216f, 1.5957691216f * 0.044715f});  // 1 + tanh(u) = 2 σ(2 u)
        case QUICK_GELU: return function(SigmoidWeighted<E>{1.702f, 0.0f});
        default: return MISFIT;
    }
}

// The same behind a projection alone or a filter, where most ask for none
template <class E, class Function>
Answer with_activation_behind(int32_t number, Function&& function) {
    switch (number) {
        case NOTHING: return function(Nothing{});
        case GELU: return function(Gelu<E>{});
        case SILU: return function(SigmoidWeighted<E>{1.0f, 0.0f});
        default: return MISFIT;
    }
}
