#include "step/experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "linear/layout.h"
#include "linear/linear.h"
#include "rows/rows.h"
#include "team.h"
#include "traced.h"

namespace vnx {
namespace {

constexpr int64_t BLOCK = 256; /* numbers of a row that are summed together */
constexpr float NEVER = -std::numeric_limits<float>::infinity();

/* In float64, rounded once: no instruction set shows. */
void mark(const Router &router, const float *scores, float *marks, double *wide) {
    const int64_t count = router.count;
    if (router.sigmoid) {
        for (int64_t i = 0; i < count; ++i)
            marks[i] = float(1 / (1 + std::exp(-double(scores[i]))));
        return;
    }
    const double peak = *std::max_element(scores, scores + count);
    double total = 0;
    for (int64_t i = 0; i < count; ++i)
        total += wide[i] = std::exp(scores[i] - peak);
    for (int64_t i = 0; i < count; ++i)
        marks[i] = float(wide[i] / total);
}

/* The largest of `values`, which is taken out of them. Of equals the first; a NaN is never larger. */
int64_t take_largest(float *values, bool *taken, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; ++i)
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    taken[best] = true;
    return best;
}

struct Choice {
    std::vector<float> marks, values, groups;
    std::vector<double> wide;
    std::vector<char> taken;

    explicit Choice(const Router &router)
        : marks(size_t(router.count)), values(size_t(router.count)), groups(size_t(router.groups)), wide(size_t(router.count)),
          taken(size_t(std::max(router.count, router.groups))) {}

    bool *free_all() {
        std::fill(taken.begin(), taken.end(), 0);
        return reinterpret_cast<bool *>(taken.data());
    }

    /* Experts out of the best groups are never chosen. */
    void keep_groups(const Router &router) {
        const int64_t size = router.count / router.groups;
        bool *gone = free_all();
        for (int64_t group = 0; group < router.groups; ++group) {
            float *own = values.data() + group * size, total = 0;
            for (int64_t i = 0; i < router.group_best; ++i)
                total += own[take_largest(own, gone + group * size, size)];
            groups[size_t(group)] = total;
        }
        gone = free_all();
        for (int64_t i = 0; i < router.kept_groups; ++i)
            take_largest(groups.data(), gone, router.groups);
        for (int64_t i = 0; i < router.count; ++i)
            if (!gone[i / size]) values[size_t(i)] = NEVER;
    }

    void choose(const Router &router, const float *scores, float *shares, int64_t *ids) {
        mark(router, scores, marks.data(), wide.data());
        for (int64_t i = 0; i < router.count; ++i)
            values[size_t(i)] = router.bias == nullptr ? marks[size_t(i)] : marks[size_t(i)] + router.bias[i];
        if (router.groups > router.kept_groups) keep_groups(router);
        bool *gone = free_all();
        float total = 0;
        for (int64_t i = 0; i < router.per_token; ++i) {
            ids[i] = take_largest(values.data(), gone, router.count);
            shares[i] = marks[size_t(ids[i])];
            total = i == 0 ? shares[i] : total + shares[i];
        }
        for (int64_t i = 0; i < router.per_token; ++i) {
            if (router.normalise) shares[i] /= total;
            if (router.scale != 1) shares[i] *= float(router.scale);
        }
    }
};

/* Which rows of [rows * k] an expert has: those of `order` from starts[expert] on. */
struct Sorted {
    std::vector<int64_t> starts, order, tokens;

