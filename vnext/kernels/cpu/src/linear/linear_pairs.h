/* bfloat16 matrix products by the AVX512-BF16 dot product of pairs. Included by that level only.

   Its order over K differs from the other levels' (each pair goes into the sum at once); it is one order for any rows.
 */
#pragma once

#include "linear/linear_lanes.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

constexpr int PAIR_ROWS = 12;

/* One step of half a panel. */
template <int R>
inline void half_step(const bf16 *x, int64_t stride, const bf16 *weights, __m512 *sums) {
    for (int pair = 0; pair < 16; ++pair) {
        const __m512bh w = (__m512bh)_mm512_loadu_si512(weights + pair * 32);
        UNROLLED for (int r = 0; r < R; ++r) {
            int32_t bits;
            memcpy(&bits, x + r * stride + 2 * pair, 4);
            sums[r] = _mm512_dpbf16_ps(sums[r], w, (__m512bh)_mm512_set1_epi32(bits));
        }
    }
}

template <int R>
void rows_pairs(const LinearCall &call, const bf16 *x, int64_t stride, int64_t row, int64_t panel, const void *weights, Ahead &ahead) {
    const int64_t steps = call.weight->shard_steps();
    const bf16 *at = static_cast<const bf16 *>(weights);
    ShardSums<R> shards;
    for (int64_t shard = 0; shard < call.weight->shards; ++shard) {
        __m512 first[R], second[R];
        for (int r = 0; r < R; ++r)
            first[r] = second[r] = _mm512_setzero_ps();
        for (int64_t step = 0; step < steps; ++step, x += STEP, at += 1024) {
            ahead.fetch();
            half_step<R>(x, stride, at, first);
            half_step<R>(x, stride, at + 512, second);
        }
        for (int r = 0; r < R; ++r)
            shards.at[shard][0][r] = {first[r]}, shards.at[shard][1][r] = {second[r]};
    }
    shards.finish(call, row, panel);
}

constexpr Rows<bf16> PAIR_FORMS[PAIR_ROWS] = {rows_pairs<1>, rows_pairs<2>,  rows_pairs<3>,  rows_pairs<4>,
                                              rows_pairs<5>, rows_pairs<6>,  rows_pairs<7>,  rows_pairs<8>,
                                              rows_pairs<9>, rows_pairs<10>, rows_pairs<11>, rows_pairs<12>};

/* x must be readable up to whole steps. */
void linear_pairs(const LinearCall &call, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1) {
    const bf16 *x = static_cast<const bf16 *>(call.x) + row0 * call.x_stride;
    in_blocks(PAIR_FORMS, PAIR_ROWS, call, x, call.x_stride, row0, row1, panel0, panel1);
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
