/* A whole step of a decoder in one call: rows of the embedding, angles, layers, logits, tokens.

   Owns nothing but the order and the memory between the parts, which are those of linear.h, rows.h, stack.h, attention.h
   and sampling.h: every bit is what the separate calls give. */
#pragma once

#include "stack.h"

namespace vnx {

/* What stays from step to step; Python writes the fields as 64-bit numbers, in this order. The embedding is packed, or
   rows of `hidden` elements of `kind`. cosine and sine [angle_rows, rotated_dim / 2] are those of each position from 0 on.
   `layers`, `caches` and the rest as in StackCall. */
struct StepModel {
    int64_t kind;
    const StackLayer *layers;
    const StackCache *caches;
    int64_t layer_count, block_stride, heads, kv_heads, block_size, head_dim, hidden;
    const void *last_norm, *embedding;
    int64_t embedding_is_packed, embedding_rows;
    const Packed *head;
    int64_t vocabulary, rotated_dim, angle_rows;
    const float *cosine, *sine;
    double eps, scale, cap;
};

/* One step of R rows, T tokens and S samples; Python writes the fields as 64-bit numbers, in this order. As ForwardBatch
   (vnext/models/batch.py), and SampleCall for what stands behind `sample_at`. */
struct StepArrays {
    int64_t rows, tokens, samples, table_stride;
    const int64_t *token_ids, *positions, *slots;
    const int32_t *query_starts, *context_lengths, *block_table;
    const int64_t *sample_at;
    const float *temperature;
    const int64_t *top_k;
    const float *top_p, *min_p;
    const int64_t *seed, *sample_position;
    int64_t *sampled;
};

/* False, with nothing done, where a position has no angles. */
bool run_step(const StepModel &model, const StepArrays &step);

}  // namespace vnx
