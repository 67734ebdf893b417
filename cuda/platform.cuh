/* The functions available to kernels, both on a GPU and in the tests' host shim. No host headers: NVRTC has none.

   Kernels use only dynamic shared memory, so that the shim can poison it and AddressSanitizer can detect overruns. */
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#ifndef VNX_SHIM
#define DYNAMIC_SHARED(type, name)                                  \
    extern __shared__ __align__(128) unsigned char name##_bytes[]; \
    type *name = reinterpret_cast<type *>(name##_bytes)
#endif

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr float NOTHING = -3.402823466e38f;  // the least float: below every score, and no infinity

/* The compiler moves no access to memory across it, and so needs no registers for both sides at once. No instruction. */
__device__ __forceinline__ void keep_order() { asm volatile("" ::: "memory"); }

/* x, of which the compiler forgets where it came from: what a loop makes of it is made there, not held in registers. */
__device__ __forceinline__ int forgotten(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ __forceinline__ float minus_infinity() { return __int_as_float(int(0xff800000u)); }

/* ---- numbers ---- */

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_fp8_e4m3 x) { return float(x); }

/* `narrow(x, T{})`: x rounded to the nearest T, ties to even. */
__device__ __forceinline__ float narrow(float x, float) { return x; }
__device__ __forceinline__ __nv_bfloat16 narrow(float x, __nv_bfloat16) { return __float2bfloat16_rn(x); }
__device__ __forceinline__ __half narrow(float x, __half) { return __float2half_rn(x); }
__device__ __forceinline__ __nv_fp8_e4m3 narrow(float x, __nv_fp8_e4m3) { return __nv_fp8_e4m3(x); }

template <typename T>
__device__ __forceinline__ float rounded(float x) {
    return to_float(narrow(x, T{}));
}

/* ---- 16 bytes at a time ---- */

template <typename T>
struct alignas(16) Chunk {
    static constexpr int SIZE = 16 / sizeof(T);
    T at[SIZE];
};

/* The next elements of a row as floats; `whole`: aligned and all there, else zeros stand behind its end. */
template <typename T>
__device__ __forceinline__ void load_chunk(float (&to)[Chunk<T>::SIZE], const T *from, int count, bool whole) {
    if (whole) {
        const Chunk<T> chunk = *reinterpret_cast<const Chunk<T> *>(from);
#pragma unroll
        for (int i = 0; i < Chunk<T>::SIZE; ++i)
            to[i] = to_float(chunk.at[i]);
    } else {
#pragma unroll
        for (int i = 0; i < Chunk<T>::SIZE; ++i)
            to[i] = i < count ? to_float(from[i]) : 0.0f;
    }
}

template <typename T>
__device__ __forceinline__ void store_chunk(T *to, const float (&from)[Chunk<T>::SIZE], int count, bool whole) {
    if (whole) {
        Chunk<T> chunk;
#pragma unroll
        for (int i = 0; i < Chunk<T>::SIZE; ++i)
            chunk.at[i] = narrow(from[i], T{});
        *reinterpret_cast<Chunk<T> *>(to) = chunk;
    } else {
#pragma unroll
        for (int i = 0; i < Chunk<T>::SIZE; ++i)
            if (i < count) to[i] = narrow(from[i], T{});
    }
}

/* ---- sums, in an order that only the number of threads decides ---- */

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int bits = 16; bits > 0; bits /= 2)
        x += __shfl_xor_sync(ALL_LANES, x, bits);
    return x;
}

/* The same sum in every thread of the block; `spare` has a float for each warp. */
__device__ __forceinline__ float block_sum(float x, float *spare) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) spare[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp)
        sum += spare[warp];
    return sum;
}
