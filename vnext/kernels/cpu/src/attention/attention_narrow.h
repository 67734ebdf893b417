/* bfloat16 attention of few queries on AMX tiles: a decode's heads that share a key head. Included by the AMX level only.

   The arithmetic of attention_tiles.h, lane for lane and in the same order; but where that one has sixteen lanes in a
   vector, this one has four keys of four lanes, so that a vector is full. */
#pragma once

#include "attention/attention_few.h"
#include "attention/attention_tiles.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

constexpr int NARROW_LANES = 4;

/* Of one piece: scores [key][lane] as they come out of the tiles, weights [half][lane][32 keys]. */
struct NarrowSpace {
    float (*scores)[NARROW_LANES];
    bf16 (*weights)[NARROW_LANES][32];
};

/* Tiles 0 and 1 scores of 16 keys; 2 and 3 totals; 4 keys or values; 5 and 7 weights; 6 query. */
inline void shape_narrow() {
    TileShapes shapes;
    const int rows_of[8] = {16, 16, NARROW_LANES, NARROW_LANES, 16, NARROW_LANES, 16, NARROW_LANES};
    for (int tile = 0; tile < 8; ++tile)
        shapes.set(tile, rows_of[tile], tile < 2 || tile == 6 ? NARROW_LANES * 4 : 64);
    load_shapes(shapes);
}

inline void score_narrow(const AttentionCall &call, const TileLanes &tile, const Groups &keys, float (*scores)[4]) {
    for (int group = 0; group < 4; group += 2) {
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t step = 0; step < call.head_dim / 32; ++step) {
            _tile_loadd(6, tile.query + step * 256, 64);
            if (keys.start[group] != nullptr) {
                _tile_loadd(4, keys.start[group] + step * 64, keys.stride);
                _tile_dpbf16ps(0, 4, 6);
            }
            if (keys.start[group + 1] != nullptr) {
                _tile_loadd(4, keys.start[group + 1] + step * 64, keys.stride);
                _tile_dpbf16ps(1, 4, 6);
            }
        }
        _tile_stored(0, scores[group * 16], 16);
        _tile_stored(1, scores[group * 16 + 16], 16);
    }
}

/* Of four keys of four lanes, each lane's highest, four times. */
inline __m512 highest_of_keys(__m512 x) {
    x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));
    return _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
}

/* As settle_scores; each lane's highest score, four times. */
inline __m512 settle_narrow(const AttentionCall &call, __m512i low, __m512i high, bool hidden, int64_t piece,
                            float (*scores)[4]) {
    const __m512i four_keys = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    const __m512 never = _mm512_set1_ps(-__builtin_inff());
    __m512 peaks[2] = {never, never};
    for (int key = 0; key < PIECE_KEYS; key += 4) {
        __m512 score = _mm512_load_ps(scores[key]);
        if (call.cap != 0) score = final_score(call, {score}).v;
        if (hidden) {
            const __m512i place = _mm512_add_epi32(_mm512_set1_epi32(int(piece + key)), four_keys);
            const __mmask16 seen = _mm512_cmplt_epi32_mask(place, high) & _mm512_cmpge_epi32_mask(place, low);
            score = _mm512_mask_blend_ps(seen, never, score);
        }
        if (hidden || call.cap != 0) _mm512_store_ps(scores[key], score);
        peaks[key / 4 % 2] = _mm512_max_ps(peaks[key / 4 % 2], score);
    }
    return highest_of_keys(_mm512_max_ps(peaks[0], peaks[1]));
}

/* As weigh_scores; each lane's sum, four times. */
inline __m512 weigh_narrow(__m512 factor, __m512 peak, const NarrowSpace &space) {
    const __m512i by_lane = _mm512_set_epi16(31, 27, 23, 19, 15, 11, 7, 3, 30, 26, 22, 18, 14, 10, 6, 2, 29, 25, 21, 17,
                                             13, 9, 5, 1, 28, 24, 20, 16, 12, 8, 4, 0);
    __m512 sums = _mm512_setzero_ps();
    for (int key = 0; key < PIECE_KEYS; key += 8) {
        const __m512 a = exp2_tile(_mm512_fmsub_ps(_mm512_load_ps(space.scores[key]), factor, peak));
        const __m512 b = exp2_tile(_mm512_fmsub_ps(_mm512_load_ps(space.scores[key + 4]), factor, peak));
        sums = _mm512_add_ps(_mm512_add_ps(sums, a), b);
        const __m512i rows = _mm512_permutexvar_epi16(by_lane, (__m512i)_mm512_cvtne2ps_pbh(b, a));
        bf16 (*to)[32] = space.weights[key / 32];
        _mm_store_si128((__m128i *)(to[0] + key % 32), _mm512_castsi512_si128(rows));
        _mm_store_si128((__m128i *)(to[1] + key % 32), _mm512_extracti32x4_epi32(rows, 1));
        _mm_store_si128((__m128i *)(to[2] + key % 32), _mm512_extracti32x4_epi32(rows, 2));
        _mm_store_si128((__m128i *)(to[3] + key % 32), _mm512_extracti32x4_epi32(rows, 3));
    }
    const __m128 first = _mm_add_ps(_mm512_castps512_ps128(sums), _mm512_extractf32x4_ps(sums, 1));
    const __m128 second = _mm_add_ps(_mm512_extractf32x4_ps(sums, 2), _mm512_extractf32x4_ps(sums, 3));
    return _mm512_broadcast_f32x4(_mm_add_ps(first, second));
}

