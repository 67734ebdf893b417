/* Attention on tiles of the vector units: many queries beside many keys, so that a loaded number serves several of them.

   The arithmetic of attention_lanes.h, which stays as its plain form, lane for lane and in the same order:
     scores [key][lane] = sum over d, rising, of key[d] * query[d]     V vectors of queries, WIDE_KEYS keys at once
     totals [lane][d] = totals * keep + sum over keys, rising, of weight * value     WIDE_LANES lanes, vectors along d
   so that which form served, and which lanes shared a tile, shows in no bit. Used for float32, and for bfloat16 by levels
   without an instruction that multiplies it. Rows of bfloat16 and of codes are widened once for all lanes that a thread
   computes together. */
#pragma once

#include "attention/attention_lanes.h"
#include "isa/lanes_transpose.h"
#include "rows/codes_lanes.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

#if defined(VNX_AVX512)
constexpr int TILE_VECTORS = 2;
constexpr int WIDE_KEYS = 8;
constexpr int WIDE_DEPTH = 4;
#else
constexpr int TILE_VECTORS = 1;
constexpr int WIDE_KEYS = 4;
constexpr int WIDE_DEPTH = 1;
#endif
#if defined(VNX_AVX2)
constexpr int WIDE_LANES = 6;
#else
constexpr int WIDE_LANES = 4;
#endif
constexpr int TILE_LANES = TILE_VECTORS * 16;

struct WideTile {
    float *query;  // [head_dim in whole vectors][vectors][16]
    float *total;  // [count][padded_dim], in the state that is left
    Lanes peak[TILE_VECTORS], weight_sum[TILE_VECTORS], low[TILE_VECTORS], high[TILE_VECTORS];
    int count, vectors;
    int32_t low_min, low_max, high_min, high_max;
};

inline int64_t whole_vectors(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

template <typename T>
inline void widen_row(const T *row, int64_t head_dim, float *to) {
    for (int64_t d = 0; d < head_dim; d += 16)
        store(to + d, load_part(row + d, head_dim - d));
}
inline const float *in_place(const float *row) { return row; }
inline const float *in_place(const bf16 *) { return nullptr; }

/* `count` neighbouring rows as float32 rows of whole vectors: in place where they lie so there, else in `space`. */
template <typename T>
inline void wide_run(const T *row, const AttentionCall &call, int64_t count, float *space, const float **rows) {
    const bool copied = call.head_dim % 16 != 0;
    for (int64_t i = 0; i < count; ++i, row += call.head_dim, space += call.padded_dim) {
        rows[i] = copied ? nullptr : in_place(row);
        if (rows[i] != nullptr) continue;
        widen_row(row, call.head_dim, space);
        rows[i] = space;
    }
}
/* Of codes, whose rows are whole steps of 32. */
inline void wide_run(const int8_t *row, const AttentionCall &call, int64_t count, float *space, const float **rows) {
    widen_rows_of_codes(row, call.head_dim, count, space);
    for (int64_t i = 0; i < count; ++i)
        rows[i] = space + i * call.padded_dim;
}

/* Keys [first, last) of one cache. */
template <typename T>
inline void wide_rows(const void *cache, const AttentionCall &call, const Split &split, int64_t first, int64_t last,
                      float *space, const float **rows) {
    for (int64_t key = first; key < last;) {
        const int64_t left = call.block_size - key % call.block_size, count = left < last - key ? left : last - key;
        wide_run(cache_row<T>(cache, call, split, key), call, count, space, rows);
        key += count, rows += count, space += count * call.padded_dim;
    }
}

/* Products of WIDE_KEYS keys with the queries: dots [WIDE_KEYS][V * 16]. A function of its own, or the compiler keeps what
   its surroundings need in registers that the sums need. */
template <int V>
__attribute__((noinline)) void multiply_keys(const float *query, int64_t head_dim, const float *const *keys,
                                             float *dots) {
    Lanes dot[WIDE_KEYS][V];
#pragma GCC unroll 8
    for (int j = 0; j < WIDE_KEYS; ++j)
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v)
            dot[j][v] = all(0.0f);
    for (int64_t d = 0; d < head_dim; ++d, query += V * 16) {
        Lanes q[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v)
            q[v] = load(query + v * 16);
#pragma GCC unroll 8
        for (int j = 0; j < WIDE_KEYS; ++j) {
            const Lanes number = all(keys[j][d]);
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v)
                dot[j][v] = fused(number, q[v], dot[j][v]);
        }
    }
