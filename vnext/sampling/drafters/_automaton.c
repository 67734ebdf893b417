/* A suffix automaton that counts. Implements automaton_plain.py, which explains each function; both give equal drafts.
 *
 * Owns its states, its edges, and a hash table from (state, token) to the edge. Places are int32: a text has under 2^28 tokens.
 */
#include "compiled.h"

#include <stdint.h>

#define NOTHING (-1)
#define COUNTED_MAX 64
#define TOKENS_MAX (1 << 28)

typedef struct {
    int32_t length, link, edges, best; /* `edges` is the newest edge, `best` the edge that was counted most */
    int64_t total;
} State;

typedef struct {
    int32_t state, token, next, older; /* `older` is the edge of the same state that came before */
    int64_t count;
} Edge;

typedef struct {
    PyObject_HEAD
    State *states;
    Edge *edges;
    int32_t *slots;
    Py_ssize_t state_count, state_room, edge_count, edge_room, slot_count, tokens;
    int32_t last;
} Automaton;

static uint64_t hash_of(int32_t state, int32_t token) {
    uint64_t key = ((uint64_t)(uint32_t)state << 32 | (uint32_t)token) * 0x9E3779B97F4A7C15u;
    return key ^ key >> 32;
}

/* The slot of the edge, or the free one where it belongs. */
static int32_t *slot_of(const Automaton *self, int32_t state, int32_t token) {
    uint64_t mask = (uint64_t)self->slot_count - 1, at = hash_of(state, token) & mask;
    for (;; at = (at + 1) & mask) {
        int32_t edge = self->slots[at];
        if (edge == NOTHING || (self->edges[edge].state == state && self->edges[edge].token == token)) return &self->slots[at];
    }
}

static int32_t edge_of(const Automaton *self, int32_t state, int32_t token) { return *slot_of(self, state, token); }

/* Room for `wanted` items of `size` bytes; 0 with MemoryError set if there is none. */
static int grow(void **items, Py_ssize_t *room, Py_ssize_t wanted, size_t size) {
    if (wanted <= *room) return 1;
    Py_ssize_t larger = *room ? 2 * *room : 64;
    void *moved = PyMem_Realloc(*items, (size_t)larger * size);
    if (!moved) return PyErr_NoMemory(), 0;
    *items = moved;
    *room = larger;
    return 1;
}

/* A hash table of twice the size; 0 with MemoryError set if there is no memory. */
static int rehash(Automaton *self) {
    Py_ssize_t count = self->slot_count ? 2 * self->slot_count : 128;
    int32_t *slots = PyMem_Realloc(self->slots, (size_t)count * sizeof *slots);
    if (!slots) return PyErr_NoMemory(), 0;
    self->slots = slots;
    self->slot_count = count;
    for (Py_ssize_t at = 0; at < count; at++) slots[at] = NOTHING;
    for (Py_ssize_t edge = 0; edge < self->edge_count; edge++)
        *slot_of(self, self->edges[edge].state, self->edges[edge].token) = (int32_t)edge;
    return 1;
}

/* A new state without edges; NOTHING with an exception set if there is no memory. */
static int32_t new_state(Automaton *self, int32_t length) {
    if (!grow((void **)&self->states, &self->state_room, self->state_count + 1, sizeof(State))) return NOTHING;
    self->states[self->state_count] = (State){.length = length, .link = NOTHING, .edges = NOTHING, .best = NOTHING};
    return (int32_t)self->state_count++;
}

/* A new edge that was never counted; NOTHING with an exception set if there is no memory. */
static int32_t new_edge(Automaton *self, int32_t state, int32_t token, int32_t next) {
    if (!grow((void **)&self->edges, &self->edge_room, self->edge_count + 1, sizeof(Edge))) return NOTHING;
    if (2 * (self->edge_count + 1) > self->slot_count && !rehash(self)) return NOTHING;
    int32_t edge = (int32_t)self->edge_count++;
    self->edges[edge] = (Edge){.state = state, .token = token, .next = next, .older = self->states[state].edges};
    self->states[state].edges = edge;
    *slot_of(self, state, token) = edge;
    return edge;
}

static void count_edge(Automaton *self, int32_t edge) {
    State *state = &self->states[self->edges[edge].state];
    self->edges[edge].count++;
    state->total++;
    if (state->best == NOTHING || self->edges[edge].count >= self->edges[state->best].count) state->best = edge;
}

/* A state of this length with the edges of another; NOTHING with an exception set if there is no memory. */
static int32_t split_of(Automaton *self, int32_t longer, int32_t length) {
    int32_t split = new_state(self, length);
    if (split == NOTHING) return NOTHING;
    for (int32_t edge = self->states[longer].edges; edge != NOTHING; edge = self->edges[edge].older) {
        int32_t copy = new_edge(self, split, self->edges[edge].token, self->edges[edge].next);
        if (copy == NOTHING) return NOTHING;
        self->edges[copy].count = self->edges[edge].count;
        if (edge == self->states[longer].best) self->states[split].best = copy;
    }
    self->states[split].total = self->states[longer].total;
    self->states[split].link = self->states[longer].link;
    self->states[longer].link = split;
    return split;
}

/* The state of the substring that is `state`'s longest with `token`; NOTHING with an exception set if there is no memory. */
static int32_t suffix_of(Automaton *self, int32_t state, int32_t token) {
    int32_t longer = self->edges[edge_of(self, state, token)].next, length = self->states[state].length + 1;
    if (self->states[longer].length == length) return longer;
    int32_t split = split_of(self, longer, length);
    for (; split != NOTHING && state != NOTHING; state = self->states[state].link) {
        int32_t edge = edge_of(self, state, token);
        if (edge == NOTHING || self->edges[edge].next != longer) break;
        self->edges[edge].next = split;
    }
    return split;
}

