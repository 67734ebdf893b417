/* Products of weights of few bits with activations in bfloat16: the order of vnext/kernels/codes.py. Codes become float32, few rows
   meet them in registers, more in the first cache. A product of a code and a bfloat16 is exact: all levels agree. */
#pragma once

#include "linear/linear_codes.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

/* Rows of a block, and as many as meet codes in registers: two chains of sums for each. */
#if defined(VNX_AVX512)
constexpr int WIDE_ROWS = 16, WIDE_FEW = 4;
#else
constexpr int WIDE_ROWS = 4, WIDE_FEW = 2;
#endif
constexpr int64_t WIDE_STEPS = 4;             // 8 KB of codes as float32
constexpr int64_t STEP_FLOATS = STEP * HALF;  // of which the even inputs come first

/* ---- rows -------------------------------------------------------------------------------------------------------------------- */

template <typename T>
inline void widen_rows_of(const LinearCall &call, int64_t first, int64_t last) {
    const Packed &w = *call.weight;
    const RoundedRows &to = *call.rounded;
    const int64_t rows = last - first, steps = w.steps(), from = first * steps;
    const bf16 *const exact = nullptr;
    for (int64_t r = 0; r < rows; ++r) {
        const T *x = static_cast<const T *>(call.x) + (first + r) * call.x_stride;
        for (int64_t step = 0, shard = 0; shard < w.shards; ++shard, x += w.shard_in())
            for (int64_t inside = 0; inside < w.shard_in(); inside += STEP, ++step) {
                const int64_t left = w.shard_in() - inside, place = step * rows + r;
                const Lanes front = rounded(load_part(x + inside, left), exact);
                const Lanes back = left > 16 ? rounded(load_part(x + inside + 16, left - 16), exact) : all(0.0f);
                store(to.wide + (from + place) * STEP, front);
                store(to.wide + (from + place) * STEP + 16, back);
                for (int i = 0; i < w.piece_count; ++i) {
                    const CodesPart &piece = pieces_of(w)[i];
                    const float zero = piece.lows.kind < 0 ? float(piece.zero) : 1.0f;
                    if (piece.group != SPLIT) {
                        to.totals[i][from + place] = zero * sum(front + back);
                        continue;
                    }
                    float *totals = to.totals[i] + 2 * from;
                    totals[2 * step * rows + r] = zero * sum(front);
                    totals[(2 * step + 1) * rows + r] = zero * sum(back);
                }
            }
    }
}

void widen_rows(const LinearCall &call, int64_t first, int64_t last) {
    if (call.weight->x_kind == FLOAT32) return widen_rows_of<float>(call, first, last);
    widen_rows_of<bf16>(call, first, last);
}

/* ---- weights ----------------------------------------------------------------------------------------------------------------- */

/* Byte `byte` of a quad's words, an input of sixteen outputs. */
#if defined(VNX_AVX512)
inline __m512i word_of(Quad quad, int right) { return right == 0 ? quad : _mm512_srli_epi32(quad, unsigned(right)); }
template <int BITS>
inline Lanes input_of(Quad quad, int byte) {
    const __m512i word = word_of(quad, 8 * byte);
    const __m512 front = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    if constexpr (BITS <= 4) return {_mm512_permutexvar_ps(word, front)};
    if constexpr (BITS == 5) return {_mm512_permutex2var_ps(front, word, _mm512_add_ps(front, _mm512_set1_ps(16.0f)))};
    return {_mm512_cvtepi32_ps(byte == 3 ? word : _mm512_and_si512(word, _mm512_set1_epi32(255)))};
}
#elif defined(VNX_AVX2)
inline __m256 input_of(__m256i words, int byte) {
    const __m256i moved_by = byte == 0 ? words : _mm256_srli_epi32(words, 8 * byte);
    return _mm256_cvtepi32_ps(byte == 3 ? moved_by : _mm256_and_si256(moved_by, _mm256_set1_epi32(255)));
}
template <int BITS>
inline Lanes input_of(Quad quad, int byte) {
    return {input_of(quad.a, byte), input_of(quad.b, byte)};
}
#elif defined(VNX_NEON)
template <int BITS>
inline Lanes input_of(Quad quad, int byte) {
    return each([&](int i) {
        const uint32x4_t words = vshlq_u32(vreinterpretq_u32_u8(quad.v[i]), vdupq_n_s32(-8 * byte));
        return (Floats)vcvtq_f32_u32(vandq_u32(words, vdupq_n_u32(255)));
    });
}
#else
template <int BITS>
inline Lanes input_of(Quad quad, int byte) {
    return each([&](int i) { return __builtin_convertvector((Integers)(((Words)quad.v[i] >> uint32_t(8 * byte)) & 255u), Floats); });
}
#endif

