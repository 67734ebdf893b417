/* A whole step of a decoder in one call: rows of the embedding, angles, layers, logits, tokens.

   Owns nothing but the order and the memory between the parts, which are those of linear.h, rows.h, stack.h, attention.h
   and sampling.h: every bit is what the separate calls give. */
#pragma once

#include "sampling/sampling.h"
#include "step/stack.h"

namespace vnx {

/* What tokens give to layers, as InputTable in vnext/models/layers/layer_inputs.py has it: rows of a table, packed or of the activations'
   kind, for `known` tokens, those from `first` on on this rank, and of a product with their embeddings, `width` numbers for each layer.
   Python writes the fields as 64-bit numbers. */
#define VNX_INPUTS(X)                                                                                                \
    X(const void *, table) X(int64_t, table_is_packed) X(int64_t, table_rows) X(int64_t, first) X(int64_t, known) X(double, scale) \
    X(const Packed *, projection) X(double, projection_scale) X(const void *, norm) X(int64_t, width) X(double, sum_scale)
struct Inputs {
    VNX_INPUTS(VNX_FIELD)
};

/* What stays from step to step. The embedding is packed, or
   rows of `hidden` elements of `kind`; `embedding_first` is the token of its first row, which is not 0 on later ranks of a group.
   The head has the logits of `head_rows` tokens. cosine and sine [angle_rows, rotated_dim / 2] are those of each position from 0 on, the
   local ones a second kind of angles, or null. `embedding_scale` multiplies the embedding's rows, `logits_scale` the logits; 1 for none.
   `logits_cap` 0: none. `query_factors` [angle_rows] are of each position, or null. `places` [place_rows, hidden] are added to the embedding, or null.
   `rank_count`: of the group; `sum` and `join` are the caller's words for how its ranks meet, null for one rank alone.
   `kv_heads` [group_count] are those of each group of layers; the rest as in StackCall. `inputs`: of layers with inputs of their own. */
#define VNX_STEP_MODEL(X)                                                                                            \
    X(int64_t, kind) X(int64_t, norm_kind) X(int64_t, cache_kind) X(const StackLayer *, layers) X(const StackCache *, caches) X(int64_t, layer_count)             \
    X(int64_t, block_stride) X(int64_t, heads) X(const int64_t *, kv_heads) X(int64_t, block_size)      \
    X(int64_t, hidden) X(const void *, last_norm) X(const float *, last_norm_bias) X(const void *, embedding) X(int64_t, embedding_is_packed)         \
    X(int64_t, embedding_rows) X(int64_t, embedding_first) X(const Packed *, head) X(int64_t, head_rows) X(int64_t, vocabulary)                \
    X(const Inputs *, inputs) X(const void *, places) X(int64_t, place_rows) X(int64_t, group_count) X(int64_t, rotated_dim) X(int64_t, angle_rows) X(const float *, cosine) X(const float *, sine)      \
    X(int64_t, local_rotated_dim) X(const float *, local_cosine) X(const float *, local_sine) X(const float *, query_factors) X(int64_t, rank_count) X(void *, sum) X(void *, join)                              \
    X(double, embedding_scale) X(double, logits_scale) X(double, logits_cap) X(double, eps) X(double, scale) X(double, cap)
struct StepModel {
    VNX_STEP_MODEL(VNX_FIELD)
};

/* Where a further group of layers keeps the tokens: as StepArrays has it of the first. */
struct GroupPlaces {
    const int64_t *slots;
    const int32_t *block_table;
    int64_t table_stride;
};

/* One step of R rows, T tokens and S samples. As ForwardBatch
   (vnext/models/layers/batch.py), SampleCall for what stands behind
   `sample_at`, MaskCall for `masks` (null where no row has one), and StackCall for the parts of adapters and for
   the states that are kept (`aux_count` 0: none). `groups` [group_count - 1] are those behind the first. Where `hidden` is not null,
   the normed states [samples, hidden] go there, and the step has neither logits nor tokens. `state_pages` and `state_fresh` [rows], and
   `state_trail`, are as in StateRows, null without recurring layers. */
#define VNX_STEP_ARRAYS(X)                                                                                           \
    X(int64_t, rows) X(int64_t, tokens) X(int64_t, samples) X(int64_t, table_stride)                                 \
    X(const int64_t *, token_ids) X(const int64_t *, positions) X(const int64_t *, slots)                            \
    X(const int32_t *, query_starts) X(const int32_t *, context_lengths) X(const int32_t *, block_table)             \
    X(const int64_t *, sample_at) X(const SampleColumns *, columns) X(const uint32_t *const *, masks)                   \
    X(const ThinPart *, parts) X(const int64_t *, part_starts) X(const int64_t *, aux_layers) X(int64_t, aux_count) \
    X(void *, aux) X(const GroupPlaces *, groups) X(void *, hidden) X(const int32_t *, state_pages)                      \
    X(const uint8_t *, state_fresh) X(const int32_t *, state_trail) X(int64_t *, sampled)
struct StepArrays {
    VNX_STEP_ARRAYS(VNX_FIELD)
};

/* How the ranks of a group meet. `join` places every rank's part, `bytes` long, in rows of `row_bytes` one beside the other in rank
   order. Both may throw. */
struct Ranks {
    SumRanks sum;
    std::function<void(const void *part, void *joined, int64_t bytes, int64_t row_bytes)> join;
};

/* False, with nothing done, where a position has no angles. A step with masks is not sampled: they may still be in the making.
   `ranks` is null for one rank alone. */
bool run_step(const StepModel &model, const StepArrays &step, const Ranks *ranks);
/* Applies the masks of the step that ran last, and samples it. */
void sample_step(const StepModel &model, const StepArrays &step);
/* Of normed states [rows, hidden]: logits [rows, head_rows * rank_count] of the whole vocabulary, on every rank. */
void step_logits(const StepModel &model, const Ranks *ranks, const void *hidden, int64_t rows, float *logits);

}  // namespace vnx
