#include "step/stack.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "linear/linear.h"
#include "rows/rows.h"
#include "step/space.h"
#include "team.h"
#include "thin/thin.h"
#include "traced.h"

namespace vnx {
namespace {

void round_all(const float *from, int64_t count, int kind, void *to) {
    if (kind == FLOAT32) {
        std::memcpy(to, from, size_t(count) * 4);
        return;
    }
    uint16_t *rounded = static_cast<uint16_t *>(to);
    for (int64_t i = 0; i < count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, from + i, 4);
        const uint16_t upper = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        rounded[i] = from[i] != from[i] ? 0x7fc0 : upper;
    }
}

/* A norm of the stream: none, one by the root mean square, or with a bias a layer norm. */
struct Norm {
    const void *weight;
    const float *bias;
};

/* normed [rows, hidden] = the norm of x. */
void norm_rows(const StackCall &call, int64_t rows, const void *x, const Norm &norm, void *normed) {
    if (norm.weight == nullptr)
        std::memcpy(normed, x, size_t(rows * call.hidden) * (call.kind == FLOAT32 ? 4 : 2));
    else
        rms_norm(call.norm_kind, rows,
                 {x, nullptr, norm.weight, normed, nullptr, call.hidden, call.hidden, 0, call.eps, 0, norm.bias});
}

/* That of the input of layer `index`; behind the last one, of the stack's result. */
Norm norm_before(const StackCall &call, int64_t index) {
    if (index == call.layer_count) return {call.last_norm, call.last_norm_bias};
    return {call.layers[index].attention_norm, call.layers[index].attention_norm_bias};
}

struct Layer {
    const StackCall &call;
    const Sizes &sizes;
    const Space &space;
    const StackLayer &weights;
    const StackCache &cache;

    const int64_t *part_starts; /* of this layer, or null */

    int64_t queries_width() const { return query_width(call, weights); }

    void multiply(Product product, const void *x, int64_t rows, const Packed *weight, const void *bias, void *result) const {
        const bool is_changed = part_starts != nullptr && part_starts[product] < part_starts[product + 1];
        const bool is_gated = weight->gate != NO_GATE;
        const int64_t width = is_gated ? weight->out / 2 : weight->out;
        if (!is_changed) return linear(x, weight->in, rows, weight, bias, result, width, call.kind);
        void *changed = is_gated ? space.apart : result;
        const ThinCall thin{x, weight->in, weight->in, weight->shards, changed, weight->out, call.parts + part_starts[product],
                            part_starts[product + 1] - part_starts[product]};
        linear(x, weight->in, rows, weight, bias, changed, weight->out, call.kind, is_gated, &thin);
        add_thin(call.kind, thin);
        if (is_gated) gate_and_mul(call.kind, rows, {changed, result, width, weight->out, weight->gate});
    }

    /* What attention or MLP gives, by a weight whose inputs the ranks share. */
    void mix(Product product, const void *x, int64_t rows, const Packed *weight, const void *bias, void *mixed) const {
        if (call.sum == nullptr) return multiply(product, x, rows, weight, bias, mixed);
        sum_ranks(x, weight->in, rows, weight, mixed);
        if (bias != nullptr) add_bias(call.kind, rows, call.hidden, bias, mixed);
    }

    /* The product of rows `stride` apart, of which each rank has some inputs. */
    void sum_ranks(const void *x, int64_t stride, int64_t rows, const Packed *weight, void *result) const {
        if (call.sum == nullptr) return linear(x, stride, rows, weight, nullptr, result, weight->out, call.kind);
        linear(x, stride, rows, weight, nullptr, space.sums, weight->out, FLOAT32);
        (*call.sum)(space.sums, rows * weight->out * 4, FLOAT32);
        round_all(space.sums, rows * weight->out, call.kind, result);
    }

    /* What the MLP gives for the normed input. */
    void widen(int64_t rows, void *mixed) const {
        void *wide = has_gate_apart(weights) ? space.apart : space.joined_or_wide;
        multiply(GATE_UP, space.seen_or_normed, rows, weights.gate_up, weights.gate_up_bias, wide);
        if (weights.activation != NO_GATE) {
            const GateCall gating{wide, space.joined_or_wide, weights.down->in, weights.gate_up->out, int(weights.activation)};
            if (has_gate_apart(weights))
                gate_and_mul(call.kind, rows, gating);
            else
                activate(call.kind, rows, gating, weights.above, weights.below);
        }
        mix(DOWN, space.joined_or_wide, rows, weights.down, weights.down_bias, mixed);
    }

