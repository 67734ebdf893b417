/* Columns: the arithmetic of one step over the rows, compiled. The fast implementation of columns_numpy.py, function by
   function. This file has the functions that Python calls; columns.h has those that fast-forwarding shares.

   Pure except for the caller's output arrays: reads no clock and no environment, keeps no state.
   Cells are int64[FIELD_COUNT][R], contiguous; fields as in rows.py, which columns.py compares.
   Each call walks the rows once; nothing here is proportional to history. */

#include "compiled.h"
#include "columns.h"

static Py_ssize_t rows_of(const Py_buffer *cells) { return cells->len / ((Py_ssize_t)sizeof(int64_t) * FIELD_COUNT); }

static int too_small(const Py_buffer *buffer, Py_ssize_t bytes) {
    if (buffer->len >= bytes) return 0;
    PyErr_SetString(PyExc_ValueError, "an array is too short for its rows");
    return 1;
}

/* expected(cells, out int64[2][R]: tokens, blocks lacking; budget, threshold, size, microbatches, step) -> (sum of tokens, sum of blocks) */
static PyObject *expected(PyObject *self, PyObject *args) {
    OWNED Py_buffer cells = {0}, both = {0};
    long long budget, threshold, size, microbatches, step;
    if (!PyArg_ParseTuple(args, "y*w*LLLLL", &cells, &both, &budget, &threshold, &size, &microbatches, &step)) return NULL;
    Py_ssize_t rows = rows_of(&cells);
    if (too_small(&both, 2 * rows * 8)) return NULL;
    int64_t *tokens = both.buf, lacks;
    int64_t taken = rows_expected(cells.buf, rows, tokens, tokens + rows, budget, threshold, size, microbatches, step, &lacks);
    return Py_BuildValue("LL", (long long)taken, (long long)lacks);
}

/* needed(cells, tokens, out need int64[R], size) -> total */
static PyObject *needed(PyObject *self, PyObject *args) {
    OWNED Py_buffer cells = {0}, tokens = {0}, need = {0};
    long long size;
    if (!PyArg_ParseTuple(args, "y*y*w*L", &cells, &tokens, &need, &size)) return NULL;
    Py_ssize_t rows = rows_of(&cells);
    if (too_small(&tokens, rows * 8) || too_small(&need, rows * 8)) return NULL;
    const int64_t *c = cells.buf, *computed = FIELD(c, COMPUTED, rows), *blocks = FIELD(c, BLOCKS, rows);
    const int64_t *t = tokens.buf;
    int64_t *out = need.buf, total = 0;
    for (Py_ssize_t r = 0; r < rows; ++r) {
        int64_t lacks = (computed[r] + t[r] + size - 1) / size - blocks[r];
        out[r] = lacks > 0 ? lacks : 0;
        total += out[r];
    }
    return PyLong_FromLongLong(total);
}

/* advance(cells, out cells, tokens, need) -> scheduled rows */
static PyObject *advance(PyObject *self, PyObject *args) {
    OWNED Py_buffer cells = {0}, out = {0}, tokens = {0}, need = {0};
    if (!PyArg_ParseTuple(args, "y*w*y*y*", &cells, &out, &tokens, &need)) return NULL;
    Py_ssize_t rows = rows_of(&cells);
    if (too_small(&out, cells.len) || too_small(&tokens, rows * 8) || too_small(&need, rows * 8)) return NULL;
    return PyLong_FromLongLong(rows_advance(memcpy(out.buf, cells.buf, cells.len), rows, tokens.buf, need.buf));
}

/* Pages `from`, `groups` a block, into the tables of the rows, behind those each had; BLOCKS counts the new ones already. 0 where one
   has no place. */
static int put_pages(int64_t *c, Py_ssize_t rows, const int64_t *need, const int32_t *from, Py_ssize_t given, int32_t *to,
                     Py_ssize_t places, int64_t groups) {
    int64_t *sum = FIELD(c, TABLE_HASH, rows);
    const int64_t *table_at = FIELD(c, TABLE_AT, rows), *held = FIELD(c, BLOCKS, rows);
    Py_ssize_t k = 0;
    for (Py_ssize_t r = 0; r < rows; ++r)
        for (int64_t j = need[r] * groups; j > 0; --j) {
            int64_t place = held[r] * groups - j, at = table_at[r] + place;
            if (k >= given || at < 0 || at >= places) return 0;
            sum[r] = (int64_t)((uint64_t)sum[r] + place_hash((uint64_t)place, (uint64_t)from[k]));
            to[at] = from[k++];
        }
    return 1;
}

