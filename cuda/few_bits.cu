/* Products of few rows with weights of four bits: each weight is read once for ROWS rows, as it lies in memory.

   A row's sums have one order, whatever rows there are, that of vnext/kernels/few_bits.py. The inputs are cut into slabs of SLAB, each
   a word of eight codes four times for each lane. A lane sums the eight products of a word in rising order: of 16-bit numbers with
   whole ones of four bits they are exact, so that a fused operation rounds as an addition does. The sum times the word's scale is
   added to the lane's total, word by word, and the lanes' totals by warp_sum.
   Macros: SCALAR (activations, of 16 bits), NUMBER (scales and lows), ROWS (of a block). */
#include "platform.cuh"

#ifndef SCALAR
#define SCALAR __nv_bfloat16
#endif
#ifndef NUMBER
#define NUMBER __half
#endif
#ifndef ROWS
#define ROWS 4
#endif

constexpr int CODES = 8, WORDS = 4, RUN = 32 * CODES, SLAB = WORDS * RUN;
constexpr int OUTPUTS = 4;  // of a warp

struct alignas(16) Word {
    unsigned at[WORDS];
};

/* Sums of a word's products with eight inputs of each row, and of the inputs. */
__device__ __forceinline__ void sum_word(float (&sums)[ROWS], const float (&x)[ROWS][CODES], unsigned word, int zero) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
        sums[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < CODES; ++i) {
        const float code = float(int(word >> 4 * i & 15) - zero);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            sums[r] = fmaf(x[r][i], code, sums[r]);
    }
}

__device__ __forceinline__ void sum_inputs(float (&sums)[ROWS], const float (&x)[ROWS][CODES]) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        sums[r] = 0.0f;
#pragma unroll
        for (int i = 0; i < CODES; ++i)
            sums[r] = __fadd_rn(sums[r], x[r][i]);
    }
}

/* result [rows, outputs] in float32 of x [rows, inputs] and words [outputs][slabs][32][WORDS]; scales, and lows or null, [outputs]
   [groups] of 2 ** group_log inputs each. Without lows a weight is (code - zero) * scale, else code * scale - low. Grid (blocks of
   outputs, blocks of ROWS rows), a warp for OUTPUTS outputs; `whole`: rows of x are aligned. */
extern "C" __global__ void __launch_bounds__(128)
multiply_few_bits(float *result, const SCALAR *x, const Word *words, const NUMBER *scales, const NUMBER *lows, long long x_stride, int rows,
                  int inputs, int outputs, int groups, int group_log, int zero, int whole) {
    const int lane = threadIdx.x % 32, first = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * OUTPUTS;
    const int first_row = blockIdx.y * ROWS, slabs = (inputs + SLAB - 1) / SLAB;
    if (first >= outputs) return;
    float totals[OUTPUTS][ROWS] = {};
    for (int slab = 0; slab < slabs; ++slab) {
        Word codes[OUTPUTS];
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o)
            codes[o] = words[((long long)min(first + o, outputs - 1) * slabs + slab) * 32 + lane];
#pragma unroll
        for (int j = 0; j < WORDS; ++j) {
            const int input = slab * SLAB + j * RUN + lane * CODES, left = inputs - input;
            const int group = min(input, inputs - 1) >> group_log;
            float values[ROWS][CODES], summed[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
                load_chunk(values[r], x + min(first_row + r, rows - 1) * x_stride + input, left, whole && left >= CODES);
            if (lows != nullptr) sum_inputs(summed, values);
#pragma unroll
            for (int o = 0; o < OUTPUTS; ++o) {
                const long long at = (long long)min(first + o, outputs - 1) * groups + group;
                const float scale = to_float(scales[at]), low = lows == nullptr ? 0.0f : to_float(lows[at]);
                float sums[ROWS];
                sum_word(sums, values, codes[o].at[j], zero);
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    float part = __fmul_rn(sums[r], scale);
                    if (lows != nullptr) part = __fsub_rn(part, __fmul_rn(summed[r], low));
                    totals[o][r] = __fadd_rn(totals[o][r], part);
                }
            }
        }
    }
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o)
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float total = warp_sum(totals[o][r]);
            if (lane == 0 && first + o < outputs && first_row + r < rows)
                result[(long long)(first_row + r) * outputs + first + o] = total;
        }
}
