/* bfloat16 attention on AMX tiles. Included by the AMX level only.

   Per piece of 64 keys and tile of 16 lanes:
     scores^T [key, lane] = keys [key, d] * query^T      keys are tiles as they lie in the cache, the query is paired
   once weights = 2^(score - peak), rounded to bfloat16     a vector holds one key's weight of sixteen lanes total
   [lane, d] += weights [lane, key] * values     weights are transposed, values paired (two keys a place), once a piece
   A lane's arithmetic does not know the other lanes; keys it may not see weigh exactly 0; keys nobody sees are not
   read, or masked as scores and zero as values (a stranger's infinity times 0 would be NaN). */
#pragma once

#include "attention/attention_weights.h"
#include "isa/lanes_transpose.h"
#include "linear/linear_tiles.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

struct TileLanes {
    uint32_t *query;  // [padded_dim / 2][16]: pairs of d
    float *total;     // [16][padded_dim], columns in the order that pairing values leaves
    __m512 peak, weight_sum;
    __m512i low, high;
    int32_t low_max, high_min, high_max;
};

/* Where the pieces of one call keep their numbers. */
struct PieceSpace {
    bf16 *values;                // [2][padded_dim / 16][16 pairs of keys][16][2]
    bf16 *rows;                  // keys [64][padded_dim], then values: only where blocks are no multiple of 16
    float (*scores[2])[16];      // [64][16], of a tile and of the next one
    bf16 (*weights[2])[16][32];  // [2][16 lanes][32 keys], of a tile and of the one before
};

/* Tiles 0-3 sums; 4 and 6 whole steps (keys or weights, query or values); 5 and 7 the rest of a head that is no
 * multiple of 32. */
inline void shape_attention(int64_t rest) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile)
        shapes.set(tile, 16, 64);
    if (rest > 0) {
        shapes.set(5, 16, int(rest * 2));
        shapes.set(7, int(rest / 2), 64);
    }
    load_shapes(shapes);
}

inline void fill_lanes(const AttentionCall &call, const LaneSet &lanes, int first, TileLanes &tile) {
    const int count = lanes.count - first < 16 ? lanes.count - first : 16;
    for (int64_t d = 0; d < call.head_dim; d += 32) {
        const int64_t left = call.head_dim - d;
        const __mmask32 valid = left >= 32 ? ~0u : (1u << left) - 1;
        __m512i pairs[16];
        for (int i = 0; i < 16; ++i) {
            const bf16 *query = static_cast<const bf16 *>(call.query) + lanes.query[first + i] * call.head_dim + d;
            pairs[i] = _mm512_maskz_loadu_epi16(i < count ? valid : 0, query);
        }
        transpose(pairs);
        for (int i = 0; i < 16; ++i)
            _mm512_store_si512(tile.query + (d / 2 + i) * 16, pairs[i]);
    }
    memset(tile.total, 0, size_t(call.padded_dim) * 64);
    tile.peak = _mm512_set1_ps(LOWEST);
    tile.weight_sum = _mm512_setzero_ps();
    tile.low = _mm512_loadu_si512(lanes.low + first);
    tile.high = _mm512_loadu_si512(lanes.high + first);
    tile.low_max = highest(lanes.low + first, count);
    tile.high_min = count < 16 ? 0 : lowest(lanes.high + first, count);
    tile.high_max = highest(lanes.high + first, count);
}

/* A piece's rows of one cache in groups of 16 keys: as they lie there, or gathered where blocks are no multiple of 16.
   Null where none of the group is in [first, last) of the keys. `stride` in bytes. */
struct Groups {
    const char *start[4];
    int64_t stride;
};

inline Groups group_rows(const void *cache, const AttentionCall &call, const Split &split, int64_t piece, int64_t first,
                         int64_t last, bf16 *space) {
    Groups groups;
    const bool whole = call.block_size % 16 == 0;
    groups.stride = (whole ? call.head_dim : call.padded_dim) * 2;
    for (int i = 0; i < 4; ++i) {
        const int64_t key = piece + i * 16;
        groups.start[i] = nullptr;
        if (key >= last || key + 16 <= first) continue;
        if (whole) {
            groups.start[i] = reinterpret_cast<const char *>(cache_row<bf16>(cache, call, split, key));
            continue;
        }
        bf16 *to = space + i * 16 * call.padded_dim;
        groups.start[i] = reinterpret_cast<const char *>(to);
        for (int64_t j = 0; j < 16; ++j, to += call.padded_dim) {
            if (key + j < first || key + j >= last)
                memset(to, 0, size_t(call.head_dim) * 2);
            else
                memcpy(to, cache_row<bf16>(cache, call, split, key + j), size_t(call.head_dim) * 2);
        }
    }
    return groups;
}