    /* x by the norm, beside the MLP's input, or that input where there is none. */
    const void *read(int64_t rows, const void *x, const void *norm) const {
        if (norm == nullptr) return space.seen_or_normed;
        norm_rows(call, rows, x, {norm, nullptr}, space.shared);
        return space.shared;
    }

    void norm_in_place(int64_t rows, const void *weight, void *x) const {
        if (weight != nullptr) rms_norm(call.norm_kind, rows, {x, nullptr, weight, x, nullptr, call.hidden, call.hidden, 0, call.eps, 0});
    }

    /* What the experts give for the normed input, or for the stream by norms of theirs, and the MLP beside them. */
    void choose_experts(int64_t rows, const void *stream) const {
        const Router &router = *weights.router;
        const int64_t score_bytes = rows * router.count * 4, chosen = rows * router.per_token;
        char *memory = static_cast<char *>(scratch(SLOT_ROUTES, size_t(padded(score_bytes) + chosen * 12)));
        float *scores = reinterpret_cast<float *>(memory);
        int64_t *ids = reinterpret_cast<int64_t *>(memory + padded(score_bytes));
        float *shares = reinterpret_cast<float *>(ids + chosen);
        const void *routed = read(rows, stream, weights.router_norm);
        linear(routed, call.hidden, rows, weights.scores, weights.scores_bias, scores, router.count, FLOAT32);
        route_rows(router, scores, rows, shares, ids);
        for (int64_t i = 0; weights.share_scales != nullptr && i < chosen; ++i)
            shares[i] *= weights.share_scales[ids[i]];
        run_chosen(read(rows, stream, weights.experts_norm), rows, shares, ids);
        norm_in_place(rows, weights.after_experts_norm, space.query_or_mixed);
        if (weights.gate_up == nullptr) return;
        widen(rows, space.shared);
        norm_in_place(rows, weights.after_shared_norm, space.shared);
        if (weights.shared_gate != nullptr) {
            linear(space.seen_or_normed, call.hidden, rows, weights.shared_gate, nullptr, space.joined_or_wide, 1, call.kind);
            GateCall gating{space.joined_or_wide, space.shared, call.hidden, 1, NO_GATE};
            gating.others = space.shared;
            gating.others_stride = call.hidden;
            gating.is_one = true;
            gate_and_mul(call.kind, rows, gating);
        }
        add_rows(call.kind, rows, call.hidden, space.shared, space.query_or_mixed);
    }

    /* What the experts give together for x, or for what a product makes narrow of it. */
    void run_chosen(const void *x, int64_t rows, const float *shares, const int64_t *ids) const {
        void *found = space.query_or_mixed;
        const bool is_narrow = weights.narrow_input != nullptr;
        const int64_t width = is_narrow ? weights.narrow_input->out : call.hidden;
        if (is_narrow) {
            linear(x, call.hidden, rows, weights.narrow_input, nullptr, space.joined_or_wide, width, call.kind);
            x = space.joined_or_wide;
            found = static_cast<char *>(space.joined_or_wide) + rows * width * sizes.element;
        }
        run_experts(call.kind, *weights.experts, x, rows, width, weights.router->per_token, shares, ids, call.sum, found);
        if (is_narrow) linear(found, width, rows, weights.narrow_result, nullptr, space.query_or_mixed, call.hidden, call.kind);
    }

    /* normed = norm(residual += mixed), or the sum itself without a norm. */
    void add_and_norm(int64_t rows, const void *mixed, void *residual, const Norm &norm, void *normed) const {
        if (norm.weight == nullptr || norm.bias != nullptr) {
            add_rows(call.kind, rows, call.hidden, mixed, residual);
            return norm_rows(call, rows, residual, norm, normed);
        }
        rms_norm(call.norm_kind, rows,
                 {mixed, residual, norm.weight, normed, residual, call.hidden, call.hidden, call.hidden, call.eps, 0});
    }

    /* Norm and scale what attention or MLP gave, in its place, where the layer does. */
    void norm_mixed(int64_t rows, const void *weight, double scale) const {
        norm_in_place(rows, weight, space.query_or_mixed);
        if (scale != 1) scale_rows(call.kind, rows, call.hidden, float(scale), space.query_or_mixed);
    }

