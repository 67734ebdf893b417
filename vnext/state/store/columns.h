/* Columns: the arithmetic of one step over the rows, on plain pointers. What columns_numpy.py says, for `_columns.c` and for
   strides (vnext/sched/_stride.c). Pure but for the arrays it is handed; knows no Python object.
   Cells are int64[FIELD_COUNT][rows], contiguous; fields as in rows.py. Each function walks the rows once. */

#ifndef VNEXT_COLUMNS_H
#define VNEXT_COLUMNS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "blake2b.h"

/* As rows.py has them. */
#define FIELDS(X)                                                                                                  \
    X(ID) X(KNOWN) X(COMPUTED) X(PLACEHOLDERS) X(LIMIT) X(BLOCKS) X(HASHED_BLOCKS) X(PROMPT) X(PREEMPTION_COUNT) X(PRIORITY) X(FLAGS)     \
    X(MIN_KNOWN) X(CACHED) X(TABLE_HASH) X(TOKENS_AT) X(TOKENS_SIZE) X(TABLE_AT) X(TABLE_SIZE) X(BLOCK_HASH_0) X(BLOCK_HASH_1)
#define ENUMERATOR(name) name,
enum { FIELDS(ENUMERATOR) FIELD_COUNT };
enum { IGNORE_EOS = 1, OWN_STOPS = 2, DRAFTS_SHIFT = 8, DIGEST_WORDS = 4, INPUT_BEGINS = -(1 << 30) };

/* What a module that includes this shares with columns.py. */
#define COLUMNS_CONSTANTS FIELDS(CONSTANT) CONSTANT(FIELD_COUNT) CONSTANT(IGNORE_EOS) CONSTANT(OWN_STOPS) CONSTANT(DRAFTS_SHIFT) \
    CONSTANT(DIGEST_WORDS) CONSTANT(INPUT_BEGINS)

