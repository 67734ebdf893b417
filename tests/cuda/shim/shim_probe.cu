/* Small kernels that ask the host shim one question each. */
#include "instructions.cuh"

extern "C" __global__ void convert(const float *x, __nv_bfloat16 *to_bf16, __half *to_half, __nv_fp8_e4m3 *to_fp8,
                                   float *back, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    to_bf16[i] = narrow(x[i], __nv_bfloat16{});
    to_half[i] = narrow(x[i], __half{});
    to_fp8[i] = narrow(x[i], __nv_fp8_e4m3{});
    back[i] = to_float(to_bf16[i]);
    back[i + count] = to_float(to_half[i]);
    back[i + 2 * count] = to_float(to_fp8[i]);
}

/* c [16, 8] = a [16, 16] * b [16, 8], by ldmatrix (b transposed on the way) and mma. */
template <typename T>
__device__ void multiply(float *c, const T *a, const T *b) {
    DYNAMIC_SHARED(T, tile);  // a, then b with rows of 8
    const int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) tile[i] = a[i];
    for (int i = lane; i < 128; i += 32) tile[256 + i] = b[i];
    __syncwarp();
    unsigned left[4], right[4];
    ldmatrix_x4(left, tile + lane % 16 * 16 + lane / 16 * 8);
    ldmatrix_x4_transposed(right, tile + 256 + lane % 16 * 8);
    float sums[4] = {};
    mma_m16n8k16<T>(sums, left, {right[0], right[1]});
    for (int i = 0; i < 4; ++i)
        c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
}
extern "C" __global__ void product_bf16(float *c, const __nv_bfloat16 *a, const __nv_bfloat16 *b) { multiply(c, a, b); }
extern "C" __global__ void product_half(float *c, const __half *a, const __half *b) { multiply(c, a, b); }

extern "C" __global__ void votes(int *out) {
    const int lane = threadIdx.x;
    out[lane] = __shfl_sync(ALL_LANES, lane, 5, 8);
    out[32 + lane] = __shfl_xor_sync(ALL_LANES, lane, 3);
    out[64 + lane] = __shfl_down_sync(ALL_LANES, lane, 2, 16);
    out[96 + lane] = __shfl_up_sync(ALL_LANES, lane, 4);
    out[128 + lane] = int(__ballot_sync(ALL_LANES, lane % 3 == 0));
    out[160 + lane] = lane < 16 ? __shfl_sync(0xffffu, lane, 15 - lane) : __any_sync(0xffff0000u, lane == 20);
}

extern "C" __global__ void counted(int *count, int *largest) {
    atomicAdd(count, 1);
    atomicMax(largest, int(blockIdx.x * blockDim.x + threadIdx.x));
}

/* The last block to finish adds up what all of them left: fences and a counter. */
extern "C" __global__ void last_block(int *finished, float *parts, float *sum) {
    DYNAMIC_SHARED(int, last);
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = float(blockIdx.x + 1);
        __threadfence();
        *last = atomicAdd(finished, 1) == int(gridDim.x) - 1;
    }
    __syncthreads();
    if (!*last || threadIdx.x != 0) return;
    __threadfence();
    float total = 0.0f;
    for (unsigned i = 0; i < gridDim.x; ++i)
        total += parts[i];
    *sum = total;
}

extern "C" __global__ void indices(unsigned *out) {
    const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 1000 + thread;
}

/* Two stages of copies: the first must be waited for, the second may still be under way. */
extern "C" __global__ void staged(float *out, const float *from, int valid_bytes, int wait_for_all) {
    DYNAMIC_SHARED(float, stages);
    copy_async_16(stages + threadIdx.x * 4, from + threadIdx.x * 4, unsigned(valid_bytes));
    copy_async_commit();
    copy_async_16(stages + 128 + threadIdx.x * 4, from + 128 + threadIdx.x * 4);
    copy_async_commit();
    copy_async_wait<1>();
    if (wait_for_all) copy_async_wait<0>();
    __syncwarp();
    for (int i = threadIdx.x; i < 256; i += 32)
        out[i] = stages[i];
}
