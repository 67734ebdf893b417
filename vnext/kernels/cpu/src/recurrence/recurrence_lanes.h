/* Recurrent layers on sixteen lanes, a row's tokens one after the other: how they are cut into steps shows in no bit.

   Sums over a head's keys are in one order, by turns in two parts; a column of a state needs no other column. A block of
   columns stays in the first cache while TOKENS_A_BLOCK tokens pass over it. */
#pragma once

#include "isa/lanes.h"
#include "team.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

constexpr int64_t TOKENS_A_BLOCK = 16;
constexpr int COLUMNS_AT_ONCE = 2; /* of sixteen lanes */

inline float to_float(float x) { return x; }

/* Sixteen of the weights [channels][width] of each of a channel's inputs. */
template <typename T>
inline void turn_weights(const T *weight, int64_t width, int64_t count, float (*turned)[16]) {
    for (int64_t place = 0; place < width; ++place)
        for (int64_t i = 0; i < 16; ++i)
            turned[place][i] = i < count ? to_float(weight[i * width + place]) : 0.0f;
}
/* Sixteen channels of a row; W inputs are seen. */
template <typename T, int W>
inline void convolve_lanes(const ConvolutionCall &call, int64_t row, int64_t channel, const float (*weight)[16]) {
    const int64_t left = call.channels - channel, channels = call.channels, stride = call.x_stride;
    const int64_t token = call.rows.starts[row], count = call.rows.starts[row + 1] - token;
    T *pool = static_cast<T *>(call.pool) + call.rows.pages[row] * call.page_stride + channel;
    const bool is_fresh = call.rows.fresh[row] != 0, is_gated = call.gated != 0;
    Lanes seen[W], factor[W];
    for (int i = 0; i < W; ++i)
        factor[i] = load(weight[i]);
    for (int i = 1; i < W; ++i)
        seen[i] = is_fresh ? all(0.0f) : load_part(pool + (i - 1) * channels, left);
    const Lanes bias = call.bias == nullptr ? all(0.0f) : load_part(static_cast<const T *>(call.bias) + channel, left);
    const T *x = static_cast<const T *>(call.x) + token * stride + channel;
    const int64_t result_stride = call.result_stride == 0 ? channels : call.result_stride;
    T *result = static_cast<T *>(call.result) + token * result_stride + channel;
    const int32_t *trail = call.rows.trail == nullptr ? nullptr : call.rows.trail + token;
    const auto leave = [&](T *to) {
        for (int i = 1; i < W; ++i)
            store_part(to + (i - 1) * channels, seen[i], left);
    };
    for (int64_t t = 0; t < count; ++t, x += stride, result += result_stride) {
        for (int i = 0; i + 1 < W; ++i)
            seen[i] = seen[i + 1];
        seen[W - 1] = is_gated ? rounded(load_part(x, left) * load_part(x + 2 * channels, left), x) : load_part(x, left);
        Lanes total = seen[0] * factor[0];
        for (int i = 1; i < W; ++i)
            total = fused(seen[i], factor[i], total);
        total = total + bias;
        if (call.silu != 0) total = activate(total, SILU);
        if (is_gated) total = rounded(total, x) * load_part(x + channels, left);
        store_part(result, total, left);
        if (trail != nullptr && trail[t] >= 0) leave(static_cast<T *>(call.pool) + trail[t] * call.page_stride + channel);
    }
    leave(pool);
}

template <typename T>
inline void convolve_row(const ConvolutionCall &call, int64_t row, int64_t first, int64_t last) {
    float weight[CONVOLUTION_MAX][16];
    for (int64_t channel = first; channel < last; channel += 16) {
        turn_weights(static_cast<const T *>(call.weight) + channel * call.width, call.width, call.channels - channel, weight);
        switch (call.width) {
        case 2: convolve_lanes<T, 2>(call, row, channel, weight); break;
        case 3: convolve_lanes<T, 3>(call, row, channel, weight); break;
        case 4: convolve_lanes<T, 4>(call, row, channel, weight); break;
        case 5: convolve_lanes<T, 5>(call, row, channel, weight); break;
        case 6: convolve_lanes<T, 6>(call, row, channel, weight); break;
        case 7: convolve_lanes<T, 7>(call, row, channel, weight); break;
        case 8: convolve_lanes<T, 8>(call, row, channel, weight); break;
        }
    }
}

