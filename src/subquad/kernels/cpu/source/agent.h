// Agent attention: see ops/agent_formula.py.
#pragma once
#include "maps.h"
#include "mixer_parts.h"
#include "places.h"

// What both softmax maps need of one thread: logits of a piece's tokens and the agents, as rows of agents, from products
// of operands P. They are logits divided by `sharpness`, 1 to 2: the rest of the scale is a power of two, which rounds
// no agent.
template <class P>
struct AgentMaps {
    const Shape& shape;
    const float* agents;  // (b, h, a, d) side by side
    const int64_t count, d = shape.width, columns = padded(count);
    const float scale = 1 / std::sqrt(float(d)), whole = std::exp2(std::floor(std::log2(scale))), sharpness = scale / whole;
    BiasRows of_keys, of_queries;
    Buffer<float> map = Buffer<float>(T * columns), scaled;
    Buffer<P> panel, room;
    int64_t of = -1;

    AgentMaps(const Shape& shape, const float* agents, int64_t count, const Bias& key_bias, const Bias& query_bias)
        : shape(shape), agents(agents), count(count), of_keys(key_bias, count, 1 / sharpness),
          of_queries(query_bias, count, 1 / sharpness) {}

    // Of a logit that is not above the largest, from the largest
    vec weight(vec logit, vec most) const {
        const vec less = (logit - most) * sharpness;
        if constexpr (std::is_same_v<P, float>) return falling_exponential(less);
        else return rough_exponential(less);
    }

    template <class E>
    void logits(const Tokens<E>& tokens, BiasRows& bias, const Piece& piece) {
        if (of != piece.index) {
            as_columns(agents + (of = piece.index) * count * d, d, count, d, whole, scaled);
            panel.resize(deep<P>(d) * columns);
            pack(scaled.data(), columns, d, columns, panel.data());
        }
        bias.fill(piece, map.data());
        const Matrix<P> x = lowered(tokens, piece, d, room);
        multiply(piece.count, columns, deep<P>(d), x, panel.data(), columns, {map.data(), columns}, true);
    }

    // Softmax over the agents of each token
    template <class E>
    void over_agents(const Tokens<E>& q, const Piece& piece) {
        logits(q, of_queries, piece);
        if (columns <= V * W) return to_shares<V>(piece.count);
        for (int64_t t = 0; t < piece.count; t++) {
            float* x = &map[t * columns];
            vec high = load(x), total{};
            for (int64_t a = W; a < columns; a += W) high = max(high, load(x + a));
            const vec most = fill(largest(high));
            for (int64_t a = 0; a < columns; a += W) {
                const vec share = weight(load(x + a), most);
                store(x + a, share);
                total += share;
            }
            const float share = 1 / sum(total);
            for (int64_t a = 0; a < columns; a += W) store(x + a, load(x + a) * share);
        }
    }

    // The same of few agents, v vectors at most, in registers: of several tokens at once, as the largest and the sum of
    // each are a chain of steps that wait for one another
    template <int v>
    void to_shares(int64_t tokens) {
        if constexpr (v > 1)
            if (columns < v * W) return to_shares<v - 1>(tokens);
        constexpr int r = 4 * V / (v + v % 2);
        int64_t t = 0;
        for (; t + r <= tokens; t += r) to_shares<r, v>(&map[t * columns]);
        for (; t < tokens; t++) to_shares<1, v>(&map[t * columns]);
    }

    template <int r, int v>
    void to_shares(float* x) const {
        vec rows[r][v];
        float most[r], share[r];
        UNROLLED for (int t = 0; t < r; t++) {
            UNROLLED for (int j = 0; j < v; j++) rows[t][j] = load(x + (t * v + j) * W);
            vec high = rows[t][0];
            UNROLLED for (int j = 1; j < v; j++) high = max(high, rows[t][j]);
            most[t] = largest(high);
        }
        UNROLLED for (int t = 0; t < r; t++) {
            vec total{};
            UNROLLED for (int j = 0; j < v; j++) total += rows[t][j] = weight(rows[t][j], fill(most[t]));
            share[t] = sum(total);
        }
        UNROLLED for (int t = 0; t < r; t++)
            UNROLLED for (int j = 0; j < v; j++) store(x + (t * v + j) * W, rows[t][j] * (1 / share[t]));
    }

    // Weights of the piece's tokens for each agent, from the largest logit of all tokens and the sum of exponentials
    template <class E>
    void over_tokens(const Tokens<E>& k, const Piece& piece, const float* most, const float* total) {
        logits(k, of_keys, piece);
        for (int64_t a = 0; a < columns; a += W) {
            const vec share = 1.0f / load(total + a), high = load(most + a);
            for (int64_t t = 0; t < piece.count; t++)
                store(&map[t * columns + a], weight(load(&map[t * columns + a]), high) * share);
        }
    }
};

