/* Whole numbers by the level's instructions: a quad of codes, four inputs of sixteen outputs, unpacked and multiplied by four int8 of
   a row. Sums are exact, so all levels agree. */
#pragma once

#include "isa/lanes.h"
#include "linear/codes.h"
#include "linear/linear_finish.h"
#include "rows/codes_lanes.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

/* Rows of a block; of up to how many bits the sums of a step stay in words of 16; what an 8-bit code lacks when it is multiplied. */
#if defined(VNX_AVX512)
constexpr int CODE_ROWS = 8;
#else
constexpr int CODE_ROWS = 4;
#endif
#if defined(VNX_AVX2) && !defined(VNX_VNNI)
constexpr int WORD_BITS = 4;
#else
constexpr int WORD_BITS = 0;
#endif
/* Of how many quads a word holds the products, 0 where none are added in words: a quad adds 2 * 127 * 15 with 4 bits, * 31 or * 63. */
constexpr int word_quads(int bits) { return WORD_BITS == 0 || bits == 8 ? 0 : bits <= WORD_BITS ? 8 : bits == 5 ? 4 : 2; }
#if (defined(VNX_AVX2) && !defined(VNX_VNNI)) || defined(VNX_NEON)
constexpr int OFFSET = 128;
#else
constexpr int OFFSET = 0;
#endif

inline int32_t four_codes(const int8_t *x) {
    int32_t word;
    memcpy(&word, x, 4);
    return word;
}

#if defined(VNX_AVX512)

typedef __m512i Quad;
typedef __m512i Dots;
inline Quad load_quad(const char *p) { return _mm512_loadu_si512(p); }
/* Bits moved to the right, or by less than 0 to the left, of which those of the mask are kept. */
inline Quad moved(Quad x, int right, int mask) {
    const Quad there = right > 0 ? _mm512_srli_epi16(x, unsigned(right)) : right < 0 ? _mm512_slli_epi16(x, unsigned(-right)) : x;
    return _mm512_and_si512(there, _mm512_set1_epi8(char(mask)));
}
inline Quad joined(Quad x, Quad y) { return _mm512_or_si512(x, y); }
inline Dots dots_from(int32_t start) { return _mm512_set1_epi32(start); }
inline Lanes floats_of(Dots x) { return {_mm512_cvtepi32_ps(x)}; }
/* Few rows have few sums, each of which waits for its last addition: two halves of it do not. */
template <int BITS, int R>
inline void add_quads(const Quad *quads, const int8_t *x, Dots *dots) {
    if constexpr (R <= 2) {
        UNROLLED for (int r = 0; r < R; ++r) {
            const auto dot = [&](Dots sum, int i) {
                return _mm512_dpbusd_epi32(sum, quads[i], _mm512_set1_epi32(four_codes(x + r * STEP + 4 * i)));
            };
            dots[r] = _mm512_add_epi32(dot(dot(dots[r], 0), 1), dot(dot(_mm512_setzero_si512(), 2), 3));
        }
        return;
    }
    UNROLLED for (int i = 0; i < 4; ++i)
        UNROLLED for (int r = 0; r < R; ++r)
            dots[r] = _mm512_dpbusd_epi32(dots[r], quads[i], _mm512_set1_epi32(four_codes(x + r * STEP + 4 * i)));
}

#elif defined(VNX_AVX2)

struct Quad {
    __m256i a, b;
};
struct Dots {
    __m256i a, b;
};
inline __m256i load_32(const char *p) { return _mm256_loadu_si256((const __m256i *)p); }
inline Quad load_quad(const char *p) { return {load_32(p), load_32(p + 32)}; }
inline __m256i moved(__m256i x, int right, int mask) {
    const __m256i there = right > 0 ? _mm256_srli_epi16(x, right) : right < 0 ? _mm256_slli_epi16(x, -right) : x;
    return _mm256_and_si256(there, _mm256_set1_epi8(char(mask)));
}
inline Quad moved(Quad x, int right, int mask) { return {moved(x.a, right, mask), moved(x.b, right, mask)}; }
inline Quad joined(Quad x, Quad y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
inline Dots dots_from(int32_t start) { return {_mm256_set1_epi32(start), _mm256_set1_epi32(start)}; }
inline Lanes floats_of(Dots x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }

#if defined(VNX_VNNI)
template <int BITS>
inline __m256i dots_of(__m256i sum, const __m256i *w, const __m256i *q) {
    UNROLLED for (int i = 0; i < 4; ++i)
        sum = _mm256_dpbusd_avx_epi32(sum, w[i], q[i]);
    return sum;
}
#else
inline __m256i pairs_added(__m256i words) { return _mm256_madd_epi16(words, _mm256_set1_epi16(1)); }
/* maddubs adds two products in a word, which a code of 8 bits fills: it is multiplied as its distance from 128, its sign given to the
   other number. */
template <int BITS>
inline __m256i dots_of(__m256i sum, const __m256i *w, const __m256i *q) {
    __m256i pairs[4];
    UNROLLED for (int i = 0; i < 4; ++i) {
        const __m256i code = _mm256_xor_si256(w[i], _mm256_set1_epi8(char(0x80)));
        pairs[i] = pairs_added(_mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(q[i], code)));
    }
    return _mm256_add_epi32(_mm256_add_epi32(sum, _mm256_add_epi32(pairs[0], pairs[1])), _mm256_add_epi32(pairs[2], pairs[3]));
}
/* Products of fewer bits stay in words while they fit: a quarter to all of the additions of pairs less, for which a Zen has one unit.
   Added in this order, or GCC holds all products at once, in memory. */