/* One field of a matrix. */
#define FIELD(cells, field, rows) ((cells) + (ptrdiff_t)(field) * (rows))

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* A number for "this value at this place": sums of them distinguish arrays, in any order of writing (columns_numpy.array_hash). */
static inline uint64_t place_hash(uint64_t place, uint64_t value) {
    uint64_t x = place * 0x9E3779B97F4A7C15u + value * 0xC2B2AE3D27D4EB4Fu + 0x165667B19E3779F9u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* The tokens that row r could compute. */
static inline int64_t row_wants(const int64_t *c, ptrdiff_t rows, ptrdiff_t r) {
    int64_t reached = FIELD(c, KNOWN, rows)[r] + FIELD(c, PLACEHOLDERS, rows)[r];
    return least(reached, FIELD(c, LIMIT, rows)[r] - 1) - FIELD(c, COMPUTED, rows)[r];
}

/* A step's microbatch (columns_numpy.in_turn): of the rows that want a single token, as many as `behind` says from number `first` on,
   and the rest from number 0 on. `next`: the number of the next row. */
typedef struct {
    int64_t first, behind, before, next;
    int is_all;
} Microbatch;

static inline Microbatch rows_microbatch(const int64_t *c, ptrdiff_t rows, int64_t microbatches, int64_t step) {
    int64_t count = 0, part = microbatches > 1 ? step % microbatches : 0, ready = 0;
    for (ptrdiff_t r = 0; microbatches > 1 && r < rows; ++r) count += row_wants(c, rows, r) == 1;
    Microbatch m = {.first = part * count / (microbatches > 1 ? microbatches : 1), .is_all = microbatches <= 1 || count < microbatches};
    if (m.is_all) return m;
    int64_t share = (part + 1) * count / microbatches - m.first, number = 0;
    for (ptrdiff_t r = 0; r < rows; ++r)
        if (row_wants(c, rows, r) == 1) ready += number++ >= m.first && !FIELD(c, PLACEHOLDERS, rows)[r];
    m.behind = least(share, ready);
    m.before = share - m.behind;
    return m;
}

/* Whether it is the turn of the microbatch's next row, whose token may be in flight. */
static inline int is_in_turn(Microbatch *m, int is_in_flight) {
    int64_t *left = m->next++ < m->first ? &m->before : &m->behind;
    if (is_in_flight || !*left) return 0;
    --*left;
    return 1;
}

/* New tokens of each row and the blocks it lacks for them; the sum of tokens, of blocks in *lacks. */
static inline int64_t rows_expected(const int64_t *c, ptrdiff_t rows, int64_t *tokens, int64_t *need, int64_t budget,
                                    int64_t threshold, int64_t size, int64_t microbatches, int64_t step, int64_t *lacks) {
    const int64_t *computed = FIELD(c, COMPUTED, rows), *held = FIELD(c, BLOCKS, rows), *placeholders = FIELD(c, PLACEHOLDERS, rows);
    Microbatch microbatch = rows_microbatch(c, rows, microbatches, step);
    int64_t left = budget;
    *lacks = 0;
    for (ptrdiff_t r = 0; r < rows; ++r) {
        int64_t want = row_wants(c, rows, r);
        if (want == 1 && !microbatch.is_all) want = is_in_turn(&microbatch, placeholders[r] > 0);
        if (threshold) want = least(want, threshold);
        tokens[r] = least(want, left);
        left -= tokens[r];
        int64_t end = computed[r] + tokens[r], have = held[r] * size;
        need[r] = end > have ? (end - have + size - 1) / size : 0;
        *lacks += need[r];
    }
    return budget - left;
}

/* The rows compute their tokens in the blocks that were added; how many rows have any. */
static inline int64_t rows_advance(int64_t *c, ptrdiff_t rows, const int64_t *tokens, const int64_t *need) {
    int64_t *computed = FIELD(c, COMPUTED, rows), *placeholders = FIELD(c, PLACEHOLDERS, rows), *blocks = FIELD(c, BLOCKS, rows);
    const int64_t *known = FIELD(c, KNOWN, rows);
    int64_t scheduled = 0;
    for (ptrdiff_t r = 0; r < rows; ++r) {
        computed[r] += tokens[r];
        placeholders[r] += tokens[r] > 0 && computed[r] == known[r] + placeholders[r];
        blocks[r] += need[r];
        scheduled += tokens[r] > 0;
    }
    return scheduled;
}

/* The entries of a step in flight: out int64[4][width] of ids, preemption_counts, starts, counts, and who samples; how many there are. */
static inline ptrdiff_t rows_step_entries(const int64_t *c, ptrdiff_t rows, const int64_t *starts, const int64_t *tokens, int64_t *out,
                                    ptrdiff_t width, char *samples) {
    ptrdiff_t n = 0;
    for (ptrdiff_t r = 0; r < rows; ++r) {
        if (!tokens[r]) continue;
        out[n] = FIELD(c, ID, rows)[r];
        out[width + n] = FIELD(c, PREEMPTION_COUNT, rows)[r];
        out[2 * width + n] = starts[r];
        out[3 * width + n] = tokens[r];
        samples[n++] = FIELD(c, PLACEHOLDERS, rows)[r] > 0;
    }
    return n;
}

/* Laws S2 and M4 of laws.py: 0 if a row computed more than it knows, hashed_blocks too much, is at its limit, or holds too few or
   too many blocks. `spare_tokens`: the drafts for which a row may hold blocks. */
static inline int rows_lawful(const int64_t *c, ptrdiff_t rows, int64_t size, int64_t spare_tokens) {
    const int64_t *known = FIELD(c, KNOWN, rows), *computed = FIELD(c, COMPUTED, rows), *placeholders = FIELD(c, PLACEHOLDERS, rows);
    const int64_t *limit = FIELD(c, LIMIT, rows), *blocks = FIELD(c, BLOCKS, rows), *hashed_blocks = FIELD(c, HASHED_BLOCKS, rows);
    int wrong = 0;
    for (ptrdiff_t r = 0; r < rows; ++r) {
        int64_t spare = blocks[r] * size - computed[r];
        wrong |= computed[r] > known[r] + placeholders[r];
        wrong |= hashed_blocks[r] * size > least(computed[r], known[r]);
        wrong |= known[r] >= limit[r];
        wrong |= (uint64_t)spare >= (uint64_t)(size + spare_tokens); /* below 0 too */
    }
    return !wrong;
}

/* Sum, least and greatest of a step's token counts, and how many of its rows sample. */
typedef struct {
    int64_t sum, smallest, largest;
    ptrdiff_t sampling;
} Bounds;

static inline Bounds step_bounds(const int64_t *counts, const char *samples, ptrdiff_t n) {
    Bounds b = {0, n ? counts[0] : 0, 0, 0};
    for (ptrdiff_t i = 0; i < n; ++i) {
        b.sum += counts[i];
        b.smallest = least(b.smallest, counts[i]);
        b.largest = counts[i] > b.largest ? counts[i] : b.largest;
        b.sampling += samples[i] != 0;
    }
    return b;
}

/* A step whose result is due: its requests, and which of them sample. */
typedef struct {
    const int64_t *ids, *preemption_counts;
    const char *samples;
    ptrdiff_t count;
} Step;

/* Who takes which sample, and who is done: arrays of as many as there are samples. */
typedef struct {
    int64_t *rows, *places;
    char *stopped, *at_limit;
} Taken;

/* The row of a step's entry, which is `from` or behind it; `rows` where it has left. */
static inline ptrdiff_t entry_row(const int64_t *c, ptrdiff_t rows, const Step *step, ptrdiff_t entry, ptrdiff_t from) {
    while (from < rows && FIELD(c, ID, rows)[from] != step->ids[entry]) ++from;
    return from < rows && FIELD(c, PREEMPTION_COUNT, rows)[from] == step->preemption_counts[entry] ? from : rows;
}

static inline int is_first_rows(const int64_t *c, ptrdiff_t rows, const Step *step) {
    size_t bytes = step->count * sizeof(int64_t);
    return step->count <= rows && !memcmp(step->ids, FIELD(c, ID, rows), bytes) &&
           !memcmp(step->preemption_counts, FIELD(c, PREEMPTION_COUNT, rows), bytes);
}

static inline int is_among(int64_t token, const int64_t *tokens, ptrdiff_t n) {
    int found = 0;
    for (ptrdiff_t k = 0; k < n; ++k) found |= token == tokens[k];
    return found;
}

/* A step's samples matched with its rows: 0 where some of them have left, or the tokens are not what was asked for. *own: a row has stop tokens of its own; *ended: how many are done. */
static inline int rows_match_samples(const int64_t *c, ptrdiff_t rows, const Step *step, const int32_t *sampled, ptrdiff_t given,
                              const int64_t *eos, ptrdiff_t eos_count, const Taken *taken, int *own, int *ended) {
    const int64_t *known = FIELD(c, KNOWN, rows), *flags = FIELD(c, FLAGS, rows);
    ptrdiff_t n = 0;
    int first = is_first_rows(c, rows, step);
    *own = *ended = 0;
    for (ptrdiff_t e = 0, r = 0; e < step->count; ++e, ++r) {
        if (!first && (r = entry_row(c, rows, step, e, r)) == rows) return 0;
        if (!step->samples[e]) continue;
        if (n >= given || sampled[n] < 0) return 0;
        int stops = !(flags[r] & IGNORE_EOS) && is_among(sampled[n], eos, eos_count);
        *own |= (flags[r] & OWN_STOPS) != 0;
        taken->rows[n] = r;
        taken->places[n] = n;
        taken->stopped[n] = stops && known[r] + 1 > FIELD(c, MIN_KNOWN, rows)[r];
        taken->at_limit[n] = known[r] + 1 >= FIELD(c, LIMIT, rows)[r];
        *ended += taken->stopped[n] || taken->at_limit[n];
        ++n;
    }
    return n == given;
}

/* Whether these rows' histories have a place for one token more each: 1, 0 if one is full, -1 if a place is none. The places of a
   row that takes several are adjacent. */
static inline int rows_fit(const int64_t *c, ptrdiff_t rows, const int64_t *which, ptrdiff_t n, ptrdiff_t places) {
    int full = 0;
    for (ptrdiff_t i = 0, first = 0; i < n; ++i) {
        if (which[i] < 0 || which[i] >= rows) return -1;
        if (which[i] != which[first]) first = i;
        int64_t known = FIELD(c, KNOWN, rows)[which[i]] + i - first, at = FIELD(c, TOKENS_AT, rows)[which[i]] + known;
        full |= known >= FIELD(c, TOKENS_SIZE, rows)[which[i]];
        if (at < 0 || (!full && at >= places)) return -1;
    }
    return !full;
}

/* These rows know one token more; their histories have places for it (rows_fit). */
static inline void rows_take_tokens(int64_t *c, ptrdiff_t rows, const int64_t *which, ptrdiff_t n, const int32_t *tokens,
                                    int32_t *arena) {
    int64_t *known = FIELD(c, KNOWN, rows), *placeholders = FIELD(c, PLACEHOLDERS, rows), *tokens_at = FIELD(c, TOKENS_AT, rows);
    for (ptrdiff_t i = 0; i < n; ++i) {
        arena[tokens_at[which[i]] + known[which[i]]] = tokens[i];
        known[which[i]] += 1;
        placeholders[which[i]] -= 1;
    }
}

/* How many of the `more` tokens behind a block of `size` belong to its name: where an input begins within its last ones, those that
   spell the rest of its digest. */
static inline ptrdiff_t rest_of_digest(const int32_t *block, int64_t size, ptrdiff_t more) {
    for (ptrdiff_t back = 1; back < DIGEST_WORDS && back <= size; ++back)
        if (block[size - back] < INPUT_BEGINS) return DIGEST_WORDS - back < more ? DIGEST_WORDS - back : more;
    return 0;
}

/* The next block of row r, a full one, is hashed_blocks: `key` (16 bytes) is its name. 0 if it is outside the histories. */
static inline int row_hash_block(int64_t *c, ptrdiff_t rows, ptrdiff_t r, int64_t size, const int32_t *tokens, ptrdiff_t places,
                           uint8_t *key) {
    int64_t at = FIELD(c, TOKENS_AT, rows)[r] + FIELD(c, HASHED_BLOCKS, rows)[r] * size;
    if (at < 0 || at + size > places) return 0;
    memcpy(key, &FIELD(c, BLOCK_HASH_0, rows)[r], 8);
    memcpy(key + 8, &FIELD(c, BLOCK_HASH_1, rows)[r], 8);
    blake2b_16(key, key, BLAKE2B_DIGEST, tokens + at, 4 * (size + rest_of_digest(tokens + at, size, places - at - size)));
    FIELD(c, HASHED_BLOCKS, rows)[r] += 1;
    memcpy(&FIELD(c, BLOCK_HASH_0, rows)[r], key, 8);
    memcpy(&FIELD(c, BLOCK_HASH_1, rows)[r], key + 8, 8);
    return 1;
}

#endif
