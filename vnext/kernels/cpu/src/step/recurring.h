/* A layer with a state in the place of keys and values: from the product with its input to what its own product takes. */
#pragma once

#include "kernels.h"

namespace vnx {

/* What it is, as in vnext/models/layers/recurrent.py. */
enum Rule : int64_t { SHORT_CONVOLUTION, DELTA_NET, MAMBA, SELECTIVE, LIGHTNING, KEY_DELTA };

/* `beside`: the second product of the input, or, where it is SELECTIVE, the product of what is convolved. `steps` and `gates` are products
   of that one, or null. `norm` is of the activations' kind where it is LIGHTNING, which has no convolution, else float32: over a head, a
   group of heads, or all of them, which are `all_values` numbers on all ranks. Other norms are of the activations' kind. `scales` [5], or
   null, multiply MAMBA's gates, values, keys, queries and steps. */
#define VNX_RECURRING(X)                                                                                              \
    X(int64_t, rule) X(const Packed *, beside) X(const Packed *, steps) X(const Packed *, gates)                      \
    X(const void *, weight) X(const void *, bias) X(int64_t, channels) X(int64_t, width)                              \
    X(const float *, decay_logs) X(const float *, step_bias) X(const void *, norm) X(const float *, skips)            \
    X(const void *, step_norm) X(const void *, key_norm) X(const void *, query_norm)                                  \
    X(int64_t, key_heads) X(int64_t, key_dim) X(int64_t, value_heads) X(int64_t, value_dim) X(int64_t, all_values)     \
    X(double, eps) X(double, strength_scale) X(double, bound) X(const double *, scales)
struct Recurring {
    VNX_RECURRING(VNX_FIELD)
    int64_t values() const { return rule == SHORT_CONVOLUTION ? channels : value_heads * value_dim; }
    /* Numbers of a token that stand where the convolution leaves its own. */
    int64_t mixed() const { return channels + (rule == SELECTIVE ? 2 * key_dim : 0); }
    int64_t beside_width() const { return width_of(beside) + width_of(steps) + width_of(gates); }

private:
    static int64_t width_of(const Packed *product) { return product == nullptr ? 0 : product->out; }
};

/* inner [tokens, inner_width] is the product with the input; `beside` is room [tokens, beside_width], which begins with that product;
   `convolved` [tokens, mixed] is room, result [tokens, values]. Pools are dense. */
struct RecurringCall {
    int kind;
    const Recurring &layer;
    int64_t tokens;
    const void *inner;
    int64_t inner_width;
    void *beside, *convolved, *result;
    void *inputs_pool, *states_pool;
    const StateRows &rows;
};

/* A product of MAMBA, before all else, times the layer's scales. */
void scale_inner(const RecurringCall &call, void *inner);
/* Into `convolved`, or the result where that is all there is. */
void run_convolution(const RecurringCall &call);
/* Of what was convolved, and of the products. A norm over all heads is not taken: ranks have a part of them each. */
void run_heads(const RecurringCall &call);

}  // namespace vnx