void convolve(int kind, const ConvolutionCall &call, int64_t row, int64_t first, int64_t last) {
    if (call.rows.starts[row] == call.rows.starts[row + 1]) return;
    if (kind == FLOAT32) return convolve_row<float>(call, row, first, last);
    convolve_row<bf16>(call, row, first, last);
}

/* What has a decay of its own: a head, a key of it, or a number of its state. */
enum Pace { BY_HEAD, BY_KEY, BY_NUMBER };

/* Some tokens of one head: what passes over its state. Rows of queries and keys `key_dim` apart, of values and results
   `value_dim`. A token's state is its decay times the last one, plus key times change. The change is `strength` times the
   value, or, of a delta, times what the value differs from what the state has for the key. Of a token there are one decay, or
   `key_dim`, and one strength; by number `value_dim` strengths, of which and of `rates` [key_dim][value_dim] decays are made. */
struct HeadTokens {
    int64_t count, key_dim, value_dim;
    const float *queries, *keys, *values, *decays, *strengths, *rates;
    float *results;
};

/* N times sixteen columns; with fewer, N is 1. GCC keeps in memory what loops that it does not unroll take by number. */
template <int N>
ALWAYS_INLINE void load_columns(const float *from, int64_t left, Lanes *to) {
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n)
        to[n] = N > 1 ? load(from + 16 * n) : load_part(from, left);
}

template <int N>
ALWAYS_INLINE void store_columns(float *to, int64_t left, const Lanes *from) {
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n)
        N > 1 ? store(to + 16 * n, from[n]) : store_part(to, from[n], left);
}

/* N times sixteen columns of the state [key_dim][value_dim]; with fewer, N is 1 and `left` says how many. */
template <int N, bool IS_DELTA, Pace PACE>
inline void pass_columns(const HeadTokens &head, float *state, int64_t column, int64_t left) {
    const int64_t width = head.value_dim;
    for (int64_t t = 0; t < head.count; ++t) {
        const float *query = head.queries + t * head.key_dim, *key = head.keys + t * head.key_dim;
        const float *decays = head.decays + (PACE == BY_KEY ? t * head.key_dim : t);
        const Lanes decay = all(PACE == BY_HEAD ? *decays : 1.0f);
        Lanes change[N], s[N], strength[N], rate[N];
        if (PACE == BY_NUMBER)
            load_columns<N>(head.strengths + t * width + column, left, strength);
        else
#pragma GCC unroll 2
            for (int n = 0; n < N; ++n)
                strength[n] = all(head.strengths[t]);
        load_columns<N>(head.values + t * width + column, left, change);
        const auto decayed = [&](int64_t i) { return all(PACE == BY_KEY ? key[i] * decays[i] : key[i]); };
        if (IS_DELTA) {
            Lanes even[N], odd[N];
#pragma GCC unroll 2
            for (int n = 0; n < N; ++n)
                even[n] = odd[n] = all(0.0f);
            int64_t i = 0;
            for (; i + 2 <= head.key_dim; i += 2) {
                const Lanes a = decayed(i), b = decayed(i + 1);
                load_columns<N>(state + i * width + column, left, s);
#pragma GCC unroll 2
                for (int n = 0; n < N; ++n)
                    even[n] = fused(a, s[n], even[n]);
                load_columns<N>(state + (i + 1) * width + column, left, s);
#pragma GCC unroll 2
                for (int n = 0; n < N; ++n)
                    odd[n] = fused(b, s[n], odd[n]);
            }
            if (i < head.key_dim) {
                load_columns<N>(state + i * width + column, left, s);
#pragma GCC unroll 2
                for (int n = 0; n < N; ++n)
                    even[n] = fused(decayed(i), s[n], even[n]);
            }
#pragma GCC unroll 2
            for (int n = 0; n < N; ++n)
                change[n] = change[n] - decay * (even[n] + odd[n]);
        }
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n)
            change[n] = change[n] * strength[n];
        Lanes even[N], odd[N];
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n)
            even[n] = odd[n] = all(0.0f);
        const auto update = [&](int64_t i, Lanes *sums) __attribute__((always_inline)) {
            float *at = state + i * width + column;
            load_columns<N>(at, left, s);
            if (PACE == BY_NUMBER) load_columns<N>(head.rates + i * width + column, left, rate);
            const Lanes a = all(key[i]), b = all(query[i]);
#pragma GCC unroll 2
            for (int n = 0; n < N; ++n) {
                const Lanes own = PACE == BY_KEY      ? all(decays[i])
                                  : PACE == BY_NUMBER ? exp_lanes(all(0.0f) - rate[n] * strength[n])
                                                      : decay;
                s[n] = fused(a, change[n], own * s[n]);
                sums[n] = fused(b, s[n], sums[n]);
            }
            store_columns<N>(at, left, s);
        };
        int64_t i = 0;
        for (; i + 2 <= head.key_dim; i += 2) {
            update(i, even);
            update(i + 1, odd);
        }
        if (i < head.key_dim) update(i, even);
