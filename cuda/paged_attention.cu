/* Paged attention: one kernel for decodes, prompts, chunks after a cached prefix, and rows that share a prefix.

   A warp processes a tile: 16 rows, each one head of one query. It walks the keys of its unit in steps of 32, aligned to
   multiples of 32 in every unit, with the online softmax (Milakov and Gimelshein, arXiv 1805.02867), and closes its sums
   after each split of 256 keys. Closed sums are joined in order within groups of 16 splits, and then groups in order, in a
   block or by `merge_splits`, with the same operations. Splits and groups lie at multiples of 256 and 4,096 of the context.
   So the bits of a query's result do not depend on its batch, on prompt chunking or on prefix sharing.

   The macros are in attention_keys.cuh. The step is described in vnext/kernels/cuda/plan.py, shared memory in vnext/kernels/cuda/attention.py. */
#include "attention_keys.cuh"

/* ---- the online softmax ---- */

struct Sums {
    float values[TILES][4], peaks[2], totals[2];
};

__device__ __forceinline__ void clear(Sums &sums) {
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            sums.values[n][i] = 0.0f;
    sums.peaks[0] = sums.peaks[1] = minus_infinity();
    sums.totals[0] = sums.totals[1] = 0.0f;
}

/* How much of what there was, and of what comes, counts under the new peak. */
struct Factors {
    float kept, added;
};

__device__ __forceinline__ Factors raise(float &peak, float other) {
    const float before = peak;
    peak = fmaxf(peak, other);
    const float base = fmaxf(peak, NOTHING);  // both may be minus infinity
    return {power_of_two(before - base), power_of_two(other - base)};
}

__device__ __forceinline__ float joined(float before, float coming, Factors by) {
    return fmaf(before, by.kept, __fmul_rn(coming, by.added));
}

/* The four lanes of a row. */
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

/* Minus infinity for keys that a row does not see. */
__device__ __forceinline__ void hide(float (&scores)[KEYS / COLUMNS][4], int first, const int (&limits)[2], int window) {
    const int last = first + KEYS - 1;
    const bool sees_all = last <= min(limits[0], limits[1]) && (window == 0 || first > max(limits[0], limits[1]) - window);
    if (__all_sync(ALL_LANES, sees_all)) return;
#pragma unroll
    for (int j = 0; j < KEYS / COLUMNS; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int position = first + j * COLUMNS + own_column(i), limit = limits[i / 2];
            if (position > limit || (window > 0 && position <= limit - window)) scores[j][i] = minus_infinity();
        }
}

constexpr float TWICE_LOG2_E = 2.885390082f;

/* tanh of x, given 2 log2(e) x: by one power of two and one quotient, to 2e-7 of 1. */
__device__ __forceinline__ float tanh_of(float doubled) { return 1.0f - __fdividef(2.0f, 1.0f + power_of_two(doubled)); }

/* One step of 32 keys from `first` on; `limits`: the last keys that this lane's two rows see. */
__device__ __forceinline__ void attend(Sums &sums, const Multiply::Queries &queries, const SCALAR *keys, float *spare, int first,
                                       const int (&limits)[2], int window, const Heads &heads) {
    float scores[KEYS / COLUMNS][4], scale = heads.scale;
    Multiply::score(scores, queries, keys);
    if (heads.softcap > 0.0f) {
#pragma unroll
        for (int j = 0; j < KEYS / COLUMNS; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                scores[j][i] = heads.softcap * tanh_of(scores[j][i] * heads.turn);
        scale = 1.0f;
    }
    hide(scores, first, limits, window);
    float bases[2], kept[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float peak = minus_infinity();
#pragma unroll
        for (int j = 0; j < KEYS / COLUMNS; ++j)
            peak = fmaxf(peak, fmaxf(scores[j][half * 2], scores[j][half * 2 + 1]));
        kept[half] = raise(sums.peaks[half], row_max(peak) * scale).kept;
        bases[half] = fmaxf(sums.peaks[half], NOTHING);
    }
    if (__any_sync(ALL_LANES, kept[0] != 1.0f || kept[1] != 1.0f)) {  // peaks rise seldom after the first steps
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sums.totals[half] *= kept[half];
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
                sums.values[n][half * 2] *= kept[half];
                sums.values[n][half * 2 + 1] *= kept[half];
            }
        }
    }
#pragma unroll
    for (int j = 0; j < KEYS / COLUMNS; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            scores[j][i] = power_of_two(fmaf(scores[j][i], scale, -bases[i / 2]));
            sums.totals[i / 2] += scores[j][i];
        }
    Multiply::add(sums.values, scores, keys + KEYS * WIDE_PITCH, spare);
}

