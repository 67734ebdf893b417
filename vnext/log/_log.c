/* Log: packed tokens, the usual frame, checksums, counting. The fast implementation of log_plain.py and skimming.py.

   Pure except for the caller's buffers. For any other frame it returns a refusal with nothing changed, and msgspec writes or
   reads it instead. */

#include "crc32.h"
#include "steady_frame.h"

enum { RECORD_HEAD = 8 };

/* A record's checksum: over the four bytes of the payload's length, then the payload. */
static uint32_t checksum(const uint8_t *payload, uint32_t size) {
    uint8_t length[4];
    memcpy(length, &size, sizeof length);
    return crc32_of(crc32_of(0, length, sizeof length), payload, size);
}

/* ---- packing ---- */

/* narrow(tokens int32, width) -> `width` bytes a token, or None where one does not fit */
static PyObject *narrow(PyObject *self, PyObject *args) {
    OWNED Py_buffer tokens = {0};
    int width;
    if (!PyArg_ParseTuple(args, "y*i", &tokens, &width)) return NULL;
    PyObject *packed = NULL;
    Py_ssize_t count = tokens.len / 4;
    if (known_width(width)) {
        if (!fits(tokens.buf, count, width)) packed = Py_NewRef(Py_None);
        else if ((packed = PyBytes_FromStringAndSize(NULL, count * width)))
            pack((uint8_t *)PyBytes_AS_STRING(packed), tokens.buf, count, width);
    }
    return packed;
}

/* Tokens of `width` bytes each as int32. */
static void widen_into(uint8_t *out, const uint8_t *packed, Py_ssize_t count, int width) {
    for (Py_ssize_t i = 0; i < count; ++i) {
        uint32_t token = 0;
        memcpy(&token, packed + i * width, width);
        memcpy(out + 4 * i, &token, sizeof token);
    }
}

/* widen(packed, width) -> int32 bytes */
static PyObject *widen(PyObject *self, PyObject *args) {
    OWNED Py_buffer packed = {0};
    int width;
    if (!PyArg_ParseTuple(args, "y*i", &packed, &width)) return NULL;
    static const char uneven[] = "%zd bytes are not a whole number of tokens of %d bytes";
    PyObject *tokens = NULL;
    if (known_width(width)) {
        Py_ssize_t count = packed.len / width;
        if (packed.len % width) PyErr_Format(PyExc_ValueError, uneven, packed.len, width);
        else if ((tokens = PyBytes_FromStringAndSize(NULL, 4 * count)))
            widen_into((uint8_t *)PyBytes_AS_STRING(tokens), packed.buf, count, width);
    }
    return tokens;
}

/* ---- writing ---- */

/* put_steady(frame bytearray, first event, committed step, tokens int32, planned step, width) -> do the tokens fit */
static PyObject *put_steady(PyObject *self, PyObject *args) {
    PyObject *frame;
    OWNED Py_buffer tokens = {0};
    unsigned long long first, committed, planned;
    int width;
    if (!PyArg_ParseTuple(args, "O!KKy*Ki", &PyByteArray_Type, &frame, &first, &committed, &tokens, &planned, &width))
        return NULL;
    int does = put_steady_frame(frame, first, committed, tokens.buf, tokens.len / 4, planned, width);
    return does < 0 ? NULL : PyBool_FromLong(does);
}

/* seal_frame(frame bytearray, previous digest, state's digest, hash) -> the frame's chained digest: `hash` of both
   digests and the body. The frame's first FRAME_HEAD bytes become its length, checksum and digest. */
static PyObject *seal_frame(PyObject *self, PyObject *args) {
    PyObject *frame, *hash;
    unsigned long long previous, state_digest;
    if (!PyArg_ParseTuple(args, "O!KKO", &PyByteArray_Type, &frame, &previous, &state_digest, &hash)) return NULL;
    Py_ssize_t size = PyByteArray_GET_SIZE(frame) - RECORD_HEAD;
    if (size < FRAME_HEAD - RECORD_HEAD || size > UINT32_MAX)
        return PyErr_Format(PyExc_ValueError, "a frame of %zd bytes", size);
    uint64_t words[2] = {previous, state_digest}; /* as long as the frame's head, whose place they take meanwhile */
    memcpy(PyByteArray_AS_STRING(frame), words, sizeof words);
    PyObject *digest = PyObject_CallOneArg(hash, frame);
    if (!digest) return NULL;
    words[0] = PyLong_AsUnsignedLongLong(digest);
    if (PyErr_Occurred() || PyByteArray_GET_SIZE(frame) != size + RECORD_HEAD) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "the frame changed while it was sealed");
        Py_DECREF(digest);
        return NULL;
    }
    uint8_t *start = (uint8_t *)PyByteArray_AS_STRING(frame);
    uint32_t length = (uint32_t)size, sum;
    memcpy(start + RECORD_HEAD, words, sizeof *words);
    sum = checksum(start + RECORD_HEAD, length);
    memcpy(start, &length, sizeof length);
    memcpy(start + 4, &sum, sizeof sum);
    return digest;
}

