/* Attention on sixteen lanes: a lane is one query, a vector holds one number of sixteen queries.

   Scores, weights and sums are float32. A lane's operations do not depend on the other lanes of its vector: dot products over
   rising d, pieces of PIECE_KEYS keys at fixed positions, rising keys within a piece. A key that a lane may not see has weight
   exactly 0. */
#pragma once

#include "isa/lanes.h"
#include "team.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

/* Elements of a row of a cache of T; int8_t stands for codes. */
template <typename T>
inline int64_t row_width(const AttentionCall &call) {
    return sizeof(T) == 1 ? coded_bytes(call.head_dim) : call.head_dim;
}

template <typename T>
inline const T *cache_row(const void *cache, const AttentionCall &call, const Split &split, int64_t key) {
    const int64_t block = split.blocks[key / call.block_size];
    return static_cast<const T *>(cache) + block * call.block_stride +
           (split.kv_head * call.block_size + key % call.block_size) * row_width<T>(call);
}

inline int32_t lowest(const int32_t *values, int count) {
    int32_t result = values[0];
    for (int i = 1; i < count; ++i)
        result = values[i] < result ? values[i] : result;
    return result;
}

inline int32_t highest(const int32_t *values, int count) {
    int32_t result = values[0];
    for (int i = 1; i < count; ++i)
        result = values[i] > result ? values[i] : result;
    return result;
}

/* Keys and values of one piece as float32 rows: in place where the cache is float32. Keys outside [first, last) are not
 * read. */
struct PieceRows {
    const float *key[PIECE_KEYS], *value[PIECE_KEYS];
};

inline void piece_rows(const AttentionCall &call, const Split &split, int64_t first, int64_t last, float *,
                       PieceRows &rows, const float *) {
    for (int64_t key = first; key < last; ++key) {
        rows.key[key - first] = cache_row<float>(call.key_cache, call, split, key);
        rows.value[key - first] = cache_row<float>(call.value_cache, call, split, key);
    }
}

inline void piece_rows(const AttentionCall &call, const Split &split, int64_t first, int64_t last, float *space,
                       PieceRows &rows, const bf16 *) {
    for (int64_t key = first; key < last; ++key) {
        const bf16 *from[2] = {cache_row<bf16>(call.key_cache, call, split, key),
                               cache_row<bf16>(call.value_cache, call, split, key)};
        for (int part = 0; part < 2; ++part) {
            float *to = space + (2 * (key - first) + part) * call.padded_dim;
            for (int64_t d = 0; d < call.head_dim; d += 16)
                store(to + d, load_part(from[part] + d, call.head_dim - d));
            (part == 0 ? rows.key : rows.value)[key - first] = to;
        }
    }
}

/* Scaled and capped scores in powers of two. */
inline Lanes final_score(float scale, float cap, Lanes dot) {
    constexpr float LOG2_E = 1.44269504f;
    if (cap == 0) return dot * all(scale * LOG2_E);
    return all(cap * LOG2_E) * tanh_lanes(dot * all(scale / cap));
}
inline Lanes final_score(const AttentionCall &call, Lanes dot) { return final_score(call.scale, call.cap, dot); }

/* Sixteen queries and their running softmax: query and total [head_dim][16]. */
struct LaneTile {
    float *query, *total;
    Lanes peak, weight_sum, low, high;
    int32_t low_max, high_min, high_max;
};

#if defined(VNX_AVX512)
constexpr int KEYS_AT_ONCE = 8;  // sums that the registers hold, enough to hide a multiply-add's latency
#else
constexpr int KEYS_AT_ONCE = 4;
#endif

