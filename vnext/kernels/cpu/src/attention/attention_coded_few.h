/* Rows of codes for attention of few queries on the vector units: widened in registers, after keys have been turned about. */
#pragma once

#include "attention/attention_few_rows.h"
#include "rows/codes_lanes.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

constexpr int CODES_A_WORD = 4;

#if defined(VNX_AVX512)
typedef __m512i CodeWords;  // sixteen words of four codes
inline __m128i sixteen_codes(const int8_t *p) { return _mm_loadu_si128((const __m128i *)p); }
/* Sixteen codes each of the rows 0, 4, 8 and 12. */
inline CodeWords every_fourth(const int8_t *const *rows, int64_t d) {
    CodeWords found = _mm512_castsi128_si512(sixteen_codes(rows[0] + d));
    found = _mm512_mask_broadcast_i32x4(found, 0x00f0, sixteen_codes(rows[4] + d));
    found = _mm512_mask_broadcast_i32x4(found, 0x0f00, sixteen_codes(rows[8] + d));
    return _mm512_mask_broadcast_i32x4(found, 0xf000, sixteen_codes(rows[12] + d));
}
inline CodeWords low_words(CodeWords x, CodeWords y) { return _mm512_unpacklo_epi32(x, y); }
inline CodeWords high_words(CodeWords x, CodeWords y) { return _mm512_unpackhi_epi32(x, y); }
inline CodeWords low_doubles(CodeWords x, CodeWords y) { return _mm512_unpacklo_epi64(x, y); }
inline CodeWords high_doubles(CodeWords x, CodeWords y) { return _mm512_unpackhi_epi64(x, y); }
template <int I>
inline Lanes code_of(CodeWords x) {
    return {_mm512_cvtepi32_ps(_mm512_srai_epi32(I == 3 ? x : _mm512_slli_epi32(x, 24 - 8 * I), 24))};
}
#elif defined(VNX_NEON)
struct CodeWords {
    Words v[4];
};
/* Register by register. */
template <typename F>
inline CodeWords joined(CodeWords x, CodeWords y, F join) {
    return {{join(x.v[0], y.v[0]), join(x.v[1], y.v[1]), join(x.v[2], y.v[2]), join(x.v[3], y.v[3])}};
}
inline CodeWords every_fourth(const int8_t *const *rows, int64_t d) {
    return {{loaded<Words>(rows[0] + d), loaded<Words>(rows[4] + d), loaded<Words>(rows[8] + d), loaded<Words>(rows[12] + d)}};
}
inline CodeWords low_words(CodeWords x, CodeWords y) {
    return joined(x, y, [](Words a, Words b) { return Words(vzip1q_u32(a, b)); });
}
inline CodeWords high_words(CodeWords x, CodeWords y) {
    return joined(x, y, [](Words a, Words b) { return Words(vzip2q_u32(a, b)); });
}
inline CodeWords low_doubles(CodeWords x, CodeWords y) {
    return joined(x, y, [](Words a, Words b) { return Words(vzip1q_u64(uint64x2_t(a), uint64x2_t(b))); });
}
inline CodeWords high_doubles(CodeWords x, CodeWords y) {
    return joined(x, y, [](Words a, Words b) { return Words(vzip2q_u64(uint64x2_t(a), uint64x2_t(b))); });
}
template <int I>
inline Lanes code_of(CodeWords x) {
    return each([&](int i) { return __builtin_convertvector(Integers(x.v[i] << (24 - 8 * I)) >> 24, Floats); });
}
#else
struct CodeWords {
    __m256i a, b;
};
inline __m256i two_rows(const int8_t *first, const int8_t *second) {
    return _mm256_loadu2_m128i((const __m128i *)second, (const __m128i *)first);
}
inline CodeWords every_fourth(const int8_t *const *rows, int64_t d) {
    return {two_rows(rows[0] + d, rows[4] + d), two_rows(rows[8] + d, rows[12] + d)};
}
inline CodeWords low_words(CodeWords x, CodeWords y) { return {_mm256_unpacklo_epi32(x.a, y.a), _mm256_unpacklo_epi32(x.b, y.b)}; }
inline CodeWords high_words(CodeWords x, CodeWords y) { return {_mm256_unpackhi_epi32(x.a, y.a), _mm256_unpackhi_epi32(x.b, y.b)}; }
inline CodeWords low_doubles(CodeWords x, CodeWords y) { return {_mm256_unpacklo_epi64(x.a, y.a), _mm256_unpacklo_epi64(x.b, y.b)}; }
inline CodeWords high_doubles(CodeWords x, CodeWords y) { return {_mm256_unpackhi_epi64(x.a, y.a), _mm256_unpackhi_epi64(x.b, y.b)}; }
template <int I>
inline __m256 eight_of(__m256i x) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(I == 3 ? x : _mm256_slli_epi32(x, 24 - 8 * I), 24));
}
template <int I>
inline Lanes code_of(CodeWords x) {
    return {eight_of<I>(x.a), eight_of<I>(x.b)};
}
#endif