/* ---- counting ---- */

/* A place in msgpack bytes. `bad` once something was not what was asked for; nothing is read from then on. */
typedef struct {
    const uint8_t *at, *end;
    int bad;
} Cursor;

static uint64_t get_big(Cursor *c, int bytes) {
    uint64_t value = 0;
    if (c->end - c->at < bytes) c->bad = 1;
    for (int byte = 0; byte < bytes && !c->bad; ++byte) value = value << 8 | *c->at++;
    return value;
}

/* A number; negative ones only where they are allowed. Read as two's complement. */
static uint64_t get_int(Cursor *c, int negative) {
    uint8_t head = (uint8_t)get_big(c, 1);
    if (c->bad || head < 0x80) return head;
    if (head >= 0xcc && head <= 0xcf) return get_big(c, 1 << (head - 0xcc));
    int bytes = head >= 0xd0 && head <= 0xd3 ? 1 << (head - 0xd0) : 0;
    uint64_t value = bytes ? get_big(c, bytes) : head, sign = (uint64_t)1 << (bytes ? 8 * bytes - 1 : 7);
    if ((!bytes && head < 0xe0) || (value & sign && !negative)) c->bad = 1;
    return (value ^ sign) - sign;
}

static uint64_t get_uint(Cursor *c) { return get_int(c, 0); }

static uint64_t get_array(Cursor *c) {
    uint8_t head = (uint8_t)get_big(c, 1);
    if (head >= 0x90 && head <= 0x9f) return head - 0x90;
    if (head == 0xdc || head == 0xdd) return get_big(c, head == 0xdc ? 2 : 4);
    c->bad = 1;
    return 0;
}

static void must_be(Cursor *c, uint64_t value, uint64_t due) { c->bad |= value != due; }

/* Skip so many bytes; where they are. */
static const uint8_t *get_bytes(Cursor *c, uint64_t size) {
    const uint8_t *bytes = c->at;
    if (c->bad || size > (uint64_t)(c->end - c->at)) c->bad = 1;
    else c->at += size;
    return bytes;
}

/* The size of bytes, which are skipped. */
static uint64_t get_bin(Cursor *c) {
    uint8_t head = (uint8_t)get_big(c, 1);
    uint64_t size = head >= 0xc4 && head <= 0xc6 ? get_big(c, 1 << (head - 0xc4)) : UINT64_MAX;
    get_bytes(c, size);
    return size;
}

/* A text of ASCII letters; its size. */
static uint64_t get_ascii(Cursor *c, const uint8_t **text) {
    uint8_t head = (uint8_t)get_big(c, 1);
    uint64_t size = head >= 0xa0 && head <= 0xbf ? head - 0xa0u : UINT64_MAX;
    if (head >= 0xd9 && head <= 0xdb) size = get_big(c, 1 << (head - 0xd9));
    *text = get_bytes(c, size);
    for (uint64_t i = 0; i < size && !c->bad; ++i) c->bad = (*text)[i] >= 0x80;
    return size;
}

/* An array of arrays of `each` numbers, of plain numbers for 0; how many. */
static uint64_t get_numbers(Cursor *c, uint64_t each) {
    uint64_t count = get_array(c);
    for (uint64_t i = 0; i < count && !c->bad; ++i) {
        if (each) must_be(c, get_array(c), each);
        for (uint64_t j = 0; j < (each ? each : 1) && !c->bad; ++j) get_uint(c);
    }
    return count;
}

/* A number with or without a fraction. */
static void get_float(Cursor *c) {
    uint8_t head = c->at < c->end ? *c->at : 0;
    if (head == 0xca || head == 0xcb) get_bytes(c, head == 0xca ? 5 : 9);
    else get_int(c, 1);
}

static void get_bool(Cursor *c) { must_be(c, get_big(c, 1) & 0xfe, 0xc2); }

