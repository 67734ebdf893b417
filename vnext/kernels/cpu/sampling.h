/* Sampling: the entry point. What it computes, and why it is exact, is said in vnext/runtime/sampling_weights.py. */
#pragma once

#include <cstdint>

namespace vnx {

/* logits [rows, vocabulary] (row stride in elements), everything else [rows]. */
struct SampleCall {
    const float *logits;
    int64_t stride, rows, vocabulary;
    const float *temperature;
    const int64_t *top_k;
    const float *top_p, *min_p;
    const int64_t *seed, *position;
    int64_t *tokens;
};

void sample_rows(const SampleCall &call);

}  // namespace vnx