    Sorted(const Experts &experts, const int64_t *ids, int64_t count, int64_t k) : starts(size_t(experts.held + 1)) {
        const auto held = [&](int64_t i) { return ids[i] >= experts.first && ids[i] < experts.first + experts.held; };
        for (int64_t i = 0; i < count; ++i)
            if (held(i)) ++starts[size_t(ids[i] - experts.first + 1)];
        for (size_t i = 1; i < starts.size(); ++i)
            starts[i] += starts[i - 1];
        order.resize(size_t(starts.back()));
        tokens.resize(order.size());
        std::vector<int64_t> at(starts.begin(), starts.end() - 1);
        for (int64_t i = 0; i < count; ++i) {
            if (!held(i)) continue;
            const size_t place = size_t(at[size_t(ids[i] - experts.first)]++);
            order[place] = i;
            tokens[place] = i / k;
        }
    }
};

float widened(float x) { return x; }
float widened(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}
void store(float x, float *to) { *to = x; }
void store(float x, uint16_t *to) { *to = to_bf16(x); }

const void *bias_of(const void *const *biases, int64_t expert) { return biases == nullptr ? nullptr : biases[expert]; }

/* What the held experts give, sorted by expert: of `kind`, or FLOAT32 where ranks add theirs. */
struct Products {
    int64_t hidden, k, count;
    Sorted sorted;
    char *rows_at;
    float *placed_at = nullptr;
    std::vector<int64_t> places; /* of each of [rows * k], the row of it, or that of zeros behind all */

    Products(int kind, const Experts &experts, const void *x, int64_t rows, int64_t width, int64_t per_token, const int64_t *ids,
             bool is_wide)
        : hidden(width), k(per_token), count(rows * k), sorted(experts, ids, count, k) {
        const int64_t element = kind == FLOAT32 ? 4 : 2, made = is_wide ? 4 : element, inner = experts.down[0]->in;
        const int64_t own = int64_t(sorted.order.size()), wide = experts.activation == NO_GATE ? 0 : experts.gate_up[0]->out;
        const auto padded = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
        const int64_t picked_bytes = padded(own * hidden * element), inner_bytes = padded(own * inner * element);
        const int64_t made_bytes = padded((own + 1) * hidden * made), wide_bytes = padded(own * wide * element);
        const int64_t placed_bytes = is_wide ? count * hidden * 4 : 0;
        char *picked = static_cast<char *>(
            scratch(SLOT_EXPERTS, size_t(picked_bytes + inner_bytes + made_bytes + wide_bytes + placed_bytes)));
        char *between = picked + picked_bytes;
        rows_at = between + inner_bytes;
        char *apart = rows_at + made_bytes;
        if (is_wide) placed_at = reinterpret_cast<float *>(apart + wide_bytes);
        gather_rows(x, hidden * element, rows, sorted.tokens.data(), own, 0, picked);
        for (int64_t i = 0; i < experts.held; ++i) {
            const int64_t start = sorted.starts[size_t(i)], size = sorted.starts[size_t(i + 1)] - start;
            if (wide == 0)
                linear(picked + start * hidden * element, hidden, size, experts.gate_up[i], nullptr,
                       between + start * inner * element, inner, kind);
            else
                linear(picked + start * hidden * element, hidden, size, experts.gate_up[i], bias_of(experts.gate_up_biases, experts.first + i),
                       apart + start * wide * element, wide, kind);
        }
        if (wide == inner)
            activate(kind, own, {apart, between, inner, wide, int(experts.activation)}, nullptr, nullptr);
        else if (wide != 0)
            gate_and_mul(kind, own, {apart, between, inner, wide, int(experts.activation)});
        for (int64_t i = 0; i < experts.held; ++i) {
            const int64_t start = sorted.starts[size_t(i)], size = sorted.starts[size_t(i + 1)] - start;
            const void *bias = is_wide ? nullptr : bias_of(experts.down_biases, experts.first + i);
            linear(between + start * inner * element, inner, size, experts.down[i], bias, rows_at + start * hidden * made, hidden,
                   is_wide ? FLOAT32 : kind);
        }
        if (own < count) std::memset(rows_at + own * hidden * made, 0, size_t(hidden * made)); /* of experts that are not held */
        places.assign(size_t(count), own);
        for (int64_t i = 0; i < own; ++i)
            places[size_t(sorted.order[size_t(i)])] = i;
    }

