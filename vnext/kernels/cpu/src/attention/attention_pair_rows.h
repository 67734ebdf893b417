/* A piece of the caches for attention by the dot product of pairs: where its rows are, and its values paired. Included by
   the AVX512-BF16 level only. */
#pragma once

#include "attention/attention_next.h"
#include "attention/attention_weights.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

constexpr int PAIRS_A_PIECE = PIECE_KEYS / 2;

/* Where the rows of a piece are in caches of T; rows of zeros in place of keys that are not to be read. */
template <typename T>
struct PieceOfRows {
    static constexpr int KEYS_AT_ONCE = sizeof(T) == 1 ? 32 : 16;  // that few queries meet: sums that do not wait for their last one
    const T *key[PIECE_KEYS], *value[PIECE_KEYS];
};

/* The groups of sixteen keys of a piece that a tile needs: [first, last). */
struct KeyGroups {
    int first, last;
};

/* What a tile needs of a piece: whole groups of sixteen keys, of which one at least is seen. */
inline KeyGroups groups_of(int64_t piece, int64_t low, int64_t high) {
    const int64_t first = low > piece ? low - piece : 0, last = high - piece < PIECE_KEYS ? high - piece : PIECE_KEYS;
    if (first >= last) return {0, 0};
    return {int(first / 16), int((last + 15) / 16)};
}

/* Of the piece at `piece`, the keys that are in [low, high). */
template <typename T>
inline void find_piece(const AttentionCall &call, const Split &split, int64_t piece, int64_t low, int64_t high,
                       PieceOfRows<T> &rows) {
    alignas(64) static const T nothing[HEAD_MAX + HEAD_MAX / CODES_A_SCALE] = {};
    const int64_t first = low < piece ? piece : low, last = high < piece + PIECE_KEYS ? high : piece + PIECE_KEYS;
    for (int i = 0; i < PIECE_KEYS; ++i)
        if (piece + i < first || piece + i >= last) rows.key[i] = rows.value[i] = nothing;
    const int64_t width = row_width<T>(call);
    for (int64_t key = first; key < last;) {
        const int64_t left = call.block_size - key % call.block_size, end = key + left < last ? key + left : last;
        const T *k = cache_row<T>(call.key_cache, call, split, key), *v = cache_row<T>(call.value_cache, call, split, key);
        for (; key < end; ++key, k += width, v += width) {
            rows.key[key - piece] = k;
            rows.value[key - piece] = v;
        }
    }
}

/* What numbers of a piece are to be scaled by: nothing where the rows hold numbers. */
template <typename T>
struct PiecePowers {
    PiecePowers(const PieceOfRows<T> &, int64_t) {}
};

inline __m512i load_row(const bf16 *row, int64_t left) {
    return left >= 32 ? _mm512_loadu_si512(row) : _mm512_maskz_loadu_epi16((1u << left) - 1, row);
}

/* Two rows as pairs of keys, for sixteen places of d each. */
inline __m512i front_pairs(__m512i even, __m512i odd) {
    return _mm512_permutex2var_epi16(
        even, _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4,
                               35, 3, 34, 2, 33, 1, 32, 0),
        odd);
}
inline __m512i back_pairs(__m512i even, __m512i odd) {
    return _mm512_permutex2var_epi16(
        even, _mm512_set_epi16(63, 31, 62, 30, 61, 29, 60, 28, 59, 27, 58, 26, 57, 25, 56, 24, 55, 23, 54, 22, 53, 21, 52,
                               20, 51, 19, 50, 18, 49, 17, 48, 16),
        odd);
}

inline __m512i pair_at(const void *p) {
    int32_t bits;
    memcpy(&bits, p, 4);
    return _mm512_set1_epi32(bits);
}

/* Reads 32 numbers of two neighbouring rows as pairs of keys. */
template <typename T>
struct ValuePairs {
    void load(const PieceOfRows<T> &rows, const PiecePowers<T> &, int pair, int64_t d, __m512bh *found) const {
        const __m512i even = _mm512_loadu_si512(rows.value[2 * pair] + d), odd = _mm512_loadu_si512(rows.value[2 * pair + 1] + d);
        found[0] = (__m512bh)front_pairs(even, odd);
        found[1] = (__m512bh)back_pairs(even, odd);
    }
};

inline void pair_rows(const AttentionCall &call, const PieceOfRows<bf16> &rows, uint32_t *values) {
    for (int pair = 0; pair < PAIRS_A_PIECE; ++pair, values += call.padded_dim)
        for (int64_t d = 0; d < call.head_dim; d += 32) {
            const __m512i even = load_row(rows.value[2 * pair] + d, call.head_dim - d);
            const __m512i odd = load_row(rows.value[2 * pair + 1] + d, call.head_dim - d);
            _mm512_store_si512(values + d, front_pairs(even, odd));
            _mm512_store_si512(values + d + 16, back_pairs(even, odd));
        }
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