/* The codes of four inputs of sixteen outputs, a byte each, whose upper half may be anything where `input_of` does not look. */
template <int BITS>
inline Quad bytes_of_quad(const char *step, int quad) {
#if defined(VNX_AVX512)
    if constexpr (BITS == 4) return word_of(load_quad(step + quad / 2 * 64), quad % 2 * 4);
#endif
    return quad_of<BITS>(step, quad);
}

/* What a product with a group comes to, from the sums of the even and of the odd inputs; `total` as in RoundedRows. */
ALWAYS_INLINE Lanes group_part(Lanes even, Lanes odd, float total, Lanes scale, const float *low) {
    const Lanes dot = even + odd;
    return low == nullptr ? (dot - all(total)) * scale : dot * scale - all(total) * load(low);
}

/* R rows from `row` on, a whole block, times a half's shards: `sums` 2 * R apart. */
template <int BITS, int R>
__attribute__((noinline)) void half_rows_wide(const LinearCall &call, const HalfView &half, int64_t row, Lanes *sums) {
    const Packed &w = *call.weight;
    const bool is_split = half.piece->group == SPLIT;
    const int64_t first = row * w.steps(), steps = w.shard_steps();
    const float *x = call.rounded->wide + first * STEP, *scales = half.scales, *lows = half.lows;
    const float *total = call.rounded->totals[half.piece_index] + first * (is_split ? 2 : 1);
    for (int64_t shard = 0; shard < w.shards; ++shard, sums += 2 * R) {
        const char *codes = half.at + shard * half.places.end + half.places.codes;
        Lanes found[R];
        UNROLLED for (int r = 0; r < R; ++r)
            found[r] = all(0.0f);
        for (int64_t step = 0; step < steps; ++step, codes += ALIGNMENT * BITS, x += R * STEP) {
            UNROLLED for (int line = 0; line < BITS; ++line)
                __builtin_prefetch(codes + FETCHED_AHEAD + line * 64, 0, 2);
            Lanes even[R], odd[R];
            const auto begin = [&] {
                UNROLLED for (int r = 0; r < R; ++r)
                    even[r] = odd[r] = all(0.0f);
            };
            const auto end = [&] {
                UNROLLED for (int r = 0; r < R; ++r)
                    found[r] = found[r] + group_part(even[r], odd[r], total[r], load(scales), lows);
                total += R, scales += HALF, lows = lows == nullptr ? nullptr : lows + HALF;
            };
            begin();
            UNROLLED for (int quad = 0; quad < QUADS; ++quad) {
                if (quad == QUADS / 2 && is_split) end(), begin();
                const Quad bytes = bytes_of_quad<BITS>(codes, quad);
                UNROLLED for (int byte = 0; byte < 4; byte += 2) {
                    const Lanes one = input_of<BITS>(bytes, byte), other = input_of<BITS>(bytes, byte + 1);
                    UNROLLED for (int r = 0; r < R; ++r) {
                        const float *own = x + r * STEP + 4 * quad + byte;
                        even[r] = fused(all(own[0]), one, even[r]);
                        odd[r] = fused(all(own[1]), other, odd[r]);
                    }
                }
            }
            end();
        }
        UNROLLED for (int r = 0; r < R; ++r)
            sums[r] = found[r];
    }
}

