/* The lines of the caches that a decode reads next, fetched while it computes. */
#pragma once

#include "attention/attention_lanes.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

/* Of one piece, a few at a time: a processor drops prefetches that come in a burst. They go to the second cache: twice as many may be
   outstanding on the way there. Rows of numbers are fetched while scores are computed, rows of codes while values are added: what
   computes scores of codes touches each line several times, and waits behind prefetches. */
struct NextLines {
    static constexpr int LINE = 64;
    static constexpr int MOST = 2 * PIECE_KEYS * (HEAD_MAX * 4 / LINE + 1);
    int count = 0, at = 0;
    uint32_t due = 0, step = 0;
    const char *line[MOST];

    void add(const char *from, int64_t bytes) {
        const char *end = from + bytes;
        for (from -= reinterpret_cast<uintptr_t>(from) % LINE; from < end; from += LINE)
            line[count++] = from;
    }
    /* The keys from `first` on, as many as a piece has before `end`. */
    template <typename T>
    void find(const AttentionCall &call, const Split &split, int64_t first, int64_t end) {
        const int64_t bytes = row_width<T>(call) * int64_t(sizeof(T)), last = first + PIECE_KEYS < end ? first + PIECE_KEYS : end;
        for (int64_t key = first; key < last;) {
            const int64_t left = call.block_size - key % call.block_size, rows = left < last - key ? left : last - key;
            add(reinterpret_cast<const char *>(cache_row<T>(call.key_cache, call, split, key)), rows * bytes);
            add(reinterpret_cast<const char *>(cache_row<T>(call.value_cache, call, split, key)), rows * bytes);
            key += rows;
        }
    }
    /* What is read behind `piece` of a split that ends at `end`. */
    template <typename T>
    void find_behind(const AttentionCall &call, const Split &split, const Split *next, int64_t piece, int64_t end) {
        count = 0;
        if (piece + PIECE_KEYS < end) return find<T>(call, split, piece + PIECE_KEYS, end);
        if (next != nullptr) find<T>(call, *next, next->first_key, next->last_key);
    }
    /* All of them in `turns` calls of fetch, evenly. */
    void begin(int64_t turns) { at = 0, due = 0, step = uint32_t(((int64_t(count) << 16) + turns - 1) / turns); }
    void fetch() {
        due += step;
        for (const int end = int(due >> 16) < count ? int(due >> 16) : count; at < end; ++at)
            __builtin_prefetch(line[at], 0, 2);
    }
};

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
