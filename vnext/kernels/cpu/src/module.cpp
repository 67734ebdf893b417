/* The Python interface of the library: each function takes numbers (addresses, sizes, strides) and None for a null address.

   Checks counts and types of arguments, nothing else: shapes and dtypes are the caller's contract
   (vnext/kernels/contracts.py). The interpreter's lock is kept: a call takes microseconds, and giving the lock away
   between the hundred calls of a step lets a busy thread stretch each of them to a switch interval. Calls that take
   milliseconds give it away. */
#include "compiled.h"

#include <cstddef>
#include <new>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "attention/attention.h"
#include "kernels.h"
#include "linear/blocks.h"
#include "linear/codes.h"
#include "linear/linear.h"
#include "recurrence/recurrence.h"
#include "rows/rows.h"
#include "sampling/sampling.h"
#include "select/select.h"
#include "step/stack.h"
#include "step/step.h"
#include "team.h"
#include "thin/thin.h"
#include "traced.h"

namespace {

using namespace vnx;

constexpr int64_t LONG_WORK = int64_t(1) << 30;  // multiply-adds: about a millisecond and more

constexpr const char *PLAN_NAME = "vnext.attention_plan";

template <typename T>
T read(PyObject *object) {
    if constexpr (std::is_same_v<T, const AttentionPlan *>)
        return static_cast<T>(PyCapsule_GetPointer(object, PLAN_NAME));
    else if constexpr (std::is_pointer_v<T>)
        return object == Py_None ? nullptr : static_cast<T>(PyLong_AsVoidPtr(object));
    else if constexpr (std::is_floating_point_v<T>)
        return static_cast<T>(PyFloat_AsDouble(object));
    else
        return static_cast<T>(PyLong_AsLongLong(object));
}

/* A function of Python has raised: the exception is set. */
struct PythonRaised {};

PyObject *written(int64_t value) { return PyLong_FromLongLong(value); }
PyObject *written(bool value) { return PyBool_FromLong(value); }
PyObject *written(PyObject *value) { return value; }

/* Calls a plain function with the arguments of a Python call. */
template <auto F>
struct Entry;
template <typename R, typename... A, R (*F)(A...)>
struct Entry<F> {
    static PyObject *call(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
        if (count != Py_ssize_t(sizeof...(A))) {
            PyErr_Format(PyExc_TypeError, "%zd arguments given where %zd are needed", count, Py_ssize_t(sizeof...(A)));
            return nullptr;
        }
        return pass(arguments, std::index_sequence_for<A...>());
    }
    template <size_t... I>
    static PyObject *pass(PyObject *const *arguments, std::index_sequence<I...>) {
        std::tuple<A...> values{read<A>(arguments[I])...};
        if (PyErr_Occurred()) return nullptr;
        try {
            if constexpr (std::is_void_v<R>) {
                F(std::get<I>(values)...);
                Py_RETURN_NONE;
            } else {
                return written(F(std::get<I>(values)...));
            }
        } catch (const std::bad_alloc &) {
            return PyErr_NoMemory();
        } catch (const PythonRaised &) {
            return nullptr;
        }
    }
};

struct WithoutLock {
    PyThreadState *state;
    explicit WithoutLock(bool apart) : state(apart ? PyEval_SaveThread() : nullptr) {}
    ~WithoutLock() {
        if (state != nullptr) PyEval_RestoreThread(state);
    }
};

void do_configure(int members, int spin_us) {
    const WithoutLock apart(true);
    configure_team(members, spin_us);
}

int64_t do_bind(int member, const void *cpus, int count) { return bind_member(member, static_cast<const int32_t *>(cpus), count); }

void do_pack(const void *parts, int kind, const void *bias, int64_t out, int64_t in, int gate, int shards, void *buffer) {
    const WithoutLock apart(true);
    pack_linear(static_cast<const WeightPart *>(parts), kind, bias, out, in, gate, shards, buffer);
}

bool do_pack_codes(const void *parts, const void *types, int64_t count, const void *bias, int bias_kind, int64_t in, int x_kind,
                   int multiplied, int gate, int shards, int64_t first, int64_t last, void *buffer) {
    const WithoutLock apart(true);
    const auto *own = static_cast<const CodesPart *>(parts);
    const auto *kinds = static_cast<const int64_t *>(types);
    return pack_codes(own, kinds, count, bias, bias_kind, in, x_kind, multiplied, gate, shards, first, last, buffer);
}

void do_round_groups(int kind, const void *x, int64_t count, int bits, uint8_t *codes, uint16_t *scales) {
    const WithoutLock apart(true);
    round_groups(kind, x, count, bits, codes, scales);
}

int64_t do_codes_bytes(const void *parts, int64_t count, int64_t in, int gate, int shards) {
    return codes_bytes(static_cast<const CodesPart *>(parts), count, in, gate, shards);
}

void do_linear(const void *x, int64_t x_stride, int64_t rows, const Packed *weight, const void *bias, void *result,
               int64_t result_stride, int result_kind, int apart) {
    const WithoutLock unlocked(rows * weight->in * weight->out > LONG_WORK);
    linear(x, x_stride, rows, weight, bias, result, result_stride, result_kind, apart != 0);
}

void do_head_products(int kind, const void *x, int64_t x_stride, int64_t head_stride, int64_t rows, const void *weights, int64_t heads,
                      void *result, int64_t out) {
    const auto *places = static_cast<const Packed *const *>(weights);
    const WithoutLock unlocked(rows * heads * out * places[0]->in > LONG_WORK);
    head_products(kind, {const_cast<void *>(x), x_stride, head_stride}, rows, places, heads, {result, heads * out, out});
}

void do_norm(int kind, const void *x, int64_t x_stride, const void *residual, int64_t residual_stride,
             const void *weight, float offset, float eps, int64_t rows, int64_t width, void *normed, void *total) {
    rms_norm(kind, rows, {x, residual, weight, normed, total, width, x_stride, residual_stride, eps, offset});
}

void do_layer_norm(int kind, const void *x, int64_t x_stride, const float *weight, const float *bias, float eps, int64_t rows,
                   int64_t width, void *normed) {
    rms_norm(kind, rows, {x, nullptr, weight, normed, nullptr, width, x_stride, 0, eps, 0, bias});
}

void do_gate(int kind, const void *x, int64_t x_stride, int64_t rows, int64_t width, int gate, void *result) {
    gate_and_mul(kind, rows, {x, result, width, x_stride, gate});
}

void do_activate(int kind, const void *x, int64_t x_stride, int64_t rows, int64_t width, int gate, const float *above,
                 const float *below, void *result) {
    activate(kind, rows, {x, result, width, x_stride, gate}, above, below);
}

void do_thin(int kind, const void *x, int64_t x_stride, int64_t in, int64_t shards, void *product, int64_t product_stride,
             const void *parts, int64_t part_count, float *narrow, int is_up) {
    const ThinCall call{x,     x_stride, in, shards, product, product_stride, static_cast<const ThinPart *>(parts), part_count,
                        narrow, is_up != 0};
    const WithoutLock apart(thin_work(call) > LONG_WORK);
    add_thin(kind, call);
}

void do_rotary(int kind, const void *joined, int64_t joined_stride, int64_t tokens, const void *query_norm,
               const void *key_norm, float offset, float eps, const float *cosine, const float *sine,
               int64_t rotated_dim, void *key_cache, void *value_cache, const int64_t *slots, int64_t heads,
               int64_t kv_heads, int64_t head_dim, int64_t block_size, int64_t block_stride, int cache_kind, void *query) {
    rotary_kv_write(kind, tokens,
                    {joined, query_norm, key_norm, cosine, sine, slots, key_cache, value_cache, query, joined_stride,
                     heads, kv_heads, head_dim, rotated_dim, block_size, block_stride, eps, offset, cache_kind});
}

void do_gate_by(int kind, const void *x, int64_t x_stride, const void *gates, int64_t gates_stride, int64_t rows, int64_t width,
                bool is_one, void *result) {
    gate_and_mul(kind, rows, {gates, result, width, gates_stride, NO_GATE, false, x, x_stride, is_one});
}

void do_convolution(int kind, const void *x, int64_t x_stride, const void *weight, const void *bias, void *pool, int64_t page_stride,
                    int64_t channels, int64_t width, int silu, int gated, const int32_t *starts, const int32_t *pages,
                    const void *fresh, const int32_t *trail, int64_t rows, int64_t tokens, void *result) {
    const WithoutLock apart(tokens * channels * width > LONG_WORK);
    short_convolution(kind, {x, weight, bias, pool, result, x_stride, channels, width, page_stride, silu, gated,
                             {starts, pages, static_cast<const uint8_t *>(fresh), trail, rows}});
}

void do_recur(int kind, const void *x, int64_t x_stride, int64_t queries_at, int64_t keys_at, int64_t values_at, const void *steps,
              const void *strengths, int64_t step_stride, int64_t strength_stride, const void *gates, int64_t gate_stride,
              const float *decay_logs,
              const float *step_bias, const float *norm, const float *skips, float eps, float *pool, int64_t page_stride,
              int64_t key_heads, int64_t key_dim, int64_t value_heads, int64_t value_dim, int64_t steps_a_head, bool by_number,
              bool is_sigmoid, bool by_head, bool activates, float bound, float strength_scale, const int32_t *starts, const int32_t *pages, const void *fresh, const int32_t *trail, int64_t rows, int64_t tokens, void *result) {
    const WithoutLock apart(tokens * value_heads * key_dim * value_dim > LONG_WORK);
    recur(kind, {x, steps, strengths, gates, decay_logs, step_bias, norm, skips, pool, result, x_stride, queries_at, keys_at,
                 values_at, step_stride, strength_stride, gate_stride, page_stride, key_heads, key_dim, value_heads, value_dim,
                 steps_a_head, by_number, is_sigmoid, by_head, activates, bound, strength_scale, eps,
                 {starts, pages, static_cast<const uint8_t *>(fresh), trail, rows}});
}

constexpr int64_t LONG_SAMPLING = int64_t(1) << 22;  // logits

void do_sample(const float *logits, int64_t stride, int64_t rows, int64_t vocabulary, const void *columns,
               int64_t *tokens) {
    const WithoutLock apart(rows * vocabulary > LONG_SAMPLING);
    sample_rows({logits, stride, rows, vocabulary, static_cast<const SampleColumns *>(columns), tokens});
}

void do_mask(float *logits, int64_t stride, int64_t rows, int64_t vocabulary, const void *words) {
    const WithoutLock apart(rows * vocabulary > LONG_SAMPLING);
    mask_rows({logits, stride, rows, vocabulary, static_cast<const uint32_t *const *>(words)});
}

void do_report(const float *logits, int64_t stride, int64_t rows, int64_t vocabulary, const int64_t *tokens, int64_t count,
               float *logprobs, int64_t *ranks, int64_t *top_tokens, float *top_logprobs) {
    const WithoutLock apart(rows * vocabulary > LONG_SAMPLING);
    report_rows({logits, stride, rows, vocabulary, tokens, count, logprobs, ranks, top_tokens, top_logprobs});
}

void do_penalise(float *logits, int64_t stride, int64_t vocabulary, int64_t count, const int64_t *rows, const void *prompts,
                 const void *counts, const float *repetition, const float *presence, const float *frequency) {
    const WithoutLock apart(count * vocabulary > LONG_SAMPLING);
    penalise_rows({logits, stride, vocabulary, count, rows, static_cast<const uint8_t *const *>(prompts),
                   static_cast<const int32_t *const *>(counts), repetition, presence, frequency});
}

PyObject *do_plan(const int64_t *query_starts, const int64_t *context_lengths, const int32_t *table, int64_t stride,
                  int64_t rows, int64_t heads, int64_t kv_heads, int64_t block_size) {
    auto plan = plan_attention(query_starts, context_lengths, table, stride, rows, heads, kv_heads, block_size);
    const auto release = [](PyObject *capsule) {
        delete static_cast<AttentionPlan *>(PyCapsule_GetPointer(capsule, PLAN_NAME));
    };
    return PyCapsule_New(plan.release(), PLAN_NAME, release);
}

void do_attention(int kind, const AttentionPlan *plan, const void *query, const void *key_cache,
                  const void *value_cache, void *result, int64_t head_dim, int64_t block_stride, int cache_kind,
                  float scale, int64_t window, float cap, const float *sinks) {
    AttentionCall call{};
    call.query = query;
    call.key_cache = key_cache;
    call.value_cache = value_cache;
    call.result = result;
    call.head_dim = head_dim;
    call.block_stride = block_stride;
    call.scale = scale;
    call.window = window;
    call.cap = cap;
    call.sinks = sinks;
    call.cache_kind = cache_kind;
    int64_t work = 0;
    for (const AttentionRow &row : plan->rows)
        work += int64_t(row.query_count) * row.context;
    const WithoutLock apart(work * plan->heads * head_dim > LONG_WORK);
    run_attention(kind, *plan, call);
}

void do_choose(int kind, const void *query, const void *keys, const float *weights, const int32_t *tables, const int64_t *rows,
               const int64_t *limits, int64_t table_stride, int64_t heads, int64_t width, int64_t block_size, int64_t block_stride,
               float *scores, int64_t score_stride, int64_t tokens, int64_t count, int32_t *places) {
    const WithoutLock apart(tokens * score_stride * heads * width > LONG_WORK);
    const ScoreCall call{query,      keys,         weights, tables,      rows, limits, table_stride, heads, width,
                         block_size, block_stride, scores,  score_stride};
    choose_keys(kind, call, tokens, count, places);
}

void do_route(const Router *router, const float *scores, int64_t rows, float *shares, int64_t *ids) {
    route_rows(*router, scores, rows, shares, ids);
}

void do_experts(int kind, const Experts *experts, const void *x, int64_t rows, int64_t hidden, int64_t k, const float *shares,
                const int64_t *ids, void *result) {
    const WithoutLock apart(rows * k * hidden * experts->down[0]->in > LONG_WORK / 3);
    run_experts(kind, *experts, x, rows, hidden, k, shares, ids, nullptr, result);
}

void do_stack(int kind, int norm_kind, int cache_kind, const void *layers, const void *caches, int64_t layer_count, int64_t block_stride,
              const void *last_norm, const float *last_norm_bias, const AttentionPlan *plan, int64_t tokens, int64_t hidden, int64_t rotated_dim, float eps, float scale, float cap, const float *cosine, const float *sine,
              const int64_t *slots, const int64_t *sample_at, int64_t samples, void *residual, void *result,
              const int64_t *aux_layers, int64_t aux_count, void *aux, const float *query_factors) {
    const WithoutLock apart(true);
    const StackPlaces places{plan, slots};
    const Angles angles{cosine, sine, rotated_dim};
    run_stack({kind, norm_kind, cache_kind, static_cast<const StackLayer *>(layers), static_cast<const StackCache *>(caches), layer_count,
               block_stride, last_norm, last_norm_bias, &places, tokens, hidden, eps, scale, cap, &angles,
               sample_at, samples, nullptr, nullptr, residual, result, {aux_layers, aux_count, aux}, nullptr, {}, query_factors, nullptr, 0});
}

/* Calls a function of Python with numbers, by a thread that has given the lock away for the time being. */
template <typename... Numbers>
void call_python(void *function, Numbers... numbers) {
    const PyGILState_STATE held = PyGILState_Ensure();
    PyObject *found = PyObject_CallFunction(static_cast<PyObject *>(function), std::string(sizeof...(Numbers), 'L').c_str(),
                                            static_cast<long long>(numbers)...);
    Py_XDECREF(found);
    PyGILState_Release(held);
    if (found == nullptr) throw PythonRaised();
}

/* How the ranks of a model's group meet. */
Ranks ranks_of(const StepModel *model) {
    return {[=](void *values, int64_t bytes, int kind) { call_python(model->sum, kind, intptr_t(values), bytes); },
            [=](const void *part, void *joined, int64_t bytes, int64_t row_bytes) {
                call_python(model->join, intptr_t(part), intptr_t(joined), bytes, row_bytes);
            }};
}

bool do_step(const StepModel *model, const StepArrays *step) {
    const WithoutLock apart(true);
    if (model->rank_count == 1) return run_step(*model, *step, nullptr);
    const Ranks ranks = ranks_of(model);
    return run_step(*model, *step, &ranks);
}

void do_logits(const StepModel *model, const void *hidden, int64_t rows, float *logits) {
    const WithoutLock apart(true);
    if (model->rank_count == 1) return step_logits(*model, nullptr, hidden, rows, logits);
    const Ranks ranks = ranks_of(model);
    step_logits(*model, &ranks, hidden, rows, logits);
}

void do_sample_step(const StepModel *model, const StepArrays *step) {
    const WithoutLock apart(true);
    sample_step(*model, *step);
}

void do_trace(void *record, int64_t room) { trace_operations(static_cast<TracedCall *>(record), room); }

int64_t get_best_level() { return best_level(); }
int64_t get_level() { return current_level(); }
int64_t get_team_size() { return team_size(); }

#define VNX_ENTRY(name, function, text) \
    {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Entry<function>::call)), METH_FASTCALL, text}

