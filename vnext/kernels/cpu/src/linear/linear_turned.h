/* Sixteen rows of 32-bit words turned about: the order in which half a panel has them. Four rows by four words at a time, in registers
   that every processor has; one after the other, the rows' words would go to as many cache lines as a row has words. */
#pragma once

#include <cstdint>
#include <cstring>

namespace vnx {

constexpr int64_t TURNED_ROWS = 16;

typedef uint32_t FourWords __attribute__((vector_size(16)));

#if defined(__clang__) || __GNUC__ >= 12
#define VNX_WORDS_OF(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define VNX_WORDS_OF(a, b, ...) __builtin_shuffle(a, b, FourWords{__VA_ARGS__})
#endif

inline FourWords four_words(const char *from) {
    FourWords words;
    std::memcpy(&words, from, sizeof words);
    return words;
}

/* Four words of four rows to four places, `stride` bytes apart, that get one word of each row. */
inline void turn_four(const char *const *rows, int64_t at, char *to, int64_t stride) {
    const FourWords a = four_words(rows[0] + at), b = four_words(rows[1] + at);
    const FourWords c = four_words(rows[2] + at), d = four_words(rows[3] + at);
    const FourWords ab = VNX_WORDS_OF(a, b, 0, 4, 1, 5), ab_end = VNX_WORDS_OF(a, b, 2, 6, 3, 7);
    const FourWords cd = VNX_WORDS_OF(c, d, 0, 4, 1, 5), cd_end = VNX_WORDS_OF(c, d, 2, 6, 3, 7);
    const FourWords turned[4] = {VNX_WORDS_OF(ab, cd, 0, 1, 4, 5), VNX_WORDS_OF(ab, cd, 2, 3, 6, 7),
                                 VNX_WORDS_OF(ab_end, cd_end, 0, 1, 4, 5), VNX_WORDS_OF(ab_end, cd_end, 2, 3, 6, 7)};
    for (int i = 0; i < 4; ++i)
        std::memcpy(to + i * stride, &turned[i], sizeof turned[i]);
}

/* Sixteen words of each of sixteen rows: word k of all rows goes to `to + k * stride`. */
inline void turn_sixteen(const char *const *rows, int64_t at, char *to, int64_t stride) {
    for (int64_t word = 0; word < TURNED_ROWS; word += 4)
        for (int64_t row = 0; row < TURNED_ROWS; row += 4)
            turn_four(rows + row, at + word * 4, to + word * stride + row * 4, stride);
}

#undef VNX_WORDS_OF

}  // namespace vnx