/* scores [count][16] of keys first, first + 1, ... */
inline void score_piece(const AttentionCall &call, const LaneTile &tile, const PieceRows &rows, int64_t first,
                        int count, float *scores) {
    const bool hidden = first < tile.low_max || first + count > tile.high_min;
    for (int key = 0; key < count; key += KEYS_AT_ONCE) {
        const float *k[KEYS_AT_ONCE];
        Lanes dot[KEYS_AT_ONCE];
        for (int j = 0; j < KEYS_AT_ONCE; ++j)
            k[j] = rows.key[key + j < count ? key + j : key], dot[j] = all(0.0f);
        for (int64_t d = 0; d < call.head_dim; ++d) {
            const Lanes q = load(tile.query + d * 16);
            for (int j = 0; j < KEYS_AT_ONCE; ++j)
                dot[j] = fused(all(k[j][d]), q, dot[j]);
        }
        for (int j = 0; j < KEYS_AT_ONCE && key + j < count; ++j) {
            Lanes score = final_score(call, dot[j]);
            if (hidden) {
                const Lanes place = all(float(first + key + j)), never = all(-__builtin_inff());
                score = where_less(place, tile.high, where_less(place, tile.low, never, score), never);
            }
            store(scores + (key + j) * 16, score);
        }
    }
}

/* total = total * keep + weights * values: eight places of d at a time. */
inline void add_values(const AttentionCall &call, const LaneTile &tile, const PieceRows &rows, int count, Lanes keep,
                       const float *weights) {
    for (int64_t d = 0; d < call.head_dim; d += 8) {
        const int width = call.head_dim - d < 8 ? int(call.head_dim - d) : 8;
        Lanes sums[8];
        for (int j = 0; j < width; ++j)
            sums[j] = load(tile.total + (d + j) * 16) * keep;
        if (width == 8) {
            for (int key = 0; key < count; ++key) {
                const Lanes weight = load(weights + key * 16);
                const float *value = rows.value[key] + d;
                for (int j = 0; j < 8; ++j)
                    sums[j] = fused(all(value[j]), weight, sums[j]);
            }
        } else {
            for (int key = 0; key < count; ++key)
                for (int j = 0; j < width; ++j)
                    sums[j] = fused(all(rows.value[key][d + j]), load(weights + key * 16), sums[j]);
        }
        for (int j = 0; j < width; ++j)
            store(tile.total + (d + j) * 16, sums[j]);
    }
}

inline void walk_piece(const AttentionCall &call, LaneTile &tile, const PieceRows &rows, int64_t first, int count) {
    alignas(64) float scores[PIECE_KEYS * 16];
    score_piece(call, tile, rows, first, count, scores);
    Lanes peak = tile.peak, piece_sum = all(0.0f);
    for (int key = 0; key < count; ++key)
        peak = larger(peak, load(scores + key * 16));
    for (int key = 0; key < count; ++key) {
        const Lanes weight = exp2_lanes(load(scores + key * 16) - peak);
        piece_sum = piece_sum + weight;
        store(scores + key * 16, weight);
    }
    const Lanes keep = exp2_lanes(tile.peak - peak);
    tile.peak = peak;
    tile.weight_sum = fused(tile.weight_sum, keep, piece_sum);
    add_values(call, tile, rows, count, keep, scores);
}

template <typename T>
inline void fill_tile(const AttentionCall &call, const LaneSet &lanes, int first, LaneTile &tile) {
    float low[16], high[16];
    for (int i = 0; i < 16; ++i) {
        low[i] = float(lanes.low[first + i]);
        high[i] = float(lanes.high[first + i]);
        const T *query = static_cast<const T *>(call.query) + lanes.query[first + i] * call.head_dim;
        for (int64_t d = 0; d < call.head_dim; d += 16) {
            float part[16];
            store(part, first + i < lanes.count ? load_part(query + d, call.head_dim - d) : all(0.0f));
            for (int64_t j = 0; j < 16 && d + j < call.head_dim; ++j)
                tile.query[(d + j) * 16 + i] = part[j];
        }
    }
    memset(tile.total, 0, size_t(call.head_dim) * 64);
    tile.peak = all(LOWEST);
    tile.weight_sum = all(0.0f);
    tile.low = load(low);
    tile.high = load(high);
    const int count = lanes.count - first < 16 ? lanes.count - first : 16;
    tile.low_max = highest(lanes.low + first, count);
    tile.high_min = count < 16 ? 0 : lowest(lanes.high + first, count);
    tile.high_max = highest(lanes.high + first, count);
}

