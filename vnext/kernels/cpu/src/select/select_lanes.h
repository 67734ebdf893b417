/* Scores of keys by an index, on sixteen lanes, one a head: sums are in the order of a head's numbers, then of sixteens of heads, then
   of lanes, each product rounded before it is added, so that neither levels nor how keys are cut show in a bit. */
#pragma once

#include "isa/lanes.h"
#include "team.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

inline float widened(float x) { return x; }
inline float widened(bf16 x) { return to_float(x); }

/* What sixteen heads `turned` [width][16] with `weights` add to the lanes of K keys. */
template <int K>
inline void add_heads(const float *keys, int64_t width, const float *turned, Lanes weights, float *lanes) {
    Lanes sums[K];
    for (int k = 0; k < K; ++k)
        sums[k] = all(0.0f);
    for (int64_t d = 0; d < width; ++d) {
        const Lanes query = load(turned + d * 16);
        for (int k = 0; k < K; ++k)
            sums[k] = sums[k] + query * all(keys[k * width + d]);
    }
    for (int k = 0; k < K; ++k)
        store(lanes + k * 16, load(lanes + k * 16) + larger(sums[k], all(0.0f)) * weights);
}

template <typename T>
inline void score_typed(const ScoreCall &call, int64_t token, int64_t first, int64_t last) {
    const int64_t count = last - first, width = call.width, padded = (call.heads + 15) / 16 * 16;
    float *turned = static_cast<float *>(scratch(SLOT_TILES, sizeof(float) * (width * 16 + count * (width + 16))));
    float *lanes = turned + width * 16, *keys = lanes + count * 16;
    const int32_t *table = call.tables + call.rows[token] * call.table_stride;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t at = first + i;
        const T *key = static_cast<const T *>(call.keys) + table[at / call.block_size] * call.block_stride + at % call.block_size * width;
        for (int64_t d = 0; d < width; ++d)
            keys[i * width + d] = widened(key[d]);
    }
    for (int64_t i = 0; i < count * 16; ++i)
        lanes[i] = 0.0f;
    for (int64_t head = 0; head < padded; head += 16) {
        const int64_t there = call.heads - head < 16 ? call.heads - head : 16;
        const T *query = static_cast<const T *>(call.query) + (token * call.heads + head) * width;
        float weights[16] = {};
        for (int64_t h = 0; h < there; ++h)
            weights[h] = call.weights[token * call.heads + head + h];
        for (int64_t d = 0; d < width; ++d)
            for (int64_t h = 0; h < 16; ++h)
                turned[d * 16 + h] = h < there ? widened(query[h * width + d]) : 0.0f;
        int64_t i = 0;
        for (; i + 8 <= count; i += 8)
            add_heads<8>(keys + i * width, width, turned, load(weights), lanes + i * 16);
        for (; i < count; ++i)
            add_heads<1>(keys + i * width, width, turned, load(weights), lanes + i * 16);
    }
    float *scores = call.scores + token * call.score_stride + first;
    for (int64_t i = 0; i < count; ++i) {
        scores[i] = 0.0f;
        for (int64_t lane = 0; lane < 16; ++lane)
            scores[i] += lanes[i * 16 + lane];
    }
}

void score_keys(int kind, const ScoreCall &call, int64_t token, int64_t first, int64_t last) {
    if (kind == FLOAT32)
        score_typed<float>(call, token, first, last);
    else
        score_typed<bf16>(call, token, first, last);
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
