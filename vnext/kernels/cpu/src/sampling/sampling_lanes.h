/* Sampling on sixteen lanes: the likeliest logit, weights in fixed point, the tokens that reach a bound.

   Weights follow vnext/sampling/weights.py operation by operation: each product and sum is rounded by itself,
   never fused, so that every level and torch on any device give the same bits. */
#pragma once

#include "isa/lanes.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

#if defined(VNX_AVX512)

/* Which lanes are NaN, gathered over many vectors. */
struct Unordered {
    __mmask16 seen = 0;
    void add(Lanes x) { seen |= _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q); }
    bool any() const { return seen != 0; }
};
/* Whole numbers below 2^41, fewer than 2^12 of them: sums below 2^53 are exact in float64, in any order. */
struct Mass {
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    void add(Lanes x) {
        low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(x.v)));
        high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1)));
    }
    int64_t total() const { return int64_t(_mm512_reduce_add_pd(_mm512_add_pd(low, high))); }
};
inline float largest(Lanes x) { return _mm512_reduce_max_ps(x.v); }
inline Lanes kept(Lanes x, uint32_t bits) {
    return {_mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), __mmask16(bits), x.v)};
}
inline Lanes toward_zero(Lanes x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC)}; }
inline int collect_lanes(Lanes x, float bound, int32_t id, float *values, int32_t *ids) {
    const __mmask16 kept = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(bound), _CMP_GE_OQ);
    const __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    _mm512_storeu_ps(values, _mm512_maskz_compress_ps(kept, x.v));
    _mm512_storeu_si512(ids, _mm512_maskz_compress_epi32(kept, _mm512_add_epi32(places, _mm512_set1_epi32(id))));
    return __builtin_popcount(kept);
}

#elif defined(VNX_AVX2)

struct Unordered {
    __m256 seen = _mm256_setzero_ps();
    void add(Lanes x) {
        seen = _mm256_or_ps(seen, _mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q));
        seen = _mm256_or_ps(seen, _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q));
    }
    bool any() const { return _mm256_movemask_ps(seen) != 0; }
};
struct Mass {
    __m256d sums[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
    void add(Lanes x) {
        sums[0] = _mm256_add_pd(sums[0], _mm256_cvtps_pd(_mm256_castps256_ps128(x.a)));
        sums[1] = _mm256_add_pd(sums[1], _mm256_cvtps_pd(_mm256_extractf128_ps(x.a, 1)));
        sums[2] = _mm256_add_pd(sums[2], _mm256_cvtps_pd(_mm256_castps256_ps128(x.b)));
        sums[3] = _mm256_add_pd(sums[3], _mm256_cvtps_pd(_mm256_extractf128_ps(x.b, 1)));
    }
    int64_t total() const {
        double v[4];
        _mm256_storeu_pd(v, _mm256_add_pd(_mm256_add_pd(sums[0], sums[1]), _mm256_add_pd(sums[2], sums[3])));
        return int64_t(v[0] + v[1] + v[2] + v[3]);
    }
};
inline float largest(Lanes x) {
    float v[8], result;
    _mm256_storeu_ps(v, _mm256_max_ps(x.a, x.b));
    result = v[0];
    for (int i = 1; i < 8; ++i)
        result = v[i] > result ? v[i] : result;
    return result;
}
inline __m256 kept_eight(__m256 x, uint32_t bits) {
    const __m256i places = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i found = _mm256_and_si256(_mm256_set1_epi32(int(bits)), places);
    const __m256 is_kept = _mm256_castsi256_ps(_mm256_cmpeq_epi32(found, places));
    return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), x, is_kept);
}
inline Lanes kept(Lanes x, uint32_t bits) { return {kept_eight(x.a, bits), kept_eight(x.b, bits >> 8)}; }
inline Lanes toward_zero(Lanes x) {
    return {_mm256_round_ps(x.a, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC),
            _mm256_round_ps(x.b, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC)};
}
inline int collect_lanes(Lanes x, float bound, int32_t id, float *values, int32_t *ids) {
    const __m256 limit = _mm256_set1_ps(bound);
    unsigned kept = unsigned(_mm256_movemask_ps(_mm256_cmp_ps(x.a, limit, _CMP_GE_OQ))) |
                    unsigned(_mm256_movemask_ps(_mm256_cmp_ps(x.b, limit, _CMP_GE_OQ))) << 8;
    if (kept == 0) return 0;
    float v[16];
    store(v, x);
    int count = 0;
    for (; kept != 0; kept &= kept - 1, ++count) {
        const int lane = __builtin_ctz(kept);
        values[count] = v[lane];
        ids[count] = id + lane;
    }
    return count;
}

#else

