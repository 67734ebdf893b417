/* A steady turn in one pass: a commit after which everybody goes on, and the expected plan behind it. For `_columns.c` alone,
   whose parts it is made of; columns_numpy.turn says what it means. Writes what it is handed to be filled, and places of the arenas
   that no state may read yet, so a turn that turns out not to be steady has changed nothing. */

#ifndef VNEXT_TURN_H
#define VNEXT_TURN_H

typedef struct {
    Py_buffer before, drafting, entries, samples, sampled, eos, histories, tables, queue, status, cells, entries_out, asks, work, blocks;
    long long budget, threshold, size, spare, microbatches, step;
    Drafting by;
    Py_ssize_t free, head, used, rows, count;
    int caches, whole_prompts;
} Turn;

/* Lines of `work`: the rows that take a token (for the caller), then what is needed on the way. */
enum { TAKERS, PLACES, ENDS, TOKENS, NEED, STARTS, WORK_LINES };

static const Py_buffer NO_WINDOW = {.buf = (int64_t[1]){0}, .len = 8};

static int64_t *line_of(const Turn *t, int line) { return (int64_t *)t->work.buf + line * t->rows; }

static int turn_has_room(const Turn *t) {
    return t->rows > 0 && t->size > 0 && (!t->drafting.len || t->drafting.len >= DRAFTING_FIELD_COUNT * t->rows * 8) && t->head >= 0 && t->entries.len == 4 * t->samples.len * 8 && t->samples.len <= t->rows &&
           t->sampled.len / 4 <= t->rows && t->cells.len >= t->before.len && t->entries_out.len >= 4 * t->rows * 8 &&
           t->asks.len >= t->rows && t->work.len >= WORK_LINES * t->rows * 8 && t->blocks.len >= t->rows * 4;
}

/* The commit: 0 unless the step's requests are all there, nobody ends, and the histories have places. */
static int turn_commit(Turn *t) {
    Py_ssize_t asked = t->samples.len, given = t->sampled.len / 4;
    const int64_t *ids = t->entries.buf;
    char *ends = (char *)line_of(t, ENDS);
    Step step = {ids, ids + asked, t->samples.buf, asked};
    Taken taken = {line_of(t, TAKERS), line_of(t, PLACES), ends, ends + t->rows};
    int own, ended;
    if (!rows_match_samples(t->before.buf, t->rows, &step, t->sampled.buf, given, t->eos.buf, t->eos.len / 8, &taken, &own, &ended)) return 0;
    if (own || ended || rows_fit(t->before.buf, t->rows, taken.rows, given, t->histories.len / 4) <= 0) return 0;
    memcpy(t->cells.buf, t->before.buf, t->before.len);
    rows_take_tokens(t->cells.buf, t->rows, taken.rows, given, t->sampled.buf, t->histories.buf);
    return 1;
}

/* The expected plan: its tokens, 0 unless there are some, without drafts, and blocks for all of them are free. *lacks: blocks taken. */
static int64_t turn_plan(Turn *t, int64_t *lacks) {
    int64_t *c = t->cells.buf, *tokens = line_of(t, TOKENS), *need = line_of(t, NEED), *starts = line_of(t, STARTS);
    int64_t total = rows_expected(c, t->rows, tokens, need, t->budget, t->threshold, t->size, t->microbatches, t->step, lacks);
    if (*lacks > t->free || *lacks > t->rows) return 0;
    if (t->drafting.len && rows_drafts(c, t->drafting.buf, t->rows, tokens, starts, t->by, t->budget)) return 0;
    if (find_oldest(&t->queue, &t->status, &t->head, t->used, t->blocks.buf, *lacks) < *lacks) return 0;
    memcpy(starts, FIELD(c, COMPUTED, t->rows), t->rows * sizeof *starts);
    rows_advance(c, t->rows, tokens, need);
    if (!put_pages(c, t->rows, need, t->blocks.buf, *lacks, t->tables.buf, t->tables.len / 4, 1)) return 0;
    t->count = rows_step_entries(c, t->rows, starts, tokens, t->entries_out.buf, t->rows, t->asks.buf);
    return total;
}