// What agents collected, where it was kept of the forward pass; see `Collected::keep`
struct Kept {
    Numbers values, most, total;
};

inline bool fits(const Shape& shape, int64_t agents, const Kept& kept) {
    const int64_t all = shape.batch * shape.heads * agents;
    if (!kept.values.data) return !kept.most.data && !kept.total.data;
    return kept.most.data && kept.total.data && fits(all * shape.width, kept.values) && fits(all, kept.most, kept.total);
}

// What the agents collect of the keys: for each head values (a × row), the largest logits and sums of exponentials
struct Collected {
    const int64_t count, row, columns, size;
    Sums sums;
    Buffer<float> heads_;

    Collected(const Shape& shape, int64_t count)
        : count(count), row(padded(shape.width)), columns(padded(count)), size(count * row + 2 * columns),
          sums(shape.threads, size), heads_(shape.batch * shape.heads * size) {}

    const float* values(int64_t index) const { return &heads_[index * size]; }
    const float* most(int64_t index) const { return values(index) + count * row; }
    const float* total(int64_t index) const { return most(index) + columns; }

    template <class E, class P>
    void run(const Shape& shape, const Tokens<E>& k, const Tokens<E>& v, AgentMaps<P>& maps, int me, int all) {
        Buffer<P> left, right;
        float* map = maps.map.data();
        sums.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            float *most = sum + count * row, *total = most + columns;
            if (total[0] == 0) std::fill(most, total, -1e38f);
            maps.logits(k, maps.of_keys, piece);
            for (int64_t a = 0; a < columns; a += W) {
                vec high = load(most + a);
                for (int64_t t = 0; t < piece.count; t++) high = max(high, load(map + t * columns + a));
                const vec shrink = maps.weight(load(most + a), high);
                vec part{};
                for (int64_t t = 0; t < piece.count; t++) {
                    const vec weight = maps.weight(load(map + t * columns + a), high);
                    store(map + t * columns + a, weight);
                    part += weight;
                }
                store(most + a, high);
                store(total + a, load(total + a) * shrink + part);
                for (int64_t i = 0; i < W && a + i < count; i++)
                    if (shrink[i] != 1)
                        for (int64_t c = 0; c < row; c += W)
                            store(sum + (a + i) * row + c, load(sum + (a + i) * row + c) * shrink[i]);
            }
            const Panel<P> weights = packed(map, columns, piece.count, columns, left);
            const Panel<P> values = packed(v, piece, shape.width, right);
            multiply(count, row, deep<P>(piece.count), weights.turned(), values.data, values.row, {sum, row}, true);
        });
        heads(shape, me, all, [&](int64_t index) {
            float *to = &heads_[index * size], *most = to + count * row, *total = most + columns;
            std::fill(most, total, -1e38f);
            std::fill(total, total + columns, 0.0f);
            sums.each_sum(index, [&](const float* part) {
                for (int64_t a = 0; a < columns; a++) most[a] = std::max(most[a], part[count * row + a]);
            });
            sums.each_sum(index, [&](const float* part) {
                for (int64_t a = 0; a < columns; a++) {
                    const float share = std::exp((part[count * row + a] - most[a]) * maps.sharpness);
                    total[a] += part[count * row + columns + a] * share;
                    for (int64_t c = 0; a < count && c < row; c++) to[a * row + c] += part[a * row + c] * share;
                }
            });
            for (int64_t a = 0; a < count; a++)
                for (int64_t c = 0; c < row; c++) to[a * row + c] /= total[a];
        });
    }

    // As the gradient is to have it, if it is: values (b, h, a, d), and what makes a softmax of logits (b, h, a). Its
    // logarithm would be one number, and as inexact as the largest logits are large.
    void keep(const Shape& shape, const Kept& kept, float sharpness, int me, int all) const {
        if (!kept.values.data) return;
        heads(shape, me, all, [&](int64_t index) {
            for (int64_t a = 0; a < count; a++)
                std::memcpy(value(shape, kept, index, a), values(index) + a * row, shape.width * sizeof(float));
            for (int64_t a = 0; a < count; a++) kept.most.data[index * count + a] = most(index)[a] * sharpness;
            std::memcpy(kept.total.data + index * count, total(index), count * sizeof(float));
        });
    }

    void take(const Shape& shape, const Kept& kept, float sharpness, int me, int all) {
        heads(shape, me, all, [&](int64_t index) {
            float *to = &heads_[index * size], *most = to + count * row, *total = most + columns;
            for (int64_t a = 0; a < count; a++)
                std::memcpy(to + a * row, value(shape, kept, index, a), shape.width * sizeof(float));
            for (int64_t a = 0; a < count; a++) most[a] = kept.most.data[index * count + a] / sharpness;
            std::memcpy(total, kept.total.data + index * count, count * sizeof(float));
            std::fill(total + count, total + columns, 1.0f);
        });
    }

