/* Latent attention: from a layer's first product to the queries and rows that a cache of one row a token takes, and back. */
#pragma once

#include "kernels.h"

namespace vnx {

/* As LatentAttention in vnext/models/layers/latent.py: `keys` and `values` are packed weights, one a head, `query` and its norm null
   where queries are made of the layer's input. A row of the cache is `rank` numbers and `turning` ones, a query `plain` and `turning`
   ones. Norms are of the activations' kind. `gates` [heads] of the layer's input multiply what heads give, or null. Python writes the fields as 64-bit numbers. */
#define VNX_LATENT(X)                                                                                                      \
    X(const Packed *, query) X(const void *, query_norm) X(const void *, norm) X(const Packed *const *, keys)              \
    X(const Packed *const *, values) X(int64_t, heads) X(int64_t, rank) X(int64_t, turning) X(int64_t, plain) X(double, eps) \
    X(const Packed *, gates)
struct Latent {
    VNX_LATENT(VNX_FIELD)
    int64_t width() const { return rank + turning; }
    int64_t value() const { return values[0]->out; }
    int64_t query_width() const { return query == nullptr ? 0 : query->out; }
};

/* `joined` [rows, heads + 1, width] = queries of rows, then the rows, not turned yet, from inner [rows, inner_width]: what queries are
   made of, then the row. `normed` and `queries` have room for what is between. `factors` [rows] of queries, or null. */
struct LatentCall {
    const void *inner;
    int64_t inner_width, rows;
    void *normed, *queries, *joined;
    const float *factors;
};
void place_latent(int kind, const Latent &latent, const LatentCall &call);

/* result [rows, heads, value] of what heads see of rows, [rows, heads, width]. `gates` [rows, heads]: where the layer has them. */
void latent_values(int kind, const Latent &latent, const void *seen, int64_t rows, const void *gates, void *result);

}  // namespace vnx
