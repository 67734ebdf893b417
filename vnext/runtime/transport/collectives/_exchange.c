/* The operations on the memory through which ranks exchange tensors: the fast implementation of PlainExchange in
   exchange_plain.py, method by method.

   Owns only its caller's buffer. Memory order: a release store orders data and ticket before ticks. A rank announces its sleep
   before its last check, and a rank that ticks checks for sleepers afterwards, so one of the two sees the other. Waits release
   Python's lock. */

#define _GNU_SOURCE
#include "compiled.h"
#include "rank_sum.h"
#include "waiting.h"

enum { LINE_BYTES = 128, LINES_OF_A_RANK = 2, HEAD_LINES = 1, PAGE_BYTES = 4096 };
enum { TICKETS_OFFSET = 16, TICKET_BYTES = 16, SETS = 2 };
enum { NOBODY = -1 };

typedef struct {
    uint64_t bytes;
    uint32_t kind, padding;
} Ticket;

typedef struct {
    PyObject_HEAD
    Py_buffer view;
    uint8_t *base; /* NULL once released */
    uint64_t capacity;
    uint32_t world, rank;
    int busy; /* calls that run without Python's lock */
} Exchange;

static uint8_t *line_of(const Exchange *exchange, uint32_t rank) {
    return exchange->base + (uint64_t)LINE_BYTES * (HEAD_LINES + (uint64_t)LINES_OF_A_RANK * rank);
}

static uint32_t *ticks_of(const Exchange *exchange, uint32_t rank) { return (uint32_t *)line_of(exchange, rank); }

static uint32_t *asleep_of(const Exchange *exchange, uint32_t rank) {
    return (uint32_t *)(line_of(exchange, rank) + LINE_BYTES);
}

static Ticket *ticket_of(const Exchange *exchange, uint32_t rank, uint64_t operation) {
    return (Ticket *)(line_of(exchange, rank) + TICKETS_OFFSET + operation % SETS * TICKET_BYTES);
}

