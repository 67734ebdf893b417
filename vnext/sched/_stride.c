/* Strides: many steady turns in one call, on the stores that stride.py hands over. `schedule` and `reduce` are the oracle: each
   part of a turn is theirs, from the same headers and in the same order.

   Owns nothing and keeps nothing; writes into what it is handed, and into nothing before the turn is known to be steady that
   far. Knows one group of layers without a window. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../state/columns.h"
#include "../state/names.h"

enum { HELD = -1 };
enum { DONE, REFUSED, LAWLESS };
static const char NO_PLACE[] = "a block has no place in the tables";

typedef struct {
    Py_buffer cells, work, history, tables, status, queue, eos, samples, entries, asks, counts, spans;
    Table names;
    Py_ssize_t rows, width, used, head, free, kept, at, depth, turns_max, turns, plans;
    long long sum, budget, threshold, size, tokens_max;
    int caches, whole_prompts;
    PyObject *may_admit;
} Stride;

/* ---- blocks ---- */

/* The oldest free block, held once from here on, its name forgotten; -1 with an exception set. As pool.take. */
static Py_ssize_t take_block(Stride *s) {
    const int32_t *queue = s->queue.buf;
    int64_t *status = s->status.buf;
    Py_ssize_t block_count = s->status.len / 8;
    while (s->head < s->used) {
        Py_ssize_t place = s->head++, block = queue[place];
        if (block < 0 || block >= block_count || status[block] != place) continue;
        s->sum = (long long)((uint64_t)s->sum + mixed_one(block, (uint64_t)HELD) - mixed_one(block, (uint64_t)place));
        status[block] = HELD;
        s->free -= 1;
        if (!s->kept) return block;
        int gone = has_block(&s->names, block) ? forget_key(&s->names, block) : -1;
        s->kept -= gone > 0;
        return gone < 0 ? -1 : block;
    }
    PyErr_SetString(PyExc_ValueError, "the queue holds fewer blocks than counted");
    return -1;
}

/* Every row gets the blocks it lacks, behind those it has; BLOCKS counts them already. As write_tables. */
static int give_blocks(Stride *s, const int64_t *need) {
    int64_t *c = s->cells.buf, *sum = FIELD(c, TABLE_SUM, s->rows);
    int32_t *tables = s->tables.buf;
    Py_ssize_t places = s->tables.len / 4;
    for (Py_ssize_t r = 0; r < s->rows; ++r)
        for (int64_t j = need[r]; j > 0; --j) {
            int64_t place = FIELD(c, BLOCKS, s->rows)[r] - j, at = FIELD(c, TABLE_AT, s->rows)[r] + place;
            Py_ssize_t block = take_block(s);
            if (block < 0) return 0;
            if (at < 0 || at >= places) return PyErr_SetString(PyExc_ValueError, NO_PLACE), 0;
            sum[r] = (int64_t)((uint64_t)sum[r] + mixed_one((uint64_t)place, (uint64_t)block));
            tables[at] = (int32_t)block;
        }
    return 1;
}

/* The next block of row r gets its name, unless the key has a block already; 0 with an exception set. */
static int name_block(Stride *s, Py_ssize_t r) {
    int64_t *c = s->cells.buf, table = FIELD(c, TABLE_AT, s->rows)[r] + FIELD(c, SEALED, s->rows)[r];
    uint8_t bytes[BLAKE2B_DIGEST];
    if (table < 0 || table >= s->tables.len / 4 || !row_seal(c, s->rows, r, s->size, s->history.buf, s->history.len / 4, bytes))
        return PyErr_SetString(PyExc_ValueError, "a row's next block is outside the arenas"), 0;
    Py_ssize_t block = ((const int32_t *)s->tables.buf)[table];
    PyObject *key = PyBytes_FromStringAndSize((const char *)bytes, sizeof bytes), *number = PyLong_FromSsize_t(block);
    int named = key && number && has_block(&s->names, block) ? offer_key(&s->names, key, number, block) : -1;
    Py_XDECREF(key);
    Py_XDECREF(number);
    return named >= 0;
}

