/* Products of attention: a warp's 16 queries with 32 keys, and their weights with 32 values, all in shared memory.

   Owns the layout of the fragments of mma.m16n8k16. Lane l holds rows l / 4 and l / 4 + 8 of each 16 x 8 tile, columns
   l % 4 * 2 and the next one: element i of a tile is row l / 4 + i / 2 * 8, column l % 4 * 2 + i % 2. bfloat16 and half use
   the tensor cores, with weights rounded to the values' type; float is multiplied unrounded, in order. */
#pragma once

#include "instructions.cuh"

constexpr int ROWS = 16;   // queries (times heads) of a warp
constexpr int KEYS = 32;   // keys of a step
constexpr int COLUMNS = 8; // of a tile

/* Rows of shared memory are apart by 16 bytes more than they are long: eight of them then touch all banks once. */
template <typename T>
__host__ __device__ constexpr int pitch_of(int head_dim) {
    return head_dim + 16 / int(sizeof(T));
}

__device__ __forceinline__ int own_row(int i) { return threadIdx.x % 32 / 4 + i / 2 * 8; }
__device__ __forceinline__ int own_column(int i) { return threadIdx.x % 4 * 2 + i % 2; }

/* Two numbers as one word, the first one low. */
template <typename T>
__device__ __forceinline__ unsigned packed(float low, float high) {
    struct alignas(4) Pair {
        T low, high;
    } pair{narrow(low, T{}), narrow(high, T{})};
    return *reinterpret_cast<const unsigned *>(&pair);
}

template <typename T, int WIDTH>
struct Products {
    static constexpr int PITCH = pitch_of<T>(WIDTH);
    static constexpr int SPARE = 0;
    static constexpr bool HOLDS = WIDTH <= 128;  // queries in registers; for more there is no room

    /* A warp's queries [16, WIDTH]. */
    struct Queries {
        const T *at;
        unsigned held[HOLDS ? WIDTH / 16 : 1][4];
    };

    static __device__ __forceinline__ void load(unsigned (&a)[4], const T *queries, int first) {
        const int lane = threadIdx.x % 32;
        ldmatrix_x4(a, queries + lane % 16 * PITCH + first + lane / 16 * 8);
    }

    /* Those in shared memory; where they are held, that memory is free for the warp's other uses after it. */
    static __device__ __forceinline__ void hold(Queries &queries, const T *at) {
        queries.at = at;
        if constexpr (HOLDS) {
#pragma unroll
            for (int first = 0; first < WIDTH; first += 16)
                load(queries.held[first / 16], at, first);
            __syncwarp();
        }
    }

    /* scores [16, KEYS] = queries [16, WIDTH] * keys [KEYS, WIDTH] transposed. */
    static __device__ __forceinline__ void score(float (&scores)[KEYS / COLUMNS][4], const Queries &queries, const T *keys) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < KEYS / COLUMNS; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                scores[j][i] = 0.0f;
#pragma unroll
        for (int first = 0; first < WIDTH; first += 16) {
            unsigned a[4], b[4];
            if constexpr (HOLDS) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    a[i] = queries.held[first / 16][i];
            } else {
                load(a, queries.at, first);
            }
#pragma unroll
            for (int j = 0; j < KEYS / COLUMNS; j += 2) {
                ldmatrix_x4(b, keys + (j * COLUMNS + lane / 16 * 8 + lane % 8) * PITCH + first + lane / 8 % 2 * 8);
                mma_m16n8k16<T>(scores[j], a, {b[0], b[1]});
                mma_m16n8k16<T>(scores[j + 1], a, {b[2], b[3]});
            }
        }
    }

    /* sums [16, WIDTH] += weights [16, KEYS] * values [KEYS, WIDTH]. */
    static __device__ __forceinline__ void add(float (&sums)[WIDTH / COLUMNS][4],
                                               const float (&weights)[KEYS / COLUMNS][4], const T *values, float *) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < KEYS / COLUMNS; j += 2) {
            const unsigned a[4] = {packed<T>(weights[j][0], weights[j][1]), packed<T>(weights[j][2], weights[j][3]),
                                   packed<T>(weights[j + 1][0], weights[j + 1][1]),
                                   packed<T>(weights[j + 1][2], weights[j + 1][3])};
#pragma unroll
            for (int n = 0; n < WIDTH / COLUMNS; n += 2) {
                unsigned b[4];
                ldmatrix_x4_transposed(b, values + (j * COLUMNS + lane % 16) * PITCH + n * COLUMNS + lane / 16 * 8);
                mma_m16n8k16<T>(sums[n], a, {b[0], b[1]});
                mma_m16n8k16<T>(sums[n + 1], a, {b[2], b[3]});
            }
        }
    }
};

/* The same layout without tensor cores, which know no products of floats as they are. */
template <int WIDTH>
struct Products<float, WIDTH> {
    static constexpr int PITCH = pitch_of<float>(WIDTH);
    static constexpr int SPARE = ROWS * KEYS;  // floats a warp needs to pass its weights around
    static constexpr bool HOLDS = false;

    struct Queries {
        const float *at;
    };

    static __device__ __forceinline__ void hold(Queries &queries, const float *at) { queries.at = at; }

    static __device__ __forceinline__ void score(float (&scores)[KEYS / COLUMNS][4], const Queries &queries,
                                                 const float *keys) {
#pragma unroll
        for (int j = 0; j < KEYS / COLUMNS; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float *query = queries.at + own_row(i) * PITCH, *key = keys + (j * COLUMNS + own_column(i)) * PITCH;
                float sum = 0.0f;
#pragma unroll 4
                for (int d = 0; d < WIDTH; ++d)
                    sum = fmaf(query[d], key[d], sum);
                scores[j][i] = sum;
            }
    }

    static __device__ __forceinline__ void add(float (&sums)[WIDTH / COLUMNS][4],
                                               const float (&weights)[KEYS / COLUMNS][4], const float *values,
                                               float *spare) {
#pragma unroll
        for (int j = 0; j < KEYS / COLUMNS; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                spare[own_row(i) * KEYS + j * COLUMNS + own_column(i)] = weights[j][i];
        __syncwarp();
#pragma unroll 1
        for (int key = 0; key < KEYS; ++key)
#pragma unroll
            for (int n = 0; n < WIDTH / COLUMNS; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    sums[n][i] = fmaf(spare[own_row(i) * KEYS + key], values[key * PITCH + n * COLUMNS + own_column(i)],
                                      sums[n][i]);
        __syncwarp();
    }
};
