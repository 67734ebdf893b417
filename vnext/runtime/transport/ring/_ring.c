/* The operations on a ring's memory, compiled: the fast implementation of PlainMemory in memory_plain.py, method by method.

   Owns only its caller's buffer. It trusts nothing in the memory: it reads a size once, checks it against the ring's bounds,
   and leaves an invalid message untouched for ring.py to report. Memory order: data before position, position before signal,
   by release stores and acquire loads. Spinning and sleeping release Python's lock. */

#define _GNU_SOURCE
#include "compiled.h"
#include "waiting.h"

enum { LINE_BYTES = 128, SIGNAL_OFFSET = 8, HEAD_BYTES = 8, ALIGNMENT = 8, STATE_MASK = 3, STATE_BITS = 2 };
enum { ATTACHED = 1, GONE = 2 };
#define HEAD_MARK 0x52494E47u

typedef struct {
    PyObject_HEAD
    Py_buffer view;
    uint8_t *data; /* NULL once released */
    uint64_t capacity;
    uint32_t lines;
    int busy; /* calls that run without Python's lock */
} Memory;

static uint64_t padded(uint64_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

static uint8_t *line_at(const Memory *memory, uint32_t line) {
    return (uint8_t *)memory->view.buf + (Py_ssize_t)LINE_BYTES * (1 + (Py_ssize_t)line);
}

static uint32_t *signal_of(const Memory *memory, uint32_t line) {
    return (uint32_t *)(line_at(memory, line) + SIGNAL_OFFSET);
}

static uint32_t signal_now(const Memory *memory, uint32_t line) {
    return __atomic_load_n(signal_of(memory, line), __ATOMIC_ACQUIRE);
}

static uint64_t position_now(const Memory *memory, uint32_t line) {
    return __atomic_load_n((uint64_t *)line_at(memory, line), __ATOMIC_ACQUIRE);
}

static int is_line(const Memory *memory, uint32_t line) {
    if (memory->data && line < memory->lines) return 1;
    PyErr_Format(PyExc_ValueError, "the ring's memory was released or has no line %u", line);
    return 0;
}

static int is_place(const Memory *memory, uint64_t position, uint64_t bytes) {
    if (memory->data && position % ALIGNMENT == 0 && bytes <= memory->capacity) return 1;
    PyErr_Format(PyExc_ValueError, "%llu bytes at position %llu do not lie in the ring", (unsigned long long)bytes,
                 (unsigned long long)position);
    return 0;
}

/* ---- without Python ---------------------------------------------------------------------------------------------- */

static void copy_in(const Memory *memory, uint64_t position, const void *source, uint64_t bytes) {
    uint64_t start = position % memory->capacity, room = memory->capacity - start;
    uint64_t first = bytes < room ? bytes : room;
    memcpy(memory->data + start, source, first);
    memcpy(memory->data, (const uint8_t *)source + first, bytes - first);
}

static void copy_out(const Memory *memory, uint64_t position, void *target, uint64_t bytes) {
    uint64_t start = position % memory->capacity, room = memory->capacity - start;
    uint64_t first = bytes < room ? bytes : room;
    memcpy(target, memory->data + start, first);
    memcpy((uint8_t *)target + first, memory->data, bytes - first);
}

static void store(const Memory *memory, uint32_t line, uint64_t position, uint32_t presence) {
    uint32_t *signal = signal_of(memory, line);
    __atomic_store_n((uint64_t *)line_at(memory, line), position, __ATOMIC_RELEASE);
    uint32_t count = (__atomic_load_n(signal, __ATOMIC_RELAXED) >> STATE_BITS) + 1;
    __atomic_store_n(signal, count << STATE_BITS | presence, __ATOMIC_RELEASE);
    wake_all(signal);
}

/* See await_change. 0, or the error number of a wait that cannot work. */
static int wait_until_changed(const Memory *memory, uint32_t line, uint64_t position, int64_t spin, int64_t timeout) {
    int64_t begin = now_ns();
    for (;;) {
        uint32_t signal = signal_now(memory, line); /* before the position: a later change ends the sleep at once */
        if (position_now(memory, line) != position || (signal & STATE_MASK) >= GONE) return 0;
        int64_t passed = now_ns() - begin;
        if (passed >= timeout) return 0;
        if (passed < spin) {
            for (int i = 0; i < LOOKS_BETWEEN_YIELDS && position_now(memory, line) == position; ++i) pause_briefly();
            sched_yield(); /* a process that shares this core may be the one that we wait for */
            continue;
        }
        int error = sleep_while(signal_of(memory, line), signal, timeout - passed);
        if (error == EINTR) return 0; /* a signal's handler is Python's to run */
        if (error && error != EAGAIN && error != ETIMEDOUT) return error;
    }
}

/* The size of the whole message `number` at `position` if all of it is there, else -1. */
static int64_t whole_message(const Memory *memory, uint64_t position, uint32_t number) {
    uint64_t available = position_now(memory, 0) - position;
    if (available < HEAD_BYTES || available > memory->capacity || available % ALIGNMENT) return -1;
    uint32_t head[2];
    copy_out(memory, position, head, HEAD_BYTES);
    if (head[1] != (head[0] ^ number ^ HEAD_MARK)) return -1;
    if (head[0] > memory->capacity / 2 || HEAD_BYTES + padded(head[0]) > available) return -1;
    return head[0];
}

/* ---- methods ----------------------------------------------------------------------------------------------------- */

/* False with an exception set when the wait cannot work. */
static int wait_without_lock(Memory *memory, uint32_t line, uint64_t position, int64_t spin, int64_t timeout) {
    int error;
    ++memory->busy;
    Py_BEGIN_ALLOW_THREADS
    error = wait_until_changed(memory, line, position, spin, timeout);
    Py_END_ALLOW_THREADS
    --memory->busy;
    if (!error) return 1;
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
    return 0;
}

static PyObject *look(Memory *self, PyObject *args) {
    unsigned int line;
    if (!PyArg_ParseTuple(args, "I", &line) || !is_line(self, line)) return NULL;
    uint32_t signal = signal_now(self, line);
    return Py_BuildValue("IK", signal, (unsigned long long)position_now(self, line));
}

static PyObject *publish(Memory *self, PyObject *args) {
    unsigned int line, presence;
    unsigned long long position;
    if (!PyArg_ParseTuple(args, "IKI", &line, &position, &presence) || !is_line(self, line)) return NULL;
    store(self, line, position, presence);
    Py_RETURN_NONE;
}

static PyObject *await_change(Memory *self, PyObject *args) {
    unsigned int line;
    unsigned long long position;
    long long spin, timeout;
    if (!PyArg_ParseTuple(args, "IKLL", &line, &position, &spin, &timeout) || !is_line(self, line)) return NULL;
    if (!wait_without_lock(self, line, position, spin, timeout)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *put(Memory *self, PyObject *args) {
    unsigned long long position;
    OWNED Py_buffer source = {0};
    if (!PyArg_ParseTuple(args, "Ky*", &position, &source) || !is_place(self, position, source.len)) return NULL;
    copy_in(self, position, source.buf, source.len);
    Py_RETURN_NONE;
}

static PyObject *take(Memory *self, PyObject *args) {
    unsigned long long position;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "Kn", &position, &bytes) || !is_place(self, position, (uint64_t)bytes)) return NULL;
    PyObject *taken = PyBytes_FromStringAndSize(NULL, bytes);
    if (taken) copy_out(self, position, PyBytes_AS_STRING(taken), bytes);
    return taken;
}

static PyObject *send_message(Memory *self, PyObject *args) {
    unsigned long long position;
    unsigned int number;
    OWNED Py_buffer message = {0};
    if (!PyArg_ParseTuple(args, "KIy*", &position, &number, &message) || !is_place(self, position, HEAD_BYTES)) return NULL;
    if ((uint64_t)message.len > self->capacity / 2 || message.len > UINT32_MAX)
        return PyErr_Format(PyExc_ValueError, "a message longer than half the ring goes in parts");
    uint32_t bytes = message.len, head[2] = {bytes, bytes ^ number ^ HEAD_MARK};
    copy_in(self, position, head, HEAD_BYTES);
    copy_in(self, position + HEAD_BYTES, message.buf, bytes);
    position += HEAD_BYTES + padded(bytes);
    store(self, 0, position, ATTACHED);
    return PyLong_FromUnsignedLongLong(position);
}

static PyObject *receive_message(Memory *self, PyObject *args) {
    unsigned int own_line, number;
    unsigned long long position;
    long long spin, timeout;
    if (!PyArg_ParseTuple(args, "IKILL", &own_line, &position, &number, &spin, &timeout)) return NULL;
    if (!is_line(self, own_line) || !is_place(self, position, HEAD_BYTES)) return NULL;
    if (position_now(self, 0) == position && !wait_without_lock(self, 0, position, spin, timeout)) return NULL;
    int64_t bytes = whole_message(self, position, number);
    if (bytes < 0) Py_RETURN_NONE;
    PyObject *message = PyBytes_FromStringAndSize(NULL, bytes);
    if (!message) return NULL;
    copy_out(self, position + HEAD_BYTES, PyBytes_AS_STRING(message), bytes);
    store(self, own_line, position + HEAD_BYTES + padded(bytes), ATTACHED);
    return message;
}

static PyObject *release(Memory *self, PyObject *unused) {
    if (self->busy) return PyErr_Format(PyExc_RuntimeError, "another thread waits on this end of the ring");
    if (self->data) PyBuffer_Release(&self->view);
    self->data = NULL;
    Py_RETURN_NONE;
}

/* ---- the type ---------------------------------------------------------------------------------------------------- */

static PyObject *memory_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    PyObject *buffer;
    unsigned int lines;
    unsigned long long capacity;
    if (!PyArg_ParseTuple(args, "OIK", &buffer, &lines, &capacity)) return NULL;
    Memory *self = (Memory *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    if (PyObject_GetBuffer(buffer, &self->view, PyBUF_WRITABLE) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    uint64_t all = self->view.len, head = (uint64_t)LINE_BYTES * (1 + (uint64_t)lines);
    if (lines < 1 || capacity < 16 || capacity % 16 || all < head || all - head != capacity) {
        PyErr_SetString(PyExc_ValueError, "the buffer has another size than its lines and its capacity");
        PyBuffer_Release(&self->view);
        Py_DECREF(self);
        return NULL;
    }
    self->data = (uint8_t *)self->view.buf + head;
    self->capacity = capacity;
    self->lines = lines;
    return (PyObject *)self;
}

static void memory_dealloc(Memory *self) {
    if (self->data) PyBuffer_Release(&self->view);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    METHOD("look", look, "(signal, position) of a line."),
    METHOD("publish", publish, "Store a line's position and presence, wake its sleepers."),
    METHOD("await_change", await_change, "Spin, then sleep, until a line's position is another."),
    METHOD("put", put, "Copy bytes to the place of a position."),
    METHOD("take", take, "A copy of the bytes at a position."),
    METHOD("send", send_message, "Write and publish a whole message; the position behind it."),
    METHOD("receive", receive_message, "The next whole message, waited for, or None."),
    {"release", (PyCFunction)release, METH_NOARGS, "Give the buffer back."},
    NO_METHOD,
};

static PyType_Slot slots[] = {
    {Py_tp_new, memory_new},
    {Py_tp_dealloc, memory_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_doc, "Memory(buffer, line_count, capacity_bytes): see PlainMemory."},
    {0, NULL},
};

static PyType_Spec specification = {
    "vnext.runtime.transport.ring._ring.Memory", sizeof(Memory), 0, Py_TPFLAGS_DEFAULT, slots,
};

static const Constant constants[] = {
    CONSTANT(LINE_BYTES) CONSTANT(HEAD_BYTES) CONSTANT(ALIGNMENT) CONSTANT(STATE_BITS) CONSTANT(ATTACHED) CONSTANT(GONE) CONSTANT(HEAD_MARK) NO_CONSTANT,
};

static PyModuleDef module = MODULE("_ring", NULL, NULL);

PyMODINIT_FUNC PyInit__ring(void) { return begin_module(&module, constants, &specification); }
