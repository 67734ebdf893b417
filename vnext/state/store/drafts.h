/* Drafts of the rows, on plain pointers: the compiled form of drafts_numpy.py, for `_columns.c`. */

#ifndef VNEXT_DRAFTS_H
#define VNEXT_DRAFTS_H

enum { TENTATIVE, RATE, DRAFTING_FIELD_COUNT };
enum { RATE_ONE = 1 << 10, RATE_MEMORY = 8, TRIAL_INTERVAL = 32, FEW_ROWS = 8 };
#define DRAFTS_CONSTANTS                                                                                           \
    CONSTANT(TENTATIVE) CONSTANT(RATE) CONSTANT(DRAFTING_FIELD_COUNT) CONSTANT(RATE_ONE) CONSTANT(RATE_MEMORY) CONSTANT(TRIAL_INTERVAL) CONSTANT(FEW_ROWS)

static int64_t floor_part(int64_t value, int64_t part) { return value >= 0 ? value / part : -((part - 1 - value) / part); }

/* What a step's drafts are decided by: the most of a row, the costs of a row, of drafting at all, and of a row beside many. */
typedef struct {
    long long most, row_cost, step_cost, row_cost_many;
} Drafting;

/* The drafts of a row, up to `most`, that are likely enough to be kept. Adds their odds to *gain. */
static int64_t row_paying(int64_t rate, int64_t most, int64_t share, int64_t *gain) {
    int64_t drafts = 0;
    for (int64_t odds = rate; drafts < most && odds > share; odds = odds * rate / RATE_ONE) ++drafts, *gain += odds;
    return drafts;
}

/* How many drafts each row may take. */
static void rows_room(const int64_t *c, ptrdiff_t rows, int64_t most, int64_t *out) {
    const int64_t *known = FIELD(c, KNOWN, rows), *placeholders = FIELD(c, PLACEHOLDERS, rows), *limit = FIELD(c, LIMIT, rows);
    const int64_t *computed = FIELD(c, COMPUTED, rows), *flags = FIELD(c, FLAGS, rows);
    for (ptrdiff_t r = 0; r < rows; ++r) {
        int64_t reached = known[r] + placeholders[r], own = flags[r] >> DRAFTS_SHIFT;
        int64_t room = least(limit[r] - 1 - reached, own ? least(own - 1, most) : most);
        out[r] = reached - computed[r] != 1 || room < 0 ? 0 : room;
    }
}

/* The drafts of the expected plan beside `tokens`; their sum. */
static int64_t rows_drafts(const int64_t *c, const int64_t *drafting, ptrdiff_t rows, const int64_t *tokens, int64_t *out, Drafting by,
                           int64_t budget) {
    const int64_t *known = FIELD(c, KNOWN, rows), *placeholders = FIELD(c, PLACEHOLDERS, rows), *rate = FIELD(drafting, RATE, rows);
    int64_t many = rows > FEW_ROWS ? rows - FEW_ROWS : 0, row_cost = many ? by.row_cost_many : by.row_cost, gain = 0, count = 0, sum = 0;
    int64_t cost = (rows - many) * by.row_cost + many * by.row_cost_many, share = least(RATE_ONE * rows * row_cost / (1000 + cost), RATE_ONE);
    int64_t trial = by.step_cost ? 1 + (by.most - 1) * (RATE_ONE - share) / RATE_ONE : 1;
    rows_room(c, rows, by.most, out);
    for (ptrdiff_t r = 0; r < rows; ++r) {
        count += row_paying(rate[r], out[r], share, &gain);
        budget -= tokens[r];
    }
    int pays = !by.step_cost || gain * (1000 + cost) > RATE_ONE * rows * (count * row_cost + by.step_cost);
    for (ptrdiff_t r = 0; r < rows; ++r) {
        int is_due = (known[r] + placeholders[r]) % (TRIAL_INTERVAL << (4 * share / RATE_ONE)) == 0;
        int64_t wanted = pays ? row_paying(rate[r], out[r], share, &gain) : 0;
        if (is_due && wanted < trial) wanted = trial;
        if (!tokens[r]) wanted = 0;
        out[r] = least(least(wanted, out[r]), budget > sum ? budget - sum : 0);
        sum += out[r];
    }
    return sum;
}

