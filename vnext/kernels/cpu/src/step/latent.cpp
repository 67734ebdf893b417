#include "step/latent.h"

#include <cstring>

#include "linear/linear.h"
#include "rows/rows.h"
#include "team.h"

namespace vnx {
namespace {

char *at(void *data, int64_t place, int64_t element) { return static_cast<char *>(data) + place * element; }

}  // namespace

void place_latent(int kind, const Latent &latent, const LatentCall &call) {
    const int64_t element = kind == FLOAT32 ? 4 : 2, width = latent.width(), stride = (latent.heads + 1) * width;
    void *inner = const_cast<void *>(call.inner);
    const float eps = float(latent.eps);
    HeadRows queries{inner, call.inner_width, latent.plain + latent.turning};
    if (latent.query != nullptr) {
        const Packed &query = *latent.query;
        rms_norm(kind, call.rows, {inner, nullptr, latent.query_norm, call.normed, nullptr, query.in, call.inner_width, 0, eps, 0});
        linear(call.normed, query.in, call.rows, &query, nullptr, call.queries, query.out, kind);
        queries = {call.queries, query.out, latent.plain + latent.turning};
    }
    if (call.factors != nullptr)
        scale_each(kind, call.rows, latent.heads * queries.head_stride, queries.stride, call.factors, queries.data);
    head_products(kind, queries, call.rows, latent.keys, latent.heads, {call.joined, stride, width});
    const int64_t kept = call.inner_width - width, own = latent.heads * width;
    NormCall norm{at(inner, kept, element), nullptr, latent.norm, at(call.joined, own, element), nullptr, latent.rank,
                  call.inner_width, 0, eps, 0};
    norm.normed_stride = stride;
    rms_norm(kind, call.rows, norm);
    for_units(call.rows, call.rows < 8, [&](int64_t row, int64_t) {
        const size_t bytes = size_t(latent.turning * element);
        char *to = at(call.joined, row * stride + latent.rank, element);
        for (int64_t head = 0; head < latent.heads; ++head, to += width * element)
            std::memcpy(to, at(queries.data, row * queries.stride + head * queries.head_stride + latent.plain, element), bytes);
        std::memcpy(to, at(inner, row * call.inner_width + kept + latent.rank, element), bytes);
    });
}

void latent_values(int kind, const Latent &latent, const void *seen, int64_t rows, const void *gates, void *result) {
    const int64_t width = latent.width(), value = latent.value();
    head_products(kind, {const_cast<void *>(seen), latent.heads * width, width}, rows, latent.values, latent.heads,
                  {result, latent.heads * value, value});
    if (latent.gates == nullptr) return;
    GateCall gating{gates, result, value, 1, NO_GATE};
    gating.others = result;
    gating.others_stride = value;
    gating.is_one = true;
    gate_and_mul(kind, rows * latent.heads, gating);
}

}  // namespace vnx
