/* BLAKE2b's constants and its round (RFC 7693), for words of one lane or of many: what blake2b.h and blake2b_keyed.h share. */

#ifndef BLAKE2B_WORDS
#define BLAKE2B_WORDS

#include <stdint.h>

enum { BLAKE2B_CHUNK = 128, BLAKE2B_ROUNDS = 12, BLAKE2B_DIGEST = 16 };

static const uint64_t BLAKE2B_START[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

static const uint8_t BLAKE2B_ORDER[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

#define BLAKE2B_TURN(word, by) (((word) >> (by)) | ((word) << (64 - (by))))
#define BLAKE2B_MIX(a, b, c, d, x, y)                                                                                  \
    do {                                                                                                               \
        a += b + (x);                                                                                                  \
        d = BLAKE2B_TURN(d ^ a, 32);                                                                                   \
        c += d;                                                                                                        \
        b = BLAKE2B_TURN(b ^ c, 24);                                                                                   \
        a += b + (y);                                                                                                  \
        d = BLAKE2B_TURN(d ^ a, 16);                                                                                   \
        c += d;                                                                                                        \
        b = BLAKE2B_TURN(b ^ c, 63);                                                                                   \
    } while (0)

/* Round `s` (a row of BLAKE2B_ORDER) of the sixteen words v with the message m. */
#define BLAKE2B_ROUND(v, m, s)                                                                                         \
    do {                                                                                                               \
        BLAKE2B_MIX(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);                                                        \
        BLAKE2B_MIX(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);                                                        \
        BLAKE2B_MIX(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);                                                       \
        BLAKE2B_MIX(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);                                                       \
        BLAKE2B_MIX(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);                                                       \
        BLAKE2B_MIX(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);                                                     \
        BLAKE2B_MIX(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);                                                      \
        BLAKE2B_MIX(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);                                                      \
    } while (0)

#endif
