/* Matrix products on sixteen lanes: the level's float32 and bfloat16 forms.

   Each output is accumulated over K in one order whatever the rows and columns beside it:
     FLOAT32   acc = fma(x[k], w[k], acc), k rising
     BFLOAT16  per step of 32 inputs two chains, even and odd k, from zero; acc += even + odd: what tdpbf16ps does, bit
   for bit. A product of two bfloat16 is exact in float32, so a fused and a separate multiply-add agree.
   So is each shard of a weight, alone; the shards' sums are then added by one tree. */
#pragma once

#include "linear/linear_finish.h"
#include "team.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

/* Rows that share a loaded weight, and halves of a panel that share a loaded number: as many sums as there are registers. */
#if defined(VNX_AVX512)
constexpr int ROWS_F32 = 8, HALVES_F32 = 2, ROWS_BF16 = 8;
#elif defined(VNX_AVX2)
constexpr int ROWS_F32 = 6, HALVES_F32 = 1, ROWS_BF16 = 3;
#elif defined(__aarch64__)
constexpr int ROWS_F32 = 5, HALVES_F32 = 1, ROWS_BF16 = 3;
#else
constexpr int ROWS_F32 = 2, HALVES_F32 = 1, ROWS_BF16 = 1;
#endif

/* tdpbf16ps treats denormal numbers as zero; so must the implementations with the same sums, while they run. */
struct DenormalsAreZero {
#if defined(__SSE2__)
    unsigned saved = __builtin_ia32_stmxcsr();
    DenormalsAreZero() { __builtin_ia32_ldmxcsr(saved | 0x8040); }
    ~DenormalsAreZero() { __builtin_ia32_ldmxcsr(saved); }
#elif defined(__aarch64__)
    uint64_t saved;
    DenormalsAreZero() {
        asm volatile("mrs %0, fpcr" : "=r"(saved));
        set(saved | 1u << 24);
    }
    ~DenormalsAreZero() { set(saved); }
    static void set(uint64_t control) { asm volatile("msr fpcr, %0" ::"r"(control) : "memory"); }
#endif
};

/* `count` inputs of one or both halves of a panel, added to the sums of both. */
template <int R, int H>
inline void step_f32(const float *x, int64_t stride, int64_t count, const float *weights, Lanes (*sums)[R]) {
    Lanes totals[H][R];
    UNROLLED for (int h = 0; h < H; ++h)
        UNROLLED for (int r = 0; r < R; ++r)
            totals[h][r] = sums[h][r];
    for (int64_t k = 0; k < count; ++k) {
        Lanes w[H];
        UNROLLED for (int h = 0; h < H; ++h)
            w[h] = load(weights + k * PANEL + 16 * h);
        UNROLLED for (int r = 0; r < R; ++r) {
            const Lanes value = all(x[r * stride + k]);
            UNROLLED for (int h = 0; h < H; ++h)
                totals[h][r] = fused(value, w[h], totals[h][r]);
        }
    }
    UNROLLED for (int h = 0; h < H; ++h)
        UNROLLED for (int r = 0; r < R; ++r)
            sums[h][r] = totals[h][r];
}

/* R rows from `row` on, at x, times one panel. */
template <typename X>
using Rows = void (*)(const LinearCall &, const X *x, int64_t stride, int64_t row, int64_t panel, const void *weights, Ahead &);

template <int R>
void rows_f32(const LinearCall &call, const float *x, int64_t stride, int64_t row, int64_t panel, const void *weights, Ahead &ahead) {
    const int64_t in = call.weight->shard_in();
    constexpr int H = R <= 2 ? 2 : HALVES_F32;
    ShardSums<R> shards;
    const float *from = static_cast<const float *>(weights);
    for (int64_t shard = 0; shard < call.weight->shards; ++shard, x += in, from += in * PANEL) {
        auto &sums = shards.at[shard];
        for (int r = 0; r < R; ++r)
            sums[0][r] = all(0.0f), sums[1][r] = all(0.0f);
        for (int64_t k = 0; k < in; k += STEP) {
            const float *at = from + k * PANEL;
            ahead.fetch();
            for (int h = 0; h < 2; h += H)
                step_f32<R, H>(x + k, stride, k + STEP < in ? STEP : in - k, at + 16 * h, sums + h);
        }
    }
    shards.finish(call, row, panel);
}