private:
    float* value(const Shape& shape, const Kept& kept, int64_t index, int64_t a) const {
        return kept.values.data + (index * count + a) * shape.width;
    }
};

// A softmax over tokens, then one over agents.
template <class E>
Answer agent_attention_of(
    Shape shape, Tokens<E> q, Numbers agents, int64_t count, Tokens<E> k, Tokens<E> v,
    const Bias& key_bias, const Bias& query_bias, const Kept& kept, Tokens<E> out) {
    if (!fits(shape, shape.queries, q, out) || !fits(shape, shape.keys, k, v)) return MISFIT;
    if (!fits(shape.batch * shape.heads * count * shape.width, agents)) return MISFIT;
    if (!fits(shape, shape.keys, count, key_bias) || !fits(shape, shape.queries, count, query_bias)) return MISFIT;
    if (!fits(shape, count, kept)) return MISFIT;
    typedef Operand<E> P;
    const int64_t d = shape.width, row = padded(d), panel = deep<P>(count) * row;
    Collected collected(shape, count);
    Buffer<P> panels(shape.batch * shape.heads * panel);
    parallel(shape.threads, [&](int me, int all) {
        AgentMaps<P> maps(shape, agents.data, count, key_bias, query_bias);
        Buffer<float> spare;
        Buffer<P> room;
        collected.run(shape, k, v, maps, me, all);
        collected.keep(shape, kept, maps.sharpness, me, all);
        heads(shape, me, all, [&](int64_t i) { pack(collected.values(i), row, count, row, &panels[i * panel]); });
        pieces(shape, shape.queries, me, all, [&](const Piece& piece) {
            maps.over_agents(q, piece);
            const Matrix<P> map = lowered(maps.map.data(), maps.columns, piece.count, maps.columns, room);
            to_tokens(out, piece, d, spare, [&](Rows c) {
                multiply(piece.count, row, deep<P>(count), map, &panels[piece.index * panel], row, c);
            });
        });
    });
    return DONE;
}

KERNEL(
    agent_attention,
    (Shape shape, AnyTokens q, Numbers agents, int64_t count, AnyTokens k, AnyTokens v,
     AnyBias key_bias, AnyBias query_bias, Kept kept, AnyTokens out),
    (shape, q, agents, count, k, v, key_bias, query_bias, kept, out))

