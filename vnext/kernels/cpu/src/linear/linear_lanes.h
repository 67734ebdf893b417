/* Matrix products on sixteen lanes: the level's float32 and bfloat16 forms, and what happens to a finished sum.

   Each output is accumulated over K in one order whatever the rows and columns beside it:
     FLOAT32   acc = fma(x[k], w[k], acc), k rising
     BFLOAT16  per step of 32 inputs two chains, even and odd k, from zero; acc += even + odd: what tdpbf16ps does, bit
   for bit. A product of two bfloat16 is exact in float32, so a fused and a separate multiply-add agree. */
#pragma once

#include "isa/lanes.h"
#include "team.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

#if defined(VNX_AVX512)
constexpr int ROWS_AT_ONCE = 8;
#elif defined(VNX_AVX2)
constexpr int ROWS_AT_ONCE = 2;
#else
constexpr int ROWS_AT_ONCE = 1;
#endif

/* tdpbf16ps treats denormal numbers as zero; so must the implementations with the same sums, while they run. */
struct DenormalsAreZero {
#if defined(__SSE2__)
    unsigned saved = __builtin_ia32_stmxcsr();
    DenormalsAreZero() { __builtin_ia32_ldmxcsr(saved | 0x8040); }
    ~DenormalsAreZero() { __builtin_ia32_ldmxcsr(saved); }
#endif
};

inline const char *panel_of(const Packed &w, int64_t panel) {
    return reinterpret_cast<const char *>(&w) + w.panels_at + panel * w.panel_bytes;
}
inline const float *floats_at(const Packed &w, int64_t offset) {
    return offset == 0 ? nullptr : reinterpret_cast<const float *>(reinterpret_cast<const char *>(&w) + offset);
}

/* Scale, bias, gate and rounding of one row's 32 sums; gate and up are rounded before they meet, as unfused ones are.
 */
template <typename T>
inline void finish_row(const LinearCall &call, int64_t row, int64_t panel, Lanes first, Lanes second) {
    const Packed &w = *call.weight;
    const float *scales = floats_at(w, w.scales_at), *bias = floats_at(w, w.bias_at);
    if (scales != nullptr) {
        first = first * load(scales + panel * PANEL);
        second = second * load(scales + panel * PANEL + 16);
    }
    if (bias != nullptr) {
        first = first + load(bias + panel * PANEL);
        second = second + load(bias + panel * PANEL + 16);
    }
    T *result = static_cast<T *>(call.result) + row * call.result_stride;
    if (w.gate != NO_GATE && call.apart) {
        const int64_t half = w.out / 2, part = half - panel * 16;
        store_part(result + panel * 16, first, part);
        return store_part(result + half + panel * 16, second, part);
    }
    if (w.gate != NO_GATE) {
        const Lanes gated = activate(rounded(first, result), w.gate) * rounded(second, result);
        store_part(result + panel * 16, gated, w.out / 2 - panel * 16);
        return;
    }
    const int64_t left = w.out - panel * PANEL;
    if (call.bias != nullptr) {
        const T *added = static_cast<const T *>(call.bias) + panel * PANEL;
        first = rounded(first, result) + load_part(added, left);
        if (left > 16) second = rounded(second, result) + load_part(added + 16, left - 16);
    }
    store_part(result + panel * PANEL, first, left);
    if (left > 16) store_part(result + panel * PANEL + 16, second, left - 16);
}

inline void finish_row(const LinearCall &call, int64_t row, int64_t panel, Lanes first, Lanes second) {
    if (call.result_kind == FLOAT32) return finish_row<float>(call, row, panel, first, second);
    return finish_row<bf16>(call, row, panel, first, second);
}

/* int8 weights in sign and magnitude -> bf16, exact; `count` a multiple of 64. Of each 64 bytes, 16-byte lane i holds
   the weights 8 i .. 8 i + 7, then 32 + 8 i .. 32 + 8 i + 7: the order that unpacking bytes to words puts right. */