/* ---- the rows of a tile ---- */

struct Tile {
    int first, count;  // entries
    int heads, head_first, head_stop;  // heads that a query has in this tile, and in the whole layer
};

/* Which query and head row `row` is; no query: -1. */
__device__ __forceinline__ int token_of(const Tile &tile, const Step &step, int row, int &head) {
    const int entry = row / tile.heads;
    head = tile.head_first + row % tile.heads;
    return entry < tile.count && head < tile.head_stop ? step.tokens[tile.first + entry] : -1;
}

__device__ __forceinline__ void load_queries(SCALAR *to, const SCALAR *query, const Tile &tile, const Step &step,
                                             const Heads &heads) {
    constexpr int CHUNKS = HEAD_DIM / Chunk<SCALAR>::SIZE;
    for (int at = threadIdx.x % 32; at < ROWS * CHUNKS; at += 32) {
        int head;
        const int row = at / CHUNKS, place = at % CHUNKS * Chunk<SCALAR>::SIZE, token = token_of(tile, step, row, head);
        const long long source = ((long long)max(token, 0) * heads.heads + (token < 0 ? 0 : head)) * HEAD_DIM + place;
        copy_async_16(to + row * WIDE_PITCH + place, query + source, token < 0 ? 0 : 16);
    }
}

/* Sums to a slot of each token, counted from where `partials` points: values [slots, heads, HEAD_DIM], peaks and totals [slots, heads, 2]. */
__device__ __forceinline__ void store_partial(const Sums &sums, float *values, float2 *marks, const Tile &tile,
                                              const Step &step, const Heads &heads, int slot) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int head;
        const int token = token_of(tile, step, own_row(half * 2), head);
        keep_order();  // with heads of 256 both halves at once spill on sm_100
        if (token < 0) continue;
        const long long row = (long long)(step.partials[token] + slot) * heads.heads + head;
#pragma unroll
        for (int n = 0; n < TILES; ++n)
            *reinterpret_cast<float2 *>(values + row * HEAD_DIM + n * COLUMNS + own_column(0)) =
                make_float2(sums.values[n][half * 2], sums.values[n][half * 2 + 1]);
        if (threadIdx.x % 4 == 0) marks[row] = make_float2(sums.peaks[half], sums.totals[half]);
    }
}

__device__ __forceinline__ void clear_private(float *own) {
    for (int i = 0; i < PRIVATE; ++i)
        own[i * 32] = i == TILES * 4 || i == TILES * 4 + 2 ? minus_infinity() : 0.0f;
}

/* Joins a split's sums to what the splits before it left; `own` is this lane's alone, its floats 32 apart. */
__device__ __forceinline__ void join_split(float *own, const Sums &sums) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float *marks = own + (TILES * 4 + half * 2) * 32;
        const Factors by = raise(marks[0], sums.peaks[half]);
        marks[32] = joined(marks[32], sums.totals[half], by);
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int i = half * 2; i < half * 2 + 2; ++i)
                own[(n * 4 + i) * 32] = joined(own[(n * 4 + i) * 32], sums.values[n][i], by);
    }
}

/* Where sums of a tile's row lie, counted in slots from where `partials` points; NO_SLOT: there is no query. */
constexpr long long NO_SLOT = -1;
__device__ __forceinline__ long long slot_of(const Tile &tile, const Step &step, const Heads &heads, int half, int slot) {
    int head;
    const int token = token_of(tile, step, own_row(half * 2), head);
    keep_order();  // with heads of 256 both halves at once spill on sm_100
    return token < 0 ? NO_SLOT : (long long)(step.partials[token] + slot) * heads.heads + head;
}

/* The joined sums of a group to a slot of each token, as `store_partial` a split's. */
__device__ __forceinline__ void store_group(const float *own, float *values, float2 *marks, const Tile &tile, const Step &step,
                                            const Heads &heads, int slot) {
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        const long long row = slot_of(tile, step, heads, half, slot);
        if (row == NO_SLOT) continue;
#pragma unroll 4
        for (int n = 0; n < TILES; ++n)
            *reinterpret_cast<float2 *>(values + row * HEAD_DIM + n * COLUMNS + own_column(0)) =
                make_float2(own[(n * 4 + half * 2) * 32], own[(n * 4 + half * 2 + 1) * 32]);
        const float *kept = own + (TILES * 4 + half * 2) * 32;
        if (threadIdx.x % 4 == 0) marks[row] = make_float2(kept[0], kept[32]);
    }
}