/* The tokens, the drafts and the planned drafts of each request that sampled. */
typedef struct {
    const int64_t *counts, *drafted, *planned;
    ptrdiff_t asked;
} Runs;

/* rows_match_samples for runs: also 0 where a row has stop tokens of its own. *n: the tokens taken; *ended: rows that are done. */
static int rows_match_runs(const int64_t *c, ptrdiff_t rows, const Step *step, const Runs *runs, const int32_t *sampled, ptrdiff_t given,
                           const int64_t *eos, ptrdiff_t eos_count, const Taken *taken, ptrdiff_t *n, ptrdiff_t *ended) {
    const int64_t *known = FIELD(c, KNOWN, rows), *flags = FIELD(c, FLAGS, rows);
    ptrdiff_t a = 0, at = 0;
    *n = *ended = 0;
    if (!is_first_rows(c, rows, step)) return 0;
    for (ptrdiff_t r = 0; r < step->count; ++r) {
        if (!step->samples[r]) continue;
        if (a >= runs->asked || (flags[r] & OWN_STOPS)) return 0;
        int64_t count = runs->counts[a], drafted = runs->drafted[a];
        if (count < 1 || count > drafted + 1 || drafted > runs->planned[a] || count > given - at) return 0;
        for (int64_t k = 0, is_over = 0; k < count; ++k) {
            int32_t token = sampled[at + k];
            if (token < 0) return 0;
            if (is_over) continue;
            int64_t length = known[r] + 1 + k;
            taken->rows[*n] = r;
            taken->places[*n] = at + k;
            taken->stopped[*n] = !(flags[r] & IGNORE_EOS) && length > FIELD(c, MIN_KNOWN, rows)[r] && is_among(token, eos, eos_count);
            taken->at_limit[*n] = length >= FIELD(c, LIMIT, rows)[r];
            is_over = taken->stopped[*n] || taken->at_limit[*n];
            *ended += is_over;
            ++*n;
        }
        at += count;
        ++a;
    }
    return a == runs->asked && at == given;
}

/* The drafts that were not kept are taken back of these rows; `back`: how many tokens of each row. 0 where a row is none. */
static int rows_settle(int64_t *c, int64_t *drafting, ptrdiff_t rows, const int64_t *which, const Runs *runs, int64_t *back, int64_t *drafted,
                       int64_t *kept) {
    memset(back, 0, rows * sizeof *back);
    *drafted = *kept = 0;
    for (ptrdiff_t i = 0; i < runs->asked; ++i) {
        if (which[i] < 0 || which[i] >= rows) return 0;
        int64_t accepted = runs->counts[i] - 1, tried = least(runs->drafted[i], accepted + 1);
        int64_t *rate = FIELD(drafting, RATE, rows) + which[i];
        back[which[i]] = runs->planned[i] - accepted;
        FIELD(c, COMPUTED, rows)[which[i]] -= back[which[i]];
        FIELD(c, PLACEHOLDERS, rows)[which[i]] -= back[which[i]];
        FIELD(drafting, TENTATIVE, rows)[which[i]] -= runs->planned[i];
        for (int64_t t = 0; t < tried; ++t) *rate += floor_part((t < accepted ? RATE_ONE : 0) - *rate, RATE_MEMORY);
        *drafted += runs->drafted[i];
        *kept += accepted;
    }
    return 1;
}

/* ---- as Python calls them ------------------------------------------------------------------------------------------------- */

static Py_ssize_t drafting_of(const Py_buffer *drafting, Py_ssize_t rows) {
    return too_small(drafting, rows * DRAFTING_FIELD_COUNT * (Py_ssize_t)sizeof(int64_t)) ? -1 : rows;
}

