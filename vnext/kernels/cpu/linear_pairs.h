/* bfloat16 matrix products by the AVX512-BF16 dot product of pairs. Included by that level only.

   Its order over K differs from the other levels' (each pair goes into the sum at once); it is one order for any rows.
 */
#pragma once

#include "linear_lanes.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

constexpr int PAIR_ROWS = 12;

template <int R>
inline void rows_pairs(const LinearCall &call, int64_t row, int64_t panel, const bf16 *weights) {
    const int64_t steps = (call.weight->in + STEP - 1) / STEP;
    const bf16 *x = static_cast<const bf16 *>(call.x) + row * call.x_stride;
    __m512 first[R], second[R];
    for (int r = 0; r < R; ++r)
        first[r] = second[r] = _mm512_setzero_ps();
    for (int64_t step = 0; step < steps; ++step) {
        for (int pair = 0; pair < 16; ++pair) {
            const bf16 *at = weights + step * 1024 + pair * 32;
            const __m512bh a = (__m512bh)_mm512_loadu_si512(at), b = (__m512bh)_mm512_loadu_si512(at + 512);
            for (int r = 0; r < R; ++r) {
                int32_t bits;
                memcpy(&bits, x + r * call.x_stride + step * STEP + 2 * pair, 4);
                const __m512bh value = (__m512bh)_mm512_set1_epi32(bits);
                first[r] = _mm512_dpbf16_ps(first[r], a, value);
                second[r] = _mm512_dpbf16_ps(second[r], b, value);
            }
        }
    }
    for (int r = 0; r < R; ++r)
        finish_row(call, row + r, panel, {first[r]}, {second[r]});
}

/* x must be readable up to whole steps. */
void linear_pairs(const LinearCall &call, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1) {
    for (int64_t panel = panel0; panel < panel1; ++panel) {
        const bf16 *weights = bf16_panel(*call.weight, panel);
        int64_t row = row0;
        for (; row + PAIR_ROWS <= row1; row += PAIR_ROWS)
            rows_pairs<PAIR_ROWS>(call, row, panel, weights);
        for (; row + 4 <= row1; row += 4)
            rows_pairs<4>(call, row, panel, weights);
        for (; row < row1; ++row)
            rows_pairs<1>(call, row, panel, weights);
    }
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
