/* Norms, gates and rotary embedding on sixteen lanes, a row at a time: a row's result depends on that row alone.

   Arithmetic is float32; it rounds where the references round between two operations (after a norm, before its
   weight). */
#pragma once

#include "rows/codes_lanes.h"
#include "rows/wide_lanes.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

/* 1 / root mean square of `width` numbers; two sums by turns, then joined. */
template <typename T>
inline float inverse_size(const T *x, int64_t width, float eps) {
    Lanes even = all(0.0f), odd = all(0.0f);
    for (int64_t i = 0; i < width; i += 32) {
        const Lanes a = load_part(x + i, width - i);
        even = fused(a, a, even);
        if (width - i <= 16) break;
        const Lanes b = load_part(x + i + 16, width - i - 16);
        odd = fused(b, b, odd);
    }
    return 1.0f / __builtin_sqrtf(sum(even + odd) / float(width) + eps);
}

/* x * scale * weight[0..15]. A weight with an offset (stored less one) or of a wider type is applied before the rounding.
 */
template <typename T, typename W>
inline Lanes normed(Lanes x, float scale, const W *weight, int64_t left, float offset, const T *kind) {
    const Lanes factor = load_part(weight, left);
    if (sizeof(W) > sizeof(T) || offset != 0) return rounded(x * all(scale) * (factor + all(offset)), kind);
    return rounded(rounded(x * all(scale), kind) * factor, kind);
}

template <typename T, typename W>
inline void norm_rows(const NormCall &call, int64_t first, int64_t last) {
    const W *weight = static_cast<const W *>(call.weight);
    for (int64_t row = first; row < last; ++row) {
        const T *x = static_cast<const T *>(call.x) + row * call.x_stride;
        if (call.residual != nullptr) {
            const T *residual = static_cast<const T *>(call.residual) + row * call.residual_stride;
            T *total = static_cast<T *>(call.total) + row * call.width;
            for (int64_t i = 0; i < call.width; i += 16) {
                const int64_t left = call.width - i;
                store_part(total + i, load_part(x + i, left) + load_part(residual + i, left), left);
            }
            x = total;
        }
        const float scale = inverse_size(x, call.width, call.eps);
        T *result = static_cast<T *>(call.normed) + row * (call.normed_stride == 0 ? call.width : call.normed_stride);
        for (int64_t i = 0; i < call.width; i += 16) {
            const int64_t left = call.width - i;
            store_part(result + i, normed(load_part(x + i, left), scale, weight + i, left, call.weight_offset, x), left);
        }
    }
}

/* The sum of part(i, left), sixteen numbers at place i of which `left` count, for all places below `width`; two sums by turns. */
template <typename Part>
inline float sum_of_parts(int64_t width, const Part &part) {
    Lanes sums[2] = {all(0.0f), all(0.0f)};
    for (int64_t i = 0; i < width; i += 16)
        sums[i / 16 % 2] = sums[i / 16 % 2] + part(i, width - i);
    return sum(sums[0] + sums[1]);
}

template <typename T>
inline void layer_norm_rows(const NormCall &call, int64_t first, int64_t last) {
    const float *weight = static_cast<const float *>(call.weight);
    static const float ones[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    const float count = float(call.width);
    for (int64_t row = first; row < last; ++row) {
        const T *x = static_cast<const T *>(call.x) + row * call.x_stride;
        T *result = static_cast<T *>(call.normed) + row * call.width;
        const Lanes mean = all(sum_of_parts(call.width, [&](int64_t i, int64_t left) { return load_part(x + i, left); }) / count);
        const float square = sum_of_parts(call.width, [&](int64_t i, int64_t left) {
            const Lanes apart = (load_part(x + i, left) - mean) * load_part(ones, left);
            return apart * apart;
        });
        const Lanes scale = all(1.0f / __builtin_sqrtf(square / count + call.eps));
        for (int64_t i = 0; i < call.width; i += 16) {
            const int64_t left = call.width - i;
            const Lanes centred = (load_part(x + i, left) - mean) * scale;
            store_part(result + i, centred * load_part(weight + i, left) + load_part(call.bias + i, left), left);
        }
    }
}

void norm(int kind, const NormCall &call, int64_t first, int64_t last) {
    if (call.bias != nullptr) {
        if (kind == FLOAT32) return layer_norm_rows<float>(call, first, last);
        return layer_norm_rows<bf16>(call, first, last);
    }
    if (kind == FLOAT32) return norm_rows<float, float>(call, first, last);
    if (kind == BFLOAT16_WIDE_NORM) return norm_rows<bf16, float>(call, first, last);
    norm_rows<bf16, bf16>(call, first, last);
}

/* x = cap * tanh(x / cap). */
void soft_cap(float *x, int64_t count, float cap) {
    for (int64_t i = 0; i < count; i += 16)
        store_part(x + i, all(cap) * tanh_lanes(load_part(x + i, count - i) / all(cap)), count - i);
}

/* The activation of x; GELU is rounded to T before anything is multiplied by it. */
template <typename T>
inline Lanes activated(Lanes x, const GateCall &call, const T *kind) {
    if (call.gate == RELU2) {
        const Lanes positive = where_less(x, all(0.0f), all(0.0f), x);
        return positive * positive;
    }
    return call.gate == GELU || call.gate == XIELU ? rounded(activate_wide(x, call), kind) : activate(x, call.gate);
}

template <typename T>
inline void gate_rows(const GateCall &call, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        const T *gate = static_cast<const T *>(call.x) + row * call.x_stride, *up = gate + call.width;
        T *result = static_cast<T *>(call.result) + row * call.width;
        for (int64_t i = 0; i < call.width; i += 16) {
            const int64_t left = call.width - i;
            const Lanes x = load_part(gate + i, left);
            if (call.alone)
                store_part(result + i, activated(x, call, gate), left);
            else if (call.gate == GELU)
                store_part(result + i, activated(x, call, gate) * load_part(up + i, left), left);
            else
                store_part(result + i, gated(x, load_part(up + i, left), call.gate), left);
        }
    }
}