#pragma GCC unroll 2
        for (int n = 0; n < N; ++n)
            even[n] = even[n] + odd[n];
        store_columns<N>(head.results + t * width + column, left, even);
    }
}

template <bool IS_DELTA, Pace PACE>
inline void pass_tokens(const HeadTokens &head, float *state) {
    int64_t column = 0;
    for (; column + 16 * COLUMNS_AT_ONCE <= head.value_dim; column += 16 * COLUMNS_AT_ONCE)
        pass_columns<COLUMNS_AT_ONCE, IS_DELTA, PACE>(head, state, column, 16 * COLUMNS_AT_ONCE);
    for (; column < head.value_dim; column += 16)
        pass_columns<1, IS_DELTA, PACE>(head, state, column, head.value_dim - column);
}

template <typename T>
inline void widen_part(const T *from, int64_t count, bool activates, float *to) {
    for (int64_t i = 0; i < count; i += 16) {
        const Lanes x = load_part(from + i, count - i);
        store_part(to + i, activates ? activate(x, SILU) : x, count - i);
    }
}

/* x times `factor` over its length, in place. */
inline void make_unit(float *x, int64_t count, float factor) {
    Lanes total = all(0.0f);
    for (int64_t i = 0; i < count; i += 16) {
        const Lanes a = load_part(x + i, count - i);
        total = fused(a, a, total);
    }
    const Lanes scale = all(factor / __builtin_sqrtf(sum(total) + 1e-6f));
    for (int64_t i = 0; i < count; i += 16)
        store_part(x + i, load_part(x + i, count - i) * scale, count - i);
}

/* log(1 + e^x) = max(x, 0) + 2 artanh(y / (2 + y)) with y = e^-|x|; a series by odd powers. */
ALWAYS_INLINE Lanes softplus(Lanes x) {
    const Lanes zero = all(0.0f), y = exp_lanes(smaller(x, zero - x)), part = y / (all(2.0f) + y), square = part * part;
    Lanes p = all(2.0f / 17.0f);
    for (int power = 15; power > 0; power -= 2)
        p = fused(p, square, all(2.0f / float(power)));
    return larger(x, zero) + part * p;
}

ALWAYS_INLINE Lanes sigmoid(Lanes x) { return all(1.0f) / (all(1.0f) + exp_lanes(all(0.0f) - x)); }

