// Attention by one state for each head, φ(k)ᵀ v, and one sum of features: see ops/linear_formula.py and the formulas of
// MLLA, MALA, RALA and NaLa, whose letters these are.
#pragma once
#include "feature_maps.h"

// What becomes of a query's product with the state, S of features that are turned, z = φ(q)·mean φ(k) of such that are
// not: (φ(q) S) / (z + ε); s (φ(q) S) (1 + 1 / (s z + ε)) - s z v̄ with s = d^-½; the first with keys weighed by
// softmax(s φ(k)·mean φ(q)) instead of 1/n
enum Form { DIVIDED, SUBTRACTED, WEIGHED };

template <class E>
struct StateAttention {
    const Shape& shape;
    const Tokens<E>&q, &k, &v;
    const Turning& turning;
    const int feature, form;
    const float eps;
    // rows of features, and what stands behind S (features × row): Σ φ(k), Σ v, the largest score and the weights' sum
    const int64_t d = shape.width, row = padded(d), several = rows_of(feature), wide = several * row;
    const int64_t count = several == 1 ? d : wide, total = count * row, mean = total + wide, weights = mean + row;
    const int64_t size = weights + W;
    const float root = 1 / std::sqrt(float(d)), scale = form == SUBTRACTED ? root : 1;
    Buffer<float> states = Buffer<float>(shape.batch * shape.heads * size);

    bool fits_all() const {
        return fits(shape, shape.queries, q) && fits(shape, shape.keys, k, v) && fits(shape, d, turning) && feature >= 0 &&
               feature <= NALA && form >= 0 && form <= WEIGHED;
    }
    const float* state(const Piece& piece) const { return &states[piece.index * size]; }
    int64_t all_heads() const { return shape.batch * shape.heads; }

    // The mean features of all queries of a head
    void gather_queries(Sums& sums, int me, int all) const {
        Buffer<float> room(T * wide);
        sums.gather(shape, shape.queries, me, all, [&](const Piece& piece, float* sum) {
            query_features(q, piece, d, feature, room.data());
            add_rows(room.data(), wide, piece.count, wide, sum);
        });
    }

    // s ḡ, of whose sums these are
    void mean_query(Sums& queries, int64_t index, Buffer<float>& mean) const {
        mean.assign(wide, 0.0f);
        queries.each_sum(index, [&](const float* part) {
            for (int64_t i = 0; i < wide; i++) mean[i] += part[i] * root / float(shape.queries);
        });
    }

    // Features times e^(s φ(k)·ḡ - m); m is the largest score of this thread's pieces so far
    void weigh(const Piece& piece, const float* mean_query, float* rows, float* sum) const {
        const bool begun = sum[weights + 1] > 0;
        const float before = begun ? sum[weights] : -INFINITY;
        float scores[T], most = before;
        for (int64_t t = 0; t < piece.count; t++) {
            scores[t] = product(rows + t * wide, mean_query, wide);
            most = scores[t] > most ? scores[t] : most;
        }
        if (begun && most > before) {
            const float less = std::exp(before - most);
            for (int64_t i = 0; i < mean; i++) sum[i] *= less;
            sum[weights + 1] *= less;
        }
        sum[weights] = most;
        for (int64_t t = 0; t < piece.count; t++) {
            const float weight = std::exp(scores[t] - most);
            sum[weights + 1] += weight;
            scale_row(rows + t * wide, weight);
        }
    }

    void scale_row(float* line, float factor) const {
        for (int64_t c = 0; c < wide; c += W) store(line + c, load(line + c) * factor);
    }

