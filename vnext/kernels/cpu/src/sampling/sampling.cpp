#include "sampling/sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "sampling/row.h"
#include "traced.h"

namespace vnx {

/* The table of vnext/state/params.py (ROW_DTYPES), in its order; top_k 0, top_p 1, min_p 0 and top_n_sigma 0 are off. */
#define VNX_SAMPLE_COLUMNS(COLUMN) \
    COLUMN(float, temperature)     \
    COLUMN(int64_t, top_k)         \
    COLUMN(float, top_p)           \
    COLUMN(float, min_p)           \
    COLUMN(float, top_n_sigma)     \
    COLUMN(int64_t, seed)          \
    COLUMN(int64_t, position)

struct SampleColumns {
#define VNX_MEMBER(type, name) const type *name;
    VNX_SAMPLE_COLUMNS(VNX_MEMBER)
};
#define VNX_NAME(type, name) "," #type " " #name
const char *const SAMPLE_COLUMNS = VNX_SAMPLE_COLUMNS(VNX_NAME) + 1;

namespace {

constexpr int STEP_BITS = 20;

/* ---- random words: as in vnext/kernels/random_numpy.py ---- */

enum Domain : uint32_t { POSITION = 1, INVERSION = 3 };

struct Words {
    uint32_t first, second;
};

Words threefry(Words key, Words counter) {
    constexpr int ROTATIONS[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
    const uint32_t schedule[3] = {key.first, key.second, key.first ^ key.second ^ 0x1BD11BDAu};
    uint32_t left = counter.first + schedule[0], right = counter.second + schedule[1];
    for (uint32_t group = 0; group < 5; ++group) {
        for (const int turn : ROTATIONS[group % 2]) {
            left += right;
            right = (right << turn | right >> (32 - turn)) ^ left;
        }
        left += schedule[(group + 1) % 3];
        right += schedule[(group + 2) % 3] + group + 1;
    }
    return {left, right};
}

/* floor(u * total / 2^62), u of 62 random bits. */
int64_t draw_target(int64_t seed, int64_t position, int64_t total) {
    const Words root{uint32_t(uint64_t(seed) >> 32), uint32_t(seed)};
    const Words words = threefry(threefry(root, {uint32_t(position), POSITION}), {0, INVERSION});
    const uint64_t uniform = uint64_t(words.first >> 1) << 31 | words.second >> 1;
    return int64_t((unsigned __int128)uniform * uint64_t(total) >> 62);
}

/* ---- one row ---- */

/* The first place at which the running sum passes `target`, which is below the sum of all. */
int64_t walk(const float *weights, int64_t target) {
    int64_t place = 0;
    for (int64_t sum = int64_t(weights[0]); sum <= target; sum += int64_t(weights[place]))
        ++place;
    return place;
}

/* A token from all weights of a row; -1 where they are zero. */
int64_t draw_from_all(const Row &row, const Weights &w, int64_t seed, int64_t position) {
    const int64_t total = sum_of(row, w);
    if (total == 0) return -1;
    int64_t block = 0, target = draw_target(seed, position, total);
    for (; target >= w.sums[block]; ++block)
        target -= w.sums[block];
    return block * WEIGHT_BLOCK + walk(w.weights + block * WEIGHT_BLOCK, target);
}

/* ---- filters: floors on the weight ---- */

/* Tokens in question, by rising id. */
struct Kept {
    float *values;
    int32_t *ids;
    int64_t count;
};

int64_t sum_of(const Kept &kept) {
    int64_t sum = 0;
    for (int64_t i = 0; i < kept.count; ++i)
        sum += int64_t(kept.values[i]);
    return sum;
}

void drop_below(Kept &kept, float floor) {
    int64_t count = 0;
    for (int64_t i = 0; i < kept.count; ++i) {
        kept.values[count] = kept.values[i];
        kept.ids[count] = kept.ids[i];
        count += kept.values[i] >= floor;
    }
    kept.count = count;
}

enum Measure { COUNT, MASS };

int64_t measured(float weight, Measure measure) { return measure == COUNT ? 1 : int64_t(weight); }

/* Place of a weight (1 to 2^40) in the order of weights: its bits from those of 1 on, below 2^29. */
uint32_t key_of(float weight) {
    uint32_t bits;
    std::memcpy(&bits, &weight, 4);
    return bits - 0x3F800000u;
}

constexpr int64_t SORTED_MAX = 64;  // so few are sorted, which is sooner done than counting by digits
constexpr int DIGIT_BITS = 10;

float reach_sorted(float *values, int64_t count, int64_t need, Measure measure) {
    std::sort(values, values + count, [](float a, float b) { return a > b; });
    int64_t place = 0;
    while ((need -= measured(values[place], measure)) > 0)
        ++place;
    return values[place];
}

/* The weight at which the heaviest ones, taken one after the other, reach `need` in count or in mass. Positive weights
   only, which together reach it. Found digit by digit of their bits, from the top: sums of whole numbers are exact in
   any order. `spare` has room for `count`. */
float reach(const float *values, int64_t count, int64_t need, Measure measure, float *spare) {
    need = std::max<int64_t>(need, 1);
    for (int shift = 2 * DIGIT_BITS;; shift -= DIGIT_BITS) {
        if (count <= SORTED_MAX) {
            std::copy(values, values + count, spare);
            return reach_sorted(spare, count, need, measure);
        }
        int64_t sums[1 << DIGIT_BITS] = {};
        const auto digit = [shift](float weight) { return key_of(weight) >> shift & ((1 << DIGIT_BITS) - 1); };
        for (int64_t i = 0; i < count; ++i)
            sums[digit(values[i])] += measured(values[i], measure);
        uint32_t found = (1 << DIGIT_BITS) - 1;
        for (; need > sums[found]; --found)
            need -= sums[found];
        int64_t left = 0;
        for (int64_t i = 0; i < count; ++i) {
            const float value = values[i];
            spare[left] = value;
            left += digit(value) == found;
        }
        if (shift == 0) return spare[0];
        values = spare;
        count = left;
    }
}

struct Filter {
    int64_t top_k;  // 0 off
    float top_p, least;
};

bool is_on(const Filter &filter) { return filter.top_k > 0 || filter.top_p < 1 || filter.least > 0; }

/* Of a row's possible logits in steps of 1 / scale from a finite peak: the sums of weights.deviation, which are exact. */
struct Spread {
    int64_t count = 0, sum = 0, squares = 0;
};

Spread spread_of(const float *logits, int64_t count, double peak, double scale) {
    Spread spread;
    for (int64_t i = 0; i < count; ++i) {
        const bool is_possible = logits[i] > -INFINITY;
        const int64_t steps = is_possible ? int32_t((peak - double(logits[i])) * scale) : 0;
        spread.count += is_possible;
        spread.sum += steps;
        spread.squares += steps * steps;
    }
    return spread;
}

/* The logit that lies as many standard deviations below the peak. */
float sigma_edge(const Row &row, float peak, float top_n_sigma) {
    float lowest = peak;
    for (int64_t i = 0; i < row.vocabulary; ++i)
        lowest = row.logits[i] < lowest && row.logits[i] > -INFINITY ? row.logits[i] : lowest;
    int exponent;
    std::frexp(double(peak) - double(lowest), &exponent);
    const double scale = std::ldexp(1.0, STEP_BITS - exponent);
    std::atomic<int64_t> count{0}, sum{0}, squares{0};
    for_blocks(row, [&](int64_t first, int64_t last) {
        const Spread part = spread_of(row.logits + first * WEIGHT_BLOCK, elements(row, first, last), peak, scale);
        count += part.count;
        sum += part.sum;
        squares += part.squares;
    });
    const double mean = double(sum) / double(count);
    const double variance = double(squares) / double(count) - mean * mean;
    return float(double(peak) - double(top_n_sigma) * (std::sqrt(std::max(variance, 0.0)) / scale));
}

/* The weight of top-n-sigma's edge. */
float sigma_weight(const Row &row, float peak, float scale, float top_n_sigma) {
    if (!(top_n_sigma > 0) || !std::isfinite(peak)) return 0;
    const float edge = sigma_edge(row, peak, top_n_sigma);
    float weights[WEIGHT_BLOCK], heaviest;
    int64_t sum;
    kernels().weigh(&edge, 1, peak, scale, {weights, &heaviest, &sum});
    return heaviest;
}

Filter filter_of(const SampleCall &call, int64_t at, float sigma) {
    const int64_t top_k = call.columns->top_k[at];
    const float least = call.columns->min_p[at] > 0 ? std::trunc(call.columns->min_p[at] * float(int64_t(1) << WEIGHT_BITS)) : 0.0f;
    return {top_k > 0 && top_k < call.vocabulary ? top_k : 0, call.columns->top_p[at], std::max(least, sigma)};
}

int64_t needed_mass(int64_t total, float top_p) {
    return std::min(int64_t(std::ceil(double(top_p) * double(total))), total);
}

/* A weight that no floor of the row lies below, so that lighter tokens need not be looked at. top-k: as many blocks as
   it keeps tokens have a peak of at least that. top-p alone: all tokens of at most an even share of what may go lack
   nothing together. */
float lower_bound(const Row &row, const Weights &w, const Filter &filter, float *spare) {
    const float least = std::max(filter.least, 1.0f);
    if (filter.top_k > 0) {
        if (filter.top_k > row.blocks) return least;
        std::copy(w.peaks, w.peaks + row.blocks, spare);
        std::nth_element(spare, spare + filter.top_k - 1, spare + row.blocks, [](float a, float b) { return a > b; });
        return std::max(least, spare[filter.top_k - 1]);
    }
    if (filter.least > 0 || !(filter.top_p < 1)) return least;
    const int64_t total = sum_of(row, w);
    return std::max(least, float((total - needed_mass(total, filter.top_p)) / row.vocabulary + 1));
}

/* What top-n-sigma and min-p, then top-k, then top-p leave. */
Kept filtered(const Row &row, const Weights &w, const Filter &filter) {
    const size_t room = size_t(row.blocks * WEIGHT_BLOCK + 16);
    Kept kept;
    kept.values = static_cast<float *>(scratch(SLOT_TILES, room * 8));
    kept.ids = reinterpret_cast<int32_t *>(kept.values + room);
    float *spare = static_cast<float *>(scratch(SLOT_PARTIALS, room * 4));
    const float bound = lower_bound(row, w, filter, spare);
    kept.count = kernels().collect(w, row.blocks, bound, kept.values, kept.ids);
    if (filter.top_k > 0 && filter.top_k < kept.count)
        drop_below(kept, reach(kept.values, kept.count, filter.top_k, COUNT, spare));
    if (!(filter.top_p < 1) || kept.count == 0) return kept;
    const bool is_alone = filter.top_k == 0 && !(filter.least > 0);
    const int64_t need = needed_mass(is_alone ? sum_of(row, w) : sum_of(kept), filter.top_p);
    drop_below(kept, reach(kept.values, kept.count, need, MASS, spare));
    return kept;
}

int64_t draw_from(const Kept &kept, int64_t seed, int64_t position) {
    const int64_t total = sum_of(kept);
    return total == 0 ? -1 : kept.ids[walk(kept.values, draw_target(seed, position, total))];
}

void sample_row(const SampleCall &call, int64_t at, bool shared) {
    const Row row = row_of(call.logits + at * call.stride, call.vocabulary, shared);
    Weights w = room_for_weights(row);
    const Likeliest best = find_likeliest(row, w.peaks);
    call.tokens[at] = best.token;
    if (!(call.columns->temperature[at] > 0)) return;
    const float scale = exponent_scale(call.columns->temperature[at]);
    weigh_row(row, best.logit, scale, w);
    const Filter filter = filter_of(call, at, sigma_weight(row, best.logit, scale, call.columns->top_n_sigma[at]));
    const int64_t seed = call.columns->seed[at], position = call.columns->position[at];
    const int64_t drawn = is_on(filter) ? draw_from(filtered(row, w, filter), seed, position)
                                        : draw_from_all(row, w, seed, position);
    if (drawn >= 0) call.tokens[at] = drawn;
}

}  // namespace

void mask_rows(const MaskCall &call) {
    for_units(call.rows, false, [&](int64_t at, int64_t) {
        if (call.words[at] != nullptr)
            kernels().keep_allowed(call.logits + at * call.stride, call.vocabulary, call.words[at]);
    });
}

void sample_rows(const SampleCall &call) {
    const Traced traced(OP_SAMPLE, call.rows, call.vocabulary);
    for_rows(call.rows, [&](int64_t at, bool shared) { sample_row(call, at, shared); });
}

}  // namespace vnx