/* Steps of a half as float32: [step][even, odd][16][16]. */
template <int BITS>
__attribute__((noinline)) void widen_steps(const char *codes, int64_t steps, float *to) {
    for (int64_t step = 0; step < steps; ++step, codes += ALIGNMENT * BITS, to += STEP_FLOATS) {
        UNROLLED for (int line = 0; line < BITS; ++line)
            __builtin_prefetch(codes + FETCHED_AHEAD + line * 64, 0, 2);
        UNROLLED for (int quad = 0; quad < QUADS; ++quad) {
            const Quad bytes = bytes_of_quad<BITS>(codes, quad);
            UNROLLED for (int byte = 0; byte < 4; ++byte)
                store(to + (byte % 2 * SPLIT + 2 * quad + byte / 2) * HALF, input_of<BITS>(bytes, byte));
        }
    }
}

/* sums [R]: R rows times `pairs` of inputs, of which x and the weights have the even or the odd ones. */
template <int R>
ALWAYS_INLINE void chain_wide(const float *x, int64_t pairs, const float *weights, Lanes *sums) {
    UNROLLED for (int r = 0; r < R; ++r)
        sums[r] = all(0.0f);
    for (int64_t pair = 0; pair < pairs; pair += 2)
        UNROLLED for (int64_t i = pair; i < pair + 2; ++i) {
            const Lanes own = load(weights + i * HALF);
            UNROLLED for (int r = 0; r < R; ++r)
                sums[r] = fused(all(x[2 * i + r * STEP]), own, sums[r]);
        }
}

/* Numbers of a half's group and the next ones: of the weight [group][16], of R rows [group][R]. */
struct GroupNumbers {
    const float *scales, *lows, *totals;
};

/* sums [R][PANEL] += steps of a half times x [step][R][32], `groups` in each step. */
template <int R>
__attribute__((noinline)) void add_wide_steps(const float *x, int64_t steps, int groups, const float *weights, GroupNumbers numbers, float *sums) {
    const int64_t pairs = SPLIT / groups;
    alignas(64) float held[R * HALF];
    for (int64_t step = 0; step < steps; ++step, x += R * STEP, weights += STEP_FLOATS)
        for (int64_t first = 0; first < SPLIT; first += pairs) {
            Lanes even[R], odd[R];
            chain_wide<R>(x + 2 * first, pairs, weights + first * HALF, even);
            UNROLLED for (int r = 0; r < R; ++r)
                store(held + r * HALF, even[r]);
            keep_order();
            chain_wide<R>(x + 2 * first + 1, pairs, weights + (SPLIT + first) * HALF, odd);
            const Lanes scale = load(numbers.scales);
            UNROLLED for (int r = 0; r < R; ++r) {
                float *at = sums + r * PANEL;
                store(at, load(at) + group_part(load(held + r * HALF), odd[r], numbers.totals[r], scale, numbers.lows));
            }
            keep_order();
            numbers.totals += R, numbers.scales += HALF, numbers.lows = numbers.lows == nullptr ? nullptr : numbers.lows + HALF;
        }
}

template <int... R>
struct WideForms {
    static constexpr decltype(&add_wide_steps<1>) ADD[] = {add_wide_steps<R + 1>...};
};

template <int R>
void half_wide(const LinearCall &call, const HalfView &half, int64_t row, Lanes *sums) {
    switch (half.piece->bits) {
        case 8: return half_rows_wide<8, R>(call, half, row, sums);
        case 6: return half_rows_wide<6, R>(call, half, row, sums);
        case 5: return half_rows_wide<5, R>(call, half, row, sums);
        case 4: return half_rows_wide<4, R>(call, half, row, sums);
        case 3: return half_rows_wide<3, R>(call, half, row, sums);
        default: return half_rows_wide<2, R>(call, half, row, sums);
    }
}

