#include "step/recurring.h"

#include "recurrence/recurrence.h"
#include "team.h"

namespace vnx {
namespace {

constexpr int64_t LITTLE_WORK = 16 * 1024;

const char *past(const void *from, int64_t elements, int kind) {
    return static_cast<const char *>(from) + elements * (kind == FLOAT32 ? 4 : 2);
}

/* Each row's groups of neighbouring heads, normed in their place. */
void norm_groups(const RecurringCall &call) {
    const int64_t width = call.layer.values() / call.layer.key_heads, groups = call.layer.key_heads;
    for_units(call.tokens, call.tokens * call.layer.values() < LITTLE_WORK, [&](int64_t token, int64_t) {
        for (int64_t group = 0; group < groups; ++group) {
            void *x = const_cast<char *>(past(call.result, (token * groups + group) * width, call.kind));
            kernels().norm(call.kind == FLOAT32 ? FLOAT32 : BFLOAT16_WIDE_NORM,
                           {x, nullptr, call.layer.norm + group * width, x, nullptr, width, width, 0, float(call.layer.eps), 0}, 0, 1);
        }
    });
}

}  // namespace

void run_recurring(const RecurringCall &call) {
    const Recurring &layer = call.layer;
    const int kind = call.kind;
    const bool is_gated = layer.value_heads == 0, is_delta = layer.beside != nullptr;
    const int64_t values = layer.values(), shared = layer.key_heads * layer.key_dim, heads = layer.value_heads;
    const void *given = is_gated || is_delta ? call.inner : past(call.inner, values, kind);
    short_convolution(kind, {given, layer.weight, layer.bias, call.inputs_pool, is_gated ? call.result : call.convolved,
                             call.inner_width, layer.channels, layer.width, (layer.width - 1) * layer.channels, !is_gated,
                             is_gated, call.rows});
    if (is_gated) return;
    RecurrenceCall heads_call{};
    heads_call.x = call.convolved;
    heads_call.x_stride = layer.channels;
    heads_call.steps = is_delta ? past(call.beside, heads, kind) : past(call.inner, values + layer.channels, kind);
    heads_call.strengths = is_delta ? call.beside : nullptr;
    heads_call.step_stride = heads_call.strength_stride = is_delta ? layer.beside->out : call.inner_width;
    heads_call.steps_a_head = 1;
    heads_call.gates = is_delta ? past(call.inner, layer.channels, kind) : call.inner;
    heads_call.gate_stride = call.inner_width;
    heads_call.queries_at = is_delta ? 0 : values + shared;
    heads_call.keys_at = is_delta ? shared : values;
    heads_call.values_at = is_delta ? 2 * shared : 0;
    heads_call.decay_logs = layer.decay_logs;
    heads_call.step_bias = layer.step_bias;
    heads_call.norm = is_delta ? layer.norm : nullptr;
    heads_call.skips = layer.skips;
    heads_call.pool = static_cast<float *>(call.states_pool);
    heads_call.page_stride = heads * layer.key_dim * layer.value_dim;
    heads_call.result = call.result;
    heads_call.key_heads = layer.key_heads;
    heads_call.key_dim = layer.key_dim;
    heads_call.value_heads = heads;
    heads_call.value_dim = layer.value_dim;
    heads_call.eps = float(layer.eps);
    heads_call.strength_scale = float(layer.strength_scale);
    heads_call.rows = call.rows;
    recur(kind, heads_call);
    if (!is_delta) norm_groups(call);
}

}  // namespace vnx