PyMethodDef methods[] = {
    VNX_ENTRY("configure_team", do_configure, "configure_team(members, spin_us)"),
    VNX_ENTRY("bind_member", do_bind, "bind_member(member, cpus, count) -> whether the system allows it"),
    VNX_ENTRY("team_size", get_team_size, "team_size() -> members"),
    VNX_ENTRY("best_level", get_best_level, "best_level() -> level"),
    VNX_ENTRY("has_level", has_level, "has_level(level) -> whether this machine has it"),
    VNX_ENTRY("is_complete", is_complete, "is_complete() -> whether all instructions of this machine that a level has were built"),
    VNX_ENTRY("level", get_level, "level() -> level in use"),
    VNX_ENTRY("set_level", set_level, "set_level(level) -> whether this machine has it"),
    VNX_ENTRY("packed_bytes", packed_bytes, "packed_bytes(out, in, kind, gate, shards) -> bytes"),
    VNX_ENTRY("pack_linear", do_pack, "pack_linear(parts, kind, bias, out, in, gate, shards, buffer)"),
    VNX_ENTRY("codes_bytes", do_codes_bytes, "codes_bytes(parts, count, in, gate, shards) -> bytes"),
    VNX_ENTRY("pack_codes", do_pack_codes,
             "pack_codes(parts, types, count, bias, bias_kind, in, x_kind, multiplied, gate, shards, first, last, buffer) -> whether scales are finite"),
    VNX_ENTRY("round_groups", do_round_groups, "round_groups(kind, x, count, bits, codes, scales)"),
    VNX_ENTRY("packed_rows", packed_rows, "packed_rows(ids, count, first, packed, result)"),
    VNX_ENTRY("linear", do_linear, "linear(x, x_stride, rows, packed, bias, result, result_stride, result_kind, apart)"),
    VNX_ENTRY("head_products", do_head_products,
             "head_products(kind, x, x_stride, head_stride, rows, weights, heads, result, out)"),
    VNX_ENTRY("rms_norm", do_norm,
             "rms_norm(kind, x, x_stride, residual, residual_stride, weight, offset, eps, rows, width, normed, total)"),
    VNX_ENTRY("layer_norm", do_layer_norm, "layer_norm(kind, x, x_stride, weight, bias, eps, rows, width, normed)"),
    VNX_ENTRY("gate_and_mul", do_gate, "gate_and_mul(kind, x, x_stride, rows, width, gate, result)"),
    VNX_ENTRY("activate", do_activate, "activate(kind, x, x_stride, rows, width, gate, above, below, result)"),
    VNX_ENTRY("gate_by", do_gate_by, "gate_by(kind, x, x_stride, gates, gates_stride, rows, width, is_one, result)"),
    VNX_ENTRY("soft_cap", soft_cap, "soft_cap(rows, width, cap, x)"),
    VNX_ENTRY("add_thin", do_thin, "add_thin(kind, x, x_stride, in, shards, product, product_stride, parts, part_count, narrow, is_up)"),
    VNX_ENTRY("rotary_kv_write", do_rotary,
             "rotary_kv_write(kind, joined, joined_stride, tokens, query_norm, key_norm, offset, eps, cosine, sine, "
             "rotated_dim, "
             "key_cache, value_cache, slots, heads, kv_heads, head_dim, block_size, block_stride, cache_kind, query)"),
    VNX_ENTRY("short_convolution", do_convolution,
             "short_convolution(kind, x, x_stride, weight, bias, pool, page_stride, channels, width, silu, gated, starts, pages, "
             "fresh, trail, rows, tokens, result)"),
    VNX_ENTRY("recur", do_recur,
             "recur(kind, x, x_stride, queries_at, keys_at, values_at, steps, strengths, step_stride, strength_stride, gates, "
             "gate_stride, decay_logs, step_bias, norm, skips, eps, pool, page_stride, key_heads, key_dim, value_heads, value_dim, "
             "steps_a_head, by_number, is_sigmoid, by_head, activates, bound, strength_scale, starts, pages, fresh, trail, rows, tokens, result)"),
    VNX_ENTRY("gather_rows", gather_rows, "gather_rows(table, row_bytes, table_rows, ids, count, first, result)"),
    VNX_ENTRY("sample_rows", do_sample,
             "sample_rows(logits, stride, rows, vocabulary, columns, tokens)"),
    VNX_ENTRY("mask_rows", do_mask, "mask_rows(logits, stride, rows, vocabulary, words)"),
    VNX_ENTRY("report_rows", do_report,
             "report_rows(logits, stride, rows, vocabulary, tokens, count, logprobs, ranks, top_tokens, top_logprobs)"),
    VNX_ENTRY("penalise_rows", do_penalise,
             "penalise_rows(logits, stride, vocabulary, count, rows, prompts, counts, repetition, presence, frequency)"),
    VNX_ENTRY("plan_attention", do_plan,
             "plan_attention(query_starts, context_lengths, table, table_stride, rows, heads, kv_heads, block_size) -> "
             "plan"),
    VNX_ENTRY("attention", do_attention,
             "attention(kind, plan, query, key_cache, value_cache, result, head_dim, block_stride, cache_kind, scale, window, cap)"),
    VNX_ENTRY("choose_keys", do_choose,
             "choose_keys(kind, query, keys, weights, tables, rows, limits, table_stride, heads, width, block_size, block_stride, scores, "
             "score_stride, tokens, count, places)"),
    VNX_ENTRY("route_rows", do_route, "route_rows(router, scores, rows, shares, ids)"),
    VNX_ENTRY("run_experts", do_experts, "run_experts(kind, experts, x, rows, hidden, k, shares, ids, result)"),
    VNX_ENTRY("run_stack", do_stack,
             "run_stack(kind, norm_kind, cache_kind, layers, caches, layer_count, block_stride, last_norm, last_norm_bias, plan, tokens, hidden, "
             "rotated_dim, eps, scale, cap, cosine, sine, slots, sample_at, samples, residual, result, aux_layers, aux_count, aux, query_factors)"),
    VNX_ENTRY("run_step", do_step, "run_step(model, step) -> whether all positions have angles, and all is done"),
    VNX_ENTRY("sample_step", do_sample_step, "sample_step(model, step): the sampling of a step with masks that ran"),
    VNX_ENTRY("step_logits", do_logits, "step_logits(model, hidden, rows, logits): those of normed states"),
    VNX_ENTRY("trace_operations", do_trace, "trace_operations(record, room): from now on; None: no more"),
    VNX_ENTRY("traced_operations", traced_operations, "traced_operations() -> how many there were"),
    {nullptr, nullptr, 0, nullptr},
};