/* One step of half a panel; x as float32. */
template <int R>
inline void half_step(const float *x, int64_t stride, const bf16 *weights, Lanes *sums) {
    Lanes even[R], odd[R];
    UNROLLED for (int r = 0; r < R; ++r)
        even[r] = all(0.0f), odd[r] = all(0.0f);
    for (int pair = 0; pair < 16; ++pair) {
        const Lanes w_even = load_even(weights + pair * 32);
        UNROLLED for (int r = 0; r < R; ++r)
            even[r] = fused(all(x[2 * pair + r * stride]), w_even, even[r]);
        if (R == ROWS_BF16) keep_order();
        const Lanes w_odd = load_odd(weights + pair * 32);
        UNROLLED for (int r = 0; r < R; ++r)
            odd[r] = fused(all(x[2 * pair + 1 + r * stride]), w_odd, odd[r]);
    }
    UNROLLED for (int r = 0; r < R; ++r)
        sums[r] = sums[r] + (even[r] + odd[r]);
}

/* x as float32 in whole steps. */
template <int R>
void rows_bf16(const LinearCall &call, const float *x, int64_t stride, int64_t row, int64_t panel, const void *weights, Ahead &ahead) {
    const int64_t steps = call.weight->shard_steps();
    const bf16 *at = static_cast<const bf16 *>(weights);
    ShardSums<R> shards;
    for (int64_t shard = 0; shard < call.weight->shards; ++shard) {
        Lanes first[R], second[R];
        UNROLLED for (int r = 0; r < R; ++r)
            first[r] = all(0.0f), second[r] = all(0.0f);
        for (int64_t step = 0; step < steps; ++step, x += STEP, at += 1024) {
            ahead.fetch();
            half_step<R>(x, stride, at, first);
            half_step<R>(x, stride, at + 512, second);
        }
        UNROLLED for (int r = 0; r < R; ++r)
            shards.at[shard][0][r] = first[r], shards.at[shard][1][r] = second[r];
    }
    shards.finish(call, row, panel);
}

template <int... R>
struct RowForms {
    static constexpr Rows<float> F32[] = {rows_f32<R + 1>...}, BF16[] = {rows_bf16<R + 1>...};
};

/* x [row1 - row0][stride]. A panel stays in the first cache while the rows pass, in blocks of nearly the same size, at most
   `most`: a small last one would wait for its own sums instead of for the units that multiply. A panel that few rows read once,
   one weight after the other, is left to the processor, which fetches further ahead than instructions do (26 GB/s against 20 on
   Zen 4). */
template <typename X>
inline void in_blocks(const Rows<X> *forms, int most, const LinearCall &call, const X *x, int64_t stride, int64_t row0,
                      int64_t row1, int64_t panel0, int64_t panel1) {
    const Packed &w = *call.weight;
    const int64_t rows = row1 - row0, blocks = (rows + most - 1) / most;
    Ahead ahead(call, panel0, panel1, blocks * w.steps(), rows <= 4 && blocks == 1);
    for (int64_t panel = panel0; panel < panel1; ++panel) {
        const void *weights = panel_of(w, panel);
        ahead.begin(panel + 1);
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t first = rows * block / blocks, end = rows * (block + 1) / blocks;
            forms[end - first - 1](call, x + first * stride, stride, row0 + first, panel, weights, ahead);
        }
    }
}

void linear_f32(const LinearCall &call, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1) {
    const float *x = static_cast<const float *>(call.x) + row0 * call.x_stride;
    in_blocks(FormsUpTo<RowForms, ROWS_F32>::F32, ROWS_F32, call, x, call.x_stride, row0, row1, panel0, panel1);
}

/* Rows [row, row + count), which are whole steps, as float32 in scratch. */
inline const float *widened(const LinearCall &call, int64_t row, int64_t count) {
    const int64_t width = call.weight->steps() * STEP;
    float *wide = static_cast<float *>(scratch(SLOT_ROWS, size_t(count) * width * 4));
    for (int64_t r = 0; r < count; ++r) {
        const bf16 *x = static_cast<const bf16 *>(call.x) + (row + r) * call.x_stride;
        for (int64_t k = 0; k < width; k += 16)
            store(wide + r * width + k, load(x + k));
    }
    return wide;
}

inline void linear_bf16(const LinearCall &call, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1) {
    const DenormalsAreZero guard;
    const int64_t stride = call.weight->steps() * STEP;
    const float *x = widened(call, row0, row1 - row0);
    in_blocks(FormsUpTo<RowForms, ROWS_BF16>::BF16, ROWS_BF16, call, x, stride, row0, row1, panel0, panel1);
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
