#include <algorithm>
#include <cmath>
#include <cstring>

#include "sampling/row.h"
#include "sampling/sampling.h"

namespace vnx {
namespace {

constexpr double LN_2 = 0x1.62e42fefa39efp-1, ROOT_OF_HALF = 0x1.6a09e667f3bcdp-1;

/* The natural logarithm of total / 2^WEIGHT_BITS: log_weight of vnext/sampling/sampling.py, operation by operation. */
double log_weight(int64_t total) {
    int exponent;
    double fraction = std::frexp(double(total), &exponent);
    if (fraction < ROOT_OF_HALF) fraction *= 2, --exponent;
    const double ratio = (fraction - 1) / (fraction + 1), square = ratio * ratio;
    double series = 1.0 / 15;
    for (int odd = 13; odd > 0; odd -= 2)
        series = series * square + 1.0 / odd;
    return double(exponent - WEIGHT_BITS) * LN_2 + ratio * 2 * series;
}

/* Rises with the logit, and among equals with a falling id. Minus zero equals zero. */
int64_t key_of(float logit, int64_t token) {
    const float value = logit + 0.0f;
    int32_t bits;
    std::memcpy(&bits, &value, 4);
    const int64_t ordered = bits < 0 ? bits ^ 0x7FFFFFFF : bits;
    return ordered * (int64_t(1) << 32) + (0xFFFFFFFF - token);
}

/* The likeliest tokens, from the largest logit of each block. As many blocks as tokens are wanted have a logit of at least `bound`. */
void find_top(const Row &row, const float *peaks, bool any_nan, int64_t count, int64_t *tokens) {
    float bound = -INFINITY;
    if (!any_nan && count <= row.blocks) {
        float *spare = static_cast<float *>(scratch(SLOT_PARTIALS, size_t(row.blocks) * 4));
        std::copy(peaks, peaks + row.blocks, spare);
        std::nth_element(spare, spare + count - 1, spare + row.blocks, [](float a, float b) { return a > b; });
        bound = spare[count - 1];
    }
    int64_t *keys = static_cast<int64_t *>(scratch(SLOT_TILES, size_t(row.vocabulary) * 8)), found = 0;
    for (int64_t block = 0; block < row.blocks; ++block) {
        if (peaks[block] < bound) continue;
        const int64_t first = block * WEIGHT_BLOCK, last = std::min(row.vocabulary, first + WEIGHT_BLOCK);
        for (int64_t token = first; token < last; ++token) {
            keys[found] = key_of(row.logits[token], token);
            found += any_nan || row.logits[token] >= bound;
        }
    }
    std::partial_sort(keys, keys + count, keys + found, [](int64_t a, int64_t b) { return a > b; });
    for (int64_t i = 0; i < count; ++i)
        tokens[i] = 0xFFFFFFFF - (keys[i] & 0xFFFFFFFF);
}

void report_row(const ReportCall &call, int64_t at, bool shared) {
    const Row row = row_of(call.logits + at * call.stride, call.vocabulary, shared);
    Weights w = room_for_weights(row);
    const Likeliest best = find_likeliest(row, w.peaks);
    int64_t *top = call.top_tokens + at * call.count;
    if (call.count > 0) find_top(row, w.peaks, best.logit != best.logit, call.count, top);
    weigh_row(row, best.logit, exponent_scale(1), w);
    const int64_t total = sum_of(row, w);
    const double log = total == 0 ? NAN : log_weight(total);
    const auto logprob = [&](int64_t token) { return float(double(row.logits[token]) - double(best.logit) - log); };
    const float chosen = row.logits[call.tokens[at]];
    int64_t likelier = 0;
    for (int64_t i = 0; i < row.vocabulary; ++i)
        likelier += row.logits[i] > chosen;
    call.logprobs[at] = logprob(call.tokens[at]);
    call.ranks[at] = likelier;
    for (int64_t i = 0; i < call.count; ++i)
        call.top_logprobs[at * call.count + i] = logprob(top[i]);
}

constexpr int64_t LOOK = 16;  // tokens that are looked at together

/* penalise_seen of vnext/sampling/logits.py; tokens that were never seen stay as they are. */
void penalise_row(float *logits, const uint8_t *prompt, const int32_t *counts, int64_t vocabulary, float repetition, float presence,
                  float frequency) {
    for (int64_t first = 0; first < vocabulary; first += LOOK) {
        const int64_t last = std::min(vocabulary, first + LOOK);
        int32_t seen = 0;
        for (int64_t i = first; i < last; ++i)
            seen |= prompt[i] | counts[i];
        if (seen == 0) continue;
        for (int64_t i = first; i < last; ++i) {
            const bool sampled = counts[i] > 0;
            float x = logits[i];
            if (prompt[i] != 0 || sampled) x = x > 0 ? x / repetition : x * repetition;
            x = x - frequency * float(counts[i]);
            logits[i] = x - presence * float(sampled);
        }
    }
}

}  // namespace

void report_rows(const ReportCall &call) {
    for_rows(call.rows, [&](int64_t at, bool shared) { report_row(call, at, shared); });
}

void penalise_rows(const PenaliseCall &call) {
    for_units(call.count, false, [&](int64_t at, int64_t) {
        penalise_row(call.logits + call.rows[at] * call.stride, call.prompts[at], call.counts[at], call.vocabulary,
                     call.repetition[at], call.presence[at], call.frequency[at]);
    });
}

}  // namespace vnx
