/* OpenBlocks: the unfinished block of each live request, and the pseudonyms of its tokens. The fast implementation of
   open_blocks_plain.py.

   A hash table maps a request to its open block. A commit costs a look-up and a few multiplications per row; the secrets of the
   blocks it fills are computed eight at a time. The arithmetic equals that of pseudonyms.py exactly. */

#include "steady_frame.h"

#define LANES 1
#define LANES_TARGET
#include "blake2b_keyed.h"
#undef LANES
#undef LANES_TARGET

#if defined(__x86_64__) && defined(__GNUC__)
#define WIDE_TARGET __attribute__((target("avx512f,avx512dq")))
#define LANES 8
#define LANES_TARGET WIDE_TARGET
#include "blake2b_keyed.h"
#define WIDE 1
#else
#define WIDE 0
#endif

static const uint64_t GOLDEN = 0x9E3779B97F4A7C15, STRIDE = 0xD1342543DE82EF95;
static const uint64_t FACTOR_0 = 0xBF58476D1CE4E5B9, FACTOR_1 = 0x94D049BB133111EB;
enum { OPEN_BLOCKS_MIN = 64, INDEX_RATIO = 4, SECRET_AT = 4, TOKENS_AT = 20, SECRET_SIZE = 16, NOBODY = -1 };
enum { LINE = 64 }; /* of the processor's cache: what a token needs of its tail is in the first, but for its place */

/* `message` is what the next block's secret is the digest of: "next", this block's secret, its tokens; zeros behind. */
typedef struct {
    int64_t id;
    uint64_t sum;
    int64_t count, commits; /* tokens; the last commit that gave it one */
    uint8_t message[];
} Tail;

/* Tokens and the open_blocks that take them, CHUNK at a time and field by field, so that a processor can do several at once. */
enum { CHUNK = 64 };
typedef struct {
    uint64_t secret_0[CHUNK], secret_1[CHUNK], sum[CHUNK], place[CHUNK], token[CHUNK];
} Chunk;

typedef struct {
    PyObject_HEAD
    uint64_t keyed[8];
    int64_t block_size, base, commits;
    void (*reckon)(Chunk *, Py_ssize_t, uint64_t, int);
    int bits, half, wide; /* of a pseudonym; half of base's; whether this processor has WIDE_TARGET */
    Py_ssize_t message_size, stride, size, capacity;
    char *memory, *open_blocks;    /* `capacity` of them and one to work with; the first `size` belong to requests */
    int32_t *index;          /* INDEX_RATIO * capacity places: the number of a tail or NOBODY */
    int32_t *found, *filled; /* numbers of open_blocks, `capacity` places each: the last commit's rows, and blocks now full */
} OpenBlocks;

static Tail *tail_at(const OpenBlocks *self, Py_ssize_t number) { return (Tail *)(self->open_blocks + number * self->stride); }

/* ---- pseudonyms.py ---- */

static inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * FACTOR_0;
    x = (x ^ (x >> 27)) * FACTOR_1;
    return x ^ (x >> 31);
}

/* Tokens become pseudonyms less the base, sums those of the open_blocks that have taken them. */
static inline void reckon(Chunk *c, Py_ssize_t count, uint64_t base, int half) {
    uint64_t low = base - 1;
    for (Py_ssize_t i = 0; i < count; ++i) {
        uint64_t token = c->token[i], keys = mix((c->sum[i] + c->place[i] * STRIDE) ^ c->secret_1[i]);
        uint64_t x = (token ^ keys) & low;
        x = (x * ((keys >> 20) | 1)) & low;
        x ^= x >> half;
        x = (x * ((keys >> 40) | 1)) & low;
        x ^= x >> half;
        c->sum[i] += mix((token + (c->place[i] + 1) * GOLDEN) ^ c->secret_0[i]);
        c->token[i] = x;
    }
}

static void reckon_plain(Chunk *c, Py_ssize_t count, uint64_t base, int half) { reckon(c, count, base, half); }
#if WIDE
WIDE_TARGET static void reckon_wide(Chunk *c, Py_ssize_t count, uint64_t base, int half) { reckon(c, count, base, half); }
#endif

