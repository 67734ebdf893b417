/* Row-wise operations: norm with residual, gates, rotary embedding with the write to the caches, table look-up.

   Each rounds where its reference in vnext/kernels/references.py rounds. A row's bits depend on that row alone: neither the
   number of rows nor the alignment changes the order of a sum. One block per row (256 threads), except for the gates
   (256 elements per block) and rotary embedding (128 threads per token, one warp per head).

   Macros: SCALAR (activations), WEIGHT (of norms), CACHE (keys and values; signed char: codes.cuh). */
#include "codes.cuh"

#ifndef SCALAR
#define SCALAR __nv_bfloat16
#endif
#ifndef WEIGHT
#define WEIGHT SCALAR
#endif
#ifndef CACHE
#define CACHE SCALAR
#endif

constexpr int CHUNK = Chunk<SCALAR>::SIZE;

/* ---- norm ---- */

/* A weight of the activations' type is applied after rounding to it, a float one before. */
__device__ __forceinline__ float weighted(float normed, float weight) { return rounded<SCALAR>(normed * weight); }
template <typename W>
__device__ __forceinline__ float weighted(float normed, W weight) {
    return rounded<SCALAR>(rounded<W>(normed) * to_float(weight));
}

/* out, total [rows, width] dense; x, residual with row strides in elements; weight [width]. No residual, no total.
   shared: a float for each warp. */
extern "C" __global__ void __launch_bounds__(256)
rms_norm(SCALAR *out, SCALAR *total, const SCALAR *x, const SCALAR *residual, const WEIGHT *weight, float eps, int width,
         long long x_stride, long long residual_stride, int whole) {
    DYNAMIC_SHARED(float, spare);
    const long long row = blockIdx.x;
    x += row * x_stride;
    residual += residual ? row * residual_stride : 0;
    out += row * width;
    total += total ? row * width : 0;
    float squares = 0.0f, values[CHUNK], more[CHUNK];
    for (int first = threadIdx.x * CHUNK; first < width; first += blockDim.x * CHUNK) {
        load_chunk(values, x + first, width - first, whole);
        if (residual) {
            load_chunk(more, residual + first, width - first, whole);
#pragma unroll
            for (int i = 0; i < CHUNK; ++i)
                values[i] = rounded<SCALAR>(values[i] + more[i]);
            store_chunk(total + first, values, width - first, whole);
        }
#pragma unroll
        for (int i = 0; i < CHUNK; ++i)
            squares = fmaf(values[i], values[i], squares);
    }
    const float scale = rsqrtf(block_sum(squares, spare) / float(width) + eps);
    const SCALAR *source = residual ? total : x;
    for (int first = threadIdx.x * CHUNK; first < width; first += blockDim.x * CHUNK) {
        load_chunk(values, source + first, width - first, whole);
#pragma unroll
        for (int i = 0; i < CHUNK; ++i)
            if (first + i < width) values[i] = weighted(values[i] * scale, weight[first + i]);
        store_chunk(out + first, values, width - first, whole);
    }
}

/* ---- gates ---- */

enum Gate { SILU, GELU_TANH };

__device__ __forceinline__ float gated(float x, int gate) {
    if (gate == SILU) return x / (expf(-x) + 1.0f);
    const float inner = (x * x * x * 0.044715f + x) * 1.5957691216057308f;
    return x / (expf(-inner) + 1.0f);
}

/* x [rows, 2 * width] -> out [rows, width]: gate(first half) * second half. Grid (rows, blocks of a row): of the second
   there are 65,535 at most. */
extern "C" __global__ void __launch_bounds__(256)
gate_and_mul(SCALAR *out, const SCALAR *x, int width, long long x_stride, int gate, int whole) {
    const int first = (blockIdx.y * blockDim.x + threadIdx.x) * CHUNK;
    if (first >= width) return;
    x += (long long)blockIdx.x * x_stride;
    float values[CHUNK], up[CHUNK];
    load_chunk(values, x + first, width - first, whole);
    load_chunk(up, x + width + first, width - first, whole);
#pragma unroll
    for (int i = 0; i < CHUNK; ++i)
        values[i] = gated(values[i], gate) * up[i];
    store_chunk(out + (long long)blockIdx.x * width + first, values, width - first, whole);
}

/* ---- rotary embedding and the write to the caches ---- */

/* One head in shared memory, by one warp: divided by its root mean square, times weight [head_dim], both roundings. */
__device__ __forceinline__ void norm_head(float *head, const void *weight, int is_wide, float eps, int head_dim) {
    float squares = 0.0f;
    for (int i = threadIdx.x % 32; i < head_dim; i += 32)
        squares = fmaf(head[i], head[i], squares);
    const float scale = rsqrtf(warp_sum(squares) / float(head_dim) + eps);
    for (int i = threadIdx.x % 32; i < head_dim; i += 32)
        head[i] = is_wide ? weighted(head[i] * scale, static_cast<const float *>(weight)[i])
                          : weighted(head[i] * scale, static_cast<const SCALAR *>(weight)[i]);
}