/* params.Sampling: the fields of the first logs, top_n_sigma, no constraint, prompt_logprobs, pooling, adapter, drafts, retention,
   no guidance */
static void get_sampling(Cursor *c) {
    const uint64_t count = get_array(c), first_count = 14;
    if (count < first_count || count > first_count + 8) c->bad = 1;
    get_uint(c), get_uint(c), get_float(c), get_int(c, 1);
    for (int i = 0; i < 5; ++i) get_float(c);
    uint64_t biases = get_array(c);
    for (uint64_t i = 0; i < biases && !c->bad; ++i) {
        must_be(c, get_array(c), 2);
        get_uint(c), get_float(c);
    }
    get_int(c, 1), get_uint(c);
    uint64_t stops = get_array(c);
    for (uint64_t i = 0; i < stops && !c->bad; ++i) get_int(c, 1);
    get_bool(c);
    if (count > first_count) get_float(c);
    if (count > first_count + 1) must_be(c, get_big(c, 1), 0xc0); /* a frame with a constraint is decoded in full */
    for (uint64_t i = first_count + 2; i < count && i < first_count + 4 && !c->bad; ++i) get_int(c, 1);
    const uint8_t *adapter;
    if (count > first_count + 4) get_ascii(c, &adapter);
    if (count > first_count + 5) get_int(c, 1);
    if (count > first_count + 6) get_numbers(c, 2);
    if (count > first_count + 7) must_be(c, get_big(c, 1), 0xc0); /* nor one with guidance */
}

static int is_reason(const uint8_t *text, uint64_t size) {
    static const char *const reasons[] = {"client", "stop", "shutdown", "error"};
    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; ++i)
        if (strlen(reasons[i]) == size && !memcmp(reasons[i], text, size)) return 1;
    return 0;
}

/* What `skim` has counted, in the order of log_plain.Skimmed; sizes of commits and prompts, times of arrivals. */
typedef struct {
    uint64_t offset, next_event, digest, frames, plans, preempted, aborts, aborted, ranks, commits, arrivals;
    int32_t *batches, *prompts;
    uint64_t *times, commits_max, arrivals_max;
} Counts;

static void count_plan(Cursor *c, Counts *n) {
    get_uint(c);
    n->preempted += get_numbers(c, 0);
    get_numbers(c, 2), get_numbers(c, 2);
    ++n->plans;
}

static void count_commit(Cursor *c, Counts *n) {
    get_uint(c);
    uint64_t size = get_bin(c);
    if (n->commits == n->commits_max || size > INT32_MAX) c->bad = 1;
    else n->batches[n->commits++] = (int32_t)size;
}

static void count_abort(Cursor *c, Counts *n) {
    const uint8_t *reason;
    n->aborted += get_numbers(c, 0);
    uint64_t size = get_ascii(c, &reason);
    if (!c->bad && !is_reason(reason, size)) c->bad = 1;
    ++n->aborts;
}

/* An arrival of the first logs, or one with the client's number and maybe its weight behind `generated`, which is empty. */
static void count_arrival(Cursor *c, Counts *n, uint64_t fields) {
    const uint8_t *text;
    get_uint(c), get_ascii(c, &text);
    uint64_t size = get_bin(c);
    get_sampling(c), get_int(c, 1);
    uint64_t time = get_uint(c);
    get_ascii(c, &text);
    if (fields > 8) must_be(c, get_bin(c), 0), get_uint(c);
    if (fields > 10) get_uint(c);
    if (n->arrivals == n->arrivals_max || size > INT32_MAX || time > INT64_MAX) c->bad = 1;
    else n->prompts[n->arrivals] = (int32_t)size, n->times[n->arrivals++] = time;
}

static void count_event(Cursor *c, Counts *n) {
    uint64_t fields = get_array(c), tag = get_uint(c);
    if (tag == PLANNED && fields == 5) count_plan(c, n);
    else if (tag == COMMITTED && fields == 3) count_commit(c, n);
    else if (tag == ARRIVED && (fields == 8 || fields == 10 || fields == 11)) count_arrival(c, n, fields);
    else if (tag == ABORTED && fields == 3) count_abort(c, n);
    else c->bad = 1;
}

/* Sizes in bytes become numbers of tokens. */
static void to_tokens(Cursor *c, int32_t *sizes, uint64_t from, uint64_t until, uint64_t width) {
    for (uint64_t i = from; i < until; ++i) {
        c->bad |= sizes[i] % (int32_t)width != 0;
        sizes[i] /= (int32_t)width;
    }
}