    /* The normed input, times `kept`, becomes the stream where the layer adds to that. */
    void keep_normed(int64_t rows, double kept, void *residual) const {
        if (!weights.adds_to_normed) return;
        std::memcpy(residual, space.seen_or_normed, size_t(rows * call.hidden * sizes.element));
        if (kept != 1) scale_rows(call.kind, rows, call.hidden, float(kept), residual);
    }

    /* Reads the normed input: queries, and the step's keys and values in the cache. */
    void write_cache() const {
        const StackPlaces &places = call.places[weights.group];
        const AttentionPlan &plan = *places.plan;
        const Angles angles = weights.turns ? call.angles[weights.turns - 1] : Angles{};
        const int64_t turned_at = weights.latent == nullptr ? 0 : weights.latent->rank, width = multiply_into_heads(plan);
        const int64_t kv_heads = weights.reads ? 0 : plan.kv_heads, head_dim = weights.head_dim;
        if (weights.turns && weights.turns_neighbours) {
            void *first = static_cast<char *>(space.joined_or_wide) + turned_at * sizes.element;
            part_pairs(call.kind, call.tokens, {first, width, plan.heads + kv_heads, head_dim, angles.rotated_dim});
        }
        if (weights.norms_joined != 0) norm_heads_together(plan, width);
        if (call.query_factors != nullptr && weights.latent == nullptr)
            scale_each(call.kind, call.tokens, queries_width(), width, call.query_factors, space.joined_or_wide);
        if (weights.value_norm != nullptr) norm_values(plan, width);
        const bool norms = weights.query_norm != nullptr && weights.norms_joined == 0;
        rotary_kv_write(norms ? int(weights.head_norm_kind) : call.kind, call.tokens,
                        {space.joined_or_wide, norms ? weights.query_norm : nullptr, norms ? weights.key_norm : nullptr, angles.cosine, angles.sine, places.slots,
                         cache.keys, values(), space.query_or_mixed, width, plan.heads, kv_heads, head_dim, angles.rotated_dim, plan.block_size, call.block_stride, call.eps, 0, call.cache_kind,
                         turned_at, weights.norms_turned != 0});
    }

    /* Each head's values, in their place. */
    void norm_values(const AttentionPlan &plan, int64_t width) const {
        char *first = static_cast<char *>(space.joined_or_wide) + (queries_width() + plan.kv_heads * weights.head_dim) * sizes.element;
        for (int64_t head = 0; head < plan.kv_heads; ++head) {
            char *values = first + head * weights.head_dim * sizes.element;
            NormCall norm{values, nullptr, weights.value_norm, values, nullptr, weights.head_dim, width, 0, call.eps, 0};
            norm.normed_stride = width;
            rms_norm(int(weights.head_norm_kind), call.tokens, norm);
        }
    }

    /* Queries and keys, before they turn. Ranks that share a key head count it once each. */
    void norm_heads_together(const AttentionPlan &plan, int64_t width) const {
        std::vector<float> squares(size_t(2 * call.tokens));
        const int64_t ranks = weights.norms_joined / queries_width();
        char *keys = static_cast<char *>(space.joined_or_wide) + queries_width() * sizes.element;
        const bool is_wide = weights.head_norm_kind == BFLOAT16_WIDE_NORM;
        const HeadsCall parts[] = {
            {space.joined_or_wide, width, plan.heads, weights.head_dim, squares.data(), 2, weights.norms_joined, weights.query_norm, is_wide,
             call.eps},
            {keys, width, plan.kv_heads, weights.head_dim, squares.data() + 1, 2, plan.kv_heads * weights.head_dim * ranks, weights.key_norm,
             is_wide, call.eps}};
        for (const HeadsCall &part : parts)
            sum_squares(call.kind, call.tokens, part);
        if (call.sum != nullptr) (*call.sum)(squares.data(), 2 * call.tokens * 4, FLOAT32);
        for (const HeadsCall &part : parts)
            norm_heads(call.kind, call.tokens, part);
    }