// With maps P₂ (n × a) and P₁ (a × n), v_A = P₁ v and g the gradient of P₂ v_A: dv_A = P₂ᵀ g, dP₂ = g v_Aᵀ,
// dL = P ∘ (dP - Σ P ∘ dP), the sum along the softmax, dP₁ = dv_A vᵀ, dv = P₁ᵀ dv_A; dq, dk and dA from the logits'.
template <class E>
Answer agent_attention_gradient_of(
    Shape shape, Tokens<E> q, Numbers agents, int64_t count, Tokens<E> k, Tokens<E> v,
    const Bias& key_bias, const Bias& query_bias, const Kept& kept,
    Tokens<E> grad, Tokens<E> dq, Numbers dagents, Tokens<E> dk, Tokens<E> dv, const BiasGradient& dkey_bias,
    const BiasGradient& dquery_bias) {
    const int64_t all_heads = shape.batch * shape.heads;
    if (!fits(shape, shape.queries, q, grad, dq) || !fits(shape, shape.keys, k, v, dk, dv)) return MISFIT;
    if (!fits(all_heads * count * shape.width, agents, dagents)) return MISFIT;
    if (!fits(shape, shape.keys, count, key_bias, dkey_bias) || !fits(shape, count, kept)) return MISFIT;
    if (!fits(shape, shape.queries, count, query_bias, dquery_bias)) return MISFIT;
    typedef Operand<E> P;
    const int64_t d = shape.width, row = padded(d), columns = padded(count), size = count * row;
    Collected collected(shape, count);
    const auto of_bias = [&](const Bias& bias, const BiasGradient& gradient, int64_t tokens) {
        return BiasSums(bias, gradient, count, tokens);
    };
    const int64_t key_size = of_bias(key_bias, dkey_bias, shape.keys).size();
    const int64_t query_size = of_bias(query_bias, dquery_bias, shape.queries).size();
    // dv_A, dA and the bias; dA and the bias
    Sums of_queries(shape.threads, 2 * size + query_size), of_keys(shape.threads, size + key_size);
    Sums of_maps(shape.threads, columns);
    Buffer<float> dvalues(shape.batch * shape.heads * size), lost(shape.batch * shape.heads * columns);
    // P₁ and dP₁ of all keys are needed twice
    const int64_t entries = 2 * all_heads * shape.keys * columns;
    const std::unique_ptr<float[]> both_maps(entries > MOST_KEPT ? nullptr : new float[entries]);
    const auto place = [&](const Piece& piece) {
        return both_maps.get() + (piece.index * shape.keys + piece.first) * columns;
    };
    parallel(shape.threads, [&](int me, int all) {
        AgentMaps<P> maps(shape, agents.data, count, key_bias, query_bias);
        Buffer<float> spare, few, turned, gradient(T * columns);
        Buffer<P> left, right, few_panel(deep<P>(count) * row);
        // what was collected of many tokens is a few numbers, whose errors go to all of them: their products are of fp32
        Buffer<float> widened;
        float *map = maps.map.data(), *dmap = gradient.data();
        int64_t of = -1;
        // from the logits' gradient: that of the tokens, of the agents and of the bias
        BiasSums key_sums = of_bias(key_bias, dkey_bias, shape.keys);
        BiasSums query_sums = of_bias(query_bias, dquery_bias, shape.queries);
        const auto finish = [&](const Tokens<E>& x, const Piece& piece, const Tokens<E>& dx, float* sum, BiasSums& bias) {
            bias.add(piece, dmap, sum + size);
            for (int64_t i = 0; i < piece.count * columns; i += W) store(dmap + i, load(dmap + i) * maps.scale);
            const Matrix<P> slopes = lowered(dmap, columns, piece.count, columns, left);
            to_tokens(dx, piece, d, spare, [&](Rows c) {
                multiply(piece.count, row, deep<P>(count), slopes, few_panel.data(), row, c);
            });
            const Panel<P> both = packed(dmap, columns, piece.count, columns, left), rows = packed(x, piece, d, right);
            multiply(count, row, deep<P>(piece.count), both.turned(), rows.data, rows.row, {sum, row}, true);
        };
        const auto begin = [&](const Piece& piece, const float* values) {
            if (of == piece.index) return;
            as_rows(agents.data + (of = piece.index) * count * d, d, count, d, few);
            as_columns(values, row, count, d, 1, turned);
            pack(few.data(), row, count, row, few_panel.data());
        };
        kept.values.data ? collected.take(shape, kept, maps.sharpness, me, all) : collected.run(shape, k, v, maps, me, all);
        of_queries.gather(shape, shape.queries, me, all, [&](const Piece& piece, float* sum) {
            begin(piece, collected.values(piece.index));
            maps.over_agents(q, piece);
            const Panel<P> weights = packed(map, columns, piece.count, columns, left), g = packed(grad, piece, d, right);
            multiply(count, row, deep<P>(piece.count), weights.turned(), g.data, g.row, {sum, row}, true);
            const Strided rows = matrix_of(grad, piece, d, widened);
            multiply(piece.count, columns, d, rows, turned.data(), columns, {dmap, columns});
            for (int64_t t = 0; t < piece.count; t++) {
                vec total{};
                for (int64_t a = 0; a < columns; a += W) total += load(map + t * columns + a) * load(dmap + t * columns + a);
                const float mean = ::sum(total);
                for (int64_t a = 0; a < columns; a += W)
                    store(dmap + t * columns + a, load(map + t * columns + a) * (load(dmap + t * columns + a) - mean));
            }
            finish(q, piece, dq, sum + size, query_sums);
        });
        heads(shape, me, all, [&](int64_t index) {
            float* to = &dvalues[index * size];
            of_queries.each_sum(index, [&](const float* part) {
                for (int64_t i = 0; i < size; i++) to[i] += part[i];
            });
        });
        of = -1;
        // of a piece of keys: P₁ and dP₁
        const auto meet = [&](const Piece& piece) {
            begin(piece, &dvalues[piece.index * size]);
            maps.over_tokens(k, piece, collected.most(piece.index), collected.total(piece.index));
            const Strided values = matrix_of(v, piece, d, widened);
            multiply(piece.count, columns, d, values, turned.data(), columns, {dmap, columns});
        };
        // the same a second time, where both were kept
        const auto meet_again = [&](const Piece& piece) {
            if (!both_maps) return meet(piece);
            begin(piece, &dvalues[piece.index * size]);
            const float* from = place(piece);
            std::memcpy(map, from, piece.count * columns * sizeof(float));
            std::memcpy(dmap, from + all_heads * shape.keys * columns, piece.count * columns * sizeof(float));
        };
        // Σ P₁ ∘ dP₁ of the very dP₁ from which it is taken: dv_A v_A is the same sum and costs nothing, but is rounded
        // otherwise, and where few tokens have all the weight the difference is all that is left
        of_maps.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            meet(piece);
            if (both_maps) {
                std::memcpy(place(piece), map, piece.count * columns * sizeof(float));
                std::memcpy(place(piece) + all_heads * shape.keys * columns, dmap, piece.count * columns * sizeof(float));
            }
            for (int64_t a = 0; a < columns; a += W) {
                vec total{};
                for (int64_t t = 0; t < piece.count; t++) total += load(map + t * columns + a) * load(dmap + t * columns + a);
                store(sum + a, load(sum + a) + total);
            }
        });
        heads(shape, me, all, [&](int64_t index) {
            of_maps.each_sum(index, [&](const float* part) {
                for (int64_t a = 0; a < columns; a++) lost[index * columns + a] += part[a];
            });
        });
        of = -1;
        of_keys.gather(shape, shape.keys, me, all, [&](const Piece& piece, float* sum) {
            const float* mean = &lost[piece.index * columns];
            meet_again(piece);
            const Strided weights{map, columns, 1};
            to_tokens(dv, piece, d, spare, [&](Rows c) {
                multiply(piece.count, row, count, weights, &dvalues[piece.index * size], row, c);
            });
            for (int64_t t = 0; t < piece.count; t++)
                for (int64_t a = 0; a < columns; a += W) {
                    float* to = dmap + t * columns + a;
                    store(to, load(map + t * columns + a) * (load(to) - load(mean + a)));
                }
            finish(k, piece, dk, sum, key_sums);
        });
        heads(shape, me, all, [&](int64_t index) {
            float* to = dagents.data + index * count * d;
            std::fill(to, to + count * d, 0.0f);
            const auto add = [&](const float* part) {
                for (int64_t a = 0; a < count; a++)
                    for (int64_t c = 0; c < d; c++) to[a * d + c] += part[a * row + c];
            };
            of_queries.each_sum(index, [&](const float* part) { add(part + size); });
            of_keys.each_sum(index, add);
        });
        for (int64_t h = me; h < shape.heads; h += all) {
            const auto through = [&](Sums& sums, int64_t first) {
                return [&, first](auto&& add) {
                    for (int64_t index = h; index < all_heads; index += shape.heads)
                        sums.each_sum(index, [&](const float* part) { add(part + first); });
                };
            };
            query_sums.finish(h, through(of_queries, 2 * size));
            key_sums.finish(h, through(of_keys, size));
        }
    });
    return DONE;
}