    /* Those of float32 in the order of tokens, zeros where an expert is not held; from now on these are the rows. */
    float *placed() const {
        const int64_t own = int64_t(sorted.order.size());
        if (own < count) std::memset(placed_at, 0, size_t(count * hidden) * 4);
        for_units(own, own < 8, [&](int64_t i, int64_t) {
            std::memcpy(placed_at + sorted.order[size_t(i)] * hidden, reinterpret_cast<const float *>(rows_at) + i * hidden,
                        size_t(hidden) * 4);
        });
        return placed_at;
    }

    template <typename T>
    const T *row(int64_t at) const {
        if (placed_at != nullptr) return reinterpret_cast<const T *>(placed_at) + at * hidden;
        return reinterpret_cast<const T *>(rows_at) + places[size_t(at)] * hidden;
    }
};

/* The sums of shares times products, which are of type `Given` and are rounded to `Kept` first. `late`: biases by expert that are added
   then, or null. */
template <typename Given, typename Kept>
void add_up(const Products &products, int64_t rows, const float *shares, void *result, const void *const *late = nullptr,
            const int64_t *ids = nullptr) {
    for_units(rows, rows < 8, [&](int64_t token, int64_t) {
        Kept *to = static_cast<Kept *>(result) + token * products.hidden;
        const int64_t first = token * products.k;
        float totals[BLOCK];
        for (int64_t start = 0; start < products.hidden; start += BLOCK) {
            const int64_t size = std::min(BLOCK, products.hidden - start);
            for (int64_t i = 0; i < products.k; ++i) {
                const Given *from = products.row<Given>(first + i) + start;
                const Kept *bias = late == nullptr ? nullptr : static_cast<const Kept *>(late[ids[first + i]]) + start;
                for (int64_t j = 0; j < size; ++j) {
                    Kept kept;
                    store(widened(from[j]), &kept);
                    if (bias != nullptr) store(widened(kept) + widened(bias[j]), &kept);
                    const float part = widened(kept) * shares[first + i];
                    totals[j] = i == 0 ? part : totals[j] + part;
                }
            }
            for (int64_t j = 0; j < size; ++j)
                store(totals[j], to + start + j);
        }
    });
}

}  // namespace

void route_rows(const Router &router, const float *scores, int64_t rows, float *shares, int64_t *ids) {
    const Traced traced(OP_ROUTE, rows, router.count);
    const int64_t units = std::max<int64_t>(1, std::min(rows, rows * router.count / 4096));
    for_units(units, units < 2, [&](int64_t unit, int64_t) {
        Choice choice(router);
        for (int64_t row = rows * unit / units; row < rows * (unit + 1) / units; ++row)
            choice.choose(router, scores + row * router.count, shares + row * router.per_token, ids + row * router.per_token);
    });
    for (int64_t i = 0; router.chosen != nullptr && i < rows * router.per_token; ++i)
        ++router.chosen[ids[i]];
}

void run_experts(int kind, const Experts &experts, const void *x, int64_t rows, int64_t hidden, int64_t k, const float *shares,
                 const int64_t *ids, const SumRanks *sum, void *result) {
    if (rows == 0) return;
    const Traced traced(OP_EXPERTS, rows * k, hidden);
    const Products products(kind, experts, x, rows, hidden, k, ids, sum != nullptr);
    if (sum == nullptr && kind == FLOAT32) return add_up<float, float>(products, rows, shares, result);
    if (sum == nullptr) return add_up<uint16_t, uint16_t>(products, rows, shares, result);
    float *placed = products.placed();
    (*sum)(placed, rows * k * hidden * 4, FLOAT32);
    if (kind == FLOAT32) return add_up<float, float>(products, rows, shares, result, experts.down_biases, ids);
    add_up<float, uint16_t>(products, rows, shares, result, experts.down_biases, ids);
}

}  // namespace vnx