    /* Queries, keys and values of the normed input, or queries and rows, not turned yet, and how many numbers a token has of them. */
    int64_t multiply_into_heads(const AttentionPlan &plan) const {
        void *joined = weights.latent == nullptr && !weights.is_by_head ? space.joined_or_wide : space.query_or_mixed;
        multiply(QKV, space.seen_or_normed, call.tokens, weights.qkv, weights.qkv_bias, joined);
        if (weights.is_gated) part_gates(joined_rows(plan), weights.is_gated, space.beside);
        if (weights.is_by_head) part_heads(joined_rows(plan), space.query_or_mixed);
        if (weights.latent == nullptr) return weights.qkv->out;
        if (weights.latent->gates != nullptr)
            linear(space.seen_or_normed, call.hidden, call.tokens, weights.latent->gates, nullptr, latent_gates(), weights.latent->gates->out,
                   call.kind);
        place_latent(call.kind, *weights.latent,
                     {joined, weights.qkv->out, call.tokens, space.seen_or_normed, space.beside, space.joined_or_wide, call.query_factors});
        return queries_width() + weights.head_dim;
    }

    /* Behind the queries that are made of others. */
    void *latent_gates() const { return static_cast<char *>(space.beside) + call.tokens * weights.latent->query_width() * sizes.element; }

    void *values() const { return weights.latent == nullptr ? cache.values : cache.keys; }

    JoinedRows joined_rows(const AttentionPlan &plan) const {
        return {static_cast<char *>(space.joined_or_wide), call.tokens,           weights.qkv->out * sizes.element, plan.heads, plan.kv_heads,
                weights.head_dim * sizes.element, sizes.element};
    }

    /* Reads the normed input, and leaves what the states give in its place. */
    void go_on() const {
        const Recurring &own = *weights.recurring;
        multiply(QKV, space.seen_or_normed, call.tokens, weights.qkv, weights.qkv_bias, space.joined_or_wide);
        if (own.beside != nullptr && own.rule != SELECTIVE)
            linear(space.seen_or_normed, call.hidden, call.tokens, own.beside, nullptr, space.beside, own.beside->out, call.kind);
        const RecurringCall between{call.kind, own, call.tokens, space.joined_or_wide, weights.qkv->out, space.beside, space.query_or_mixed,
                                    space.seen_or_normed, cache.keys, cache.values, call.states};
        if (own.scales != nullptr) scale_inner(between, space.joined_or_wide);
        if (own.rule != LIGHTNING) run_convolution(between);
        if (own.rule == SELECTIVE) sum_ranks(space.query_or_mixed, own.mixed(), call.tokens, own.beside, space.beside);
        run_heads(between);
        if (own.rule == LIGHTNING) norm_states(own);
    }

    /* Leaves what the layer beside gives where a shared MLP's would be, and the normed input as it was. */
    void go_on_beside() const {
        const size_t bytes = size_t(call.tokens * call.hidden * sizes.element);
        const Layer other{call, sizes, space, *weights.beside, call.caches[call.layer_count + (&weights - call.layers)], nullptr};
        std::memcpy(space.shared, space.seen_or_normed, bytes);
        other.go_on();
        other.mix(OUTPUT, space.seen_or_normed, call.tokens, other.weights.output, other.weights.output_bias, space.query_or_mixed);
        other.norm_mixed(call.tokens, nullptr, other.weights.mixed_scale);
        std::memcpy(space.seen_or_normed, space.shared, bytes);
        std::memcpy(space.shared, space.query_or_mixed, bytes);
    }

    void scale_input(double factor) const {
        if (factor != 1) scale_rows(call.kind, call.tokens, call.hidden, float(factor), space.seen_or_normed);
    }

    /* What all heads of all ranks give, normed together, then gated. */
    void norm_states(const Recurring &own) const {
        std::vector<float> squares(size_t(call.tokens));
        const int64_t width = own.values(), inner = weights.qkv->out;
        const HeadsCall heads{space.seen_or_normed, width, own.value_heads, own.value_dim, squares.data(), 1, own.all_values, own.norm, false,
                              float(own.eps)};
        sum_squares(call.kind, call.tokens, heads);
        if (call.sum != nullptr) (*call.sum)(squares.data(), call.tokens * 4, FLOAT32);
        norm_heads(call.kind, call.tokens, heads);
        gate_by(call.tokens, static_cast<char *>(space.joined_or_wide) + (inner - width) * sizes.element, inner, width);
    }

    /* What heads give, times the sigmoid of gates, `stride` apart. */
    void gate_by(int64_t rows, const void *gates, int64_t stride, int64_t width) const {
        GateCall gating{gates, space.seen_or_normed, width, stride, NO_GATE};
        gating.others = space.seen_or_normed;
        gating.others_stride = width;
        gate_and_mul(call.kind, rows, gating);
    }

