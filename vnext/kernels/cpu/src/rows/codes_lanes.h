/* Rows of 8-bit numbers that share a power of two in blocks of 32: MXINT8 of the Open Compute Project's Microscaling Formats
   (MX) v1.0. See coded_bytes in kernels.h.

   A number is code * 2^(exponent - 127 - 6). It has 7 bits and a sign, so it is exact in bfloat16 and float32: what reads a row
   computes with the same numbers at every level. */
#pragma once

#include "isa/lanes.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

constexpr int CODE_BITS = 6;           // behind the point
constexpr int LEAST_EXPONENT_OF_CODES = -100;  // smaller numbers become zero; no bfloat16 is denormal then

inline float power_of_two(int exponent) {
    const uint32_t bits = uint32_t(exponent + 127) << 23;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

#if defined(VNX_AVX512)
inline Lanes load_codes(const int8_t *p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)))};
}
inline void store_codes(int8_t *p, Lanes x) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}
#else
#if defined(VNX_AVX2)
inline __m256 eight_codes(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
inline Lanes load_codes(const int8_t *p) { return {eight_codes(p), eight_codes(p + 8)}; }
inline void store_codes(int8_t *p, Lanes x) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    const __m256i risen = _mm256_permute4x64_epi64(words, 0xd8);
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(risen), _mm256_extracti128_si256(risen, 1)));
}
#elif defined(VNX_NEON)
inline Lanes load_codes(const int8_t *p) {
    const int8x16_t codes = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(codes)), high = vmovl_high_s8(codes);
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))}};
}
#else
inline Lanes load_codes(const int8_t *p) {
    float numbers[16];
    for (int i = 0; i < 16; ++i)
        numbers[i] = float(p[i]);
    return load(numbers);
}
#endif
#if !defined(VNX_AVX2)
inline void store_codes(int8_t *p, Lanes x) {
    float numbers[16];
    store(numbers, x);
    for (int i = 0; i < 16; ++i)
        p[i] = int8_t(numbers[i]);
}
#endif
#endif

/* Numbers that are exact in bfloat16: nothing is rounded. */
inline void store_exact(float *p, Lanes x) { store(p, x); }
#if defined(VNX_AVX2)
inline __m256i upper_words(__m256 x) { return _mm256_srli_epi32(_mm256_castps_si256(x), 16); }
inline void store_exact(bf16 *p, Lanes x) {
    const __m256i words = _mm256_packus_epi32(upper_words(x.a), upper_words(x.b));
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(words, 0xd8));
}
#else
inline void store_exact(bf16 *p, Lanes x) { store(p, x); }
#endif

#if defined(VNX_VBMI) && defined(VNX_BF16)
/* |code| in bfloat16 as if its exponent were the largest there is, 254, byte by byte. */
struct CodeBytes {
    uint8_t low[128] = {}, high[128] = {};
    constexpr CodeBytes() {
        for (int code = 1, power = 0; code < 128; ++code) {
            if (code == 2 << power) ++power;
            const int word = (254 - CODE_BITS + power) << 7 | (code << (7 - power) & 0x7f);
            low[code] = uint8_t(word), high[code] = uint8_t(word >> 8);
        }
    }
};
alignas(64) constexpr CodeBytes CODE_BYTES;

/* The tables in registers. */
struct CodeTables {
    const __m512i low[2] = {_mm512_load_si512(CODE_BYTES.low), _mm512_load_si512(CODE_BYTES.low + 64)};
    const __m512i high[2] = {_mm512_load_si512(CODE_BYTES.high), _mm512_load_si512(CODE_BYTES.high + 64)};

    /* 64 codes to words; of each sixteen the first eight to words[0], the others to words[1]. */
    void widen(__m512i codes, __m512i *words) const {
        const __m512i size = _mm512_abs_epi8(codes), lower = _mm512_permutex2var_epi8(low[0], size, low[1]);
        const __m512i positive = _mm512_permutex2var_epi8(high[0], size, high[1]);
        const __m512i upper = _mm512_ternarylogic_epi32(positive, codes, _mm512_set1_epi8(-128), 0xf8);
        words[0] = _mm512_unpacklo_epi8(lower, upper);
        words[1] = _mm512_unpackhi_epi8(lower, upper);
    }
};
#endif