/* write_tables(advanced cells writable, need, blocks int32, arena int32 writable, groups): put_pages. */
static PyObject *write_tables(PyObject *self, PyObject *args) {
    OWNED Py_buffer cells = {0}, need = {0}, blocks = {0}, arena = {0};
    long long groups;
    if (!PyArg_ParseTuple(args, "w*y*y*w*L", &cells, &need, &blocks, &arena, &groups)) return NULL;
    Py_ssize_t rows = rows_of(&cells);
    int exchange = need.len >= rows * 8 && put_pages(cells.buf, rows, need.buf, blocks.buf, blocks.len / 4, arena.buf, arena.len / 4, groups);
    if (!exchange) return PyErr_Format(PyExc_ValueError, "a block has no place in the tables");
    Py_RETURN_NONE;
}

/* array_hash(values int64[n]) -> sum of place_hash over all places */
static PyObject *array_hash(PyObject *self, PyObject *args) {
    OWNED Py_buffer values = {0};
    if (!PyArg_ParseTuple(args, "y*", &values)) return NULL;
    const int64_t *value = values.buf;
    uint64_t sum = 0;
    for (Py_ssize_t at = 0; at < values.len / 8; ++at) sum += place_hash((uint64_t)at, (uint64_t)value[at]);
    return PyLong_FromUnsignedLongLong(sum);
}

/* exchange(store int64 writable, places int32[n], values int64[n] writable) -> change of the store's array_hash sum.
   Values and store change places: afterwards `values` is what brings the old array back. */
static PyObject *exchange(PyObject *self, PyObject *args) {
    OWNED Py_buffer store = {0}, places = {0}, values = {0};
    if (!PyArg_ParseTuple(args, "w*y*w*", &store, &places, &values)) return NULL;
    Py_ssize_t n = places.len / 4, size = store.len / 8;
    const int32_t *place = places.buf;
    int64_t *kept = store.buf, *value = values.buf;
    int bad = values.len < n * 8;
    uint64_t change = 0;
    for (Py_ssize_t i = 0; i < n && !bad; ++i) bad = place[i] < 0 || place[i] >= size;
    for (Py_ssize_t i = 0; i < n && !bad; ++i) {
        int64_t before = kept[place[i]];
        change += place_hash((uint64_t)place[i], (uint64_t)value[i]) - place_hash((uint64_t)place[i], (uint64_t)before);
        kept[place[i]] = value[i];
        value[i] = before;
    }
    if (bad) return PyErr_Format(PyExc_ValueError, "a value has no place in the array");
    return PyLong_FromUnsignedLongLong(change);
}

/* The oldest blocks that really stand where the queue says: how many of those wanted are in [*head, used). */
static Py_ssize_t find_oldest(const Py_buffer *queue, const Py_buffer *status, Py_ssize_t *head, Py_ssize_t used, int32_t *out,
                              Py_ssize_t wanted) {
    const int32_t *q = queue->buf;
    const int64_t *place = status->buf;
    Py_ssize_t count = 0, page_count = status->len / 8;
    if (used > queue->len / 4) used = queue->len / 4;
    while (count < wanted && *head < used) {
        int32_t block = q[*head];
        if (block >= 0 && block < page_count && place[block] == *head) out[count++] = block;
        ++*head;
    }
    return count;
}

/* oldest(queue int32, status int64[N], head, used, out blocks int32) -> head behind them */
static PyObject *oldest(PyObject *self, PyObject *args) {
    OWNED Py_buffer queue = {0}, places = {0}, blocks = {0};
    Py_ssize_t head, used;
    if (!PyArg_ParseTuple(args, "y*y*nnw*", &queue, &places, &head, &used, &blocks)) return NULL;
    Py_ssize_t lacks = blocks.len / 4 - find_oldest(&queue, &places, &head, used, blocks.buf, blocks.len / 4);
    if (lacks) return PyErr_Format(PyExc_ValueError, "the queue holds %zd blocks fewer than counted", lacks);
    return PyLong_FromSsize_t(head);
}