/* Law S1 of the new step, as laws.py has it. */
static int turn_step_holds(const Turn *t, int64_t total) {
    Bounds b = step_bounds((const int64_t *)t->entries_out.buf + 3 * t->rows, t->asks.buf, t->count);
    return b.sum == total && b.sum <= t->budget && b.smallest >= 1 && (!t->threshold || b.largest <= t->threshold) &&
           (!t->whole_prompts || b.sampling == t->count);
}

static PyObject *turn_names(Turn *t) {
    if (!t->caches) return PyList_New(0);
    return hash_all_blocks(t->cells.buf, t->rows, NULL, 0, t->size, &t->histories, &t->tables, &NO_WINDOW);
}

/* The whole turn, None if it is not steady or breaks a law, NULL with an exception set. */
static PyObject *turn_taken(Turn *t) {
    int64_t lacks = 0, total = 0;
    PyObject *committed = NULL, *planned = NULL, *result = NULL;
    if (!turn_has_room(t) || !turn_commit(t)) Py_RETURN_NONE;
    if (!(committed = turn_names(t))) return NULL;
    int holds = rows_lawful(t->cells.buf, t->rows, t->size, t->spare) && (total = turn_plan(t, &lacks)) > 0;
    if (holds && (planned = turn_names(t))) {
        holds = rows_lawful(t->cells.buf, t->rows, t->size, t->spare) && turn_step_holds(t, total);
        if (holds) result = Py_BuildValue("nLLnOO", t->count, (long long)total, (long long)lacks, t->head, committed, planned);
    }
    Py_DECREF(committed);
    Py_XDECREF(planned);
    if (!result && !PyErr_Occurred()) Py_RETURN_NONE;
    return result;
}

/* turn((cells, drafting int64[2][R] or empty, entries int64[4][E], samples bool[E], sampled int32, eos int64),
        (histories int32 writable, tables int32 writable, queue int32, status int64[N]),
        (out cells, out entries int64[4][R], out asks bool[R], out work int64[WORK_LINES][R], out blocks int32[R]),
        (budget, threshold, size, free, head, used, caches, whole prompts, microbatches, the plan's step),
        (most drafts, row cost, step cost, row cost of many, spare tokens) or ())
   -> (entries, tokens, blocks taken, the queue's head, names of the commit, names of the plan), or None */
static PyObject *turn(PyObject *self, PyObject *args) {
    Turn t = {0};
    PyObject *step, *stores, *out, *numbers, *by, *result = NULL;
    if (PyArg_ParseTuple(args, "O!O!O!O!O!", TUPLE(&step), TUPLE(&stores), TUPLE(&out), TUPLE(&numbers), TUPLE(&by)) &&
        PyArg_ParseTuple(step, "y*y*y*y*y*y*", &t.before, &t.drafting, &t.entries, &t.samples, &t.sampled, &t.eos) &&
        PyArg_ParseTuple(stores, "w*w*y*y*", &t.histories, &t.tables, &t.queue, &t.status) &&
        PyArg_ParseTuple(out, "w*w*w*w*w*", &t.cells, &t.entries_out, &t.asks, &t.work, &t.blocks) &&
        PyArg_ParseTuple(numbers, "LLLnnnppLL", &t.budget, &t.threshold, &t.size, &t.free, &t.head, &t.used, &t.caches,
                         &t.whole_prompts, &t.microbatches, &t.step) &&
        (!PyTuple_GET_SIZE(by) ||
         PyArg_ParseTuple(by, "LLLLL", &t.by.most, &t.by.row_cost, &t.by.step_cost, &t.by.row_cost_many, &t.spare))) {
        t.rows = rows_of(&t.before);
        result = turn_taken(&t);
    }
    RELEASE(&t.before, &t.drafting, &t.entries, &t.samples, &t.sampled, &t.eos, &t.histories, &t.tables, &t.queue, &t.status, &t.cells, &t.entries_out,
            &t.asks, &t.work, &t.blocks);
    return result;
}

#endif
