/* Thin products on sixteen lanes. A token's sums have one order whatever the tokens beside it: over the inputs of a shard
   four chains (k, k + 4, ... of each), joined in pairs, and over the shards the tree of `joined`; over the ranks one chain,
   in rising order, added to the product last. */
#pragma once

#include "isa/lanes.h"
#include "team.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

constexpr int CHAINS = 4;
#if defined(VNX_AVX512)
constexpr int TOKENS_AT_ONCE = 4;
#else
constexpr int TOKENS_AT_ONCE = 1;
#endif

constexpr int64_t AHEAD = 2048;  // elements of a matrix that are asked for before they are needed

inline void widen_row(const float *x, int64_t n, float *wide) { memcpy(wide, x, size_t(n) * 4); }
inline void widen_row(const bf16 *x, int64_t n, float *wide) {
    int64_t k = 0;
    for (; k + 16 <= n; k += 16)
        store(wide + k, load(x + k));
    for (; k < n; ++k)
        wide[k] = to_float(x[k]);
}

/* totals [R] = sixteen ranks of down(x) of R tokens over the inputs [k, end) of a shard. */
template <typename T, int R>
inline void narrow_shard(const ThinPart &part, const float *const *x, const T *down, int64_t k, int64_t end, Lanes *totals) {
    Lanes chains[CHAINS][R];
    for (int c = 0; c < CHAINS; ++c)
        for (int r = 0; r < R; ++r)
            chains[c][r] = all(0.0f);
    for (; k + CHAINS <= end; k += CHAINS)
        for (int c = 0; c < CHAINS; ++c) {
            __builtin_prefetch(down + (k + c) * part.padded_rank + AHEAD);
            const Lanes weight = load(down + (k + c) * part.padded_rank);
            for (int r = 0; r < R; ++r)
                chains[c][r] = fused(all(x[r][k + c]), weight, chains[c][r]);
        }
    for (int c = 0; k + c < end; ++c)
        for (int r = 0; r < R; ++r)
            chains[c][r] = fused(all(x[r][k + c]), load(down + (k + c) * part.padded_rank), chains[c][r]);
    for (int r = 0; r < R; ++r)
        totals[r] = (chains[0][r] + chains[1][r]) + (chains[2][r] + chains[3][r]);
}

/* sums [R], padded_rank numbers each, = down(x) of R tokens. */
template <typename T, int R>
inline void narrow_rows(const ThinCall &call, const ThinPart &part, const float *const *x, float *const *sums) {
    const int64_t in = call.in / call.shards;
    for (int64_t j = 0; j < part.padded_rank; j += 16) {
        Lanes totals[SHARDS_MAX][R];
        const T *down = static_cast<const T *>(part.down) + j;
        for (int64_t shard = 0; shard < call.shards; ++shard)
            narrow_shard<T, R>(part, x, down, shard * in, (shard + 1) * in, totals[shard]);
        for (int r = 0; r < R; ++r)
            store(sums[r] + j, joined(&totals[0][r], R, call.shards));
    }
}

/* Where the matrix that is needed after part's last one begins, or null. */
template <typename T>
inline const T *behind(const ThinCall &call, const ThinPart &part) {
    const ThinPart *next = &part + 1;
    return static_cast<const T *>(next < call.parts + call.part_count ? next->down : nullptr);
}

/* product [R] += up(sums [R]). */
template <typename T, int R>
inline void widen_rows(const ThinCall &call, const ThinPart &part, const float *const *sums, T *const *product) {
    const T *up = static_cast<const T *>(part.up); /* [width / 16][rank][16] */
    const T *next = behind<T>(call, part);
    int64_t left_of_up = (part.width + 15) / 16 * 16 * part.rank;
    for (int64_t i = 0; i < part.width; i += 16) {
        const T *ahead = left_of_up > AHEAD || next == nullptr ? up + AHEAD : next + (AHEAD - left_of_up);
        left_of_up -= 16 * part.rank;
        Lanes total[R];
        for (int r = 0; r < R; ++r)
            total[r] = all(0.0f);
        for (int64_t j = 0; j < part.rank; ++j) {
            __builtin_prefetch(ahead + j * 16);
            const Lanes weight = load(up + j * 16);
            for (int r = 0; r < R; ++r)
                total[r] = fused(all(sums[r][j]), weight, total[r]);
        }
        up += part.rank * 16;
        const int64_t left = part.width - i;
        for (int r = 0; r < R; ++r)
            store_part(product[r] + i, load_part(product[r] + i, left) + total[r], left);
    }
}

/* The tokens from `first` on. */
template <typename T, int R>
inline void thin_rows(const ThinCall &call, const ThinPart &part, int64_t first, float *narrow) {
    float *own = static_cast<float *>(scratch(SLOT_ROWS, size_t(R * (part.padded_rank + call.in)) * 4)), *sums[R];
    const float *x[R];
    T *product[R];
    for (int r = 0; r < R; ++r) {
        const int64_t token = part.tokens[first + r];
        float *wide = own + R * part.padded_rank + r * call.in;
        if (narrow == nullptr || !call.is_up) widen_row(static_cast<const T *>(call.x) + token * call.x_stride, call.in, wide);
        x[r] = wide;
        sums[r] = narrow == nullptr ? own + r * part.padded_rank : narrow + (first + r) * part.padded_rank;
        product[r] = static_cast<T *>(call.product) + token * call.product_stride + part.first;
    }
    if (narrow == nullptr || !call.is_up) narrow_rows<T, R>(call, part, x, sums);
    if (call.is_up) widen_rows<T, R>(call, part, sums, product);
}

template <typename T>
inline void thin_tokens(const ThinCall &call, const ThinPart &part, int64_t first, int64_t last, float *narrow) {
    for (; first + TOKENS_AT_ONCE <= last; first += TOKENS_AT_ONCE)
        thin_rows<T, TOKENS_AT_ONCE>(call, part, first, narrow);
    for (; first < last; ++first)
        thin_rows<T, 1>(call, part, first, narrow);
}

void thin(int kind, const ThinCall &call, const ThinPart &part, int64_t first, int64_t last, float *narrow) {
    if (kind == FLOAT32) return thin_tokens<float>(call, part, first, last, narrow);
    thin_tokens<bf16>(call, part, first, last, narrow);
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
