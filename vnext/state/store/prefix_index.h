/* The prefix table as its moves see it, for `_prefix_index.c` and for strides (vnext/sched/_stride.c). prefix_index_plain.py says what each
   move means. Both sides are Python's own dict and list, changed in place. */

#ifndef VNEXT_NAMES_H
#define VNEXT_NAMES_H

#include "compiled.h"

typedef struct {
    PyObject *blocks, *keys;
} Table;

static inline int is_table(const Table *table) {
    if (PyDict_Check(table->blocks) && PyList_Check(table->keys)) return 1;
    PyErr_SetString(PyExc_TypeError, "a table is a dict and a list");
    return 0;
}

static inline int has_block(const Table *table, Py_ssize_t block) {
    if (block >= 0 && block < PyList_GET_SIZE(table->keys)) return 1;
    if (!PyErr_Occurred()) PyErr_Format(PyExc_IndexError, "there is no block %zd", block);
    return 0;
}

static inline void set_key(const Table *table, Py_ssize_t block, PyObject *key) {
    PyObject *before = PyList_GET_ITEM(table->keys, block);
    Py_INCREF(key);
    PyList_SET_ITEM(table->keys, block, key);
    Py_XDECREF(before);
}

/* A key and the number of its block, which is one of the table's: 1 if the key is new and came in, 0 if it has a block already,
   -1 with an exception set. */
static inline int insert_hash(const Table *table, PyObject *key, PyObject *number, Py_ssize_t block) {
    Py_ssize_t before = PyDict_GET_SIZE(table->blocks);
    if (!PyDict_SetDefault(table->blocks, key, number)) return -1;
    if (PyDict_GET_SIZE(table->blocks) == before) return 0;
    set_key(table, block, key);
    return 1;
}

/* A block of the table loses its key, if it has one: 1, 0 if it has none, -1 with an exception set. */
static inline int remove_hash(const Table *table, Py_ssize_t block) {
    PyObject *key = PyList_GET_ITEM(table->keys, block);
    if (key == Py_None) return 0;
    if (PyDict_DelItem(table->blocks, key) < 0) return -1;
    set_key(table, block, Py_None);
    return 1;
}

#endif
