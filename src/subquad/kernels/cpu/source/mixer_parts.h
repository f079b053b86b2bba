// What calls that compute all that lies between a layer's projections have in common, for the mechanisms of attention/:
// what a mechanism's file computes one after the other. What parts have of each other is fp32 and never leaves the library.
#pragma once
#include "branches.h"
#include "local.h"

// A local branch as a module has it: filters (count, size, size), biases (count). Channel c has filter c / each % count.
struct AnyFilters {
    AnyNumbers weight, bias;
    int64_t count, each, size;
};

struct Filters {
    Parameter weight, bias;
    int64_t count, each, size;
    Filters(const AnyFilters& x) : weight(x.weight), bias(x.bias), count(x.count), each(x.each), size(x.size) {}
};

inline bool fits(const Shape& shape, const Filters& it) {
    return it.weight.data && it.count > 0 && it.each > 0 && it.size % 2 == 1 && fits(it.count, it.bias) &&
           shape.heads * shape.width % (it.count * it.each) == 0 && fits(it.count * it.size * it.size, it.weight);
}

// out ← (out + the local branch of v) · g
template <class E>
Answer finish(
    const Shape& shape, const Tokens<E>& v, const Tokens<E>& g, const Tokens<E>& out, const Map& map,
    const Filters& filters) {
    const int64_t channels = shape.heads * shape.width, taps = filters.size * filters.size;
    Buffer<float> weight(taps * channels), bias(filters.bias.data ? channels : 0);
    for (int64_t c = 0; c < channels; c++) {
        const int64_t filter = c / filters.each % filters.count;
        for (int64_t i = 0; i < taps; i++) weight[i * channels + c] = filters.weight.data[filter * taps + i];
        if (filters.bias.data) bias[c] = filters.bias.data[filter];
    }
    const Numbers of_channels{weight.data(), taps * channels}, more{bias.empty() ? nullptr : bias.data(), channels};
    return add_branch<E>(shape, v, out, g, out, map, of_channels, 0, more, int32_t(filters.size));
}

// Tokens (b, h, count, d) that lie side by side
inline Tokens<float> few_tokens(const Shape& shape, int64_t count, Buffer<float>& room) {
    const int64_t head = count * shape.width;
    room.resize(shape.batch * shape.heads * head);
    return {room.data(), shape.heads * head, head, shape.width, shape.batch, shape.heads, count, shape.width};
}
inline Numbers numbers_of(Buffer<float>& room) { return {room.data(), int64_t(room.size())}; }
