/* bfloat16 matrix products by Arm's dot product of pairs. Included by the level NEON_BF16 only.

   Per output and pair of inputs, rising: acc = odd(acc + odd(odd(x0 * w0) + odd(x1 * w1))), where odd rounds to odd and takes
   denormal numbers as zero. That is one lane of bfdot. An output of bfmmla is two of them, one after the other (Arm ARM,
   BFMatMulAdd), so one row by bfdot and many by bfmmla have the same bits. */
#pragma once

#include "linear/linear_lanes.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

constexpr int DOT_ROWS = 6;  // two of them share 8 sums

inline bfloat16x8_t pairs_of(uint32x4_t words) { return vreinterpretq_bf16_u32(words); }

/* One step of half a panel and one row. */
inline void step_of_row(const bf16 *x, const bf16 *weights, Floats *sums) {
    UNROLLED for (int pair = 0; pair < 16; ++pair) {
        uint32_t numbers;
        memcpy(&numbers, x + 2 * pair, 4);
        UNROLLED for (int i = 0; i < 4; ++i) {
            const bfloat16x8_t w = pairs_of(loaded<uint32x4_t>(weights + pair * 32 + 8 * i));
            sums[i] = vbfdotq_f32(sums[i], w, pairs_of(vdupq_n_u32(numbers)));
        }
    }
}

void one_row(const LinearCall &call, const bf16 *x, int64_t, int64_t row, int64_t panel, const void *weights, Ahead &ahead) {
    const int64_t steps = call.weight->shard_steps();
    const bf16 *at = static_cast<const bf16 *>(weights);
    ShardSums<1> shards;
    for (int64_t shard = 0; shard < call.weight->shards; ++shard) {
        Lanes first = all(0.0f), second = all(0.0f);
        for (int64_t step = 0; step < steps; ++step, x += STEP, at += 1024) {
            ahead.fetch();
            step_of_row(x, at, first.v);
            step_of_row(x, at + 512, second.v);
        }
        shards.at[shard][0][0] = first, shards.at[shard][1][0] = second;
    }
    shards.finish(call, row, panel);
}

/* Four inputs of two rows. */
inline bfloat16x8_t two_rows(const bf16 *first, const bf16 *second) {
    return vreinterpretq_bf16_u16(vcombine_u16(vld1_u16(first), vld1_u16(second)));
}

/* One step of half a panel and R / 2 pairs of rows: sums [pair of rows][pair of outputs], each two by two. */
template <int R>
inline void half_step(const bf16 *const *x, int64_t at, const bf16 *weights, Floats (*sums)[8]) {
    Floats totals[R / 2][8];
    UNROLLED for (int r = 0; r < R / 2; ++r)
        UNROLLED for (int i = 0; i < 8; ++i)
            totals[r][i] = sums[r][i];
    for (int k = 0; k < STEP; k += 4, weights += 64) {
        bfloat16x8_t rows[R / 2];
        UNROLLED for (int r = 0; r < R / 2; ++r)
            rows[r] = two_rows(x[2 * r] + at + k, x[2 * r + 1] + at + k);
        UNROLLED for (int i = 0; i < 4; ++i) {
            const uint32x4_t even = loaded<uint32x4_t>(weights + 8 * i), odd = loaded<uint32x4_t>(weights + 32 + 8 * i);
            const bfloat16x8_t front = pairs_of(vzip1q_u32(even, odd)), back = pairs_of(vzip2q_u32(even, odd));
            UNROLLED for (int r = 0; r < R / 2; ++r) {
                totals[r][2 * i] = vbfmmlaq_f32(totals[r][2 * i], rows[r], front);
                totals[r][2 * i + 1] = vbfmmlaq_f32(totals[r][2 * i + 1], rows[r], back);
            }
            keep_order();
        }
    }
    UNROLLED for (int r = 0; r < R / 2; ++r)
        UNROLLED for (int i = 0; i < 8; ++i)
            sums[r][i] = totals[r][i];
}

inline Lanes row_of_sums(const Floats *sums, bool is_second) {
    return each([=](int i) {
        const float64x2_t a = vreinterpretq_f64_f32(sums[2 * i]), b = vreinterpretq_f64_f32(sums[2 * i + 1]);
        return (Floats)vreinterpretq_f32_f64(is_second ? vzip2q_f64(a, b) : vzip1q_f64(a, b));
    });
}

/* `count` rows as R of them: the last one twice where it has no neighbour. */
template <int R>
inline void rows_dots(const LinearCall &call, const bf16 *x, int64_t stride, int64_t row, int64_t panel, const void *weights,
                      Ahead &ahead, int count) {
    const int64_t steps = call.weight->shard_steps();
    const bf16 *rows[R], *at = static_cast<const bf16 *>(weights);
    for (int r = 0; r < R; ++r)
        rows[r] = x + (r < count ? r : count - 1) * stride;
    ShardSums<R> shards;
    int64_t k = 0;
    for (int64_t shard = 0; shard < call.weight->shards; ++shard) {
        Floats sums[2][R / 2][8] = {};
        for (int64_t step = 0; step < steps; ++step, k += STEP, at += 1024) {
            ahead.fetch();
            half_step<R>(rows, k, at, sums[0]);
            half_step<R>(rows, k, at + 512, sums[1]);
        }
        for (int r = 0; r < R; ++r)
            for (int half = 0; half < 2; ++half)
                shards.at[shard][half][r] = row_of_sums(sums[half][r / 2], r % 2);
    }
    for (int r = 0; r < count; ++r)
        finish_row(call, row + r, panel, &shards.at[0][0][r], &shards.at[0][1][r], 2 * R);
}

template <int N>
void some_rows(const LinearCall &call, const bf16 *x, int64_t stride, int64_t row, int64_t panel, const void *weights, Ahead &ahead) {
    rows_dots<(N + 1) / 2 * 2>(call, x, stride, row, panel, weights, ahead, N);
}

constexpr Rows<bf16> DOT_FORMS[DOT_ROWS] = {one_row, some_rows<2>, some_rows<3>, some_rows<4>, some_rows<5>, some_rows<6>};

/* x must be readable up to whole steps. */
void linear_dots(const LinearCall &call, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1) {
    const bf16 *x = static_cast<const bf16 *>(call.x) + row0 * call.x_stride;
    in_blocks(DOT_FORMS, DOT_ROWS, call, x, call.x_stride, row0, row1, panel0, panel1);
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
