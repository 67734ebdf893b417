/* Experts: which ones a token goes to, and the sum of what they give. */
#pragma once

#include <functional>

#include "kernels.h"

namespace vnx {

/* Sums `bytes` of values of this kind over the ranks of a group, in their place. What it throws ends the call. */
using SumRanks = std::function<void(void *values, int64_t bytes, int kind)>;

/* As Router in vnext/kernels/calls.py, for `count` experts; `bias` [count] or null. Where `chosen` [count] is not null, it counts how
   often each expert is chosen. Python writes the fields as 64-bit numbers. */
#define VNX_ROUTER(X)                                                                                                \
    X(int64_t, count) X(int64_t, per_token) X(int64_t, normalise) X(int64_t, sigmoid) X(double, scale) X(int64_t, groups) \
    X(int64_t, kept_groups) X(int64_t, group_best) X(const float *, bias) X(int64_t *, chosen)
struct Router {
    VNX_ROUTER(VNX_FIELD)
};

/* `gate_up` and `down` are packed weights, one an expert: those of the experts from `first` on, `held` of them. Biases, one for
   each expert of the model and of the activations' kind, or null; `activation` is that of a `gate_up` without its gate within,
   which has none if `down` takes all that it gives. */
#define VNX_EXPERTS(X)                                                                                               \
    X(const Packed *const *, gate_up) X(const Packed *const *, down) X(int64_t, first) X(int64_t, held)              \
    X(const void *const *, gate_up_biases) X(const void *const *, down_biases) X(int64_t, activation)
struct Experts {
    VNX_EXPERTS(VNX_FIELD)
};

/* The experts `ids` and their shares [rows, per_token] by scores [rows, count]: the largest first, of equals the lower id. */
void route_rows(const Router &router, const float *scores, int64_t rows, float *shares, int64_t *ids);

/* result [rows, hidden] = the sum of shares [rows, k] times what the experts `ids` [rows, k] give for x [rows, hidden], dense and of
   `kind`, in float32 and in their order. What experts give is rounded first, then has its bias and is rounded again; where ranks have a
   part of it each, `sum` adds these before. Experts that are not held give zeros. */
void run_experts(int kind, const Experts &experts, const void *x, int64_t rows, int64_t hidden, int64_t k, const float *shares,
                 const int64_t *ids, const SumRanks *sum, void *result);

}  // namespace vnx