static void put_in(Chunk *chunk, Py_ssize_t at, const Tail *tail, int32_t token) {
    memcpy(&chunk->secret_0[at], tail->message + SECRET_AT, sizeof(uint64_t));
    memcpy(&chunk->secret_1[at], tail->message + SECRET_AT + 8, sizeof(uint64_t));
    chunk->sum[at] = tail->sum, chunk->place[at] = (uint64_t)tail->count, chunk->token[at] = (uint64_t)(int64_t)token;
}

static void append(Tail *tail, int32_t token, uint64_t sum) {
    memcpy(tail->message + TOKENS_AT + 4 * tail->count++, &token, sizeof token);
    tail->sum = sum;
}

static void begin(Tail *tail, const void *secret) {
    memcpy(tail->message + SECRET_AT, secret, SECRET_SIZE);
    tail->sum = 0;
    tail->count = 0;
}

/* These open_blocks are full blocks: start the blocks after them. */
static void begin_next(OpenBlocks *self, const int32_t *numbers, Py_ssize_t count) {
    uint64_t secrets[8][2];
    const uint8_t *messages[8];
    for (Py_ssize_t at = 0, lanes; at < count; at += lanes) {
        lanes = count - at < 8 ? count - at : 8;
        for (Py_ssize_t lane = 0; lane < 8; ++lane) /* those that are too many do the first again */
            messages[lane] = tail_at(self, numbers[lane < lanes ? at + lane : at])->message;
#if WIDE
        if (self->wide && lanes > 2) keyed_digests_8(self->keyed, messages, self->message_size, secrets);
        else
#endif
            for (Py_ssize_t lane = 0; lane < lanes; ++lane)
                keyed_digests_1(self->keyed, messages + lane, self->message_size, secrets + lane);
        for (Py_ssize_t lane = 0; lane < lanes; ++lane) begin(tail_at(self, numbers[at + lane]), secrets[lane]);
    }
}

/* A history from its root secret on: all its pseudonyms; the tail is what is left of it. */
static PyObject *walk(OpenBlocks *self, int32_t number, const Py_buffer *secret, const Py_buffer *tokens) {
    if (secret->len != SECRET_SIZE || tokens->len % 4) {
        return PyErr_Format(PyExc_ValueError, "a secret has 16 bytes and a token has 4");
    }
    PyObject *shaped = PyBytes_FromStringAndSize(NULL, tokens->len);
    if (!shaped) return NULL;
    Tail *tail = tail_at(self, number);
    Chunk one;
    begin(tail, secret->buf);
    for (Py_ssize_t at = 0; at < tokens->len; at += 4) {
        int32_t token, pseudonym;
        memcpy(&token, (const char *)tokens->buf + at, sizeof token);
        put_in(&one, 0, tail, token);
        reckon(&one, 1, (uint64_t)self->base, self->half);
        append(tail, token, one.sum[0]);
        pseudonym = (int32_t)(one.token[0] + (uint64_t)self->base);
        memcpy(PyBytes_AS_STRING(shaped) + at, &pseudonym, sizeof pseudonym);
        if (tail->count == self->block_size) begin_next(self, &number, 1);
    }
    return shaped;
}

/* ---- which tail ---- */

static inline Py_ssize_t place_of(const OpenBlocks *self, int64_t id) {
    Py_ssize_t mask = INDEX_RATIO * self->capacity - 1, place = (Py_ssize_t)(mix((uint64_t)id) & (uint64_t)mask);
    while (self->index[place] != NOBODY && tail_at(self, self->index[place])->id != id) place = (place + 1) & mask;
    return place;
}

static void fill_index(OpenBlocks *self) {
    memset(self->index, 0xff, INDEX_RATIO * self->capacity * sizeof *self->index);
    for (Py_ssize_t number = 0; number < self->size; ++number)
        self->index[place_of(self, tail_at(self, number)->id)] = (int32_t)number;
}

/* Room for `capacity` open_blocks, a power of two. */
static int make_room(OpenBlocks *self, Py_ssize_t capacity) {
    char *memory = PyMem_Calloc(capacity + 2, self->stride);
    int32_t *index = PyMem_Malloc(INDEX_RATIO * capacity * sizeof *index);
    int32_t *places = PyMem_Calloc(2 * capacity, sizeof *places);
    if (!memory || !index || !places) {
        PyMem_Free(memory);
        PyMem_Free(index);
        PyMem_Free(places);
        PyErr_NoMemory();
        return -1;
    }
    char *open_blocks = memory + (LINE - (uintptr_t)memory % LINE) % LINE;
    if (self->size) memcpy(open_blocks, self->open_blocks, self->size * self->stride);
    PyMem_Free(self->memory);
    PyMem_Free(self->index);
    PyMem_Free(self->found);
    self->memory = memory, self->open_blocks = open_blocks, self->index = index, self->found = places, self->filled = places + capacity;
    self->capacity = capacity;
    for (Py_ssize_t number = self->size; number <= capacity; ++number)
        memcpy(tail_at(self, number)->message, "next", SECRET_AT);
    fill_index(self);
    return 0;
}