inline void add_words(__m256i &sum, __m256i code, __m256i q) {
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(code, q));
#if defined(__GNUC__)
    asm("" : "+x"(sum));
#endif
}
template <int R>
inline void add_words(Quad quad, const int8_t *x, Dots (&dots)[R]) {
    UNROLLED for (int r = 0; r < R; ++r) {
        const __m256i q = _mm256_set1_epi32(four_codes(x + r * STEP));
        add_words(dots[r].a, quad.a, q);
        add_words(dots[r].b, quad.b, q);
    }
}
inline Dots with_pairs(Dots sum, Dots words) {
    return {_mm256_add_epi32(sum.a, pairs_added(words.a)), _mm256_add_epi32(sum.b, pairs_added(words.b))};
}
inline Lanes floats_of_words(Dots words, int32_t start) { return floats_of(with_pairs(dots_from(start), words)); }
#endif
template <int BITS, int R>
inline void add_quads(const Quad *quads, const int8_t *x, Dots *dots) {
    const __m256i a[4] = {quads[0].a, quads[1].a, quads[2].a, quads[3].a}, b[4] = {quads[0].b, quads[1].b, quads[2].b, quads[3].b};
    UNROLLED for (int r = 0; r < R; ++r) {
        __m256i q[4];
        UNROLLED for (int i = 0; i < 4; ++i)
            q[i] = _mm256_set1_epi32(four_codes(x + r * STEP + 4 * i));
        dots[r].a = dots_of<BITS>(dots[r].a, a, q);
        dots[r].b = dots_of<BITS>(dots[r].b, b, q);
    }
}

#elif defined(VNX_NEON)

struct Quad {
    uint8x16_t v[4];
};
struct Dots {
    int32x4_t v[4];
};
inline Quad load_quad(const char *p) {
    const uint8_t *from = reinterpret_cast<const uint8_t *>(p);
    return {{vld1q_u8(from), vld1q_u8(from + 16), vld1q_u8(from + 32), vld1q_u8(from + 48)}};
}
inline Quad moved(Quad x, int right, int mask) {
    UNROLLED for (int i = 0; i < 4; ++i)
        x.v[i] = vandq_u8(vshlq_u8(x.v[i], vdupq_n_s8(int8_t(-right))), vdupq_n_u8(uint8_t(mask)));
    return x;
}
inline Quad joined(Quad x, Quad y) {
    return {{vorrq_u8(x.v[0], y.v[0]), vorrq_u8(x.v[1], y.v[1]), vorrq_u8(x.v[2], y.v[2]), vorrq_u8(x.v[3], y.v[3])}};
}
inline Dots dots_from(int32_t start) {
    const int32x4_t four = vdupq_n_s32(start);
    return {{four, four, four, four}};
}
inline Lanes floats_of(Dots x) {
    return each([&](int i) { return (Floats)vcvtq_f32_s32(x.v[i]); });
}
/* sum += those of four outputs. Without the instruction for it two products of a word, at most 2 * 128 * 127, are added at once. */
#if defined(__ARM_FEATURE_DOTPROD)
inline int32x4_t dots_of(int32x4_t sum, const int8x16_t *w, const int8x16_t *q) {
    UNROLLED for (int i = 0; i < 4; ++i)
        sum = vdotq_s32(sum, w[i], q[i]);
    return sum;
}
#else
inline int32x4_t dots_of(int32x4_t sum, const int8x16_t *w, const int8x16_t *q) {
    int32x4_t front = vdupq_n_s32(0), back = front;
    UNROLLED for (int i = 0; i < 4; ++i) {
        front = vpadalq_s16(front, vmull_s8(vget_low_s8(w[i]), vget_low_s8(q[i])));
        back = vpadalq_s16(back, vmull_high_s8(w[i], q[i]));
    }
    return vaddq_s32(sum, vpaddq_s32(front, back));
}
#endif
template <int BITS, int R>
inline void add_quads(const Quad *quads, const int8_t *x, Dots *dots) {
    const uint8x16_t less = vdupq_n_u8(BITS == 8 ? 0x80 : 0);
    UNROLLED for (int r = 0; r < R; ++r) {
        int8x16_t q[4];
        UNROLLED for (int i = 0; i < 4; ++i)
            q[i] = vreinterpretq_s8_s32(vdupq_n_s32(four_codes(x + r * STEP + 4 * i)));
        UNROLLED for (int k = 0; k < 4; ++k) {
            int8x16_t w[4];
            UNROLLED for (int i = 0; i < 4; ++i)
                w[i] = vreinterpretq_s8_u8(veorq_u8(quads[i].v[k], less));
            dots[r].v[k] = dots_of(dots[r].v[k], w, q);
        }
    }
}

