/* Sums over ranks: element by element by one tree, in float32, rounded once to the elements' type (ties to even). The tree is
   that of the products' shards: by halves while their number is even, then in order.

   Knows arrays, no processes. The same bits on every rank, whatever the sizes and the instruction set: additions and
   roundings are written out, and only their number at a time differs. A NaN keeps no payload in the 16-bit types. */

#ifndef VNEXT_RANK_SUM_H
#define VNEXT_RANK_SUM_H

#include <stdint.h>
#include <string.h>

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
enum { RANKS_MAX = 64, TOTALS_MAX = 7, BLOCK_ELEMENTS = 512 }; /* 2^(TOTALS_MAX - 1) = RANKS_MAX */

#define INLINED static inline __attribute__((always_inline))

INLINED float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINED uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINED float widened_bfloat16(uint16_t half) { return as_float((uint32_t)half << 16); }

INLINED uint16_t narrowed_bfloat16(float value) {
    uint32_t bits = as_bits(value);
    uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
    return value != value ? 0x7FC0u : rounded;
}

INLINED float widened_float16(uint16_t half) {
    uint32_t magnitude = (uint32_t)(half & 0x7FFF) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t finite = as_bits(as_float(magnitude) * 0x1p112f); /* another bias of the exponent; exact */
    uint32_t bits = magnitude >= 0x7C00u << 13 ? magnitude | 0x7F800000u : finite;
    return as_float(bits | sign);
}

INLINED uint16_t narrowed_float16(float value) {
    uint32_t bits = as_bits(value), magnitude = bits & 0x7FFFFFFFu, sign = bits >> 16 & 0x8000u;
    uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + (magnitude >> 13 & 1)) >> 13;
    uint32_t small = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f); /* the addition rounds to steps of 2^-24 */
    uint32_t rounded = magnitude < 0x38800000u ? small : normal;
    rounded = magnitude >= 0x47800000u ? 0x7C00u : rounded;
    return (magnitude > 0x7F800000u ? 0x7E00u : rounded) | sign;
}

INLINED void add_block(int kind, float *total, const uint8_t *part, int count, int is_first) {
    for (int i = 0; i < count; ++i) {
        float value;
        if (kind == FLOAT32) value = ((const float *)part)[i];
        if (kind == BFLOAT16) value = widened_bfloat16(((const uint16_t *)part)[i]);
        if (kind == FLOAT16) value = widened_float16(((const uint16_t *)part)[i]);
        total[i] = is_first ? value : total[i] + value;
    }
}

INLINED void round_block(int kind, uint8_t *target, const float *total, int count) {
    for (int i = 0; i < count; ++i) {
        if (kind == FLOAT32) ((float *)target)[i] = total[i];
        if (kind == BFLOAT16) ((uint16_t *)target)[i] = narrowed_bfloat16(total[i]);
        if (kind == FLOAT16) ((uint16_t *)target)[i] = narrowed_float16(total[i]);
    }
}

INLINED void sum_blocks(int kind, const uint8_t *const *parts, uint32_t part_count, uint64_t count, uint8_t *target) {
    float totals[TOTALS_MAX][BLOCK_ELEMENTS];
    uint64_t size = kind == FLOAT32 ? 4 : 2;
    uint32_t odd = part_count / (part_count & -part_count); /* as many parts are added in order, at the bottom of the tree */
    for (uint64_t at = 0; at < count; at += BLOCK_ELEMENTS) {
        int here = count - at < BLOCK_ELEMENTS ? count - at : BLOCK_ELEMENTS, depth = 0;
        for (uint32_t group = 0; group < part_count / odd; ++group) {
            for (uint32_t i = 0; i < odd; ++i) add_block(kind, totals[depth], parts[group * odd + i] + at * size, here, i == 0);
            for (uint32_t whole = group; whole & 1; whole >>= 1, --depth) /* the second half of a larger group is whole */
                add_block(FLOAT32, totals[depth - 1], (const uint8_t *)totals[depth], here, 0);
            ++depth;
        }
        round_block(kind, target + at * size, totals[0], here);
    }
}

#define SUM_KINDS                                                                             \
    if (kind == FLOAT32) sum_blocks(FLOAT32, parts, part_count, count, target);               \
    if (kind == BFLOAT16) sum_blocks(BFLOAT16, parts, part_count, count, target);             \
    if (kind == FLOAT16) sum_blocks(FLOAT16, parts, part_count, count, target);

static void sum_plain(int kind, const uint8_t *const *parts, uint32_t part_count, uint64_t count, uint8_t *target) {
    SUM_KINDS
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void sum_avx2(int kind, const uint8_t *const *parts, uint32_t part_count,
                                                     uint64_t count, uint8_t *target) {
    SUM_KINDS
}
#endif

/* `target` may be one of the parts: a block is read from all of them before it is written. */
static void sum_ranks(int kind, const uint8_t *const *parts, uint32_t part_count, uint64_t count, uint8_t *target) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return sum_avx2(kind, parts, part_count, count, target);
#endif
    sum_plain(kind, parts, part_count, count, target);
}

#endif
