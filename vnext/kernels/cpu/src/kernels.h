/* What every instruction set provides, and how the best one of this machine is found.

   One table of functions per level; the entry points (linear.cpp, attention.cpp, rows.cpp, sampling.cpp) cut the work
   and call through the table. All levels but AVX512_BF16 and NEON_BF16 give the same bits for bfloat16 products: the order
   of tdpbf16ps. */
#pragma once

#include <cstddef>
#include <cstdint>

namespace vnx {

/* A processor has those of its architecture, rising, up to its best one; every processor has PORTABLE. Logs name them. */
enum Level : int { PORTABLE, AVX2, AVX512, AVX512_BF16, AMX, NEON, NEON_BF16 };
enum Kind : int { FLOAT32, BFLOAT16, INT8, BFLOAT16_WIDE_NORM, CODES, FLOAT16, UINT8 };
enum Gate : int { NO_GATE, SILU, GELU_TANH, SWIGLU_CLAMPED, SILU_LIMITED, GELU, RELU2, XIELU };  // products apply those up to SILU_LIMITED

constexpr int PANEL = 32;      // output columns of a packed panel, two halves of 16
constexpr int STEP = 32;       // inputs of one step over K in bfloat16 panels and in codes
constexpr int SHARDS_MAX = 8;  // into which the inputs of a weight are cut, each with a sum of its own
constexpr int PIECES_MAX = 8;  // forms that a weight of codes has side by side
constexpr int ALIGNMENT = 64;  // bytes
constexpr int HEAD_MAX = 640;  // head_dim at most
constexpr int CODES_A_SCALE = 32;
constexpr int CONVOLUTION_MAX = 8;  // inputs that a short convolution sees, 2 at least

/* A head's number of bytes in a cache of kind INT8: a code for each number, then an exponent for each CODES_A_SCALE of them. */
constexpr int64_t coded_bytes(int64_t head_dim) { return head_dim + (head_dim + CODES_A_SCALE - 1) / CODES_A_SCALE; }

/* A struct whose fields Python writes as 64-bit numbers is made from a list of them, STRUCT(X): module.cpp tells Python their places. */
#define VNX_FIELD(type, name) type name;

/* The start of a packed weight; offsets in bytes from it, 0 where there is none. `out` counts rows of the weight, gate
   and up together. Panels: FLOAT32 [panel][in][32]; BFLOAT16 [panel][shard][step][half][16 pairs of inputs][16 outputs][2]. A
   gated panel holds 16 outputs of the gate, then the same 16 of up. Padding is zero. The inputs are cut into `shards` of one
   size: each is summed alone, from zero, and the sums are added by the tree of `joined` in lanes.h. CODES: linear/codes.h;
   `panel_bytes` is their mean, and `halves_at` [2 * panels + 1] says where they are. `x_kind`: of the activations, which a product with
   CODES makes INT8 or BFLOAT16 first: `multiplied`. */
struct Packed {
    uint32_t magic;
    int32_t kind, gate, shards;
    int64_t out, in, panel_count, panel_bytes;
    int64_t bias_at, panels_at, total_bytes;
    int32_t x_kind, piece_count;
    int64_t pieces_at, halves_at, multiplied;
    int64_t shard_in() const { return in / shards; }
    int64_t shard_steps() const { return (shard_in() + STEP - 1) / STEP; }
    int64_t steps() const { return shards * shard_steps(); }
};
constexpr uint32_t PACKED_MAGIC = 0x564E5850;

/* Half a panel of codes: its bytes begin at `at`, and it has the form of this piece. */
struct HalfPanel {
    int64_t at, piece;
};

/* Numbers [rows, in / group] of `kind`, times those of `span_kind` [rows, in / span] where `span` is not 0. `kind` -1: none. */
struct ScaleForm {
    const void *parts;
    int64_t kind;
    const void *spans;
    int64_t span_kind, span;
};

/* Rows of a weight of few bits, codes `stride` apart, as vnext/kernels/codes.py has them; without its data the form of a piece of a
   packed one. Python writes the fields as 64-bit numbers, in this order. */
struct CodesPart {
    const uint8_t *codes;
    int64_t rows, stride, bits, zero, group;
    ScaleForm scales, lows;
};

/* Rows of activations as codes are multiplied by them, in blocks of `block_rows` (fewer in the last), one behind the other: `codes`
   [block][step][row][32] times `scales` [block][step][row]. `starts` and `totals` are a piece's [block][number][row], of each step
   or, where the piece has groups of 16, of each half of one: what a sum of codes begins with, and the sum of the row's codes. In
   BFLOAT16 they are `wide` numbers in place of codes, and `totals` what is taken off: their sum, times the zero of a piece with one. */
struct RoundedRows {
    int64_t block_rows;
    int8_t *codes;
    float *scales, *wide;
    int32_t *starts[PIECES_MAX];
    float *totals[PIECES_MAX];
};

/* x [rows, in] (row stride in elements), result [rows, out or out / 2]. `bias` [out] of the result's kind or null: added
   to the rounded product of a weight without gate, and rounded again, as an addition of its own would be. */
struct ThinCall;

struct LinearCall {
    const Packed *weight;
    const void *bias;
    const void *x;
    int64_t x_stride, rows;
    void *result;
    int64_t result_stride;
    int result_kind;
    bool apart = false; /* gate and up of a gated weight side by side, [rows, out], without its activation */
    const ThinCall *behind = nullptr; /* what is computed next, which a level may fetch meanwhile, or null */
    uint64_t number = 0;              /* no two calls have the same: what a thread made of x serves its next unit */
    const RoundedRows *rounded = nullptr; /* x for a weight of CODES */
};

/* Norms, gates and rotations; each over rows [first, last). Kinds: FLOAT32 or BFLOAT16 for all arrays of a call, or
   BFLOAT16_WIDE_NORM: norm weights in FLOAT32, applied before the rounding, the rest BFLOAT16. With a bias [width] it is a layer
   norm, whose weight and bias are FLOAT32, without a residual. */
struct NormCall {
    const void *x, *residual, *weight;
    void *normed, *total;
    int64_t width, x_stride, residual_stride;
    float eps;
    float weight_offset;
    const float *bias = nullptr;
    int64_t normed_stride = 0; /* 0: width */
};

/* `alone`: the activation of x [rows, width], which nothing is multiplied by. With `others` [rows, width] these are multiplied by the
   sigmoid of x [rows, width], or by that of x [rows, 1] with `is_one`. `above` and `below`: XIELU's slopes. */
struct GateCall {
    const void *x;
    void *result;
    int64_t width, x_stride;
    int gate;
    bool alone = false;
    const void *others = nullptr;
    int64_t others_stride = 0;
    bool is_one = false;
    double above = 0, below = 0;
};

/* A block of an adapter and the tokens that it is added to: product[token][first ..] += up(down(x[token])). `down` [in]
   [padded_rank] and `up` [width / 16][rank][16] are of the kind of x, padded with zeros to whole lanes. Python writes the
   fields as 64-bit numbers, in this order. */
struct ThinPart {
    const void *down, *up;
    const int64_t *tokens;
    int64_t count, rank, padded_rank, first, width;
};

/* down(x) is summed in `shards` of x, as a product with a Packed is. `narrow` null: down and up in one. Else the down(x) of
   all parts, [count][padded_rank] each, one behind the other: written, or read where `is_up`. */
struct ThinCall {
    const void *x;
    int64_t x_stride, in, shards;
    void *product;
    int64_t product_stride;
    const ThinPart *parts;
    int64_t part_count;
    float *narrow = nullptr;
    bool is_up = true;
};

struct RotaryCall {
    const void *joined, *query_norm, *key_norm;
    const float *cosine, *sine;
    const int64_t *slots;
    void *key_cache, *value_cache, *query;
    int64_t joined_stride, heads, kv_heads, head_dim, rotated_dim, block_size, block_stride;
    float eps, weight_offset;
    int cache_kind;
    int64_t turned_at = 0; /* the first channel of a head that turns */
    bool norms_last = false; /* norms come behind the turn */
};

/* Rows of a step and the pages of their states: row r has the tokens starts[r] .. starts[r + 1], and goes on from page pages[r] or,
   where fresh[r], from zeros. Where `trail` is not null, the state behind token t is in page trail[t], too, unless that is -1. */
struct StateRows {
    const int32_t *starts, *pages;
    const uint8_t *fresh;
    const int32_t *trail;
    int64_t count;
};

/* x [tokens, channels], `gated` [tokens, 3 * channels]: gates before, gates behind, inputs; weight [channels][width]; pool
   [pages][width - 1][channels], the oldest input first; result [tokens, channels], whose rows are `result_stride` apart, 0 for
   channels; all of one kind. */
struct ConvolutionCall {
    const void *x, *weight, *bias;
    void *pool, *result;
    int64_t x_stride, channels, width, page_stride;
    int silu, gated;
    StateRows rows;
    int64_t result_stride = 0;
};

/* Heads that keep a state [key_dim][value_dim] in float32. A row of x has queries, keys and values at these places, each head's one
   behind the other; key heads are shared by neighbouring value heads. steps [tokens, value_heads, steps_a_head], strengths [tokens,
   value_heads], gates and result [tokens, value_heads, value_dim]; of the kind of x. With strengths the rule is that of a delta, on
   keys and queries of length 1, whose heads have one step or one for each key. decay_logs, step_bias, skips [value_heads], step_bias
   as many as steps, norm [value_dim]. `by_number`: decay_logs [value_heads, key_dim, value_dim], and steps and skips for each value.
   steps, strengths, gates, norm and skips may be null. Gates are those of silu, or of a sigmoid. `by_head`: queries, keys and values
   of a head stand side by side. `activates`: silu is taken of all three. With a `bound` below 0 decays are e^(bound * sigmoid(e^a_log * (step + bias))). */
struct RecurrenceCall {
    const void *x, *steps, *strengths, *gates;
    const float *decay_logs, *step_bias, *norm, *skips;
    float *pool;
    void *result;
    int64_t x_stride, queries_at, keys_at, values_at, step_stride, strength_stride, gate_stride, page_stride;
    int64_t key_heads, key_dim, value_heads, value_dim, steps_a_head;
    bool by_number, is_sigmoid, by_head, activates;
    float bound, strength_scale, eps;
    StateRows rows;
};

/* Scores of keys by an index: those of query [tokens, heads, width] and a key [width] are the sum over heads of weights [tokens, heads]
   times what their product has above 0. Token t has a context of limits[t] keys, whose blocks are row rows[t] of tables; query and
   keys are of one kind, blocks [block_size][width] `block_stride` elements apart. scores: rows `score_stride` apart. */
struct ScoreCall {
    const void *query, *keys;
    const float *weights;
    const int32_t *tables;
    const int64_t *rows, *limits;
    int64_t table_stride, heads, width, block_size, block_stride;
    float *scores;
    int64_t score_stride;
};
constexpr int64_t SCORED_KEYS = 128;  // at once

/* One step's attention. Caches [block_count, kv_heads, block_size, head_dim] of the queries' kind, or of INT8 with coded_bytes in
   place of head_dim, each block dense and `block_stride` elements behind the one before, as in RotaryCall; query and result [tokens, heads, head_dim]. `padded_dim` is head_dim
   in whole steps of 32. `cap` 0: none. `window` 0: none, else a query sees its last `window` keys. */
struct AttentionCall {
    const void *query, *key_cache, *value_cache;
    void *result;
    int64_t heads, kv_heads, head_dim, block_size, block_stride, padded_dim, window;
    float scale, cap;
    int cache_kind;
    uint64_t number; /* no two calls have the same, but for 0: what a thread widened of a split serves its next lanes */
    const float *sinks; /* [heads], scores that take their part of the softmax and have no value; null for none */
};

constexpr int SPLIT_KEYS = 256;  // a context is cut at multiples of this: partial results are joined in order
constexpr int PIECE_KEYS = 64;   // keys per step of the online softmax
constexpr int LANES_MAX = 64;    // queries that read a split together
constexpr float LOWEST = -1e30f;

/* Queries that see the same blocks: lane i is row `query[i]` of [tokens * heads] and sees the keys [low[i], high[i]).
   Lanes behind `count`, up to a multiple of 16, see nothing (high 0). */
struct LaneSet {
    int count;
    int64_t query[LANES_MAX];
    int32_t low[LANES_MAX], high[LANES_MAX];
};

/* Part of a context: SPLIT_KEYS keys of one key-value head from `first_key` on. `blocks` is the row's whole block
 * table. */
struct Split {
    const int32_t *blocks;
    int64_t kv_head;
    int32_t first_key, last_key;
};

/* What a split leaves for each lane: peak and sum of the weights, and total [lane][padded_dim]. */
struct SplitState {
    float *peak, *weight_sum, *total;
};

/* Sampling: a token's weight is 2^WEIGHT_BITS times its probability over the likeliest one's, cut to a whole number of
   at most 24 significant bits and kept as float32. 2^f for f in [-1/2, 1/2] is a series by falling powers of f.
   Constants as in vnext/sampling/weights.py. */
constexpr int WEIGHT_BITS = 40;
constexpr int WEIGHT_BLOCK = 128;  // neighbouring tokens with a sum and a peak of their own
constexpr float LEAST_EXPONENT = -64.0f;
constexpr int EXP2_TERMS = 6;
constexpr float EXP2_SERIES[EXP2_TERMS] = {0x1.5bba14p-10f, 0x1.3cea88p-7f, 0x1.c6b752p-5f,
                                           0x1.ebf9bcp-3f,  0x1.62e42ap-1f, 1.0f};

/* Weights of whole blocks of a row (zero behind its end), and of each block the largest and the sum. */
struct Weights {
    float *weights, *peaks;
    int64_t *sums;
};

/* Products with weights of CODES. Rows [first, last) of x, one block of `block_rows` or the last one, are rounded first. */
struct CodesProduct {
    int64_t block_rows;
    void (*round)(const LinearCall &, int64_t first, int64_t last);
    void (*linear)(const LinearCall &, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1);
};

/* By activations of INT8 and of BFLOAT16. And what makes such weights of floats: see linear_rounded.h. */
struct CodesKernels {
    CodesProduct narrow, wide;
    void (*round_groups)(int kind, const void *x, int64_t count, int bits, uint8_t *codes, uint16_t *scales);
};

struct Kernels {
    void (*linear_f32)(const LinearCall &, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1);
    void (*linear_bf16)(const LinearCall &, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1);
    /* Fills the state; `next` is what this thread will ask for afterwards, to be fetched ahead, or null. */
    void (*attend_f32)(const AttentionCall &, const LaneSet &, const Split &, const Split *next, const SplitState &);
    void (*attend_bf16)(const AttentionCall &, const LaneSet &, const Split &, const Split *next, const SplitState &);
    /* The same from a cache of INT8 as it lies there, for queries of `kind`; false, and nothing filled, where this level wants
       it widened. Null: it always does. */
    bool (*attend_codes)(int kind, const AttentionCall &, const LaneSet &, const Split &, const Split *next, const SplitState &);
    /* Lanes from, from + 1, ... of a later split into lanes to, to + 1, ...; width in floats, a multiple of 16. */
    void (*join)(const SplitState &into, int to, const SplitState &other, int from, int count, int64_t width);
    /* total / weight_sum of a lane as `kind`, zeros where it saw nothing. */
    void (*finish)(int kind, const SplitState &state, int lane, int64_t width, int64_t head_dim, void *result);
    void (*norm)(int kind, const NormCall &, int64_t first, int64_t last);
    void (*gate)(int kind, const GateCall &, int64_t first, int64_t last);
    void (*rotary)(int kind, const RotaryCall &, int64_t first, int64_t last);
    void (*soft_cap)(float *x, int64_t count, float cap);
    /* Channels [first, last) of a row. */
    void (*convolve)(int kind, const ConvolutionCall &, int64_t row, int64_t first, int64_t last);
    /* A value head of a row. */
    void (*recur)(int kind, const RecurrenceCall &, int64_t row, int64_t head);
    /* Neighbouring heads of a cache of kind INT8 as dense rows [count][head_dim] of `kind`. */
    void (*widen_codes)(int kind, const int8_t *rows, int64_t head_dim, int64_t count, void *to);
    /* `narrow`: that of the part's first token, or null. */
    void (*thin)(int kind, const ThinCall &, const ThinPart &, int64_t first, int64_t last, float *narrow);
    /* Logits become minus infinity where their bit is 0, the lowest bit of the first word first. */
    void (*keep_allowed)(float *logits, int64_t count, const uint32_t *words);
    /* The largest logit of each block of WEIGHT_BLOCK; whether there is a NaN (peaks then leave it out). */
    bool (*find_peaks)(const float *logits, int64_t count, float *peaks);
    /* Weights of 2^((logit - peak) * scale). */
    void (*weigh)(const float *logits, int64_t count, float peak, float scale, const Weights &to);
    /* Weights of at least `bound` with their ids, by rising id; room for 16 more than there are. Returns how many. */
    int64_t (*collect)(const Weights &from, int64_t blocks, float bound, float *values, int32_t *ids);
    /* Of a token's keys [first, last). */
    void (*score_keys)(int kind, const ScoreCall &, int64_t token, int64_t first, int64_t last);
};

/* One that was not built has the address null. */
#if defined(__GNUC__)
#define MAYBE_BUILT __attribute__((weak))
#else
#define MAYBE_BUILT
#endif
extern const Kernels portable_kernels;
extern const CodesKernels portable_codes;
#if defined(__x86_64__)
extern MAYBE_BUILT const CodesKernels avx2_codes, avx_vnni_codes, avx512_vnni_codes;
extern MAYBE_BUILT const Kernels avx2_kernels, avx512_kernels, avx512_bf16_kernels, amx_kernels;
#elif defined(__aarch64__)
extern const CodesKernels neon_codes, neon_dot_codes;
extern const Kernels neon_kernels, neon_bf16_kernels;
#endif

/* The highest level that this machine and its system allow, and the highest of those that were built, whose fastest is current at
   first. */
Level machine_level();
Level best_level();
bool has_level(int level);
/* Whether all that this machine can run was built. */
bool is_complete();
/* Use a level for all later calls; false where this machine lacks it. */
bool set_level(int level);
Level current_level();
const Kernels &kernels();
const CodesKernels &codes_kernels();

}  // namespace vnx
