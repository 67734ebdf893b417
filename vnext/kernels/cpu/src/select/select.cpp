#include "select/select.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "team.h"

namespace vnx {
namespace {

/* Of a score, rising with it, whatever its bits are. */
uint32_t rank_of(float score) {
    uint32_t bits;
    memcpy(&bits, &score, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

}  // namespace

void choose_keys(int kind, const ScoreCall &call, int64_t tokens, int64_t count, int32_t *places) {
    const int64_t longest = *std::max_element(call.limits, call.limits + tokens);
    const int64_t pieces = (longest + SCORED_KEYS - 1) / SCORED_KEYS;
    for_units(tokens * pieces, false, [&](int64_t unit, int64_t) {
        const int64_t token = unit / pieces, first = unit % pieces * SCORED_KEYS;
        if (first < call.limits[token]) kernels().score_keys(kind, call, token, first, std::min(call.limits[token], first + SCORED_KEYS));
    });
    for_units(tokens, false, [&](int64_t token, int64_t) {
        const int64_t limit = call.limits[token];
        const float *scores = call.scores + token * call.score_stride;
        auto *found = static_cast<uint64_t *>(scratch(SLOT_ROWS, limit * sizeof(uint64_t)));
        for (int64_t key = 0; key < limit; ++key)
            found[key] = uint64_t(rank_of(scores[key])) << 32 | uint32_t(~key);
        std::nth_element(found, found + count, found + limit, std::greater<uint64_t>());
        const int32_t *table = call.tables + call.rows[token] * call.table_stride;
        int32_t *to = places + token * count;
        for (int64_t i = 0; i < count; ++i)
            to[i] = int32_t(~uint32_t(found[i]));
        std::sort(to, to + count);
        for (int64_t i = 0; i < count; ++i)
            to[i] = int32_t(table[to[i] / call.block_size] * call.block_size + to[i] % call.block_size);
    });
}

}  // namespace vnx