inline __m512i value_chunk(const char *row, int64_t left) {
    if (row == nullptr) return _mm512_setzero_si512();
    return left >= 32 ? _mm512_loadu_si512(row) : _mm512_maskz_loadu_epi16((1u << left) - 1, row);
}

/* Pair the values of keys [first, last) of the piece at `piece`; zeros in place of the others. */
inline void pair_values(const AttentionCall &call, const Groups &rows, int64_t piece, int64_t first, int64_t last,
                        bf16 *values) {
    for (int pair = 0; pair < PIECE_KEYS / 2; ++pair) {
        const int64_t key = piece + 2 * pair;
        const char *row = rows.start[pair / 8] + pair % 8 * 2 * rows.stride;
        const char *even = key >= first && key < last ? row : nullptr;
        const char *odd = key + 1 >= first && key + 1 < last ? row + rows.stride : nullptr;
        bf16 *to = values + pair / 16 * call.padded_dim * 32 + pair % 16 * 32;
        for (int64_t d = 0; d < call.head_dim; d += 32, to += 1024) {
            const __m512i a = value_chunk(even == nullptr ? even : even + d * 2, call.head_dim - d);
            const __m512i b = value_chunk(odd == nullptr ? odd : odd + d * 2, call.head_dim - d);
            _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
            _mm512_store_si512(to + 512, _mm512_unpackhi_epi16(a, b));
        }
    }
}

#define VNX_KEY_TILE(NUMBER)                                         \
    if (keys.start[NUMBER] != nullptr) {                             \
        _tile_loadd(4, keys.start[NUMBER] + step * 64, keys.stride); \
        _tile_dpbf16ps(NUMBER, 4, 6);                                \
    }
#define VNX_KEY_REST(NUMBER)                                          \
    if (keys.start[NUMBER] != nullptr) {                              \
        _tile_loadd(5, keys.start[NUMBER] + steps * 64, keys.stride); \
        _tile_dpbf16ps(NUMBER, 5, 7);                                 \
    }

inline void score_keys(const AttentionCall &call, const TileLanes &tile, const Groups &keys, float (*scores)[16]) {
    const int64_t steps = call.head_dim / 32;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps; ++step) {
        _tile_loadd(6, tile.query + step * 256, 64);
        VNX_KEY_TILE(0)
        VNX_KEY_TILE(1)
        VNX_KEY_TILE(2)
        VNX_KEY_TILE(3)
    }
    if (call.head_dim % 32 != 0) {
        _tile_loadd(7, tile.query + steps * 256, 64);
        VNX_KEY_REST(0)
        VNX_KEY_REST(1)
        VNX_KEY_REST(2)
        VNX_KEY_REST(3)
    }
    _tile_stored(0, scores[0], 64);
    _tile_stored(1, scores[16], 64);
    _tile_stored(2, scores[32], 64);
    _tile_stored(3, scores[48], 64);
}

#undef VNX_KEY_TILE
#undef VNX_KEY_REST

/* Cap and mask in place; returns the highest score of each lane. */
inline __m512 settle_scores(const AttentionCall &call, const TileLanes &tile, int64_t piece, float (*scores)[16]) {
    const bool hidden = piece < tile.low_max || piece + PIECE_KEYS > tile.high_min;
    const __m512 never = _mm512_set1_ps(-__builtin_inff());
    __m512 peak0 = never, peak1 = never, peak2 = never, peak3 = never;
    const auto settle = [&](int key, __m512 &peak) {
        __m512 score = _mm512_load_ps(scores[key]);
        if (call.cap != 0) score = final_score(call, {score}).v;
        if (hidden) {
            const __m512i place = _mm512_set1_epi32(int(piece + key));
            const __mmask16 seen = _mm512_cmplt_epi32_mask(place, tile.high) & _mm512_cmpge_epi32_mask(place, tile.low);
            score = _mm512_mask_blend_ps(seen, never, score);
        }
        if (hidden || call.cap != 0) _mm512_store_ps(scores[key], score);
        peak = _mm512_max_ps(peak, score);
    };
    for (int key = 0; key < PIECE_KEYS; key += 4)
        settle(key, peak0), settle(key + 1, peak1), settle(key + 2, peak2), settle(key + 3, peak3);
    return _mm512_max_ps(_mm512_max_ps(peak0, peak1), _mm512_max_ps(peak2, peak3));
}

