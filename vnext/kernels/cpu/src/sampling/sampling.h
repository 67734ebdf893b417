/* Sampling: the entry points. vnext/sampling/weights.py defines the result and explains why it is exact. */
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

/* Which tokens may be sampled: `words` [rows] are addresses of one bit a token, uint32 [vocabulary / 32, rounded up], the lowest
   bit first; 0 for a row that may have any. The logits of other tokens become minus infinity. */
struct MaskCall {
    float *logits;
    int64_t stride, rows, vocabulary;
    const uint32_t *const *words;
};

void mask_rows(const MaskCall &call);

/* What `tokens` [rows] are among the raw logits: their log-probabilities (vnext/sampling/sampling.py), the numbers of likelier tokens, and
   the `count` likeliest tokens with theirs, [rows, count], the lowest id first among equals. */
struct ReportCall {
    const float *logits;
    int64_t stride, rows, vocabulary;
    const int64_t *tokens;
    int64_t count;
    float *logprobs;
    int64_t *ranks, *top_tokens;
    float *top_logprobs;
};

void report_rows(const ReportCall &call);

/* The penalties of `count` rows, without repeats, in place: whether each token is in the prompt, and how often it was sampled. */
struct PenaliseCall {
    float *logits;
    int64_t stride, vocabulary, count;
    const int64_t *rows;
    const uint8_t *const *prompts;
    const int32_t *const *counts;
    const float *repetition, *presence, *frequency;
};

void penalise_rows(const PenaliseCall &call);

}  // namespace vnx
