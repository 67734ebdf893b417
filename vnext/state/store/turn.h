/* A steady turn in one pass: a commit after which everybody goes on, and the expected plan behind it; and several of them, one
   behind the other, with a plan alone before them and a commit alone behind them, after which rows may have ended. For `_columns.c` alone, whose parts it is made of; columns_numpy.turn and turns say what they mean. Writes what it is handed to be filled, and places of the arenas
   that no state may read yet, so a turn that turns out not to be steady has changed nothing. */

#ifndef VNEXT_TURN_H
#define VNEXT_TURN_H

typedef struct {
    Py_buffer before, drafting, entries, samples, sampled, eos, histories, tables, queue, status, cells, entries_out, asks, work, blocks;
    long long budget, threshold, size, spare, microbatches, step, waits, slack;
    Drafting by;
    Py_ssize_t free, head, used, rows, count, width, out_width, named, alive, gone; /* widths: of a line of `entries` and `entries_out`; named:
                                                                                 blocks that have got names; alive: who takes a token; gone: who ends */
    int caches, whole_prompts, commits, plans, drops; /* the halves that there are; drops: samples of requests that have left are none */
} Turn;

/* Lines of `work`: the rows that take a token and those that end (for the caller), then what is needed on the way. */
enum { TAKERS, GONE, ENDS, TOKENS, NEED, STARTS, WORK_LINES };

static const Py_buffer NO_WINDOW = {.buf = (int64_t[1]){0}, .len = 8};

static int64_t *line_of(const Turn *t, int line) { return (int64_t *)t->work.buf + line * t->rows; }

static int turn_has_room(const Turn *t) {
    return t->rows > 0 && t->size > 0 && (!t->drafting.len || t->drafting.len >= DRAFTING_FIELD_COUNT * t->rows * 8) && t->head >= 0 && t->entries.len == 4 * t->width * 8 && t->samples.len <= t->width &&
           (t->drops || (t->width <= t->rows && t->sampled.len / 4 <= t->rows)) && t->cells.len >= t->before.len &&
           t->out_width >= t->rows && t->entries_out.len >= 4 * t->out_width * 8 && t->asks.len >= t->rows && t->work.len >= WORK_LINES * t->rows * 8 && t->blocks.len >= t->rows * 4;
}

/* The step and its tokens without the requests that have left, in lines of `work` that the plan fills later: 0 for a token that is none. */
static int turn_drop(Turn *t, Step *step, const int32_t **tokens, Py_ssize_t *given) {
    int64_t *ids = line_of(t, TOKENS), *preemptions = line_of(t, NEED);
    int32_t *left = (int32_t *)line_of(t, STARTS);
    char *asks = (char *)(left + t->rows);
    Py_ssize_t kept = 0, drawn = 0, taken = 0;
    for (Py_ssize_t e = 0, from = 0; e < step->count; ++e) {
        Py_ssize_t row = entry_row(t->before.buf, t->rows, step, e, from);
        int asked = step->samples[e] != 0;
        if (asked && (drawn >= *given || (*tokens)[drawn] < 0)) return 0;
        if (row < t->rows) {
            from = row + 1;
            ids[kept] = step->ids[e];
            preemptions[kept] = step->preemption_counts[e];
            asks[kept++] = (char)asked;
            if (asked) left[taken++] = (*tokens)[drawn];
        }
        drawn += asked;
    }
    if (drawn != *given) return 0;
    *step = (Step){ids, preemptions, asks, kept};
    *tokens = left;
    *given = taken;
    return 1;
}

/* The rows that end, in rising order, as those are that take a token. */
static void turn_note_gone(Turn *t, const Taken *taken, Py_ssize_t given) {
    for (Py_ssize_t n = 0; n < given; ++n)
        if (taken->stopped[n] || taken->at_limit[n]) line_of(t, GONE)[t->gone++] = taken->rows[n];
}

/* The commit: 0 unless the step's requests are all there (or may be dropped), nobody ends (unless no plan follows), and the histories
   have places. */
