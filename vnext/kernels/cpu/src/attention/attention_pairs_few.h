/* bfloat16 attention of few queries by the dot product of pairs: a decode's heads that share a key head. Included by the
   AVX512-BF16 level only.

   The arithmetic of attention_pairs.h, lane for lane and in the same order; but where that one has sixteen lanes in a
   vector, this one has sixteen keys of one lane, turned about in pairs of d so that a vector holds one pair. Keys and
   values are read from the cache as they lie there. */
#pragma once

#include "attention/attention_coded_pairs.h"
#include "attention/attention_few.h"
#include "attention/attention_pairs.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

/* The running softmax of up to FEW_LANES queries; arrays by lane. */
struct FewPairs {
    uint32_t *query;  // [count][head_dim / 2]: pairs of d
    float *total;     // [count][padded_dim], in the state that is left
    int count;
    int32_t low[FEW_LANES], high[FEW_LANES];
    float peak[16], weight_sum[16];
    int32_t low_min, high_max;
};

/* dots [L][PIECE_KEYS] of the keys key, key + 1, ... of a piece, sixteen of them, with L queries. */
template <int L>
inline void multiply_keys(const uint32_t *query, int64_t head_dim, const PieceOfRows<bf16> &rows, const PiecePowers<bf16> &,
                          int key, NextLines &next, float *dots) {
    __m512 dot[L];
    for (int lane = 0; lane < L; ++lane)
        dot[lane] = _mm512_setzero_ps();
    for (int64_t d = 0; d < head_dim; d += 32) {
        __m512i part[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i)
            part[i] = _mm512_loadu_si512(rows.key[key + i] + d);
        transpose(part);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            next.fetch();
#pragma GCC unroll 4
            for (int lane = 0; lane < L; ++lane) {
                const __m512bh number = (__m512bh)pair_at(query + lane * (head_dim / 2) + d / 2 + i);
                dot[lane] = _mm512_dpbf16_ps(dot[lane], (__m512bh)part[i], number);
            }
        }
    }
    for (int lane = 0; lane < L; ++lane)
        _mm512_store_ps(dots + lane * PIECE_KEYS + key, dot[lane]);
}

/* Cap and mask one lane's scores in place; its highest. */
inline float settle_lane(const AttentionCall &call, int64_t piece, KeyGroups groups, int32_t low, int32_t high,
                         float *scores) {
    const __m512i steps = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512 never = _mm512_set1_ps(-__builtin_inff());
    __m512 peak = never;
    for (int group = groups.first; group < groups.last; ++group) {
        __m512 score = _mm512_load_ps(scores + group * 16);
        if (call.cap != 0) score = final_score(call, {score}).v;
        const __m512i place = _mm512_add_epi32(_mm512_set1_epi32(int(piece) + group * 16), steps);
        const __mmask16 seen = _mm512_cmplt_epi32_mask(place, _mm512_set1_epi32(high)) &
                               _mm512_cmpge_epi32_mask(place, _mm512_set1_epi32(low));
        score = _mm512_mask_blend_ps(seen, never, score);
        _mm512_store_ps(scores + group * 16, score);
        peak = _mm512_max_ps(peak, score);
    }
    return _mm512_reduce_max_ps(peak);
}

/* One lane's scores to weights in pairs of keys; returns their sum. */
inline float weigh_lane(__m512 factor, __m512 peak, KeyGroups groups, const float *scores, uint32_t *weights) {
    __m512 sums = _mm512_setzero_ps();
    for (int group = groups.first; group < groups.last; ++group) {
        const __m512 weight = exp2_tile(_mm512_fmsub_ps(_mm512_load_ps(scores + group * 16), factor, peak));
        sums = _mm512_add_ps(sums, weight);
        _mm256_store_si256((__m256i *)(weights + group * 8), (__m256i)_mm512_cvtneps_pbh(weight));
    }
    return sum({sums});
}

