/* Thin products of adapters: product += up(down(x)) for the rows that have an adapter, whose rows come in tiles of one adapter.

   A row's sums have one order, whatever rows, adapters and blocks there are. The inputs are cut into segments of SEGMENT.
   In each, CHAINS chains sum every CHAINS-th input in rising order, and are added in rising order; so are the segments. The ranks
   are one chain, in rising order, which is added to the product last and rounded once. Every multiplication and addition rounds
   by itself, so that plain torch (vnext/kernels/thin_tiles.py) gives the same bits.

   Adapters lie in regions of one memory, each a header and matrices: a graph holds the memory's address and reads the header.
   Macro: SCALAR (activations and matrices). */
#include "platform.cuh"

#ifndef SCALAR
#define SCALAR __nv_bfloat16
#endif

constexpr int CHUNK = Chunk<SCALAR>::SIZE;
constexpr int TILE = 8, SEGMENT = 512, CHAINS = 64, LANES = 16;
constexpr int CHAIN_INPUTS = SEGMENT / CHAINS;
constexpr int SUMS = CHAINS * LANES + LANES;  // floats of a token, LANES apart in their banks

/* A tile: `count` tokens from tokens[first] on, at most TILE, with the adapter in `region`. */
struct Tile {
    int region, first, count;
};

/* What an adapter adds to the columns [first, first + width) of a product; of rank 0 nothing. `down` [inputs, rank rounded up to
   LANES] and `up` [width / LANES rounded up, rank, LANES] are bytes from the region's begin. */
struct Line {
    long long down, up, rank, first, width, rest[3];
};

__device__ __forceinline__ float plus_product(float sum, float a, float b) { return __fadd_rn(sum, __fmul_rn(a, b)); }

/* A thread's chain in one segment: sums [N][CHUNK] of N tokens over inputs from `input` to `end`, CHAINS apart. */
template <int N>
__device__ __forceinline__ void sum_chain(float (&sums)[N][CHUNK], const SCALAR *const (&rows)[N], const SCALAR *down,
                                          int padded_rank, int input, int end) {
#pragma unroll
    for (int t = 0; t < N; ++t)
#pragma unroll
        for (int i = 0; i < CHUNK; ++i)
            sums[t][i] = 0.0f;
#pragma unroll 2
    for (; input < end; input += CHAINS) {
        float weights[CHUNK];
        load_chunk(weights, down + (long long)input * padded_rank, CHUNK, true);
#pragma unroll
        for (int t = 0; t < N; ++t) {
            const float x = to_float(rows[t][input]);
#pragma unroll
            for (int i = 0; i < CHUNK; ++i)
                sums[t][i] = plus_product(sums[t][i], x, weights[i]);
        }
    }
}

/* The chains of N tokens of a tile, to shared memory `chains` [N][SUMS]. Tokens behind the tile's count are its first one. */
template <int N>
__device__ __forceinline__ void down_rows(float *chains, const Tile &tile, const SCALAR *x, const int *tokens,
                                          long long x_stride, const SCALAR *down, int padded_rank, int inputs) {
    constexpr int PARTS = LANES / CHUNK;
    const int chain = threadIdx.x / PARTS, part = threadIdx.x % PARTS * CHUNK;
    const int begin = blockIdx.y * SEGMENT, end = min(begin + SEGMENT, inputs);
    const SCALAR *rows[N];
#pragma unroll
    for (int t = 0; t < N; ++t)
        rows[t] = x + tokens[tile.first + (t < tile.count ? t : 0)] * x_stride;
    float sums[N][CHUNK];
    sum_chain<N>(sums, rows, down + part, padded_rank, begin + chain, end);
#pragma unroll
    for (int t = 0; t < N; ++t)
#pragma unroll
        for (int i = 0; i < CHUNK; ++i)
            chains[t * SUMS + chain * LANES + part + i] = sums[t][i];
}

/* narrow [tokens][lines][segments][rank_room]: what each segment of x's inputs gives. Grid (tiles, segments, lines * rank_room /
   LANES), a thread for each chain and CHUNK ranks. shared: TILE * SUMS floats. */