/* Weights of a piece as the left operand of the second product; returns their sums. */
inline __m512 weigh_scores(__m512 factor, __m512 peak, const float (*scores)[16], bf16 (*weights)[16][32]) {
    const __m512i interleave = interleave_halves();
    __m512 sum0 = _mm512_setzero_ps(), sum1 = sum0, sum2 = sum0, sum3 = sum0;
    const auto weigh = [&](int key, __m512 &even, __m512 &odd) {
        const __m512 a = exp2_tile(_mm512_fmsub_ps(_mm512_load_ps(scores[key]), factor, peak));
        const __m512 b = exp2_tile(_mm512_fmsub_ps(_mm512_load_ps(scores[key + 1]), factor, peak));
        even = _mm512_add_ps(even, a);
        odd = _mm512_add_ps(odd, b);
        return _mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    };
    for (int half = 0; half < 2; ++half) {
        __m512i pairs[16];
        for (int pair = 0; pair < 16; pair += 2) {
            const int key = half * 32 + 2 * pair;
            pairs[pair] = weigh(key, sum0, sum1);
            pairs[pair + 1] = weigh(key + 2, sum2, sum3);
        }
        transpose(pairs);
        for (int lane = 0; lane < 16; ++lane)
            _mm512_store_si512(weights[half][lane], pairs[lane]);
    }
    return _mm512_add_ps(_mm512_add_ps(sum0, sum1), _mm512_add_ps(sum2, sum3));
}

/* Bring the totals to a higher peak; a factor of 1 changes no bit. */
inline void rescale(const AttentionCall &call, TileLanes &tile, __m512 peak) {
    if (_mm512_cmp_ps_mask(peak, tile.peak, _CMP_NEQ_UQ) == 0) return;
    const __m512 keep = exp2_tile(_mm512_sub_ps(tile.peak, peak));
    alignas(64) float factor[16];
    _mm512_store_ps(factor, keep);
    for (int lane = 0; lane < 16; ++lane) {
        const __m512 by = _mm512_set1_ps(factor[lane]);
        float *row = tile.total + lane * call.padded_dim;
        for (int64_t d = 0; d < call.padded_dim; d += 16)
            _mm512_store_ps(row + d, _mm512_mul_ps(_mm512_load_ps(row + d), by));
    }
    tile.weight_sum = _mm512_mul_ps(tile.weight_sum, keep);
    tile.peak = peak;
}

