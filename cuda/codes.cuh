/* Rows of 8-bit numbers that share a power of two in blocks of 32: MXINT8 of the Open Compute Project's Microscaling Formats
   (MX) v1.0. The plain implementation is vnext/kernels/mxint8.py; a CPU writes the same bytes (rows/codes_lanes.h).

   A row of D numbers is D codes and the exponents behind them. A number is code * 2^(exponent - 127 - 6): seven bits and a sign,
   exact in bfloat16 and float, and in half as well where it was a half's. */
#pragma once

#include "platform.cuh"

using Code = signed char;

constexpr int CODE_BITS = 6;           // behind the point
constexpr int CODES_A_SCALE = 32;      // a warp has a number each
constexpr int LEAST_EXPONENT = -100;   // smaller numbers become zero

template <typename T>
constexpr bool IS_CODE = false;
template <>
constexpr bool IS_CODE<Code> = true;

/* Elements of a row of `head_dim` numbers in a cache of T. */
template <typename T>
__host__ __device__ constexpr int row_width(int head_dim) {
    return IS_CODE<T> ? head_dim + (head_dim + CODES_A_SCALE - 1) / CODES_A_SCALE : head_dim;
}

/* 2^exponent, of a normal number. */
__device__ __forceinline__ float exact_power(int exponent) { return __int_as_float((exponent + 127) << 23); }

/* The exponent of the largest of a warp's numbers; a NaN is not looked at. */
__device__ __forceinline__ int shared_exponent(float x) {
    float largest = fmaxf(fabsf(x), 0.0f);
#pragma unroll
    for (int bits = 16; bits > 0; bits /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, bits));
    return min(max((__float_as_int(largest) >> 23) - 127, LEAST_EXPONENT), 127);
}

/* A warp's numbers as the block of codes from `first` on of a row: x is that of place first + lane, 0 behind the row's end.
   Rounded to the nearest, ties to even; what is out of range is +-127, a NaN -127. */
__device__ __forceinline__ void store_codes(Code *row, int first, int head_dim, float x) {
    const int exponent = shared_exponent(x), lane = threadIdx.x % 32;
    const float scaled = fminf(fmaxf(x * exact_power(CODE_BITS - exponent), -127.0f), 127.0f);
    if (first + lane < head_dim) row[first + lane] = Code(rintf(scaled));
    if (lane == 0) row[head_dim + first / CODES_A_SCALE] = Code(exponent + 127);
}

/* What the codes of a block are multiplied by; 0 where nothing was loaded. */
__device__ __forceinline__ float scale_of(unsigned char exponent) {
    return __int_as_float(max(int(exponent) - CODE_BITS, 0) << 23);
}
