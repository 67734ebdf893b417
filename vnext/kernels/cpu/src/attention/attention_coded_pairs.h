/* Rows of codes for attention by the dot product of pairs: bfloat16 is looked up in registers. Included by the AVX512-BF16
   level only.

   A byte's bfloat16 is found in tables as if the exponent were the largest there is; its power of two is then subtracted from
   the exponent, and saturation keeps 0 at 0. */
#pragma once

#include "attention/attention_pair_rows.h"
#include "rows/codes_lanes.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

/* What is subtracted from the words of a piece's keys and values: [block of d][key]; keys' twice, for pairs of d. */
template <>
struct PiecePowers<int8_t> {
    alignas(64) uint32_t key[HEAD_MAX / CODES_A_SCALE][PIECE_KEYS];
    alignas(64) uint16_t value[HEAD_MAX / CODES_A_SCALE][PIECE_KEYS];

    PiecePowers(const PieceOfRows<int8_t> &rows, int64_t head_dim) {
        const Exponents<PIECE_KEYS> keys(rows.key, head_dim), values(rows.value, head_dim);
        for (int64_t block = 0; block < keys.blocks; ++block) {
            keys.each(block, [&](int i, uint32_t exponent) { key[block][i] = (254 - exponent) << 7 | (254 - exponent) << 23; });
            values.each(block, [&](int i, uint32_t exponent) { value[block][i] = uint16_t((254 - exponent) << 7); });
        }
    }
};

/* Pairs of sixteen codes of sixteen rows, turned about: from u[i] become the pairs 2 i and 2 i + 1 of all rows. */
inline void turn_codes(const int8_t *const *rows, int64_t d, __m512i *u) {
    __m512i four[4], t[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        four[j] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(rows[j] + d)));
        four[j] = _mm512_mask_broadcast_i32x4(four[j], 0x00f0, _mm_loadu_si128((const __m128i *)(rows[4 + j] + d)));
        four[j] = _mm512_mask_broadcast_i32x4(four[j], 0x0f00, _mm_loadu_si128((const __m128i *)(rows[8 + j] + d)));
        four[j] = _mm512_mask_broadcast_i32x4(four[j], 0xf000, _mm_loadu_si128((const __m128i *)(rows[12 + j] + d)));
    }
    t[0] = _mm512_unpacklo_epi16(four[0], four[1]), t[1] = _mm512_unpackhi_epi16(four[0], four[1]);
    t[2] = _mm512_unpacklo_epi16(four[2], four[3]), t[3] = _mm512_unpackhi_epi16(four[2], four[3]);
    u[0] = _mm512_unpacklo_epi32(t[0], t[2]), u[1] = _mm512_unpackhi_epi32(t[0], t[2]);
    u[2] = _mm512_unpacklo_epi32(t[1], t[3]), u[3] = _mm512_unpackhi_epi32(t[1], t[3]);
}

/* As multiply_keys of bfloat16. */
template <int L>
inline void multiply_keys(const uint32_t *query, int64_t head_dim, const PieceOfRows<int8_t> &rows,
                          const PiecePowers<int8_t> &powers, int key, NextLines &, float *dots) {
    constexpr int GROUPS = PieceOfRows<int8_t>::KEYS_AT_ONCE / 16;
    const CodeTables tables;
    __m512 dot[GROUPS][L];
    for (int group = 0; group < GROUPS; ++group)
        for (int lane = 0; lane < L; ++lane)
            dot[group][lane] = _mm512_setzero_ps();
    const int8_t *const *keys = rows.key + key;
    for (uint32_t d = 0; d < uint32_t(head_dim); d += 16) {
        asm("" : "+r"(keys));  // or GCC keeps the rows' places in vector registers
#pragma GCC unroll 2
        for (int group = 0; group < GROUPS; ++group) {
            const __m512i power = _mm512_load_si512(powers.key[d / CODES_A_SCALE] + key + group * 16);
            __m512i u[4];
            turn_codes(keys + group * 16, d, u);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                __m512i pair[2];
                tables.widen(u[i], pair);
#pragma GCC unroll 2
                for (int j = 0; j < 2; ++j) {
                    const __m512bh part = (__m512bh)_mm512_subs_epu16(pair[j], power);
#pragma GCC unroll 4
                    for (int lane = 0; lane < L; ++lane)
                        dot[group][lane] = _mm512_dpbf16_ps(dot[group][lane], part,
                                                            (__m512bh)pair_at(query + lane * (head_dim / 2) + d / 2 + 2 * i + j));
                }
            }
        }
    }
    for (int group = 0; group < GROUPS; ++group)
        for (int lane = 0; lane < L; ++lane)
            _mm512_store_ps(dots + lane * PIECE_KEYS + key + group * 16, dot[group][lane]);
}

/* 32 codes each of two neighbouring rows, such that widening them gives pairs of keys. */
inline __m512i beside(const int8_t *even, const int8_t *odd) {
    alignas(64) static const uint8_t places[64] = {
        0, 64, 1, 65, 2,  66, 3,  67, 16, 80, 17, 81, 18, 82, 19, 83, 4,  68, 5,  69, 6,  70, 7,  71, 20, 84, 21, 85, 22, 86, 23, 87,
        8, 72, 9, 73, 10, 74, 11, 75, 24, 88, 25, 89, 26, 90, 27, 91, 12, 76, 13, 77, 14, 78, 15, 79, 28, 92, 29, 93, 30, 94, 31, 95};
    const __m512i a = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)even));
    const __m512i b = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)odd));
    return _mm512_permutex2var_epi8(a, _mm512_load_si512(places), b);
}

template <>
struct ValuePairs<int8_t> {
    const CodeTables tables;

    void load(const PieceOfRows<int8_t> &rows, const PiecePowers<int8_t> &powers, int pair, int64_t d, __m512bh *found) const {
        __m512i words[2];
        tables.widen(beside(rows.value[2 * pair] + d, rows.value[2 * pair + 1] + d), words);
        const __m512i power = pair_at(powers.value[d / CODES_A_SCALE] + 2 * pair);
        found[0] = (__m512bh)_mm512_subs_epu16(words[0], power);
        found[1] = (__m512bh)_mm512_subs_epu16(words[1], power);
    }
};

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