static uint64_t data_offset(uint32_t world) {
    uint64_t lines = (uint64_t)LINE_BYTES * (HEAD_LINES + (uint64_t)LINES_OF_A_RANK * world);
    return (lines + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

static uint8_t *slot_of(const Exchange *exchange, uint32_t rank, uint64_t operation) {
    return exchange->base + data_offset(exchange->world) +
           (operation % SETS * exchange->world + rank) * exchange->capacity;
}

/* ---- without Python ---------------------------------------------------------------------------------------------- */

static int has_ticked(const Exchange *exchange, uint32_t rank, uint32_t ticks) {
    return (int32_t)(__atomic_load_n(ticks_of(exchange, rank), __ATOMIC_ACQUIRE) - ticks) >= 0;
}

static void tick(const Exchange *exchange, uint32_t ticks) {
    uint32_t *own = ticks_of(exchange, exchange->rank), asleep = 0;
    __atomic_store_n(own, ticks, __ATOMIC_SEQ_CST);
    for (uint32_t rank = 0; rank < exchange->world; ++rank)
        asleep |= __atomic_load_n(asleep_of(exchange, rank), __ATOMIC_SEQ_CST);
    if (asleep) wake_all(own);
}

/* Sleeps until the rank ticks, a signal comes or time is over; 0, or the error number of a wait that cannot work. */
static int sleep_on(const Exchange *exchange, uint32_t rank, uint32_t ticks, int64_t left) {
    uint32_t *word = ticks_of(exchange, rank), *own = asleep_of(exchange, exchange->rank);
    int error = 0;
    __atomic_store_n(own, 1, __ATOMIC_SEQ_CST);
    uint32_t seen = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    if ((int32_t)(seen - ticks) < 0) error = sleep_while(word, seen, left);
    __atomic_store_n(own, 0, __ATOMIC_SEQ_CST);
    return error;
}

/* NOBODY, or the first rank that has not ticked when time is over or a signal has come. `error` as of sleep_on. */
static int first_missing(const Exchange *exchange, uint32_t ticks, int64_t spin, int64_t timeout, int *error) {
    int64_t begin = now_ns(), passed;
    for (uint32_t rank = 0; rank < exchange->world; ++rank) {
        while (!has_ticked(exchange, rank, ticks)) {
            if ((passed = now_ns() - begin) >= timeout) return rank;
            if (passed < spin) {
                for (int i = 0; i < LOOKS_BETWEEN_YIELDS && !has_ticked(exchange, rank, ticks); ++i) pause_briefly();
                sched_yield(); /* a process that shares this core may be the one that we wait for */
                continue;
            }
            int failed = sleep_on(exchange, rank, ticks, timeout - passed);
            if (failed && failed != EAGAIN && failed != ETIMEDOUT) { /* a signal's handler is Python's to run */
                *error = failed == EINTR ? 0 : failed;
                return rank;
            }
        }
    }
    return NOBODY;
}

static int has_all(const Exchange *exchange, uint32_t ticks) {
    for (uint32_t rank = 0; rank < exchange->world; ++rank)
        if (!has_ticked(exchange, rank, ticks)) return 0;
    return 1;
}

/* ---- checks: False with an exception set ------------------------------------------------------------------------- */

static int is_open(const Exchange *exchange) {
    if (exchange->base) return 1;
    PyErr_SetString(PyExc_ValueError, "the exchange's memory was released");
    return 0;
}

static int is_within(const Exchange *exchange, uint64_t start, uint64_t bytes) {
    if (!is_open(exchange)) return 0;
    if (start <= exchange->capacity && bytes <= exchange->capacity - start) return 1;
    PyErr_Format(PyExc_ValueError, "%llu bytes at %llu do not fit a slot of %llu bytes", (unsigned long long)bytes,
                 (unsigned long long)start, (unsigned long long)exchange->capacity);
    return 0;
}

static int agrees(const Exchange *exchange, unsigned long long operation, uint32_t kind, uint64_t bytes) {
    for (uint32_t rank = 0; rank < exchange->world; ++rank) {
        const Ticket *ticket = ticket_of(exchange, rank, operation);
        if (ticket->kind == kind && ticket->bytes == bytes) continue;
        PyErr_Format(PyExc_ValueError,
                     "the ranks are out of step: rank %u came with %llu bytes of kind %u, rank %u with %llu of kind %u",
                     exchange->rank, (unsigned long long)bytes, kind, rank, (unsigned long long)ticket->bytes,
                     ticket->kind);
        return 0;
    }
    return 1;
}

/* ---- methods ----------------------------------------------------------------------------------------------------- */

static PyObject *enter(Exchange *self, PyObject *args) {
    unsigned long long operation, address, bytes;
    unsigned int ticks, kind;
    if (!PyArg_ParseTuple(args, "KIIKK", &operation, &ticks, &kind, &address, &bytes)) return NULL;
    if (!is_within(self, 0, bytes)) return NULL;
    memcpy(slot_of(self, self->rank, operation), (const void *)(uintptr_t)address, bytes);
    *ticket_of(self, self->rank, operation) = (Ticket){bytes, kind, 0};
    tick(self, ticks);
    Py_RETURN_NONE;
}

static PyObject *tick_again(Exchange *self, PyObject *args) {
    unsigned int ticks;
    if (!PyArg_ParseTuple(args, "I", &ticks) || !is_open(self)) return NULL;
    tick(self, ticks);
    Py_RETURN_NONE;
}

static PyObject *await_all(Exchange *self, PyObject *args) {
    unsigned long long operation, bytes;
    unsigned int ticks, kind;
    long long spin, timeout;
    int missing = NOBODY, error = 0;
    if (!PyArg_ParseTuple(args, "KIIKLL", &operation, &ticks, &kind, &bytes, &spin, &timeout)) return NULL;
    if (!is_open(self)) return NULL;
    if (!has_all(self, ticks)) {
        ++self->busy;
        Py_BEGIN_ALLOW_THREADS
        missing = first_missing(self, ticks, spin, timeout, &error);
        Py_END_ALLOW_THREADS
        --self->busy;
    }
    if (error) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    if (missing == NOBODY && !agrees(self, operation, kind, bytes)) return NULL;
    return PyLong_FromLong(missing);
}

static PyObject *ticks_now(Exchange *self, PyObject *args) {
    unsigned int rank;
    if (!PyArg_ParseTuple(args, "I", &rank) || !is_open(self)) return NULL;
    if (rank >= self->world) return PyErr_Format(PyExc_ValueError, "there is no rank %u", rank);
    return PyLong_FromUnsignedLong(__atomic_load_n(ticks_of(self, rank), __ATOMIC_ACQUIRE));
}

static PyObject *add(Exchange *self, PyObject *args) {
    unsigned long long operation, start, count, address;
    unsigned int kind;
    const uint8_t *parts[RANKS_MAX];
    if (!PyArg_ParseTuple(args, "KIKKK", &operation, &kind, &start, &count, &address)) return NULL;
    if (kind > FLOAT16) return PyErr_Format(PyExc_ValueError, "kind %u cannot be added", kind);
    uint64_t size = kind == FLOAT32 ? 4 : 2;
    if (start > self->capacity || count > self->capacity || !is_within(self, start * size, count * size)) {
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "%llu elements do not fit a slot", count);
    }
    for (uint32_t rank = 0; rank < self->world; ++rank) parts[rank] = slot_of(self, rank, operation) + start * size;
    uint8_t *own = slot_of(self, self->rank, operation) + start * size;
    sum_ranks(kind, parts, self->world, count, address ? (uint8_t *)(uintptr_t)address : own);
    Py_RETURN_NONE;
}

/* take(operation, rank, start, bytes, first, (address, row, stride)) */
static PyObject *take(Exchange *self, PyObject *args) {
    unsigned long long operation, start, bytes, first, address, row, stride;
    unsigned int rank;
    if (!PyArg_ParseTuple(args, "KIKKK(KKK)", &operation, &rank, &start, &bytes, &first, &address, &row, &stride)) return NULL;
    if (!is_within(self, start, bytes)) return NULL;
    if (rank >= self->world || row < 1) return PyErr_Format(PyExc_ValueError, "no rank %u, or empty rows", rank);
    const uint8_t *source = slot_of(self, rank, operation) + start;
    while (bytes) {
        uint64_t inside = first % row, here = row - inside < bytes ? row - inside : bytes;
        memcpy((uint8_t *)(uintptr_t)address + first / row * stride + inside, source, here);
        source += here, first += here, bytes -= here;
    }
    Py_RETURN_NONE;
}

static PyObject *release(Exchange *self, PyObject *unused) {
    if (self->busy) return PyErr_Format(PyExc_RuntimeError, "another thread waits on this exchange");
    if (self->base) PyBuffer_Release(&self->view);
    self->base = NULL;
    Py_RETURN_NONE;
}

/* ---- the type ---------------------------------------------------------------------------------------------------- */

static PyObject *exchange_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    PyObject *buffer;
    unsigned int world, rank;
    unsigned long long capacity;
    if (!PyArg_ParseTuple(args, "OIIK", &buffer, &world, &rank, &capacity)) return NULL;
    Exchange *self = (Exchange *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    if (PyObject_GetBuffer(buffer, &self->view, PyBUF_WRITABLE) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    uint64_t all = self->view.len;
    if (rank >= world || world > RANKS_MAX || capacity < 64 || capacity % 64 || all < data_offset(world) ||
        (all - data_offset(world)) / (SETS * world) != capacity || (all - data_offset(world)) % (SETS * world)) {
        PyErr_SetString(PyExc_ValueError, "the buffer has another size than its ranks and its capacity");
        PyBuffer_Release(&self->view);
        Py_DECREF(self);
        return NULL;
    }
    self->base = self->view.buf;
    self->capacity = capacity;
    self->world = world;
    self->rank = rank;
    return (PyObject *)self;
}

static void exchange_dealloc(Exchange *self) {
    if (self->base) PyBuffer_Release(&self->view);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    METHOD("enter", enter, "Copy this rank's bytes into its slot and tick."),
    METHOD("tick", tick_again, "Tell the others that this rank is one phase further."),
    METHOD("await_all", await_all, "Spin, then sleep, until all ticked; -1 or who is missing."),
    METHOD("ticks", ticks_now, "How far a rank has come."),
    METHOD("add", add, "The ranks' elements summed by one tree."),
    METHOD("take", take, "Copy bytes of a rank's slot into rows."),
    {"release", (PyCFunction)release, METH_NOARGS, "Give the buffer back."},
    NO_METHOD,
};

static PyType_Slot slots[] = {
    {Py_tp_new, exchange_new},
    {Py_tp_dealloc, exchange_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_doc, "Exchange(buffer, world_size, rank, capacity_bytes): see PlainExchange."},
    {0, NULL},
};

static PyType_Spec specification = {
    "vnext.runtime.transport.collectives._exchange.Exchange", sizeof(Exchange), 0, Py_TPFLAGS_DEFAULT, slots,
};

static const Constant constants[] = {
    CONSTANT(LINE_BYTES) CONSTANT(PAGE_BYTES) CONSTANT(TICKETS_OFFSET) CONSTANT(TICKET_BYTES) CONSTANT(SETS) CONSTANT(NOBODY) CONSTANT(RANKS_MAX) CONSTANT(FLOAT32) CONSTANT(BFLOAT16) CONSTANT(FLOAT16) NO_CONSTANT,
};

static PyModuleDef module = MODULE("_exchange", NULL, NULL);

PyMODINIT_FUNC PyInit__exchange(void) { return begin_module(&module, constants, &specification); }
