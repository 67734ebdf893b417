/* The moves of the prefix table, in one pass over the pairs. Implements prefix_index_plain.py, which says what each function means.
 *
 * Owns nothing: both sides are Python's own dict and list, changed in place. A block that is not in the list, or a side that
 * does not mirror the other, raises and leaves what was moved before.
 */
#include "prefix_index.h"

#include <stdint.h>

/* Borrowed key and the number of the block; 0 with an exception set if it is no pair of this table. */
static int read_pair(const Table *table, PyObject *pair, PyObject **key, Py_ssize_t *block) {
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
        PyErr_SetString(PyExc_TypeError, "a pair is a key and a block");
        return 0;
    }
    *key = PyTuple_GET_ITEM(pair, 0);
    *block = PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, 1));
    return has_block(table, *block);
}

static int insert_all(const Table *table, PyObject *pairs) {
    for (Py_ssize_t place = 0; place < PyList_GET_SIZE(pairs); place++) {
        PyObject *pair = PyList_GET_ITEM(pairs, place), *key;
        Py_ssize_t block;
        if (!read_pair(table, pair, &key, &block)) return 0;
        if (PyDict_SetItem(table->blocks, key, PyTuple_GET_ITEM(pair, 1)) < 0) return 0;
        set_key(table, block, key);
    }
    return 1;
}

static int remove_all(const Table *table, PyObject *pairs) {
    for (Py_ssize_t place = 0; place < PyList_GET_SIZE(pairs); place++) {
        PyObject *key;
        Py_ssize_t block;
        if (!read_pair(table, PyList_GET_ITEM(pairs, place), &key, &block)) return 0;
        if (PyDict_DelItem(table->blocks, key) < 0) return 0;
        set_key(table, block, Py_None);
    }
    return 1;
}

static PyObject *apply_pairs(PyObject *self, PyObject *args) {
    Table table;
    PyObject *gone, *come;
    if (!PyArg_ParseTuple(args, "OOO!O!", &table.blocks, &table.keys, &PyList_Type, &gone, &PyList_Type, &come)) return NULL;
    if (!is_table(&table) || !remove_all(&table, gone) || !insert_all(&table, come)) return NULL;
    Py_RETURN_NONE;
}

/* As insert_hash, of a pair. */
static int insert_one(const Table *table, PyObject *pair) {
    PyObject *key;
    Py_ssize_t block;
    if (!read_pair(table, pair, &key, &block)) return -1;
    return insert_hash(table, key, PyTuple_GET_ITEM(pair, 1), block);
}

static PyObject *insert_pairs(PyObject *self, PyObject *args) {
    Table table;
    PyObject *pairs, *came = NULL;
    if (!PyArg_ParseTuple(args, "OOO!", &table.blocks, &table.keys, &PyList_Type, &pairs) || !is_table(&table)) return NULL;
    for (Py_ssize_t place = 0; place < PyList_GET_SIZE(pairs); place++) {
        PyObject *pair = PyList_GET_ITEM(pairs, place);
        int is_new = insert_one(&table, pair);
        if (is_new == 0 && !came) came = PyList_GetSlice(pairs, 0, place); /* the first that stays out */
        if (is_new < 0 || (is_new == 0 && !came)) goto failed;
        if (is_new == 1 && came && PyList_Append(came, pair) < 0) goto failed;
    }
    return came ? came : Py_NewRef(pairs);
failed:
    Py_XDECREF(came);
    return NULL;
}

static int remove_one(const Table *table, Py_ssize_t block, PyObject *gone) {
    PyObject *key = PyList_GET_ITEM(table->keys, block), *number, *pair;
    if (key == Py_None) return 1;
    number = PyLong_FromSsize_t(block);
    pair = number ? PyTuple_Pack(2, key, number) : NULL;
    Py_XDECREF(number);
    if (!pair) return 0;
    int is_gone = remove_hash(table, block) == 1 && PyList_Append(gone, pair) == 0;
    Py_DECREF(pair);
    return is_gone;
}

static PyObject *remove_pairs(PyObject *self, PyObject *args) {
    Table table;
    OWNED Py_buffer taken = {0};
    if (!PyArg_ParseTuple(args, "OOy*", &table.blocks, &table.keys, &taken)) return NULL;
    PyObject *gone = is_table(&table) ? PyList_New(0) : NULL;
    const int32_t *blocks = taken.buf;
    for (Py_ssize_t place = 0; gone && place < taken.len / (Py_ssize_t)sizeof(int32_t); place++)
        if (!has_block(&table, blocks[place]) || !remove_one(&table, blocks[place], gone)) Py_CLEAR(gone);
    return gone;
}

/* A move, a pair that comes or the number of a page that goes, with what it has changed behind `came` or `gone`: 0 with an exception set. */
static int move_one(const Table *table, PyObject *move, PyObject *came, PyObject *gone) {
    if (PyLong_Check(move)) {
        Py_ssize_t block = PyLong_AsSsize_t(move);
        return has_block(table, block) && remove_one(table, block, gone);
    }
    int is_new = insert_one(table, move);
    return is_new > 0 ? PyList_Append(came, move) == 0 : is_new == 0;
}

static PyObject *move_all(PyObject *self, PyObject *args) {
    Table table;
    PyObject *moves;
    if (!PyArg_ParseTuple(args, "OOO!", &table.blocks, &table.keys, &PyList_Type, &moves) || !is_table(&table)) return NULL;
    PyObject *came = PyList_New(0), *gone = PyList_New(0), *both = NULL;
    int moved = came && gone;
    for (Py_ssize_t place = 0; moved && place < PyList_GET_SIZE(moves); place++)
        moved = move_one(&table, PyList_GET_ITEM(moves, place), came, gone);
    if (moved) both = PyTuple_Pack(2, came, gone);
    Py_XDECREF(came);
    Py_XDECREF(gone);
    return both;
}

static PyMethodDef functions[] = {
    METHOD("insert", insert_pairs, "Pairs come in unless their key has a block; those that came."),
    METHOD("remove", remove_pairs, "Blocks lose their keys; the pairs that went."),
    METHOD("move", move_all, "Pairs come and blocks lose their keys, one after another; what came and went."),
    METHOD("apply", apply_pairs, "Pairs go, pairs come."),
    NO_METHOD,
};

static PyModuleDef module = MODULE("_prefix_index", "Compiled implementation of prefix_index_plain.", functions);

PyMODINIT_FUNC PyInit__prefix_index(void) { return begin_module(&module, NULL, NULL); }