inline void rescale_narrow(const AttentionCall &call, TileLanes &tile, __m512 peak) {
    if (_mm512_cmp_ps_mask(peak, tile.peak, _CMP_NEQ_UQ) == 0) return;
    const __m512 keep = exp2_tile(_mm512_sub_ps(tile.peak, peak));
    alignas(64) float factor[16];
    _mm512_store_ps(factor, keep);
    for (int lane = 0; lane < NARROW_LANES; ++lane) {
        const __m512 by = _mm512_set1_ps(factor[lane]);
        float *row = tile.total + lane * call.padded_dim;
        for (int64_t d = 0; d < call.padded_dim; d += 16)
            _mm512_store_ps(row + d, _mm512_mul_ps(_mm512_load_ps(row + d), by));
    }
    tile.weight_sum = _mm512_mul_ps(tile.weight_sum, keep);
    tile.peak = peak;
}

inline void add_narrow(const AttentionCall &call, TileLanes &tile, const NarrowSpace &space, const bf16 *values) {
    const int64_t stride = call.padded_dim * 4, half = call.padded_dim * 32;
    _tile_loadd(5, space.weights[0], 64);
    _tile_loadd(7, space.weights[1], 64);
    for (int64_t d = 0; d < call.padded_dim; d += 32) {
        float *total = tile.total + d;
        const bf16 *first = values + d * 32, *second = first + half;
        _tile_loadd(2, total, stride);
        _tile_loadd(3, total + 16, stride);
        _tile_loadd(4, first, 64);
        _tile_dpbf16ps(2, 5, 4);
        _tile_loadd(4, first + 512, 64);
        _tile_dpbf16ps(3, 5, 4);
        _tile_loadd(4, second, 64);
        _tile_dpbf16ps(2, 7, 4);
        _tile_loadd(4, second + 512, 64);
        _tile_dpbf16ps(3, 7, 4);
        _tile_stored(2, total, stride);
        _tile_stored(3, total + 16, stride);
    }
}

/* Up to NARROW_LANES lanes, heads of whole steps. */
void attend_narrow(const AttentionCall &call, const LaneSet &lanes, const Split &split, const Split *next,
                   const SplitState &state) {
    const int64_t width = call.padded_dim;
    char *memory = static_cast<char *>(scratch(SLOT_TILES, size_t(width) * (96 + PIECE_KEYS * 6) + 2048));
    const NarrowSpace space{reinterpret_cast<float (*)[4]>(memory), reinterpret_cast<bf16(*)[4][32]>(memory + 1024)};
    bf16 *values = reinterpret_cast<bf16 *>(memory + 2048), *rows = values + PIECE_KEYS * width;
    TileLanes tile;
    tile.query = reinterpret_cast<uint32_t *>(memory + 2048 + PIECE_KEYS * width * 6);
    tile.total = reinterpret_cast<float *>(memory + 2048 + PIECE_KEYS * width * 6 + width * 32);
    fill_lanes(call, lanes, 0, tile);
    const __m512i lows = _mm512_broadcast_i32x4(_mm512_castsi512_si128(tile.low));
    const __m512i highs = _mm512_broadcast_i32x4(_mm512_castsi512_si128(tile.high));
    const __m512 factor = _mm512_set1_ps(score_factor(call));
    const TilesInUse guard;
    shape_narrow();
    const int64_t low = lowest(lanes.low, lanes.count), low_max = highest(lanes.low, lanes.count);
    const int64_t high = highest(lanes.high, lanes.count), high_min = lowest(lanes.high, lanes.count);
    const int64_t end = high < split.last_key ? high : split.last_key;
    for (int64_t piece = split.first_key; piece < end; piece += PIECE_KEYS) {
        if (piece + PIECE_KEYS < end)
            fetch_piece(call, split, piece + PIECE_KEYS, end);
        else if (next != nullptr)
            fetch_piece(call, *next, next->first_key, next->last_key);
        if (piece + PIECE_KEYS <= low) continue;
        const int64_t first = piece < low ? low : piece, last = piece + PIECE_KEYS < end ? piece + PIECE_KEYS : end;
        const bool hidden = piece < low_max || piece + PIECE_KEYS > high_min;
        const Groups keys = group_rows(call.key_cache, call, split, piece, first, last, rows);
        score_narrow(call, tile, keys, space.scores);
        const Groups from = group_rows(call.value_cache, call, split, piece, first, last, rows + PIECE_KEYS * width);
        pair_values(call, from, piece, first, last, values);
        const __m512 peak = settle_narrow(call, lows, highs, hidden, piece, space.scores);
        rescale_narrow(call, tile, _mm512_max_ps(tile.peak, _mm512_mul_ps(peak, factor)));
        tile.weight_sum = _mm512_add_ps(tile.weight_sum, weigh_narrow(factor, tile.peak, space));
        add_narrow(call, tile, space, values);
    }
    leave_lanes(call, tile, 0, lanes.count, state);
}

/* Whichever form is fuller: they agree in every bit. */
void attend_by_tiles(const AttentionCall &call, const LaneSet &lanes, const Split &split, const Split *next,
                     const SplitState &state) {
    const bool narrow = lanes.count <= NARROW_LANES && call.head_dim % 32 == 0;
    (narrow ? attend_narrow : attend_tiles)(call, lanes, split, next, state);
}

/* Tiles read numbers: codes are widened for them. */
bool attend_codes_but_bf16(int kind, const AttentionCall &call, const LaneSet &lanes, const Split &split, const Split *next,
                           const SplitState &state) {
    return kind == FLOAT32 && attend_codes(kind, call, lanes, split, next, state);
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