/* The exponent of the largest of up to 32 numbers; a NaN is not looked at. */
template <typename T>
inline int shared_exponent(const T *from, int64_t count) {
    Lanes largest = all(0.0f);
    for (int64_t i = 0; i < count; i += 16) {
        const Lanes x = load_part(from + i, count - i);
        largest = larger(larger(x, all(0.0f) - x), largest);
    }
    const float top = largest_of(largest);
    uint32_t bits;
    memcpy(&bits, &top, 4);
    const int exponent = int(bits >> 23) - 127;
    return exponent < LEAST_EXPONENT_OF_CODES ? LEAST_EXPONENT_OF_CODES : exponent > 127 ? 127 : exponent;
}

/* A row to codes and exponents, rounded to the nearest, ties to even; what is out of range, and a NaN, is +-127. */
template <typename T>
inline void pack_codes(const T *from, int64_t head_dim, int8_t *to) {
    for (int64_t block = 0; block < head_dim; block += CODES_A_SCALE) {
        const int64_t end = block + CODES_A_SCALE < head_dim ? block + CODES_A_SCALE : head_dim;
        const int exponent = shared_exponent(from + block, end - block);
        const Lanes factor = all(power_of_two(CODE_BITS - exponent));
        to[head_dim + block / CODES_A_SCALE] = int8_t(exponent + 127);
        for (int64_t d = block; d < end; d += 16) {
            const Lanes scaled = load_part(from + d, end - d) * factor;
            int8_t codes[16];
            store_codes(codes, nearest(smaller(larger(scaled, all(-127.0f)), all(127.0f))));
            memcpy(to + d, codes, size_t(end - d < 16 ? end - d : 16));
        }
    }
}

/* The last exponents of rows of codes, four in a word: the last four in words[0]. */
template <int COUNT>
struct Exponents {
    alignas(64) uint32_t words[(HEAD_MAX / CODES_A_SCALE + 3) / 4][COUNT];
    int64_t blocks;

    Exponents(const int8_t *const *rows, int64_t head_dim) : blocks(coded_bytes(head_dim) - head_dim) {
        for (int word = 0; word < (blocks + 3) / 4; ++word)
            for (int i = 0; i < COUNT; ++i) {
                uint32_t found;
                memcpy(&found, rows[i] + coded_bytes(head_dim) - 4 * (word + 1), 4);
                asm("" : "+r"(found));  // or GCC collects them in vectors, one by one
                words[word][i] = found;
            }
    }
    /* `body(row, exponent)` for all rows of a block of numbers. */
    template <typename F>
    void each(int64_t block, const F &body) const {
        const int64_t from_end = blocks - 1 - block;
        const uint32_t *found = words[from_end / 4];
        const int shift = int(24 - from_end % 4 * 8);
        for (int i = 0; i < COUNT; ++i)
            body(i, found[i] >> shift & 255);
    }
};

/* What the codes of a block are multiplied by. */
inline float scale_of(int exponent) { return power_of_two(exponent - 127 - CODE_BITS); }

/* The last numbers of a row, fewer than CODES_A_SCALE. */
template <typename T>
inline void widen_rest(const int8_t *row, int64_t head_dim, int64_t block, T *to) {
    int8_t codes[CODES_A_SCALE] = {};
    memcpy(codes, row + block, size_t(head_dim - block));
    const Lanes scale = all(scale_of(uint8_t(row[head_dim + block / CODES_A_SCALE])));
    for (int64_t d = 0; d < head_dim - block; d += 16)
        store_part(to + block + d, load_codes(codes + d) * scale, head_dim - block - d);
}

template <typename T>
inline void widen_rows_of_codes(const int8_t *row, int64_t head_dim, int64_t count, T *to) {
    const int64_t whole = head_dim / CODES_A_SCALE * CODES_A_SCALE;
    for (; count > 0; --count, row += coded_bytes(head_dim), to += head_dim) {
        for (int64_t block = 0; block < whole; block += CODES_A_SCALE) {
            const Lanes scale = all(scale_of(uint8_t(row[head_dim + block / CODES_A_SCALE])));
            store_exact(to + block, load_codes(row + block) * scale);
            store_exact(to + block + 16, load_codes(row + block + 16) * scale);
        }
        if (whole < head_dim) widen_rest(row, head_dim, whole, to);
    }
}

inline void widen_codes(int kind, const int8_t *rows, int64_t head_dim, int64_t count, void *to) {
    if (kind == FLOAT32) return widen_rows_of_codes(rows, head_dim, count, static_cast<float *>(to));
    widen_rows_of_codes(rows, head_dim, count, static_cast<bf16 *>(to));
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
