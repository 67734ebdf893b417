/* BLAKE2b of LANES messages of one size at once, with a key and a digest of 16 bytes each, after RFC 7693.

   Included once for each number of LANES, with LANES_TARGET the instructions it may use. The same digests as
   hashlib.blake2b(data, key=key, digest_size=16), which is the twin the tests compare it with. One lane is the plain
   form; eight lanes of AVX-512 take twice the time of one. The chunk that holds the key is compressed once, when the key
   comes, and not again for every message. */

#ifndef BLAKE2B_KEYED_WORDS
#define BLAKE2B_KEYED_WORDS

#include <stdint.h>
#include <string.h>

enum { KEYED_CHUNK = 128, KEYED_ROUNDS = 12, KEYED_DIGEST = 16 };

static const uint64_t KEYED_START[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

static const uint8_t KEYED_ORDER[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

#define KEYED_TURN(word, by) (((word) >> (by)) | ((word) << (64 - (by))))
#define KEYED_MIX(a, b, c, d, x, y)                                                                                    \
    do {                                                                                                               \
        a += b + (x);                                                                                                  \
        d = KEYED_TURN(d ^ a, 32);                                                                                     \
        c += d;                                                                                                        \
        b = KEYED_TURN(b ^ c, 24);                                                                                     \
        a += b + (y);                                                                                                  \
        d = KEYED_TURN(d ^ a, 16);                                                                                     \
        c += d;                                                                                                        \
        b = KEYED_TURN(b ^ c, 63);                                                                                     \
    } while (0)
#define KEYED_JOIN(name, lanes) name##_##lanes
#define KEYED_NAMED(name, lanes) KEYED_JOIN(name, lanes)

#endif

#define WORD KEYED_NAMED(keyed_word, LANES)

typedef uint64_t WORD __attribute__((vector_size(8 * LANES)));

LANES_TARGET static inline void KEYED_NAMED(keyed_compress, LANES)(WORD chain[8], const WORD m[16], uint64_t done,
                                                                   int is_last) {
    WORD v[16];
    for (int i = 0; i < 8; ++i) v[i] = chain[i], v[i + 8] = KEYED_START[i] - (WORD){0};
    v[12] ^= done;
    if (is_last) v[14] = ~v[14];
#pragma GCC unroll 12
    for (int round = 0; round < KEYED_ROUNDS; ++round) {
        const uint8_t *s = KEYED_ORDER[round % 10];
        KEYED_MIX(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
        KEYED_MIX(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
        KEYED_MIX(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
        KEYED_MIX(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
        KEYED_MIX(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
        KEYED_MIX(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
        KEYED_MIX(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
        KEYED_MIX(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
    }
    for (int i = 0; i < 8; ++i) chain[i] ^= v[i] ^ v[i + 8];
}

/* Each of the messages has `size` > 0 bytes and zeros behind them to a whole number of chunks. `keyed` is the chain value
   behind the chunk with the key (keyed_start). */
LANES_TARGET static void KEYED_NAMED(keyed_digests, LANES)(const uint64_t keyed[8], const uint8_t *const messages[LANES],
                                                           size_t size, uint64_t out[LANES][2]) {
    WORD chain[8], m[16];
    for (int i = 0; i < 8; ++i) chain[i] = keyed[i] - (WORD){0};
    for (size_t at = 0; at < size; at += KEYED_CHUNK) {
        int is_last = size - at <= KEYED_CHUNK;
        for (int i = 0; i < 16; ++i)
            for (int lane = 0; lane < LANES; ++lane) {
                uint64_t word;
                memcpy(&word, messages[lane] + at + 8 * i, sizeof word);
                m[i][lane] = word;
            }
        KEYED_NAMED(keyed_compress, LANES)(chain, m, KEYED_CHUNK + (is_last ? size : at + KEYED_CHUNK), is_last);
    }
    for (int lane = 0; lane < LANES; ++lane) out[lane][0] = chain[0][lane], out[lane][1] = chain[1][lane];
}

#if LANES == 1
/* The chain value behind the chunk that holds a key of 16 bytes, where a message follows. */
static void keyed_start(const uint8_t key[KEYED_DIGEST], uint64_t keyed[8]) {
    uint64_t words[2];
    WORD chain[8], m[16] = {{0}};
    memcpy(words, key, sizeof words);
    m[0][0] = words[0], m[1][0] = words[1];
    for (int i = 0; i < 8; ++i) chain[i][0] = KEYED_START[i];
    chain[0][0] ^= 0x01010000 ^ KEYED_DIGEST << 8 ^ KEYED_DIGEST;
    KEYED_NAMED(keyed_compress, LANES)(chain, m, KEYED_CHUNK, 0);
    for (int i = 0; i < 8; ++i) keyed[i] = chain[i][0];
}
#endif

#undef WORD