/* Joins a group's sums to those of the groups before it, which wait in the tokens' slots. */
__device__ __forceinline__ void join_waiting(float *own, const float *values, const float2 *marks, const Tile &tile,
                                             const Step &step, const Heads &heads) {
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        const long long row = slot_of(tile, step, heads, half, 0);
        if (row == NO_SLOT) continue;
        float2 before = marks[row];
        float *kept = own + (TILES * 4 + half * 2) * 32;
        const Factors by = raise(before.x, kept[0]);
        kept[0] = before.x;
        kept[32] = joined(before.y, kept[32], by);
#pragma unroll 4
        for (int n = 0; n < TILES; ++n) {
            const float2 waiting = *reinterpret_cast<const float2 *>(values + row * HEAD_DIM + n * COLUMNS + own_column(0));
            float *pair = own + (n * 4 + half * 2) * 32;
            pair[0] = joined(waiting.x, pair[0], by);
            pair[32] = joined(waiting.y, pair[32], by);
        }
    }
    __syncwarp();  // four lanes have read the marks that one of them writes next
}

/* A group is closed: its sums go to their slot, or they are joined to those of the groups before, and wait while others follow. */
__device__ __forceinline__ void close_group(float *own, float *values, float2 *marks, const Tile &tile, const Step &step,
                                            const Heads &heads, const Unit &unit, int group, bool is_last) {
    const bool leaves_sums = unit.leaves == GROUP_SUMS;
    if (!leaves_sums && group > unit.key_first / GROUP) join_waiting(own, values, marks, tile, step, heads);
    if (!leaves_sums && is_last) return;
    store_group(own, values, marks, tile, step, heads, leaves_sums ? group : 0);
    clear_private(own);
}

__device__ __forceinline__ void store_joined(SCALAR *output, const float *own, const Tile &tile, const Step &step,
                                             const Heads &heads, float value_scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int head;
        const int token = token_of(tile, step, own_row(half * 2), head);
        if (token < 0) continue;
        const float total = own[(TILES * 4 + half * 2 + 1) * 32];
        SCALAR *row = output + ((long long)token * heads.heads + head) * HEAD_DIM;
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                row[n * COLUMNS + own_column(i)] = narrow(own[(n * 4 + half * 2 + i) * 32] / total * value_scale, SCALAR{});
    }
}

/* ---- the kernels ---- */

/* Grid (units, kv_heads, parts of a group of more than 16 heads), a warp for each tile of the largest unit. Where keys are
   widened there may be others, which help to load and to widen and have no memory of their own.
   query, output [tokens, heads, HEAD_DIM]; caches [blocks, kv_heads, block_size, ROW_WIDTH], aligned to 16. */
