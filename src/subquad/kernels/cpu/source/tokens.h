// Tokens (b, h, n, d) as they lie in memory, and how the work on them is shared among threads.
#pragma once
#ifdef _OPENMP
#include <omp.h>
#endif
#include "panels.h"

// Distances in numbers; channels of a head lie side by side. Elements are float or bf16, all of a call's tokens alike.
template <class Element>
struct Tokens {
    Element* data;
    int64_t batch, head, token;
    int64_t images, heads, count, width;  // how many there are
    Element* at(int64_t b, int64_t h, int64_t t) const { return data + b * batch + h * head + t * token; }
};

// As they are handed over
struct AnyTokens : Tokens<void> {
    template <class Element>
    operator Tokens<Element>() const {
        return {static_cast<Element*>(data), batch, head, token, images, heads, count, width};
    }
};

struct Shape {
    int64_t batch, heads, queries, keys, width;
    int32_t threads;
};

struct Numbers {  // fp32, side by side: parameters and states
    float* data;
    int64_t count;
};

// Parameters as a module has them, side by side: bf16 where they are `halves`, else fp32. They are widened at each call:
// what was kept of them would not know that they have changed.
struct AnyNumbers {
    const void* data;
    int64_t count;
    int32_t halves;
};

struct Parameter : Numbers {
    Buffer<float> room;
    Parameter(const AnyNumbers& x) : Numbers{static_cast<float*>(const_cast<void*>(x.data)), x.count} {
        if (!x.data || !x.halves) return;
        room.resize(count);
        copy(static_cast<const bf16*>(x.data), count, data = room.data());
    }
    Parameter(const Parameter&) = delete;
};

// What every kernel gives back: lengths travel with the pointers, and nothing is touched where they do not fit.
enum Answer : int32_t { DONE, MISFIT };

// What is called from outside: `name`_float and `name`_bf16, by the elements of the tokens. The source is compiled for
// both at the same time, which takes half as long.
#ifndef ELEMENT
#define ELEMENT float
#endif
#define KERNEL(name, parameters, arguments) KERNEL_OF(name, ELEMENT, parameters, arguments)
#define KERNEL_OF(name, element, parameters, arguments) KERNEL_NAMED(name, element, parameters, arguments)
#define KERNEL_NAMED(name, element, parameters, arguments) \
    extern "C" Answer name##_##element parameters { return name##_of<element> arguments; } \
    extern "C" Answer name##_##element##_unpacked(char* memory, const int64_t* places) { \
        return unpacked(name##_##element, memory, places, counted(name##_##element)); \
    }

// `name`_`element`_unpacked finds its arguments, each aligned, at these places of a memory
template <class... Arguments, size_t... i>
Answer unpacked(Answer (*kernel)(Arguments...), char* memory, const int64_t* places, std::index_sequence<i...>) {
    return kernel(*reinterpret_cast<Arguments*>(memory + places[i])...);
}
template <class... Arguments>
constexpr std::index_sequence_for<Arguments...> counted(Answer (*)(Arguments...)) { return {}; }

// Whether these are `tokens` tokens of each head, or are not there
template <class Element>
bool fits(const Shape& shape, int64_t tokens, const Tokens<Element>& x) {
    return !x.data || (x.images == shape.batch && x.heads == shape.heads && x.count == tokens && x.width == shape.width);
}
template <class Element, class... Rest>
bool fits(const Shape& shape, int64_t tokens, const Tokens<Element>& x, const Rest&... rest) {
    return fits(shape, tokens, x) && fits(shape, tokens, rest...);
}

// Whether these are `count` numbers, or are not there
inline bool fits(int64_t count, const Numbers& x) { return !x.data || x.count == count; }
template <class... Rest>
bool fits(int64_t count, const Numbers& x, const Rest&... rest) { return fits(count, x) && fits(count, rest...); }

// A piece of work: some tokens of one head of one image.
struct Piece {
    int64_t index;  // of the head among all heads of the batch
    int64_t b, h, first, count;
};

// A thread's zeroed room for each head that it works on, to be summed over threads.
struct Room {
    int64_t first = 0, last = -1;
    Buffer<float> data;
};

// A thread's share of `parallel`
template <class Function>
void shared(Function& function, int me, int all) {
#if defined(HAS_SQUARES)
    const WhileSquaresStay here;
#endif
    function(me, all);
}

// Calls of `parallel` on all threads; `barrier` inside waits for all of them.
template <class Function>
void parallel(int threads, Function&& function) {
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
    shared(function, omp_get_thread_num(), omp_get_num_threads());
#else
    shared(function, 0, 1);
#endif
}

inline void barrier() {
#ifdef _OPENMP
#pragma omp barrier
#endif
}