    /* Leaves what these queries see in the place of the normed input. */
    void attend(const AttentionPlan &plan, const void *query, const void *gates, int64_t rows) const {
        AttentionCall attention{};
        attention.query = query;
        attention.key_cache = cache.keys;
        attention.value_cache = values();
        attention.result = space.seen_or_normed;
        attention.head_dim = weights.head_dim;
        attention.block_stride = call.block_stride;
        attention.window = weights.window;
        attention.scale = call.scale;
        attention.cap = call.cap;
        attention.sinks = weights.sinks;
        attention.cache_kind = call.cache_kind;
        run_attention(call.kind, plan, attention);
        if (weights.is_gated) gate_by(rows, gates, queries_width(), queries_width());
    }

    /* The layer's tokens, up to what its second product takes. */
    void mix_tokens() const {
        if (weights.qkv == nullptr) return;
        if (weights.recurring != nullptr) return go_on();
        if (weights.beside != nullptr) go_on_beside();
        scale_input(weights.mixed_from);
        write_cache();
        attend(*call.places[weights.group].plan, space.query_or_mixed, space.beside, call.tokens);
    }

    /* The stream, with what the layer's own inputs give by a narrow gate, scaled. `tokens`: of the rows, null for all. */
    void add_own(int64_t rows, const int64_t *tokens, void *residual) const {
        if (weights.own_gate != nullptr) {
            const int64_t width = weights.own_gate->out;
            void *gates = space.joined_or_wide;
            linear(residual, call.hidden, rows, weights.own_gate, nullptr, gates, width, call.kind);
            activate(call.kind, rows, {gates, gates, width, width, GELU_TANH}, nullptr, nullptr);
            multiply_rows(call.kind, rows, width, static_cast<const char *>(call.own) + weights.own_at * sizes.element, call.own_width,
                          tokens, gates);
            linear(gates, width, rows, weights.own_product, nullptr, space.query_or_mixed, call.hidden, call.kind);
            norm_in_place(rows, weights.own_norm, space.query_or_mixed);
            add_rows(call.kind, rows, call.hidden, space.query_or_mixed, residual);
        }
        if (weights.stream_scale != nullptr) scale_by(call.kind, rows, call.hidden, weights.stream_scale, residual);
    }

    /* What the heads saw, or what is in their place, goes to the stream. normed = its norm: the MLP's where none is given. */
    void add_mixed(const void *seen, const void *gates, int64_t rows, void *residual, const Norm *given, void *normed) const {
        if (weights.latent != nullptr) latent_values(call.kind, *weights.latent, seen, rows, gates, space.joined_or_wide);
        mix(OUTPUT, weights.latent == nullptr ? seen : space.joined_or_wide, rows, weights.output, weights.output_bias, space.query_or_mixed);
        norm_mixed(rows, weights.after_attention_norm, weights.mixed_scale);
        if (weights.beside != nullptr) add_rows(call.kind, rows, call.hidden, space.shared, space.query_or_mixed);
        const Norm norm = given == nullptr ? Norm{weights.mlp_norm, weights.mlp_norm_bias} : *given;
        if (!weights.is_parallel) return add_and_norm(rows, space.query_or_mixed, residual, norm, normed);
        norm_rows(call, rows, residual, norm, normed);
        add_rows(call.kind, rows, call.hidden, space.query_or_mixed, residual);
    }

    /* From what was seen, and the gates of latent attention, to the next layer's normed input. `tokens`: of the rows, null for all. */
    void finish(const void *seen, const void *gates, int64_t rows, const int64_t *tokens, void *residual, const Norm &next_norm,
                void *next) const {
        const bool widens = weights.gate_up != nullptr || weights.experts != nullptr;
        if (weights.qkv != nullptr) add_mixed(seen, gates, rows, residual, widens ? nullptr : &next_norm, widens ? space.seen_or_normed : next);
        if (!widens) return;
        keep_normed(rows, weights.kept_widened, residual);
        if (weights.widened_from != 1) scale_rows(call.kind, rows, call.hidden, float(weights.widened_from), space.seen_or_normed);
        if (weights.experts == nullptr)
            widen(rows, space.query_or_mixed);
        else
            choose_experts(rows, residual);
        norm_mixed(rows, weights.after_mlp_norm, weights.widened_scale);
        if (weights.own_gate == nullptr && weights.stream_scale == nullptr)
            return add_and_norm(rows, space.query_or_mixed, residual, next_norm, next);
        add_rows(call.kind, rows, call.hidden, space.query_or_mixed, residual);
        add_own(rows, tokens, residual);
        norm_rows(call, rows, residual, next_norm, next);
    }

