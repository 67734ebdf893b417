/* Sampling: the entry point. vnext/sampling/weights.py defines the result and explains why it is exact. */
#pragma once

#include <cstdint>

namespace vnx {

/* By what the rows are sampled: an array of addresses, named in sampling.cpp. */
struct SampleColumns;
extern const char *const SAMPLE_COLUMNS;  // "float temperature,..." as Python compares them with its table

/* logits [rows, vocabulary] (row stride in elements), everything else [rows]. */
struct SampleCall {
    const float *logits;
    int64_t stride, rows, vocabulary;
    const SampleColumns *columns;
    int64_t *tokens;
};

void sample_rows(const SampleCall &call);

}  // namespace vnx
