/* The moves of the prefix table, in one pass over the pairs. Twin of names_plain.py, which says what each function means.
 *
 * Owns nothing: both sides are Python's own dict and list, changed in place. A block that is not in the list, or a side that
 * does not mirror the other, raises and leaves what was moved before.
 */
#include "names.h"

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

static int come_in(const Table *table, PyObject *pairs) {
    for (Py_ssize_t place = 0; place < PyList_GET_SIZE(pairs); place++) {
        PyObject *pair = PyList_GET_ITEM(pairs, place), *key;
        Py_ssize_t block;
        if (!read_pair(table, pair, &key, &block)) return 0;
        if (PyDict_SetItem(table->blocks, key, PyTuple_GET_ITEM(pair, 1)) < 0) return 0;
        set_key(table, block, key);
    }
    return 1;
}

static int go_out(const Table *table, PyObject *pairs) {
    for (Py_ssize_t place = 0; place < PyList_GET_SIZE(pairs); place++) {
        PyObject *key;
        Py_ssize_t block;
        if (!read_pair(table, PyList_GET_ITEM(pairs, place), &key, &block)) return 0;
        if (PyDict_DelItem(table->blocks, key) < 0) return 0;
        set_key(table, block, Py_None);
    }
    return 1;
}

static PyObject *change(PyObject *self, PyObject *args) {
    Table table;
    PyObject *gone, *come;
    if (!PyArg_ParseTuple(args, "OOO!O!", &table.blocks, &table.keys, &PyList_Type, &gone, &PyList_Type, &come)) return NULL;
    if (!is_table(&table) || !go_out(&table, gone) || !come_in(&table, come)) return NULL;
    Py_RETURN_NONE;
}

/* As offer_key, of a pair. */
static int offer_one(const Table *table, PyObject *pair) {
    PyObject *key;
    Py_ssize_t block;
    if (!read_pair(table, pair, &key, &block)) return -1;
    return offer_key(table, key, PyTuple_GET_ITEM(pair, 1), block);
}

static PyObject *offer(PyObject *self, PyObject *args) {
    Table table;
    PyObject *pairs, *came = NULL;
    if (!PyArg_ParseTuple(args, "OOO!", &table.blocks, &table.keys, &PyList_Type, &pairs) || !is_table(&table)) return NULL;
    for (Py_ssize_t place = 0; place < PyList_GET_SIZE(pairs); place++) {
        PyObject *pair = PyList_GET_ITEM(pairs, place);
        int is_new = offer_one(&table, pair);
        if (is_new == 0 && !came) came = PyList_GetSlice(pairs, 0, place); /* the first that stays out */
        if (is_new < 0 || (is_new == 0 && !came)) goto failed;
        if (is_new == 1 && came && PyList_Append(came, pair) < 0) goto failed;
    }
    return came ? came : Py_NewRef(pairs);
failed:
    Py_XDECREF(came);
    return NULL;
}

static int forget_one(const Table *table, Py_ssize_t block, PyObject *gone) {
    PyObject *key = PyList_GET_ITEM(table->keys, block), *number, *pair;
    if (key == Py_None) return 1;
    number = PyLong_FromSsize_t(block);
    pair = number ? PyTuple_Pack(2, key, number) : NULL;
    Py_XDECREF(number);
    if (!pair) return 0;
    int is_gone = forget_key(table, block) == 1 && PyList_Append(gone, pair) == 0;
    Py_DECREF(pair);
    return is_gone;
}

static PyObject *forget(PyObject *self, PyObject *args) {
    Table table;
    Py_buffer taken;
    if (!PyArg_ParseTuple(args, "OOy*", &table.blocks, &table.keys, &taken)) return NULL;
    PyObject *gone = is_table(&table) ? PyList_New(0) : NULL;
    const int32_t *blocks = taken.buf;
    for (Py_ssize_t place = 0; gone && place < taken.len / (Py_ssize_t)sizeof(int32_t); place++)
        if (!has_block(&table, blocks[place]) || !forget_one(&table, blocks[place], gone)) Py_CLEAR(gone);
    PyBuffer_Release(&taken);
    return gone;
}

static PyMethodDef functions[] = {
    {"offer", offer, METH_VARARGS, "Pairs come in unless their key has a block; those that came."},
    {"forget", forget, METH_VARARGS, "Blocks lose their keys; the pairs that went."},
    {"change", change, METH_VARARGS, "Pairs go, pairs come."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_names", "Compiled twin of names_plain.", -1, functions};

PyMODINIT_FUNC PyInit__names(void) { return PyModule_Create(&module); }
