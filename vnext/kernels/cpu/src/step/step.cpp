#include "step/step.h"

#include <algorithm>
#include <vector>

#include "linear/linear.h"
#include "rows/rows.h"
#include "sampling/sampling.h"
#include "team.h"

namespace vnx {
namespace {

int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* What lies between the parts of a step. */
struct Space {
    void *residual, *hidden;
    float *logits, *part; /* of the whole vocabulary, and this rank's where that is not all */
    float *angles[4];     /* cosine, sine, and those of the second kind */
    float *factors;
    char *own, *looked_up; /* of layers' inputs */
    int64_t *known;
    int64_t *query_starts, *context_lengths;
};

/* From one row of logits to the next: a group's last rank may have fewer tokens than its head has rows. */
int64_t logits_width(const StepModel &model) { return model.head_rows * model.rank_count; }

Space take_space(const StepModel &model, const StepArrays &step) {
    const int64_t element = model.kind == FLOAT32 ? 4 : 2;
    const int64_t angles = step.tokens * model.rotated_dim * 2, local = step.tokens * model.local_rotated_dim * 2;
    const int64_t own = model.inputs == nullptr ? 0 : step.tokens * model.inputs->projection->out * element;
    const int64_t samples = step.hidden == nullptr ? step.samples : 0;
    const int64_t sizes[] = {step.tokens * model.hidden * element, samples * model.hidden * element,
                             samples * logits_width(model) * 4, angles, angles, local, local, (step.rows + 1) * 8,
                             step.rows * 8, model.rank_count > 1 ? samples * model.head_rows * 4 : 0,
                             model.query_factors == nullptr ? 0 : step.tokens * 4, own, own, own == 0 ? 0 : step.tokens * 8};
    int64_t total = 0;
    for (const int64_t size : sizes)
        total += padded(size);
    char *at = static_cast<char *>(scratch(SLOT_STEP, size_t(total)));
    void *parts[14];
    for (int i = 0; i < 14; at += padded(sizes[i++]))
        parts[i] = at;
    const auto floats = [&](int part) { return static_cast<float *>(parts[part]); };
    return {parts[0], parts[1], floats(2), floats(9), {floats(3), floats(4), floats(5), floats(6)}, floats(10), static_cast<char *>(parts[11]),
            static_cast<char *>(parts[12]), static_cast<int64_t *>(parts[13]), static_cast<int64_t *>(parts[7]),
            static_cast<int64_t *>(parts[8])};
}

void embed(const StepModel &model, const StepArrays &step, const Ranks *ranks, void *residual) {
    const int64_t row_bytes = model.hidden * (model.kind == FLOAT32 ? 4 : 2);
    if (model.embedding_is_packed)
        packed_rows(step.token_ids, step.tokens, model.embedding_first, model.embedding, residual);
    else
        gather_rows(model.embedding, row_bytes, model.embedding_rows, step.token_ids, step.tokens, model.embedding_first, residual);
    if (ranks != nullptr) ranks->sum(residual, step.tokens * row_bytes, int(model.kind));
    if (model.embedding_scale != 1) scale_rows(int(model.kind), step.tokens, model.hidden, float(model.embedding_scale), residual);
    if (model.places == nullptr) return;
    for (int64_t i = 0; i < step.tokens; ++i)
        if (step.positions[i] < model.place_rows)
            add_rows(int(model.kind), 1, model.hidden, static_cast<const char *>(model.places) + step.positions[i] * row_bytes,
                     static_cast<char *>(residual) + i * row_bytes);
}

/* What the step's tokens, whose embeddings these are, give to layers. */
void take_inputs(const StepModel &model, const StepArrays &step, const Ranks *ranks, const Space &space) {
    const Inputs &inputs = *model.inputs;
    const int kind = int(model.kind);
    const int64_t count = inputs.projection->out, row_bytes = count * (kind == FLOAT32 ? 4 : 2), layers = step.tokens * (count / inputs.width);
    std::transform(step.token_ids, step.token_ids + step.tokens, space.known, [&](int64_t id) { return id < inputs.known ? id : 0; });
    if (inputs.table_is_packed)
        packed_rows(space.known, step.tokens, inputs.first, inputs.table, space.looked_up);
    else
        gather_rows(inputs.table, row_bytes, inputs.table_rows, space.known, step.tokens, inputs.first, space.looked_up);
    if (ranks != nullptr) ranks->sum(space.looked_up, step.tokens * row_bytes, kind);
    scale_rows(kind, step.tokens, count, float(inputs.scale), space.looked_up);
    linear(space.residual, model.hidden, step.tokens, inputs.projection, nullptr, space.own, count, kind);
    scale_rows(kind, step.tokens, count, float(inputs.projection_scale), space.own);
    rms_norm(int(model.norm_kind), layers,
             {space.own, nullptr, inputs.norm, space.own, nullptr, inputs.width, inputs.width, 0, float(model.eps), 0});
    add_rows(kind, step.tokens, count, space.looked_up, space.own);
    scale_rows(kind, step.tokens, count, float(inputs.sum_scale), space.own);
}

/* Those of the step's positions. */
void take_angles(const StepModel &model, const StepArrays &step, const Space &space) {
    const float *const tables[] = {model.cosine, model.sine, model.local_cosine, model.local_sine};
    for (int i = 0; i < 4 && tables[i] != nullptr; ++i)
        gather_rows(tables[i], (i < 2 ? model.rotated_dim : model.local_rotated_dim) * 2, model.angle_rows, step.positions, step.tokens, 0, space.angles[i]);
    if (model.query_factors != nullptr) gather_rows(model.query_factors, 4, model.angle_rows, step.positions, step.tokens, 0, space.factors);
}

using Plans = std::vector<std::unique_ptr<AttentionPlan>>;

/* The places of each group, whose plans `plans` keeps. */
std::vector<StackPlaces> plan(const StepModel &model, const StepArrays &step, const Space &space, Plans &plans) {
    std::copy(step.query_starts, step.query_starts + step.rows + 1, space.query_starts);
    std::copy(step.context_lengths, step.context_lengths + step.rows, space.context_lengths);
    std::vector<StackPlaces> places;
    for (int64_t i = 0; i < model.group_count; ++i) {
        const GroupPlaces group = i == 0 ? GroupPlaces{step.slots, step.block_table, step.table_stride} : step.groups[i - 1];
        plans.push_back(plan_attention(space.query_starts, space.context_lengths, group.block_table, group.table_stride, step.rows,
                                       model.heads, model.kv_heads[i], model.block_size));
        places.push_back({plans.back().get(), group.slots});
    }
    return places;
}

/* As step_logits; `part` has room for this rank's. */
void find_logits(const StepModel &model, const Ranks *ranks, const void *hidden, int64_t rows, float *part, float *logits) {
    float *own = ranks == nullptr ? logits : part;
    linear(hidden, model.hidden, rows, model.head, nullptr, own, model.head_rows, FLOAT32);
    if (model.logits_scale != 1) scale_rows(FLOAT32, rows, model.head_rows, float(model.logits_scale), own);
    if (model.logits_cap > 0) soft_cap(rows, model.head_rows, float(model.logits_cap), own);
    const int64_t row_bytes = model.head_rows * 4;
    if (ranks != nullptr) ranks->join(own, logits, rows * row_bytes, row_bytes);
}

void sample(const StepModel &model, const StepArrays &step, const Space &space) {
    sample_rows({space.logits, logits_width(model), step.samples, model.vocabulary, step.columns, step.sampled});
}

}  // namespace

bool run_step(const StepModel &model, const StepArrays &step, const Ranks *ranks) {
    const int64_t *end = step.positions + step.tokens;
    if (std::any_of(step.positions, end, [&](int64_t at) { return at >= model.angle_rows; }))
        return false;
    const Space space = take_space(model, step);
    Plans plans;
    const std::vector<StackPlaces> places = plan(model, step, space, plans);
    embed(model, step, ranks, space.residual);
    if (model.inputs != nullptr) take_inputs(model, step, ranks, space);
    take_angles(model, step, space);
    const Angles angles[] = {{space.angles[0], space.angles[1], model.rotated_dim},
                             {space.angles[2], space.angles[3], model.local_rotated_dim}};
    run_stack({int(model.kind), int(model.norm_kind), int(model.cache_kind), model.layers, model.caches, model.layer_count,
               model.block_stride, model.last_norm, model.last_norm_bias, places.data(), step.tokens, model.hidden, float(model.eps), float(model.scale), float(model.cap), angles, step.sample_at, step.samples, step.parts,
               step.part_starts, space.residual, step.hidden == nullptr ? space.hidden : step.hidden, {step.aux_layers, step.aux_count, step.aux},
               ranks == nullptr ? nullptr : &ranks->sum, {step.query_starts, step.state_pages, step.state_fresh, step.state_trail, step.rows},
               model.query_factors == nullptr ? nullptr : space.factors, space.own,
               model.inputs == nullptr ? 0 : model.inputs->projection->out});
    if (step.hidden != nullptr) return true;
    find_logits(model, ranks, space.hidden, step.samples, space.part, space.logits);
    if (step.masks == nullptr) sample(model, step, space);
    return true;
}

void sample_step(const StepModel &model, const StepArrays &step) {
    const Space space = take_space(model, step);
    mask_rows({space.logits, logits_width(model), step.samples, model.vocabulary, step.masks});
    sample(model, step, space);
}

void step_logits(const StepModel &model, const Ranks *ranks, const void *hidden, int64_t rows, float *logits) {
    float *part = ranks == nullptr ? nullptr : static_cast<float *>(scratch(SLOT_STEP, size_t(rows * model.head_rows) * 4));
    find_logits(model, ranks, hidden, rows, part, logits);
}

}  // namespace vnx
