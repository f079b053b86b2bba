// Linear and InLine attention: see ops/linear.py and ops/inline.py, whose letters these are.
#pragma once
#include "tokens.h"

enum Feature { RELU, ELU };

inline vec feature_of(vec x, int feature) {
    const vec above = x > vec{} ? x : vec{} * x;  // NaN stays
    return feature == RELU ? above : (x > vec{} ? x + 1.0f : exponential(x));
}

// φ of the piece's tokens, as rows of padded width; channels beyond the width get 0
inline void features(const Tokens& x, const Piece& piece, int64_t width, int feature, float* to) {
    const int64_t row = padded(width);
    for (int64_t t = 0; t < piece.count; t++) {
        const float* from = x.at(piece.b, piece.h, piece.first + t);
        int64_t c = 0;
        for (; c + W <= width; c += W) store(to + t * row + c, feature_of(load(from + c), feature));
        if (c < width) {
            vec tail = feature_of(load(from + c, width - c), feature);
            for (int64_t i = width - c; i < W; i++) tail[i] = 0;
            store(to + t * row + c, tail);
        }
    }
}

inline void add_rows(const float* x, int64_t row, int64_t count, int64_t width, float* sums) {
    for (int64_t c = 0; c < width; c += W) {
        vec total = load(sums + c);
        for (int64_t t = 0; t < count; t++) total += load(x + t * row + c);
        store(sums + c, total);
    }
}

inline float product(const float* x, const float* y, int64_t width) {
    vec total{};
    for (int64_t c = 0; c < width; c += W) total += load(x + c) * load(y + c);
    return sum(total);
}

extern "C" void linear_attention(Shape shape, Tokens q, Tokens k, Tokens v, Tokens out, int32_t feature, float eps) {
    const int64_t d = shape.width, row = padded(d), size = (d + 1) * row;  // Σ φ(k)ᵀ v, then Σ φ(k)
    Sums sums(shape.threads, size);
    std::vector<float> states(shape.batch * shape.heads * size);
    parallel(shape.threads, [&](int me, int all) {
        std::vector<float> room(T * row), spare;
        sums.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            features(k, piece, d, feature, room.data());
            const Rows values = values_of(v, piece, d, spare);
            multiply(d, row, piece.count, {room.data(), 1, row}, values.data, values.row, {sum, row}, true);
            add_rows(room.data(), row, piece.count, row, sum + d * row);
        });
        heads(shape, me, all, [&](int64_t index) {
            float* state = &states[index * size];
            sums.each_sum(index, [&](const float* part) {
                for (int64_t i = 0; i < size; i++) state[i] += part[i] / float(shape.keys);
            });
        });
        pieces(shape, shape.queries, me, all, [&](const Piece& piece) {
            const float* state = &states[piece.index * size];
            features(q, piece, d, feature, room.data());
            for (int64_t t = 0; t < piece.count; t++) {
                float* x = &room[t * row];
                const float scale = 1 / (product(x, state + d * row, row) + eps);
                for (int64_t c = 0; c < row; c += W) store(x + c, load(x + c) * scale);
            }
            to_tokens(out, piece, d, spare, [&](Rows c) {
                multiply(piece.count, row, d, {room.data(), row, 1}, state, row, c);
            });
        });
    });
}

extern "C" void inline_attention(Shape shape, Tokens q, Tokens k, Tokens v, Tokens out) {
    const int64_t d = shape.width, row = padded(d), size = (d + 1) * row;  // the covariance, then the mean of v
    const float scale = 1 / (std::sqrt(float(d)) * float(shape.keys));
    Sums means(shape.threads, row), sums(shape.threads, size);
    std::vector<float> states(shape.batch * shape.heads * size);
    parallel(shape.threads, [&](int me, int all) {
        std::vector<float> room(T * row), spare, mean(row);
        int64_t of = -1;
        // keys are centred before the product: subtracting afterwards cancels when they share a large mean
        means.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            const Rows keys = values_of(k, piece, d, spare);
            add_rows(keys.data, keys.row, piece.count, row, sum);
        });
        sums.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            if (of != piece.index) {
                std::fill(mean.begin(), mean.end(), 0.0f);
                means.each_sum(of = piece.index, [&](const float* part) {
                    for (int64_t c = 0; c < row; c++) mean[c] += part[c] / float(shape.keys);
                });
            }
            const Rows keys = values_of(k, piece, d, spare);
            for (int64_t t = 0; t < piece.count; t++)
                for (int64_t c = 0; c < row; c += W)
                    store(&room[t * row + c], load(keys.data + t * keys.row + c) - load(&mean[c]));
            const Rows values = values_of(v, piece, d, spare);
            multiply(d, row, piece.count, {room.data(), 1, row}, values.data, values.row, {sum, row}, true);
            add_rows(values.data, values.row, piece.count, row, sum + d * row);
        });
        heads(shape, me, all, [&](int64_t index) {
            float* state = &states[index * size];
            sums.each_sum(index, [&](const float* part) {
                for (int64_t i = 0; i < d * row; i++) state[i] += part[i] * scale;
                for (int64_t i = d * row; i < size; i++) state[i] += part[i] / float(shape.keys);
            });
        });
        pieces(shape, shape.queries, me, all, [&](const Piece& piece) {
            const float* state = &states[piece.index * size];
            to_tokens(out, piece, d, spare, [&](Rows c) {
                for (int64_t t = 0; t < piece.count; t++)
                    for (int64_t i = 0; i < row; i += W) store(c.data + t * c.row + i, load(state + d * row + i));
                multiply(piece.count, row, d, {q.at(piece.b, piece.h, piece.first), q.token, 1}, state, row, c, true);
            });
        });
    });
}
