/* Attention of few queries on the vector units: a decode's heads that share a key head.

   The arithmetic of attention_lanes.h, lane for lane and in the same order; but where that one has sixteen lanes in a
   vector, this one has sixteen keys of one lane, turned about so that a vector holds one place of d:
     scores [lane][key] = sum over d, rising, of key[d] * query[d]
     a piece's sum over its keys, rising, one after the other
     totals [lane][d] as attention_wide.h has them
   Keys and values are read from the cache as they lie there. */
#pragma once

#include "attention/attention_coded_few.h"
#include "attention/attention_wide.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

/* The running softmax of up to FEW_LANES queries; arrays by lane. */
struct FewLanes {
    int count;
    const float *query;  // [count][padded_dim]
    float *total;        // [count][padded_dim]
    float low[16], high[16], peak[16], weight_sum[16];
    int32_t low_min, low_max, high_min, high_max;
};

/* dots [L][PIECE_KEYS] of few_groups(L) * 16 keys begin, begin + 1, ... with L queries. */
template <int L, typename T>
__attribute__((noinline)) void multiply_few(const float *query, int64_t width, int64_t head_dim, const RowsOfPiece<T> &rows,
                                            const PieceScales<T> &, int begin, NextLines &next, float *dots) {
    constexpr int GROUPS = few_groups(L);
    Lanes dot[GROUPS][L];
    for (int group = 0; group < GROUPS; ++group)
        for (int lane = 0; lane < L; ++lane)
            dot[group][lane] = all(0.0f);
    for (int64_t d = 0; d < head_dim; d += FEW_DEPTH)
        for (int group = 0; group < GROUPS; ++group) {
            Lanes part[FEW_DEPTH];
            load_turned(rows.key + begin + group * 16, d, part);
#pragma GCC unroll 16
            for (int i = 0; i < FEW_DEPTH; ++i) {
                if (i % 4 == 0) next.fetch();
#pragma GCC unroll 4
                for (int lane = 0; lane < L; ++lane)
                    dot[group][lane] = fused(part[i], all(query[lane * width + d + i]), dot[group][lane]);
            }
        }
    for (int group = 0; group < GROUPS; ++group)
        for (int lane = 0; lane < L; ++lane)
            store(dots + lane * PIECE_KEYS + begin + group * 16, dot[group][lane]);
}

/* Products to scores, in place; what a lane may not see and what lies behind `count` is never. Each lane's highest, or its
   peak before, into `peak`. */