    template <class P>
    void gather_keys(Sums& sums, Sums& queries, int me, int all) const {
        Buffer<float> room(T * wide), spare, mean_of_queries;
        Buffer<P> left, right;
        int64_t of = -1;
        sums.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            key_features(k, piece, d, feature, room.data());
            if (form == WEIGHED) {
                if (of != piece.index) mean_query(queries, of = piece.index, mean_of_queries);
                weigh(piece, mean_of_queries.data(), room.data(), sum);
            }
            add_rows(room.data(), wide, piece.count, wide, sum + total);
            turn<false>(turning, shape, piece, several, room.data());
            const Panel<P> keys = packed(room.data(), wide, piece.count, wide, left), values = packed(v, piece, d, right);
            multiply(count, row, deep<P>(piece.count), keys.turned(), values.data, values.row, {sum, row}, true);
            if (form != SUBTRACTED) return;
            const Rows rows = values_of(v, piece, d, spare);
            add_rows(rows.data, rows.row, piece.count, row, sum + mean);
        });
    }

    // Sums of all threads become means, times s
    void collect(Sums& sums, int64_t index) {
        float* state = &states[index * size];
        float &most = state[weights] = -INFINITY, &weight = state[weights + 1];
        sums.each_sum(index, [&](const float* part) { most = std::max(most, part[weights]); });
        sums.each_sum(index, [&](const float* part) { weight += part[weights + 1] * std::exp(part[weights] - most); });
        sums.each_sum(index, [&](const float* part) {
            add(part, form == WEIGHED ? std::exp(part[weights] - most) / weight : 1 / float(shape.keys), state);
        });
    }

    // A thread's sums, times s but for those of values
    void add(const float* part, float share, float* to) const {
        for (int64_t i = 0; i < mean; i++) to[i] += part[i] * (share * scale);
        for (int64_t i = mean; i < weights; i++) to[i] += part[i] * share;
    }

    // Rows of features and z of a piece's queries, from which its products are 1 / (z + ε) or 1 + that
    void factors_of(const Piece& piece, const float* rows, float* z, float* factors) const {
        for (int64_t t = 0; t < piece.count; t++) {
            z[t] = product(rows + t * wide, state(piece) + total, wide);
            factors[t] = 1 / (z[t] + eps) + (form == SUBTRACTED);
        }
    }

    // Those products times their factors, less z v̄ where that is subtracted; not the features: bf16 would round these
    // once more
    void finish(const Piece& piece, Rows products, const float* z, const float* factors) const {
        const float* values = state(piece) + mean;
        for (int64_t t = 0; t < piece.count; t++) {
            float* line = products.data + t * products.row;
            for (int64_t c = 0; c < row; c += W) {
                vec answer = load(line + c) * factors[t];
                if (form == SUBTRACTED) answer -= load(values + c) * z[t];
                store(line + c, answer);
            }
        }
    }
};

// Keys are multiplied with values as P, queries with the state as A
template <class P, class A, class E>
Answer answers_of_states(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<E> out, Turning turning, int32_t feature, int32_t form,
    float eps) {
    StateAttention<E> it{shape, q, k, v, turning, feature, form, eps};
    if (!it.fits_all() || !fits(shape, shape.queries, out)) return MISFIT;
    const int64_t d = it.d, row = it.row, wide = it.wide, panel = deep<A>(it.count) * row;
    Sums queries(shape.threads, wide), sums(shape.threads, it.size);
    Buffer<A> panels(it.all_heads() * panel);
    parallel(shape.threads, [&](int me, int all) {
        Buffer<float> room(T * wide), spare;
        Buffer<A> left;
        if (form == WEIGHED) it.gather_queries(queries, me, all);
        it.template gather_keys<P>(sums, queries, me, all);
        heads(shape, me, all, [&](int64_t index) {
            it.collect(sums, index);
            pack(&it.states[index * it.size], row, it.count, row, &panels[index * panel]);
        });
        pieces(shape, shape.queries, me, all, [&](const Piece& piece) {
            float z[T], factors[T];
            query_features(q, piece, d, feature, room.data());
            it.factors_of(piece, room.data(), z, factors);
            turn<false>(turning, shape, piece, it.several, room.data());
            const Matrix<A> features = lowered(room.data(), wide, piece.count, wide, left);
            to_tokens(out, piece, d, spare, [&](Rows c) {
                multiply(piece.count, row, deep<A>(it.count), features, &panels[piece.index * panel], row, c);
                it.finish(piece, c, z, factors);
            });
        });
    });
    return DONE;
}

