/* bfloat16 matrix products on AMX tiles. Included by the AMX level only.

   The arithmetic is the same for any number of rows: a tile of results takes the steps over K in order, one tdpbf16ps each.
   Few rows use tiles of that many rows. Many rows run in blocks of 32 x 32 results (two by two tiles), one panel at a time,
   so that the panel stays in the nearest cache, which rows of x pass by (tileloaddt1). Remaining rows are copied to zero-padded
   scratch.
 */
#pragma once

#include "linear/linear_lanes.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
    void set(int tile, int row_count, int bytes) {
        rows[tile] = uint8_t(row_count);
        row_bytes[tile] = uint16_t(bytes);
    }
};

/* The compiler's own intrinsic names 8 bytes of the shapes only and may drop the stores of the rest: hence the barrier.
 */
inline void load_shapes(const TileShapes &shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }

struct TilesInUse {
    ~TilesInUse() { _tile_release(); }
};

constexpr int64_t PREFETCH_BYTES = 8192;
constexpr int STEP_LINES = 32;  // cache lines of weight that one step of a panel takes

/* Rows of x as tiles see them: first 16 and last 16 of a block of up to 32, `stride` in bytes. */
struct RowBlock {
    const char *first, *second;
    int64_t stride;
    int64_t row;
    int count;
};

typedef float TileSums[16][16];
constexpr int TILES = 4; /* of sums: of the first 16 rows both halves, then of the last 16 */

/* Sums of a block, TILES for each shard, that wait for scale, bias, gate, rounding: done row by row while tiles work on
   the next block. */
struct Unfinished {
    const TileSums *sums;
    RowBlock block;
    int64_t panel;
    int done;
};

inline void finish_some(const LinearCall &call, Unfinished &last, int count) {
    const int end = last.done + count < last.block.count ? last.done + count : last.block.count;
    for (int r = last.done; r < end; ++r) {
        Lanes first[SHARDS_MAX], second[SHARDS_MAX];
        for (int64_t shard = 0; shard < call.weight->shards; ++shard) {
            const TileSums *half = last.sums + shard * TILES + (r < 16 ? 0 : 2);
            first[shard] = load(half[0][r % 16]), second[shard] = load(half[1][r % 16]);
        }
        finish_row(call, last.block.row + r, last.panel, first, second, 1);
    }
    last.done = end;
}

/* Some steps of a block of up to 16 rows, added to tiles 0 and 1; fetches what lies PREFETCH_BYTES further on. */
inline void narrow_steps(const char *x, int64_t stride, const char *w, int64_t steps) {
    for (int64_t step = 0; step < steps; ++step, w += 2048) {
        _tile_loadd(4, x + step * 64, stride);
        _tile_loadd(6, w, 64);
        _tile_loadd(7, w + 1024, 64);
        for (int line = 0; line < STEP_LINES; ++line)
            _mm_prefetch(w + PREFETCH_BYTES + line * 64, _MM_HINT_T0);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    }
}

/* Up to 16 rows. */
inline void narrow_block(const LinearCall &call, const RowBlock &block, int64_t panel) {
    const Packed &w = *call.weight;
    const int64_t steps = w.shard_steps(), bytes = w.panel_bytes / w.shards;
    const char *weights = panel_of(w, panel), *x = block.first;
    alignas(64) TileSums sums[SHARDS_MAX * TILES];
    for (int64_t shard = 0; shard < w.shards; ++shard, x += steps * 64, weights += bytes) {
        _tile_zero(0);
        _tile_zero(1);
        narrow_steps(x, block.stride, weights, steps);
        _tile_stored(0, sums[shard * TILES], 64);
        _tile_stored(1, sums[shard * TILES + 1], 64);
    }
    Unfinished own{sums, block, panel, 0};
    finish_some(call, own, block.count);
}

/* One shard of 17 to 32 rows, the steps from `begin` on: results in tiles 0 to 3, then in `sums`. Meanwhile finishes the
   last block, and fetches `lines` lines of the next panel at each step. */