#pragma GCC unroll 8
    for (int j = 0; j < WIDE_KEYS; ++j)
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v)
            store(dots + (j * V + v) * 16, dot[j][v]);
}

/* scores [count][V * 16] of keys first, first + 1, ..., room for whole WIDE_KEYS; peak: each lane's highest, or its peak
   before. */
template <int V>
inline void score_wide(const AttentionCall &call, const WideTile &tile, const float *const *keys, int64_t first,
                       int count, float *scores, Lanes *peak) {
    const float *together[WIDE_KEYS];
    for (int key = 0; key < count; key += WIDE_KEYS) {
        for (int j = 0; j < WIDE_KEYS; ++j)
            together[j] = keys[key + j < count ? key + j : key];
        multiply_keys<V>(tile.query, call.head_dim, together, scores + key * V * 16);
    }
    const bool hidden = first < tile.low_max || first + count > tile.high_min;
    const Lanes never = all(-__builtin_inff());
    for (int v = 0; v < V; ++v)
        peak[v] = tile.peak[v];
    const float scale = call.scale, cap = call.cap;
    for (int key = 0; key < count; ++key) {
        const Lanes place = all(float(first + key));
        for (int v = 0; v < V; ++v) {
            float *at = scores + (key * V + v) * 16;
            Lanes score = final_score(scale, cap, load(at));
            if (hidden)
                score = where_less(place, tile.high[v], where_less(place, tile.low[v], never, score), never);
            store(at, score);
            peak[v] = larger(peak[v], score);
        }
    }
}

/* Scores to weights in place; the tile's peaks and sums follow. keep [V * 16]: what becomes of the totals so far. */
template <int V>
inline void weigh_wide(WideTile &tile, int count, const Lanes *peak, float *scores, float *keep) {
    Lanes sum[V];
    for (int v = 0; v < V; ++v)
        sum[v] = all(0.0f);
    for (int key = 0; key < count; ++key)
        for (int v = 0; v < V; ++v) {
            float *at = scores + (key * V + v) * 16;
            const Lanes weight = exp2_lanes(load(at) - peak[v]);
            sum[v] = sum[v] + weight;
            store(at, weight);
        }
    for (int v = 0; v < V; ++v) {
        const Lanes kept = exp2_lanes(tile.peak[v] - peak[v]);
        tile.peak[v] = peak[v];
        tile.weight_sum[v] = fused(tile.weight_sum[v], kept, sum[v]);
        store(keep + v * 16, kept);
    }
}

/* L lanes and D vectors of their totals [L][stride]; weights [count][weight_stride]. */
template <int L, int D>
__attribute__((noinline)) void add_block(float *total, int64_t stride, const float *keep, const float *weights, int weight_stride,
                      const float *const *values, int64_t at, int count) {
    Lanes sum[L][D];
#pragma GCC unroll 6
    for (int lane = 0; lane < L; ++lane)
#pragma GCC unroll 4
        for (int d = 0; d < D; ++d)
            sum[lane][d] = load(total + lane * stride + at + d * 16) * all(keep[lane]);
    for (int key = 0; key < count; ++key, weights += weight_stride) {
        Lanes value[D];
#pragma GCC unroll 4
        for (int d = 0; d < D; ++d)
            value[d] = load(values[key] + at + d * 16);
#pragma GCC unroll 6
        for (int lane = 0; lane < L; ++lane) {
            const Lanes weight = all(weights[lane]);
#pragma GCC unroll 4
            for (int d = 0; d < D; ++d)
                sum[lane][d] = fused(value[d], weight, sum[lane][d]);
        }
    }
#pragma GCC unroll 6
    for (int lane = 0; lane < L; ++lane)
#pragma GCC unroll 4
        for (int d = 0; d < D; ++d)
            store(total + lane * stride + at + d * 16, sum[lane][d]);
}

