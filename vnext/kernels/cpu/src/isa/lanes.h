/* Sixteen floats at a time, the same operations on every instruction set.

   Included once by each level's file with VNX_LEVEL naming its namespace and VNX_AVX512, VNX_AVX2 or VNX_NEON set for its
   instructions. Everything here has internal linkage and no template of the standard library is used: an inline
   function that the linker merged across files could bring one level's instructions into another. */
#pragma once

#include <cstdint>
#include <cstring>

#if defined(VNX_AVX512) || defined(VNX_AVX2)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

/* Lanes of several registers travel through memory when a function that takes them is called. */
#if defined(__GNUC__)
#define ALWAYS_INLINE inline __attribute__((always_inline))
#else
#define ALWAYS_INLINE inline
#endif

typedef uint16_t bf16;

inline float to_float(bf16 x) {
    const uint32_t bits = uint32_t(x) << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

#if defined(VNX_AVX512)

struct Lanes {
    __m512 v;
};
inline Lanes all(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes load(const float *p) { return {_mm512_loadu_ps(p)}; }
inline void store(float *p, Lanes x) { _mm512_storeu_ps(p, x.v); }
inline Lanes load(const bf16 *p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16))};
}
#if defined(VNX_BF16)
inline __m256i narrow(Lanes x) { return (__m256i)_mm512_cvtneps_pbh(x.v); }
#else
inline __m256i narrow(Lanes x) {
    const __m512i bits = _mm512_castps_si512(x.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_set1_epi32(_mm512_srli_epi32(rounded, 16), nan, 0x7fc0));
}
#endif
inline void store(bf16 *p, Lanes x) { _mm256_storeu_si256((__m256i *)p, narrow(x)); }
inline Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes operator/(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Lanes fused(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes larger(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Lanes smaller(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Lanes nearest(Lanes a) { return {_mm512_roundscale_ps(a.v, 8)}; }
/* b where a < limit, else c. */
inline Lanes where_less(Lanes a, Lanes limit, Lanes b, Lanes c) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, limit.v, _CMP_LT_OQ), c.v, b.v)};
}
/* x * 2^n for whole n in [-126, 127]. */
inline Lanes times_power(Lanes x, Lanes n) {
    return {_mm512_mul_ps(x.v, _mm512_castsi512_ps(_mm512_slli_epi32(
                                   _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23)))};
}
/* The even or the odd one of sixteen pairs of bf16. */
inline Lanes load_even(const bf16 *p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))}; }
inline Lanes load_odd(const bf16 *p) {
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000u))))};
}

#elif defined(VNX_AVX2)