/* ---- methods ---- */

/* arrive(id, secret, tokens) -> pseudonyms: a new request's tail, behind its prompt */
static PyObject *arrive(OpenBlocks *self, PyObject *args) {
    OWNED Py_buffer secret = {0}, tokens = {0};
    long long id;
    if (!PyArg_ParseTuple(args, "Ly*y*", &id, &secret, &tokens)) return NULL;
    if (id < 0) return PyErr_Format(PyExc_ValueError, "there is no request %lld", id);
    if (self->size == self->capacity && make_room(self, 2 * self->capacity) < 0) return NULL;
    Py_ssize_t place = place_of(self, id);
    if (self->index[place] != NOBODY) return PyErr_Format(PyExc_ValueError, "request %lld has a tail already", id);
    PyObject *shaped = walk(self, (int32_t)self->size, &secret, &tokens);
    if (shaped) {
        tail_at(self, self->size)->id = id;
        self->index[place] = (int32_t)self->size++;
    }
    return shaped;
}

/* history(secret, tokens) -> pseudonyms of a whole history; nothing is kept */
static PyObject *history(OpenBlocks *self, PyObject *args) {
    OWNED Py_buffer secret = {0}, tokens = {0};
    if (!PyArg_ParseTuple(args, "y*y*", &secret, &tokens)) return NULL;
    return walk(self, (int32_t)self->capacity, &secret, &tokens);
}

/* Where the i-th row's token stands among the step's. */
static inline int64_t sample_of(const int64_t *samples, Py_ssize_t i) { return samples ? samples[i] : i; }

/* The open_blocks of a commit's rows, as a rule those of the commit before: all are found, each once, before any is changed. */
static int find(OpenBlocks *self, const Py_buffer *ids, const Py_buffer *rows, const int64_t *samples, Py_ssize_t total) {
    const int64_t *id = ids->buf, *row = rows->buf;
    Py_ssize_t count = rows->len / 8;
    ++self->commits;
    for (Py_ssize_t i = 0; i < count; ++i) {
        if (row[i] < 0 || row[i] >= ids->len / 8 || sample_of(samples, i) < 0 || sample_of(samples, i) >= total) {
            PyErr_SetString(PyExc_ValueError, "a row or a sample of this commit is not there");
            return -1;
        }
        int32_t number = self->found[i];
        if (number >= self->size || tail_at(self, number)->id != id[row[i]])
            number = self->index[place_of(self, id[row[i]])];
        if (number == NOBODY) {
            PyErr_Format(PyExc_KeyError, "request %lld has no tail", (long long)id[row[i]]);
            return -1;
        }
        if (tail_at(self, number)->commits == self->commits) {
            PyErr_SetString(PyExc_ValueError, "a request takes one token of a commit");
            return -1;
        }
        tail_at(self, number)->commits = self->commits;
        self->found[i] = number;
    }
    return 0;
}

/* Rows [from, from + count) of a commit, count <= CHUNK. The open_blocks that this fills are noted. */
static void take(OpenBlocks *self, Py_ssize_t from, Py_ssize_t count, const char *tokens, const int64_t *samples,
                 const char *stopped, char *shaped, Py_ssize_t *filled) {
    Chunk chunk;
    int32_t token, pseudonym;
    for (Py_ssize_t i = 0; i < count; ++i) {
        memcpy(&token, tokens + 4 * sample_of(samples, from + i), sizeof token);
        put_in(&chunk, i, tail_at(self, self->found[from + i]), token);
    }
    self->reckon(&chunk, count, (uint64_t)self->base, self->half);
    for (Py_ssize_t i = 0; i < count; ++i) {
        Py_ssize_t sample = sample_of(samples, from + i);
        Tail *tail = tail_at(self, self->found[from + i]);
        memcpy(&token, tokens + 4 * sample, sizeof token);
        pseudonym = stopped[from + i] ? token : (int32_t)(chunk.token[i] + (uint64_t)self->base);
        memcpy(shaped + 4 * sample, &pseudonym, sizeof pseudonym);
        append(tail, token, chunk.sum[i]);
        if (tail->count == self->block_size) self->filled[(*filled)++] = self->found[from + i];
    }
}

