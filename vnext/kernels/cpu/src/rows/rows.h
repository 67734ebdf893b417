/* Row-wise operations: the entry points. Kinds are FLOAT32 or BFLOAT16 for all arrays of a call; of
   those that norm also BFLOAT16_WIDE_NORM. */
#pragma once

#include "kernels.h"

namespace vnx {

/* normed [rows, width] = rms norm of x, or of total = x + residual where there is a residual. Results are contiguous, but that
   `normed` may have a stride. */
void rms_norm(int kind, int64_t rows, const NormCall &call);
/* result [rows, width] = activation(x[:, :width]) * x[:, width:], or as GateCall says. */
void gate_and_mul(int kind, int64_t rows, const GateCall &call);
/* result [rows, width] = the activation of x, which may be its place. `above` and `below`: numbers that XIELU's slopes are made of. */
void activate(int kind, int64_t rows, GateCall call, const float *above, const float *below);
/* query [T, heads, D], and key and value of each token at its slot of the caches, from joined [T, (heads + 2 kv_heads)
 * * D]. Where both caches are one, values are not looked at. */
void rotary_kv_write(int kind, int64_t tokens, const RotaryCall &call);
/* x [rows, width] = cap * tanh(x / cap), in place. */
void soft_cap(int64_t rows, int64_t width, float cap, float *x);
/* x [rows, width], FLOAT32 or BFLOAT16, times a factor, in place. */
void scale_rows(int kind, int64_t rows, int64_t width, float factor, void *x);
/* The same with a factor of the rows' kind. */
void scale_by(int kind, int64_t rows, int64_t width, const void *factor, void *x);
/* x [rows, width], FLOAT32 or BFLOAT16 and `stride` apart, each row times a factor of its own, in place. */
void scale_each(int kind, int64_t rows, int64_t width, int64_t stride, const float *factors, void *x);
/* to [rows, width] += from, FLOAT32 or BFLOAT16. */
void add_rows(int kind, int64_t rows, int64_t width, const void *from, void *to);
/* to [rows, width] *= from, whose rows are `stride` apart: row r is `at`[r], or r where that is null. */
void multiply_rows(int kind, int64_t rows, int64_t width, const void *from, int64_t stride, const int64_t *at, void *to);
/* to [rows, width] += bias [width] in each row, both of this kind. */
void add_bias(int kind, int64_t rows, int64_t width, const void *bias, void *to);
/* Of each head's first `turning` channels, pairs of neighbours become pairs of halves, in place. Rows of FLOAT32 or BFLOAT16 begin
 * with `heads` heads and are `stride` apart. */
struct PairsCall {
    void *x;
    int64_t stride, heads, head_dim, turning;
};
void part_pairs(int kind, int64_t rows, const PairsCall &call);
/* Neighbouring heads of rows of FLOAT32 or BFLOAT16, `stride` apart, that are normed together: squares [rows], `square_stride` apart, are
   the sums over all their numbers, and then over all `count` numbers of all ranks; weights [heads * head_dim] of FLOAT32, or of the
   rows' kind. Sums go by the tree of `joined_along` in vnext/kernels/shards.py. */
struct HeadsCall {
    void *x;
    int64_t stride, heads, head_dim;
    float *squares;
    int64_t square_stride, count;
    const void *weight;
    bool is_wide;
    float eps;
};
void sum_squares(int kind, int64_t rows, const HeadsCall &call);
void norm_heads(int kind, int64_t rows, const HeadsCall &call);
/* result [count, row_bytes] = rows `ids` of a table of `table_rows`; an id outside [first, first + table_rows) gives
 * zeros. */
void gather_rows(const void *table, int64_t row_bytes, int64_t table_rows, const int64_t *ids, int64_t count,
                 int64_t first, void *result);

}  // namespace vnx