/* The text grows by one token; 0 with an exception set if there is no memory. */
static int append(Automaton *self, int32_t token) {
    int32_t state = self->last, new = new_state(self, self->states[self->last].length + 1), link = 0;
    if (new == NOTHING) return 0;
    for (; state != NOTHING && edge_of(self, state, token) == NOTHING; state = self->states[state].link) {
        int32_t edge = new_edge(self, state, token, new);
        if (edge == NOTHING) return 0;
        count_edge(self, edge);
    }
    if (state != NOTHING && (link = suffix_of(self, state, token)) == NOTHING) return 0;
    self->states[new].link = link;
    for (int counted = 0; counted < COUNTED_MAX && state != NOTHING; counted++, state = self->states[state].link)
        count_edge(self, edge_of(self, state, token));
    self->tokens++;
    self->last = new;
    return 1;
}

/* The longest suffix of a state that something follows; the root at worst. */
static int32_t with_more(const Automaton *self, int32_t state) {
    while (state > 0 && self->states[state].best == NOTHING) state = self->states[state].link;
    return state;
}

/* The state of the longest suffix of `recent` that something follows in the text, and how many tokens that are. */
static int32_t match(const Automaton *self, const int32_t *recent, Py_ssize_t count, int32_t *matched) {
    int32_t state = 0, length = 0, found;
    for (Py_ssize_t at = 0; at < count; at++) {
        int32_t edge = edge_of(self, state, recent[at]);
        for (; edge == NOTHING && state > 0; edge = edge_of(self, state, recent[at])) {
            state = self->states[state].link;
            length = self->states[state].length;
        }
        if (edge == NOTHING) continue;
        state = self->edges[edge].next;
        length++;
    }
    found = with_more(self, state);
    *matched = found == state ? length : self->states[found].length;
    return found;
}

static PyObject *extend(PyObject *object, PyObject *args) {
    Automaton *self = (Automaton *)object;
    OWNED Py_buffer taken = {0};
    if (!PyArg_ParseTuple(args, "y*", &taken)) return NULL;
    Py_ssize_t count = taken.len / (Py_ssize_t)sizeof(int32_t);
    if (count > TOKENS_MAX - self->tokens) return PyErr_SetString(PyExc_OverflowError, "the text is too long"), NULL;
    for (Py_ssize_t at = 0; at < count; at++)
        if (!append(self, ((const int32_t *)taken.buf)[at])) return NULL;
    Py_RETURN_NONE;
}

static PyObject *drafts(PyObject *object, PyObject *args) {
    Automaton *self = (Automaton *)object;
    OWNED Py_buffer recent = {0};
    Py_ssize_t most, count = 0;
    double factor, share, likelihood = 1.0;
    int32_t matched;
    if (!PyArg_ParseTuple(args, "y*ndd", &recent, &most, &factor, &share)) return NULL;
    int32_t state = match(self, recent.buf, recent.len / (Py_ssize_t)sizeof(int32_t), &matched);
    if (factor * matched < (double)most) most = (Py_ssize_t)(factor * matched);
    PyObject *found = PyBytes_FromStringAndSize(NULL, Py_MAX(most, 0) * (Py_ssize_t)sizeof(int32_t));
    if (!found) return NULL;
    while (state > 0 && count < most) {
        const Edge *edge = &self->edges[self->states[state].best];
        likelihood *= (double)edge->count / (double)self->states[state].total;
        if (edge->token < 0 || likelihood < share) break;
        ((int32_t *)PyBytes_AS_STRING(found))[count++] = edge->token;
        state = with_more(self, edge->next);
    }
    if (_PyBytes_Resize(&found, count * (Py_ssize_t)sizeof(int32_t)) < 0) return NULL;
    return Py_BuildValue("(iN)", matched, found);
}

static Py_ssize_t length(PyObject *object) { return ((Automaton *)object)->tokens; }

static PyObject *create(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    Automaton *self = PyArg_ParseTuple(args, "") ? (Automaton *)type->tp_alloc(type, 0) : NULL;
    if (self && (!rehash(self) || new_state(self, 0) == NOTHING)) Py_CLEAR(self);
    return (PyObject *)self;
}

static void destroy(PyObject *object) {
    Automaton *self = (Automaton *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyMem_Free(self->states);
    PyMem_Free(self->edges);
    PyMem_Free(self->slots);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    METHOD("extend", extend, "The text grows by these tokens (int32)."),
    METHOD("drafts", drafts, "The tokens matched, and what followed them most often (int32 bytes)."),
    NO_METHOD,
};

static PyType_Slot type_slots[] = {
    {Py_tp_new, create}, {Py_tp_dealloc, destroy}, {Py_tp_methods, methods}, {Py_sq_length, length}, {0, NULL},
};

static PyType_Spec type = {
    .name = "vnext.sampling.drafters._automaton.SuffixAutomaton",
    .basicsize = sizeof(Automaton),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = type_slots,
};

static PyModuleDef module = MODULE("_automaton", "Compiled implementation of automaton_plain.", NULL);

static const Constant constants[] = {CONSTANT(COUNTED_MAX) NO_CONSTANT};

PyMODINIT_FUNC PyInit__automaton(void) { return begin_module(&module, constants, &type); }