KERNEL(
    agent_attention_gradient,
    (Shape shape, AnyTokens q, Numbers agents, int64_t count, AnyTokens k, AnyTokens v,
     AnyBias key_bias, AnyBias query_bias, Kept kept,
     AnyTokens grad, AnyTokens dq, Numbers dagents, AnyTokens dk, AnyTokens dv, BiasGradient dkey_bias,
     BiasGradient dquery_bias),
    (shape, q, agents, count, k, v, key_bias, query_bias, kept, grad, dq, dagents, dk, dv, dkey_bias, dquery_bias))

// Agents are means of the queries over `across` bins in each of `down` rows
template <class E>
Answer agent_mixer_of(
    Shape shape, Tokens<E> q, Tokens<E> k, Tokens<E> v, const Bias& key_bias, const Bias& query_bias,
    const Filters& filters, Map map, int64_t down, int64_t across, Tokens<E> out) {
    if (!fits(shape, filters) || !fits(shape, shape.queries, v) || !fits(shape.queries, map)) return MISFIT;
    if (down < 1 || across < 1) return MISFIT;
    Buffer<float> room;
    if (pool_to(shape, q, map, down, across, few_tokens(shape, down * across, room))) return MISFIT;
    const Answer answer =
        agent_attention_of<E>(shape, q, numbers_of(room), down * across, k, v, key_bias, query_bias, {}, out);
    return answer ? answer : finish(shape, v, {}, out, map, filters);
}

KERNEL(
    agent_mixer,
    (Shape shape, AnyTokens q, AnyTokens k, AnyTokens v, AnyBias key_bias, AnyBias query_bias, AnyFilters filters,
     Map map, int64_t down, int64_t across, AnyTokens out),
    (shape, q, k, v, key_bias, query_bias, filters, map, down, across, out))