static int turn_commit(Turn *t) {
    Py_ssize_t given = t->sampled.len / 4;
    const int64_t *ids = t->entries.buf;
    const int32_t *tokens = t->sampled.buf;
    char *ends = (char *)line_of(t, ENDS);
    Step step = {ids, ids + t->width, t->samples.buf, t->samples.len};
    Taken taken = {line_of(t, TAKERS), line_of(t, GONE), ends, ends + t->rows};
    int own, ended;
    if (t->drops && !is_first_rows(t->before.buf, t->rows, &step) && !turn_drop(t, &step, &tokens, &given)) return 0;
    if (!rows_match_samples(t->before.buf, t->rows, &step, tokens, given, t->eos.buf, t->eos.len / 8, &taken, &own, &ended)) return 0;
    if (own || (ended && t->plans) || rows_fit(t->before.buf, t->rows, taken.rows, given, t->histories.len / 4) <= 0) return 0;
    rows_take_tokens(t->cells.buf, t->rows, taken.rows, given, tokens, t->histories.buf);
    t->alive = given;
    if (ended) turn_note_gone(t, &taken, given);
    return 1;
}

/* The expected plan: its tokens, 0 unless there are some, without drafts, blocks for all of them are free, and the first request that
   waits is certainly kept out (kept_out of sched/admission.py). *lacks: blocks taken. */
static int64_t turn_plan(Turn *t, int64_t *lacks) {
    int64_t *c = t->cells.buf, *tokens = line_of(t, TOKENS), *need = line_of(t, NEED), *starts = line_of(t, STARTS);
    int64_t total = rows_expected(c, t->rows, tokens, need, t->budget, t->threshold, t->size, t->microbatches, t->step, lacks);
    if (*lacks > t->free || *lacks > t->rows) return 0;
    if (t->waits && (total + t->waits > t->budget || t->named >= t->slack)) return 0;
    if (t->drafting.len && rows_drafts(c, t->drafting.buf, t->rows, tokens, starts, t->by, t->budget)) return 0;
    if (find_oldest(&t->queue, &t->status, &t->head, t->used, t->blocks.buf, *lacks) < *lacks) return 0;
    memcpy(starts, FIELD(c, COMPUTED, t->rows), t->rows * sizeof *starts);
    rows_advance(c, t->rows, tokens, need);
    if (!put_pages(c, t->rows, need, t->blocks.buf, *lacks, t->tables.buf, t->tables.len / 4, 1)) return 0;
    t->count = rows_step_entries(c, t->rows, starts, tokens, t->entries_out.buf, t->out_width, t->asks.buf);
    return total;
}

/* Law S1 of the new step, as laws.py has it. */
static int turn_step_holds(const Turn *t, int64_t total) {
    Bounds b = step_bounds((const int64_t *)t->entries_out.buf + 3 * t->out_width, t->asks.buf, t->count);
    return b.sum == total && b.sum <= t->budget && b.smallest >= 1 && (!t->threshold || b.largest <= t->threshold) &&
           (!t->whole_prompts || b.sampling == t->count);
}

static PyObject *turn_names(Turn *t) {
    if (!t->caches) return PyList_New(0);
    return hash_all_blocks(t->cells.buf, t->rows, line_of(t, GONE), t->gone, t->size, &t->histories, &t->tables, &NO_WINDOW);
}

/* 1 with the names of both events, 0 if the turn is not steady or breaks a law, -1 with an exception set. */
static int turn_once(Turn *t, int64_t *total, int64_t *lacks, PyObject **committed, PyObject **planned) {
    *committed = *planned = NULL;
    if (!turn_has_room(t)) return 0;
    memcpy(t->cells.buf, t->before.buf, t->before.len);
    if (t->commits && !turn_commit(t)) return 0;
    if (!(*committed = t->commits ? turn_names(t) : PyList_New(0))) return -1;
    t->named += PyList_GET_SIZE(*committed);
    int holds = (!t->commits || t->gone || rows_lawful(t->cells.buf, t->rows, t->size, t->spare)) && (!t->plans || (*total = turn_plan(t, lacks)) > 0);
    if (holds && !(*planned = t->plans ? turn_names(t) : PyList_New(0))) holds = -1;
    if (holds > 0 && t->plans) holds = rows_lawful(t->cells.buf, t->rows, t->size, t->spare) && turn_step_holds(t, *total);
    if (holds > 0) t->named += PyList_GET_SIZE(*planned);
    if (holds <= 0) Py_CLEAR(*committed);
    if (holds <= 0) Py_CLEAR(*planned);
    return holds;
}