/* Columns of a commit: requests of all rows, the rows that take a token, the tokens, their places (or none), who ends. */
typedef struct {
    Py_buffer ids, rows, tokens, samples, stopped;
} Commit;

static void release(Commit *c) {
    RELEASE(&c->ids, &c->rows, &c->tokens, &c->stopped, &c->samples);
}

/* All tokens of a commit into `shaped` (int32, as many). */
static int take_all(OpenBlocks *self, const Commit *c, char *shaped) {
    Py_ssize_t count = c->rows.len / 8, total = c->tokens.len / 4, filled = 0;
    int32_t first = (int32_t)self->base;
    if (c->stopped.len < count || count > self->size || (c->samples.obj ? c->samples.len / 8 : total) != count) {
        PyErr_SetString(PyExc_ValueError, "a commit's columns do not fit each other");
        return -1;
    }
    if (find(self, &c->ids, &c->rows, c->samples.buf, total) < 0) return -1;
    for (Py_ssize_t at = 0; c->samples.obj && at < total; ++at) memcpy(shaped + 4 * at, &first, sizeof first);
    for (Py_ssize_t at = 0, some; at < count; at += some) {
        some = count - at < CHUNK ? count - at : CHUNK;
        take(self, at, some, c->tokens.buf, c->samples.buf, c->stopped.buf, shaped, &filled);
    }
    begin_next(self, self->filled, filled);
    return 0;
}

/* commit(ids int64[R], rows int64[n], tokens int32[m], samples int64[n] or None, stopped bool[n]) -> int32[m] as bytes */
static PyObject *commit(OpenBlocks *self, PyObject *args) {
    Commit c = {0};
    PyObject *samples, *shaped = NULL;
    if (!PyArg_ParseTuple(args, "y*y*y*Oy*", &c.ids, &c.rows, &c.tokens, &samples, &c.stopped)) return NULL;
    if (samples == Py_None || PyObject_GetBuffer(samples, &c.samples, PyBUF_SIMPLE) == 0)
        shaped = PyBytes_FromStringAndSize(NULL, c.tokens.len / 4 * 4);
    if (shaped && take_all(self, &c, PyBytes_AS_STRING(shaped)) < 0) Py_CLEAR(shaped);
    release(&c);
    return shaped;
}

/* put_steady(frame bytearray, first event, committed step, planned step, width, (ids, rows, tokens, stopped)) -> did it:
   `commit` and log_plain.put_steady in one, where each of the step's tokens has its row and none ends its request */
static PyObject *put_steady(OpenBlocks *self, PyObject *args) {
    Commit c = {0};
    PyObject *frame;
    unsigned long long first, committed, planned;
    int width, does = 0;
    if (!PyArg_ParseTuple(args, "O!KKKi(y*y*y*y*)", &PyByteArray_Type, &frame, &first, &committed, &planned, &width, &c.ids,
                          &c.rows, &c.tokens, &c.stopped))
        return NULL;
    Py_ssize_t count = c.tokens.len / 4;
    int all_go_on = c.rows.len / 8 == count && c.stopped.len == count && !memchr(c.stopped.buf, 1, count);
    if (all_go_on && 8 * width >= self->bits) {
        PyObject *shaped = PyBytes_FromStringAndSize(NULL, 4 * count);
        does = shaped ? take_all(self, &c, PyBytes_AS_STRING(shaped)) : -1;
        if (!does) does = put_steady_frame(frame, first, committed, PyBytes_AS_STRING(shaped), count, planned, width);
        Py_XDECREF(shaped);
    }
    release(&c);
    return does < 0 ? NULL : PyBool_FromLong(does);
}

/* ids() -> requests that have a tail, in no order */
static PyObject *ids_of(OpenBlocks *self, PyObject *unused) {
    PyObject *ids = PyList_New(self->size);
    for (Py_ssize_t number = 0; ids && number < self->size; ++number) {
        PyObject *id = PyLong_FromLongLong(tail_at(self, number)->id);
        if (!id) Py_CLEAR(ids);
        else PyList_SET_ITEM(ids, number, id);
    }
    return ids;
}

