/* A row during sampling: its random words, the tokens of each thread, the weights, and the likeliest token.

   vnext/sampling/weights.py defines the sampled token and explains why it is exact: weights are whole numbers computed by
   individually rounded operations, so a sum over the vocabulary has the same value in any order, and the token is the same on
   any device. */
#pragma once

#include "platform.cuh"

constexpr int WEIGHT_BITS = 40;
constexpr float LEAST_EXPONENT = -64.0f;
constexpr int AT_ONCE = 3;  // loads of 16 bytes that a thread has under way
using Mass = unsigned long long;

/* ---- random words: as in vnext/kernels/random_numpy.py ---- */

enum Domain : unsigned { POSITION = 1, INVERSION = 3 };

struct Words {
    unsigned first, second;
};

__device__ __forceinline__ Words threefry(Words key, Words counter) {
    const unsigned schedule[3] = {key.first, key.second, key.first ^ key.second ^ 0x1BD11BDAu};
    const int rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
    unsigned left = counter.first + schedule[0], right = counter.second + schedule[1];
#pragma unroll
    for (unsigned group = 0; group < 5; ++group) {
#pragma unroll
        for (int turn = 0; turn < 4; ++turn) {
            const int bits = rotations[group % 2][turn];
            left += right;
            right = (right << bits | right >> (32 - bits)) ^ left;
        }
        left += schedule[(group + 1) % 3];
        right += schedule[(group + 2) % 3] + group + 1;
    }
    return {left, right};
}

/* floor(u * total / 2^62), u of 62 random bits. */
__device__ __forceinline__ Mass draw_target(long long seed, long long position, Mass total) {
    const Words root{unsigned(Mass(seed) >> 32), unsigned(seed)};
    const Words words = threefry(threefry(root, {unsigned(position), POSITION}), {0, INVERSION});
    const Mass uniform = Mass(words.first >> 1) << 31 | words.second >> 1;
    return __umul64hi(uniform, total) << 2 | uniform * total >> 62;
}

/* ---- the row ---- */

struct Row {
    const float *logits;
    int vocabulary;
    bool is_aligned;  // to 16 bytes
    float peak, scale;
};

/* 2^(exponent + WEIGHT_BITS) without its fraction, a whole number below 2^41; the exponent is at most 0. */
__device__ __forceinline__ float fixed_point(float exponent) {
    const float series[6] = {0x1.5bba14p-10f, 0x1.3cea88p-7f, 0x1.c6b752p-5f, 0x1.ebf9bcp-3f, 0x1.62e42ap-1f, 1.0f};
    const float whole = rintf(exponent), part = __fsub_rn(exponent, whole);
    float power = series[0];
#pragma unroll
    for (int i = 1; i < 6; ++i)
        power = __fadd_rn(__fmul_rn(power, part), series[i]);
    return truncf(__fmul_rn(power, __int_as_float((int(whole) + 127 + WEIGHT_BITS) << 23)));
}

__device__ __forceinline__ float exponent_of(const Row &row, float logit) {
    return __fmul_rn(__fsub_rn(logit, row.peak), row.scale);
}

__device__ __forceinline__ float weight_of(const Row &row, float logit) {
    const float exponent = exponent_of(row, logit);
    return fixed_point(exponent >= LEAST_EXPONENT ? exponent : LEAST_EXPONENT);  // a NaN weighs nothing
}

/* A half-open range of tokens. */
struct Tokens {
    int first, stop;
};

/* A warp's tokens: neighbours, so that the first one that a sum passes is found in one warp's. */
__device__ __forceinline__ Tokens tokens_of(int warp, int vocabulary) {
    const int warps = blockDim.x / 32, range = (vocabulary + warps * 128 - 1) / (warps * 128) * 128;
    return {min(vocabulary, warp * range), min(vocabulary, (warp + 1) * range)};
}

__device__ __forceinline__ float4 load_four(const Row &row, int first) {
    return *reinterpret_cast<const float4 *>(row.logits + first);
}

/* The same near the end of a row, and of rows that are not aligned. */
__device__ __forceinline__ float4 load_up_to_four(const Row &row, int first) {
    const float *at = row.logits + first;
    const int count = row.vocabulary - first;
    return {at[0], count > 1 ? at[1] : minus_infinity(), count > 2 ? at[2] : minus_infinity(), count > 3 ? at[3] : minus_infinity()};
}

template <typename Visit>
__device__ __forceinline__ void visit_four(int first, const float4 &four, Visit visit) {
    visit(first, four.x);
    visit(first + 1, four.y);
    visit(first + 2, four.z);
    visit(first + 3, four.w);
}

/* `visit(token, logit)` for all of the row, each thread its own, rising; behind the vocabulary some of minus infinity. */
template <typename Visit>
__device__ __forceinline__ void each_logit(const Row &row, Visit visit) {
    const Tokens own = tokens_of(threadIdx.x / 32, row.vocabulary);
    int first = own.first + int(threadIdx.x) % 32 * 4;
    if (row.is_aligned)
        for (; first + (AT_ONCE - 1) * 128 + 4 <= own.stop; first += AT_ONCE * 128) {
            float4 fours[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                fours[i] = load_four(row, first + i * 128);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                visit_four(first + i * 128, fours[i], visit);
        }
#pragma unroll 1
    for (; first < own.stop; first += 128)
        visit_four(first, load_up_to_four(row, first), visit);
}

/* ---- the likeliest token ---- */

struct Likeliest {
    float logit;
    int token;
};

/* A NaN is above everything, as in torch; the lower id among equals. */
__device__ __forceinline__ bool is_before(Likeliest a, Likeliest b) {
    const bool a_nan = a.logit != a.logit, b_nan = b.logit != b.logit;
    if (a_nan != b_nan) return a_nan;
    if (!a_nan && a.logit != b.logit) return a.logit > b.logit;
    return a.token < b.token;
}

/* Of this thread's tokens; where it has none, of no token. */
__device__ __forceinline__ Likeliest likeliest_of_thread(const Row &row) {
    Likeliest best{minus_infinity(), row.vocabulary};
    each_logit(row, [&](int token, float logit) {
        if (!(logit < best.logit) && is_before({logit, token}, best)) best = {logit, token};
    });
    return best;
}

/* Of the block's; `spare` has one for each warp. */
__device__ __forceinline__ Likeliest likeliest_of_block(Likeliest best, Likeliest *spare) {
#pragma unroll
    for (int bits = 16; bits > 0; bits /= 2) {
        const Likeliest other{__shfl_xor_sync(ALL_LANES, best.logit, bits), __shfl_xor_sync(ALL_LANES, best.token, bits)};
        if (is_before(other, best)) best = other;
    }
    if (threadIdx.x % 32 == 0) spare[threadIdx.x / 32] = best;
    __syncthreads();
    best = spare[0];
    for (unsigned warp = 1; warp < blockDim.x / 32; ++warp)
        if (is_before(spare[warp], best)) best = spare[warp];
    return best;
}