/* One plain frame. False: it is none, or there is no room for what it holds. */
static int count_frame(const uint8_t *payload, uint32_t size, Counts *counts) {
    Cursor c = {payload + 8, payload + size, size < 8};
    Counts now = *counts;
    uint64_t fields = get_array(&c);
    c.bad |= fields != 5 && fields != 7;
    must_be(&c, get_uint(&c), now.next_event);
    uint64_t events = get_array(&c);
    for (uint64_t i = 0; i < events && !c.bad; ++i) count_event(&c, &now);
    now.ranks += get_numbers(&c, 3);
    must_be(&c, get_uint(&c), 0); /* frames lost before this one */
    uint64_t width = get_uint(&c);
    if (fields == 7) { /* of logs of earlier versions: a time, and no rank's details */
        get_uint(&c);
        must_be(&c, get_array(&c), 0);
    }
    if (c.bad || width < WIDTH_MIN || width > WIDTH_MAX || c.at != c.end) return 0;
    to_tokens(&c, now.batches, counts->commits, now.commits, width);
    to_tokens(&c, now.prompts, counts->arrivals, now.arrivals, width);
    if (c.bad) return 0;
    memcpy(&now.digest, payload, sizeof now.digest);
    now.next_event += events;
    ++now.frames;
    *counts = now;
    return 1;
}

/* Where the record at `offset` ends; 0 where the data does before it; -1 where its checksum is wrong. */
static int64_t end_of_record(const uint8_t *data, uint64_t size, uint64_t offset) {
    uint32_t length, sum;
    if (offset > size || size - offset < RECORD_HEAD) return 0;
    memcpy(&length, data + offset, sizeof length);
    memcpy(&sum, data + offset + 4, sizeof sum);
    if (length > size - offset - RECORD_HEAD) return 0;
    return checksum(data + offset + RECORD_HEAD, length) == sum ? (int64_t)(offset + RECORD_HEAD + length) : -1;
}

/* record_end(data, offset) -> see end_of_record */
static PyObject *record_end(PyObject *self, PyObject *args) {
    OWNED Py_buffer data = {0};
    Py_ssize_t offset;
    if (!PyArg_ParseTuple(args, "y*n", &data, &offset)) return NULL;
    int64_t end = offset < 0 ? 0 : end_of_record(data.buf, (uint64_t)data.len, (uint64_t)offset);
    return PyLong_FromLongLong(end);
}

/* skim(data, offset, next event, out batches int32, out prompts int32, out times int64) -> counts of the plain frames
   from there on, up to the first that is not, or is damaged, or has more than there is room for */
static PyObject *skim(PyObject *self, PyObject *args) {
    OWNED Py_buffer data = {0}, batches = {0}, prompts = {0}, times = {0};
    Py_ssize_t offset;
    unsigned long long next_event;
    if (!PyArg_ParseTuple(args, "y*nKw*w*w*", &data, &offset, &next_event, &batches, &prompts, &times)) return NULL;
    uint64_t room = (uint64_t)(prompts.len / 4 < times.len / 8 ? prompts.len / 4 : times.len / 8);
    Counts n = {.offset = offset < 0 ? 0 : (uint64_t)offset, .next_event = next_event, .batches = batches.buf,
                .prompts = prompts.buf, .times = times.buf, .commits_max = (uint64_t)batches.len / 4, .arrivals_max = room};
    const uint8_t *bytes = data.buf;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t end; (end = end_of_record(bytes, (uint64_t)data.len, n.offset)) > 0; n.offset = (uint64_t)end) {
        const uint8_t *payload = bytes + n.offset + RECORD_HEAD;
        if (!count_frame(payload, (uint32_t)(bytes + end - payload), &n)) break;
    }
    Py_END_ALLOW_THREADS
    return Py_BuildValue("KKKKKKKKKKK", n.offset, n.next_event, n.digest, n.frames, n.plans, n.preempted, n.aborts,
                         n.aborted, n.ranks, n.commits, n.arrivals);
}

/* ---- steady frames, read ---- */

/* A run of steady frames: where the next one begins, steps of the first one, how many there were, and their tokens. */
typedef struct {
    uint64_t offset, next_event, committed, planned, digest, frames, tokens, frames_max, tokens_max;
    int32_t *token_ids, *counts;
    int64_t *ends;
} Run;

