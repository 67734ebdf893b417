/* Columns: the arithmetic of one step over the rows, compiled. The fast twin of columns_numpy.py, function by function.

   Pure but for the arrays that a caller hands in to be filled: reads no clock, no environment, keeps nothing.
   Cells are int64[FIELD_COUNT][R], contiguous; fields as in rows.py (LAYOUT below, compared by a test).
   Each call walks the rows once; nothing here is proportional to history. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define LAYOUT                                                                                                         \
    "id known computed pending limit blocks sealed prompt epoch priority flags min_known cached "                     \
    "tokens_at tokens_size table_at table_size chain_0 chain_1"

enum {
    ID, KNOWN, COMPUTED, PENDING, LIMIT, BLOCKS, SEALED, PROMPT, EPOCH, PRIORITY, FLAGS, MIN_KNOWN, CACHED,
    TOKENS_AT, TOKENS_SIZE, TABLE_AT, TABLE_SIZE, CHAIN_0, CHAIN_1, FIELD_COUNT
};
enum { IGNORE_EOS = 1, OWN_STOPS = 2 };

/* One field of a matrix with R rows. */
#define FIELD(cells, field, rows) ((cells) + (Py_ssize_t)(field) * (rows))

static Py_ssize_t rows_of(const Py_buffer *cells) { return cells->len / ((Py_ssize_t)sizeof(int64_t) * FIELD_COUNT); }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int too_small(const Py_buffer *buffer, Py_ssize_t bytes) {
    if (buffer->len >= bytes) return 0;
    PyErr_SetString(PyExc_ValueError, "an array is too short for its rows");
    return 1;
}

/* expected(cells, out tokens int64[R], budget, threshold) -> total */
static PyObject *expected(PyObject *self, PyObject *args) {
    Py_buffer cells, tokens;
    long long budget, threshold;
    if (!PyArg_ParseTuple(args, "y*w*LL", &cells, &tokens, &budget, &threshold)) return NULL;
    Py_ssize_t rows = rows_of(&cells);
    PyObject *result = NULL;
    if (!too_small(&tokens, rows * 8)) {
        const int64_t *c = cells.buf, *known = FIELD(c, KNOWN, rows), *pending = FIELD(c, PENDING, rows);
        const int64_t *limit = FIELD(c, LIMIT, rows), *computed = FIELD(c, COMPUTED, rows);
        int64_t *out = tokens.buf, left = budget;
        for (Py_ssize_t r = 0; r < rows; ++r) {
            int64_t want = least(known[r] + pending[r], limit[r] - 1) - computed[r];
            if (threshold) want = least(want, threshold);
            out[r] = least(want, left);
            left -= out[r];
        }
        result = PyLong_FromLongLong(budget - left);
    }
    PyBuffer_Release(&cells);
    PyBuffer_Release(&tokens);
    return result;
}

/* needed(cells, tokens, out need int64[R], size) -> total */
static PyObject *needed(PyObject *self, PyObject *args) {
    Py_buffer cells, tokens, need;
    long long size;
    if (!PyArg_ParseTuple(args, "y*y*w*L", &cells, &tokens, &need, &size)) return NULL;
    Py_ssize_t rows = rows_of(&cells);
    PyObject *result = NULL;
    if (!too_small(&tokens, rows * 8) && !too_small(&need, rows * 8)) {
        const int64_t *c = cells.buf, *computed = FIELD(c, COMPUTED, rows), *blocks = FIELD(c, BLOCKS, rows);
        const int64_t *t = tokens.buf;
        int64_t *out = need.buf, total = 0;
        for (Py_ssize_t r = 0; r < rows; ++r) {
            int64_t lacks = (computed[r] + t[r] + size - 1) / size - blocks[r];
            out[r] = lacks > 0 ? lacks : 0;
            total += out[r];
        }
        result = PyLong_FromLongLong(total);
    }
    PyBuffer_Release(&cells);
    PyBuffer_Release(&tokens);
    PyBuffer_Release(&need);
    return result;
}

