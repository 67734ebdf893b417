/* Columns: the arithmetic of one step over the rows, compiled. The fast twin of columns_numpy.py, function by function.
   What a stride needs too stands in columns.h; here is what Python calls.

   Pure but for the arrays that a caller hands in to be filled: reads no clock, no environment, keeps nothing.
   Cells are int64[FIELD_COUNT][R], contiguous; fields as in rows.py (LAYOUT, compared by a test).
   Each call walks the rows once; nothing here is proportional to history. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include "columns.h"

static Py_ssize_t rows_of(const Py_buffer *cells) { return cells->len / ((Py_ssize_t)sizeof(int64_t) * FIELD_COUNT); }

static int too_small(const Py_buffer *buffer, Py_ssize_t bytes) {
    if (buffer->len >= bytes) return 0;
    PyErr_SetString(PyExc_ValueError, "an array is too short for its rows");
    return 1;
}

/* expected(cells, out int64[2][R]: tokens, blocks lacking; budget, threshold, size) -> (sum of tokens, sum of blocks) */
static PyObject *expected(PyObject *self, PyObject *args) {
    Py_buffer cells, both;
    long long budget, threshold, size;
    if (!PyArg_ParseTuple(args, "y*w*LLL", &cells, &both, &budget, &threshold, &size)) return NULL;
    Py_ssize_t rows = rows_of(&cells);
    PyObject *result = NULL;
    if (!too_small(&both, 2 * rows * 8)) {
        int64_t *tokens = both.buf, lacks, taken = rows_expected(cells.buf, rows, tokens, tokens + rows, budget, threshold, size, &lacks);
        result = Py_BuildValue("LL", (long long)taken, (long long)lacks);
    }
    PyBuffer_Release(&cells);
    PyBuffer_Release(&both);
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
        result = PyLong_FromLongLong(rows_advance(memcpy(out.buf, cells.buf, cells.len), rows, tokens.buf, need.buf));
    }
    PyBuffer_Release(&cells);
    PyBuffer_Release(&out);
    PyBuffer_Release(&tokens);
    PyBuffer_Release(&need);
    return result;
}

/* write_tables(advanced cells writable, need, blocks int32, arena int32 writable, groups): new pages, `groups` a block, behind
   those each row had. */
static PyObject *write_tables(PyObject *self, PyObject *args) {
    Py_buffer cells, need, blocks, arena;
    long long groups;
    if (!PyArg_ParseTuple(args, "w*y*y*w*L", &cells, &need, &blocks, &arena, &groups)) return NULL;
    Py_ssize_t rows = rows_of(&cells), given = blocks.len / 4, places = arena.len / 4, k = 0;
    int64_t *c = cells.buf, *sum = FIELD(c, TABLE_SUM, rows);
    const int64_t *table_at = FIELD(c, TABLE_AT, rows), *held = FIELD(c, BLOCKS, rows), *n = need.buf;
    const int32_t *from = blocks.buf;
    int32_t *to = arena.buf;
    int bad = need.len < rows * 8;
    for (Py_ssize_t r = 0; r < rows && !bad; ++r)
        for (int64_t j = n[r] * groups; j > 0 && !bad; --j) {
            int64_t place = held[r] * groups - j, at = table_at[r] + place;
            bad = k >= given || at < 0 || at >= places;
            if (bad) break;
            sum[r] = (int64_t)((uint64_t)sum[r] + mixed_one((uint64_t)place, (uint64_t)from[k]));
            to[at] = from[k++];
        }
    PyBuffer_Release(&cells);
    PyBuffer_Release(&need);
    PyBuffer_Release(&blocks);
    PyBuffer_Release(&arena);
    if (bad) return PyErr_Format(PyExc_ValueError, "a block has no place in the tables");
    Py_RETURN_NONE;
}

