/* bfloat16 attention of many queries by the dot product of pairs. Included by the AVX512-BF16 level only.

   Per piece of 64 keys, which begin at a multiple of 64:
     scores [key][lane] = sum over pairs of d, rising, of key * query      keys are read in pairs as they lie in the cache
     weights = 2^(score - peak), rounded to bfloat16 for the totals only   a vector holds one key's weights of sixteen lanes
     a piece's sum: sixteen sums of the keys k, k + 16, ..., rising, joined by halves: 8 + 8, 4 + 4, 2 + 2, 1 + 1
     totals [lane][d] = totals * keep + sum over pairs of keys, rising, of weight * value       values are paired once a piece
   A lane's arithmetic does not know the other lanes. Keys that nobody sees are not read: rows of zeros stand for them.
   attention_pairs_few.h does the same for few queries, bit for bit. */
#pragma once

#include "attention/attention_pair_rows.h"
#include "isa/lanes_transpose.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

constexpr int PAIR_VECTORS = 2;
constexpr int PAIR_LANES = PAIR_VECTORS * 16;
constexpr int PAIR_SUMS = 16;  // of keys and vectors of queries that are multiplied together

/* The running softmax of up to PAIR_LANES queries. */
struct PairTile {
    uint32_t *query;  // [padded_dim / 2][vectors][16]: pairs of d
    float *total;     // [count][padded_dim], in the state that is left
    __m512 peak[PAIR_VECTORS], weight_sum[PAIR_VECTORS];
    __m512i low[PAIR_VECTORS], high[PAIR_VECTORS];
    int count, vectors;
    int32_t low_min, low_max, high_min, high_max;
};

/* The numbers of one piece. */
struct PairSpace {
    uint32_t *values;   // [PAIRS_A_PIECE][padded_dim]: pairs of keys
    float *scores;      // [PIECE_KEYS][vectors][16]
    uint32_t *weights;  // [PAIRS_A_PIECE][vectors][16]: pairs of keys
};

/* Products of K keys with V vectors of queries: dots [K][V][16]. A function of its own, or the compiler keeps what its
   surroundings need in registers that the sums need. */
template <int K, int V>
__attribute__((noinline)) void multiply_pairs(const uint32_t *query, int64_t pairs, const bf16 *const *keys, float *dots) {
    __m512 dot[K][V];
#pragma GCC unroll 16
    for (int j = 0; j < K; ++j)
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v)
            dot[j][v] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < pairs; ++pair, query += V * 16) {
        __m512bh q[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v)
            q[v] = (__m512bh)_mm512_load_si512(query + v * 16);
#pragma GCC unroll 16
        for (int j = 0; j < K; ++j) {
            const __m512bh number = (__m512bh)pair_at(keys[j] + 2 * pair);
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v)
                dot[j][v] = _mm512_dpbf16_ps(dot[j][v], q[v], number);
        }
    }
#pragma GCC unroll 16
    for (int j = 0; j < K; ++j)
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v)
            _mm512_store_ps(dots + (j * V + v) * 16, dot[j][v]);
}

/* Cap and mask in place; each lane's highest score. */
template <int V>
inline void settle_pairs(const AttentionCall &call, const PairTile &tile, int64_t piece, KeyGroups groups, float *scores,
                         __m512 *highest) {
    const __m512 never = _mm512_set1_ps(-__builtin_inff());
    const bool hidden = piece + groups.first * 16 < tile.low_max || piece + groups.last * 16 > tile.high_min;
    __m512 peaks[4][V];
    for (int i = 0; i < 4; ++i)
        for (int v = 0; v < V; ++v)
            peaks[i][v] = never;
    for (int key = groups.first * 16; key < groups.last * 16; ++key)
        for (int v = 0; v < V; ++v) {
            float *at = scores + (key * V + v) * 16;
            __m512 score = _mm512_load_ps(at);
            if (call.cap != 0) score = final_score(call, {score}).v;
            if (hidden) {
                const __m512i place = _mm512_set1_epi32(int(piece + key));
                const __mmask16 seen =
                    _mm512_cmplt_epi32_mask(place, tile.high[v]) & _mm512_cmpge_epi32_mask(place, tile.low[v]);
                score = _mm512_mask_blend_ps(seen, never, score);
            }
            if (hidden || call.cap != 0) _mm512_store_ps(at, score);
            peaks[key % 4][v] = _mm512_max_ps(peaks[key % 4][v], score);
        }
    for (int v = 0; v < V; ++v)
        highest[v] = _mm512_max_ps(_mm512_max_ps(peaks[0][v], peaks[1][v]), _mm512_max_ps(peaks[2][v], peaks[3][v]));
}