inline void add_weighted(const AttentionCall &call, TileLanes &tile, const bf16 (*weights)[16][32], const bf16 *all_values) {
    const int64_t stride = call.padded_dim * 4, half = call.padded_dim * 32;
    for (int64_t d = 0; d < call.padded_dim; d += 32) {
        float *total = tile.total + d;
        const bf16 *values = all_values + d * 32;
        _tile_loadd(0, total, stride);
        _tile_loadd(1, total + 16, stride);
        for (int part = 0; part < 2; ++part) {
            _tile_loadd(4, weights[part], 64);
            _tile_loadd(6, values + part * half, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(6, values + part * half + 512, 64);
            _tile_dpbf16ps(1, 4, 6);
        }
        _tile_stored(0, total, stride);
        _tile_stored(1, total + 16, stride);
    }
}

inline void leave_lanes(const AttentionCall &call, const TileLanes &tile, int first, int count,
                        const SplitState &state) {
    const __m512i front = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i back = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
    const int lanes = count - first < 16 ? count - first : 16;
    const __mmask16 valid = __mmask16((1u << lanes) - 1);
    _mm512_mask_storeu_ps(state.peak + first, valid, tile.peak);
    _mm512_mask_storeu_ps(state.weight_sum + first, valid, tile.weight_sum);
    for (int lane = 0; lane < lanes; ++lane) {
        const float *from = tile.total + lane * call.padded_dim;
        float *to = state.total + (first + lane) * call.padded_dim;
        for (int64_t d = 0; d < call.padded_dim; d += 32) {
            const __m512 a = _mm512_load_ps(from + d), b = _mm512_load_ps(from + d + 16);
            _mm512_storeu_ps(to + d, _mm512_permutex2var_ps(a, front, b));
            _mm512_storeu_ps(to + d + 16, _mm512_permutex2var_ps(a, back, b));
        }
    }
}

inline void weigh_tile(const AttentionCall &call, TileLanes &tile, int64_t piece, float (*scores)[16],
                       bf16 (*weights)[16][32]) {
    const __m512 factor = _mm512_set1_ps(score_factor(call));
    const __m512 highest = settle_scores(call, tile, piece, scores);
    rescale(call, tile, _mm512_max_ps(tile.peak, _mm512_mul_ps(highest, factor)));
    const __m512 sums = weigh_scores(factor, tile.peak, scores, weights);
    tile.weight_sum = _mm512_add_ps(tile.weight_sum, sums);
}

/* All tiles meet a piece. The next tile's scores are multiplied before a tile is weighed: matrix and vector units work at
   once. */
inline void walk_tiles(const AttentionCall &call, TileLanes *tiles, int count, const Groups &keys, int64_t piece,
                       const PieceSpace &space) {
    const auto next = [&](int i) {
        while (i < count && piece >= tiles[i].high_max)
            ++i;
        return i;
    };
    int turn = 0, i = next(0);
    if (i < count) score_keys(call, tiles[i], keys, space.scores[turn]);
    while (i < count) {
        const int behind = next(i + 1);
        if (behind < count) score_keys(call, tiles[behind], keys, space.scores[turn ^ 1]);
        weigh_tile(call, tiles[i], piece, space.scores[turn], space.weights[turn]);
        add_weighted(call, tiles[i], space.weights[turn], space.values);
        i = behind, turn ^= 1;
    }
}

void attend_tiles(const AttentionCall &call, const LaneSet &lanes, const Split &split, const Split *next,
                  const SplitState &state) {
    const int tile_count = (lanes.count + 15) / 16;
    const int64_t width = call.padded_dim;
    char *memory = static_cast<char *>(scratch(SLOT_TILES, size_t(width) * (LANES_MAX * 6 + PIECE_KEYS * 6) + 12288));
    TileLanes tiles[LANES_MAX / 16];
    PieceSpace space;
    for (int i = 0; i < 2; ++i) {
        space.scores[i] = reinterpret_cast<float (*)[16]>(memory + i * 4096);
        space.weights[i] = reinterpret_cast<bf16(*)[16][32]>(memory + 8192 + i * 2048);
    }
    space.values = reinterpret_cast<bf16 *>(memory + 12288);
    space.rows = space.values + PIECE_KEYS * width;
    char *rest = memory + 12288 + PIECE_KEYS * width * 6;
    for (int i = 0; i < tile_count; ++i, rest += width * 96) {
        tiles[i].query = reinterpret_cast<uint32_t *>(rest);
        tiles[i].total = reinterpret_cast<float *>(rest + width * 32);
        fill_lanes(call, lanes, i * 16, tiles[i]);
    }
    const TilesInUse guard;
    shape_attention(call.head_dim % 32);
    const int64_t low = lowest(lanes.low, lanes.count), high = highest(lanes.high, lanes.count);
    const int64_t end = high < split.last_key ? high : split.last_key;
    for (int64_t piece = split.first_key; piece < end; piece += PIECE_KEYS) {
        if (piece + PIECE_KEYS < end)
            fetch_piece(call, split, piece + PIECE_KEYS, end);
        else if (next != nullptr)
            fetch_piece(call, *next, next->first_key, next->last_key);
        if (piece + PIECE_KEYS <= low) continue;
        const int64_t first = piece < low ? low : piece, last = piece + PIECE_KEYS < end ? piece + PIECE_KEYS : end;
        const Groups keys = group_rows(call.key_cache, call, split, piece, first, last, space.rows);
        const Groups values =
            group_rows(call.value_cache, call, split, piece, first, last, space.rows + PIECE_KEYS * width);
        pair_values(call, values, piece, first, last, space.values);
        walk_tiles(call, tiles, tile_count, keys, piece, space);
    }
    for (int i = 0; i < tile_count; ++i)
        leave_lanes(call, tiles[i], i * 16, lanes.count, state);
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