static int turn_numbers(Turn *t, PyObject *numbers, PyObject *by) {
    return PyArg_ParseTuple(numbers, "LLLnnnppLLLL", &t->budget, &t->threshold, &t->size, &t->free, &t->head, &t->used, &t->caches,
                            &t->whole_prompts, &t->microbatches, &t->step, &t->waits, &t->slack) &&
           (!PyTuple_GET_SIZE(by) ||
            PyArg_ParseTuple(by, "LLLLL", &t->by.most, &t->by.row_cost, &t->by.step_cost, &t->by.row_cost_many, &t->spare));
}

/* turn((cells, drafting int64[2][R] or empty, entries int64[4][E], samples bool[E], sampled int32, eos int64),
        (histories int32 writable, tables int32 writable, queue int32, status int64[N]),
        (out cells, out entries int64[4][R], out asks bool[R], out work int64[WORK_LINES][R], out blocks int32[R]),
        (budget, threshold, size, free, head, used, caches, whole prompts, microbatches, the plan's step, waits, slack),
        (most drafts, row cost, step cost, row cost of many, spare tokens) or ())
   -> (entries, tokens, blocks taken, the queue's head, names of the commit, names of the plan), or None */
static PyObject *turn(PyObject *self, PyObject *args) {
    Turn t = {0};
    PyObject *step, *stores, *out, *numbers, *by, *committed = NULL, *planned = NULL, *result = NULL;
    if (PyArg_ParseTuple(args, "O!O!O!O!O!", TUPLE(&step), TUPLE(&stores), TUPLE(&out), TUPLE(&numbers), TUPLE(&by)) &&
        PyArg_ParseTuple(step, "y*y*y*y*y*y*", &t.before, &t.drafting, &t.entries, &t.samples, &t.sampled, &t.eos) &&
        PyArg_ParseTuple(stores, "w*w*y*y*", &t.histories, &t.tables, &t.queue, &t.status) &&
        PyArg_ParseTuple(out, "w*w*w*w*w*", &t.cells, &t.entries_out, &t.asks, &t.work, &t.blocks) && turn_numbers(&t, numbers, by)) {
        int64_t lacks = 0, total = 0;
        t.rows = t.out_width = rows_of(&t.before);
        t.width = t.samples.len;
        t.commits = t.plans = 1;
        int found = turn_once(&t, &total, &lacks, &committed, &planned);
        if (!found) result = Py_NewRef(Py_None);
        if (found > 0) result = Py_BuildValue("nLLnNN", t.count, (long long)total, (long long)lacks, t.head, committed, planned);
    }
    RELEASE(&t.before, &t.drafting, &t.entries, &t.samples, &t.sampled, &t.eos, &t.histories, &t.tables, &t.queue, &t.status, &t.cells, &t.entries_out,
            &t.asks, &t.work, &t.blocks);
    return result;
}

/* ---- several ---- */

/* What turns share: `all` has whole arrays, of which each turn is handed its own parts. Steps in flight are in `depth` + 1 slots of
   entries and asks; turn k commits that of slot k and plans that of the slot before, which is free. A plan that leads has the last
   slot but that one. `made` int64[n][4]: of each plan its entries and tokens, and of its commit the tokens and those that were taken. */
typedef struct {
    Turn all;
    Py_buffer made;
    Py_ssize_t depth, given, taken, drawn, calls; /* steps in flight before; pages taken, tokens committed, calls of turn_once */
    Py_ssize_t *counts;                           /* entries of each slot */
    PyObject *moves;
} Turns;