template <int L, int D, typename... Args>
inline void add_lanes(int count, Args... args) {
    if (count == L) return add_block<L, D>(args...);
    if constexpr (L > 1) add_lanes<L - 1, D>(count, args...);
}

/* All lanes of a tile, D vectors of their totals, in blocks of nearly the same size: the values' part stays in the nearest cache
   while the lanes pass. */
template <int D>
inline void add_part(const AttentionCall &call, const WideTile &tile, const float *keep, const float *weights,
                     const float *const *values, int64_t at, int count) {
    const int64_t width = call.padded_dim;
    const int blocks = (tile.count + WIDE_LANES - 1) / WIDE_LANES;
    for (int block = 0; block < blocks; ++block) {
        const int lane = tile.count * block / blocks, end = tile.count * (block + 1) / blocks;
        add_lanes<WIDE_LANES, D>(end - lane, tile.total + lane * width, width, keep + lane, weights + lane, tile.vectors * 16,
                                 values, at, count);
    }
}

inline void add_wide(const AttentionCall &call, const WideTile &tile, const float *keep, const float *weights,
                     const float *const *values, int count) {
    const int64_t width = whole_vectors(call.head_dim);
    int64_t at = 0;
    for (; at + WIDE_DEPTH * 16 <= width; at += WIDE_DEPTH * 16)
        add_part<WIDE_DEPTH>(call, tile, keep, weights, values, at, count);
    for (; at < width; at += 16)
        add_part<1>(call, tile, keep, weights, values, at, count);
}

/* Keys [first, last) of a piece, whose rows begin with key `first`. */
template <int V>
inline void walk_wide(const AttentionCall &call, WideTile &tile, const float *const *keys, const float *const *values,
                      int64_t first, int64_t last, float *scores) {
    const int64_t begin = first < tile.low_min ? tile.low_min : first, end = last < tile.high_max ? last : tile.high_max;
    if (begin >= end) return;
    const int64_t skipped = begin - first;
    const int count = int(end - begin);
    Lanes peak[V];
    alignas(64) float keep[V * 16];
    score_wide<V>(call, tile, keys + skipped, begin, count, scores, peak);
    weigh_wide<V>(tile, count, peak, scores, keep);
    add_wide(call, tile, keep, scores, values + skipped, count);
}

/* The queries of sixteen lanes, turned about: query [head_dim in whole vectors][vectors][16], zeros where there is none. */
template <typename T>
inline void fill_queries(const AttentionCall &call, const LaneSet &lanes, int first, int vectors, float *query) {
    for (int64_t d = 0; d < call.head_dim; d += 16) {
        Lanes part[16];
        for (int i = 0; i < 16; ++i) {
            const T *row = static_cast<const T *>(call.query) + lanes.query[first + i] * call.head_dim + d;
            part[i] = first + i < lanes.count ? load_part(row, call.head_dim - d) : all(0.0f);
        }
        transpose(part);
        for (int i = 0; i < 16; ++i)
            store(query + (d + i) * vectors * 16, part[i]);
    }
}

template <typename T>
inline void fill_wide(const AttentionCall &call, const LaneSet &lanes, int first, WideTile &tile) {
    const int left = lanes.count - first;
    tile.count = left < TILE_LANES ? left : TILE_LANES;
    tile.vectors = (tile.count + 15) / 16;
    for (int v = 0; v < tile.vectors; ++v) {
        float low[16], high[16];
        for (int i = 0; i < 16; ++i) {
            low[i] = float(lanes.low[first + v * 16 + i]);
            high[i] = float(lanes.high[first + v * 16 + i]);
        }
        tile.low[v] = load(low);
        tile.high[v] = load(high);
        tile.peak[v] = all(LOWEST);
        tile.weight_sum[v] = all(0.0f);
        fill_queries<T>(call, lanes, first + v * 16, tile.vectors, tile.query + v * 16);
    }
    tile.low_min = lowest(lanes.low + first, tile.count);
    tile.low_max = highest(lanes.low + first, tile.count);
    tile.high_min = tile.count % 16 != 0 ? 0 : lowest(lanes.high + first, tile.count);
    tile.high_max = highest(lanes.high + first, tile.count);
}