/* advance(cells, out cells, tokens, need) -> scheduled rows */
static PyObject *advance(PyObject *self, PyObject *args) {
    Py_buffer cells, out, tokens, need;
    if (!PyArg_ParseTuple(args, "y*w*y*y*", &cells, &out, &tokens, &need)) return NULL;
    Py_ssize_t rows = rows_of(&cells);
    PyObject *result = NULL;
    if (!too_small(&out, cells.len) && !too_small(&tokens, rows * 8) && !too_small(&need, rows * 8)) {
        const int64_t *t = tokens.buf, *n = need.buf;
        int64_t *c = memcpy(out.buf, cells.buf, cells.len), scheduled = 0;
        int64_t *computed = FIELD(c, COMPUTED, rows), *pending = FIELD(c, PENDING, rows);
        int64_t *known = FIELD(c, KNOWN, rows), *blocks = FIELD(c, BLOCKS, rows);
        for (Py_ssize_t r = 0; r < rows; ++r) {
            computed[r] += t[r];
            pending[r] += t[r] > 0 && computed[r] == known[r] + pending[r];
            blocks[r] += n[r];
            scheduled += t[r] > 0;
        }
        result = PyLong_FromLongLong(scheduled);
    }
    PyBuffer_Release(&cells);
    PyBuffer_Release(&out);
    PyBuffer_Release(&tokens);
    PyBuffer_Release(&need);
    return result;
}

/* write_tables(advanced cells, need, blocks int32, arena int32 writable): new blocks behind those each row had. */
static PyObject *write_tables(PyObject *self, PyObject *args) {
    Py_buffer cells, need, blocks, arena;
    if (!PyArg_ParseTuple(args, "y*y*y*w*", &cells, &need, &blocks, &arena)) return NULL;
    Py_ssize_t rows = rows_of(&cells), given = blocks.len / 4, places = arena.len / 4, k = 0;
    const int64_t *c = cells.buf, *table_at = FIELD(c, TABLE_AT, rows), *held = FIELD(c, BLOCKS, rows), *n = need.buf;
    const int32_t *from = blocks.buf;
    int32_t *to = arena.buf;
    int bad = need.len < rows * 8;
    for (Py_ssize_t r = 0; r < rows && !bad; ++r)
        for (int64_t j = n[r]; j > 0 && !bad; --j) {
            int64_t at = table_at[r] + held[r] - j;
            bad = k >= given || at < 0 || at >= places;
            if (!bad) to[at] = from[k++];
        }
    PyBuffer_Release(&cells);
    PyBuffer_Release(&need);
    PyBuffer_Release(&blocks);
    PyBuffer_Release(&arena);
    if (bad) return PyErr_Format(PyExc_ValueError, "a block has no place in the tables");
    Py_RETURN_NONE;
}

/* oldest(queue int32, places int64[N], head, used, out blocks int32) -> head behind them */
static PyObject *oldest(PyObject *self, PyObject *args) {
    Py_buffer queue, places, blocks;
    Py_ssize_t head, used;
    if (!PyArg_ParseTuple(args, "y*y*nnw*", &queue, &places, &head, &used, &blocks)) return NULL;
    const int32_t *q = queue.buf;
    const int64_t *place = places.buf;
    Py_ssize_t wanted = blocks.len / 4, count = 0, block_count = places.len / 8;
    int32_t *out = blocks.buf;
    if (used > queue.len / 4) used = queue.len / 4;
    while (count < wanted && head < used) {
        int32_t block = q[head];
        if (block >= 0 && block < block_count && place[block] == head) out[count++] = block;
        ++head;
    }
    PyBuffer_Release(&queue);
    PyBuffer_Release(&places);
    PyBuffer_Release(&blocks);
    if (count < wanted) return PyErr_Format(PyExc_ValueError, "the queue holds %zd blocks fewer than counted", wanted - count);
    return PyLong_FromSsize_t(head);
}

/* unsealed(cells, ended rows int64, size, out rows int64[R]) -> how many rows have a full block without a name */
static PyObject *unsealed(PyObject *self, PyObject *args) {
    Py_buffer cells, ended, found;
    long long size;
    if (!PyArg_ParseTuple(args, "y*y*Lw*", &cells, &ended, &size, &found)) return NULL;
    Py_ssize_t rows = rows_of(&cells), count = 0, ended_count = ended.len / 8, e = 0;
    const int64_t *c = cells.buf, *known = FIELD(c, KNOWN, rows), *computed = FIELD(c, COMPUTED, rows);
    const int64_t *sealed = FIELD(c, SEALED, rows), *done = ended.buf;
    int64_t *out = found.buf;
    int bad = found.len < rows * 8;
    for (Py_ssize_t r = 0; r < rows && !bad; ++r) {
        int is_done = e < ended_count && done[e] == r; /* rows come in rising order */
        e += is_done;
        if (least(known[r] - is_done, computed[r]) >= (sealed[r] + 1) * size) out[count++] = r;
    }
    PyBuffer_Release(&cells);
    PyBuffer_Release(&ended);
    PyBuffer_Release(&found);
    if (bad) return PyErr_Format(PyExc_ValueError, "an array is too short for its rows");
    return PyLong_FromSsize_t(count);
}

/* seal_inputs(cells, rows int64[n], tokens arena int32, tables arena int32, size)
   -> (tokens of each row's next block, keys of the blocks before them, the blocks' numbers), all as bytes or a list */
