/* A piece of the caches for attention of few queries on the vector units. */
#pragma once

#include "attention/attention_next.h"
#include "isa/lanes_transpose.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

constexpr int FEW_LANES = 4;
constexpr int FEW_PASSES = 2;  // over the same keys, the second time from the second cache, still outrun what is made for many

/* Groups of sixteen keys whose sums go on side by side, as each alone would wait for its own last one; and places of d that are
   turned about at once: as many as the registers hold. */
#if defined(VNX_NEON)
constexpr int few_groups(int lanes) { return lanes <= 2 ? 2 : 1; }
constexpr int FEW_DEPTH = 4;

inline Floats widen(const float *p) { return loaded<Floats>(p); }

/* Places d, d + 1, ... of sixteen rows: part [FEW_DEPTH][16]. */
template <typename T>
inline void load_turned(const T *const *rows, int64_t d, Lanes *part) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j)
            part[j].v[i] = widen(rows[4 * i + j] + d);
        transpose_four(&part[0].v[i], &part[1].v[i], &part[2].v[i], &part[3].v[i]);
    }
}
#else
constexpr int few_groups(int) { return 2; }
constexpr int FEW_DEPTH = 16;

template <typename T>
inline void load_turned(const T *const *rows, int64_t d, Lanes *part) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
        part[i] = load(rows[i] + d);
    transpose(part);
}
#endif

/* `attend(lanes, next, state)` for FEW_LANES lanes at a time; the last ones fetch what is read behind the split. */
template <typename F>
inline void by_few(const AttentionCall &call, const LaneSet &lanes, const Split *next, const SplitState &state, const F &attend) {
    for (int first = 0; first < lanes.count; first += FEW_LANES) {
        const int left = lanes.count - first;
        LaneSet some;
        some.count = left < FEW_LANES ? left : FEW_LANES;
        for (int i = 0; i < some.count; ++i)
            some.query[i] = lanes.query[first + i], some.low[i] = lanes.low[first + i], some.high[i] = lanes.high[first + i];
        attend(some, left > FEW_LANES ? nullptr : next,
               SplitState{state.peak + first, state.weight_sum + first, state.total + first * call.padded_dim});
    }
}

/* Where the rows of a piece are in caches of T; the last of them repeats behind it. */
template <typename T>
struct RowsOfPiece {
    const T *key[PIECE_KEYS], *value[PIECE_KEYS];
};

/* What the numbers of a piece are to be multiplied by: nothing where the rows hold numbers. */
template <typename T>
struct PieceScales {
    PieceScales(const RowsOfPiece<T> &, int64_t) {}
};

template <typename T>
inline void find_rows(const AttentionCall &call, const Split &split, int64_t first, int64_t last, RowsOfPiece<T> &rows) {
    const int64_t width = row_width<T>(call);
    int64_t i = 0;
    for (int64_t key = first; key < last;) {
        const int64_t left = call.block_size - key % call.block_size, end = key + left < last ? key + left : last;
        const T *k = cache_row<T>(call.key_cache, call, split, key), *v = cache_row<T>(call.value_cache, call, split, key);
        for (; key < end; ++key, ++i, k += width, v += width) {
            rows.key[i] = k;
            rows.value[i] = v;
        }
    }
    for (; i < PIECE_KEYS; ++i)
        rows.key[i] = rows.key[i - 1], rows.value[i] = rows.value[i - 1];
}

template <typename T>
inline Lanes load_value(const RowsOfPiece<T> &rows, const PieceScales<T> &, int key, int64_t d) {
    return load(rows.value[key] + d);
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
