#include "step/recurring.h"

#include <cstring>

#include "linear/linear.h"
#include "recurrence/recurrence.h"
#include "rows/rows.h"
#include "team.h"

namespace vnx {
namespace {

constexpr int64_t LITTLE_WORK = 16 * 1024;

const char *past(const void *from, int64_t elements, int kind) {
    return static_cast<const char *>(from) + elements * (kind == FLOAT32 ? 4 : 2);
}

char *past(void *from, int64_t elements, int kind) { return const_cast<char *>(past(static_cast<const void *>(from), elements, kind)); }

/* Each row's groups of neighbouring heads, normed in their place. */
void norm_groups(const RecurringCall &call) {
    const int64_t width = call.layer.values() / call.layer.key_heads, groups = call.layer.key_heads;
    const float *weight = static_cast<const float *>(call.layer.norm);
    for_units(call.tokens, call.tokens * call.layer.values() < LITTLE_WORK, [&](int64_t token, int64_t) {
        for (int64_t group = 0; group < groups; ++group) {
            void *x = past(call.result, (token * groups + group) * width, call.kind);
            kernels().norm(call.kind == FLOAT32 ? FLOAT32 : BFLOAT16_WIDE_NORM,
                           {x, nullptr, weight + group * width, x, nullptr, width, width, 0, float(call.layer.eps), 0}, 0, 1);
        }
    });
}

/* Queries, keys and values stand in this order; strengths and steps are of each head. */
void place_delta(const RecurringCall &call, RecurrenceCall &heads) {
    heads.keys_at = heads.key_heads * heads.key_dim;
    heads.values_at = 2 * heads.keys_at;
    heads.strengths = call.beside;
    heads.steps = past(call.beside, heads.value_heads, call.kind);
    heads.strength_stride = heads.step_stride = call.layer.beside->out;
}

/* The same, but steps are of each key and come before the strengths; where they are products of a few numbers, so are gates. */
void place_key_delta(const RecurringCall &call, RecurrenceCall &heads) {
    const Recurring &layer = call.layer;
    const int64_t width = layer.beside->out;
    place_delta(call, heads);
    heads.strengths = past(call.beside, width - heads.value_heads, call.kind);
    heads.steps = call.beside;
    heads.steps_a_head = heads.key_dim;
    heads.is_sigmoid = true;
    if (layer.steps == nullptr) return;
    void *steps = past(call.beside, call.tokens * width, call.kind), *gates = past(steps, call.tokens * layer.steps->out, call.kind);
    linear(call.beside, width, call.tokens, layer.steps, nullptr, steps, layer.steps->out, call.kind);
    linear(past(call.beside, layer.steps->in, call.kind), width, call.tokens, layer.gates, nullptr, gates, layer.gates->out, call.kind);
    heads.steps = steps;
    heads.step_stride = layer.steps->out;
    heads.gates = gates;
    heads.gate_stride = layer.gates->out;
}

/* Values, keys and queries stand in this order; gates before all, steps behind all. */
void place_mamba(const RecurringCall &call, RecurrenceCall &heads) {
    heads.keys_at = call.layer.values();
    heads.queries_at = heads.keys_at + heads.key_heads * heads.key_dim;
    heads.values_at = 0;
    heads.gates = call.inner;
    heads.steps = past(call.inner, call.layer.values() + call.layer.channels, call.kind);
    heads.step_stride = call.inner_width;
}

/* Beside the values stand, normed, the keys and queries that were made of them. Steps are a product of what is before these. */
void place_selective(const RecurringCall &call, RecurrenceCall &heads) {
    const Recurring &layer = call.layer;
    const int64_t width = layer.beside->out, rank = layer.steps->in, keys = layer.key_dim, mixed = layer.mixed();
    void *steps = past(call.beside, call.tokens * width, call.kind);
    const auto norm = [&](int64_t from, int64_t count, const void *weight, void *to, int64_t stride) {
        if (weight == nullptr) {
            for (int64_t row = 0; row < call.tokens && to != call.beside; ++row)
                std::memcpy(past(to, row * stride, call.kind), past(call.beside, row * width + from, call.kind),
                            size_t(count * (call.kind == FLOAT32 ? 4 : 2)));
            return;
        }
        NormCall own{past(call.beside, from, call.kind), nullptr, weight, to, nullptr, count, width, 0, float(layer.eps), 0};
        own.normed_stride = stride;
        rms_norm(call.kind, call.tokens, own);
    };
    norm(0, rank, layer.step_norm, call.beside, width);
    norm(rank, keys, layer.key_norm, past(call.convolved, layer.channels, call.kind), mixed);
    norm(rank + keys, keys, layer.query_norm, past(call.convolved, layer.channels + keys, call.kind), mixed);
    linear(call.beside, width, call.tokens, layer.steps, nullptr, steps, layer.steps->out, call.kind);
    heads.keys_at = layer.channels;
    heads.queries_at = layer.channels + keys;
    heads.steps = steps;
    heads.step_stride = layer.steps->out;
    heads.steps_a_head = layer.value_dim;
    heads.by_number = true;
}

/* Query, key and value of each head stand side by side in the product itself. */
void place_lightning(const RecurringCall &call, RecurrenceCall &heads) {
    heads.x = call.inner;
    heads.x_stride = call.inner_width;
    heads.keys_at = heads.key_dim;
    heads.values_at = 2 * heads.key_dim;
    heads.by_head = heads.activates = true;
    heads.gates = nullptr;
}

}  // namespace

void scale_inner(const RecurringCall &call, void *inner) {
    const Recurring &layer = call.layer;
    const int64_t keys = layer.key_heads * layer.key_dim;
    const int64_t widths[] = {layer.values(), layer.values(), keys, keys, layer.value_heads};
    for_units(call.tokens, call.tokens * call.inner_width < LITTLE_WORK, [&](int64_t token, int64_t) {
        int64_t at = token * call.inner_width;
        for (int part = 0; part < 5; at += widths[part++])
            scale_rows(call.kind, 1, widths[part], float(layer.scales[part]), past(inner, at, call.kind));
    });
}

void run_convolution(const RecurringCall &call) {
    const Recurring &layer = call.layer;
    const bool is_alone = layer.rule == SHORT_CONVOLUTION;
    const void *given = layer.rule == MAMBA ? past(call.inner, layer.values(), call.kind) : call.inner;
    ConvolutionCall own{given, layer.weight, layer.bias, call.inputs_pool, is_alone ? call.result : call.convolved, call.inner_width,
                        layer.channels, layer.width, (layer.width - 1) * layer.channels, !is_alone, is_alone, call.rows};
    own.result_stride = layer.mixed();
    short_convolution(call.kind, own);
}

void run_heads(const RecurringCall &call) {
    const Recurring &layer = call.layer;
    RecurrenceCall heads{};
    heads.x = call.convolved;
    heads.x_stride = layer.mixed();
    heads.steps_a_head = 1;
    heads.gates = past(call.inner, layer.channels, call.kind);
    heads.gate_stride = call.inner_width;
    heads.decay_logs = layer.decay_logs;
    heads.step_bias = layer.step_bias;
    heads.skips = layer.skips;
    heads.pool = static_cast<float *>(call.states_pool);
    heads.page_stride = layer.value_heads * layer.key_dim * layer.value_dim;
    heads.result = call.result;
    heads.key_heads = layer.key_heads;
    heads.key_dim = layer.key_dim;
    heads.value_heads = layer.value_heads;
    heads.value_dim = layer.value_dim;
    heads.eps = float(layer.eps);
    heads.strength_scale = float(layer.strength_scale);
    heads.bound = float(layer.bound);
    heads.rows = call.rows;
    switch (layer.rule) {
    case DELTA_NET: place_delta(call, heads); break;
    case KEY_DELTA: place_key_delta(call, heads); break;
    case MAMBA: place_mamba(call, heads); break;
    case SELECTIVE: place_selective(call, heads); break;
    case LIGHTNING: place_lightning(call, heads); break;
    default: return;
    }
    if (heads.strengths != nullptr) heads.norm = static_cast<const float *>(layer.norm);
    recur(call.kind, heads);
    if (layer.rule == MAMBA && layer.norm != nullptr) norm_groups(call);
}

}  // namespace vnx
