/* Packed weights and products with them: the entry points. */
#pragma once

#include "kernels.h"

namespace vnx {

/* Bytes that `pack_linear` fills: header, bias, panels. */
int64_t packed_bytes(int64_t out, int64_t in, int kind, int gate, int shards);

/* Some rows of a weight, `stride` elements apart. Python writes the fields as 64-bit numbers, in this order. */
struct WeightPart {
    const void *data;
    int64_t rows, stride;
};

/* Pack weight [out, in] (FLOAT32 or BFLOAT16), whose rows are those of the parts one below the other, with bias [out] of
   the same kind or null into `buffer`, 64-byte aligned. A gated weight has gate above up. `shards`, at most SHARDS_MAX,
   divides `in`. */
void pack_linear(const WeightPart *parts, int kind, const void *bias, int64_t out, int64_t in, int gate, int shards, void *buffer);

/* result [rows, out], or [rows, out / 2] of a gated weight, = x [rows, in] * weight^T + the packed bias, rounded; then
   + `bias` as in LinearCall. `apart`: gate and up of a gated weight as they are, [rows, out]. `behind`: as in LinearCall. */
void linear(const void *x, int64_t x_stride, int64_t rows, const Packed *weight, const void *bias, void *result,
            int64_t result_stride, int result_kind, bool apart = false, const ThinCall *behind = nullptr);

/* Rows `stride` elements apart, and the parts of neighbouring heads head_stride. */
struct HeadRows {
    void *data;
    int64_t stride, head_stride;
};

/* Head h of x by weights[h], of floats, all of one shape and kind, into head h of the result. */
void head_products(int kind, const HeadRows &x, int64_t rows, const Packed *const *weights, int64_t heads, const HeadRows &result);

/* result [count, in] = rows `ids` of a packed weight that is neither gated nor in shards; an id outside [first, first + out) gives
   zeros. */
void packed_rows(const int64_t *ids, int64_t count, int64_t first, const void *packed, void *result);

}  // namespace vnx
