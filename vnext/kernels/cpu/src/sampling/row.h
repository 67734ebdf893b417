/* One row of logits: its blocks, handed to the team or not, its likeliest token and its weights. */
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>

#include "kernels.h"
#include "team.h"

namespace vnx {
namespace {

constexpr int64_t UNIT_ELEMENTS = 16 * 1024;  // less is done sooner than it is handed out
constexpr int64_t UNITS_A_MEMBER = 4;
constexpr double LOG2_E = 1.4426950408889634;
constexpr double FLOAT_MAX = 3.4028234663852886e38;

struct Row {
    const float *logits;
    int64_t vocabulary, blocks;
    bool shared;  // its blocks are handed to the team
};

inline Row row_of(const float *logits, int64_t vocabulary, bool shared) {
    return {logits, vocabulary, (vocabulary + WEIGHT_BLOCK - 1) / WEIGHT_BLOCK, shared};
}

/* `body(at, shared)` for rows: each by one thread, or, where there are fewer than threads, one after the other by all. */
template <typename Body>
void for_rows(int64_t rows, const Body &body) {
    if (rows >= team_size()) return for_units(rows, false, [&](int64_t at, int64_t) { body(at, false); });
    for (int64_t at = 0; at < rows; ++at)
        body(at, true);
}

/* `body(first, last)` for ranges of blocks. */
template <typename Body>
void for_blocks(const Row &row, const Body &body) {
    const int64_t wanted = std::min(UNITS_A_MEMBER * team_size(), row.vocabulary / UNIT_ELEMENTS);
    const int64_t units = row.shared ? std::max<int64_t>(1, wanted) : 1;
    for_units(units, !row.shared,
              [&](int64_t unit, int64_t) { body(row.blocks * unit / units, row.blocks * (unit + 1) / units); });
}

inline int64_t elements(const Row &row, int64_t first, int64_t last) {
    return std::min(row.vocabulary, last * WEIGHT_BLOCK) - first * WEIGHT_BLOCK;
}

struct Likeliest {
    int64_t token;
    float logit;
};

/* The lowest id among equals; a NaN is above everything, as in torch. */
inline Likeliest find_likeliest(const Row &row, float *peaks) {
    std::atomic<bool> any_nan{false};
    for_blocks(row, [&](int64_t first, int64_t last) {
        const float *logits = row.logits + first * WEIGHT_BLOCK;
        if (kernels().find_peaks(logits, elements(row, first, last), peaks + first)) any_nan.store(true);
    });
    if (any_nan.load()) {
        const float *found = std::find_if(row.logits, row.logits + row.vocabulary, [](float x) { return x != x; });
        return {found - row.logits, *found};
    }
    const float *block = std::max_element(peaks, peaks + row.blocks);
    const float *start = row.logits + (block - peaks) * WEIGHT_BLOCK;
    return {std::find(start, row.logits + row.vocabulary, *block) - row.logits, *block};
}

/* log2(e) / temperature, rounded once. */
inline float exponent_scale(float temperature) { return float(std::min(LOG2_E / double(temperature), FLOAT_MAX)); }

/* Sums and peaks of a row; `weights` come with `weigh_row`. */
inline Weights room_for_weights(const Row &row) {
    Weights w;
    w.weights = nullptr;
    w.sums = static_cast<int64_t *>(scratch(SLOT_STATE, size_t(row.blocks) * (sizeof(int64_t) + sizeof(float))));
    w.peaks = reinterpret_cast<float *>(w.sums + row.blocks);
    return w;
}

/* Weights of 2^((logit - peak) * scale). */
inline void weigh_row(const Row &row, float peak, float scale, Weights &w) {
    w.weights = static_cast<float *>(scratch(SLOT_ROWS, size_t(row.blocks * WEIGHT_BLOCK) * sizeof(float)));
    for_blocks(row, [&](int64_t first, int64_t last) {
        kernels().weigh(row.logits + first * WEIGHT_BLOCK, elements(row, first, last), peak, scale,
                        {w.weights + first * WEIGHT_BLOCK, w.peaks + first, w.sums + first});
    });
}

inline int64_t sum_of(const Row &row, const Weights &w) {
    int64_t sum = 0;
    for (int64_t i = 0; i < row.blocks; ++i)
        sum += w.sums[i];
    return sum;
}

}  // namespace
}  // namespace vnx