/* L lanes and D doubled vectors of their totals, as add_pairs; weights [L][PAIRS_A_PIECE]. */
template <int L, int D, typename T>
inline void add_rows(const FewPairs &few, int64_t width, int64_t at, const float *keep, const uint32_t *weights,
                     const PieceOfRows<T> &rows, const PiecePowers<T> &powers, KeyGroups groups, NextLines &next) {
    const ValuePairs<T> values;
    __m512 total[L][2 * D];
#pragma GCC unroll 4
    for (int lane = 0; lane < L; ++lane)
#pragma GCC unroll 4
        for (int d = 0; d < 2 * D; ++d)
            total[lane][d] =
                _mm512_mul_ps(_mm512_loadu_ps(few.total + lane * width + at + d * 16), _mm512_set1_ps(keep[lane]));
    for (int pair = groups.first * 8; pair < groups.last * 8; ++pair) {
        if (sizeof(T) == 1) next.fetch();
        __m512bh value[2 * D];
#pragma GCC unroll 2
        for (int d = 0; d < D; ++d)
            values.load(rows, powers, pair, at + d * 32, value + 2 * d);
#pragma GCC unroll 4
        for (int lane = 0; lane < L; ++lane) {
            const __m512bh weight = (__m512bh)pair_at(weights + lane * PAIRS_A_PIECE + pair);
#pragma GCC unroll 4
            for (int d = 0; d < 2 * D; ++d)
                total[lane][d] = _mm512_dpbf16_ps(total[lane][d], value[d], weight);
        }
    }
#pragma GCC unroll 4
    for (int lane = 0; lane < L; ++lane)
#pragma GCC unroll 4
        for (int d = 0; d < 2 * D; ++d)
            _mm512_storeu_ps(few.total + lane * width + at + d * 16, total[lane][d]);
}

template <int L, typename T>
void walk_few_pairs(const AttentionCall &call, FewPairs &few, const PieceOfRows<T> &rows, NextLines &next,
                    int64_t piece, KeyGroups groups) {
    const PiecePowers<T> powers(rows, call.head_dim);
    alignas(64) float scores[FEW_LANES * PIECE_KEYS];
    alignas(64) uint32_t weights[FEW_LANES * PAIRS_A_PIECE];
    float peak[16] = {}, sums[16] = {}, keep[16];
    constexpr int KEYS = PieceOfRows<T>::KEYS_AT_ONCE;
    const int begin = groups.first * 16 / KEYS * KEYS;
    const int64_t keys = (groups.last * 16 - begin + KEYS - 1) / KEYS * KEYS, pairs = (groups.last - groups.first) * 8;
    next.begin(sizeof(T) == 1 ? pairs * ((call.head_dim + 63) / 64) : keys * call.head_dim / 32);
    for (int key = begin; key < groups.last * 16; key += KEYS)
        multiply_keys<L>(few.query, call.head_dim, rows, powers, key, next, scores);
    const float factor = score_factor(call);
    for (int lane = 0; lane < L; ++lane) {
        float *own = scores + lane * PIECE_KEYS;
        const float highest = settle_lane(call, piece, groups, few.low[lane], few.high[lane], own) * factor;
        peak[lane] = few.peak[lane] > highest ? few.peak[lane] : highest;
        sums[lane] = weigh_lane(_mm512_set1_ps(factor), _mm512_set1_ps(peak[lane]), groups, own,
                                weights + lane * PAIRS_A_PIECE);
    }
    const __m512 now = _mm512_loadu_ps(peak), kept = exp2_tile(_mm512_sub_ps(_mm512_loadu_ps(few.peak), now));
    _mm512_storeu_ps(few.peak, now);
    _mm512_storeu_ps(few.weight_sum, _mm512_fmadd_ps(_mm512_loadu_ps(few.weight_sum), kept, _mm512_loadu_ps(sums)));
    _mm512_storeu_ps(keep, kept);
    int64_t at = 0;
    for (; at + 64 <= call.head_dim; at += 64)
        add_rows<L, 2>(few, call.padded_dim, at, keep, weights, rows, powers, groups, next);
    if (at < call.head_dim) add_rows<L, 1>(few, call.padded_dim, at, keep, weights, rows, powers, groups, next);
}