/* Sixteen codes of sixteen rows, turned about: codes 4 j, ..., 4 j + 3 of all rows in words[j]. */
inline void turn_words(const int8_t *const *rows, int64_t d, CodeWords *words) {
    const CodeWords a = every_fourth(rows, d), b = every_fourth(rows + 1, d), c = every_fourth(rows + 2, d), e = every_fourth(rows + 3, d);
    const CodeWords front = low_words(a, b), front_end = low_words(c, e), back = high_words(a, b), back_end = high_words(c, e);
    words[0] = low_doubles(front, front_end), words[1] = high_doubles(front, front_end);
    words[2] = low_doubles(back, back_end), words[3] = high_doubles(back, back_end);
}

/* The powers of two of a piece's rows: [block of d][key]. */
template <>
struct PieceScales<int8_t> {
    alignas(64) float key[HEAD_MAX / CODES_A_SCALE][PIECE_KEYS], value[HEAD_MAX / CODES_A_SCALE][PIECE_KEYS];

    PieceScales(const RowsOfPiece<int8_t> &rows, int64_t head_dim) {
        const Exponents<PIECE_KEYS> keys(rows.key, head_dim), values(rows.value, head_dim);
        for (int64_t block = 0; block < keys.blocks; ++block) {
            keys.each(block, [&](int i, uint32_t exponent) { key[block][i] = scale_of(int(exponent)); });
            values.each(block, [&](int i, uint32_t exponent) { value[block][i] = scale_of(int(exponent)); });
        }
    }
};

inline Lanes load_value(const RowsOfPiece<int8_t> &rows, const PieceScales<int8_t> &scales, int key, int64_t d) {
    return load_codes(rows.value[key] + d) * all(scales.value[d / CODES_A_SCALE][key]);
}

/* Sums of one word's codes with L queries, one code after the other. */
template <int L>
inline void add_word(CodeWords word, Lanes scale, const float *query, int64_t width, Lanes *dot) {
    const Lanes number[CODES_A_WORD] = {code_of<0>(word) * scale, code_of<1>(word) * scale, code_of<2>(word) * scale, code_of<3>(word) * scale};
#pragma GCC unroll 4
    for (int i = 0; i < CODES_A_WORD; ++i)
#pragma GCC unroll 4
        for (int lane = 0; lane < L; ++lane)
            dot[lane] = fused(number[i], all(query[lane * width + i]), dot[lane]);
}

/* As multiply_few of rows of numbers. */
template <int L>
__attribute__((noinline)) void multiply_few(const float *query, int64_t width, int64_t head_dim, const RowsOfPiece<int8_t> &rows,
                                            const PieceScales<int8_t> &scales, int begin, NextLines &, float *dots) {
    constexpr int GROUPS = few_groups(L);
    Lanes dot[GROUPS][L];
    for (int group = 0; group < GROUPS; ++group)
        for (int lane = 0; lane < L; ++lane)
            dot[group][lane] = all(0.0f);
    const int8_t *const *keys = rows.key + begin;
    for (uint32_t d = 0; d < uint32_t(head_dim); d += 16) {
        asm("" : "+r"(keys));  // or GCC keeps the rows' places in vector registers
#pragma GCC unroll 2
        for (int group = 0; group < GROUPS; ++group) {
            const Lanes scale = load(scales.key[d / CODES_A_SCALE] + begin + group * 16);
            CodeWords words[4];
            turn_words(keys + group * 16, d, words);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j)
                add_word<L>(words[j], scale, query + d + CODES_A_WORD * j, width, dot[group]);
        }
    }
    for (int group = 0; group < GROUPS; ++group)
        for (int lane = 0; lane < L; ++lane)
            store(dots + lane * PIECE_KEYS + begin + group * 16, dot[group][lane]);
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