/* Rows of a split, by key - split.first_key. */
struct WideRows {
    const float *keys[SPLIT_KEYS], *values[SPLIT_KEYS];
};

/* Keys [first, last) of a split in the calling thread's scratch. Without a window all lanes have the same: then they are those of
   the whole split, which stay for the lanes that this thread computes next. */
template <typename T>
inline const WideRows &rows_of_split(const AttentionCall &call, const Split &split, int64_t first, int64_t last) {
    struct Place {
        uint64_t call;
        const int32_t *blocks;
        int64_t kv_head, first_key;
    };
    thread_local Place kept{};
    const bool is_whole = call.window == 0 && call.number != 0;
    const size_t floats = size_t(SPLIT_KEYS) * size_t(call.padded_dim);
    WideRows *rows = static_cast<WideRows *>(scratch(SLOT_SPLIT, sizeof(WideRows) + 2 * floats * 4));
    const bool is_kept = is_whole && kept.call == call.number && kept.blocks == split.blocks && kept.kv_head == split.kv_head &&
                         kept.first_key == split.first_key;
    if (is_kept) return *rows;
    kept = is_whole ? Place{call.number, split.blocks, split.kv_head, split.first_key} : Place{};
    if (is_whole) first = split.first_key, last = split.last_key;
    const int64_t skipped = first - split.first_key;
    float *keys = reinterpret_cast<float *>(rows + 1), *values = keys + floats;
    wide_rows<T>(call.key_cache, call, split, first, last, keys + skipped * call.padded_dim, rows->keys + skipped);
    wide_rows<T>(call.value_cache, call, split, first, last, values + skipped * call.padded_dim, rows->values + skipped);
    return *rows;
}

/* Queries of Q, caches of T. */
template <typename Q, typename T>
void attend_wide(const AttentionCall &call, const LaneSet &lanes, const Split &split, const Split *,
                 const SplitState &state) {
    const int tile_count = (lanes.count + TILE_LANES - 1) / TILE_LANES;
    const size_t width = size_t(call.padded_dim), query = TILE_LANES * width;
    const size_t floats = LANES_MAX / TILE_LANES * query + PIECE_KEYS * TILE_LANES;
    float *scores = static_cast<float *>(scratch(SLOT_TILES, floats * 4)), *queries = scores + PIECE_KEYS * TILE_LANES;
    memset(state.total, 0, size_t(lanes.count) * width * 4);
    WideTile tiles[LANES_MAX / TILE_LANES];
    for (int i = 0; i < tile_count; ++i) {
        tiles[i].query = queries + i * query;
        tiles[i].total = state.total + i * TILE_LANES * width;
        fill_wide<Q>(call, lanes, i * TILE_LANES, tiles[i]);
    }
    const int64_t low = lowest(lanes.low, lanes.count), high = highest(lanes.high, lanes.count);
    const int64_t begin = low < split.first_key ? split.first_key : low, end = high < split.last_key ? high : split.last_key;
    if (begin < end) {
        const WideRows &rows = rows_of_split<T>(call, split, begin, end);
        for (int64_t piece = begin / PIECE_KEYS * PIECE_KEYS; piece < end; piece += PIECE_KEYS) {
            const int64_t first = piece < begin ? begin : piece, last = piece + PIECE_KEYS < end ? piece + PIECE_KEYS : end;
            const int64_t at = first - split.first_key;
            for (int i = 0; i < tile_count; ++i) {
                const auto walk = tiles[i].vectors == 1 ? walk_wide<1> : walk_wide<TILE_VECTORS>;
                walk(call, tiles[i], rows.keys + at, rows.values + at, first, last, scores);
            }
        }
    }
    for (int i = 0; i < tile_count; ++i)
        for (int v = 0; v < tiles[i].vectors; ++v) {
            const int at = i * TILE_LANES + v * 16;
            store_part(state.peak + at, tiles[i].peak[v], lanes.count - at);
            store_part(state.weight_sum + at, tiles[i].weight_sum[v], lanes.count - at);
        }
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