/* The steps in flight, of which each is (entries, asks), into their slots: 0 where one has no room. */
static int turns_begin(Turns *s, PyObject *in_flight) {
    Turn *all = &s->all;
    s->given = PyTuple_GET_SIZE(in_flight);
    Py_ssize_t slots = s->depth + 1, rows = all->out_width = all->entries_out.len / 32 / slots;
    if (!s->depth || s->depth < s->given || rows < all->rows || all->asks.len < slots * rows) return 0;
    s->counts = PyMem_Calloc(slots, sizeof *s->counts);
    for (Py_ssize_t k = 0; s->counts && k < s->given; ++k) {
        OWNED Py_buffer entries = {0}, asks = {0};
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(in_flight, k), "y*y*", &entries, &asks)) return 0;
        Py_ssize_t count = s->counts[k] = asks.len;
        if (count > rows || entries.len != 4 * count * 8) return 0;
        for (int line = 0; line < 4; ++line)
            memcpy((int64_t *)all->entries_out.buf + (4 * k + line) * rows, (int64_t *)entries.buf + line * count, count * 8);
        memcpy((char *)all->asks.buf + k * rows, asks.buf, count);
    }
    return s->counts != NULL;
}

/* Turn k is handed its parts of the arrays; 0 where tokens are missing. */
static int turns_hand(Turns *s, Turn *t, Py_ssize_t k) {
    const Turn *all = &s->all;
    Py_ssize_t rows = all->out_width, from = k % (s->depth + 1), to = (k + s->depth) % (s->depth + 1), given = 0;
    if (!t->commits) from = to = s->depth - 1; /* nothing is read of the one */
    t->width = rows;
    t->entries = (Py_buffer){.buf = (int64_t *)all->entries_out.buf + from * 4 * rows, .len = 4 * rows * 8};
    t->samples = (Py_buffer){.buf = (char *)all->asks.buf + from * rows, .len = s->counts[from]};
    t->entries_out = (Py_buffer){.buf = (int64_t *)all->entries_out.buf + to * 4 * rows, .len = 4 * rows * 8};
    t->asks = (Py_buffer){.buf = (char *)all->asks.buf + to * rows, .len = rows};
    for (Py_ssize_t e = 0; e < t->samples.len; ++e) given += ((char *)t->samples.buf)[e] != 0;
    t->sampled = (Py_buffer){.buf = (int32_t *)all->sampled.buf + s->drawn, .len = 4 * given};
    t->blocks = (Py_buffer){.buf = (int32_t *)all->blocks.buf + s->taken, .len = all->blocks.len - 4 * s->taken};
    char *halves[2] = {all->cells.buf, (char *)all->cells.buf + all->before.len};
    t->before = (Py_buffer){.buf = s->calls ? halves[~s->calls & 1] : all->before.buf, .len = all->before.len};
    t->cells = (Py_buffer){.buf = halves[s->calls & 1], .len = all->before.len};
    return s->drawn + given <= all->sampled.len / 4;
}

static int append_all(PyObject *to, PyObject *pairs) {
    return PyList_SetSlice(to, PyList_GET_SIZE(to), PyList_GET_SIZE(to), pairs) == 0;
}

/* What the prefix index goes through in a turn: names, pages that lose theirs, names. 0 with an exception set. */
static int turns_note(Turns *s, const Turn *t, Py_ssize_t lacks, PyObject *committed, PyObject *planned) {
    if (!append_all(s->moves, committed)) return 0;
    for (Py_ssize_t j = 0; j < lacks; ++j) {
        PyObject *page = PyLong_FromLong(((int32_t *)t->blocks.buf)[j]);
        int failed = !page || PyList_Append(s->moves, page) < 0;
        Py_XDECREF(page);
        if (failed) return 0;
    }
    return append_all(s->moves, planned);
}