/* mixed(values int64[n]) -> sum of mixed_one over all places */
static PyObject *mixed(PyObject *self, PyObject *args) {
    Py_buffer values;
    if (!PyArg_ParseTuple(args, "y*", &values)) return NULL;
    const int64_t *value = values.buf;
    uint64_t sum = 0;
    for (Py_ssize_t at = 0; at < values.len / 8; ++at) sum += mixed_one((uint64_t)at, (uint64_t)value[at]);
    PyBuffer_Release(&values);
    return PyLong_FromUnsignedLongLong(sum);
}

/* put(store int64 writable, places int32[n], values int64[n] writable) -> change of the store's mixed sum.
   Values and store change places: afterwards `values` is what brings the old array back. */
static PyObject *put(PyObject *self, PyObject *args) {
    Py_buffer store, places, values;
    if (!PyArg_ParseTuple(args, "w*y*w*", &store, &places, &values)) return NULL;
    Py_ssize_t n = places.len / 4, size = store.len / 8;
    const int32_t *place = places.buf;
    int64_t *kept = store.buf, *value = values.buf;
    int bad = values.len < n * 8;
    uint64_t change = 0;
    for (Py_ssize_t i = 0; i < n && !bad; ++i) bad = place[i] < 0 || place[i] >= size;
    for (Py_ssize_t i = 0; i < n && !bad; ++i) {
        int64_t before = kept[place[i]];
        change += mixed_one((uint64_t)place[i], (uint64_t)value[i]) - mixed_one((uint64_t)place[i], (uint64_t)before);
        kept[place[i]] = value[i];
        value[i] = before;
    }
    PyBuffer_Release(&store);
    PyBuffer_Release(&places);
    PyBuffer_Release(&values);
    if (bad) return PyErr_Format(PyExc_ValueError, "a value has no place in the array");
    return PyLong_FromUnsignedLongLong(change);
}

/* oldest(queue int32, status int64[N], head, used, out blocks int32) -> head behind them */
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

/* released(status int64[N], blocks int32[n], at, out status int64[n], out freed int32[n]) -> how many are freed */
static PyObject *released(PyObject *self, PyObject *args) {
    Py_buffer status, blocks, left, freed;
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
    PyBuffer_Release(&status);
    PyBuffer_Release(&blocks);
    PyBuffer_Release(&left);
    PyBuffer_Release(&freed);
    if (bad) return PyErr_Format(PyExc_ValueError, "a block is outside the pool");
    return PyLong_FromSsize_t(count);
}

/* chain(parent 16 bytes, tokens int32, size) -> keys of all full blocks, a tuple of bytes */
static PyObject *chain(PyObject *self, PyObject *args) {
    Py_buffer parent, tokens;
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
        blake2b_16(out, before, BLAKE2B_DIGEST, (const char *)tokens.buf + i * width, width);
        PyTuple_SET_ITEM(keys, i, key);
        before = out;
    }
    PyBuffer_Release(&parent);
    PyBuffer_Release(&tokens);
    return keys;
}

/* One page gets its name: the block's key, told apart by its group. -1 on an error. */
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
static int seal_one(int64_t *c, Py_ssize_t rows, Py_ssize_t r, int64_t size, const Py_buffer *tokens,
                    const Py_buffer *tables, const Py_buffer *windows, PyObject *pairs) {
    int64_t sealed = FIELD(c, SEALED, rows)[r], computed = FIELD(c, COMPUTED, rows)[r];
    Py_ssize_t groups = windows->len / 8;
    int64_t table = FIELD(c, TABLE_AT, rows)[r] + sealed * groups;
    uint8_t key[BLAKE2B_DIGEST];
    if (table < 0 || table + groups > tables->len / 4 || !row_seal(c, rows, r, size, tokens->buf, tokens->len / 4, key)) {
        PyErr_SetString(PyExc_ValueError, "a row's next block is outside the arenas");
        return -1;
    }
    for (Py_ssize_t g = 0; g < groups; ++g) {
        int64_t window = ((const int64_t *)windows->buf)[g], unseen = computed - window + 1;
        if (window && unseen >= (sealed + 1) * size) continue;
        if (name_page(key, g, ((const int32_t *)tables->buf)[table + g], pairs) < 0) return -1;
    }
    return 0;
}

