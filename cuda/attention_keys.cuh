/* The host's description of an attention step, and the loads of keys and values into shared memory.

   Owns the macros of paged_attention.cu (SCALAR: query and output, CACHE: SCALAR, fp8 or codes, HEAD_DIM: a multiple of 16, at
   most 256), a block's layout of shared memory, and the walk through the block table. */
#pragma once

#include "attention_tiles.cuh"
#include "codes.cuh"

#ifndef SCALAR
#define SCALAR __nv_bfloat16
#endif
#ifndef CACHE
#define CACHE SCALAR
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif

constexpr int SPLIT = 256, GROUP_SPLITS = 16, GROUP = GROUP_SPLITS * SPLIT;  // keys; as in vnext/kernels/cuda/plan.py
constexpr int STAGES = 2;
constexpr int TILES = HEAD_DIM / COLUMNS;
constexpr int PRIVATE = TILES * 4 + 4;  // what a thread keeps of joined splits: its sums, two peaks, two totals
constexpr bool IS_NARROW = sizeof(CACHE) != sizeof(SCALAR), IS_CODED = IS_CODE<CACHE>;
constexpr int ROW_WIDTH = row_width<CACHE>(HEAD_DIM);

/* Rows of codes begin at any byte, and copies at multiples of 16: so many bytes may have to stand before a row. */
constexpr int OFFSET_MAX = !IS_CODED || ROW_WIDTH % 16 == 0 ? 0 : 16 - (ROW_WIDTH & -ROW_WIDTH);
constexpr int STAGE_CHUNKS = (ROW_WIDTH + OFFSET_MAX + Chunk<CACHE>::SIZE - 1) / Chunk<CACHE>::SIZE;
constexpr int STAGE_PITCH = pitch_of<CACHE>(STAGE_CHUNKS * Chunk<CACHE>::SIZE);
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

/* What a unit leaves: results, or the sums of its splits or of its groups, which merge_splits joins. */
enum Leaves { RESULTS, SPLIT_SUMS, GROUP_SUMS };

/* Up to four tiles, one a warp, that read the same keys [key_first, key_stop) of one row of the block table. */
struct Unit {
    int tile_first, tile_count, table_row, key_first, key_stop, leaves;
};

/* All pointers to int are into the plan of the step. */
struct Step {
    const Unit *units;
    const int2 *tiles;    // first entry and count
    const int *tokens;    // of entries
    const int *limits;    // of tokens: the last key that they see
    const int *partials;  // of tokens: the slot of their split 0 or group 0, or the one in which joined groups wait
    const int *table;
    long long table_stride;
    int window;
};

struct Heads {
    int heads, kv_heads, block_size;
    float scale, softcap;  // both times log2(e)
    float turn;            // twice log2(e) times scale / softcap, where there is a cap
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

/* How many bytes of a stage stand before a row; it is written down behind what is copied of a key. */
__device__ __forceinline__ int offset_of(int row) { return IS_CODED ? unsigned(row) * ROW_WIDTH % 16 : 0; }
__device__ __forceinline__ unsigned *offset_at(CACHE *stage, int key) {
    return reinterpret_cast<unsigned *>(stage + key * STAGE_PITCH + STAGE_CHUNKS * Chunk<CACHE>::SIZE);
}

/* A step's keys and values; each lane brings the row of one key. */
__device__ __forceinline__ void load_keys(CACHE *stage, const CACHE *key_cache, const CACHE *value_cache, int row_here) {
    constexpr int CHUNK = Chunk<CACHE>::SIZE, CHUNKS = STAGE_CHUNKS;
    static_assert(KEYS == 32, "a lane a key");
    if (IS_CODED && threadIdx.x < KEYS) *offset_at(stage, threadIdx.x) = offset_of(max(row_here, 0));
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
            const int row = max(rows[i], 0), offset = offset_of(row);
            const long long source = (long long)row * ROW_WIDTH - offset + place;
            const int left = IS_CODED ? min(max(ROW_WIDTH + offset - place, 0), 16) : 16;  // behind it other rows begin, or nothing
            const unsigned valid = rows[i] == NO_ROW ? 0 : left;
            copy_async_16(stage + key * STAGE_PITCH + place, key_cache + source, valid);
            copy_async_16(stage + (KEYS + key) * STAGE_PITCH + place, value_cache + source, valid);
        }
    }
}