/* Places in structs that Python writes as 64-bit numbers, and how many there are. */
#define VNX_PLACE(within, name) {#within "." #name, offsetof(within, name) / 8},
#define VNX_PLACES(type) {#type, sizeof(type) / 8},
#define VNX_ROUTE(type, name) VNX_PLACE(Router, name)
#define VNX_EXPERT(type, name) VNX_PLACE(Experts, name)
#define VNX_RECURS(type, name) VNX_PLACE(Recurring, name)
#define VNX_LATENTS(type, name) VNX_PLACE(Latent, name)
#define VNX_LAYER(type, name) VNX_PLACE(StackLayer, name)
#define VNX_MODEL(type, name) VNX_PLACE(StepModel, name)
#define VNX_INPUT(type, name) VNX_PLACE(Inputs, name)
#define VNX_STEP(type, name) VNX_PLACE(StepArrays, name)
#define VNX_BLOCKS(name) CONSTANT(BLOCK_##name)
#define VNX_TRACED(type, name) VNX_PLACE(TracedCall, name)

const Constant constants[] = {
    CONSTANT(PORTABLE) CONSTANT(AVX2) CONSTANT(AVX512) CONSTANT(AVX512_BF16) CONSTANT(AMX)
    CONSTANT(NEON) CONSTANT(NEON_BF16)
    CONSTANT(FLOAT32) CONSTANT(BFLOAT16) CONSTANT(INT8) CONSTANT(BFLOAT16_WIDE_NORM)
    CONSTANT(CODES) CONSTANT(FLOAT16) CONSTANT(UINT8) CONSTANT(PIECES_MAX)
    CONSTANT(NO_GATE) CONSTANT(SILU) CONSTANT(GELU_TANH) CONSTANT(SWIGLU_CLAMPED) CONSTANT(SILU_LIMITED)
    CONSTANT(GELU) CONSTANT(RELU2) CONSTANT(XIELU)
    CONSTANT(SHARDS_MAX) CONSTANT(CONVOLUTION_MAX) CONSTANT(CODES_A_SCALE) CONSTANT(HEAD_MAX) CONSTANT(GATES_APART) CONSTANT(GATE_A_HEAD)
    VNX_BLOCK_TYPES(VNX_BLOCKS)
    CONSTANT(OP_LAYER) CONSTANT(OP_PRODUCT) CONSTANT(OP_ATTENTION) CONSTANT(OP_NORM) CONSTANT(OP_GATE) CONSTANT(OP_ROTARY)
    CONSTANT(OP_ADAPTERS) CONSTANT(OP_ROUTE) CONSTANT(OP_EXPERTS) CONSTANT(OP_CONVOLUTION) CONSTANT(OP_RECURRENCE) CONSTANT(OP_SAMPLE)
    VNX_ROUTER(VNX_ROUTE) VNX_PLACES(Router)
    VNX_EXPERTS(VNX_EXPERT) VNX_PLACES(Experts)
    CONSTANT(SHORT_CONVOLUTION) CONSTANT(DELTA_NET) CONSTANT(MAMBA) CONSTANT(SELECTIVE) CONSTANT(LIGHTNING) CONSTANT(KEY_DELTA)
    VNX_RECURRING(VNX_RECURS) VNX_PLACES(Recurring)
    VNX_LATENT(VNX_LATENTS) VNX_PLACES(Latent)
    VNX_STACK_LAYER(VNX_LAYER) VNX_PLACES(StackLayer)
    VNX_INPUTS(VNX_INPUT) VNX_PLACES(Inputs)
    VNX_STEP_MODEL(VNX_MODEL) VNX_PLACES(StepModel)
    VNX_STEP_ARRAYS(VNX_STEP) VNX_PLACES(StepArrays)
    VNX_TRACED_CALL(VNX_TRACED) VNX_PLACES(TracedCall)
    NO_CONSTANT,
};

PyModuleDef definition = MODULE("_native", "vnext's CPU kernels; see docs/cpu.md", methods);

}  // namespace

PyMODINIT_FUNC PyInit__native() {
    PyObject *module = begin_module(&definition, constants, nullptr);
    if (module != nullptr && PyModule_AddStringConstant(module, "SAMPLE_COLUMNS", SAMPLE_COLUMNS) == 0) return module;
    Py_XDECREF(module);
    return nullptr;
}
