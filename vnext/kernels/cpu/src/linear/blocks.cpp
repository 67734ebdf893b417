#include "linear/blocks.h"

#include <cmath>
#include <cstring>

namespace vnx {
namespace {

constexpr int COUNT = 32;  // codes that are taken out together

/* ---- codes: fields of few bits, which a type's blocks have in runs of 16 or 32 bytes: the lowest bits of all, then the next ----------- */

inline void low_high(const uint8_t *from, uint8_t *to) {
    for (int i = 0; i < COUNT / 2; ++i)
        to[i] = from[i] & 15;
    for (int i = 0; i < COUNT / 2; ++i)
        to[COUNT / 2 + i] = from[i] >> 4;
}

template <int SHIFT, int MASK>
inline void fields(const uint8_t *from, uint8_t *to) {
    for (int i = 0; i < COUNT; ++i)
        to[i] = from[i] >> SHIFT & MASK;
}

inline void pairs_of_bits(const uint8_t *from, int64_t field, uint8_t *to) {
    switch (field) {
        case 0: return fields<0, 3>(from, to);
        case 1: return fields<2, 3>(from, to);
        case 2: return fields<4, 3>(from, to);
        default: return fields<6, 3>(from, to);
    }
}

inline void nibbles(const uint8_t *from, int64_t field, uint8_t *to) { return field == 0 ? fields<0, 15>(from, to) : fields<4, 15>(from, to); }

/* Bit `bit` of each byte becomes bit `place` of a code. */
inline void add_bit(const uint8_t *from, int64_t bit, int place, uint8_t *to) {
    const uint8_t mask = uint8_t(1 << bit), value = uint8_t(1 << place);
    for (int i = 0; i < COUNT; ++i)
        to[i] |= (from[i] & mask) != 0 ? value : 0;
}

/* Bits of one word, the lowest first, become bit 4 of the codes: eight of them at once, each in a byte of its own. */
inline void add_fifths(const uint8_t *from, uint8_t *to) {
    for (int i = 0; i < COUNT / 8; ++i) {
        uint64_t eight = from[i] * uint64_t(0x0101010101010101) & uint64_t(0x8040201008040201), codes;
        eight += uint64_t(0x7f7f7f7f7f7f7f7f);  // sets the highest bit of a byte that is not 0
        std::memcpy(&codes, to + 8 * i, 8);
        codes |= eight >> 3 & uint64_t(0x1010101010101010);
        std::memcpy(to + 8 * i, &codes, 8);
    }
}

inline void look_up(const uint8_t (&table)[16], uint8_t *codes) {
    for (int i = 0; i < COUNT; ++i)
        codes[i] = table[codes[i]];
}

constexpr uint8_t IQ4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};  // 128 more than it stands for
constexpr uint8_t FP4[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};               // twice, and 12 more

void q4_0(const uint8_t *block, int64_t, uint8_t *to) { low_high(block + 2, to); }
void q4_1(const uint8_t *block, int64_t, uint8_t *to) { low_high(block + 4, to); }
void q5_0(const uint8_t *block, int64_t, uint8_t *to) { low_high(block + 6, to), add_fifths(block + 2, to); }
void q5_1(const uint8_t *block, int64_t, uint8_t *to) { low_high(block + 8, to), add_fifths(block + 4, to); }

void q8_0(const uint8_t *block, int64_t, uint8_t *to) {
    for (int i = 0; i < COUNT; ++i)
        to[i] = block[2 + i] ^ 128;
}

void q2_k(const uint8_t *block, int64_t index, uint8_t *to) { pairs_of_bits(block + 16 + index / 4 * 32, index % 4, to); }

void q3_k(const uint8_t *block, int64_t index, uint8_t *to) {
    pairs_of_bits(block + 32 + index / 4 * 32, index % 4, to);
    add_bit(block, index, 2, to);
}

void q4_k(const uint8_t *block, int64_t index, uint8_t *to) { nibbles(block + 16 + index / 2 * 32, index % 2, to); }

void q5_k(const uint8_t *block, int64_t index, uint8_t *to) {
    nibbles(block + 48 + index / 2 * 32, index % 2, to);
    add_bit(block + 16, index, 4, to);
}

void q6_k(const uint8_t *block, int64_t index, uint8_t *to) {
    uint8_t high[COUNT];
    nibbles(block + index / 4 * 64 + index % 2 * 32, index % 4 / 2, to);
    pairs_of_bits(block + 128 + index / 4 * 32, index % 4, high);
    for (int i = 0; i < COUNT; ++i)
        to[i] |= uint8_t(high[i] << 4);
}

/* Five digits of base 3 a byte, as a fraction of 256, and four in the last bytes. */
inline void digits(const uint8_t *from, int count, int64_t digit, uint8_t *to) {
    constexpr uint8_t powers[5] = {1, 3, 9, 27, 81};
    for (int i = 0; i < count; ++i)
        to[i] = uint8_t(uint8_t(from[i] * powers[digit]) * 3 >> 8);
}

void tq1_0(const uint8_t *block, int64_t index, uint8_t *to) {
    if (index < 5) return digits(block, COUNT, index, to);
    for (int64_t part = 0; part < 2; ++part, to += 16) {
        const int64_t digit = 2 * (index - 5) + part;
        if (digit < 5) digits(block + 32, 16, digit, to);
        else
            for (int64_t four = 0; four < 4; ++four)
                digits(block + 48, 4, four, to + 4 * four);
    }
}

void tq2_0(const uint8_t *block, int64_t index, uint8_t *to) { pairs_of_bits(block + index / 4 * 32, index % 4, to); }
void iq4_nl(const uint8_t *block, int64_t, uint8_t *to) { low_high(block + 2, to), look_up(IQ4, to); }
void iq4_xs(const uint8_t *block, int64_t index, uint8_t *to) { low_high(block + 8 + index * 16, to), look_up(IQ4, to); }
void mxfp4(const uint8_t *block, int64_t, uint8_t *to) { low_high(block + 1, to), look_up(FP4, to); }

/* ---- scales ------------------------------------------------------------------------------------------------------------------ */

/* A float16 at a place, with the other sign. */
inline void negated(const uint8_t *from, uint8_t *to) { to[0] = from[0], to[1] = from[1] ^ 128; }

template <int PLACE>
void one(const uint8_t *block, BlockNumbers &to) {
    std::memcpy(to.parts, block + PLACE, 2);
}

void with_low(const uint8_t *block, BlockNumbers &to) {
    std::memcpy(to.parts, block, 2);
    negated(block + 2, to.lows);
}

void sixteen_nibbles(const uint8_t *block, BlockNumbers &to) {
    for (int i = 0; i < 16; ++i)
        to.parts[i] = block[i] & 15, to.lows[i] = block[i] >> 4;
    std::memcpy(to.span, block + 80, 2);
    std::memcpy(to.low_span, block + 82, 2);
}

void q3_k_numbers(const uint8_t *block, BlockNumbers &to) {
    for (int i = 0; i < 16; ++i) {
        const int low = i < 8 ? block[96 + i] & 15 : block[96 + i - 8] >> 4;
        to.parts[i] = uint8_t((low | (block[104 + i % 4] >> (2 * (i / 4)) & 3) << 4) - 32);
    }
    std::memcpy(to.span, block + 108, 2);
}

/* 6 bits of 8 scales and 8 lows: the first four of each in a byte, whose two highest bits belong to the others. */
void lows_of_six(const uint8_t *block, BlockNumbers &to) {
    const uint8_t *scales = block + 4, *lows = block + 8, *rest = block + 12;
    for (int i = 0; i < 4; ++i) {
        to.parts[i] = scales[i] & 63, to.lows[i] = lows[i] & 63;
        to.parts[4 + i] = uint8_t((rest[i] & 15) | (scales[i] >> 2 & 0x30));
        to.lows[4 + i] = uint8_t(rest[i] >> 4 | (lows[i] >> 2 & 0x30));
    }
    std::memcpy(to.span, block, 2);
    std::memcpy(to.low_span, block + 2, 2);
}

void q6_k_numbers(const uint8_t *block, BlockNumbers &to) {
    std::memcpy(to.parts, block + 192, 16);
    std::memcpy(to.span, block + 208, 2);
}

void iq4_xs_numbers(const uint8_t *block, BlockNumbers &to) {
    for (int i = 0; i < 8; ++i) {
        const int low = block[4 + i / 2] >> (4 * (i % 2)) & 15, high = block[2 + i / 4] >> (2 * (i % 4)) & 3;
        to.parts[i] = uint8_t((low | high << 4) - 32);
    }
    std::memcpy(to.span, block, 2);
}

void power(const uint8_t *block, BlockNumbers &to) {
    const float scale = std::ldexp(1.0f, block[0] - 128);
    std::memcpy(to.parts, &scale, sizeof scale);
}

constexpr BlockReader readers[] = {
    {5, 5, 18, q4_0, one<0>},
    {5, 5, 20, q4_1, with_low},
    {5, 5, 22, q5_0, one<0>},
    {5, 5, 24, q5_1, with_low},
    {5, 5, 34, q8_0, one<0>},
    {8, 4, 84, q2_k, sixteen_nibbles},
    {8, 4, 110, q3_k, q3_k_numbers},
    {8, 5, 144, q4_k, lows_of_six},
    {8, 5, 176, q5_k, lows_of_six},
    {8, 4, 210, q6_k, q6_k_numbers},
    {8, 8, 54, tq1_0, one<52>},
    {8, 8, 66, tq2_0, one<64>},
    {5, 5, 18, iq4_nl, one<0>},
    {8, 5, 136, iq4_xs, iq4_xs_numbers},
    {5, 5, 17, mxfp4, power},
};

}  // namespace

const BlockReader &block_reader(int64_t type) { return readers[type - 1]; }

}  // namespace vnx