extern "C" __global__ void __launch_bounds__(256)
thin_down(float *narrow, const SCALAR *x, const unsigned char *memory, const int *tokens, const Tile *tiles,
          long long x_stride, long long region_bytes, int first_line, int inputs, int rank_room) {
    DYNAMIC_SHARED(float, chains);
    const int groups = rank_room / LANES, line = blockIdx.z / groups, lane = blockIdx.z % groups * LANES;
    const Tile tile = tiles[blockIdx.x];
    if (tile.count == 0) return;
    const unsigned char *region = memory + tile.region * region_bytes;
    const Line here = reinterpret_cast<const Line *>(region)[first_line + line];
    if (lane >= here.rank) return;
    const int padded_rank = (int(here.rank) + LANES - 1) / LANES * LANES;
    const SCALAR *down = reinterpret_cast<const SCALAR *>(region + here.down) + lane;
    if (tile.count == 1)
        down_rows<1>(chains, tile, x, tokens, x_stride, down, padded_rank, inputs);
    else
        down_rows<TILE>(chains, tile, x, tokens, x_stride, down, padded_rank, inputs);
    __syncthreads();
    for (int at = threadIdx.x; at < tile.count * LANES; at += blockDim.x) {
        const float *from = chains + at / LANES * SUMS + at % LANES;
        float sum = from[0];
        for (int chain = 1; chain < CHAINS; ++chain)
            sum += from[chain * LANES];
        const long long row = (long long)(tile.first + at / LANES) * (gridDim.z / groups) + line;
        narrow[(row * gridDim.y + blockIdx.y) * rank_room + lane + at % LANES] = sum;
    }
}

/* A thread's CHUNK columns of N tokens: sums over the ranks, which are added to the product. */
template <int N>
__device__ __forceinline__ void up_rows(SCALAR *product, const float *ranks, const Tile &tile, const int *tokens,
                                        long long product_stride, const SCALAR *up, int rank, int left, bool whole) {
    float sums[N][CHUNK] = {};
    for (int j = 0; j < rank; ++j) {
        float weights[CHUNK];
        load_chunk(weights, up + j * LANES, CHUNK, true);
#pragma unroll
        for (int t = 0; t < N; ++t)
#pragma unroll
            for (int i = 0; i < CHUNK; ++i)
                sums[t][i] = plus_product(sums[t][i], ranks[t * rank + j], weights[i]);
    }
#pragma unroll
    for (int t = 0; t < N; ++t)
        if (t < tile.count) {
            SCALAR *row = product + tokens[tile.first + t] * product_stride;
            float values[CHUNK];
            load_chunk(values, row, left, whole);
#pragma unroll
            for (int i = 0; i < CHUNK; ++i)
                values[i] += sums[t][i];
            store_chunk(row, values, left, whole);
        }
}

/* product [rows, columns] += up(narrow), in place. Grid (tiles, blocks of columns, lines), a thread for CHUNK columns; `whole`: rows
   of the product are aligned. shared: TILE * rank_room floats. */
extern "C" __global__ void __launch_bounds__(128)
thin_up(SCALAR *product, const float *narrow, const unsigned char *memory, const int *tokens, const Tile *tiles,
        long long product_stride, long long region_bytes, int first_line, int segments, int rank_room, int whole) {
    DYNAMIC_SHARED(float, ranks);
    const Tile tile = tiles[blockIdx.x];
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * CHUNK;
    if (tile.count == 0) return;
    const unsigned char *region = memory + tile.region * region_bytes;
    const Line here = reinterpret_cast<const Line *>(region)[first_line + blockIdx.z];
    const int rank = int(here.rank), width = int(here.width);
    if (rank == 0 || blockIdx.y * blockDim.x * CHUNK >= width) return;
    for (int at = threadIdx.x; at < TILE * rank; at += blockDim.x) {
        const int token = min(at / rank, tile.count - 1);
        const float *from = narrow + ((long long)(tile.first + token) * gridDim.z + blockIdx.z) * segments * rank_room + at % rank;
        float sum = from[0];
        for (int segment = 1; segment < segments; ++segment)
            sum += from[(long long)segment * rank_room];
        ranks[at] = sum;
    }
    __syncthreads();
    if (column >= width) return;
    const SCALAR *up = reinterpret_cast<const SCALAR *>(region + here.up) + (long long)(column / LANES) * rank * LANES + column % LANES;
    const int left = min(width - column, CHUNK);
    const bool aligned = whole && left == CHUNK && here.first % CHUNK == 0;
    if (tile.count == 1)
        up_rows<1>(product + here.first + column, ranks, tile, tokens, product_stride, up, rank, left, aligned);
    else
        up_rows<TILE>(product + here.first + column, ranks, tile, tokens, product_stride, up, rank, left, aligned);
}
