/* What all kinds of packed weights share: which row of a weight lies where, and numbers of any kind as float32. */
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace vnx {

static inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

/* Panels of a weight; a gated one is padded to whole halves so that gate and up end in the same panel. */
static inline int64_t panels_of(int64_t out, int gate) { return gate == NO_GATE ? (out + PANEL - 1) / PANEL : (out / 2 + 15) / 16; }

/* The row of the weight at a place of a panel, -1 for padding. */
static inline int64_t row_at(const Packed &p, int64_t panel, int64_t place) {
    if (p.gate == NO_GATE) {
        const int64_t row = panel * PANEL + place;
        return row < p.out ? row : -1;
    }
    const int64_t row = panel * 16 + place % 16;
    if (row >= p.out / 2) return -1;
    return place < 16 ? row : p.out / 2 + row;
}

static inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static inline float half_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 31) return float_of(sign | 0x7f800000 | fraction << 13);
    if (exponent == 0) return float_of(sign | 0x33800000) * float(fraction);  // of 2^-24
    return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}

static inline float number_at(const void *data, int64_t kind, int64_t index) {
    switch (kind) {
        case FLOAT32: return static_cast<const float *>(data)[index];
        case FLOAT16: return half_float(static_cast<const uint16_t *>(data)[index]);
        case UINT8: return static_cast<const uint8_t *>(data)[index];
        case INT8: return static_cast<const int8_t *>(data)[index];
        default: return float_of(uint32_t(static_cast<const uint16_t *>(data)[index]) << 16);
    }
}

static inline int64_t bytes_of(int64_t kind) { return kind == FLOAT32 ? 4 : kind == UINT8 || kind == INT8 ? 1 : 2; }

static inline uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return std::isnan(x) ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace vnx
