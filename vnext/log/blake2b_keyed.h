/* BLAKE2b of LANES messages of one size at once, with a key and a digest of 16 bytes each, after RFC 7693.

   Included once for each number of LANES, with LANES_TARGET the instructions it may use. The same digests as
   hashlib.blake2b(data, key=key, digest_size=16), with which tests compare it. One lane is the plain
   form; eight lanes of AVX-512 take twice the time of one. The chunk that holds the key is compressed once, when the key
   comes, and not again for every message. */

#ifndef BLAKE2B_KEYED_WORDS
#define BLAKE2B_KEYED_WORDS

#include <string.h>

#include "blake2b_words.h"

#define KEYED_JOIN(name, lanes) name##_##lanes
#define KEYED_NAMED(name, lanes) KEYED_JOIN(name, lanes)

#endif

#define WORD KEYED_NAMED(keyed_word, LANES)

typedef uint64_t WORD __attribute__((vector_size(8 * LANES)));

LANES_TARGET static inline void KEYED_NAMED(keyed_compress, LANES)(WORD chain[8], const WORD m[16], uint64_t done,
                                                                   int is_last) {
    WORD v[16];
    for (int i = 0; i < 8; ++i) v[i] = chain[i], v[i + 8] = BLAKE2B_START[i] - (WORD){0};
    v[12] ^= done;
    if (is_last) v[14] = ~v[14];
#pragma GCC unroll 12
    for (int round = 0; round < BLAKE2B_ROUNDS; ++round) {
        const uint8_t *s = BLAKE2B_ORDER[round % 10];
        BLAKE2B_ROUND(v, m, s);
    }
    for (int i = 0; i < 8; ++i) chain[i] ^= v[i] ^ v[i + 8];
}

/* Each of the messages has `size` > 0 bytes and zeros behind them to a whole number of chunks. `keyed` is the chain value
   behind the chunk with the key (keyed_start). */
LANES_TARGET static void KEYED_NAMED(keyed_digests, LANES)(const uint64_t keyed[8], const uint8_t *const messages[LANES],
                                                           size_t size, uint64_t out[LANES][2]) {
    WORD chain[8], m[16];
    for (int i = 0; i < 8; ++i) chain[i] = keyed[i] - (WORD){0};
    for (size_t at = 0; at < size; at += BLAKE2B_CHUNK) {
        int is_last = size - at <= BLAKE2B_CHUNK;
        for (int i = 0; i < 16; ++i)
            for (int lane = 0; lane < LANES; ++lane) {
                uint64_t word;
                memcpy(&word, messages[lane] + at + 8 * i, sizeof word);
                m[i][lane] = word;
            }
        KEYED_NAMED(keyed_compress, LANES)(chain, m, BLAKE2B_CHUNK + (is_last ? size : at + BLAKE2B_CHUNK), is_last);
    }
    for (int lane = 0; lane < LANES; ++lane) out[lane][0] = chain[0][lane], out[lane][1] = chain[1][lane];
}

#if LANES == 1
/* The chain value behind the chunk that holds a key of 16 bytes, where a message follows. */
static void keyed_start(const uint8_t key[BLAKE2B_DIGEST], uint64_t keyed[8]) {
    uint64_t words[2];
    WORD chain[8], m[16] = {{0}};
    memcpy(words, key, sizeof words);
    m[0][0] = words[0], m[1][0] = words[1];
    for (int i = 0; i < 8; ++i) chain[i][0] = BLAKE2B_START[i];
    chain[0][0] ^= 0x01010000 ^ BLAKE2B_DIGEST << 8 ^ BLAKE2B_DIGEST;
    KEYED_NAMED(keyed_compress, LANES)(chain, m, BLAKE2B_CHUNK, 0);
    for (int i = 0; i < 8; ++i) keyed[i] = chain[i][0];
}
#endif

#undef WORD