/* Turn k, or a half of it: 1, 0 where it is not steady or tokens are missing, -1 with an exception set. */
static int turns_take(Turns *s, Turn *t, Py_ssize_t k, int commits, int plans) {
    PyObject *committed, *planned;
    int64_t total = 0, lacks = 0;
    Py_ssize_t head = t->head;
    t->commits = commits;
    t->plans = plans;
    t->alive = t->gone = 0;
    if (!turns_hand(s, t, k)) return 0;
    int found = turn_once(t, &total, &lacks, &committed, &planned);
    if (found <= 0) {
        t->head = head;
        return found;
    }
    int64_t *made = (int64_t *)s->made.buf + 4 * s->calls++;
    if (plans) s->counts[commits ? (k + s->depth) % (s->depth + 1) : s->depth - 1] = t->count;
    made[0] = plans ? t->count : 0;
    made[1] = total;
    made[2] = commits ? t->sampled.len / 4 : 0;
    made[3] = t->alive;
    int noted = turns_note(s, t, lacks, committed, planned);
    Py_DECREF(committed);
    Py_DECREF(planned);
    s->drawn += made[2];
    s->taken += lacks;
    t->free -= lacks;
    t->step += plans;
    return noted ? 1 : -1;
}

/* As many turns as are steady, `most` at most, behind a plan that `leads` and before a commit alone, if the next turn is not steady or
   they are so many and it `ends` them; *ended: whether it does. -1 with an exception set. */
static Py_ssize_t turns_taken(Turns *s, Py_ssize_t most, int leads, int ends, int *ended) {
    Turn t = s->all;
    Py_ssize_t k = 0;
    int found = leads ? turns_take(s, &t, 0, 0, 1) : 1, goes = found > 0;
    for (; found > 0 && k < most; k += found > 0) found = turns_take(s, &t, k, 1, 1);
    if (goes && found >= 0 && (!found || ends)) *ended = (found = turns_take(s, &t, k, 1, 0)) > 0;
    s->all.head = t.head;
    s->all.gone = t.gone;
    return found < 0 ? -1 : k;
}

/* turns((cells, drafting, steps in flight: a tuple of (entries int64[4][E], asks bool[E]), tokens int32, eos int64), stores as of turn,
         (out cells int64[2][FIELD_COUNT][R], out entries int64[depth + 1][4][W], out asks bool[depth + 1][W], out work as of turn,
          out blocks int32[n], out made int64[leads + most + ends][4]), numbers as of turn, by as of turn,
         (depth, most, leads, ends))
   -> (turns, whether a commit ended them, blocks taken, the queue's head, rows that end, moves of the prefix index), or None */
static PyObject *turns(PyObject *self, PyObject *args) {
    Turns s = {0};
    Turn *t = &s.all;
    PyObject *step, *stores, *out, *numbers, *by, *in_flight, *result = NULL;
    Py_ssize_t most;
    int leads, ends, ended = 0;
    if (PyArg_ParseTuple(args, "O!O!O!O!O!(nnpp)", TUPLE(&step), TUPLE(&stores), TUPLE(&out), TUPLE(&numbers), TUPLE(&by), &s.depth,
                         &most, &leads, &ends) &&
        PyArg_ParseTuple(step, "y*y*O!y*y*", &t->before, &t->drafting, TUPLE(&in_flight), &t->sampled, &t->eos) &&
        PyArg_ParseTuple(stores, "w*w*y*y*", &t->histories, &t->tables, &t->queue, &t->status) &&
        PyArg_ParseTuple(out, "w*w*w*w*w*w*", &t->cells, &t->entries_out, &t->asks, &t->work, &t->blocks, &s.made) &&
        turn_numbers(t, numbers, by) && (s.moves = PyList_New(0))) {
        t->rows = rows_of(&t->before);
        t->drops = 1;
        int begun = t->rows > 0 && most >= 0 && s.made.len >= 32 * (leads + most + ends) && t->cells.len >= 2 * t->before.len &&
                    turns_begin(&s, in_flight);
        Py_ssize_t count = begun ? turns_taken(&s, most, leads, ends, &ended) : 0;
        if (count >= 0 && s.calls) result = Py_BuildValue("nNnnnO", count, PyBool_FromLong(ended), s.taken, t->head, ended ? t->gone : 0, s.moves);
        if (!s.calls && !PyErr_Occurred()) result = Py_NewRef(Py_None);
    }
    PyMem_Free(s.counts);
    Py_XDECREF(s.moves);
    RELEASE(&t->before, &t->drafting, &t->sampled, &t->eos, &t->histories, &t->tables, &t->queue, &t->status, &t->cells, &t->entries_out,
            &t->asks, &t->work, &t->blocks, &s.made);
    return result;
}

#endif