inline void wide_shard(const LinearCall &call, const RowBlock &block, const bf16 *weights, int64_t begin,
                       Unfinished &last, const char *ahead, int lines, TileSums *sums) {
    const char *w = reinterpret_cast<const char *>(weights) + begin * 2048;
    const int64_t end = begin + call.weight->shard_steps(), steps = call.weight->steps();
    const int rows_a_step = int((31 + steps) / steps);
    ahead += begin * lines * 64;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = begin; step < end; ++step, w += 2048) {
        _tile_loadd(6, w, 64);
        _tile_stream_loadd(4, block.first + step * 64, block.stride);
        _tile_loadd(7, w + 1024, 64);
        _tile_dpbf16ps(0, 4, 6);
        for (int i = 0; i < lines; ++i, ahead += 64)
            _mm_prefetch(ahead, _MM_HINT_T1);
        if (last.done < last.block.count) finish_some(call, last, rows_a_step);
        _tile_stream_loadd(5, block.second + step * 64, block.stride);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
}

/* `count` rows from `row` on in scratch, with rows of zeros up to `padded`. */
inline RowBlock copied_block(const LinearCall &call, int64_t row, int count, int padded, int64_t steps) {
    const int64_t bytes = steps * STEP * 2;
    char *copy = static_cast<char *>(scratch(SLOT_ROWS, size_t(padded) * bytes));
    for (int r = 0; r < count; ++r)
        memcpy(copy + r * bytes, static_cast<const bf16 *>(call.x) + (row + r) * call.x_stride, size_t(bytes));
    memset(copy + count * bytes, 0, size_t(padded - count) * bytes);
    return {copy, copy + 16 * bytes, bytes, row, count};
}

inline RowBlock block_in_place(const LinearCall &call, int64_t row, int count) {
    const int64_t stride = call.x_stride * 2;
    const char *first = static_cast<const char *>(call.x) + row * stride;
    return {first, first + 16 * stride, stride, row, count};
}

inline void shape_tiles(int rows) {
    const int first = rows < 16 ? rows : 16, second = rows <= 16 ? 16 : rows - 16;
    const int rows_of[8] = {first, first, second, second, first, second, 16, 16};
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile)
        shapes.set(tile, rows_of[tile], 64);
    load_shapes(shapes);
}

/* Blocks of 32 rows, then those left over, a panel at a time. */
void wide_panels(const LinearCall &call, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1, int64_t steps) {
    const Packed &w = *call.weight;
    const int64_t whole = row1 - row0 > 32 ? row0 + (row1 - row0) / 32 * 32 : row0;
    const int left = int(row1 - whole);
    RowBlock tail{};
    if (left > 0) tail = whole > row0 ? copied_block(call, whole, left, 32, steps) : block_in_place(call, whole, left);
    const int64_t block_count = (whole - row0) / 32 + (left > 0);
    const int lines = int((STEP_LINES + block_count - 1) / block_count);
    alignas(64) TileSums sums[2][SHARDS_MAX * TILES];
    Unfinished last{};
    int turn = 0;
    for (int64_t panel = panel0; panel < panel1; ++panel) {
        const bf16 *weights = reinterpret_cast<const bf16 *>(panel_of(w, panel));
        const char *ahead = panel_of(w, panel + 1);
        for (int64_t i = 0; i < block_count; ++i, ahead += steps * lines * 64, turn ^= 1) {
            const RowBlock block = row0 + i * 32 < whole ? block_in_place(call, row0 + i * 32, 32) : tail;
            for (int64_t shard = 0; shard < w.shards; ++shard)
                wide_shard(call, block, weights, shard * w.shard_steps(), last, ahead, lines, sums[turn] + shard * TILES);
            finish_some(call, last, 32);
            last = {sums[turn], block, panel, 0};
        }
    }
    finish_some(call, last, 32);
}

/* Rows [row0, row1) of x, whose rows are readable up to whole steps, times panels [panel0, panel1). */
void linear_tiles(const LinearCall &call, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1) {
    const Packed &w = *call.weight;
    const int64_t rows = row1 - row0;
    const TilesInUse guard;
    shape_tiles(rows > 32 ? 32 : int(rows));
    if (rows > 16) return wide_panels(call, row0, row1, panel0, panel1, w.steps());
    const RowBlock block = block_in_place(call, row0, int(rows));
    for (int64_t panel = panel0; panel < panel1; ++panel)
        narrow_block(call, block, panel);
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