/* ---- codes and fp8 as the products take them ---- */

constexpr int EIGHT = 8, WIDENED_AT_ONCE = 2;  // numbers of a row that a lane takes at a time, and of how many keys

template <typename T>
struct alignas(16) Eight {
    T at[EIGHT];
};

/* Eight numbers of a stage's row as they lie there, and what codes are multiplied by. */
struct alignas(8) Narrow {
    unsigned words[2];
};
struct Taken {
    Narrow numbers;
    float scale;
};

/* Those from `place` on; `offset`: where the row begins. */
__device__ __forceinline__ Taken take_eight(const CACHE *row, unsigned offset, unsigned place) {
    if constexpr (!IS_CODED) return {*reinterpret_cast<const Narrow *>(row + place), 1.0f};
    const unsigned *words = reinterpret_cast<const unsigned *>(row) + (offset + place) / 4;
    Taken taken{{words[0], words[1]}, scale_of(reinterpret_cast<const unsigned char *>(row)[offset + HEAD_DIM + place / CODES_A_SCALE])};
    if constexpr (ROW_WIDTH % 4 != 0) {  // rows begin within words
        const unsigned shift = offset % 4 * 8;
        taken.numbers.words[0] = __funnelshift_r(words[0], words[1], shift);
        taken.numbers.words[1] = __funnelshift_r(words[1], words[2], shift);
    }
    return taken;
}

/* A code with its sign turned, as the last byte of a float of 2^23, is the code and 2^23 + 128; all of it is exact. */
__device__ __forceinline__ float number_of(const Taken &taken, int i) {
    constexpr unsigned SIGNS = 0x80808080u, TWO_TO_23 = 0x4b000000u;
    const float shifted = __uint_as_float(__byte_perm(taken.numbers.words[i / 4] ^ SIGNS, TWO_TO_23, 0x7440u | i % 4));
    return (shifted - (8388608.0f + 128.0f)) * taken.scale;
}

__device__ __forceinline__ void store_eight(SCALAR *to, const Taken &taken) {
    float numbers[EIGHT];
#pragma unroll
    for (int i = 0; i < EIGHT; i += 2) {
        if constexpr (IS_CODED) {
            numbers[i] = number_of(taken, i), numbers[i + 1] = number_of(taken, i + 1);
        } else {
            __nv_fp8x2_e4m3 pair;
            pair.__x = (unsigned short)(taken.numbers.words[i / 4] >> i % 4 * 8);
            const float2 both(pair);
            numbers[i] = both.x, numbers[i + 1] = both.y;
        }
    }
    Eight<SCALAR> wide;
#pragma unroll
    for (int i = 0; i < EIGHT; ++i)
        wide.at[i] = narrow(numbers[i], SCALAR{});
    *reinterpret_cast<Eight<SCALAR> *>(to) = wide;
}

/* Keys and values of a stage to `to`. A lane has one place of several rows, and takes all before it converts the first. */
__device__ __forceinline__ void widen(SCALAR *to, CACHE *stage) {
    constexpr int LANES = HEAD_DIM / EIGHT, KEYS_A_WARP = 32 / LANES;
    const int lane = threadIdx.x % 32, place = lane % LANES * EIGHT, stride = blockDim.x / 32 * KEYS_A_WARP;
    if (lane >= KEYS_A_WARP * LANES) return;
#pragma unroll 1
    for (int first = threadIdx.x / 32 * KEYS_A_WARP + lane / LANES; first < KEYS; first += WIDENED_AT_ONCE * stride) {
        Taken taken[WIDENED_AT_ONCE][2];
#pragma unroll
        for (int i = 0; i < WIDENED_AT_ONCE; ++i) {
            const int key = min(first + i * stride, KEYS - 1);
            const unsigned offset = IS_CODED ? *offset_at(stage, key) : 0;
            taken[i][0] = take_eight(stage + key * STAGE_PITCH, offset, place);
            taken[i][1] = take_eight(stage + (KEYS + key) * STAGE_PITCH, offset, place);
        }
#pragma unroll
        for (int i = 0; i < WIDENED_AT_ONCE; ++i) {
            const int key = first + i * stride;
            if (key >= KEYS) break;
            store_eight(to + key * WIDE_PITCH + place, taken[i][0]);
            store_eight(to + (KEYS + key) * WIDE_PITCH + place, taken[i][1]);
        }
    }
}
