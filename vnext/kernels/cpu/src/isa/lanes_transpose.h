/* Sixteen vectors of sixteen as a square that is turned about: rows become columns. */
#pragma once

#include "isa/lanes.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

#if defined(VNX_AVX512)

/* Rows of sixteen 32-bit words -> columns. */
inline void transpose(__m512i *r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

inline void transpose(Lanes *rows) {
    __m512i words[16];
    for (int i = 0; i < 16; ++i)
        words[i] = _mm512_castps_si512(rows[i].v);
    transpose(words);
    for (int i = 0; i < 16; ++i)
        rows[i] = {_mm512_castsi512_ps(words[i])};
}

#elif defined(VNX_AVX2)

inline void transpose_eight(__m256 *r) {
    __m256 t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        const __m256 low = r[i], high = r[i + 4];
        r[i] = _mm256_permute2f128_ps(low, high, 0x20);
        r[i + 4] = _mm256_permute2f128_ps(low, high, 0x31);
    }
}

inline void transpose(Lanes *rows) {
    __m256 quarter[4][8];
    for (int i = 0; i < 8; ++i) {
        quarter[0][i] = rows[i].a, quarter[1][i] = rows[i].b;
        quarter[2][i] = rows[i + 8].a, quarter[3][i] = rows[i + 8].b;
    }
    for (int i = 0; i < 4; ++i)
        transpose_eight(quarter[i]);
    for (int i = 0; i < 8; ++i) {
        rows[i] = {quarter[0][i], quarter[2][i]};
        rows[i + 8] = {quarter[1][i], quarter[3][i]};
    }
}

#elif defined(VNX_NEON)

inline void transpose_four(Floats *a, Floats *b, Floats *c, Floats *d) {
    const Floats ac = vzip1q_f32(*a, *c), ac_end = vzip2q_f32(*a, *c), bd = vzip1q_f32(*b, *d), bd_end = vzip2q_f32(*b, *d);
    *a = vzip1q_f32(ac, bd);
    *b = vzip2q_f32(ac, bd);
    *c = vzip1q_f32(ac_end, bd_end);
    *d = vzip2q_f32(ac_end, bd_end);
}

/* By squares of four: each is turned about, then changes places with the one across the diagonal. */
inline void transpose(Lanes *rows) {
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j) {
            Lanes *r = rows + 4 * i;
            transpose_four(&r[0].v[j], &r[1].v[j], &r[2].v[j], &r[3].v[j]);
        }
    for (int i = 0; i < 16; ++i)
        for (int j = i / 4 + 1; j < 4; ++j) {
            Floats *here = &rows[i].v[j], *there = &rows[4 * j + i % 4].v[i / 4], held = *here;
            *here = *there;
            *there = held;
        }
}

#endif

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
