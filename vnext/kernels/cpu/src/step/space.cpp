#include "step/space.h"

#include <algorithm>

#include "team.h"

namespace vnx {
namespace {

template <typename Question>
bool has_any(const StackCall &call, const Question &question) {
    return std::any_of(call.layers, call.layers + call.layer_count, question);
}

bool has_shared(const StackLayer &layer) { return layer.experts != nullptr || layer.beside != nullptr; }

}  // namespace

int64_t padded(int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

int64_t query_width(const StackCall &call, const StackLayer &layer) { return call.places->plan->heads * layer.head_dim; }

bool has_gate_apart(const StackLayer &layer) { return layer.activation != NO_GATE && layer.gate_up->out != layer.down->in; }

Sizes sizes_of(const StackCall &call) {
    Sizes sizes{call.kind == FLOAT32 ? 4 : 2, 0, 0, 0, 0, call.hidden};
    for (int64_t i = 0; i < call.layer_count; ++i) {
        const StackLayer &layer = call.layers[i];
        const int64_t queries = query_width(call, layer);
        sizes.inner_width = std::max(sizes.inner_width, queries);
        if (layer.own_gate != nullptr) sizes.wide_width = std::max(sizes.wide_width, layer.own_gate->out);
        if (layer.qkv != nullptr) sizes.joined_width = std::max(sizes.joined_width, layer.qkv->out);
        if (layer.narrow_input != nullptr) sizes.wide_width = std::max(sizes.wide_width, 2 * layer.narrow_input->out);
        if (layer.down != nullptr) sizes.wide_width = std::max(sizes.wide_width, layer.down->in);
        if (layer.is_by_head) sizes.inner_width = std::max(sizes.inner_width, layer.qkv->out);
        if (layer.is_gated) sizes.beside_width = std::max(sizes.beside_width, queries);
        if (layer.latent != nullptr) {
            sizes.joined_width = std::max({sizes.joined_width, queries + layer.head_dim, layer.output->in});
            sizes.inner_width = std::max(sizes.inner_width, layer.qkv->out);
            const int64_t gates = layer.latent->gates == nullptr ? 0 : layer.latent->gates->out;
            sizes.beside_width = std::max(sizes.beside_width, layer.latent->query_width() + gates);
        }
        if (layer.beside != nullptr) sizes.joined_width = std::max(sizes.joined_width, layer.beside->qkv->out);
        const Recurring *recurring = layer.beside == nullptr ? layer.recurring : layer.beside->recurring;
        if (recurring == nullptr) continue;
        const Recurring &own = *recurring;
        sizes.inner_width = std::max({sizes.inner_width, own.values(), own.mixed()});
        sizes.beside_width = std::max(sizes.beside_width, own.beside_width());
        if (own.rule == SELECTIVE) sizes.sum_width = std::max(sizes.sum_width, own.beside->out);
    }
    return sizes;
}

Space take_space(const StackCall &call, const Sizes &sizes) {
    const auto bytes = [&](int64_t rows, int64_t width) { return padded(rows * width * sizes.element); };
    const int64_t outer = bytes(call.tokens, std::max(sizes.joined_width, sizes.wide_width)),
                  inner = bytes(call.tokens, std::max(sizes.inner_width, call.hidden)),
                  picked_query = bytes(call.samples, std::max(sizes.inner_width, call.hidden)), kept = bytes(call.samples, call.hidden),
                  apart = call.part_starts == nullptr && !has_any(call, has_gate_apart) ? 0 : bytes(call.tokens, 2 * sizes.wide_width),
                  sums = call.sum == nullptr ? 0 : padded(call.tokens * sizes.sum_width * 4),
                  shared = has_any(call, has_shared) ? bytes(call.tokens, call.hidden) : 0,
                  beside = bytes(call.tokens, sizes.beside_width), picked_gates = bytes(call.samples, sizes.beside_width);
    char *memory = static_cast<char *>(
        scratch(SLOT_STACK, size_t(outer + 2 * inner + picked_query + kept + apart + sums + shared + beside + picked_gates)));
    char *query = memory + outer, *normed = query + inner, *picked = normed + inner, *residual = picked + picked_query,
         *changed = residual + kept, *second = changed + apart + sums, *third = second + shared;
    return {memory, query, normed, picked, residual, changed, reinterpret_cast<float *>(changed + apart), second, third, third + beside};
}

}  // namespace vnx
