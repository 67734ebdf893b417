/* Products of many rows in bfloat16 without an instruction for it. Some steps of a panel, or of half a panel, are widened to float32
   once and stay in the first cache, where some rows at a time meet them: first the even inputs of a step, then the odd ones, so that
   a chain has all registers to itself. Sums over steps wait in memory. The chains, and so the bits, are those of linear_lanes.h. */
#pragma once

#include "linear/linear_lanes.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

/* Rows and halves of a panel that meet: as many sums as hide a multiply-add's latency. Steps in a block: 16 to 18 KB of float32. */
#if defined(VNX_AVX512)
constexpr int ROWS_BLOCKED = 8, HALVES_BLOCKED = 2;
constexpr int64_t BLOCK_STEPS = 4;
#else
constexpr int ROWS_BLOCKED = 4, HALVES_BLOCKED = 1;
constexpr int64_t BLOCK_STEPS = 9;
#endif
constexpr int64_t ROWS_TO_BLOCK = 16;  // fewer do not repay the widening
constexpr int WIDE = 16 * HALVES_BLOCKED;

inline int64_t blocks_of(const Packed &w) { return (w.shard_steps() + BLOCK_STEPS - 1) / BLOCK_STEPS; }

/* The steps of a weight in blocks of nearly equal size, no block in two shards: `body(shard, step, count)`. */
template <typename F>
inline void each_block(const Packed &w, const F &body) {
    const int64_t steps = w.shard_steps(), blocks = blocks_of(w);
    for (int64_t shard = 0; shard < w.shards; ++shard)
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t first = steps * block / blocks;
            body(shard, shard * steps + first, steps * (block + 1) / blocks - first);
        }
}

/* x as float32 in the calling thread's scratch, [block][rows][inputs of the block]: what meets a block of weights is one stream.
   Neighbouring units often have the same rows. */
inline const float *rows_in_blocks(const LinearCall &call, int64_t row0, int64_t rows) {
    thread_local uint64_t last_call = 0;
    thread_local int64_t last_row = 0;
    float *to = static_cast<float *>(scratch(SLOT_ROWS, size_t(rows * call.weight->steps() * STEP) * 4)), *const x = to;
    if (last_call == call.number && last_row == row0) return x;
    last_call = call.number, last_row = row0;
    each_block(*call.weight, [&](int64_t, int64_t step, int64_t count) {
        for (int64_t row = row0; row < row0 + rows; ++row) {
            const bf16 *from = static_cast<const bf16 *>(call.x) + row * call.x_stride + step * STEP;
            for (int64_t k = 0; k < count * STEP; k += 16, to += 16)
                store(to, load(from + k));
        }
    });
    return x;
}

/* Steps of these halves as float32: [step][even, odd][16 pairs][WIDE]. */
inline void widen_halves(const bf16 *from, int64_t steps, float *to) {
    for (int64_t step = 0; step < steps; ++step, from += 1024, to += 32 * WIDE)
        for (int half = 0; half < HALVES_BLOCKED; ++half)
            for (int pair = 0; pair < 16; ++pair) {
                const bf16 *weights = from + half * 512 + pair * 32;
                const Lanes even = load_even(weights), odd = load_odd(weights);
                store(to + pair * WIDE + half * 16, even);
                store(to + (16 + pair) * WIDE + half * 16, odd);
            }
}

/* sums [HALVES_BLOCKED][R]: one chain of a step, from zero. */
template <int R>
inline void chain(const float *x, int64_t stride, const float *weights, Lanes (*sums)[R]) {
    UNROLLED for (int h = 0; h < HALVES_BLOCKED; ++h)
        UNROLLED for (int r = 0; r < R; ++r)
            sums[h][r] = all(0.0f);
    for (int pair = 0; pair < 16; ++pair) {
        Lanes w[HALVES_BLOCKED];
        UNROLLED for (int h = 0; h < HALVES_BLOCKED; ++h)
            w[h] = load(weights + pair * WIDE + h * 16);
        UNROLLED for (int r = 0; r < R; ++r) {
            const Lanes value = all(x[2 * pair + r * stride]);
            UNROLLED for (int h = 0; h < HALVES_BLOCKED; ++h)
                sums[h][r] = fused(value, w[h], sums[h][r]);
        }
    }
}

/* sums [R][PANEL] += steps of these halves. */
template <int R>
__attribute__((noinline)) void add_steps(const float *x, int64_t steps, const float *weights, float *sums) {
    const int64_t stride = steps * STEP;
    alignas(64) float held[R * WIDE];
    for (int64_t step = 0; step < steps; ++step, x += STEP, weights += 32 * WIDE) {
        Lanes even[HALVES_BLOCKED][R], odd[HALVES_BLOCKED][R];
        chain<R>(x, stride, weights, even);
        UNROLLED for (int r = 0; r < R; ++r)
            UNROLLED for (int h = 0; h < HALVES_BLOCKED; ++h)
                store(held + r * WIDE + h * 16, even[h][r]);
        keep_order();
        chain<R>(x + 1, stride, weights + 16 * WIDE, odd);
        UNROLLED for (int r = 0; r < R; ++r)
            UNROLLED for (int h = 0; h < HALVES_BLOCKED; ++h) {
                float *at = sums + r * PANEL + h * 16;
                store(at, load(at) + (load(held + r * WIDE + h * 16) + odd[h][r]));
            }
        keep_order();
    }
}

template <int... R>
struct BlockForms {
    static constexpr decltype(&add_steps<1>) ADD[] = {add_steps<R + 1>...};
};

/* x [rows][steps * STEP], sums [rows][PANEL]. */
inline void add_rows(const float *x, int64_t rows, int64_t steps, const float *weights, float *sums, Ahead &ahead) {
    for (int64_t row = 0; row < rows; row += ROWS_BLOCKED) {
        const int64_t count = std::min<int64_t>(ROWS_BLOCKED, rows - row);
        FormsUpTo<BlockForms, ROWS_BLOCKED>::ADD[count - 1](x + row * steps * STEP, steps, weights, sums + row * PANEL);
        ahead.fetch();
    }
}

void linear_bf16_blocked(const LinearCall &call, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1) {
    const int64_t rows = row1 - row0;
    if (rows < ROWS_TO_BLOCK) return linear_bf16(call, row0, row1, panel0, panel1);
    const DenormalsAreZero guard;
    const Packed &w = *call.weight;
    const int64_t sums_size = rows * PANEL;
    const float *x = rows_in_blocks(call, row0, rows);
    float *weights = static_cast<float *>(scratch(SLOT_PARTIALS, size_t(BLOCK_STEPS * 32 * WIDE + w.shards * sums_size) * 4));
    float *sums = weights + BLOCK_STEPS * 32 * WIDE;
    Ahead ahead(call, panel0, panel1, 2 / HALVES_BLOCKED * w.shards * blocks_of(w) * ((rows + ROWS_BLOCKED - 1) / ROWS_BLOCKED));
    for (int64_t panel = panel0; panel < panel1; ++panel) {
        const bf16 *from = reinterpret_cast<const bf16 *>(panel_of(w, panel));
        ahead.begin(panel + 1);
        memset(sums, 0, size_t(w.shards * sums_size) * 4);
        each_block(w, [&](int64_t shard, int64_t step, int64_t count) {
            for (int half = 0; half < 2; half += HALVES_BLOCKED) {
                widen_halves(from + step * 1024 + half * 512, count, weights);
                add_rows(x + step * STEP * rows, rows, count, weights, sums + shard * sums_size + half * 16, ahead);
            }
        });
        finish_rows(call, row0, rows, panel, sums);
    }
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
