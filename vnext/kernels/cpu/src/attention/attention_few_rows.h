/* A piece of the caches for attention of few queries on the vector units. */
#pragma once

#include "attention/attention_next.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

constexpr int FEW_LANES = 4;
constexpr int FEW_GROUPS = 2;  // of sixteen keys whose sums go on side by side: each alone would wait for its own last one

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