template <typename T>
inline void sigmoid_rows(const GateCall &call, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        const T *gate = static_cast<const T *>(call.x) + row * call.x_stride;
        const T *x = static_cast<const T *>(call.others) + row * call.others_stride;
        T *result = static_cast<T *>(call.result) + row * call.width;
        for (int64_t i = 0; i < call.width; i += 16) {
            const int64_t left = call.width - i;
            const Lanes given = call.is_one ? all(sum(load_part(gate, 1))) : load_part(gate + i, left);
            const Lanes inverse = all(1.0f) + exp_lanes(all(0.0f) - given);
            store_part(result + i, load_part(x + i, left) / inverse, left);
        }
    }
}

void gate(int kind, const GateCall &call, int64_t first, int64_t last) {
    if (call.others != nullptr) {
        if (kind == FLOAT32) return sigmoid_rows<float>(call, first, last);
        return sigmoid_rows<bf16>(call, first, last);
    }
    if (kind == FLOAT32) return gate_rows<float>(call, first, last);
    gate_rows<bf16>(call, first, last);
}

/* Turn the pairs (i, i + rotated_dim / 2) of a head, counted from `turned_at`; the rest of it stays. */
template <typename T>
inline void turn_head(const RotaryCall &call, const T *from, T *to, const float *cosine, const float *sine) {
    const int64_t half = call.rotated_dim / 2, at = call.turned_at;
    if (to != from) memcpy(to, from, size_t(at) * sizeof(T));
    from += at;
    to += at;
    for (int64_t i = 0; i < half; i += 16) {
        const int64_t left = half - i;
        const Lanes a = load_part(from + i, left), b = load_part(from + half + i, left);
        const Lanes c = load_part(cosine + i, left), s = load_part(sine + i, left);
        store_part(to + i, a * c - b * s, left);
        store_part(to + half + i, b * c + a * s, left);
    }
    if (to != from) memcpy(to + 2 * half, from + 2 * half, size_t(call.head_dim - at - 2 * half) * sizeof(T));
}

/* Norm and turn one head of query or key, or turn it first. */
template <typename T, typename W>
inline void place_head(const RotaryCall &call, const void *norm_weight, const T *from, T *to, int64_t token) {
    const int64_t half = call.rotated_dim / 2;
    const bool turns_first = call.norms_last && call.cosine != nullptr;
    if (turns_first) {
        turn_head(call, from, to, call.cosine + token * half, call.sine + token * half);
        from = to;
    }
    if (norm_weight != nullptr) {
        const W *weight = static_cast<const W *>(norm_weight);
        const float scale = inverse_size(from, call.head_dim, call.eps);
        for (int64_t i = 0; i < call.head_dim; i += 16) {
            const int64_t left = call.head_dim - i;
            store_part(to + i, normed(load_part(from + i, left), scale, weight + i, left, call.weight_offset, from),
                       left);
        }
        from = to;
    }
    if (call.cosine != nullptr && !turns_first)
        turn_head(call, from, to, call.cosine + token * half, call.sine + token * half);
    else if (to != from)
        memcpy(to, from, size_t(call.head_dim) * sizeof(T));
}

template <typename T, typename W>
inline void rotary_rows(const RotaryCall &call, int64_t first, int64_t last) {
    const bool is_coded = call.cache_kind == INT8, has_values = call.value_cache != call.key_cache;
    const int64_t size = call.head_dim, width = is_coded ? coded_bytes(size) : size;
    alignas(64) T turned[HEAD_MAX];
    for (int64_t token = first; token < last; ++token) {
        const T *joined = static_cast<const T *>(call.joined) + token * call.joined_stride;
        T *query = static_cast<T *>(call.query) + token * call.heads * size;
        for (int64_t head = 0; head < call.heads; ++head)
            place_head<T, W>(call, call.query_norm, joined + head * size, query + head * size, token);
        const int64_t slot = call.slots[token];
        const int64_t at = slot / call.block_size * call.block_stride + slot % call.block_size * width;
        const T *keys = joined + call.heads * size, *values = keys + call.kv_heads * size;
        for (int64_t head = 0; head < call.kv_heads; ++head) {
            const int64_t place = at + head * call.block_size * width;
            if (is_coded) {
                place_head<T, W>(call, call.key_norm, keys + head * size, turned, token);
                pack_codes(turned, size, static_cast<int8_t *>(call.key_cache) + place);
                if (has_values) pack_codes(values + head * size, size, static_cast<int8_t *>(call.value_cache) + place);
                continue;
            }
            place_head<T, W>(call, call.key_norm, keys + head * size, static_cast<T *>(call.key_cache) + place, token);
            if (has_values) memcpy(static_cast<T *>(call.value_cache) + place, values + head * size, size_t(size) * sizeof(T));
        }
    }
}

void rotary(int kind, const RotaryCall &call, int64_t first, int64_t last) {
    if (kind == FLOAT32) return rotary_rows<float, float>(call, first, last);
    if (kind == BFLOAT16_WIDE_NORM) return rotary_rows<bf16, float>(call, first, last);
    rotary_rows<bf16, bf16>(call, first, last);
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