/* Copied half by half: GCC keeps an array of structs that are copied whole in memory. */
struct Lanes {
    __m256 a, b;
    Lanes() = default;
    Lanes(__m256 first, __m256 second) : a(first), b(second) {}
    Lanes(const Lanes &x) : a(x.a), b(x.b) {}
    Lanes &operator=(const Lanes &x) {
        a = x.a, b = x.b;
        return *this;
    }
};
inline Lanes all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float *p, Lanes x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline __m256 widen(const bf16 *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
inline Lanes load(const bf16 *p) { return {widen(p), widen(p + 8)}; }
ALWAYS_INLINE __m128i narrow(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i clean = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(clean), _mm256_extracti128_si256(clean, 1));
}
ALWAYS_INLINE void store(bf16 *p, Lanes x) {
    _mm_storeu_si128((__m128i *)p, narrow(x.a));
    _mm_storeu_si128((__m128i *)(p + 8), narrow(x.b));
}
inline Lanes operator+(Lanes x, Lanes y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Lanes operator-(Lanes x, Lanes y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Lanes operator*(Lanes x, Lanes y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Lanes operator/(Lanes x, Lanes y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Lanes fused(Lanes x, Lanes y, Lanes z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Lanes larger(Lanes x, Lanes y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Lanes smaller(Lanes x, Lanes y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Lanes nearest(Lanes x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
inline Lanes where_less(Lanes x, Lanes limit, Lanes y, Lanes z) {
    return {_mm256_blendv_ps(z.a, y.a, _mm256_cmp_ps(x.a, limit.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(z.b, y.b, _mm256_cmp_ps(x.b, limit.b, _CMP_LT_OQ))};
}
inline __m256 power(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline Lanes times_power(Lanes x, Lanes n) { return {_mm256_mul_ps(x.a, power(n.a)), _mm256_mul_ps(x.b, power(n.b))}; }
inline __m256i load_words(const bf16 *p) { return _mm256_loadu_si256((const __m256i *)p); }
inline __m256 upper_halves(__m256i words) {
    return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(int(0xffff0000u))));
}
inline Lanes load_even(const bf16 *p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(load_words(p), 16)), _mm256_castsi256_ps(_mm256_slli_epi32(load_words(p + 16), 16))};
}
inline Lanes load_odd(const bf16 *p) { return {upper_halves(load_words(p)), upper_halves(load_words(p + 16))}; }

#else

typedef float Floats __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));
typedef int32_t Integers __attribute__((vector_size(16)));
/* Registers of 16 bytes, as SSE2 and NEON have them. The level NEON adds its own fused multiply-add and rounding. */
struct Lanes {
    Floats v[4];
};
template <typename V, typename T>
inline V loaded(const T *p) {
    V result;
    memcpy(&result, p, sizeof result);
    return result;
}
/* GCC 12 converts these vectors one element at a time for Arm. */
#if defined(__aarch64__)
inline Floats widen(const bf16 *p) { return (Floats)vshll_n_u16(vld1_u16(p), 16); }
inline void store_words(bf16 *p, Words x) { vst1_u16(p, vmovn_u32(x)); }
#else
typedef bf16 Halves __attribute__((vector_size(8)));
inline Floats widen(const bf16 *p) { return (Floats)(__builtin_convertvector(loaded<Halves>(p), Words) << 16); }
inline void store_words(bf16 *p, Words x) {
    const Halves result = __builtin_convertvector(x, Halves);
    memcpy(p, &result, sizeof result);
}
#endif
inline void narrow(bf16 *p, Floats x) {
    const Words bits = (Words)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    store_words(p, x == x ? rounded : Words{} + 0x7fc0);
}
/* The four registers one by one: an array with a running index would lie in memory. */
template <typename F>
inline Lanes each(F register_of) {
    return {{register_of(0), register_of(1), register_of(2), register_of(3)}};
}
inline Lanes all(float x) {
    return each([=](int) { return x - Floats{}; });
}
inline Lanes load(const float *p) {
    return each([=](int i) { return loaded<Floats>(p + 4 * i); });
}
inline Lanes load(const bf16 *p) {
    return each([=](int i) { return widen(p + 4 * i); });
}
inline void store(float *p, Lanes x) { memcpy(p, x.v, 64); }
inline void store(bf16 *p, Lanes x) { narrow(p, x.v[0]), narrow(p + 4, x.v[1]), narrow(p + 8, x.v[2]), narrow(p + 12, x.v[3]); }
inline Lanes operator+(Lanes a, Lanes b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline Lanes operator-(Lanes a, Lanes b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline Lanes operator*(Lanes a, Lanes b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline Lanes operator/(Lanes a, Lanes b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
}
#if defined(VNX_NEON)
inline Lanes fused(Lanes a, Lanes b, Lanes c) {
    return each([&](int i) { return (Floats)vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
inline Lanes nearest(Lanes a) {
    return each([&](int i) { return (Floats)vrndnq_f32(a.v[i]); });
}
#else
inline Lanes fused(Lanes a, Lanes b, Lanes c) { return a * b + c; }
/* Adding and taking off 1.5 * 2^23 rounds to the nearest whole number: |x| below 2^22. */
inline Lanes nearest(Lanes a) { return a + all(12582912.0f) - all(12582912.0f); }
#endif
inline Lanes larger(Lanes a, Lanes b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Lanes smaller(Lanes a, Lanes b) {
    return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline Lanes where_less(Lanes a, Lanes limit, Lanes b, Lanes c) {
    return each([&](int i) { return a.v[i] < limit.v[i] ? b.v[i] : c.v[i]; });
}
inline Lanes times_power(Lanes x, Lanes n) {
    return each([&](int i) { return x.v[i] * (Floats)((__builtin_convertvector(n.v[i], Integers) + 127) << 23); });
}
inline Lanes load_even(const bf16 *p) {
    return each([=](int i) { return (Floats)(loaded<Words>(p + 8 * i) << 16); });
}
inline Lanes load_odd(const bf16 *p) {
    return each([=](int i) { return (Floats)(loaded<Words>(p + 8 * i) & 0xffff0000u); });
}

#endif

/* The largest of sixteen numbers, of which none is NaN. */
#if defined(VNX_AVX2)
inline float largest_of(Lanes x) {
    const __m256 eight = _mm256_max_ps(x.a, x.b);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
inline float largest_of(Lanes x) {
    float numbers[16];
    store(numbers, x);
    float top = numbers[0];
    for (int i = 1; i < 16; ++i)
        top = numbers[i] > top ? numbers[i] : top;
    return top;
}
#endif

/* The first n of sixteen, zeros behind them. */
template <typename T>
ALWAYS_INLINE Lanes load_part(const T *p, int64_t n) {
    if (n >= 16) return load(p);
    T part[16] = {};
    memcpy(part, p, size_t(n) * sizeof(T));
    return load(part);
}
template <typename T>
ALWAYS_INLINE void store_part(T *p, Lanes x, int64_t n) {
    if (n >= 16) return store(p, x);
    T part[16];
    store(part, x);
    memcpy(p, part, size_t(n) * sizeof(T));
}

/* Rounded to T and back. */
ALWAYS_INLINE Lanes rounded(Lanes x, const float *) { return x; }
ALWAYS_INLINE Lanes rounded(Lanes x, const bf16 *) {
    bf16 part[16];
    store(part, x);
    return load(part);
}

/* Sum of all sixteen by halves: 8 + 8, 4 + 4, 2 + 2, 1 + 1. The same on every level. */
ALWAYS_INLINE float sum(Lanes x) {
    float v[16];
    store(v, x);
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i)
            v[i] += v[i + half];
    return v[0];
}

/* 2^x for x below 127, exactly 0 below -126; relative error about 1e-7. Taylor's series of degree 6 on [-1/2, 1/2]. */
ALWAYS_INLINE Lanes exp2_lanes(Lanes x) {
    const Lanes low = all(-126.0f), inside = larger(x, low);
    const Lanes whole = nearest(inside), part = inside - whole;
    Lanes p = all(1.5403530e-4f);
    p = fused(p, part, all(1.3333558e-3f));
    p = fused(p, part, all(9.6181291e-3f));
    p = fused(p, part, all(5.5504109e-2f));
    p = fused(p, part, all(2.4022651e-1f));
    p = fused(p, part, all(6.9314718e-1f));
    p = fused(p, part, all(1.0f));
    return where_less(x, low, all(0.0f), times_power(p, whole));
}

/* e^x, 0 below -87 and infinity above 88; relative error about 1e-7. The reduction by ln 2 in two parts keeps it so. */
ALWAYS_INLINE Lanes exp_lanes(Lanes x) {
    const Lanes low = all(-87.0f), high = all(88.0f), inside = larger(smaller(x, high), low);
    const Lanes whole = nearest(inside * all(1.44269504f));
    Lanes part = fused(whole, all(-0.693359375f), inside);
    part = fused(whole, all(2.12194440e-4f), part);
    Lanes p = all(1.3888889e-3f);
    p = fused(p, part, all(8.3333333e-3f));
    p = fused(p, part, all(4.1666667e-2f));
    p = fused(p, part, all(1.6666667e-1f));
    p = fused(p, part, all(0.5f));
    p = fused(p, part, all(1.0f));
    p = fused(p, part, all(1.0f));
    const Lanes bounded = where_less(high, x, all(__builtin_inff()), times_power(p, whole));
    return where_less(x, low, all(0.0f), bounded);
}

ALWAYS_INLINE Lanes tanh_lanes(Lanes x) {
    const Lanes inside = larger(smaller(x, all(20.0f)), all(-20.0f));
    const Lanes e = exp_lanes(inside + inside);
    return (e - all(1.0f)) / (e + all(1.0f));
}

/* x * sigmoid(x), or the tanh form of gelu. */
ALWAYS_INLINE Lanes activate(Lanes x, int gate) {
    if (gate == SILU) return x / (all(1.0f) + exp_lanes(all(0.0f) - x));
    const Lanes inner = all(0.7978845608f) * fused(all(0.044715f) * x * x, x, x);
    return all(0.5f) * x * (all(1.0f) + tanh_lanes(inner));
}

/* What a gate and what it multiplies give. Constants as in vnext/kernels/references.py. */
ALWAYS_INLINE Lanes gated(Lanes x, Lanes up, int gate) {
    if (gate != SWIGLU_CLAMPED && gate != SILU_LIMITED) return activate(x, gate) * up;
    const Lanes limit = all(gate == SILU_LIMITED ? 10.0f : 7.0f);
    const Lanes below = smaller(x, limit), inside = larger(smaller(up, limit), all(0.0f) - limit);
    if (gate == SILU_LIMITED) return activate(below, SILU) * inside;
    return below / (all(1.0f) + exp_lanes(all(-1.702f) * below)) * (inside + all(1.0f));
}

/* The sum of so many shards, `stride` apart: by halves while their number is even, then in order. The ranks' sums are added
   by the same tree (rank_sum.h), so those of a rank's shards may be its lower part. */
inline Lanes joined(const Lanes *sums, int64_t stride, int64_t count) {
    Lanes total = *sums;
    if (count == 1) return total;
    if (count % 2 == 0) return joined(sums, stride, count / 2) + joined(sums + count / 2 * stride, stride, count / 2);
    for (int64_t i = 1; i < count; ++i)
        total = total + sums[i * stride];
    return total;
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