    /* The last layer: the sampled rows alone, once keys, values and states are written. */
    void finish_sampled() const {
        if (weights.qkv == nullptr) return finish_alone();
        weights.recurring != nullptr ? go_on() : write_cache();
        if (call.samples == 0) return;
        const AttentionPlan &plan = *call.places[weights.group].plan;
        const void *seen = space.seen_or_normed;
        pick(call.residual, call.hidden, space.picked_residual);
        if (weights.recurring != nullptr) {
            pick(seen, weights.recurring->values(), space.picked_query);
            seen = space.picked_query;
        } else {
            pick(space.query_or_mixed, queries_width(), space.picked_query);
            if (weights.is_gated) pick(space.beside, queries_width(), space.picked_gates);
            if (weights.latent != nullptr && weights.latent->gates != nullptr)
                pick(latent_gates(), weights.latent->gates->out, space.picked_gates);
            attend(*plan_of_some(plan, call.sample_at, call.samples), space.picked_query, space.picked_gates, call.samples);
        }
        finish(seen, space.picked_gates, call.samples, call.sample_at, space.picked_residual, norm_before(call, call.layer_count), call.result);
    }

    /* The same of a layer that mixes nothing. */
    void finish_alone() const {
        if (call.samples == 0) return;
        pick(call.residual, call.hidden, space.picked_residual);
        pick(space.seen_or_normed, call.hidden, space.picked_query);
        std::memcpy(space.seen_or_normed, space.picked_query, size_t(call.samples * call.hidden * sizes.element));
        finish(nullptr, nullptr, call.samples, call.sample_at, space.picked_residual, norm_before(call, call.layer_count), call.result);
    }

    void pick(const void *rows, int64_t width, void *picked) const {
        gather_rows(rows, width * sizes.element, call.tokens, call.sample_at, call.samples, 0, picked);
    }
};

bool keeps_output(const StackCall &call) {
    return std::find(call.aux.layers, call.aux.layers + call.aux.count, call.layer_count) != call.aux.layers + call.aux.count;
}

/* Keep the residual stream as the input of this layer, where it is asked for. */
void keep_input(const StackCall &call, int64_t layer, int64_t element) {
    const int64_t row_bytes = call.hidden * element;
    for (int64_t place = 0; place < call.aux.count; ++place)
        for (int64_t row = 0; call.aux.layers[place] == layer && row < call.tokens; ++row)
            std::memcpy(static_cast<char *>(call.aux.states) + (row * call.aux.count + place) * row_bytes,
                        static_cast<const char *>(call.residual) + row * row_bytes, size_t(row_bytes));
}

}  // namespace

void run_stack(const StackCall &call) {
    if (call.tokens == 0) return;
    const Sizes sizes = sizes_of(call);
    const Space space = take_space(call, sizes);
    const bool is_whole = call.part_starts != nullptr || keeps_output(call) || call.samples >= call.tokens ||
                          call.layers[call.layer_count - 1].beside != nullptr;
    norm_rows(call, call.tokens, call.residual, norm_before(call, 0), space.seen_or_normed);
    for (int64_t i = 0; i < call.layer_count; ++i) {
        const int64_t *starts = call.part_starts == nullptr ? nullptr : call.part_starts + PRODUCT_COUNT * i;
        const Layer layer{call, sizes, space, call.layers[i], call.caches[i], starts};
        const bool is_last = i + 1 == call.layer_count;
        const Traced traced(OP_LAYER, call.tokens, i);
        keep_input(call, i, sizes.element);
        layer.keep_normed(call.tokens, layer.weights.kept_mixed, call.residual);
        if (is_last && !is_whole) {
            layer.finish_sampled();
            continue;
        }
        layer.mix_tokens();
        layer.finish(space.seen_or_normed, layer.weights.latent ? layer.latent_gates() : nullptr, call.tokens, nullptr, call.residual, norm_before(call, i + 1), space.seen_or_normed);
    }
    keep_input(call, call.layer_count, sizes.element);
    if (is_whole)
        gather_rows(space.seen_or_normed, call.hidden * sizes.element, call.tokens, call.sample_at, call.samples, 0,
                    call.result);
}

}  // namespace vnx