inline void fill_few_pairs(const AttentionCall &call, const LaneSet &lanes, FewPairs &few) {
    few.count = lanes.count;
    for (int lane = 0; lane < 16; ++lane) {
        few.peak[lane] = LOWEST;
        few.weight_sum[lane] = 0.0f;
    }
    for (int lane = 0; lane < lanes.count; ++lane) {
        few.low[lane] = lanes.low[lane];
        few.high[lane] = lanes.high[lane];
        const bf16 *query = static_cast<const bf16 *>(call.query) + lanes.query[lane] * call.head_dim;
        memcpy(few.query + lane * (call.head_dim / 2), query, size_t(call.head_dim) * 2);
    }
    few.low_min = lowest(lanes.low, lanes.count);
    few.high_max = highest(lanes.high, lanes.count);
}

/* Up to FEW_LANES queries, heads of whole steps of 32, caches of T. */
template <typename T>
void attend_few_pairs(const AttentionCall &call, const LaneSet &lanes, const Split &split, const Split *next,
                      const SplitState &state) {
    typedef const PieceOfRows<T> &Rows;
    static constexpr void (*walk[FEW_LANES + 1])(const AttentionCall &, FewPairs &, Rows, NextLines &, int64_t, KeyGroups) = {
        nullptr, walk_few_pairs<1, T>, walk_few_pairs<2, T>, walk_few_pairs<3, T>, walk_few_pairs<4, T>};
    alignas(64) uint32_t query[FEW_LANES * HEAD_MAX / 2];
    FewPairs few;
    few.query = query;
    few.total = state.total;
    fill_few_pairs(call, lanes, few);
    memset(state.total, 0, size_t(lanes.count) * size_t(call.padded_dim) * 4);
    const int64_t end = few.high_max < split.last_key ? few.high_max : split.last_key;
    PieceOfRows<T> rows;
    NextLines lines;
    for (int64_t piece = split.first_key; piece < end; piece += PIECE_KEYS) {
        const KeyGroups groups = groups_of(piece, few.low_min, end);
        if (groups.last == 0) continue;
        find_piece(call, split, piece, few.low_min, end, rows);
        lines.find_behind<T>(call, split, next, piece, end);
        walk[few.count](call, few, rows, lines, piece, groups);
    }
    store_part(state.peak, load(few.peak), lanes.count);
    store_part(state.weight_sum, load(few.weight_sum), lanes.count);
}

/* The form that fits the number of queries: no bit tells which it was. */
void attend_by_pairs(const AttentionCall &call, const LaneSet &lanes, const Split &split, const Split *next,
                     const SplitState &state) {
    const bool few = lanes.count <= FEW_PASSES * FEW_LANES && call.head_dim % 32 == 0;
    if (!few) return attend_pairs(call, lanes, split, state);
    by_few(call, lanes, next, state, [&](const LaneSet &some, const Split *then, const SplitState &left) {
        attend_few_pairs<bf16>(call, some, split, then, left);
    });
}

/* Few queries from codes, as attend_codes. */
bool attend_codes_by_pairs(int kind, const AttentionCall &call, const LaneSet &lanes, const Split &split, const Split *next,
                           const SplitState &state) {
    if (kind == FLOAT32) return attend_codes(kind, call, lanes, split, next, state);
    if (lanes.count > FEW_PASSES * FEW_LANES || call.head_dim % CODES_A_SCALE != 0) return false;
    by_few(call, lanes, next, state, [&](const LaneSet &some, const Split *then, const SplitState &left) {
        attend_few_pairs<int8_t>(call, some, split, then, left);
    });
    return true;
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
