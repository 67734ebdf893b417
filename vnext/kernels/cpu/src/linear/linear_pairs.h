/* bfloat16 matrix products by the AVX512-BF16 dot product of pairs. Included by that level only.

   Its order over K differs from the other levels' (each pair goes into the sum at once); it is one order for any rows.
 */
#pragma once

#include "linear/linear_lanes.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

constexpr int PAIR_ROWS = 12, ROWS_ONCE = 9;

/* One step of H halves of a panel. */
template <int R, int H>
inline void pairs_step(const bf16 *x, int64_t stride, const bf16 *weights, __m512 (&sums)[H][R]) {
    for (int pair = 0; pair < 16; ++pair) {
        __m512bh w[H];
        UNROLLED for (int h = 0; h < H; ++h)
            w[h] = (__m512bh)_mm512_loadu_si512(weights + 512 * h + pair * 32);
        UNROLLED for (int r = 0; r < R; ++r) {
            int32_t bits;
            memcpy(&bits, x + r * stride + 2 * pair, 4);
            UNROLLED for (int h = 0; h < H; ++h)
                sums[h][r] = _mm512_dpbf16_ps(sums[h][r], w[h], (__m512bh)_mm512_set1_epi32(bits));
        }
    }
}

/* H: halves of a panel that share a loaded number. */
template <int R, int H>
void rows_pairs(const LinearCall &call, const bf16 *x, int64_t stride, int64_t row, int64_t panel, const void *weights, Ahead &ahead) {
    const int64_t steps = call.weight->shard_steps();
    const bf16 *at = static_cast<const bf16 *>(weights);
    ShardSums<R> shards;
    for (int64_t shard = 0; shard < call.weight->shards; ++shard) {
        __m512 sums[2 / H][H][R];
        for (auto &part : sums)
            for (auto &half : part)
                for (__m512 &sum : half)
                    sum = _mm512_setzero_ps();
        for (int64_t step = 0; step < steps; ++step, x += STEP) {
            ahead.fetch();
            UNROLLED for (int part = 0; part < 2 / H; ++part, at += 512 * H)
                pairs_step<R, H>(x, stride, at, sums[part]);
        }
        for (int half = 0; half < 2; ++half)
            for (int r = 0; r < R; ++r)
                shards.at[shard][half][r] = {sums[half / H][half % H][r]};
    }
    shards.finish(call, row, panel);
}

template <int... R>
struct PairForms {
    static constexpr Rows<bf16> ONCE[] = {rows_pairs<R + 1, 1>...}, AGAIN[] = {rows_pairs<R + 1, 2>...};
};

/* x must be readable up to whole steps. So few rows that each weight is awaited from memory read it in the order in which it lies.
   More take both halves of a panel at once: twice the sums, so half the loads for each, and twice the time until one is needed
   (one thread of a Zen 5, 1,024 rows: 455 -> 515 GFLOP/s). */
void linear_pairs(const LinearCall &call, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1) {
    using Forms = FormsUpTo<PairForms, PAIR_ROWS>;
    const bf16 *x = static_cast<const bf16 *>(call.x) + row0 * call.x_stride;
    const auto &forms = row1 - row0 <= ROWS_ONCE ? Forms::ONCE : Forms::AGAIN;
    in_blocks(forms, PAIR_ROWS, call, x, call.x_stride, row0, row1, panel0, panel1);
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