// The pieces of thread `me` of `all`, in order: of each head `tokens` tokens, T at a time.
template <class Function>
void pieces(const Shape& shape, int64_t tokens, int me, int all, Function&& function) {
    const int64_t parts = (tokens + T - 1) / T, total = shape.batch * shape.heads * parts;
    for (int64_t i = total * me / all; i < total * (me + 1) / all; i++) {
        const int64_t index = i / parts, first = i % parts * T;
        function(Piece{index, index / shape.heads, index % shape.heads, first, std::min<int64_t>(T, tokens - first)});
    }
}

// The pieces of thread `me` of `all`, of tokens that are no heads': each thread has as many, to a multiple of `step`, so that
// few tokens keep all of them busy; and so has each piece, of `most` tokens or fewer, none of which is narrow then.
template <int step = W, class Function>
void even_pieces(int64_t tokens, int me, int all, Function&& function, int64_t most = T) {
    const int64_t parts = (tokens + step - 1) / step, from = parts * me / all, mine = parts * (me + 1) / all - from;
    const int64_t count = (mine + most / step - 1) / (most / step);
    for (int64_t i = 0; i < count; i++) {
        const int64_t first = (from + mine * i / count) * step, behind = (from + mine * (i + 1) / count) * step;
        function(Piece{0, 0, 0, first, std::min(tokens, behind) - first});
    }
}

// How many of some tokens, whole vectors of them, are as many for each of `all` threads; the rest is shared by channels,
// where a vector's `cost` in multiply-adds is worth waiting for each other.
inline int64_t for_each_thread(int64_t tokens, int64_t cost, int all) {
    constexpr int64_t worth = 1 << 20;
    return all == 1 || cost < worth ? tokens : tokens / (W * all) * (W * all);
}

// The pieces of all tokens from `first` on, which every thread goes through
template <class Function>
void shared_pieces(int64_t first, int64_t tokens, Function&& function) {
    for (; first < tokens; first += T) function(Piece{0, 0, 0, first, std::min<int64_t>(T, tokens - first)});
}

// Thread `me`'s rows of a product that all threads share: multiples of R, so that those of pairs are even
struct Share {
    int64_t from, count;
    Share(int64_t rows, int me, int all) {
        const int64_t parts = (rows + R - 1) / R;
        from = std::min(rows, parts * me / all * R);
        count = std::min(rows, parts * (me + 1) / all * R) - from;
    }
};

// Sums over the keys: `gather(piece, sums)` adds to `size` numbers of its head, on every thread to its own;
// afterwards, on all threads, `finish(index, rooms)` for each head, where `each_sum` goes through the threads' sums.
struct Sums {
    int64_t size;
    Buffer<Room> rooms;
    Sums(int threads, int64_t size) : size(size), rooms(threads) {}

    float* of(int me, int64_t index) {
        Room& room = rooms[me];
        return index < room.first || index > room.last ? nullptr : room.data.data() + (index - room.first) * size;
    }

    // Zeroes for the heads that thread `me` of `all` works on; `gather` does that itself
    bool begin(const Shape& shape, int64_t tokens, int me, int all) {
        const int64_t parts = (tokens + T - 1) / T, total = shape.batch * shape.heads * parts;
        const int64_t low = total * me / all, high = total * (me + 1) / all;
        if (low == high) return false;
        rooms[me].first = low / parts, rooms[me].last = (high - 1) / parts;
        rooms[me].data.assign((rooms[me].last - rooms[me].first + 1) * size, 0.0f);
        return true;
    }

    // Of tokens that are no heads': those of one image are shared evenly
    template <class Gather>
    void gather_images(const Shape& shape, int64_t tokens, int me, int all, Gather&& each) {
        if (shape.batch != 1) return gather(shape, tokens, me, all, each);
        rooms[me] = {0, 0, Buffer<float>(size)};
        even_pieces(tokens, me, all, [&](const Piece& piece) { each(piece, rooms[me].data.data()); });
        barrier();
    }

    template <class Gather>
    void gather(const Shape& shape, int64_t tokens, int me, int all, Gather&& gather) {
        if (begin(shape, tokens, me, all))
            pieces(shape, tokens, me, all, [&](const Piece& piece) { gather(piece, of(me, piece.index)); });
        barrier();
    }

    template <class Function>
    void each_sum(int64_t index, Function&& function) {
        for (size_t thread = 0; thread < rooms.size(); thread++)
            if (const float* sums = of(int(thread), index)) function(sums);
    }
};

// `function(index)` for the heads of all images, shared among threads.
template <class Function>
void heads(const Shape& shape, int me, int all, Function&& function) {
    for (int64_t i = me; i < shape.batch * shape.heads; i += all) function(i);
    barrier();
}