/* seal(cells writable, ended rows int64, tokens arena int32, tables arena int32, size, windows int64[groups] as
   bytes) -> [(key, page)], round by round: every row's next full block, then the one after it */
static PyObject *seal(PyObject *self, PyObject *args) {
    Py_buffer cells, ended, tokens, tables, windows;
    long long size;
    if (!PyArg_ParseTuple(args, "w*y*y*y*Ly*", &cells, &ended, &tokens, &tables, &size, &windows)) return NULL;
    Py_ssize_t rows = rows_of(&cells), ended_count = ended.len / 8;
    int64_t *c = cells.buf;
    const int64_t *known = FIELD(c, KNOWN, rows), *computed = FIELD(c, COMPUTED, rows), *done = ended.buf;
    const int64_t *done_blocks = FIELD(c, SEALED, rows);
    PyObject *pairs = PyList_New(0);
    int sealed = pairs ? 1 : -1;
    while (sealed > 0) {
        sealed = 0;
        for (Py_ssize_t r = 0, e = 0; r < rows; ++r) {
            int is_done = e < ended_count && done[e] == r; /* rows come in rising order */
            e += is_done;
            if (least(known[r] - is_done, computed[r]) < (done_blocks[r] + 1) * size) continue;
            sealed = seal_one(c, rows, r, size, &tokens, &tables, &windows, pairs) < 0 ? -1 : 1;
            if (sealed < 0) break;
        }
    }
    PyBuffer_Release(&cells);
    PyBuffer_Release(&ended);
    PyBuffer_Release(&tokens);
    PyBuffer_Release(&tables);
    PyBuffer_Release(&windows);
    if (sealed < 0) Py_CLEAR(pairs);
    return pairs;
}

/* flight(cells, starts int64[R], tokens int64[R], out int64[4][R]: ids, epochs, starts, counts; out samples bool[R])
   -> rows with tokens, whose entries come first in each of the five */
static PyObject *flight(PyObject *self, PyObject *args) {
    Py_buffer cells, starts, tokens, entries, samples;
    if (!PyArg_ParseTuple(args, "y*y*y*w*w*", &cells, &starts, &tokens, &entries, &samples)) return NULL;
    Py_ssize_t rows = rows_of(&cells);
    PyObject *result = NULL;
    if (!too_small(&starts, rows * 8) && !too_small(&tokens, rows * 8) && !too_small(&entries, 4 * rows * 8) &&
        !too_small(&samples, rows)) {
        result = PyLong_FromSsize_t(rows_flight(cells.buf, rows, starts.buf, tokens.buf, entries.buf, rows, samples.buf));
    }
    PyBuffer_Release(&cells);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&tokens);
    PyBuffer_Release(&entries);
    PyBuffer_Release(&samples);
    return result;
}

/* lawful(cells, size) -> False if a row computed more than it knows, sealed too much, is at its limit, or holds too few
   or too many blocks: laws S2 and M4 of laws.py in one pass, which name what is wrong */
static PyObject *lawful(PyObject *self, PyObject *args) {
    Py_buffer cells;
    long long size;
    if (!PyArg_ParseTuple(args, "y*L", &cells, &size)) return NULL;
    int holds = rows_lawful(cells.buf, rows_of(&cells), size);
    PyBuffer_Release(&cells);
    return PyBool_FromLong(holds);
}

/* bounds(entries int64[4][n], samples bool[n]) -> sum, least and greatest of the token counts, rows that sample */
static PyObject *bounds(PyObject *self, PyObject *args) {
    Py_buffer entries, samples;
    if (!PyArg_ParseTuple(args, "y*y*", &entries, &samples)) return NULL;
    Py_ssize_t n = entries.len / 32;
    PyObject *result = NULL;
    if (!too_small(&samples, n)) {
        Bounds b = step_bounds((const int64_t *)entries.buf + 3 * n, samples.buf, n);
        result = Py_BuildValue("LLLn", (long long)b.sum, (long long)b.smallest, (long long)b.largest, b.sampling);
    }
    PyBuffer_Release(&entries);
    PyBuffer_Release(&samples);
    return result;
}

