/* A run of decoder layers in one call: norm, attention, norm, gated MLP, each added to the residual stream.

   Owns the order of the operations and the memory between them; the arithmetic is that of linear.h, rows.h and
   attention.h, so every bit is what the separate calls give. */
#pragma once

#include "attention.h"
#include "kernels.h"

namespace vnx {

/* One layer's weights, described once at loading; Python writes the fields as 64-bit numbers, in this order. Biases and
   norms of heads may be null, `window` 0 is none. `gate_up` has its gate within. Kinds are those of the activations. */
struct StackLayer {
    const Packed *qkv, *output, *gate_up, *down;
    const void *qkv_bias, *output_bias, *down_bias;
    const void *attention_norm, *mlp_norm, *query_norm, *key_norm;
    int64_t window;
};

/* A layer's caches [block_count, kv_heads, block_size, head_dim], as in AttentionCall. */
struct StackCache {
    void *keys, *values;
};

/* residual [tokens, hidden] is used up; result [samples, hidden] holds the rows `sample_at` after the last norm.
   cosine and sine as in RotaryCall. All arrays are of one `kind`. */
struct StackCall {
    int kind;
    const StackLayer *layers;
    const StackCache *caches;
    int64_t layer_count, block_stride;
    const void *last_norm;
    const AttentionPlan *plan;
    int64_t tokens, hidden, head_dim, rotated_dim;
    float eps, scale, cap;
    const float *cosine, *sine;
    const int64_t *slots, *sample_at;
    int64_t samples;
    void *residual, *result;
};

/* In the last layer only the sampled rows go on after the attention. */
void run_stack(const StackCall &call);

}  // namespace vnx