/* released(status int64[N], blocks int32[n], at, out status int64[n], out freed int32[n]) -> how many are freed */
static PyObject *released(PyObject *self, PyObject *args) {
    OWNED Py_buffer status = {0}, blocks = {0}, left = {0}, freed = {0};
    long long at;
    if (!PyArg_ParseTuple(args, "y*y*Lw*w*", &status, &blocks, &at, &left, &freed)) return NULL;
    Py_ssize_t n = blocks.len / 4, size = status.len / 8, count = 0;
    const int64_t *held = status.buf;
    const int32_t *block = blocks.buf;
    int64_t *out = left.buf;
    int bad = left.len < n * 8 || freed.len < n * 4;
    for (Py_ssize_t i = 0; i < n && !bad; ++i) {
        bad = block[i] < 0 || block[i] >= size;
        if (bad) break;
        out[i] = held[block[i]] + 1;
        if (out[i]) continue;
        out[i] = at + count;
        ((int32_t *)freed.buf)[count++] = block[i];
    }
    if (bad) return PyErr_Format(PyExc_ValueError, "a block is outside the pool");
    return PyLong_FromSsize_t(count);
}

/* block_hashes(parent 16 bytes, tokens int32, size) -> keys of all full blocks, a tuple of bytes */
static PyObject *block_hashes(PyObject *self, PyObject *args) {
    OWNED Py_buffer parent = {0}, tokens = {0};
    long long size;
    if (!PyArg_ParseTuple(args, "y*y*L", &parent, &tokens, &size)) return NULL;
    Py_ssize_t width = 4 * size, n = size > 0 ? tokens.len / width : 0;
    PyObject *keys = parent.len == BLAKE2B_DIGEST && size > 0 ? PyTuple_New(n) : NULL;
    if (!keys && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a key has 16 bytes and a block at least one token");
    const uint8_t *before = parent.buf;
    for (Py_ssize_t i = 0; keys && i < n; ++i) {
        PyObject *key = PyBytes_FromStringAndSize(NULL, BLAKE2B_DIGEST);
        if (!key) Py_CLEAR(keys);
        if (!key) break;
        uint8_t *out = (uint8_t *)PyBytes_AS_STRING(key);
        const int32_t *block = (const int32_t *)tokens.buf + i * size;
        blake2b_16(out, before, BLAKE2B_DIGEST, block, width + 4 * rest_of_digest(block, size, (tokens.len - (i + 1) * width) / 4));
        PyTuple_SET_ITEM(keys, i, key);
        before = out;
    }
    return keys;
}

#define STRETCH 256 /* tokens that are compared at once */

static Py_ssize_t common_tokens(const Py_buffer *one, const Py_buffer *other) {
    const int32_t *a = one->buf, *b = other->buf;
    Py_ssize_t size = least(one->len, other->len) / 4, at = 0;
    for (Py_ssize_t stretch = STRETCH; stretch; stretch /= 16)
        while (at + stretch <= size && !memcmp(a + at, b + at, stretch * sizeof *a)) at += stretch;
    return at;
}

/* (common, place) into a list of such, behind those that have as many or more in common. -1 on an error. */
static int put_by_common(PyObject *found, Py_ssize_t common, Py_ssize_t place) {
    Py_ssize_t to = PyList_GET_SIZE(found);
    while (to && PyLong_AsSsize_t(PyTuple_GET_ITEM(PyList_GET_ITEM(found, to - 1), 0)) < common) --to;
    PyObject *both = Py_BuildValue("nn", common, place);
    int failed = !both || PyList_Insert(found, to, both) < 0;
    Py_XDECREF(both);
    return failed ? -1 : 0;
}

/* most_alike(one: int32 bytes, others: a list of them) -> (how many leading tokens of one another has too, its place), most first */
static PyObject *most_alike(PyObject *self, PyObject *args) {
    OWNED Py_buffer one = {0};
    PyObject *others;
    if (!PyArg_ParseTuple(args, "y*O!", &one, &PyList_Type, &others)) return NULL;
    PyObject *found = PyList_New(0);
    for (Py_ssize_t place = 0; found && place < PyList_GET_SIZE(others); ++place) {
        OWNED Py_buffer other = {0};
        int failed = PyObject_GetBuffer(PyList_GET_ITEM(others, place), &other, PyBUF_SIMPLE);
        if (failed || put_by_common(found, common_tokens(&one, &other), place)) Py_CLEAR(found);
    }
    return found;
}

/* goes_on_alike(one, other: int32 bytes, at) -> whether half of the tokens from `at` on are the same at the same places */
static PyObject *goes_on_alike(PyObject *self, PyObject *args) {
    OWNED Py_buffer one = {0}, other = {0};
    Py_ssize_t at;
    if (!PyArg_ParseTuple(args, "y*y*n", &one, &other, &at)) return NULL;
    const int32_t *a = one.buf, *b = other.buf;
    Py_ssize_t size = least(one.len, other.len) / 4, rest = size - at, same = 0;
    if (at < 0) return PyErr_Format(PyExc_ValueError, "a place outside of a history");
    for (Py_ssize_t end; at < size && 2 * same < rest; at = end) {
        end = least(at + STRETCH, size);
        if (!memcmp(a + at, b + at, (end - at) * sizeof *a)) same += end - at;
        else
            for (Py_ssize_t each = at; each < end; ++each) same += a[each] == b[each];
    }
    return PyBool_FromLong(2 * same >= rest);
}

/* One page gets its name: the block's key, reported apart by its group. -1 on an error. */
static int name_page(uint8_t *key, Py_ssize_t group, int32_t page, PyObject *pairs) {
    key[BLAKE2B_DIGEST - 1] ^= (uint8_t)group;
    PyObject *pair = Py_BuildValue("y#i", key, (Py_ssize_t)BLAKE2B_DIGEST, (int)page);
    key[BLAKE2B_DIGEST - 1] ^= (uint8_t)group;
    int failed = !pair || PyList_Append(pairs, pair) < 0;
    Py_XDECREF(pair);
    return failed ? -1 : 0;
}

/* The next block of row r, a full one, is named: its (key, page) of each group appended, unless the group has given it back.
   -1 on an error. */
static int hash_one_block(int64_t *c, Py_ssize_t rows, Py_ssize_t r, int64_t size, const Py_buffer *tokens,
                    const Py_buffer *tables, const Py_buffer *windows, PyObject *pairs) {
    int64_t hashed_blocks = FIELD(c, HASHED_BLOCKS, rows)[r], computed = FIELD(c, COMPUTED, rows)[r];
    Py_ssize_t groups = windows->len / 8;
    int64_t table = FIELD(c, TABLE_AT, rows)[r] + hashed_blocks * groups;
    uint8_t key[BLAKE2B_DIGEST];
    if (table < 0 || table + groups > tables->len / 4 || !row_hash_block(c, rows, r, size, tokens->buf, tokens->len / 4, key)) {
        PyErr_SetString(PyExc_ValueError, "a row's next block is outside the arenas");
        return -1;
    }
    for (Py_ssize_t g = 0; g < groups; ++g) {
        int64_t window = ((const int64_t *)windows->buf)[g], unseen = computed - window + 1;
        if (window && unseen >= (hashed_blocks + 1) * size) continue;
        if (name_page(key, g, ((const int32_t *)tables->buf)[table + g], pairs) < 0) return -1;
    }
    return 0;
}

/* All full blocks are hashed_blocks, round by round; their (key, page), or NULL with an exception set. */
static PyObject *hash_all_blocks(int64_t *c, Py_ssize_t rows, const int64_t *done, Py_ssize_t ended_count, int64_t size, const Py_buffer *tokens,
                          const Py_buffer *tables, const Py_buffer *windows) {
    const int64_t *known = FIELD(c, KNOWN, rows), *computed = FIELD(c, COMPUTED, rows);
    const int64_t *done_blocks = FIELD(c, HASHED_BLOCKS, rows);
    PyObject *pairs = PyList_New(0);
    int hashed_blocks = pairs ? 1 : -1;
    while (hashed_blocks > 0) {
        hashed_blocks = 0;
        for (Py_ssize_t r = 0, e = 0; r < rows; ++r) {
            int is_done = e < ended_count && done[e] == r; /* rows come in rising order */
            e += is_done;
            if (least(known[r] - is_done, computed[r]) < (done_blocks[r] + 1) * size) continue;
            hashed_blocks = hash_one_block(c, rows, r, size, tokens, tables, windows, pairs) < 0 ? -1 : 1;
            if (hashed_blocks < 0) break;
        }
    }
    if (hashed_blocks < 0) Py_CLEAR(pairs);
    return pairs;
}

/* hash_full_blocks(cells writable, ended rows int64, tokens arena int32, tables arena int32, size, windows int64[groups] as
   bytes) -> [(key, page)], round by round: every row's next full block, then the one after it */
static PyObject *hash_full_blocks(PyObject *self, PyObject *args) {
    OWNED Py_buffer cells = {0}, ended = {0}, tokens = {0}, tables = {0}, windows = {0};
    long long size;
    if (!PyArg_ParseTuple(args, "w*y*y*y*Ly*", &cells, &ended, &tokens, &tables, &size, &windows)) return NULL;
    return hash_all_blocks(cells.buf, rows_of(&cells), ended.buf, ended.len / 8, size, &tokens, &tables, &windows);
}

/* step_entries(cells, starts int64[R], tokens int64[R], out int64[4][R]: ids, preemption_counts, starts, counts; out samples bool[R])
   -> rows with tokens, whose entries come first in each of the five */
static PyObject *step_entries(PyObject *self, PyObject *args) {
    OWNED Py_buffer cells = {0}, starts = {0}, tokens = {0}, entries = {0}, samples = {0};
    if (!PyArg_ParseTuple(args, "y*y*y*w*w*", &cells, &starts, &tokens, &entries, &samples)) return NULL;
    Py_ssize_t rows = rows_of(&cells);
    if (too_small(&starts, rows * 8) || too_small(&tokens, rows * 8) || too_small(&entries, 4 * rows * 8) || too_small(&samples, rows))
        return NULL;
    return PyLong_FromSsize_t(rows_step_entries(cells.buf, rows, starts.buf, tokens.buf, entries.buf, rows, samples.buf));
}

/* lawful(cells, size, spare tokens) -> False if a row computed more than it knows, hashed_blocks too much, is at its limit, or holds too few
   or too many blocks: laws S2 and M4 of laws.py in one pass, which name what is wrong */
static PyObject *lawful(PyObject *self, PyObject *args) {
    OWNED Py_buffer cells = {0};
    long long size, spare;
    if (!PyArg_ParseTuple(args, "y*LL", &cells, &size, &spare)) return NULL;
    return PyBool_FromLong(rows_lawful(cells.buf, rows_of(&cells), size, spare));
}

/* bounds(entries int64[4][n], samples bool[n]) -> sum, least and greatest of the token counts, rows that sample */
static PyObject *bounds(PyObject *self, PyObject *args) {
    OWNED Py_buffer entries = {0}, samples = {0};
    if (!PyArg_ParseTuple(args, "y*y*", &entries, &samples)) return NULL;
    Py_ssize_t n = entries.len / 32;
    if (too_small(&samples, n)) return NULL;
    Bounds b = step_bounds((const int64_t *)entries.buf + 3 * n, samples.buf, n);
    return Py_BuildValue("LLLn", (long long)b.sum, (long long)b.smallest, (long long)b.largest, b.sampling);
}

/* match_samples(cells, entries int64[4][E], samples bool[E], sampled int32 bytes, eos int64, out int64[2][n]: rows, places;
          out bool[2][n]: stopped, at limit) -> (a row has stop tokens of its own, how many end), or None where some of
   the step's requests have left, or the tokens are not what was asked for */
static PyObject *match_samples(PyObject *self, PyObject *args) {
    OWNED Py_buffer cells = {0}, entries = {0}, samples = {0}, sampled = {0}, eos = {0}, places = {0}, ends = {0};
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*w*w*", &cells, &entries, &samples, &sampled, &eos, &places, &ends)) return NULL;
    Py_ssize_t asked = samples.len, given = sampled.len / 4;
    if (entries.len < 4 * asked * 8 || places.len < 2 * given * 8 || ends.len < 2 * given) Py_RETURN_NONE;
    const int64_t *ids = entries.buf;
    Step step = {ids, ids + asked, samples.buf, asked};
    Taken taken = {places.buf, (int64_t *)places.buf + given, ends.buf, (char *)ends.buf + given};
    int own = 0, ended = 0;
    if (!rows_match_samples(cells.buf, rows_of(&cells), &step, sampled.buf, given, eos.buf, eos.len / 8, &taken, &own, &ended)) Py_RETURN_NONE;
    return Py_BuildValue("ii", own, ended);
}

/* take_tokens(cells, out cells, rows int64[n], tokens int32[n], arena int32 writable) -> False if a history is full. A row that
   takes several tokens has its places side by side. */
static PyObject *take_tokens(PyObject *self, PyObject *args) {
    OWNED Py_buffer cells = {0}, out = {0}, which = {0}, tokens = {0}, arena = {0};
    if (!PyArg_ParseTuple(args, "y*w*y*y*w*", &cells, &out, &which, &tokens, &arena)) return NULL;
    Py_ssize_t rows = rows_of(&cells), n = which.len / 8;
    int fits = out.len < cells.len || tokens.len < n * 4 ? -1 : rows_fit(cells.buf, rows, which.buf, n, arena.len / 4);
    if (fits > 0) rows_take_tokens(memcpy(out.buf, cells.buf, cells.len), rows, which.buf, n, tokens.buf, arena.buf);
    if (fits < 0) return PyErr_Format(PyExc_ValueError, "a token has no place in the histories");
    return PyBool_FromLong(fits);
}

#include "drafts.h"
#include "turn.h"

static PyMethodDef functions[] = {
    METHOD("expected", expected, "New tokens and blocks of each row under the budget; their sums."),
    METHOD("needed", needed, "Blocks each row lacks; their sum."),
    METHOD("advance", advance, "The matrix after a plan; how many rows it schedules."),
    METHOD("write_tables", write_tables, "New blocks into the rows' tables."),
    METHOD("array_hash", array_hash, "The sum that tells arrays apart."),
    METHOD("exchange", exchange, "Values into an array; the change of its sum."),
    METHOD("oldest", oldest, "The oldest free blocks; the queue's head behind them."),
    METHOD("released", released, "Blocks with one holder less; how many are freed."),
    METHOD("block_hashes", block_hashes, "Keys of the full blocks of a history."),
    METHOD("most_alike", most_alike, "How many leading tokens of a history others have too, most first."),
    METHOD("goes_on_alike", goes_on_alike, "Whether two histories have half of what follows in common."),
    METHOD("hash_full_blocks", hash_full_blocks, "Full blocks without a name get their keys; the pairs."),
    METHOD("step_entries", step_entries, "The entries of a step in flight; their number."),
    METHOD("lawful", lawful, "Whether the rows keep the cheap laws."),
    METHOD("bounds", bounds, "Bounds of a step's token counts."),
    METHOD("match_samples", match_samples, "A step's samples matched with its rows, or None."),
    METHOD("take_tokens", take_tokens, "The matrix after a commit; False if a history is full."),
    METHOD("drafts", drafts, "The drafts of the expected plan; their sum."),
    METHOD("match_runs", match_runs, "The samples of a step with drafts matched with its rows, or None."),
    METHOD("settle", settle, "Drafts that were not kept, taken back; how many were computed and kept."),
    METHOD("turn", turn, "A steady commit and the plan behind it, or None."),
    METHOD("turns", turns, "Steady turns, one behind the other, or None."),
    NO_METHOD,
};

static const Constant constants[] = {
    COLUMNS_CONSTANTS DRAFTS_CONSTANTS CONSTANT(WORK_LINES) NO_CONSTANT,
};

static PyModuleDef module = MODULE("_columns", "Compiled implementation of columns_numpy.", functions);

PyMODINIT_FUNC PyInit__columns(void) { return begin_module(&module, constants, NULL); }