/* settle(cells, entries int64[4][E], samples bool[E], sampled int32 bytes, eos int64, out int64[2][n]: rows, places;
          out bool[2][n]: stopped, at limit) -> (a row has stop tokens of its own, how many end), or None where the step's
   requests are not the first rows any more, or the tokens are not what was asked for */
static PyObject *settle(PyObject *self, PyObject *args) {
    Py_buffer b[7];
    if (!PyArg_ParseTuple(args, "y*y*y*y*y*w*w*", &b[0], &b[1], &b[2], &b[3], &b[4], &b[5], &b[6])) return NULL;
    Py_ssize_t asked = b[2].len, given = b[3].len / 4;
    const int64_t *ids = b[1].buf;
    int own = 0, ended = 0, same = b[1].len >= 4 * asked * 8 && b[5].len >= 2 * given * 8 && b[6].len >= 2 * given;
    if (same) {
        Step step = {ids, ids + asked, b[2].buf, asked};
        Taken taken = {b[5].buf, (int64_t *)b[5].buf + given, b[6].buf, (char *)b[6].buf + given};
        same = rows_settle(b[0].buf, rows_of(&b[0]), &step, b[3].buf, given, b[4].buf, b[4].len / 8, &taken, &own, &ended);
    }
    for (int i = 0; i < 7; ++i) PyBuffer_Release(&b[i]);
    if (!same) Py_RETURN_NONE;
    return Py_BuildValue("ii", own, ended);
}

/* take_tokens(cells, out cells, rows int64[n], tokens int32[n], arena int32 writable) -> False if a history is full */
static PyObject *take_tokens(PyObject *self, PyObject *args) {
    Py_buffer cells, out, which, tokens, arena;
    if (!PyArg_ParseTuple(args, "y*w*y*y*w*", &cells, &out, &which, &tokens, &arena)) return NULL;
    Py_ssize_t rows = rows_of(&cells), n = which.len / 8;
    int fits = out.len < cells.len || tokens.len < n * 4 ? -1 : rows_fit(cells.buf, rows, which.buf, n, arena.len / 4);
    if (fits > 0) rows_take_tokens(memcpy(out.buf, cells.buf, cells.len), rows, which.buf, n, tokens.buf, arena.buf);
    PyBuffer_Release(&cells);
    PyBuffer_Release(&out);
    PyBuffer_Release(&which);
    PyBuffer_Release(&tokens);
    PyBuffer_Release(&arena);
    if (fits < 0) return PyErr_Format(PyExc_ValueError, "a token has no place in the histories");
    return PyBool_FromLong(fits);
}

static PyMethodDef functions[] = {
    {"expected", expected, METH_VARARGS, "New tokens and blocks of each row under the budget; their sums."},
    {"needed", needed, METH_VARARGS, "Blocks each row lacks; their sum."},
    {"advance", advance, METH_VARARGS, "The matrix after a plan; how many rows it schedules."},
    {"write_tables", write_tables, METH_VARARGS, "New blocks into the rows' tables."},
    {"mixed", mixed, METH_VARARGS, "The sum that tells arrays apart."},
    {"put", put, METH_VARARGS, "Values into an array; the change of its sum."},
    {"oldest", oldest, METH_VARARGS, "The oldest free blocks; the queue's head behind them."},
    {"released", released, METH_VARARGS, "Blocks with one holder less; how many are freed."},
    {"chain", chain, METH_VARARGS, "Keys of the full blocks of a history."},
    {"seal", seal, METH_VARARGS, "Full blocks without a name get their keys; the pairs."},
    {"flight", flight, METH_VARARGS, "The entries of a step in flight; their number."},
    {"lawful", lawful, METH_VARARGS, "Whether the rows keep the cheap laws."},
    {"bounds", bounds, METH_VARARGS, "Bounds of a step's token counts."},
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