/* Channel i of a head whose first 2 * half channels turn by the angles; halves, not neighbours, form a pair. */
__device__ __forceinline__ float turned(const float *head, const float *cosine, const float *sine, int half, int i) {
    if (i >= 2 * half) return head[i];
    const bool is_first = i < half;
    const float other = __fmul_rn(is_first ? -head[i + half] : head[i - half], sine[is_first ? i : i - half]);
    return rounded<SCALAR>(__fadd_rn(__fmul_rn(head[i], cosine[is_first ? i : i - half]), other));
}

/* A warp's 32 numbers of a cache's row from `first` on, divided by the scale: x is that of place first + lane. */
template <typename T>
__device__ __forceinline__ void store_numbers(T *row, int first, int head_dim, float x, float scale) {
    if constexpr (IS_CODE<T>) {
        store_codes(row, first, head_dim, x);
    } else {
        const int i = first + threadIdx.x % 32;
        if (i < head_dim) row[i] = narrow(x / scale, T{});
    }
}

/* qkv [tokens, (heads + 2 * kv_heads) * head_dim] -> query [tokens, heads, head_dim]; keys and values to slots of caches
   [blocks, kv_heads, block_size, head_dim], there divided by a scale (1 unless the cache is fp8), or as rows of codes.
   Grid (tokens, blocks of its heads), a warp for each head; shared: head_dim floats for each warp. */
extern "C" __global__ void __launch_bounds__(128)
rotary_kv_write(SCALAR *query, CACHE *key_cache, CACHE *value_cache, const SCALAR *qkv, const void *q_norm,
                const void *k_norm, const float *cosine, const float *sine, const long long *slots, float eps,
                float key_scale, float value_scale, long long qkv_stride, int heads, int kv_heads, int head_dim,
                int block_size, int half, int q_norm_is_wide, int k_norm_is_wide) {
    DYNAMIC_SHARED(float, heads_of_warps);
    const long long token = blockIdx.x, slot = slots[token];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, at = int(blockIdx.y * blockDim.x) / 32 + warp;
    if (at >= heads + 2 * kv_heads) return;
    float *head = heads_of_warps + warp * head_dim;
    qkv += token * qkv_stride;
    cosine += token * half;
    sine += token * half;
    const bool is_query = at < heads, is_value = at >= heads + kv_heads;
    for (int i = lane; i < head_dim; i += 32)
        head[i] = to_float(qkv[at * head_dim + i]);  // each lane its own, which it norms itself
    const void *norm = is_query ? q_norm : is_value ? nullptr : k_norm;
    if (norm) norm_head(head, norm, is_query ? q_norm_is_wide : k_norm_is_wide, eps, head_dim);
    __syncwarp();
    const int kv_head = is_value ? at - heads - kv_heads : at - heads;
    const long long row = (slot / block_size * kv_heads + kv_head) * block_size + slot % block_size;
    CACHE *cache = (is_value ? value_cache : key_cache) + row * row_width<CACHE>(head_dim);
    for (int first = 0; first < head_dim; first += 32) {
        const int i = first + lane;
        const float x = i >= head_dim ? 0.0f : is_value ? head[i] : turned(head, cosine, sine, half, i);
        if (!is_query)
            store_numbers(cache, first, head_dim, x, is_value ? value_scale : key_scale);
        else if (i < head_dim)
            query[(token * heads + at) * head_dim + i] = narrow(x, SCALAR{});
    }
}

/* ---- rows of a table ---- */

template <typename Unit>
__device__ __forceinline__ void copy_row(void *out, const void *table, long long row, bool is_inside, int units) {
    Unit *to = static_cast<Unit *>(out) + (long long)blockIdx.x * units;
    const Unit *from = static_cast<const Unit *>(table) + row * units;
    for (int i = threadIdx.x; i < units; i += blockDim.x)
        to[i] = is_inside ? from[i] : Unit{};
}

/* out [ids, width] = table [rows, width] at ids - first; zeros where that is no row. A row is `units` of `unit_bytes`. */
extern "C" __global__ void __launch_bounds__(256)
gather_rows(void *out, const void *table, const long long *ids, long long first, long long rows, int units,
            int unit_bytes) {
    const long long row = ids[blockIdx.x] - first;
    const bool is_inside = row >= 0 && row < rows;
    if (unit_bytes == 16) copy_row<uint4>(out, table, row, is_inside, units);
    if (unit_bytes == 4) copy_row<unsigned>(out, table, row, is_inside, units);
    if (unit_bytes == 2) copy_row<unsigned short>(out, table, row, is_inside, units);
    if (unit_bytes == 1) copy_row<unsigned char>(out, table, row, is_inside, units);
}