/* softplus(step + bias), or that sum where decays have a bound, of each key or value of a head, one token after the other. */
template <typename T>
inline void find_times(const RecurrenceCall &call, int64_t token, int64_t count, int64_t head, float *times) {
    const int64_t size = call.steps_a_head;
    for (int64_t t = 0; t < count; ++t)
        for (int64_t i = 0; i < size; i += 16) {
            const int64_t at = head * size + i, left = size - i;
            const T *steps = static_cast<const T *>(call.steps) + (token + t) * call.step_stride + at;
            const Lanes sum = load_part(steps, left) + load_part(call.step_bias + at, left);
            store_part(times + t * size + i, call.bound != 0 ? sum : softplus(sum), left);
        }
}

/* Each token's decays and strengths: e^(-e^a_log * softplus(step + bias)), and sigmoid or, without strengths, that softplus. Without
   steps it is 1. */
template <typename T>
inline void find_factors(const RecurrenceCall &call, int64_t token, int64_t count, int64_t head, float *decays, float *strengths) {
    if (call.by_number) return find_times<T>(call, token, count, head, strengths);
    alignas(64) float steps[16] = {}, given[16] = {};
    for (int64_t t = 0; t < count; ++t) {
        if (call.steps != nullptr && call.steps_a_head == 1)
            steps[t] = to_float(static_cast<const T *>(call.steps)[(token + t) * call.step_stride + head]);
        if (call.strengths != nullptr)
            given[t] = to_float(static_cast<const T *>(call.strengths)[(token + t) * call.strength_stride + head]);
    }
    const Lanes zero = all(0.0f), rate = exp_lanes(all(call.decay_logs[head]));
    const auto decayed = [&](Lanes time) {
        return exp_lanes(call.bound != 0 ? all(call.bound) * sigmoid(rate * time) : zero - rate * time);
    };
    Lanes time = all(1.0f);
    if (call.steps_a_head > 1) {
        const int64_t size = count * call.steps_a_head;
        find_times<T>(call, token, count, head, decays);
        for (int64_t i = 0; i < size; i += 16)
            store_part(decays + i, decayed(load_part(decays + i, size - i)), size - i);
    } else {
        if (call.steps != nullptr) time = load(steps) + all(call.step_bias[head]);
        if (call.steps != nullptr && call.bound == 0) time = softplus(time);
        store(decays, decayed(time));
    }
    store(strengths, call.strengths == nullptr ? time : all(call.strength_scale) * sigmoid(load(given)));
}

/* What a token gives: a delta's normed, then gated; else with the value times `skips`, gated where there are gates. */
template <typename T>
inline void finish_token(const RecurrenceCall &call, int64_t token, int64_t head, const float *value, float *x) {
    const int64_t width = call.value_dim;
    float scale = 1.0f;
    if (call.norm != nullptr) {
        Lanes total = all(0.0f);
        for (int64_t i = 0; i < width; i += 16) {
            const Lanes a = load_part(x + i, width - i);
            total = fused(a, a, total);
        }
        scale = 1.0f / __builtin_sqrtf(sum(total) / float(width) + call.eps);
    }
    const T *gate = static_cast<const T *>(call.gates) + token * call.gate_stride + head * width;
    T *result = static_cast<T *>(call.result) + (token * call.value_heads + head) * width;
    for (int64_t i = 0; i < width; i += 16) {
        const int64_t left = width - i;
        Lanes y = load_part(x + i, left);
        if (call.norm != nullptr) y = y * all(scale) * load_part(call.norm + i, left);
        if (call.skips != nullptr) {
            const Lanes skips = call.by_number ? load_part(call.skips + head * width + i, left) : all(call.skips[head]);
            y = fused(skips, load_part(value + i, left), y);
        }
        if (call.gates != nullptr) {
            const Lanes given = load_part(gate + i, left);
            y = y * (call.is_sigmoid ? sigmoid(given) : activate(given, SILU));
        }
        store_part(result + i, y, left);
    }
}