/* One frame as put_steady_frame writes it, ranks' digests or not. False: it is none, or there is no room for what it holds. */
static int take_steady(const uint8_t *payload, uint32_t size, Run *run) {
    Cursor c = {payload + 8, payload + size, size < 8};
    must_be(&c, get_array(&c), 5);
    must_be(&c, get_uint(&c), run->next_event);
    must_be(&c, get_array(&c), 2);
    must_be(&c, get_array(&c), 3);
    must_be(&c, get_uint(&c), COMMITTED);
    uint64_t committed = get_uint(&c), planned;
    uint64_t bytes = get_bin(&c);
    const uint8_t *packed = c.bad ? NULL : c.at - bytes;
    must_be(&c, get_array(&c), 5);
    must_be(&c, get_uint(&c), PLANNED);
    planned = get_uint(&c);
    for (int rows = 0; rows < 3; ++rows) must_be(&c, get_array(&c), 0);
    get_numbers(&c, 3);
    must_be(&c, get_uint(&c), 0);
    uint64_t width = get_uint(&c);
    if (c.bad || width < WIDTH_MIN || width > WIDTH_MAX || c.at != c.end || bytes % width) return 0;
    if (!run->frames) run->committed = committed, run->planned = planned;
    if (committed != run->committed + run->frames || planned != run->planned + run->frames) return 0;
    uint64_t count = bytes / width;
    if (run->frames == run->frames_max || count > run->tokens_max - run->tokens) return 0;
    widen_into((uint8_t *)(run->token_ids + run->tokens), packed, (Py_ssize_t)count, (int)width);
    run->counts[run->frames] = (int32_t)count;
    memcpy(&run->digest, payload, sizeof run->digest);
    run->tokens += count, run->frames += 1, run->next_event += 2;
    return 1;
}

/* skim_steady(data, offset, next event, out tokens int32, out counts int32, out ends int64)
     -> (offset behind, last digest, frames, tokens, step committed and step planned by the first) of the steady frames from
   there on, as skim; `counts` and `ends` of each */
static PyObject *skim_steady(PyObject *self, PyObject *args) {
    OWNED Py_buffer data = {0}, tokens = {0}, counts = {0}, ends = {0};
    Py_ssize_t offset;
    unsigned long long next_event;
    if (!PyArg_ParseTuple(args, "y*nKw*w*w*", &data, &offset, &next_event, &tokens, &counts, &ends)) return NULL;
    Run run = {.offset = offset < 0 ? 0 : (uint64_t)offset, .next_event = next_event, .token_ids = tokens.buf,
               .counts = counts.buf, .ends = ends.buf, .tokens_max = (uint64_t)tokens.len / 4,
               .frames_max = (uint64_t)(counts.len / 4 < ends.len / 8 ? counts.len / 4 : ends.len / 8)};
    const uint8_t *bytes = data.buf;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t end; (end = end_of_record(bytes, (uint64_t)data.len, run.offset)) > 0; run.offset = (uint64_t)end) {
        const uint8_t *payload = bytes + run.offset + RECORD_HEAD;
        if (!take_steady(payload, (uint32_t)(bytes + end - payload), &run)) break;
        run.ends[run.frames - 1] = end;
    }
    Py_END_ALLOW_THREADS
    return Py_BuildValue("KKKKKK", run.offset, run.digest, run.frames, run.tokens, run.committed, run.planned);
}

static PyMethodDef functions[] = {
    METHOD("narrow", narrow, NULL),         METHOD("widen", widen, NULL),
    METHOD("put_steady", put_steady, NULL), METHOD("seal_frame", seal_frame, NULL),
    METHOD("record_end", record_end, NULL), METHOD("skim", skim, NULL),
    METHOD("skim_steady", skim_steady, NULL),
    NO_METHOD,
};

static const Constant constants[] = {
    CONSTANT(RECORD_HEAD) CONSTANT(FRAME_HEAD) CONSTANT(WIDTH_MIN) CONSTANT(WIDTH_MAX)
    CONSTANT(ARRIVED) CONSTANT(ABORTED) CONSTANT(PLANNED) CONSTANT(COMMITTED) NO_CONSTANT,
};

static PyModuleDef module = MODULE("_log", "Compiled implementation of log_plain.", functions);

PyMODINIT_FUNC PyInit__log(void) {
    crc32_begin();
    return begin_module(&module, constants, NULL);
}
