/* A run of decoder layers in one call: norm, attention, norm, MLP or experts, each added to the residual stream.

   Owns the order of the operations and the memory between them; the arithmetic is that of linear.h, rows.h and
   attention.h, so every bit is what the separate calls give. */
#pragma once

#include "attention/attention.h"
#include "kernels.h"
#include "step/experts.h"
#include "step/joined.h"
#include "step/latent.h"
#include "step/recurring.h"

namespace vnx {

/* One layer's weights, described once at loading. Biases may be null, and so may norms. A layer without `qkv` mixes nothing; one with neither
   `gate_up` nor experts has no MLP. With `narrow_input` experts read what that makes of their input, and `narrow_result` makes the stream's. Those after attention and MLP are of what
   these give, which is then multiplied by `mixed_scale` or `widened_scale`, before it is added; with
   `adds_to_normed` to the normed input of attention or MLP, times `kept_mixed` or `kept_widened`, and not to the stream. `window` 0 is none. `turns`: by which of StackCall's
   angles queries and keys turn, counted from 1; 0 for none. `turns_neighbours`: whether channels of a pair are neighbours, and not
   half a head apart. `group`: which of its places are the layer's. `gate_up` has its gate within; with
   `experts`, which are chosen by `router` from the product with `scores`, it is that of a shared MLP, or null. `is_gated`: each query
   head comes with a gate behind it, or, if it is GATES_APART, all gates stand behind all queries, or, if it is GATE_A_HEAD, one number
   for each; `is_by_head`: its query, key and
   value stand side by side. A layer that is `recurring` has the product with its input in `qkv`. Norms are of StackCall's `norm_kind`, those of heads of `head_norm_kind`, all else is of the activations' kind. With `latent`, `qkv` is
   its first product, and a cache's keys are its values. A norm with a bias, in float32 as its weight is, is a layer norm. With
   `is_parallel` the MLP reads the stream that attention read, by its own norm. `activation` is that of a `gate_up` without a gate
   within, which has a gate if `down` takes half of what it gives; `above` and `below` are numbers of XIELU. `norms_turned`: the norms
   of queries and keys come behind their turn, and `norms_joined`: over all heads at once, of `query_heads` on all ranks, with weights
   of all heads here. `shared_gate` is that of the MLP beside experts, or null.
   `sinks` [heads] are as in AttentionCall; `scores_bias` and `share_scales` [experts], of scores and of shares, may be null. A layer
   that `reads` another one's cache has queries alone in `qkv`. `value_norm` is that of each head's values. With `router_norm` the router
   and, by `experts_norm`, the experts read the stream; what they give and what the MLP beside them gives have the norms behind each.
   `own_gate` and `own_product`, with a norm behind, are of the inputs that tokens give to this layer, from `own_at` on in a row of
   StackCall's; `stream_scale` [1] multiplies what the layer leaves. All these may be null. `beside` is a layer with a state that reads
   the same normed input, or null: its first and second product and its own `mixed_scale` count, and its pools are behind all layers'
   caches. Attention reads its input times `mixed_from`, an MLP its own times `widened_from`. */
#define VNX_STACK_LAYER(X)                                                                                          \
    X(const Packed *, qkv) X(const Packed *, output) X(const Packed *, gate_up) X(const Packed *, down)             \
    X(const void *, qkv_bias) X(const void *, output_bias) X(const void *, down_bias)                               \
    X(const void *, attention_norm) X(const void *, mlp_norm) X(const void *, query_norm) X(const void *, key_norm) \
    X(const void *, after_attention_norm) X(const void *, after_mlp_norm)                                           \
    X(int64_t, window) X(int64_t, turns) X(int64_t, turns_neighbours) X(int64_t, group) X(double, mixed_scale) X(double, widened_scale)     \
    X(const Packed *, scores) X(const Router *, router) X(const Experts *, experts)                                \
    X(int64_t, is_gated) X(const Recurring *, recurring) X(const Latent *, latent)                                 \
    X(const float *, attention_norm_bias) X(const float *, mlp_norm_bias) X(const void *, gate_up_bias)            \
    X(int64_t, activation) X(const float *, above) X(const float *, below) X(int64_t, is_parallel) X(int64_t, is_by_head) \
    X(int64_t, norms_turned) X(int64_t, norms_joined) X(const Packed *, shared_gate) X(const float *, sinks)       \
    X(const float *, scores_bias) X(const float *, share_scales) X(int64_t, head_norm_kind)  \
    X(int64_t, head_dim) X(int64_t, reads) X(const void *, value_norm) X(const void *, router_norm)                 \
    X(const void *, experts_norm) X(const void *, after_experts_norm) X(const void *, after_shared_norm)            \
    X(const Packed *, own_gate) X(const Packed *, own_product) X(const void *, own_norm) X(int64_t, own_at)         \
    X(const void *, stream_scale) X(const Packed *, narrow_input) X(const Packed *, narrow_result) X(int64_t, adds_to_normed) X(double, kept_mixed) X(double, kept_widened) \
    X(const StackLayer *, beside) X(double, mixed_from) X(double, widened_from)
struct StackLayer {
    VNX_STACK_LAYER(VNX_FIELD)
};

/* The products of a layer that adapters may change, in the order of StackCall's parts. */
enum Product : int { QKV, OUTPUT, GATE_UP, DOWN, PRODUCT_COUNT };

/* A layer's caches [block_count, kv_heads, block_size, head_dim], as in AttentionCall; of a recurring one the pools of inputs and of
   states. With layers beside them there are as many again, of those. */
struct StackCache {
    void *keys, *values;
};

/* States that are kept beside the result: `states` [tokens, count, hidden] takes the inputs of the layers with these indices. The
   index behind the last layer's stands for its output. */
struct AuxStates {
    const int64_t *layers;
    int64_t count;
    void *states;
};

/* Where a group of layers keeps the step's tokens, and what its attention reads. */
struct StackPlaces {
    const AttentionPlan *plan;
    const int64_t *slots;
};

/* As in RotaryCall. */
struct Angles {
    const float *cosine, *sine;
    int64_t rotated_dim;
};

/* residual [tokens, hidden] is used up; result [samples, hidden] holds the rows `sample_at` after the last norm. `places` has one
   entry for each group of layers, and all plans have the same query heads. All arrays are of one `kind`, norms of `norm_kind`: the same,
   or BFLOAT16_WIDE_NORM. What adapters add to product p of layer i are the parts from
   part_starts[PRODUCT_COUNT * i + p] to the next; `part_starts` is null where no token has an adapter. `sum` joins what the ranks
   have of a layer's outputs, in float32, before they are rounded and have their bias. Null for one rank alone. `query_factors` [tokens]
   multiply queries before they turn, or null. `own` [tokens, own_width] is what tokens give to layers. */
struct StackCall {
    int kind, norm_kind, cache_kind;
    const StackLayer *layers;
    const StackCache *caches;
    int64_t layer_count, block_stride;
    const void *last_norm;
    const float *last_norm_bias; /* of a layer norm, or null */
    const StackPlaces *places;
    int64_t tokens, hidden;
    float eps, scale, cap;
    const Angles *angles;
    const int64_t *sample_at;
    int64_t samples;
    const ThinPart *parts;
    const int64_t *part_starts;
    void *residual, *result;
    AuxStates aux;
    const SumRanks *sum;
    StateRows states; /* of recurring layers */
    const float *query_factors;
    const void *own;
    int64_t own_width;
};

/* In the last layer only the sampled rows go on once keys and values are written, unless there are adapters or its output is kept. */
void run_stack(const StackCall &call);

}  // namespace vnx
