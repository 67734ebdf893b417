/* Kernels with one fault each, of the kinds that the host shim is there to find. */
#include "instructions.cuh"

extern "C" __global__ void split_barrier(float *out) {
    if (threadIdx.x < 16) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    out[threadIdx.x] = 1.0f;
}

extern "C" __global__ void barrier_after_the_end(float *out) {
    if (threadIdx.x < 8) return;
    __syncthreads();
    out[threadIdx.x] = 1.0f;
}

extern "C" __global__ void absent_lanes(float *out) {
    if (threadIdx.x < 8) out[0] = __shfl_xor_sync(ALL_LANES, 1.0f, 1);
    else __syncthreads();
}

extern "C" __global__ void not_in_its_mask(float *out) { out[threadIdx.x] = __shfl_sync(0xffffu, 1.0f, 0); }

extern "C" __global__ void reads_outside_its_mask(float *out) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffu, 1.0f, 20);
}

extern "C" __global__ void mixed_collectives(float *out) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(ALL_LANES, 1.0f, 0);
    else out[threadIdx.x] = float(__ballot_sync(ALL_LANES, 1));
}

extern "C" __global__ void crooked_copy(float *out) {
    DYNAMIC_SHARED(float, tile);
    copy_async_16(tile + 1, out);
}

extern "C" __global__ void waits_for_nobody(float *out) {
    if (threadIdx.x == 0) __syncwarp(0x3u);
    __syncthreads();
}

/* Thread t reads what thread t + 1 wrote: right only behind a barrier. */
extern "C" __global__ void neighbour(float *out) {
    DYNAMIC_SHARED(float, values);
    values[threadIdx.x] = float(threadIdx.x);
#ifndef NO_BARRIER
    __syncthreads();
#endif
    out[threadIdx.x] = values[(threadIdx.x + 1) % blockDim.x];
}

extern "C" __global__ void deep(float *out, int depth) {
    volatile char room[4096];
    for (int i = 0; i < 4096; i += 64) room[i] = char(depth);
    if (depth > 0) deep(out, depth - 1);
    out[threadIdx.x] = float(room[0]);
}
