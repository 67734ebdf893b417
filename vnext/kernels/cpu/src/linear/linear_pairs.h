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
void rows_pairs(const LinearCall &call, int64_t row, int64_t panel, const bf16 *weights, Ahead &ahead) {
    const int64_t steps = (call.weight->in + STEP - 1) / STEP, stride = call.x_stride;
    const bf16 *x = static_cast<const bf16 *>(call.x) + row * stride;
    __m512 first[R], second[R];
    for (int r = 0; r < R; ++r)
        first[r] = second[r] = _mm512_setzero_ps();
    for (int64_t step = 0; step < steps; ++step) {
        const bf16 *at = weights + step * 1024;
        ahead.fetch();
        half_step<R>(x + step * STEP, stride, at, first);
        half_step<R>(x + step * STEP, stride, at + 512, second);
    }
    for (int r = 0; r < R; ++r)
        finish_row(call, row + r, panel, {first[r]}, {second[r]});
}

typedef void (*PairRows)(const LinearCall &, int64_t, int64_t, const bf16 *, Ahead &);
constexpr PairRows PAIR_FORMS[PAIR_ROWS + 1] = {
    nullptr,       rows_pairs<1>, rows_pairs<2>, rows_pairs<3>,  rows_pairs<4>,  rows_pairs<5>, rows_pairs<6>,
    rows_pairs<7>, rows_pairs<8>, rows_pairs<9>, rows_pairs<10>, rows_pairs<11>, rows_pairs<12>};

/* x must be readable up to whole steps. Rows pass in blocks of nearly the same size: a small last one would wait for its
   own sums instead of for the units that multiply. */
void linear_pairs(const LinearCall &call, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1) {
    const Packed &w = *call.weight;
    const int64_t rows = row1 - row0, blocks = (rows + PAIR_ROWS - 1) / PAIR_ROWS;
    Ahead ahead(call, panel0, panel1, rows, blocks);
    for (int64_t panel = panel0; panel < panel1; ++panel) {
        const bf16 *weights = bf16_panel(w, panel);
        ahead.begin(panel + 1);
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t row = row0 + rows * block / blocks, end = row0 + rows * (block + 1) / blocks;
            PAIR_FORMS[end - row](call, row, panel, weights, ahead);
        }
    }
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