#if defined(VNX_VBMI)
inline void expand(const uint8_t *from, bf16 *to, int64_t count) {
    alignas(64) static const struct Table {
        uint8_t low[128], high[128];
        constexpr Table() : low(), high() {
            for (int i = 1; i < 128; ++i) {
                int exponent = 0;
                while (i >> (exponent + 1))
                    ++exponent;
                low[i] = uint8_t(((127 + exponent) & 1) << 7 | ((i << (7 - exponent)) & 0x7f));
                high[i] = uint8_t((127 + exponent) >> 1);
            }
        }
    } table;
    const __m512i low0 = _mm512_load_si512(table.low), low1 = _mm512_load_si512(table.low + 64);
    const __m512i high0 = _mm512_load_si512(table.high), high1 = _mm512_load_si512(table.high + 64);
    const __m512i sign = _mm512_set1_epi8(char(0x80));
    for (int64_t i = 0; i < count; i += 64) {
        const __m512i bytes = _mm512_loadu_si512(from + i);
        const __m512i low = _mm512_permutex2var_epi8(low0, bytes, low1);
        const __m512i high = _mm512_permutex2var_epi8(high0, bytes, high1);
        const __m512i signed_high = _mm512_or_si512(high, _mm512_and_si512(bytes, sign));
        _mm512_storeu_si512(to + i, _mm512_unpacklo_epi8(low, signed_high));
        _mm512_storeu_si512(to + i + 32, _mm512_unpackhi_epi8(low, signed_high));
    }
}
#elif defined(VNX_AVX512) || defined(VNX_AVX2)
/* Eight at a time: a small whole number is exact as float32, and its upper half is its bfloat16. */
inline void expand(const uint8_t *from, bf16 *to, int64_t count) {
    for (int64_t i = 0; i < count; i += 8) {
        const int64_t at = i / 64 * 64 + i % 16 / 8 * 32 + i % 64 / 16 * 8;
        const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(from + i)));
        const __m256 magnitude = _mm256_cvtepi32_ps(_mm256_and_si256(bytes, _mm256_set1_epi32(0x7f)));
        const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(bytes, _mm256_set1_epi32(0x80)), 8);
        const __m256i words = _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(magnitude), 16), sign);
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0xd8);
        _mm_storeu_si128((__m128i *)(to + at), _mm256_castsi256_si128(packed));
    }
}
#else
inline void expand(const uint8_t *from, bf16 *to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t byte = i / 64 * 64 + i % 32 / 8 * 16 + i % 64 / 32 * 8 + i % 8;
        const float magnitude = float(from[byte] & 0x7f);
        uint32_t bits;
        memcpy(&bits, &magnitude, 4);
        to[i] = bf16(bits >> 16 | uint32_t(from[byte] & 0x80) << 8);
    }
}
#endif

/* A panel's bf16 weights: in place, or expanded into scratch. */
inline const bf16 *bf16_panel(const Packed &w, int64_t panel) {
    if (w.kind == BFLOAT16) return reinterpret_cast<const bf16 *>(panel_of(w, panel));
    bf16 *expanded = static_cast<bf16 *>(scratch(SLOT_TILES, size_t(w.panel_bytes) * 2));
    expand(reinterpret_cast<const uint8_t *>(panel_of(w, panel)), expanded, w.panel_bytes);
    return expanded;
}

template <int R>
inline void rows_f32(const LinearCall &call, int64_t row, int64_t panel) {
    const Packed &w = *call.weight;
    const float *weights = reinterpret_cast<const float *>(panel_of(w, panel));
    const float *x = static_cast<const float *>(call.x) + row * call.x_stride;
    Lanes first[R], second[R];
    for (int r = 0; r < R; ++r)
        first[r] = second[r] = all(0.0f);
    for (int64_t k = 0; k < w.in; ++k) {
        const Lanes a = load(weights + k * PANEL), b = load(weights + k * PANEL + 16);
        for (int r = 0; r < R; ++r) {
            const Lanes value = all(x[r * call.x_stride + k]);
            first[r] = fused(value, a, first[r]);
            second[r] = fused(value, b, second[r]);
        }
    }
    for (int r = 0; r < R; ++r)
        finish_row(call, row + r, panel, first[r], second[r]);
}