/* drafts(cells, drafting int64[2][R], tokens int64[R], out int64[R], (most, row cost, step cost, row cost of many), budget) -> sum */
static PyObject *drafts(PyObject *self, PyObject *args) {
    OWNED Py_buffer cells = {0}, drafting = {0}, tokens = {0}, out = {0};
    long long budget;
    Drafting by;
    if (!PyArg_ParseTuple(args, "y*y*y*w*(LLLL)L", &cells, &drafting, &tokens, &out, &by.most, &by.row_cost, &by.step_cost, &by.row_cost_many,
                          &budget))
        return NULL;
    Py_ssize_t rows = drafting_of(&drafting, rows_of(&cells));
    if (rows < 0 || too_small(&tokens, rows * 8) || too_small(&out, rows * 8)) return NULL;
    return PyLong_FromLongLong(rows_drafts(cells.buf, drafting.buf, rows, tokens.buf, out.buf, by, budget));
}

/* match_runs(cells, (entries int64[4][E], samples bool[E], sampled int32, eos int64), (counts, drafted, planned int64[n]),
              out int64[2][T]: rows, places; out bool[2][T]: stopped, at limit) -> (tokens taken, rows that end), or None */
static PyObject *match_runs(PyObject *self, PyObject *args) {
    OWNED Py_buffer cells = {0}, entries = {0}, samples = {0}, sampled = {0}, eos = {0}, counts = {0}, drafted = {0}, planned = {0};
    OWNED Py_buffer places = {0}, ends = {0};
    PyObject *step_, *runs_;
    if (!PyArg_ParseTuple(args, "y*O!O!w*w*", &cells, TUPLE(&step_), TUPLE(&runs_), &places, &ends) ||
        !PyArg_ParseTuple(step_, "y*y*y*y*", &entries, &samples, &sampled, &eos) ||
        !PyArg_ParseTuple(runs_, "y*y*y*", &counts, &drafted, &planned))
        return NULL;
    Py_ssize_t asked = samples.len, given = sampled.len / 4, n, ended;
    if (entries.len < 4 * asked * 8 || places.len < 2 * given * 8 || ends.len < 2 * given) Py_RETURN_NONE;
    if (drafted.len != counts.len || planned.len != counts.len) Py_RETURN_NONE;
    const int64_t *ids = entries.buf;
    Step step = {ids, ids + asked, samples.buf, asked};
    Runs runs = {counts.buf, drafted.buf, planned.buf, counts.len / 8};
    Taken taken = {places.buf, (int64_t *)places.buf + given, ends.buf, (char *)ends.buf + given};
    if (!rows_match_runs(cells.buf, rows_of(&cells), &step, &runs, sampled.buf, given, eos.buf, eos.len / 8, &taken, &n, &ended))
        Py_RETURN_NONE;
    return Py_BuildValue("nn", n, ended);
}

/* settle(cells writable, drafting writable, rows int64[n], (counts, drafted, planned int64[n]), out back int64[R])
   -> (drafts computed, drafts kept) */
static PyObject *settle(PyObject *self, PyObject *args) {
    OWNED Py_buffer cells = {0}, drafting = {0}, which = {0}, counts = {0}, drafted = {0}, planned = {0}, back = {0};
    int64_t tried, kept;
    if (!PyArg_ParseTuple(args, "w*w*y*(y*y*y*)w*", &cells, &drafting, &which, &counts, &drafted, &planned, &back)) return NULL;
    Py_ssize_t rows = drafting_of(&drafting, rows_of(&cells));
    Runs runs = {counts.buf, drafted.buf, planned.buf, which.len / 8};
    if (rows < 0 || too_small(&back, rows * 8)) return NULL;
    if (too_small(&counts, which.len) || too_small(&drafted, which.len) || too_small(&planned, which.len)) return NULL;
    if (!rows_settle(cells.buf, drafting.buf, rows, which.buf, &runs, back.buf, &tried, &kept))
        return PyErr_Format(PyExc_ValueError, "a run belongs to no row");
    return Py_BuildValue("LL", (long long)tried, (long long)kept);
}

#endif