static PyObject *seal_inputs(PyObject *self, PyObject *args) {
    Py_buffer cells, which, tokens, tables;
    long long size;
    if (!PyArg_ParseTuple(args, "y*y*y*y*L", &cells, &which, &tokens, &tables, &size)) return NULL;
    Py_ssize_t rows = rows_of(&cells), n = which.len / 8;
    const int64_t *c = cells.buf, *row = which.buf;
    PyObject *words = PyBytes_FromStringAndSize(NULL, n * size * 4), *keys = PyBytes_FromStringAndSize(NULL, n * 16);
    PyObject *blocks = PyList_New(n);
    int bad = 0, failed = !words || !keys || !blocks;
    for (Py_ssize_t i = 0; i < n && !bad && !failed; ++i) {
        bad = row[i] < 0 || row[i] >= rows;
        if (bad) break;
        int64_t sealed = FIELD(c, SEALED, rows)[row[i]];
        int64_t at = FIELD(c, TOKENS_AT, rows)[row[i]] + sealed * size, table = FIELD(c, TABLE_AT, rows)[row[i]] + sealed;
        bad = at < 0 || at + size > tokens.len / 4 || table < 0 || table >= tables.len / 4;
        if (bad) break;
        memcpy(PyBytes_AS_STRING(words) + i * size * 4, (const int32_t *)tokens.buf + at, size * 4);
        memcpy(PyBytes_AS_STRING(keys) + i * 16, &FIELD(c, CHAIN_0, rows)[row[i]], 8);
        memcpy(PyBytes_AS_STRING(keys) + i * 16 + 8, &FIELD(c, CHAIN_1, rows)[row[i]], 8);
        PyObject *block = PyLong_FromLong(((const int32_t *)tables.buf)[table]);
        failed = !block;
        if (block) PyList_SET_ITEM(blocks, i, block);
    }
    PyBuffer_Release(&cells);
    PyBuffer_Release(&which);
    PyBuffer_Release(&tokens);
    PyBuffer_Release(&tables);
    if (!bad && !failed) return Py_BuildValue("NNN", words, keys, blocks);
    Py_XDECREF(words);
    Py_XDECREF(keys);
    Py_XDECREF(blocks);
    return bad ? PyErr_Format(PyExc_ValueError, "a row's next block is outside the arenas") : NULL;
}

/* seal_write(cells writable, rows int64[n], keys 16 bytes each): one more block of each row is named. */
static PyObject *seal_write(PyObject *self, PyObject *args) {
    Py_buffer cells, which, keys;
    if (!PyArg_ParseTuple(args, "w*y*y*", &cells, &which, &keys)) return NULL;
    Py_ssize_t rows = rows_of(&cells), n = which.len / 8;
    int64_t *c = cells.buf;
    const int64_t *row = which.buf;
    int bad = keys.len < n * 16;
    for (Py_ssize_t i = 0; i < n && !bad; ++i) {
        bad = row[i] < 0 || row[i] >= rows;
        if (bad) break;
        FIELD(c, SEALED, rows)[row[i]] += 1;
        memcpy(&FIELD(c, CHAIN_0, rows)[row[i]], (const char *)keys.buf + i * 16, 8);
        memcpy(&FIELD(c, CHAIN_1, rows)[row[i]], (const char *)keys.buf + i * 16 + 8, 8);
    }
    PyBuffer_Release(&cells);
    PyBuffer_Release(&which);
    PyBuffer_Release(&keys);
    if (bad) return PyErr_Format(PyExc_ValueError, "a key has no row");
    Py_RETURN_NONE;
}

/* settle(cells, ids, epochs, samples bool[n], sampled int32 bytes, eos int64, out rows, out places, out stopped, out at_limit)
   -> (samples, a row has stop tokens of its own), or None where the step's requests are not the first rows any more, or
   the tokens are not what was asked for */
