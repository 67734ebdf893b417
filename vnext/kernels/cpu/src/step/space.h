/* The memory between the operations of a stack's layers: how much they need, and where it lies. */
#pragma once

#include "step/stack.h"

namespace vnx {

/* What lies between the operations of a layer; no two of one name are needed at once. Rows are dense. */
struct Space {
    void *joined_or_wide, *query_or_mixed, *seen_or_normed;
    void *picked_query, *picked_residual;
    void *apart; /* gate and up, which adapters change, or a bias, before they meet */
    float *sums; /* of this rank's inputs of a product whose inputs the ranks share */
    void *shared; /* what an MLP beside experts gives, or a layer beside attention */
    void *beside; /* the second product of a recurring or a latent layer, or the gates of queries */
    void *picked_gates;
};

/* `inner_width`: of what stands between a layer's products. */
struct Sizes {
    int64_t element, joined_width, wide_width, inner_width, beside_width, sum_width;
};

int64_t padded(int64_t bytes); /* to whole pages */

int64_t query_width(const StackCall &call, const StackLayer &layer);

/* Whether gate and up are multiplied first and gated then. */
bool has_gate_apart(const StackLayer &layer);

/* The largest of all layers. */
Sizes sizes_of(const StackCall &call);

/* A thread's, until it takes another one. */
Space take_space(const StackCall &call, const Sizes &sizes);

}  // namespace vnx