inline void score_few(const AttentionCall &call, const FewLanes &few, int64_t first, int count, float *scores, float *peak) {
    static const float steps[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const bool hidden = first < few.low_max || first + count > few.high_min;
    const Lanes never = all(-__builtin_inff());
    for (int lane = 0; lane < few.count; ++lane) {
        Lanes highest = all(few.peak[lane]);
        for (int key = 0; key < count; key += 16) {
            float *at = scores + lane * PIECE_KEYS + key;
            Lanes score = final_score(call, load(at));
            if (hidden || key + 16 > count) {
                const Lanes place = all(float(first + key)) + load(steps);
                const Lanes end = smaller(all(few.high[lane]), all(float(first + count)));
                score = where_less(place, end, where_less(place, all(few.low[lane]), never, score), never);
            }
            store(at, score);
            highest = larger(highest, score);
        }
        peak[lane] = largest_of(highest);
    }
}

/* Scores to weights in place; peaks and sums follow. keep [16]: what becomes of the totals so far. */
inline void weigh_few(FewLanes &few, int count, const float *peak, float *scores, float *keep) {
    float sum[16] = {};
    for (int lane = 0; lane < few.count; ++lane)
        for (int key = 0; key < count; key += 16) {
            float *at = scores + lane * PIECE_KEYS + key;
            store(at, exp2_lanes(load(at) - all(peak[lane])));
        }
    for (int key = 0; key < count; ++key)
        for (int lane = 0; lane < few.count; ++lane)
            sum[lane] = sum[lane] + scores[lane * PIECE_KEYS + key];
    const Lanes kept = exp2_lanes(load(few.peak) - load(peak));
    store(keep, kept);
    store(few.weight_sum, fused(load(few.weight_sum), kept, load(sum)));
    store(few.peak, load(peak));
}

/* L lanes and D vectors of their totals, as add_block; weights [L][PIECE_KEYS]. */
template <int L, int D, typename T>
inline void add_few(const FewLanes &few, int64_t width, const float *keep, const float *weights, const RowsOfPiece<T> &rows,
                    const PieceScales<T> &scales, int64_t at, int count, NextLines &next) {
    Lanes sum[L][D];
#pragma GCC unroll 4
    for (int lane = 0; lane < L; ++lane)
#pragma GCC unroll 4
        for (int d = 0; d < D; ++d)
            sum[lane][d] = load(few.total + lane * width + at + d * 16) * all(keep[lane]);
    for (int key = 0; key < count; ++key) {
        if (sizeof(T) == 1) next.fetch();
        Lanes value[D];
#pragma GCC unroll 4
        for (int d = 0; d < D; ++d)
            value[d] = load_value(rows, scales, key, at + d * 16);
#pragma GCC unroll 4
        for (int lane = 0; lane < L; ++lane) {
            const Lanes weight = all(weights[lane * PIECE_KEYS + key]);
#pragma GCC unroll 4
            for (int d = 0; d < D; ++d)
                sum[lane][d] = fused(value[d], weight, sum[lane][d]);
        }
    }
#pragma GCC unroll 4
    for (int lane = 0; lane < L; ++lane)
#pragma GCC unroll 4
        for (int d = 0; d < D; ++d)
            store(few.total + lane * width + at + d * 16, sum[lane][d]);
}

template <int L, typename T>
void walk_few(const AttentionCall &call, FewLanes &few, const RowsOfPiece<T> &rows, NextLines &next, int64_t first, int count) {
    alignas(64) float scores[FEW_LANES * PIECE_KEYS];
    float peak[16] = {}, keep[16];
    const PieceScales<T> scales(rows, call.head_dim);
    constexpr int together = 16 * few_groups(L);
    const int64_t keys = (count + together - 1) / together * together, steps = call.head_dim / 16;
    next.begin(sizeof(T) == 1 ? count * (steps / WIDE_DEPTH + steps % WIDE_DEPTH) : keys * steps / 4);
    for (int key = 0; key < count; key += together)
        multiply_few<L>(few.query, call.padded_dim, call.head_dim, rows, scales, key, next, scores);
    score_few(call, few, first, count, scores, peak);
    weigh_few(few, count, peak, scores, keep);
    int64_t at = 0;
    for (; at + WIDE_DEPTH * 16 <= call.head_dim; at += WIDE_DEPTH * 16)
        add_few<L, WIDE_DEPTH>(few, call.padded_dim, keep, scores, rows, scales, at, count, next);
    for (; at < call.head_dim; at += 16)
        add_few<L, 1>(few, call.padded_dim, keep, scores, rows, scales, at, count, next);
}

template <typename T>
inline void fill_few(const AttentionCall &call, const LaneSet &lanes, float *query, FewLanes &few) {
    few.count = lanes.count;
    few.query = query;
    for (int lane = 0; lane < 16; ++lane) {
        const bool there = lane < lanes.count;
        few.low[lane] = there ? float(lanes.low[lane]) : 0.0f;
        few.high[lane] = there ? float(lanes.high[lane]) : 0.0f;
        few.peak[lane] = LOWEST;
        few.weight_sum[lane] = 0.0f;
        if (there)
            widen_row(static_cast<const T *>(call.query) + lanes.query[lane] * call.head_dim, call.head_dim,
                      query + lane * call.padded_dim);
    }
    few.low_min = lowest(lanes.low, lanes.count);
    few.low_max = highest(lanes.low, lanes.count);
    few.high_min = lowest(lanes.high, lanes.count);
    few.high_max = highest(lanes.high, lanes.count);
}

/* Up to FEW_LANES queries of Q, heads of whole vectors, caches of T. */
template <typename Q, typename T>
void attend_few(const AttentionCall &call, const LaneSet &lanes, const Split &split, const Split *next, const SplitState &state) {
    static constexpr void (*walk[FEW_LANES + 1])(const AttentionCall &, FewLanes &, const RowsOfPiece<T> &, NextLines &, int64_t, int) = {
        nullptr, walk_few<1, T>, walk_few<2, T>, walk_few<3, T>, walk_few<4, T>};
    const size_t floats = size_t(lanes.count) * size_t(call.padded_dim);
    FewLanes few;
    fill_few<Q>(call, lanes, static_cast<float *>(scratch(SLOT_TILES, floats * 4)), few);
    few.total = state.total;
    memset(state.total, 0, floats * 4);
    const int64_t end = few.high_max < split.last_key ? few.high_max : split.last_key;
    NextLines lines;
    for (int64_t piece = split.first_key; piece < end; piece += PIECE_KEYS) {
        const int64_t first = piece < few.low_min ? few.low_min : piece;
        const int64_t last = piece + PIECE_KEYS < end ? piece + PIECE_KEYS : end;
        if (first >= last) continue;
        RowsOfPiece<T> rows;
        find_rows<T>(call, split, first, last, rows);
        lines.find_behind<T>(call, split, next, piece, end);
        walk[few.count](call, few, rows, lines, first, int(last - first));
    }
    store_part(state.peak, load(few.peak), lanes.count);
    store_part(state.weight_sum, load(few.weight_sum), lanes.count);
}

/* The form that fits the number of queries: no bit tells which it was. */
template <typename T>
void attend_by_vectors(const AttentionCall &call, const LaneSet &lanes, const Split &split, const Split *next,
                       const SplitState &state) {
    const bool few = lanes.count <= FEW_PASSES * FEW_LANES && call.head_dim % 16 == 0;
    if (!few) return attend_wide<T, T>(call, lanes, split, next, state);
    by_few(call, lanes, next, state, [&](const LaneSet &some, const Split *then, const SplitState &left) {
        attend_few<T, T>(call, some, split, then, left);
    });
}

/* From codes as they lie in the cache; false where a row of them is no whole blocks. No bit tells which form it was. */
bool attend_codes(int kind, const AttentionCall &call, const LaneSet &lanes, const Split &split, const Split *next,
                  const SplitState &state) {
    if (call.head_dim % CODES_A_SCALE != 0) return false;
    if (lanes.count > FEW_PASSES * FEW_LANES) {
        (kind == FLOAT32 ? attend_wide<float, int8_t> : attend_wide<bf16, int8_t>)(call, lanes, split, next, state);
        return true;
    }
    by_few(call, lanes, next, state, [&](const LaneSet &some, const Split *then, const SplitState &left) {
        (kind == FLOAT32 ? attend_few<float, int8_t> : attend_few<bf16, int8_t>)(call, some, split, then, left);
    });
    return true;
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