#else

typedef uint8_t Bytes __attribute__((vector_size(16)));
struct Quad {
    Bytes v[4];
};
struct Dots {
    Integers v[4];
};
inline Quad load_quad(const char *p) {
    Quad x;
    memcpy(&x, p, sizeof x);
    return x;
}
inline Quad moved(Quad x, int right, int mask) {
    for (Bytes &v : x.v)
        v = (right > 0 ? v >> uint8_t(right) : v << uint8_t(-right)) & uint8_t(mask);
    return x;
}
inline Quad joined(Quad x, Quad y) {
    for (int i = 0; i < 4; ++i)
        x.v[i] |= y.v[i];
    return x;
}
inline Dots dots_from(int32_t start) {
    const Integers four = Integers{} + start;
    return {{four, four, four, four}};
}
inline Lanes floats_of(Dots x) {
    return each([&](int i) { return __builtin_convertvector(x.v[i], Floats); });
}
template <int BITS, int R>
inline void add_quads(const Quad *quads, const int8_t *x, Dots *dots) {
    for (int r = 0; r < R; ++r) {
        int32_t sums[HALF];
        memcpy(sums, &dots[r], sizeof sums);
        for (int i = 0; i < 4; ++i) {
            uint8_t codes[64];
            memcpy(codes, &quads[i], sizeof codes);
            const int8_t *q = x + r * STEP + 4 * i;
            for (int place = 0; place < HALF; ++place)
                sums[place] += codes[4 * place] * q[0] + codes[4 * place + 1] * q[1] + codes[4 * place + 2] * q[2] + codes[4 * place + 3] * q[3];
        }
        memcpy(&dots[r], sums, sizeof sums);
    }
}

#endif

/* Sixteen numbers of a scale's kind. */
template <int KIND>
ALWAYS_INLINE Lanes load_numbers(const char *p) {
    if constexpr (KIND == FLOAT32) return load(reinterpret_cast<const float *>(p));
    else if constexpr (KIND == BFLOAT16) return load(reinterpret_cast<const bf16 *>(p));
    else if constexpr (KIND == INT8) return load_codes(reinterpret_cast<const int8_t *>(p));
#if defined(VNX_AVX512)
    else if constexpr (KIND == FLOAT16) return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p))};
    else return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)))};
#elif defined(VNX_AVX2)
    const auto eight = [](const char *from) {
        if constexpr (KIND == FLOAT16) return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
        return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from)));
    };
    return {eight(p), eight(p + 8 * bytes_of(KIND))};
#elif defined(VNX_NEON)
    else if constexpr (KIND == FLOAT16) {
        const auto *halves = reinterpret_cast<const __fp16 *>(p);
        return each([=](int i) { return (Floats)vcvt_f32_f16(vld1_f16(halves + 4 * i)); });
    } else {
        const uint8x16_t bytes = vld1q_u8(reinterpret_cast<const uint8_t *>(p));
        const uint16x8_t front = vmovl_u8(vget_low_u8(bytes)), back = vmovl_high_u8(bytes);
        return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(front))), vcvtq_f32_u32(vmovl_high_u16(front)),
                 vcvtq_f32_u32(vmovl_u16(vget_low_u16(back))), vcvtq_f32_u32(vmovl_high_u16(back))}};
    }
#else
    float numbers[HALF];
    for (int i = 0; i < HALF; ++i)
        numbers[i] = number_at(p, KIND, i);
    return load(numbers);
#endif
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