extern "C" __global__ void __launch_bounds__(128, BLOCKS_MIN)
paged_attention(SCALAR *output, float *partial_values, float2 *partial_marks, const SCALAR *query, const CACHE *key_cache,
                const CACHE *value_cache, const Unit *units, const int2 *tiles, const int *tokens, const int *limits,
                const int *partials, const int *table, long long table_stride, int heads_of_all, int kv_heads,
                int block_size, int window, float scale, float softcap, float value_scale) {
    DYNAMIC_SHARED(char, memory);  // stages, wide keys and values, then for each warp: queries, spare, private
    CACHE *stages = reinterpret_cast<CACHE *>(memory);
    SCALAR *wide = reinterpret_cast<SCALAR *>(stages + STAGES * 2 * KEYS * STAGE_PITCH);
    char *own_bytes = reinterpret_cast<char *>(wide + (IS_NARROW ? 2 * KEYS * WIDE_PITCH : 0)) + threadIdx.x / 32 * WARP_BYTES;
    SCALAR *queries = reinterpret_cast<SCALAR *>(own_bytes);
    float *spare = reinterpret_cast<float *>(own_bytes + QUERY_BYTES);
    float *own = reinterpret_cast<float *>(own_bytes + (Multiply::HOLDS ? 0 : QUERY_BYTES)) + Multiply::SPARE + threadIdx.x % 32;

    const Step step{units, tiles, tokens, limits, partials, table, table_stride, window};
    const Heads heads{heads_of_all, kv_heads, block_size, scale, softcap, softcap > 0.0f ? TWICE_LOG2_E * scale / softcap : 0.0f};
    const Unit unit = units[blockIdx.x];
    if (unit.tile_count == 0) return;  // room in a graph that this step does not need
    const int begin = unit.key_first / KEYS, stop = (unit.key_stop + KEYS - 1) / KEYS;
    const auto stage_of = [&](int at) { return stages + at % STAGES * 2 * KEYS * STAGE_PITCH; };
    const int row = row_of_key(unit, step, heads, begin * KEYS);  // of this lane's key
    load_keys(stage_of(begin), key_cache, value_cache, row);
    int next_row = row_of_key(unit, step, heads, (begin + 1) * KEYS);

    const int group = heads_of_all / kv_heads, part = int(blockIdx.z) * ROWS, warp = threadIdx.x / 32;
    const bool has_tile = warp < unit.tile_count;
    const int2 entries = has_tile ? tiles[unit.tile_first + warp] : make_int2(0, 0);
    const Tile tile{entries.x, entries.y, min(group, ROWS), int(blockIdx.y) * group + part, int(blockIdx.y + 1) * group};
    if (!IS_NARROW || has_tile) load_queries(queries, query, tile, step, heads);
    copy_async_commit();
    int own_limits[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int head;
        const int token = token_of(tile, step, own_row(half * 2), head);
        own_limits[half] = token < 0 ? NO_LIMIT : limits[token];
    }

    Multiply::Queries held;
    Sums sums;
    clear(sums);
    for (int step_at = begin; step_at < stop; ++step_at) {
        CACHE *stage = stage_of(step_at);
        if (step_at + 1 < stop) {
            load_keys(stage_of(step_at + 1), key_cache, value_cache, next_row);
            next_row = row_of_key(unit, step, heads, (step_at + 2) * KEYS);
        }
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        if (IS_NARROW) {
            widen(wide, stage);
            __syncthreads();
        }
        if (step_at == begin && (!IS_NARROW || has_tile)) {
            Multiply::hold(held, queries);
            if (unit.leaves != SPLIT_SUMS) clear_private(own);
        }
        const SCALAR *keys = IS_NARROW ? wide : reinterpret_cast<const SCALAR *>(stage);
        if (has_tile) attend(sums, held, keys, spare, step_at * KEYS, own_limits, window, heads);
        const bool is_closed = step_at + 1 == stop || (step_at + 1) * KEYS % SPLIT == 0;
        if (has_tile && is_closed) {
            sums.totals[0] = row_sum(sums.totals[0]);
            sums.totals[1] = row_sum(sums.totals[1]);
            if (unit.leaves == SPLIT_SUMS)
                store_partial(sums, partial_values, partial_marks, tile, step, heads, step_at * KEYS / SPLIT);
            else
                join_split(own, sums);
            const bool is_last = step_at + 1 == stop;
            if (unit.leaves != SPLIT_SUMS && (is_last || (step_at + 1) * KEYS % GROUP == 0))
                close_group(own, partial_values, partial_marks, tile, step, heads, unit, step_at * KEYS / GROUP, is_last);
            clear(sums);
        }
        if (!IS_NARROW) __syncthreads();  // a stage that was widened is free already, and `wide` behind the next barrier
    }
    if (has_tile && unit.leaves == RESULTS) store_joined(output, own, tile, step, heads, value_scale);
}

/* Joined sums of one number of a result. */
struct Joined {
    float peak, total, value;

    __device__ __forceinline__ void clear() { peak = minus_infinity(), total = value = 0.0f; }
    __device__ __forceinline__ void join(float coming_peak, float coming_total, float coming_value) {
        const Factors by = raise(peak, coming_peak);
        total = joined(total, coming_total, by);
        value = joined(value, coming_value, by);
    }
};

/* merges [tokens, 4]: a token, the slot of the first sums that it sees, how many there are, and how many of them the first group
   has; those behind have GROUP_SPLITS each. Grid (merged tokens, heads), HEAD_DIM threads. */
extern "C" __global__ void __launch_bounds__(256)
merge_splits(SCALAR *output, const float *partial_values, const float2 *partial_marks, const int *merges, int heads,
             float value_scale) {
    const int *merge = merges + blockIdx.x * 4;
    const int head = blockIdx.y, d = threadIdx.x;
    Joined all, group;
    all.clear(), group.clear();
    int left = merge[3];
#pragma unroll 4
    for (int at = 0; at < merge[2]; ++at) {
        const long long row = (long long)(merge[1] + at) * heads + head;
        const float2 marks = partial_marks[row];
        group.join(marks.x, marks.y, partial_values[row * HEAD_DIM + d]);
        if (--left == 0) {
            all.join(group.peak, group.total, group.value);
            group.clear(), left = GROUP_SPLITS;
        }
    }
    all.join(group.peak, group.total, group.value);  // of nothing: it changes nothing
    output[((long long)merge[0] * heads + head) * HEAD_DIM + d] = narrow(all.value / all.total * value_scale, SCALAR{});
}
