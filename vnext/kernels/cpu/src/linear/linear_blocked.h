/* Products of many rows in bfloat16 with registers for few sums. Some steps of half a panel are widened to float32 once and stay
   in the first cache, where four rows at a time meet them: first the even inputs of a step, then the odd ones, so that eight sums
   are enough for a chain. Sums over steps wait in memory. The chains, and so the bits, are those of linear_lanes.h. */
#pragma once

#include "linear/linear_lanes.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

constexpr int ROWS_BLOCKED = 4;
constexpr int64_t ROWS_TO_BLOCK = 16;  // fewer do not repay the widening
constexpr int64_t BLOCK_STEPS = 9;     // 18 KB of float32 for half a panel

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

/* Steps of half a panel as float32: [step][even, odd][16 pairs][16 outputs]. */
inline void widen_half(const bf16 *from, int64_t steps, float *to) {
    for (int64_t step = 0; step < steps; ++step, from += 1024, to += 512)
        for (int pair = 0; pair < 16; ++pair) {
            const Lanes even = load_even(from + pair * 32), odd = load_odd(from + pair * 32);
            store(to + pair * 16, even);
            store(to + 256 + pair * 16, odd);
        }
}

/* sums [R]: one chain of a step, from zero. */
template <int R>
inline void chain(const float *x, int64_t stride, const float *weights, Lanes *sums) {
    UNROLLED for (int r = 0; r < R; ++r)
        sums[r] = all(0.0f);
    for (int pair = 0; pair < 16; ++pair) {
        const Lanes w = load(weights + pair * 16);
        UNROLLED for (int r = 0; r < R; ++r)
            sums[r] = fused(all(x[2 * pair + r * stride]), w, sums[r]);
    }
}

/* sums [R][PANEL] += steps of half a panel. */
template <int R>
__attribute__((noinline)) void add_steps(const float *x, int64_t steps, const float *weights, float *sums) {
    const int64_t stride = steps * STEP;
    alignas(64) float held[R * 16];
    for (int64_t step = 0; step < steps; ++step, x += STEP, weights += 512) {
        Lanes even[R], odd[R];
        chain<R>(x, stride, weights, even);
        UNROLLED for (int r = 0; r < R; ++r)
            store(held + r * 16, even[r]);
        keep_order();
        chain<R>(x + 1, stride, weights + 256, odd);
        UNROLLED for (int r = 0; r < R; ++r)
            store(sums + r * PANEL, load(sums + r * PANEL) + (load(held + r * 16) + odd[r]));
        keep_order();
    }
}

/* x [rows][steps * STEP], sums [rows][PANEL]. */
inline void add_rows(const float *x, int64_t rows, int64_t steps, const float *weights, float *sums, Ahead &ahead) {
    static_assert(ROWS_BLOCKED == 4);
    for (; rows >= 4; rows -= 4, x += 4 * steps * STEP, sums += 4 * PANEL) {
        add_steps<4>(x, steps, weights, sums);
        ahead.fetch();
    }
    if (rows == 3) add_steps<3>(x, steps, weights, sums);
    if (rows == 2) add_steps<2>(x, steps, weights, sums);
    if (rows == 1) add_steps<1>(x, steps, weights, sums);
}

/* sums [shards][rows][PANEL]. */
inline void finish_rows(const LinearCall &call, int64_t row0, int64_t rows, int64_t panel, const float *sums) {
    const Packed &w = *call.weight;
    const bool is_plain = w.shards == 1 && w.scales_at == 0 && call.result_kind == BFLOAT16;
    for (int64_t row = 0; row < rows; ++row, sums += PANEL) {
        if (is_plain) {
            finish_row<bf16>(call, row0 + row, panel, load(sums), load(sums + 16));
            continue;
        }
        Lanes first[SHARDS_MAX], second[SHARDS_MAX];
        for (int64_t shard = 0; shard < w.shards; ++shard) {
            const float *at = sums + shard * rows * PANEL;
            first[shard] = load(at), second[shard] = load(at + 16);
        }
        finish_row(call, row0 + row, panel, first, second, 1);
    }
}

void linear_bf16_blocked(const LinearCall &call, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1) {
    const int64_t rows = row1 - row0;
    if (rows < ROWS_TO_BLOCK) return linear_bf16(call, row0, row1, panel0, panel1);
    const DenormalsAreZero guard;
    const Packed &w = *call.weight;
    const int64_t sums_size = rows * PANEL;
    const float *x = rows_in_blocks(call, row0, rows);
    float *weights = static_cast<float *>(scratch(SLOT_PARTIALS, size_t(BLOCK_STEPS * 512 + w.shards * sums_size) * 4));
    float *sums = weights + BLOCK_STEPS * 512;
    Ahead ahead(call, panel0, panel1, 2 * w.shards * blocks_of(w) * (rows / ROWS_BLOCKED));
    for (int64_t panel = panel0; panel < panel1; ++panel) {
        const bf16 *from = bf16_panel(w, panel);
        ahead.begin(panel + 1);
        memset(sums, 0, size_t(w.shards * sums_size) * 4);
        each_block(w, [&](int64_t shard, int64_t step, int64_t count) {
            for (int half = 0; half < 2; ++half) {
                widen_half(from + step * 1024 + half * 512, count, weights);
                add_rows(x + step * STEP * rows, rows, count, weights, sums + shard * sums_size + half * 16, ahead);
            }
        });
        finish_rows(call, row0, rows, panel, sums);
    }
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
