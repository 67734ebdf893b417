/* BLAKE2b with a digest of 16 bytes and no key, after RFC 7693. Knows nothing of blocks or rows.

   The same digests as hashlib.blake2b(data, digest_size=16), which is the twin the tests compare it with; a call of
   hashlib costs Python several times what the compression of one 128-byte message costs here. */

#include <stdint.h>
#include <string.h>

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

static inline uint64_t blake2b_turned(uint64_t word, int by) { return (word >> by) | (word << (64 - by)); }

#define BLAKE2B_MIX(a, b, c, d, x, y)                                                                                  \
    do {                                                                                                               \
        a += b + (x);                                                                                                  \
        d = blake2b_turned(d ^ a, 32);                                                                                 \
        c += d;                                                                                                        \
        b = blake2b_turned(b ^ c, 24);                                                                                 \
        a += b + (y);                                                                                                  \
        d = blake2b_turned(d ^ a, 16);                                                                                 \
        c += d;                                                                                                        \
        b = blake2b_turned(b ^ c, 63);                                                                                 \
    } while (0)

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
        BLAKE2B_MIX(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
        BLAKE2B_MIX(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
        BLAKE2B_MIX(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
        BLAKE2B_MIX(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
        BLAKE2B_MIX(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
        BLAKE2B_MIX(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
        BLAKE2B_MIX(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
        BLAKE2B_MIX(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
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