/* All full blocks get names, round by round: every row's next one, then the one after it. As seal. */
static int name_full(Stride *s) {
    const int64_t *c = s->cells.buf, *known = FIELD(c, KNOWN, s->rows), *computed = FIELD(c, COMPUTED, s->rows);
    const int64_t *sealed = FIELD(c, SEALED, s->rows);
    for (int some = s->caches; some;) {
        some = 0;
        for (Py_ssize_t r = 0; r < s->rows; ++r) {
            if (least(known[r], computed[r]) < (sealed[r] + 1) * s->size) continue;
            if (!name_block(s, r)) return 0;
            some = 1;
        }
    }
    return 1;
}

/* ---- steps in flight: the i-th one of a stride, those before it counted, is in slot i % depth ---- */

static int64_t *entries_of(const Stride *s, Py_ssize_t i) { return (int64_t *)s->entries.buf + i % s->depth * 4 * s->width; }
static char *asks_of(const Stride *s, Py_ssize_t i) { return (char *)s->asks.buf + i % s->depth * s->width; }
static int64_t *counts_of(const Stride *s, Py_ssize_t i) { return (int64_t *)s->counts.buf + i % s->depth * 2; }

/* Law S1 of a step, as laws.py has it. */
static int step_holds(const Stride *s, Py_ssize_t i) {
    const int64_t *count = counts_of(s, i);
    Bounds b = step_bounds(entries_of(s, i) + 3 * s->width, asks_of(s, i), count[0]);
    return b.sum == count[1] && b.sum <= s->tokens_max && b.smallest >= 1 && (!s->threshold || b.largest <= s->threshold) &&
           (!s->whole_prompts || b.sampling == count[0]);
}

/* ---- turns ---- */

/* Whether nobody can be admitted: 1, 0 if the scheduler has to look, -1 with an exception set. */
static int keeps_out(const Stride *s, int64_t budget, int64_t free) {
    if (s->may_admit == Py_None || budget <= 0) return 1;
    PyObject *answer = PyObject_CallFunction(s->may_admit, "LL", (long long)budget, (long long)free);
    int may = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return may < 0 ? -1 : !may;
}

/* The plan of one turn, as fold_step_planned: 1, 0 if it is not the expected one, -1 with an exception set. */
static int plan(Stride *s) {
    int64_t *tokens = s->work.buf, *need = tokens + s->rows, *starts = need + s->rows, *c = s->cells.buf, lacks;
    int64_t total = rows_expected(c, s->rows, tokens, need, s->budget, s->threshold, s->size, &lacks);
    if (!total || lacks > s->free) return 0;
    int kept_out = keeps_out(s, s->budget - total, s->free - lacks);
    if (kept_out <= 0) return kept_out;
    memcpy(starts, FIELD(c, COMPUTED, s->rows), s->rows * sizeof *starts);
    rows_advance(c, s->rows, tokens, need);
    if (lacks && !give_blocks(s, need)) return -1;
    Py_ssize_t i = s->depth - 1 + s->plans++;
    counts_of(s, i)[0] = rows_flight(c, s->rows, starts, tokens, entries_of(s, i), s->width, asks_of(s, i));
    counts_of(s, i)[1] = total;
    return name_full(s) ? 1 : -1;
}

/* The commit of the oldest step, as fold_step_committed: 1, 0 if it is not steady, -1 with an exception set. */
static int commit(Stride *s) {
    const int64_t *entries = entries_of(s, s->turns), count = counts_of(s, s->turns)[0];
    Step step = {entries, entries + s->width, asks_of(s, s->turns), count};
    int64_t *rows = s->work.buf;
    char *ends = (char *)(rows + 2 * s->width);
    Taken taken = {rows, rows + s->width, ends, ends + s->width};
    Py_ssize_t asked = 0;
    for (Py_ssize_t r = 0; r < count; ++r) asked += step.samples[r] != 0;
    if (s->at + asked > s->samples.len / 4) s->at = 0;
    const int32_t *sampled = (const int32_t *)s->samples.buf + s->at;
    int32_t *span = (int32_t *)s->spans.buf + 2 * s->turns;
    span[0] = (int32_t)s->at;
    span[1] = (int32_t)asked;
    s->at += asked;
    int own, ended;
    if (!rows_settle(s->cells.buf, s->rows, &step, sampled, asked, s->eos.buf, s->eos.len / 8, &taken, &own, &ended)) return 0;
    if (own || ended) return 0;
    int fits = rows_fit(s->cells.buf, s->rows, rows, asked, s->history.len / 4);
    if (fits < 0) PyErr_SetString(PyExc_ValueError, "a token has no place in the histories");
    if (fits <= 0) return fits;
    rows_take_tokens(s->cells.buf, s->rows, rows, asked, sampled, s->history.buf);
    return name_full(s) ? 1 : -1;
}

