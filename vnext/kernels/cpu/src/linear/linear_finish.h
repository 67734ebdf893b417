/* What happens to the finished sums of a product, of any kind of weight: shards, bias, gate, rounding. */
#pragma once

#include "isa/lanes.h"
#include "linear/linear_behind.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

/* Arrays of sums lie in registers only where the loops over them are gone before GCC looks. */
#if defined(__GNUC__) && !defined(__clang__)
#define UNROLLED _Pragma("GCC unroll 16")
#else
#define UNROLLED
#endif

/* Where all registers are sums, what follows is not loaded before they are used up. */
inline void keep_order() {
#if defined(__GNUC__)
    asm volatile("" ::: "memory");
#endif
}

inline const char *panel_of(const Packed &w, int64_t panel) {
    const char *base = reinterpret_cast<const char *>(&w);
    if (w.kind == CODES) return base + reinterpret_cast<const HalfPanel *>(base + w.halves_at)[2 * panel].at;
    return base + w.panels_at + panel * w.panel_bytes;
}
inline const float *floats_at(const Packed &w, int64_t offset) {
    return offset == 0 ? nullptr : reinterpret_cast<const float *>(reinterpret_cast<const char *>(&w) + offset);
}

/* Bias, gate and rounding of one row's 32 sums; gate and up are rounded before they meet, as unfused ones are. */
template <typename T>
ALWAYS_INLINE void finish_row(const LinearCall &call, int64_t row, int64_t panel, Lanes first, Lanes second) {
    const Packed &w = *call.weight;
    const float *bias = floats_at(w, w.bias_at);
    if (bias != nullptr) {
        first = first + load(bias + panel * PANEL);
        second = second + load(bias + panel * PANEL + 16);
    }
    T *result = static_cast<T *>(call.result) + row * call.result_stride;
    if (w.gate != NO_GATE && call.apart) {
        const int64_t half = w.out / 2, part = half - panel * 16;
        store_part(result + panel * 16, first, part);
        return store_part(result + half + panel * 16, second, part);
    }
    if (w.gate != NO_GATE) {
        const Lanes both = gated(rounded(first, result), rounded(second, result), w.gate);
        store_part(result + panel * 16, both, w.out / 2 - panel * 16);
        return;
    }
    const int64_t left = w.out - panel * PANEL;
    if (call.bias != nullptr) {
        const T *added = static_cast<const T *>(call.bias) + panel * PANEL;
        first = rounded(first, result) + load_part(added, left);
        if (left > 16) second = rounded(second, result) + load_part(added + 16, left - 16);
    }
    store_part(result + panel * PANEL, first, left);
    if (left > 16) store_part(result + panel * PANEL + 16, second, left - 16);
}

/* The same from the sums of the shards, `stride` apart. */
inline void finish_row(const LinearCall &call, int64_t row, int64_t panel, const Lanes *first, const Lanes *second, int64_t stride) {
    const Packed &w = *call.weight;
    const Lanes one = joined(first, stride, w.shards), other = joined(second, stride, w.shards);
    if (call.result_kind == FLOAT32) return finish_row<float>(call, row, panel, one, other);
    return finish_row<bf16>(call, row, panel, one, other);
}

/* The sums of R rows in each shard, both halves. */
template <int R>
struct ShardSums {
    Lanes at[SHARDS_MAX][2][R];

    void finish(const LinearCall &call, int64_t row, int64_t panel) {
        for (int r = 0; r < R; ++r)
            finish_row(call, row + r, panel, &at[0][0][r], &at[0][1][r], 2 * R);
    }
};

/* sums [shards][rows][PANEL]. */
inline void finish_rows(const LinearCall &call, int64_t row0, int64_t rows, int64_t panel, const float *sums) {
    const Packed &w = *call.weight;
    const bool is_plain = w.shards == 1 && call.result_kind == BFLOAT16;
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

/* What the next panel's bytes, and the matrices behind the product, are fetched by while a panel is multiplied: so many lines
   at each of its `turns`. */
class Ahead {
  public:
    Ahead(const LinearCall &call, int64_t panel0, int64_t panel1, int64_t turns, bool only_behind = false)
        : weight_(*call.weight), behind_(call, panel0, panel1, (panel1 - panel0) * turns),
          lines_(only_behind ? 0 : int((weight_.panel_bytes / 64 + turns - 1) / turns)) {}
    void begin(int64_t panel) { at_ = panel_of(weight_, panel); }
    void fetch() {
        behind_.fetch();
        for (int i = 0; i < lines_; ++i, at_ += 64)
            __builtin_prefetch(at_, 0, 2);
    }

  private:
    const Packed &weight_;
    Behind behind_;
    const int lines_;
    const char *at_ = nullptr;
};

/* Forms<0, ..., N - 1>. */
template <template <int...> class Forms, int N, int... R>
struct FormsUpTo : FormsUpTo<Forms, N - 1, N - 1, R...> {};
template <template <int...> class Forms, int... R>
struct FormsUpTo<Forms, 0, R...> : Forms<R...> {};

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