/* x as float32 [R][steps * 32]; one half of a panel. */
template <int R>
inline void half_bf16(const float *x, int64_t steps, const bf16 *weights, Lanes *sums) {
    const int64_t width = steps * STEP;
    for (int r = 0; r < R; ++r)
        sums[r] = all(0.0f);
    for (int64_t step = 0; step < steps; ++step) {
        Lanes even[R], odd[R];
        for (int r = 0; r < R; ++r)
            even[r] = odd[r] = all(0.0f);
        for (int pair = 0; pair < 16; ++pair) {
            Lanes w_even, w_odd;
            load_pairs(weights + step * 1024 + pair * 32, w_even, w_odd);
            for (int r = 0; r < R; ++r) {
                const float *at = x + r * width + step * STEP + 2 * pair;
                even[r] = fused(all(at[0]), w_even, even[r]);
                odd[r] = fused(all(at[1]), w_odd, odd[r]);
            }
        }
        for (int r = 0; r < R; ++r)
            sums[r] = sums[r] + (even[r] + odd[r]);
    }
}

template <int R>
inline void rows_bf16(const LinearCall &call, const float *x, int64_t row, int64_t panel) {
    const Packed &w = *call.weight;
    const int64_t steps = (w.in + STEP - 1) / STEP;
    const bf16 *weights = bf16_panel(w, panel);
    Lanes first[R], second[R];
    half_bf16<R>(x, steps, weights, first);
    half_bf16<R>(x, steps, weights + 512, second);
    for (int r = 0; r < R; ++r)
        finish_row(call, row + r, panel, first[r], second[r]);
}

void linear_f32(const LinearCall &call, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1) {
    int64_t row = row0;
    for (; row + ROWS_AT_ONCE <= row1; row += ROWS_AT_ONCE)
        for (int64_t panel = panel0; panel < panel1; ++panel)
            rows_f32<ROWS_AT_ONCE>(call, row, panel);
    for (; row < row1; ++row)
        for (int64_t panel = panel0; panel < panel1; ++panel)
            rows_f32<1>(call, row, panel);
}

/* Rows [row, row + count) as float32 in scratch, padded with zeros to whole steps. */
inline const float *widened(const LinearCall &call, int64_t row, int count) {
    const int64_t in = call.weight->in, width = (in + STEP - 1) / STEP * STEP;
    float *wide = static_cast<float *>(scratch(SLOT_ROWS, size_t(count) * width * 4));
    for (int r = 0; r < count; ++r) {
        const bf16 *x = static_cast<const bf16 *>(call.x) + (row + r) * call.x_stride;
        for (int64_t k = 0; k < width; k += 16)
            store(wide + r * width + k, k < in ? load_part(x + k, in - k) : all(0.0f));
    }
    return wide;
}

inline void linear_bf16(const LinearCall &call, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1) {
    const DenormalsAreZero guard;
    int64_t row = row0;
    for (; row + ROWS_AT_ONCE <= row1; row += ROWS_AT_ONCE) {
        const float *x = widened(call, row, ROWS_AT_ONCE);
        for (int64_t panel = panel0; panel < panel1; ++panel)
            rows_bf16<ROWS_AT_ONCE>(call, x, row, panel);
    }
    for (; row < row1; ++row) {
        const float *x = widened(call, row, 1);
        for (int64_t panel = panel0; panel < panel1; ++panel)
            rows_bf16<1>(call, x, row, panel);
    }
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
