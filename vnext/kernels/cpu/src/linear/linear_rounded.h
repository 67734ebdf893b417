/* Weights of floats to numbers of few bits in groups of STEP, sixteen groups at a time: vnext/kernels/formats/rounding.py defines the
   scales that are tried, their errors and the order of each sum. */
#pragma once

#include "isa/lanes_transpose.h"
#include "linear/codes.h"
#include "rows/codes_lanes.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

constexpr int SHARES = 10; /* of the largest number's scale that are tried, each a 32nd less */

#if defined(VNX_AVX512)
inline Lanes root(Lanes x) { return {_mm512_sqrt_ps(x.v)}; }
#elif defined(VNX_AVX2)
inline Lanes root(Lanes x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
#else
inline Lanes root(Lanes x) {
    float numbers[16];
    store(numbers, x);
    for (float &number : numbers)
        number = __builtin_sqrtf(number);
    return load(numbers);
}
#endif

/* The sum over a group: eight sums of each eighth number, and theirs. */
template <typename F>
ALWAYS_INLINE Lanes group_sum(const F &number) {
    Lanes e[8];
    for (int i = 0; i < 8; ++i)
        e[i] = ((number(i) + number(i + 8)) + number(i + 16)) + number(i + 24);
    return ((e[0] + e[1]) + (e[2] + e[3])) + ((e[4] + e[5]) + (e[6] + e[7]));
}

/* Scales as bfloat16 has them, 1 for zero. */
inline Lanes kept_scales(Lanes scales) {
    const Lanes kept = rounded(scales, static_cast<const bf16 *>(nullptr)), size = larger(kept, all(0.0f) - kept);
    return where_less(all(0.0f), size, kept, all(1.0f));
}

/* The whole numbers nearest to x / scale, of those from -half on that `half` is above. */
inline Lanes whole_of(Lanes x, Lanes scale, float half) {
    return nearest(smaller(larger(x / scale, all(-half)), all(half - 1.0f)));
}

/* Sixteen groups, a group a lane. */
struct SixteenGroups {
    alignas(64) float x[STEP][HALF], matters[STEP][HALF];
    float half;

    Lanes at(int i) const { return load(x[i]); }
    template <typename T>
    void fill(const T *const *groups) {
        for (int first = 0; first < STEP; first += HALF) {
#if defined(VNX_AVX512) || defined(VNX_AVX2) || defined(VNX_NEON)
            Lanes part[HALF];
            for (int g = 0; g < HALF; ++g)
                part[g] = load(groups[g] + first);
            transpose(part);
            for (int i = 0; i < HALF; ++i)
                store(x[first + i], part[i]);
#else
            for (int g = 0; g < HALF; ++g) {
                float row[HALF];
                store(row, load(groups[g] + first));
                for (int i = 0; i < HALF; ++i)
                    x[first + i][g] = row[i];
            }
#endif
        }
    }
    /* Of two scales the one with the smaller error, the first of equal ones. */
    void choose(Lanes scales, Lanes *best, Lanes *least) const {
        const Lanes wide = kept_scales(scales);
        const Lanes errors = group_sum([&](int i) {
            const Lanes lost = whole_of(at(i), wide, half) * wide - at(i);
            return load(matters[i]) * (lost * lost);
        });
        *best = where_less(errors, *least, wide, *best);
        *least = where_less(errors, *least, errors, *least);
    }
    Lanes searched(Lanes largest) {
        const Lanes square = group_sum([&](int i) { return at(i) * at(i); }) / all(float(STEP));
        for (int i = 0; i < STEP; ++i)
            store(matters[i], root(at(i) * at(i) + all(2.0f) * square));
        Lanes best = largest, least = all(__builtin_inff());
        for (int share = 0; share < SHARES; ++share)
            choose(largest * all(1.0f - float(share) / 32.0f), &best, &least);
        const Lanes first = best;
        const auto number = [&](int i) { return whole_of(at(i), first, half); };
        const Lanes whole = group_sum([&](int i) { return load(matters[i]) * (number(i) * number(i)); });
        const Lanes product = group_sum([&](int i) { return load(matters[i]) * number(i) * at(i); });
        choose(product / where_less(all(0.0f), whole, whole, all(1.0f)), &best, &least);
        return best;
    }
    /* NaN for a group with a number that is not finite. */
    Lanes scales(int bits) {
        Lanes top = at(0), least = at(0), nothing = at(0) * all(0.0f);
        for (int i = 1; i < STEP; ++i)
            top = larger(at(i), top), least = smaller(at(i), least), nothing = nothing + at(i) * all(0.0f);
        const Lanes below = all(0.0f) - least, largest = larger(top, below) / all(half - 1.0f);
        return kept_scales(bits == 8 ? largest : searched(where_less(below, top, all(0.0f) - largest, largest))) + nothing;
    }
};

/* `count` groups of x [count, STEP] -> codes [count, STEP] and scales in bfloat16. */
template <typename T>
void round_groups_of(const T *x, int64_t count, int bits, uint8_t *codes, bf16 *scales) {
    SixteenGroups sixteen;
    sixteen.half = float(1 << (bits - 1));
    for (int64_t first = 0; first < count; first += HALF) {
        const T *groups[HALF];
        for (int64_t g = 0; g < HALF; ++g)
            groups[g] = x + (first + g < count ? first + g : count - 1) * STEP;
        sixteen.fill(groups);
        float wide[HALF];
        store(wide, sixteen.scales(bits));
        for (int64_t g = 0; g < HALF && first + g < count; ++g) {
            store_part(scales + first + g, all(wide[g]), 1);
            alignas(32) int8_t numbers[STEP];
            for (int i = 0; i < STEP; i += 16)
                store_codes(numbers + i, whole_of(load(groups[g] + i), all(wide[g]), sixteen.half));
            for (int i = 0; i < STEP; ++i)
                codes[(first + g) * STEP + i] = uint8_t(numbers[i] + (1 << (bits - 1)));
        }
    }
}

void round_groups(int kind, const void *x, int64_t count, int bits, uint8_t *codes, bf16 *scales) {
    if (kind == FLOAT32) return round_groups_of(static_cast<const float *>(x), count, bits, codes, scales);
    round_groups_of(static_cast<const bf16 *>(x), count, bits, codes, scales);
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