// What is subtracted leaves little of both numbers: their products are of fp32, also of tokens in bf16
template <class E>
Answer state_attention_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<E> out, Turning turning, int32_t feature, int32_t form,
    float eps) {
    typedef Operand<E> P;
    if (form == SUBTRACTED) return answers_of_states<float, float>(shape, q, k, v, out, turning, feature, form, eps);
    return answers_of_states<P, P>(shape, q, k, v, out, turning, feature, form, eps);
}

KERNEL(
    state_attention,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyTokens out, Turning turning, int32_t feature, int32_t form,
     float eps),
    (shape, q, k, v, out, turning, feature, form, eps))

// With f = 1 / (z + ε) [+ 1], y = f φ̃(q) S [- z v̄]: e = f g Sᵀ, dz = -f φ̃(q)·e or -(f - 1)² φ̃(q)·e / f - g·v̄,
// dφq = e turned back + z̄ dz; dS = φ̃qᵀ (f g), dz̄ = Σ dz φq, dv̄ = -Σ z g; dφk = (v dSᵀ turned back + dz̄) / n,
// dv = (φ̃k dS + dv̄) / n. With weights ω instead of 1/n: h = φ̃k dS·v + φk·dz̄, dφk += ω (h - Σ ω h) s ḡ, and
// dḡ = s Σ ω (h - Σ ω h) φk, which queries share.
template <class P, class E, class To>
Answer gradient_of_states(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<E> grad, Tokens<To> dq, Tokens<To> dk, Tokens<E> dv,
    Turning turning, int32_t feature, int32_t form, float eps) {
    StateAttention<E> it{shape, q, k, v, turning, feature, form, eps};
    if (!it.fits_all() || !fits(shape, shape.queries, grad, dq) || !fits(shape, shape.keys, dk, dv)) return MISFIT;
    const int64_t d = it.d, row = it.row, wide = it.wide, count = it.count, square = d * wide;
    const int64_t panel = deep<P>(count) * row, turned_panel = deep<P>(d) * wide;
    const bool weighed = form == WEIGHED;
    Sums queries(shape.threads, wide), sums(shape.threads, it.size), grads(shape.threads, it.size);
    Sums means(shape.threads, 1), of_means(shape.threads, wide);
    Buffer<float> shares(it.all_heads() * shape.keys), losses(shares.size());
    Buffer<float> turned_states(it.all_heads() * square), gradients(it.all_heads() * it.size);
    Buffer<P> state_gradients(it.all_heads() * (panel + turned_panel));  // dS and dSᵀ
    parallel(shape.threads, [&](int me, int all) {
        Buffer<float> room(T * wide), turned(T * wide), e(T * wide), scaled(T * row), spare, other, mean_query, dmean;
        Buffer<float> turned_state(d * wide);
        Buffer<P> left, right;
        const auto add_line = [&](float* to, const float* line, float factor) {
            for (int64_t c = 0; c < wide; c += W) store(to + c, load(to + c) + load(line + c) * factor);
        };
        const auto in_place_and_turned = [&](const Piece& piece) {
            std::copy(room.begin(), room.begin() + piece.count * wide, turned.begin());
            turn<false>(turning, shape, piece, it.several, turned.data());
        };
        // to sums where there are some, else to dq
        const auto of_queries = [&](const Piece& piece, float* sum, bool finish) {
            float z[T], factors[T];
            const float *total = it.state(piece) + it.total, *mean = it.state(piece) + it.mean;
            query_features(q, piece, d, feature, room.data());
            it.factors_of(piece, room.data(), z, factors);
            in_place_and_turned(piece);
            const Rows g = values_of(grad, piece, d, other);
            for (int64_t t = 0; t < piece.count; t++)
                for (int64_t c = 0; c < row; c += W)
                    store(&scaled[t * row + c], load(g.data + t * g.row + c) * factors[t]);
            // of fp32: dq and dz are both of it
            const Matrix<float> slopes{scaled.data(), row, 1};
            multiply(piece.count, wide, d, slopes, &turned_states[piece.index * square], wide, {e.data(), wide});
            float dz[T];
            for (int64_t t = 0; t < piece.count; t++) {
                const float kept = product(&turned[t * wide], &e[t * wide], wide), f = factors[t];
                dz[t] = form == SUBTRACTED ? -(f - 1) * (f - 1) * kept / f - product(g.data + t * g.row, mean, row) : -kept * f;
            }
            if (sum) {
                const Panel<P> features = packed(turned.data(), wide, piece.count, wide, left);
                const Panel<P> rows = packed(scaled.data(), row, piece.count, row, right);
                multiply(count, row, deep<P>(piece.count), features.turned(), rows.data, rows.row, {sum, row}, true);
                for (int64_t t = 0; t < piece.count; t++) {
                    add_line(sum + it.total, &room[t * wide], dz[t]);
                    if (form != SUBTRACTED) continue;
                    float* to = sum + it.mean;
                    for (int64_t c = 0; c < row; c += W) store(to + c, load(to + c) - load(g.data + t * g.row + c) * z[t]);
                }
            }
            if (!finish) return;
            turn<true>(turning, shape, piece, it.several, e.data());
            for (int64_t t = 0; t < piece.count; t++) {
                add_line(&e[t * wide], total, dz[t]);
                if (weighed) add_line(&e[t * wide], dmean.data(), 1);
            }
            through_query_features(q, piece, d, feature, e.data(), dq);
        };
        if (weighed) it.gather_queries(queries, me, all);
        it.template gather_keys<P>(sums, queries, me, all);
        heads(shape, me, all, [&](int64_t index) {
            it.collect(sums, index);
            transpose(&it.states[index * it.size], count, d, &turned_states[index * square]);
        });
        grads.gather(shape, shape.queries, me, all, [&](const Piece& piece, float* sum) { of_queries(piece, sum, !weighed); });
        heads(shape, me, all, [&](int64_t index) {
            float* to = &gradients[index * it.size];
            grads.each_sum(index, [&](const float* part) { it.add(part, weighed ? 1 : 1 / float(shape.keys), to); });
            transpose(to, count, d, turned_state.data());
            P* panels = &state_gradients[index * (panel + turned_panel)];
            pack(to, row, count, row, panels);
            pack(turned_state.data(), wide, d, wide, panels + panel);
        });
        // dv; where keys are weighed, their weights and h as well, and Σ ω h to the sum
        const auto of_values = [&](const Piece& piece, float* sum) {
            const float *ds = &gradients[piece.index * it.size], *state = it.state(piece);
            float *share = &shares[piece.index * shape.keys + piece.first], *loss = &losses[share - shares.data()];
            key_features(k, piece, d, feature, room.data());
            in_place_and_turned(piece);
            const Rows values = values_of(v, piece, d, other);
            to_tokens(dv, piece, d, spare, [&](Rows c) {
                if (form == SUBTRACTED) repeat(ds + it.mean, piece.count, row, c);
                const Matrix<P> features = lowered(turned.data(), wide, piece.count, wide, left);
                const P* by = &state_gradients[piece.index * (panel + turned_panel)];
                multiply(piece.count, row, deep<P>(count), features, by, row, c, form == SUBTRACTED);
                if (!weighed) return;
                it.mean_query(queries, piece.index, mean_query);
                for (int64_t t = 0; t < piece.count; t++) {
                    float *line = &room[t * wide], *to = c.data + t * c.row;
                    share[t] = std::exp(product(line, mean_query.data(), wide) - state[it.weights]) / state[it.weights + 1];
                    loss[t] = product(to, values.data + t * values.row, row) + product(line, ds + it.total, wide);
                    *sum += share[t] * loss[t];
                    for (int64_t i = 0; i < row; i += W) store(to + i, load(to + i) * share[t]);
                }
            });
        };
        // dk, of features that are in their room; where keys are weighed, Σ ω (h - Σ ω h) φk to the sum
        const auto of_keys = [&](const Piece& piece, float* sum, float lost) {
            const float *ds = &gradients[piece.index * it.size];
            const float *share = &shares[piece.index * shape.keys + piece.first], *loss = &losses[share - shares.data()];
            const P* by = &state_gradients[piece.index * (panel + turned_panel)] + panel;
            multiply(piece.count, wide, deep<P>(d), lowered(v, piece, d, left), by, wide, {e.data(), wide});
            turn<true>(turning, shape, piece, it.several, e.data());
            for (int64_t t = 0; t < piece.count; t++) {
                add_line(&e[t * wide], ds + it.total, 1);
                if (!weighed) continue;
                const float slope = share[t] * (loss[t] - lost);
                it.scale_row(&e[t * wide], share[t]);
                add_line(&e[t * wide], mean_query.data(), slope);
                add_line(sum, &room[t * wide], slope * it.root / float(shape.queries));
            }
            through_key_features(k, piece, d, feature, e.data(), dk);
        };
        if (!weighed)
            return pieces(shape, shape.keys, me, all, [&](const Piece& piece) {
                of_values(piece, nullptr);
                of_keys(piece, nullptr, 0);
            });
        means.gather(shape, shape.keys, me, all, of_values);
        of_means.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            float lost = 0;
            means.each_sum(piece.index, [&](const float* part) { lost += *part; });
            it.mean_query(queries, piece.index, mean_query);
            key_features(k, piece, d, feature, room.data());
            of_keys(piece, sum, lost);
        });
        int64_t of = -1;
        pieces(shape, shape.queries, me, all, [&](const Piece& piece) {
            if (of != piece.index) {
                dmean.assign(wide, 0.0f);
                of_means.each_sum(of = piece.index, [&](const float* part) { add_line(dmean.data(), part, 1); });
            }
            of_queries(piece, nullptr, true);
        });
    });
    return DONE;
}