/* Sixteen sums to one, by halves. */
inline __m512 join_halves(__m512 *sums) {
#pragma GCC unroll 4
    for (int half = 8; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; ++i)
            sums[i] = _mm512_add_ps(sums[i], sums[i + half]);
    return sums[0];
}

/* Scores of one vector of lanes to weights in pairs of keys; returns their sums. `stride` between keys, in floats. */
inline __m512 weigh_pairs(__m512 factor, __m512 peak, KeyGroups groups, int stride, const float *scores,
                          uint32_t *weights) {
    const __m512i interleave = interleave_halves();
    __m512 sums[16];
#pragma GCC unroll 8
    for (int j = 0; j < 16; j += 2) {
        __m512 even = _mm512_setzero_ps(), odd = even;
        for (int key = groups.first * 16 + j; key < groups.last * 16; key += 16) {
            const float *at = scores + key * stride;
            const __m512 a = exp2_tile(_mm512_fmsub_ps(_mm512_load_ps(at), factor, peak));
            const __m512 b = exp2_tile(_mm512_fmsub_ps(_mm512_load_ps(at + stride), factor, peak));
            even = _mm512_add_ps(even, a);
            odd = _mm512_add_ps(odd, b);
            const __m512i pairs = _mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(b, a));
            _mm512_store_si512(weights + key / 2 * stride, pairs);
        }
        sums[j] = even;
        sums[j + 1] = odd;
    }
    return join_halves(sums);
}

/* L lanes and D vectors of their totals [L][width]; weights [pairs][stride], values [pairs][width]. */
template <int L, int D>
inline void add_pairs(float *total, int64_t width, const float *keep, const uint32_t *weights, int stride,
                      const uint32_t *values, int pairs) {
    __m512 sum[L][D];
#pragma GCC unroll 4
    for (int lane = 0; lane < L; ++lane)
#pragma GCC unroll 4
        for (int d = 0; d < D; ++d)
            sum[lane][d] = _mm512_mul_ps(_mm512_loadu_ps(total + lane * width + d * 16), _mm512_set1_ps(keep[lane]));
    for (int pair = 0; pair < pairs; ++pair, weights += stride, values += width) {
        __m512bh value[D];
#pragma GCC unroll 4
        for (int d = 0; d < D; ++d)
            value[d] = (__m512bh)_mm512_load_si512(values + d * 16);
#pragma GCC unroll 4
        for (int lane = 0; lane < L; ++lane) {
            const __m512bh weight = (__m512bh)pair_at(weights + lane);
#pragma GCC unroll 4
            for (int d = 0; d < D; ++d)
                sum[lane][d] = _mm512_dpbf16_ps(sum[lane][d], value[d], weight);
        }
    }
#pragma GCC unroll 4
    for (int lane = 0; lane < L; ++lane)
#pragma GCC unroll 4
        for (int d = 0; d < D; ++d)
            _mm512_storeu_ps(total + lane * width + d * 16, sum[lane][d]);
}

/* All lanes of a tile, D vectors of their totals: the values' part stays in the nearest cache while the lanes pass. */
template <int D>
inline void add_columns(const PairTile &tile, int64_t width, int64_t at, const float *keep, const PairSpace &space,
                        KeyGroups groups) {
    static constexpr void (*forms[5])(float *, int64_t, const float *, const uint32_t *, int, const uint32_t *, int) = {
        nullptr, add_pairs<1, D>, add_pairs<2, D>, add_pairs<3, D>, add_pairs<4, D>};
    const int stride = tile.vectors * 16, pair = groups.first * 8;
    for (int lane = 0; lane < tile.count; lane += 4)
        forms[tile.count - lane < 4 ? tile.count - lane : 4](
            tile.total + lane * width + at, width, keep + lane, space.weights + pair * stride + lane, stride,
            space.values + pair * width + at, (groups.last - groups.first) * 8);
}

/* One piece, whose rows are in `rows` and whose values are paired. */
template <int V>
inline void walk_pairs(const AttentionCall &call, PairTile &tile, const PieceOfRows<bf16> &rows, int64_t piece, KeyGroups groups,
                       const PairSpace &space) {
    constexpr int KEYS = PAIR_SUMS / V;
    for (int key = groups.first * 16; key < groups.last * 16; key += KEYS)
        multiply_pairs<KEYS, V>(tile.query, call.head_dim / 2, rows.key + key, space.scores + key * V * 16);
    const __m512 factor = _mm512_set1_ps(score_factor(call));
    __m512 highest[V];
    alignas(64) float keep[V * 16];
    settle_pairs<V>(call, tile, piece, groups, space.scores, highest);
    for (int v = 0; v < V; ++v) {
        const __m512 peak = _mm512_max_ps(tile.peak[v], _mm512_mul_ps(highest[v], factor));
        const __m512 kept = exp2_tile(_mm512_sub_ps(tile.peak[v], peak));
        const __m512 sum = weigh_pairs(factor, peak, groups, V * 16, space.scores + v * 16, space.weights + v * 16);
        tile.peak[v] = peak;
        tile.weight_sum[v] = _mm512_fmadd_ps(tile.weight_sum[v], kept, sum);
        _mm512_store_ps(keep + v * 16, kept);
    }
    int64_t at = 0;
    for (; at + 64 <= call.padded_dim; at += 64)
        add_columns<4>(tile, call.padded_dim, at, keep, space, groups);
    if (at < call.padded_dim) add_columns<2>(tile, call.padded_dim, at, keep, space, groups);
}