struct Numbers {
    float at[16];
    explicit Numbers(Lanes x) { store(at, x); }
};
struct Unordered {
    bool seen = false;
    void add(Lanes x) {
        for (float number : Numbers(x).at)
            seen |= number != number;
    }
    bool any() const { return seen; }
};
struct Mass {
    int64_t sum = 0;
    void add(Lanes x) {
        for (float number : Numbers(x).at)
            sum += int64_t(number);
    }
    int64_t total() const { return sum; }
};
inline float largest(Lanes x) {
    const Numbers numbers(x);
    float result = numbers.at[0];
    for (float number : numbers.at)
        result = number > result ? number : result;
    return result;
}
inline Lanes kept(Lanes x, uint32_t bits) {
    Numbers numbers(x);
    for (int i = 0; i < 16; ++i)
        numbers.at[i] = bits >> i & 1 ? numbers.at[i] : -__builtin_inff();
    return load(numbers.at);
}
inline Lanes toward_zero(Lanes x) {
    Numbers numbers(x);
    for (float &number : numbers.at)
        number = float(int64_t(number));
    return load(numbers.at);
}
inline int collect_lanes(Lanes x, float bound, int32_t id, float *values, int32_t *ids) {
    const Numbers numbers(x);
    int count = 0;
    for (int i = 0; i < 16; ++i) {
        values[count] = numbers.at[i];
        ids[count] = id + i;
        count += numbers.at[i] >= bound;
    }
    return count;
}

#endif

/* The first n of sixteen, behind them logits that no draw takes. */
inline Lanes load_logits(const float *p, int64_t n) {
    if (n >= 16) return load(p);
    float part[16];
    for (int i = 0; i < 16; ++i)
        part[i] = i < n ? p[i] : -__builtin_inff();
    return load(part);
}

/* 2^(x + WEIGHT_BITS) in whole numbers, for x from LEAST_EXPONENT to 0. */
inline Lanes weight_lanes(Lanes x) {
    const Lanes whole = nearest(x), part = x - whole;
    Lanes power = all(EXP2_SERIES[0]);
    for (int i = 1; i < EXP2_TERMS; ++i)
        power = power * part + all(EXP2_SERIES[i]);
    return toward_zero(times_power(power, whole + all(float(WEIGHT_BITS))));
}

void keep_allowed(float *logits, int64_t count, const uint32_t *words) {
    const int64_t whole = count / 32 * 32;
    for (int64_t i = 0; i < whole; i += 32) {
        const uint32_t word = words[i / 32];
        if (word == ~uint32_t(0)) continue;
        store(logits + i, kept(load(logits + i), word & 0xffff));
        store(logits + i + 16, kept(load(logits + i + 16), word >> 16));
    }
    for (int64_t i = whole; i < count; ++i)
        if (!(words[i / 32] >> i % 32 & 1)) logits[i] = -__builtin_inff();
}

bool find_peaks(const float *logits, int64_t count, float *peaks) {
    Unordered nan;
    for (int64_t first = 0; first < count; first += WEIGHT_BLOCK) {
        Lanes peak = all(-__builtin_inff());
        for (int64_t i = first; i < first + WEIGHT_BLOCK && i < count; i += 16) {
            const Lanes x = load_logits(logits + i, count - i);
            nan.add(x);
            peak = larger(x, peak);
        }
        *peaks++ = largest(peak);
    }
    return nan.any();
}

/* `larger` with its second operand last gives LEAST_EXPONENT for NaN: a row without a finite peak weighs nothing. */
void weigh(const float *logits, int64_t count, float peak, float scale, const Weights &to) {
    const Lanes top = all(peak), factor = all(scale), least = all(LEAST_EXPONENT);
    float *weights = to.weights, *peaks = to.peaks;
    int64_t *sums = to.sums;
    for (int64_t first = 0; first < count; first += WEIGHT_BLOCK) {
        Lanes heaviest = all(0.0f);
        Mass mass;
        for (int64_t i = first; i < first + WEIGHT_BLOCK; i += 16, weights += 16) {
            const Lanes x = load_logits(logits + i, count - i);
            const Lanes weight = weight_lanes(larger((x - top) * factor, least));
            store(weights, weight);
            heaviest = larger(weight, heaviest);
            mass.add(weight);
        }
        *peaks++ = largest(heaviest);
        *sums++ = mass.total();
    }
}

int64_t collect(const Weights &from, int64_t blocks, float bound, float *values, int32_t *ids) {
    int64_t count = 0;
    for (int64_t block = 0; block < blocks; ++block) {
        if (from.peaks[block] < bound) continue;
        for (int64_t i = block * WEIGHT_BLOCK; i < (block + 1) * WEIGHT_BLOCK; i += 16)
            count += collect_lanes(load(from.weights + i), bound, int32_t(i), values + count, ids + count);
    }
    return count;
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
