/* A layer with a state in the place of keys and values: from the product with its input to what its own product takes. */
#pragma once

#include "kernels.h"

namespace vnx {

/* As ShortConvolution, DeltaNet and Mamba in vnext/models/layers/recurrent.py: gates around a convolution where there are no heads
   of values; a delta net with `beside`, whose norm is over a head; else Mamba-2, whose norm is over a group of heads. */
#define VNX_RECURRING(X)                                                                                              \
    X(const Packed *, beside) X(const void *, weight) X(const void *, bias) X(int64_t, channels) X(int64_t, width)      \
    X(const float *, decay_logs) X(const float *, step_bias) X(const float *, norm) X(const float *, skips)           \
    X(int64_t, key_heads) X(int64_t, key_dim) X(int64_t, value_heads) X(int64_t, value_dim)                           \
    X(double, eps) X(double, strength_scale)
struct Recurring {
    VNX_RECURRING(VNX_FIELD)
    int64_t values() const { return value_heads == 0 ? channels : value_heads * value_dim; }
};

/* inner and beside [tokens, their widths] are products with the input; `convolved` [tokens, channels] is room, result [tokens,
   values]. Pools are dense. */
struct RecurringCall {
    int kind;
    const Recurring &layer;
    int64_t tokens;
    const void *inner;
    int64_t inner_width;
    const void *beside;
    void *convolved, *result;
    void *inputs_pool, *states_pool;
    const StateRows &rows;
};
void run_recurring(const RecurringCall &call);

}  // namespace vnx
