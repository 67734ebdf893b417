/* BLAKE2b with a digest of 16 bytes and no key, after RFC 7693. Knows nothing of blocks or rows.

   The same digests as hashlib.blake2b(data, digest_size=16), with which tests compare it; a call of
   hashlib costs Python several times what the compression of one 128-byte message costs here. */

#include <string.h>

#include "blake2b_words.h"

/* One chunk of 128 bytes (little-endian words) into the chain value; `done` bytes of the message end with it. */
static void blake2b_compress(uint64_t chain[8], const uint8_t chunk[BLAKE2B_CHUNK], uint64_t done, int is_last) {
    uint64_t v[16], m[16];
    memcpy(m, chunk, sizeof m);
    memcpy(v, chain, 8 * sizeof *v);
    memcpy(v + 8, BLAKE2B_START, 8 * sizeof *v);
    v[12] ^= done;
    if (is_last) v[14] = ~v[14];
    for (int round = 0; round < BLAKE2B_ROUNDS; ++round) {
        const uint8_t *s = BLAKE2B_ORDER[round % 10];
        BLAKE2B_ROUND(v, m, s);
    }
    for (int i = 0; i < 8; ++i) chain[i] ^= v[i] ^ v[i + 8];
}

/* The digest of head || body. */
static void blake2b_16(uint8_t out[BLAKE2B_DIGEST], const void *head, size_t head_size, const void *body, size_t body_size) {
    uint64_t chain[8], done = 0;
    uint8_t chunk[BLAKE2B_CHUNK];
    const uint8_t *parts[2] = {head, body};
    size_t sizes[2] = {head_size, body_size}, held = 0;
    memcpy(chain, BLAKE2B_START, sizeof chain);
    chain[0] ^= 0x01010000 ^ BLAKE2B_DIGEST;
    for (int part = 0; part < 2; ++part)
        for (size_t at = 0; at < sizes[part];) {
            if (held == BLAKE2B_CHUNK) { /* more follows: this chunk is not the last */
                blake2b_compress(chain, chunk, done += BLAKE2B_CHUNK, 0);
                held = 0;
            }
            size_t take = sizes[part] - at < BLAKE2B_CHUNK - held ? sizes[part] - at : BLAKE2B_CHUNK - held;
            memcpy(chunk + held, parts[part] + at, take);
            held += take;
            at += take;
        }
    memset(chunk + held, 0, BLAKE2B_CHUNK - held);
    blake2b_compress(chain, chunk, done + held, 1);
    memcpy(out, chain, BLAKE2B_DIGEST);
}