/* forget(ids): these requests have ended. KeyError for one without a tail; those before it are forgotten. */
static PyObject *forget(OpenBlocks *self, PyObject *gone) {
    PyObject *list = PySequence_Fast(gone, "forget takes a sequence of requests");
    if (!list) return NULL;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list); ++i) {
        long long id = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(list, i));
        if (id == -1 && PyErr_Occurred()) break;
        int32_t number = id < 0 ? NOBODY : self->index[place_of(self, id)];
        if (number == NOBODY) {
            PyErr_Format(PyExc_KeyError, "request %lld has no tail", id);
            break;
        }
        tail_at(self, number)->id = NOBODY;
    }
    Py_DECREF(list);
    Py_ssize_t left = 0;
    for (Py_ssize_t number = 0; number < self->size; ++number) {
        if (tail_at(self, number)->id == NOBODY) continue;
        if (left != number) memcpy(tail_at(self, left), tail_at(self, number), self->stride);
        ++left;
    }
    self->size = left;
    fill_index(self);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static Py_ssize_t length(OpenBlocks *self) { return self->size; }

/* OpenBlocks(key, block_size, base, portable=False): `portable` leaves this processor's own instructions alone */
static PyObject *new(PyTypeObject *type, PyObject *args, PyObject *names) {
    const char *key;
    Py_ssize_t key_size;
    long long block_size, base;
    if (names && PyDict_GET_SIZE(names)) return PyErr_Format(PyExc_TypeError, "OpenBlocks takes no names");
    int portable = 0;
    if (!PyArg_ParseTuple(args, "y#LL|p", &key, &key_size, &block_size, &base, &portable)) return NULL;
    int bits = base > 0 ? 63 - __builtin_clzll((unsigned long long)base) : 0;
    int is_power = bits >= 2 && bits <= 30 && bits % 2 == 0 && base == 1LL << bits;
    if (key_size != BLAKE2B_DIGEST || block_size < 1 || block_size > INT32_MAX / 8 || !is_power)
        return PyErr_Format(PyExc_ValueError, "a key has 16 bytes, a block at least one token; the base is a power of four");
    OpenBlocks *self = (OpenBlocks *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    keyed_start((const uint8_t *)key, self->keyed);
    self->block_size = block_size, self->base = base, self->half = bits / 2, self->bits = bits + 1;
    self->reckon = reckon_plain;
#if WIDE
    self->wide = !portable && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
    if (self->wide) self->reckon = reckon_wide;
#endif
    self->message_size = TOKENS_AT + 4 * (Py_ssize_t)block_size;
    Py_ssize_t padded = (self->message_size + BLAKE2B_CHUNK - 1) / BLAKE2B_CHUNK * BLAKE2B_CHUNK;
    self->stride = ((Py_ssize_t)sizeof(Tail) + padded + LINE - 1) / LINE * LINE;
    if (make_room(self, OPEN_BLOCKS_MIN) < 0) Py_CLEAR(self);
    return (PyObject *)self;
}

static void destroy(OpenBlocks *self) {
    PyMem_Free(self->memory);
    PyMem_Free(self->index);
    PyMem_Free(self->found);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    METHOD("arrive", arrive, NULL), METHOD("commit", commit, NULL),
    METHOD("put_steady", put_steady, NULL),
    METHOD("history", history, NULL), {"ids", (PyCFunction)ids_of, METH_NOARGS, NULL},
    {"forget", (PyCFunction)forget, METH_O, NULL}, NO_METHOD,
};

static PyType_Slot slots[] = {
    {Py_tp_new, new},
    {Py_tp_dealloc, destroy},
    {Py_tp_methods, methods},
    {Py_sq_length, length},
    {Py_tp_doc, "Compiled implementation of open_blocks_plain.OpenBlocks."},
    {0, NULL},
};

static PyType_Spec specification = {"vnext.log._open_blocks.OpenBlocks", sizeof(OpenBlocks), 0, Py_TPFLAGS_DEFAULT, slots};

static const Constant constants[] = {
    CONSTANT(SECRET_SIZE) NO_CONSTANT,
};

static PyModuleDef module = MODULE("_open_blocks", "Compiled implementation of open_blocks_plain.", NULL);

PyMODINIT_FUNC PyInit__open_blocks(void) { return begin_module(&module, constants, &specification); }
