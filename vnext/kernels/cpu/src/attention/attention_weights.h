/* What the bfloat16 forms of attention share whose products are the machine's own: the power of two, scores' factor.
   Included by the levels with bfloat16 instructions only. */
#pragma once

#include "attention/attention_lanes.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

/* 2^x for x <= 0, exactly 0 below -125: numbers that underflow would cost an assist each. scalef takes the whole part
   of x itself; the rest goes through a minimax polynomial on [0, 1) that is exactly 1 at 0, since a peak that stays
   must not change a sum. Error 3e-6, far below the rounding of a weight. */
inline __m512 exp2_tile(__m512 x) {
    constexpr int FRACTION_BY_FLOOR = 1;
    const __m512 low = _mm512_set1_ps(-125.0f), inside = _mm512_max_ps(x, low);
    const __m512 part = _mm512_reduce_ps(inside, FRACTION_BY_FLOOR);
    __m512 p = _mm512_set1_ps(0.013426685f);
    p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(0.052242473f));
    p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(0.24128021f));
    p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(0.69304484f));
    p = _mm512_fmadd_ps(p, part, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, low, _CMP_GE_OQ), p, inside);
}

/* What turns a score, capped where a cap is asked for, into a power of two. */
inline float score_factor(const AttentionCall &call) { return call.cap == 0 ? call.scale * 1.44269504f : 1.0f; }

/* Pairs of neighbouring bfloat16 of two vectors: word i of one with word i of the other. */
inline __m512i interleave_halves() {
    return _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19,
                            3, 18, 2, 17, 1, 16, 0);
}

/* Fetch a piece that comes later: keys [piece, piece + 64) as far as they are below `end`. */
inline void fetch_piece(const AttentionCall &call, const Split &split, int64_t piece, int64_t end) {
    const int64_t last = piece + PIECE_KEYS < end ? piece + PIECE_KEYS : end;
    for (int64_t key = piece; key < last;) {
        const int64_t run = call.block_size - key % call.block_size, count = run < last - key ? run : last - key;
        const char *keys = reinterpret_cast<const char *>(cache_row<bf16>(call.key_cache, call, split, key));
        const char *values = reinterpret_cast<const char *>(cache_row<bf16>(call.value_cache, call, split, key));
        for (int64_t i = 0; i < count * call.head_dim * 2; i += 64) {
            _mm_prefetch(keys + i, _MM_HINT_T0);
            _mm_prefetch(values + i, _MM_HINT_T0);
        }
        key += count;
    }
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