/* How many of these tokens go up to the first whose state is kept. */
inline int64_t tokens_until_kept(const int32_t *trail, int64_t count) {
    for (int64_t t = 0; t < count; ++t)
        if (trail[t] >= 0) return t + 1;
    return count;
}

template <typename T>
inline void recur_head(const RecurrenceCall &call, int64_t row, int64_t head) {
    const int64_t keys = call.key_dim, width = call.value_dim, shared = head / (call.value_heads / call.key_heads);
    const int64_t last = call.rows.starts[row + 1], whole = 2 * keys + width;
    const int64_t key_step = call.by_head ? whole : keys, value_step = call.by_head ? whole : width;
    const int32_t *trail = call.rows.trail;
    float *states = call.pool + head * keys * width, *state = states + call.rows.pages[row] * call.page_stride;
    if (call.rows.fresh[row] != 0) memset(state, 0, size_t(keys * width) * 4);
    const int64_t numbers = call.by_number ? keys * width : 0;
    float *queries = static_cast<float *>(scratch(SLOT_ROWS, size_t(TOKENS_A_BLOCK * 3 * (keys + width) + numbers) * 4));
    float *own_keys = queries + TOKENS_A_BLOCK * keys, *values = own_keys + TOKENS_A_BLOCK * keys;
    float *results = values + TOKENS_A_BLOCK * width, *decays = results + TOKENS_A_BLOCK * width;
    float *strengths = decays + TOKENS_A_BLOCK * keys, *rates = strengths + TOKENS_A_BLOCK * width;
    for (int64_t i = 0; i < numbers; i += 16)
        store_part(rates + i, exp_lanes(load_part(call.decay_logs + head * numbers + i, numbers - i)), numbers - i);
    for (int64_t token = call.rows.starts[row], count; token < last; token += count) {
        count = last - token < TOKENS_A_BLOCK ? last - token : TOKENS_A_BLOCK;
        if (trail != nullptr) count = tokens_until_kept(trail + token, count);
        for (int64_t t = 0; t < count; ++t) {
            const T *x = static_cast<const T *>(call.x) + (token + t) * call.x_stride;
            widen_part(x + call.queries_at + shared * key_step, keys, call.activates, queries + t * keys);
            widen_part(x + call.keys_at + shared * key_step, keys, call.activates, own_keys + t * keys);
            widen_part(x + call.values_at + head * value_step, width, call.activates, values + t * width);
            if (call.strengths == nullptr) continue;
            make_unit(queries + t * keys, keys, 1.0f / __builtin_sqrtf(float(keys)));
            make_unit(own_keys + t * keys, keys, 1.0f);
        }
        find_factors<T>(call, token, count, head, decays, strengths);
        const HeadTokens tokens{count, keys, width, queries, own_keys, values, decays, strengths, rates, results};
        if (call.strengths == nullptr)
            call.by_number ? pass_tokens<false, BY_NUMBER>(tokens, state) : pass_tokens<false, BY_HEAD>(tokens, state);
        else
            call.steps_a_head > 1 ? pass_tokens<true, BY_KEY>(tokens, state) : pass_tokens<true, BY_HEAD>(tokens, state);
        for (int64_t t = 0; t < count; ++t)
            finish_token<T>(call, token + t, head, values + t * width, results + t * width);
        if (trail != nullptr && trail[token + count - 1] >= 0)
            memcpy(states + trail[token + count - 1] * call.page_stride, state, size_t(keys * width) * 4);
    }
}

void recur(int kind, const RecurrenceCall &call, int64_t row, int64_t head) {
    if (call.rows.starts[row] == call.rows.starts[row + 1]) return;
    if (kind == FLOAT32) return recur_head<float>(call, row, head);
    recur_head<bf16>(call, row, head);
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
