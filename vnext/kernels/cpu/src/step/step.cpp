#include "step/step.h"

#include <algorithm>

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
    float *logits, *cosine, *sine;
    int64_t *query_starts, *context_lengths;
};

Space take_space(const StepModel &model, const StepArrays &step) {
    const int64_t element = model.kind == FLOAT32 ? 4 : 2;
    const int64_t sizes[] = {step.tokens * model.hidden * element,  step.samples * model.hidden * element,
                             step.samples * model.vocabulary * 4,   step.tokens * model.rotated_dim * 2,
                             step.tokens * model.rotated_dim * 2,   (step.rows + 1) * 8,
                             step.rows * 8};
    int64_t total = 0;
    for (const int64_t size : sizes)
        total += padded(size);
    char *at = static_cast<char *>(scratch(SLOT_STEP, size_t(total)));
    void *parts[7];
    for (int i = 0; i < 7; at += padded(sizes[i++]))
        parts[i] = at;
    return {parts[0],
            parts[1],
            static_cast<float *>(parts[2]),
            static_cast<float *>(parts[3]),
            static_cast<float *>(parts[4]),
            static_cast<int64_t *>(parts[5]),
            static_cast<int64_t *>(parts[6])};
}

void embed(const StepModel &model, const StepArrays &step, void *residual) {
    if (model.embedding_is_packed) {
        packed_rows(step.token_ids, step.tokens, 0, model.embedding, residual);
        return;
    }
    const int64_t row_bytes = model.hidden * (model.kind == FLOAT32 ? 4 : 2);
    gather_rows(model.embedding, row_bytes, model.embedding_rows, step.token_ids, step.tokens, 0, residual);
}

std::unique_ptr<AttentionPlan> plan(const StepModel &model, const StepArrays &step, const Space &space) {
    std::copy(step.query_starts, step.query_starts + step.rows + 1, space.query_starts);
    std::copy(step.context_lengths, step.context_lengths + step.rows, space.context_lengths);
    return plan_attention(space.query_starts, space.context_lengths, step.block_table, step.table_stride, step.rows,
                          model.heads, model.kv_heads, model.block_size);
}

void sample(const StepModel &model, const StepArrays &step, const Space &space) {
    sample_rows({space.logits, model.vocabulary, step.samples, model.vocabulary, step.columns, step.sampled});
}

}  // namespace

bool run_step(const StepModel &model, const StepArrays &step) {
    const int64_t *end = step.positions + step.tokens;
    if (std::any_of(step.positions, end, [&](int64_t at) { return at >= model.angle_rows; }))
        return false;
    const Space space = take_space(model, step);
    const auto attention = plan(model, step, space);
    embed(model, step, space.residual);
    const int64_t angle_bytes = model.rotated_dim * 2;
    gather_rows(model.cosine, angle_bytes, model.angle_rows, step.positions, step.tokens, 0, space.cosine);
    gather_rows(model.sine, angle_bytes, model.angle_rows, step.positions, step.tokens, 0, space.sine);
    run_stack({int(model.kind), int(model.cache_kind), model.layers, model.caches, model.layer_count, model.block_stride, model.last_norm,
               attention.get(), step.tokens, model.hidden, model.head_dim, model.rotated_dim, float(model.eps),
               float(model.scale), float(model.cap), space.cosine, space.sine, step.slots, step.sample_at, step.samples,
               step.parts, step.part_starts, space.residual, space.hidden,
               {step.aux_layers, step.aux_count, step.aux}});
    linear(space.hidden, model.hidden, step.samples, model.head, nullptr, space.logits, model.vocabulary, FLOAT32);
    if (step.masks == nullptr) sample(model, step, space);
    return true;
}

void sample_step(const StepModel &model, const StepArrays &step) {
    const Space space = take_space(model, step);
    mask_rows({space.logits, model.vocabulary, step.samples, model.vocabulary, step.masks});
    sample(model, step, space);
}

}  // namespace vnx