template <class E>
Answer state_attention_gradient_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<E> grad, Tokens<E> dq, Tokens<E> dk, Tokens<E> dv,
    Turning turning, int32_t feature, int32_t form, float eps) {
    if (form == SUBTRACTED)
        return gradient_of_states<float>(shape, q, k, v, grad, dq, dk, dv, turning, feature, form, eps);
    return gradient_of_states<Operand<E>>(shape, q, k, v, grad, dq, dk, dv, turning, feature, form, eps);
}

KERNEL(
    state_attention_gradient,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyTokens grad, AnyTokens dq, AnyTokens dk, AnyTokens dv,
     Turning turning, int32_t feature, int32_t form, float eps),
    (shape, q, k, v, grad, dq, dk, dv, turning, feature, form, eps))

// Of queries and keys that are features already, which were rounded once: the state is not
template <class E>
Answer feature_attention_of(Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<E> out, float eps) {
    const Turning still{};
    return answers_of_states<Operand<E>, float>(shape, q, k, v, out, still, NONE, DIVIDED, eps);
}

KERNEL(
    feature_attention, (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyTokens out, float eps),
    (shape, q, k, v, out, eps))

// The gradient to queries and keys that are features already, in fp32, as more is to be made of it
template <class E>
Answer feature_attention_gradient_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, Tokens<E> grad, Tokens<float> dq, Tokens<float> dk, Tokens<E> dv,
    float eps) {
    const Turning still{};
    return gradient_of_states<Operand<E>>(shape, q, k, v, grad, dq, dk, dv, still, NONE, DIVIDED, eps);
}

KERNEL(
    feature_attention_gradient,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyTokens grad, Tokens<float> dq, Tokens<float> dk,
     AnyTokens dv, float eps),
    (shape, q, k, v, grad, dq, dk, dv, eps))