/* R rows times a panel. */
template <int R>
void panel_wide(const LinearCall &call, const HalfView *halves, int64_t row, int64_t panel) {
    ShardSums<R> shards;
    for (int side = 0; side < 2; ++side)
        half_wide<R>(call, halves[side], row, shards.at[0][side]);
    shards.finish(call, row, panel);
}

template <int... R>
struct PanelWideForms {
    static constexpr decltype(&panel_wide<1>) AT[] = {panel_wide<R + 1>...};
};

inline void widen_steps(int64_t bits, const char *codes, int64_t steps, float *to) {
    switch (bits) {
        case 8: return widen_steps<8>(codes, steps, to);
        case 6: return widen_steps<6>(codes, steps, to);
        case 5: return widen_steps<5>(codes, steps, to);
        case 4: return widen_steps<4>(codes, steps, to);
        case 3: return widen_steps<3>(codes, steps, to);
        default: return widen_steps<2>(codes, steps, to);
    }
}

/* Rows row0 to row1 times a half: sums [shard][row][PANEL]. `weights`: room for WIDE_STEPS. */
inline void add_half(const LinearCall &call, const HalfView &half, int64_t row0, int64_t row1, float *weights, float *sums) {
    const Packed &w = *call.weight;
    const RoundedRows &from = *call.rounded;
    const int groups = half.piece->group == SPLIT ? 2 : 1;
    for (int64_t shard = 0; shard < w.shards; ++shard, sums += (row1 - row0) * PANEL)
        for (int64_t step = 0, steps = w.shard_steps(), count; step < steps; step += count) {
            count = std::min(WIDE_STEPS, steps - step);
            const char *codes = half.at + shard * half.places.end + half.places.codes;
            widen_steps(half.piece->bits, codes + step * ALIGNMENT * half.piece->bits, count, weights);
            const int64_t before = shard * steps + step, number = before * groups * HALF;
            for (int64_t row = row0; row < row1; row += WIDE_ROWS) {
                const int64_t rows = std::min<int64_t>(WIDE_ROWS, row1 - row), place = row * w.steps() + before * rows;
                const GroupNumbers numbers{half.scales + number, half.lows == nullptr ? nullptr : half.lows + number,
                                           from.totals[half.piece_index] + place * groups};
                FormsUpTo<WideForms, WIDE_ROWS>::ADD[rows - 1](from.wide + place * STEP, count, groups, weights, numbers,
                                                              sums + (row - row0) * PANEL);
            }
        }
}

void linear_codes_wide(const LinearCall &call, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1) {
    const Packed &w = *call.weight;
    const int64_t numbers = w.steps() * 4 * HALF, rows = row1 - row0, size = w.shards * rows * PANEL; /* numbers: as in linear_codes */
    float *scales = static_cast<float *>(scratch(SLOT_PARTIALS, size_t(2 * numbers + WIDE_STEPS * STEP_FLOATS + size) * 4));
    float *weights = scales + 2 * numbers, *sums = weights + WIDE_STEPS * STEP_FLOATS;
    PieceView pieces[PIECES_MAX];
    view_pieces(w, pieces);
    for (int64_t panel = panel0; panel < panel1; ++panel) {
        const HalfView halves[] = {view_of(w, pieces, 2 * panel, scales), view_of(w, pieces, 2 * panel + 1, scales + numbers)};
        for (const HalfView &half : halves)
            widen_scales(half);
        if (rows <= WIDE_FEW) {
            FormsUpTo<PanelWideForms, WIDE_FEW>::AT[rows - 1](call, halves, row0, panel);
            continue;
        }
        memset(sums, 0, size_t(size) * 4);
        for (int side = 0; side < 2; ++side)
            add_half(call, halves[side], row0, row1, weights, sums + side * HALF);
        finish_rows(call, row0, rows, panel, sums);
    }
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
