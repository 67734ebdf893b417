/* CRC32 (IEEE 802.3, reflected): the sums of zlib.crc32, with which tests compare it.

   Eight bytes at a time by tables ("slicing-by-8", Kounavis and Berry, 2008); where the processor multiplies polynomials
   64 bytes at a time (Gopal and others, "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ", Intel, 2009). */

#ifndef CRC32_H
#define CRC32_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define CRC32_FOLDS
static int crc32_can_fold;
#endif

static uint32_t crc32_table[8][256];

static void crc32_begin(void) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t sum = byte;
        for (int bit = 0; bit < 8; ++bit) sum = sum & 1 ? sum >> 1 ^ 0xEDB88320u : sum >> 1;
        crc32_table[0][byte] = sum;
    }
    for (int slice = 1; slice < 8; ++slice)
        for (int byte = 0; byte < 256; ++byte) {
            uint32_t sum = crc32_table[slice - 1][byte];
            crc32_table[slice][byte] = sum >> 8 ^ crc32_table[0][sum & 0xff];
        }
#ifdef CRC32_FOLDS
    crc32_can_fold = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
#endif
}

/* The running remainder (not inverted) after more data. */
static uint32_t crc32_sliced(uint32_t sum, const uint8_t *data, size_t size) {
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, data, sizeof word);
        word ^= sum;
        sum = crc32_table[7][word & 0xff] ^ crc32_table[6][word >> 8 & 0xff] ^ crc32_table[5][word >> 16 & 0xff] ^
              crc32_table[4][word >> 24 & 0xff] ^ crc32_table[3][word >> 32 & 0xff] ^ crc32_table[2][word >> 40 & 0xff] ^
              crc32_table[1][word >> 48 & 0xff] ^ crc32_table[0][word >> 56];
    }
    for (; size; ++data, --size) sum = sum >> 8 ^ crc32_table[0][(sum ^ *data) & 0xff];
    return sum;
}

#ifdef CRC32_FOLDS
#define CRC32_TARGET __attribute__((target("pclmul,sse4.1")))

/* A remainder moved on by as many bits as `by` stands for: its halves times two powers of x modulo the polynomial. */
CRC32_TARGET static inline __m128i crc32_moved(__m128i x, __m128i by) {
    return _mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11));
}

CRC32_TARGET static inline __m128i crc32_loaded(const uint8_t *data) { return _mm_loadu_si128((const __m128i *)data); }

/* As crc32_sliced, for 64 bytes or more: all but the last size % 16 of them, which are left to the caller. */
CRC32_TARGET static uint32_t crc32_folded(uint32_t sum, const uint8_t *data, size_t size) {
    const __m128i by_512 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
    const __m128i by_128 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i by_64 = _mm_set_epi64x(0, 0x0163cd6124);
    const __m128i poly = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    const __m128i low_32 = _mm_setr_epi32(~0, 0, ~0, 0);
    __m128i x[4];
    for (int i = 0; i < 4; ++i) x[i] = crc32_loaded(data + 16 * i);
    x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)sum));
    for (data += 64, size -= 64; size >= 64; data += 64, size -= 64)
        for (int i = 0; i < 4; ++i) x[i] = _mm_xor_si128(crc32_moved(x[i], by_512), crc32_loaded(data + 16 * i));
    for (int i = 1; i < 4; ++i) x[0] = _mm_xor_si128(crc32_moved(x[0], by_128), x[i]);
    for (; size >= 16; data += 16, size -= 16) x[0] = _mm_xor_si128(crc32_moved(x[0], by_128), crc32_loaded(data));
    /* 128 bits to 64, then to 32 by Barrett's reduction */
    __m128i y = _mm_xor_si128(_mm_srli_si128(x[0], 8), _mm_clmulepi64_si128(x[0], by_128, 0x10));
    y = _mm_xor_si128(_mm_srli_si128(y, 4), _mm_clmulepi64_si128(_mm_and_si128(y, low_32), by_64, 0x00));
    __m128i z = _mm_clmulepi64_si128(_mm_and_si128(y, low_32), poly, 0x10);
    z = _mm_clmulepi64_si128(_mm_and_si128(z, low_32), poly, 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(y, z), 1);
}
#endif

/* The sum of data behind that of what came before it, 0 at the beginning. */
static uint32_t crc32_of(uint32_t before, const uint8_t *data, size_t size) {
    uint32_t sum = ~before;
#ifdef CRC32_FOLDS
    if (crc32_can_fold && size >= 64) {
        size_t folded = size & ~(size_t)15;
        sum = crc32_folded(sum, data, folded);
        data += folded, size -= folded;
    }
#endif
    return ~crc32_sliced(sum, data, size);
}

#endif