inline void leave_tile(const AttentionCall &call, const LaneTile &tile, int first, int count, const SplitState &state) {
    float peak[16], weight_sum[16];
    store(peak, tile.peak);
    store(weight_sum, tile.weight_sum);
    for (int i = 0; i < 16 && first + i < count; ++i) {
        state.peak[first + i] = peak[i];
        state.weight_sum[first + i] = weight_sum[i];
        float *to = state.total + (first + i) * call.padded_dim;
        for (int64_t d = 0; d < call.head_dim; ++d)
            to[d] = tile.total[d * 16 + i];
        for (int64_t d = call.head_dim; d < call.padded_dim; ++d)
            to[d] = 0.0f;
    }
}

template <typename T>
void attend(const AttentionCall &call, const LaneSet &lanes, const Split &split, const Split *,
            const SplitState &state) {
    const int tile_count = (lanes.count + 15) / 16;
    float *space =
        static_cast<float *>(scratch(SLOT_TILES, size_t(LANES_MAX * 2 + PIECE_KEYS * 2) * call.padded_dim * 4));
    LaneTile tiles[LANES_MAX / 16];
    for (int i = 0; i < tile_count; ++i) {
        tiles[i].query = space + i * 32 * call.padded_dim;
        tiles[i].total = tiles[i].query + 16 * call.padded_dim;
        fill_tile<T>(call, lanes, i * 16, tiles[i]);
    }
    float *wide = space + LANES_MAX * 2 * call.padded_dim;
    const int64_t low = lowest(lanes.low, lanes.count), high = highest(lanes.high, lanes.count);
    const int64_t end = high < split.last_key ? high : split.last_key;
    for (int64_t piece = split.first_key; piece < end; piece += PIECE_KEYS) {
        const int64_t first = piece < low ? low : piece, last = piece + PIECE_KEYS < end ? piece + PIECE_KEYS : end;
        if (first >= last) continue;
        PieceRows rows;
        piece_rows(call, split, first, last, wide, rows, static_cast<const T *>(nullptr));
        for (int i = 0; i < tile_count; ++i)
            if (first < tiles[i].high_max) walk_piece(call, tiles[i], rows, first, int(last - first));
    }
    for (int i = 0; i < tile_count; ++i)
        leave_tile(call, tiles[i], i * 16, lanes.count, state);
}

void join(const SplitState &into, int to, const SplitState &other, int from, int count, int64_t width) {
    for (int first = 0; first < count; first += 16, to += 16, from += 16) {
        const int lanes = count - first < 16 ? count - first : 16;
        const Lanes own = load_part(into.peak + to, lanes), added = load_part(other.peak + from, lanes);
        const Lanes peak = larger(own, added), keep = exp2_lanes(own - peak), take = exp2_lanes(added - peak);
        const Lanes sums = load_part(into.weight_sum + to, lanes), more = load_part(other.weight_sum + from, lanes);
        store_part(into.peak + to, peak, lanes);
        store_part(into.weight_sum + to, fused(more, take, sums * keep), lanes);
        float keeps[16], takes[16];
        store(keeps, keep);
        store(takes, take);
        for (int lane = 0; lane < lanes; ++lane) {
            const Lanes by_keep = all(keeps[lane]), by_take = all(takes[lane]);
            float *total = into.total + (to + lane) * width;
            const float *part = other.total + (from + lane) * width;
            for (int64_t d = 0; d < width; d += 16)
                store(total + d, fused(load(part + d), by_take, load(total + d) * by_keep));
        }
    }
}

template <typename T>
inline void finish_lane(const float *total, float weight_sum, int64_t head_dim, T *result) {
    const Lanes divisor = all(weight_sum);
    for (int64_t d = 0; d < head_dim; d += 16)
        store_part(result + d, weight_sum == 0 ? all(0.0f) : load(total + d) / divisor, head_dim - d);
}

void finish(int kind, const SplitState &state, int lane, int64_t width, int64_t head_dim, void *result) {
    const float *total = state.total + lane * width;
    if (kind == FLOAT32) return finish_lane(total, state.weight_sum[lane], head_dim, static_cast<float *>(result));
    finish_lane(total, state.weight_sum[lane], head_dim, static_cast<bf16 *>(result));
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