/* Turns until one is not steady; how it ended, or -1 with an exception set. */
static int take_turns(Stride *s) {
    while (s->turns < s->turns_max) {
        int planned = plan(s);
        if (planned <= 0) return planned < 0 ? -1 : DONE;
        int holds = rows_lawful(s->cells.buf, s->rows, s->size) && step_holds(s, s->depth - 1 + s->turns);
        int committed = holds ? commit(s) : 0;
        if (committed < 0) return -1;
        if (!committed) return holds ? REFUSED : LAWLESS;
        s->turns += 1;
        if (!rows_lawful(s->cells.buf, s->rows, s->size)) return LAWLESS;
    }
    return DONE;
}

/* Whether all that turns write has its size: everything else is checked where it is used. */
static int has_room(const Stride *s) {
    Py_ssize_t rows = s->width, depth = s->depth;
    int room = s->rows > 0 && rows >= s->rows && depth > 0 && s->size > 0 && s->turns_max >= 0 && s->at >= 0 && s->head >= 0 &&
               s->used <= s->queue.len / 4 && s->work.len >= 3 * rows * 8 && s->entries.len >= depth * 4 * rows * 8 &&
               s->asks.len >= depth * rows && s->counts.len >= depth * 16 && s->spans.len >= s->turns_max * 8 &&
               s->samples.len / 4 >= rows;
    for (Py_ssize_t i = 0; room && i < depth - 1; ++i) room = counts_of(s, i)[0] >= 0 && counts_of(s, i)[0] <= rows;
    if (!room) PyErr_SetString(PyExc_ValueError, "an array is too short for a stride");
    return room;
}

/* run(stores, steps, settings) -> (how it ended, commits, plans, free, sum, head, kept, place in the samples)
     stores    cells, history, tables, status, queue, its places used, head, free, kept, sum, blocks of names, keys of blocks
     steps     int64[3][W] of scratch, eos int64, samples int32, place in them, entries int64[depth][4][W], who samples
               bool[depth][W], (rows, tokens) int64[depth][2], (place, samples) of each commit int32[turns][2]
     settings  depth, W (the most rows of a step), turns, budget, threshold, block size, caches, whole prompts, may_admit(budget, free) or None */
static PyObject *run(PyObject *self, PyObject *args) {
    Stride s = {0};
    if (!PyArg_ParseTuple(
            args, "(w*w*w*w*y*nnnnKOO)(w*y*y*nw*w*w*w*)(nnnLLLppO)", &s.cells, &s.history, &s.tables, &s.status, &s.queue,
            &s.used, &s.head, &s.free, &s.kept, &s.sum, &s.names.blocks, &s.names.keys, &s.work, &s.eos, &s.samples, &s.at,
            &s.entries, &s.asks, &s.counts, &s.spans, &s.depth, &s.width, &s.turns_max, &s.budget, &s.threshold, &s.size, &s.caches,
            &s.whole_prompts, &s.may_admit))
        return NULL;
    s.rows = s.cells.len / (Py_ssize_t)sizeof(int64_t) / FIELD_COUNT;
    s.tokens_max = s.budget;
    int ended = is_table(&s.names) && has_room(&s) ? take_turns(&s) : -1;
    Py_buffer *all[] = {&s.cells, &s.work, &s.history, &s.tables, &s.status, &s.queue, &s.eos, &s.samples, &s.entries, &s.asks,
                        &s.counts, &s.spans};
    for (size_t i = 0; i < sizeof all / sizeof *all; ++i) PyBuffer_Release(all[i]);
    if (ended < 0) return NULL;
    return Py_BuildValue("innnKnnn", ended, s.turns, s.plans, s.free, (unsigned long long)s.sum, s.head, s.kept, s.at);
}

static PyMethodDef functions[] = {
    {"run", run, METH_VARARGS, "Steady turns, until one is not."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_stride", "Steady turns, compiled.", -1, functions};

PyMODINIT_FUNC PyInit__stride(void) {
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddStringConstant(made, "LAYOUT", LAYOUT) < 0) Py_CLEAR(made);
    return made;
}