inline void fill_pair_tile(const AttentionCall &call, const LaneSet &lanes, int first, PairTile &tile) {
    const int left = lanes.count - first;
    tile.count = left < PAIR_LANES ? left : PAIR_LANES;
    tile.vectors = (tile.count + 15) / 16;
    for (int v = 0; v < tile.vectors; ++v) {
        const int64_t *from = lanes.query + first + v * 16;
        for (int64_t d = 0; d < call.head_dim; d += 32) {
            __m512i part[16];
            for (int i = 0; i < 16; ++i) {
                const bf16 *row = static_cast<const bf16 *>(call.query) + from[i] * call.head_dim + d;
                part[i] = v * 16 + i < tile.count ? load_row(row, call.head_dim - d) : _mm512_setzero_si512();
            }
            transpose(part);
            for (int i = 0; i < 16; ++i)
                _mm512_store_si512(tile.query + ((d / 2 + i) * tile.vectors + v) * 16, part[i]);
        }
        tile.peak[v] = _mm512_set1_ps(LOWEST);
        tile.weight_sum[v] = _mm512_setzero_ps();
        tile.low[v] = _mm512_loadu_si512(lanes.low + first + v * 16);
        tile.high[v] = _mm512_loadu_si512(lanes.high + first + v * 16);
    }
    tile.low_min = lowest(lanes.low + first, tile.count);
    tile.low_max = highest(lanes.low + first, tile.count);
    tile.high_min = lowest(lanes.high + first, tile.count);
    tile.high_max = highest(lanes.high + first, tile.count);
}

void attend_pairs(const AttentionCall &call, const LaneSet &lanes, const Split &split, const SplitState &state) {
    const int tile_count = (lanes.count + PAIR_LANES - 1) / PAIR_LANES;
    const size_t width = size_t(call.padded_dim), values = PAIRS_A_PIECE * width, query = PAIR_LANES / 2 * width;
    const size_t words = values + PIECE_KEYS * PAIR_LANES * 3 / 2 + LANES_MAX / PAIR_LANES * query;
    PairSpace space;
    space.values = static_cast<uint32_t *>(scratch(SLOT_TILES, words * 4));
    space.scores = reinterpret_cast<float *>(space.values + values);
    space.weights = space.values + values + PIECE_KEYS * PAIR_LANES;
    memset(state.total, 0, size_t(lanes.count) * width * 4);
    PairTile tiles[LANES_MAX / PAIR_LANES];
    for (int i = 0; i < tile_count; ++i) {
        tiles[i].query = space.weights + PAIRS_A_PIECE * PAIR_LANES + i * query;
        tiles[i].total = state.total + i * PAIR_LANES * width;
        fill_pair_tile(call, lanes, i * PAIR_LANES, tiles[i]);
    }
    const int64_t low = lowest(lanes.low, lanes.count), high = highest(lanes.high, lanes.count);
    const int64_t end = high < split.last_key ? high : split.last_key;
    for (int64_t piece = split.first_key; piece < end; piece += PIECE_KEYS) {
        if (groups_of(piece, low, end).last == 0) continue;
        PieceOfRows<bf16> rows;
        find_piece(call, split, piece, low, end, rows);
        pair_rows(call, rows, space.values);
        for (int i = 0; i < tile_count; ++i) {
            const KeyGroups groups = groups_of(piece, tiles[i].low_min, tiles[i].high_max < end ? tiles[i].high_max : end);
            if (groups.last == 0) continue;
            (tiles[i].vectors == 1 ? walk_pairs<1> : walk_pairs<PAIR_VECTORS>)(call, tiles[i], rows, piece, groups, space);
        }
    }
    for (int i = 0; i < tile_count; ++i)
        for (int v = 0; v < tiles[i].vectors; ++v) {
            const int at = i * PAIR_LANES + v * 16;
            store_part(state.peak + at, {tiles[i].peak[v]}, lanes.count - at);
            store_part(state.weight_sum + at, {tiles[i].weight_sum[v]}, lanes.count - at);
        }
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
