/* Number types of CUDA, as bits: bfloat16, half and fp8 (e4m3), rounded to the nearest even; vectors of plain types. */
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

inline unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline int __float_as_int(float x) { return int(__float_as_uint(x)); }
inline float __int_as_float(int bits) { return __uint_as_float(unsigned(bits)); }

inline long long __double_as_longlong(double x) {
    long long bits;
    std::memcpy(&bits, &x, 8);
    return bits;
}
inline double __longlong_as_double(long long bits) {
    double x;
    std::memcpy(&x, &bits, 8);
    return x;
}

/* ---- vectors ---- */

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

/* ---- narrow floats ---- */

namespace shim {

inline bool is_nan(unsigned magnitude) { return magnitude > 0x7f800000u; }

inline uint16_t bfloat16_bits(float x) {
    const unsigned bits = __float_as_uint(x);
    if (is_nan(bits & 0x7fffffffu)) return 0x7fff;
    return uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

inline uint16_t half_bits(float x) {
    const unsigned sign = __float_as_uint(x) >> 16 & 0x8000u, magnitude = __float_as_uint(x) & 0x7fffffffu;
    if (is_nan(magnitude)) return 0x7fff;
    if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // from 65520 on
    if (magnitude < 0x38800000u)                                    // below 2^-14: whole multiples of 2^-24
        return uint16_t(sign | unsigned(std::nearbyint(std::fabs(x) * 0x1p24f)));
    return uint16_t(sign | (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1)) >> 13);
}

inline float half_value(uint16_t bits) {
    const unsigned exponent = bits >> 10 & 31, fraction = bits & 1023;
    float magnitude = std::ldexp(float(exponent ? fraction + 1024 : fraction), int(exponent ? exponent : 1) - 25);
    if (exponent == 31) magnitude = fraction ? NAN : INFINITY;
    return bits & 0x8000 ? -magnitude : magnitude;
}

/* Four bits of exponent, no infinity: what is too large becomes 448. */
inline uint8_t e4m3_bits(float x) {
    const unsigned sign = __float_as_uint(x) >> 24 & 0x80u, magnitude = __float_as_uint(x) & 0x7fffffffu;
    if (is_nan(magnitude)) return uint8_t(sign | 0x7f);
    if (magnitude >= 0x43e00000u) return uint8_t(sign | 0x7e);
    if (magnitude < 0x3c800000u) return uint8_t(sign | unsigned(std::nearbyint(std::fabs(x) * 0x1p9f)));
    return uint8_t(sign | (magnitude - (120u << 23) + 0x7ffffu + (magnitude >> 20 & 1)) >> 20);
}

inline float e4m3_value(uint8_t bits) {
    const unsigned exponent = bits >> 3 & 15, fraction = bits & 7;
    float magnitude = std::ldexp(float(exponent ? fraction + 8 : fraction), int(exponent ? exponent : 1) - 10);
    if ((bits & 0x7f) == 0x7f) magnitude = NAN;
    return bits & 0x80 ? -magnitude : magnitude;
}

}  // namespace shim

struct __nv_bfloat16 { uint16_t bits; };
struct __half { uint16_t bits; };
struct __nv_fp8_e4m3 {
    uint8_t __x;
    __nv_fp8_e4m3() = default;
    explicit __nv_fp8_e4m3(float x) : __x(shim::e4m3_bits(x)) {}
    explicit operator float() const { return shim::e4m3_value(__x); }
};
struct __nv_fp8x2_e4m3 {
    uint16_t __x;
    explicit operator float2() const { return {shim::e4m3_value(__x & 255), shim::e4m3_value(__x >> 8)}; }
};

inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {shim::bfloat16_bits(x)}; }
inline float __half2float(__half x) { return shim::half_value(x.bits); }
inline __half __float2half_rn(float x) { return {shim::half_bits(x)}; }
