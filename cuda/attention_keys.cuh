/* The host's description of an attention step, and the loads of keys and values into shared memory.

   Owns the macros of paged_attention.cu (SCALAR: query and output, CACHE: SCALAR or fp8, HEAD_DIM: a multiple of 16, at most
   256), a block's layout of shared memory, and the walk through the block table. */
#pragma once

#include "attention_tiles.cuh"

#ifndef SCALAR
#define SCALAR __nv_bfloat16
#endif
#ifndef CACHE
#define CACHE SCALAR
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif

constexpr int SPLIT = 256;
constexpr int STAGES = 2;
constexpr int TILES = HEAD_DIM / COLUMNS;
constexpr int PRIVATE = TILES * 4 + 4;  // what a thread keeps of joined splits: its sums, two peaks, two totals
constexpr bool IS_NARROW = sizeof(CACHE) != sizeof(SCALAR);
constexpr int STAGE_PITCH = pitch_of<CACHE>(HEAD_DIM);
constexpr int WIDE_PITCH = pitch_of<SCALAR>(HEAD_DIM);
using Multiply = Products<SCALAR, HEAD_DIM>;

/* Of a warp in shared memory; what is private takes the place of queries that are held in registers. */
constexpr int QUERY_BYTES = ROWS * WIDE_PITCH * int(sizeof(SCALAR)), PRIVATE_BYTES = PRIVATE * 32 * 4;
constexpr int WARP_BYTES = Multiply::HOLDS ? (QUERY_BYTES > PRIVATE_BYTES ? QUERY_BYTES : PRIVATE_BYTES)
                                           : QUERY_BYTES + Multiply::SPARE * 4 + PRIVATE_BYTES;
#if __CUDA_ARCH__ >= 1000  // spills with fewer registers than two blocks leave it
constexpr int BLOCKS_MIN = Multiply::HOLDS ? 2 : 1;
#else  // of four warps; shared memory has room for them
constexpr int BLOCKS_MIN = !Multiply::HOLDS ? 1 : HEAD_DIM <= 64 ? 4 : 3;
#endif
constexpr int NO_LIMIT = 0x7fffffff;  // of a row without a query, whose sums nobody takes

/* Up to four tiles, one a warp, that read the same keys [key_first, key_stop) of one row of the block table. */
struct Unit {
    int tile_first, tile_count, table_row, key_first, key_stop, is_partial;
};

/* All pointers to int are into the plan of the step. */
struct Step {
    const Unit *units;
    const int2 *tiles;    // first entry and count
    const int *tokens;    // of entries
    const int *limits;    // of tokens: the last key that they see
    const int *partials;  // of tokens: the slot of their split 0
    const int *table;
    long long table_stride;
    int window;
};

struct Heads {
    int heads, kv_heads, block_size;
    float scale, softcap;  // both times log2(e)
};

/* ---- keys and values to shared memory ---- */

constexpr int NO_ROW = -1, AT_ONCE = 4;

/* Where the key `first` + this lane lies in the caches, as a row of theirs; NO_ROW: the unit does not see it. */
__device__ __forceinline__ int row_of_key(const Unit &unit, const Step &step, const Heads &heads, int first) {
    const int position = first + int(threadIdx.x % KEYS);
    if (position < unit.key_first || position >= unit.key_stop) return NO_ROW;
    const int block = step.table[unit.table_row * step.table_stride + position / heads.block_size];
    return (block * heads.kv_heads + int(blockIdx.y)) * heads.block_size + position % heads.block_size;
}

/* A step's keys and values; each lane brings the row of one key. */
__device__ __forceinline__ void load_keys(CACHE *stage, const CACHE *key_cache, const CACHE *value_cache, int row_here) {
    constexpr int CHUNK = Chunk<CACHE>::SIZE, CHUNKS = HEAD_DIM / CHUNK;
    static_assert(KEYS == 32, "a lane a key");
#pragma unroll 1
    for (int first = threadIdx.x; first < KEYS * CHUNKS; first += AT_ONCE * blockDim.x) {
        int rows[AT_ONCE];  // beforehand: a shuffle takes longer than a copy's beginning
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            rows[i] = __shfl_sync(ALL_LANES, row_here, (first + i * int(blockDim.x)) / CHUNKS % KEYS);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int at = first + i * int(blockDim.x), key = at / CHUNKS, place = at % CHUNKS * CHUNK;
            if (at >= KEYS * CHUNKS) break;
            const long long source = (long long)max(rows[i], 0) * HEAD_DIM + place;
            const unsigned valid = rows[i] == NO_ROW ? 0 : 16;
            copy_async_16(stage + key * STAGE_PITCH + place, key_cache + source, valid);
            copy_async_16(stage + (KEYS + key) * STAGE_PITCH + place, value_cache + source, valid);
        }
    }
}

template <typename T>
struct alignas(4 * sizeof(T)) Four {
    T at[4];
};

/* fp8 keys and values as the products take them. */
__device__ __forceinline__ void widen(SCALAR *to, const CACHE *stage) {
    constexpr int FOURS = HEAD_DIM / 4;
#pragma unroll 1
    for (int at = forgotten(threadIdx.x); at < 2 * KEYS * FOURS; at += blockDim.x) {
        const int key = at / FOURS, place = at % FOURS * 4;
        const Four<CACHE> from = *reinterpret_cast<const Four<CACHE> *>(stage + key * STAGE_PITCH + place);
        Four<SCALAR> wide;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            wide.at[i] = narrow(to_float(from.at[i]), SCALAR{});
        *reinterpret_cast<Four<SCALAR> *>(to + key * WIDE_PITCH + place) = wide;
    }
}
