/* The common part of all compiled modules: initialization and the release of buffers. The Python side is compiled.py.

   A module exports the hash of its sources and the constants that its C shares with Python. setup.py defines VNEXT_BUILT_FROM. */

#ifndef VNEXT_COMPILED_H
#define VNEXT_COMPILED_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* A buffer that is released when its scope ends: `OWNED Py_buffer cells = {0};`. A buffer that was never filled is ignored. */
#define OWNED __attribute__((cleanup(PyBuffer_Release)))

/* The same for buffers inside a struct. */
#define RELEASE(...)                                                                      \
    do {                                                                                  \
        Py_buffer *buffers_[] = {__VA_ARGS__};                                            \
        for (size_t i_ = 0; i_ < sizeof buffers_ / sizeof *buffers_; ++i_) PyBuffer_Release(buffers_[i_]); \
    } while (0)

/* A tuple among a function's arguments, for the format "O!". CPython keeps room for 8 buffers unless a format names more outside
   its parentheses, so a tuple of buffers is parsed by a call of its own. */
#define TUPLE(place) &PyTuple_Type, place

/* A method that takes its arguments as a tuple; a table of methods ends with NO_METHOD. */
#define METHOD(name, function, text) {name, (PyCFunction)(void (*)(void))function, METH_VARARGS, text}
#define NO_METHOD {NULL, NULL, 0, NULL}

#define MODULE(name, text, methods) {PyModuleDef_HEAD_INIT, name, text, -1, methods, NULL, NULL, NULL, NULL}

/* A constant that Python defines under the same name; a table of constants ends with NO_CONSTANT. */
typedef struct {
    const char *name;
    long long value;
} Constant;
#define CONSTANT(name) {#name, (long long)(name)},
#define NO_CONSTANT {NULL, 0}

/* The module, or NULL with an exception set. `constants` and `type` may be NULL. */
static inline PyObject *begin_module(PyModuleDef *definition, const Constant *constants, PyType_Spec *type) {
    PyObject *made = PyModule_Create(definition), *numbers = PyDict_New(), *cls = type ? PyType_FromSpec(type) : NULL;
    int failed = !made || !numbers || (type && !cls);
    for (const Constant *each = constants; !failed && each && each->name; ++each) {
        PyObject *number = PyLong_FromLongLong(each->value);
        failed = !number || PyDict_SetItemString(numbers, each->name, number) < 0;
        Py_XDECREF(number);
    }
    failed = failed || PyModule_AddObjectRef(made, "CONSTANTS", numbers) < 0 ||
             PyModule_AddStringConstant(made, "BUILT_FROM", VNEXT_BUILT_FROM) < 0 ||
             (cls && PyModule_AddType(made, (PyTypeObject *)cls) < 0);
    Py_XDECREF(numbers);
    Py_XDECREF(cls);
    if (failed) Py_CLEAR(made);
    return made;
}

#endif