static PyObject *settle(PyObject *self, PyObject *args) {
    Py_buffer b[10];
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*y*w*w*w*w*", &b[0], &b[1], &b[2], &b[3], &b[4], &b[5], &b[6], &b[7], &b[8], &b[9]))
        return NULL;
    Py_ssize_t rows = rows_of(&b[0]), asked = b[3].len, eos_count = b[5].len / 8, n = 0;
    const int64_t *c = b[0].buf, *ids = b[1].buf, *epochs = b[2].buf, *eos = b[5].buf;
    const char *samples = b[3].buf;
    const int32_t *sampled = b[4].buf;
    const int64_t *known = FIELD(c, KNOWN, rows), *flags = FIELD(c, FLAGS, rows);
    int64_t *out_rows = b[6].buf, *out_places = b[7].buf;
    char *stopped = b[8].buf, *at_limit = b[9].buf;
    Py_ssize_t room = least(least(b[6].len / 8, b[7].len / 8), least(b[8].len, b[9].len));
    int same = asked <= rows && b[1].len >= asked * 8 && b[2].len >= asked * 8;
    same = same && !memcmp(ids, FIELD(c, ID, rows), asked * 8) && !memcmp(epochs, FIELD(c, EPOCH, rows), asked * 8);
    int own = 0;
    for (Py_ssize_t r = 0; same && r < asked; ++r) {
        if (!samples[r]) continue;
        if (n >= room || n >= b[4].len / 4 || sampled[n] < 0) { same = 0; break; }
        int stops = 0;
        for (Py_ssize_t k = 0; k < eos_count; ++k) stops |= sampled[n] == eos[k];
        stops = stops && !(flags[r] & IGNORE_EOS);
        own |= (flags[r] & OWN_STOPS) != 0;
        out_rows[n] = r;
        out_places[n] = n;
        stopped[n] = stops && known[r] + 1 > FIELD(c, MIN_KNOWN, rows)[r];
        at_limit[n] = known[r] + 1 >= FIELD(c, LIMIT, rows)[r];
        ++n;
    }
    same = same && n == b[4].len / 4;
    for (int i = 0; i < 10; ++i) PyBuffer_Release(&b[i]);
    if (!same) Py_RETURN_NONE;
    return Py_BuildValue("ni", n, own);
}

/* take_tokens(cells, out cells, rows int64[n], tokens int32[n], arena int32 writable) -> False if a history is full */
static PyObject *take_tokens(PyObject *self, PyObject *args) {
    Py_buffer cells, out, which, tokens, arena;
    if (!PyArg_ParseTuple(args, "y*w*y*y*w*", &cells, &out, &which, &tokens, &arena)) return NULL;
    Py_ssize_t rows = rows_of(&cells), n = which.len / 8, places = arena.len / 4;
    const int64_t *from = cells.buf, *row = which.buf;
    const int32_t *token = tokens.buf;
    int bad = out.len < cells.len || tokens.len < n * 4, full = 0;
    for (Py_ssize_t i = 0; i < n && !bad; ++i) {
        bad = row[i] < 0 || row[i] >= rows;
        if (bad) break;
        int64_t known = FIELD(from, KNOWN, rows)[row[i]], at = FIELD(from, TOKENS_AT, rows)[row[i]] + known;
        full |= known >= FIELD(from, TOKENS_SIZE, rows)[row[i]];
        bad = at < 0 || (!full && at >= places);
    }
    if (!bad && !full) {
        int64_t *c = memcpy(out.buf, cells.buf, cells.len), *known = FIELD(c, KNOWN, rows);
        int64_t *pending = FIELD(c, PENDING, rows), *tokens_at = FIELD(c, TOKENS_AT, rows);
        int32_t *to = arena.buf;
        for (Py_ssize_t i = 0; i < n; ++i) {
            to[tokens_at[row[i]] + known[row[i]]] = token[i];
            known[row[i]] += 1;
            pending[row[i]] -= 1;
        }
    }
    PyBuffer_Release(&cells);
    PyBuffer_Release(&out);
    PyBuffer_Release(&which);
    PyBuffer_Release(&tokens);
    PyBuffer_Release(&arena);
    if (bad) return PyErr_Format(PyExc_ValueError, "a token has no place in the histories");
    return PyBool_FromLong(!full);
}

static PyMethodDef functions[] = {
    {"expected", expected, METH_VARARGS, "New tokens of each row under the budget; their sum."},
    {"needed", needed, METH_VARARGS, "Blocks each row lacks; their sum."},
    {"advance", advance, METH_VARARGS, "The matrix after a plan; how many rows it schedules."},
    {"write_tables", write_tables, METH_VARARGS, "New blocks into the rows' tables."},
    {"oldest", oldest, METH_VARARGS, "The oldest free blocks; the queue's head behind them."},
    {"unsealed", unsealed, METH_VARARGS, "Rows with a full block that has no name; their number."},
    {"seal_inputs", seal_inputs, METH_VARARGS, "What the names of the rows' next full blocks are made of."},
    {"seal_write", seal_write, METH_VARARGS, "The rows' next full blocks are named."},
    {"settle", settle, METH_VARARGS, "A step's samples matched with its rows, or None."},
    {"take_tokens", take_tokens, METH_VARARGS, "The matrix after a commit; False if a history is full."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_columns", "Compiled twin of columns_numpy.", -1, functions};

PyMODINIT_FUNC PyInit__columns(void) {
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddStringConstant(made, "LAYOUT", LAYOUT) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