// Rows of floats of `count` tokens that lie `apart`, with zeros behind their `width`
template <class E>
Rows widened_to(const E* first, int64_t apart, int64_t count, int64_t width, Buffer<float>& room) {
    const int64_t row = padded(width);
    if (int64_t(room.size()) < count * row) room.resize(std::max<int64_t>(T, count) * row);
    for (int64_t t = 0; t < count; t++) {
        const E* from = first + t * apart;
        float* to = &room[t * row];
        int64_t c = 0;
        for (; c + W <= width; c += W) store(to + c, load(from + c));
        if (c < width) store(to + c, load(from + c, width - c));
    }
    return {room.data(), row};
}

// Values of a piece as rows of `padded` width: where they lie, or in `room`
template <class E>
Rows values_of(const Tokens<E>& v, const Piece& piece, int64_t width, Buffer<float>& room) {
    E* first = v.at(piece.b, piece.h, piece.first);
    if constexpr (std::is_same_v<E, float>)
        if (width % W == 0) return {first, v.token};
    return widened_to(first, v.token, piece.count, width, room);
}

// `count` tokens that lie `apart` as the left side of a product
inline Strided matrix_of(const float* first, int64_t apart, int64_t, int64_t, Buffer<float>&) {
    return {first, apart, 1};
}
inline Strided matrix_of(const bf16* first, int64_t apart, int64_t count, int64_t width, Buffer<float>& room) {
    const Rows rows = widened_to(first, apart, count, width, room);
    return {rows.data, rows.row, 1};
}
template <class E>
Strided matrix_of(const Tokens<E>& x, const Piece& piece, int64_t width, Buffer<float>& room) {
    return matrix_of(x.at(piece.b, piece.h, piece.first), x.token, piece.count, width, room);
}

// A piece's tokens as operands of which a column is the depth, and as those of which a row is: where they lie, or in `room`
template <class E>
Panel<float> packed(const Tokens<E>& x, const Piece& piece, int64_t width, Buffer<float>& room) {
    const Rows rows = values_of(x, piece, width, room);
    return {rows.data, rows.row};
}
inline Panel<pair> packed(const Tokens<bf16>& x, const Piece& piece, int64_t width, Buffer<pair>& room) {
    room.resize(std::max<int64_t>(room.size(), deep<pair>(T) * padded(width)));
    pack(x.at(piece.b, piece.h, piece.first), x.token, piece.count, width, room.data());
    return {room.data(), padded(width)};
}
template <class E>
Matrix<float> lowered(const Tokens<E>& x, const Piece& piece, int64_t width, Buffer<float>& room) {
    return matrix_of(x, piece, width, room);
}
inline Matrix<pair> lowered(const Tokens<bf16>& x, const Piece& piece, int64_t width, Buffer<pair>& room) {
    const bf16* first = x.at(piece.b, piece.h, piece.first);
    if (width % 2 == 0 && x.token % 2 == 0) return {reinterpret_cast<const pair*>(first), x.token / 2, 1};
    return lowered(first, x.token, piece.count, width, room);
}

// Rows of padded width that `finish` fills, as the piece's tokens of `width`: in place, or by way of `room`.
template <class E, class Finish>
void to_tokens(const Tokens<E>& out, const Piece& piece, int64_t width, Buffer<float>& room, Finish&& finish) {
    const int64_t row = padded(width);
    E* first = out.at(piece.b, piece.h, piece.first);
    if constexpr (std::is_same_v<E, float>)
        if (width % W == 0) return finish(Rows{first, out.token});
    if (int64_t(room.size()) < T * row) room.resize(T * row);
    finish(Rows{room.data(), row});
    for (int64_t t = 0; t < piece.count; t++) copy(&room[t * row], width, first + t * out.token);
}

inline void add_rows(const float* x, int64_t row, int64_t count, int64_t width, float* sums) {
    for (int64_t c = 0; c < width; c += W) {
        vec total{};
        for (int64_t t = 0; t < count; t++) total += load(x + t * row + c);
        // added at the end, as a product's sums are: a long sum rounds once a piece
        store(sums + c, load(sums + c) + total);
    }
}

inline float product(const float* x, const float* y, int64_t width) {
    vec total{};
    for (int64_t c = 0; c < width; c += W) total += load(x + c) * load(y + c);
    return sum(total);
}

// One line as each of `count` rows
inline void repeat(const float* line, int64_t count, int64_t width, Rows to) {
    for (int64_t t = 0; t < count; t++)
        for (int64_t c = 0; c < width; c += W) store(to.data + t * to.row + c, load(line + c));
}

// The transpose of a matrix of padded width; what is beyond `width` stays as it was
inline void transpose(const float* from, int64_t height, int64_t width, float* to) {
    turn(from, padded(width), height, width, to, padded(height));
}
