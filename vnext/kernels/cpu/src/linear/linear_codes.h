/* Products with weights of few bits: the order of vnext/kernels/codes.py. The rows of a block meet a half of a panel at a time, whose
   codes are unpacked in registers each time, its scales into scratch once, or in registers for few rows. */
#pragma once

#include <type_traits>
#include <utility>

#include "linear/codes_dots.h"
#include "team.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

/* Bytes: the processor's own reading ahead takes the scales between two runs of codes for an end (20.8 GB/s against 17.1 on Zen 4 with 4
   bits). One row in 8 bits, which are read the fastest, does better without (21.6 against 18.2), except where it reads its scales
   as it goes. */
constexpr int64_t FETCHED_AHEAD = 24576;

/* So few rows of a block read scales where they lie: measured on Zen 1, one row is 14 % faster in 4 bits, 23 % in 8, two are 4 %. */
#if defined(VNX_AVX2)
constexpr int ROWS_READING = 2;
#else
constexpr int ROWS_READING = 0;
#endif

/* ---- rows -------------------------------------------------------------------------------------------------------------------- */

/* 32 numbers of a row, or as many as there are with zeros behind them. */
template <typename T>
inline void load_group(const T *x, int64_t count, float *to) {
    store(to, count > 0 ? load_part(x, count) : all(0.0f));
    store(to + 16, count > 16 ? load_part(x + 16, count - 16) : all(0.0f));
}

/* Codes of such a group and its scale: NaN, with codes of 0, where a number is not finite. */
inline float round_group(const float *x, int8_t *codes) {
    constexpr int32_t INFINITE = 0x7f800000;
    constexpr float SMALLEST = 0x1p-100f;
    int32_t words[STEP], top = 0;
    memcpy(words, x, sizeof words);
    for (int i = 0; i < STEP; ++i) {
        const int32_t size = words[i] & 0x7fffffff;
        top = size > top ? size : top;
    }
    float largest;
    memcpy(&largest, &top, 4);
    if (top >= INFINITE || largest < SMALLEST) {
        memset(codes, 0, STEP);
        return top >= INFINITE ? __builtin_nanf("") : 0.0f;
    }
    const Lanes turned = all(127.0f / largest);
    store_codes(codes, nearest(load(x) * turned));
    store_codes(codes + 16, nearest(load(x + 16) * turned));
    return largest / 127.0f;
}

/* Bytes are summed as whole numbers without a sign, which their distances from -128 are. */
inline int32_t sum_of(const int8_t *codes) {
#if defined(VNX_AVX512) || defined(VNX_AVX2)
    const __m128i risen = _mm_xor_si128(_mm_loadu_si128((const __m128i *)codes), _mm_set1_epi8(-128));
    const __m128i sums = _mm_sad_epu8(risen, _mm_setzero_si128());
    return _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_unpackhi_epi64(sums, sums))) - 128 * SPLIT;
#elif defined(VNX_NEON)
    return vaddlvq_s8(vld1q_s8(codes));
#else
    int32_t sum = 0;
    for (int i = 0; i < SPLIT; ++i)
        sum += codes[i];
    return sum;
#endif
}

/* What a piece asks of each step of a row, or of each half of a step. */
struct PieceSums {
    int32_t start;
    bool is_split;
    int32_t *starts;
    float *totals;

    void note(int64_t at, int32_t sum) const {
        starts[at] = start * sum;
        totals[at] = float(sum);
    }
};

template <typename T>
inline void round_rows_of(const LinearCall &call, int64_t first, int64_t last) {
    const Packed &w = *call.weight;
    const RoundedRows &to = *call.rounded;
    const int64_t rows = last - first, steps = w.steps(), from = first * steps;
    PieceSums pieces[PIECES_MAX];
    for (int i = 0; i < w.piece_count; ++i) {
        const CodesPart &piece = pieces_of(w)[i];
        const int32_t start = (piece.lows.kind < 0 ? -int32_t(piece.zero) : 0) + (piece.bits == 8 ? OFFSET : 0);
        const bool is_split = piece.group == SPLIT;
        const int64_t number = is_split ? 2 * from : from;
        pieces[i] = {start, is_split, to.starts[i] + number, to.totals[i] + number};
    }
    for (int64_t r = 0; r < rows; ++r) {
        const T *x = static_cast<const T *>(call.x) + (first + r) * call.x_stride;
        for (int64_t step = 0, shard = 0; shard < w.shards; ++shard, x += w.shard_in())
            for (int64_t inside = 0; inside < w.shard_in(); inside += STEP, ++step) {
                alignas(64) float group[STEP];
                load_group(x + inside, w.shard_in() - inside, group);
                const int64_t at = from + step * rows + r;
                int8_t *codes = to.codes + at * STEP;
                to.scales[at] = round_group(group, codes);
                const int32_t front = sum_of(codes), back = sum_of(codes + SPLIT);
                for (int i = 0; i < w.piece_count; ++i) {
                    const PieceSums &piece = pieces[i];
                    if (!piece.is_split) {
                        piece.note(step * rows + r, front + back);
                        continue;
                    }
                    piece.note(2 * step * rows + r, front);
                    piece.note((2 * step + 1) * rows + r, back);
                }
            }
    }
}

void round_rows(const LinearCall &call, int64_t first, int64_t last) {
    if (call.weight->x_kind == FLOAT32) return round_rows_of<float>(call, first, last);
    round_rows_of<bf16>(call, first, last);
}

/* ---- weights ----------------------------------------------------------------------------------------------------------------- */

template <int BITS>
inline Quad quad_of(const char *step, int quad) {
    constexpr int LOW = low_bits(BITS), HIGH = high_bits(BITS);
    const Quad low = load_quad(step + quad * LOW / 8 * 64);
    if constexpr (LOW == 8) {
        return low;
    } else {
        const Quad code = moved(low, quad * LOW % 8, (1 << LOW) - 1);
        if constexpr (HIGH == 0) return code;
        else {
            const Quad high = load_quad(step + 64 * LOW + quad * HIGH / 8 * 64);
            return joined(code, moved(high, quad * HIGH % 8 - LOW, ((1 << HIGH) - 1) << LOW));
        }
    }
}

/* How many numbers of a piece share one, which that many inputs do. */
inline int64_t repeats_of(const Packed &w, const CodesPart &piece, int64_t inputs) {
    const int64_t shared = shared_inputs(w, inputs);
    return shared == w.shard_in() ? 2 * w.shard_steps() : shared / (piece.group == SPLIT ? SPLIT : STEP);
}

ALWAYS_INLINE Lanes load_numbers(const char *from, int64_t kind) {
    if (kind == FLOAT16) return load_numbers<FLOAT16>(from);
    if (kind == UINT8) return load_numbers<UINT8>(from);
    if (kind == INT8) return load_numbers<INT8>(from);
    return kind == BFLOAT16 ? load_numbers<BFLOAT16>(from) : load_numbers<FLOAT32>(from);
}

/* What all halves of a piece share, for which places and steps are divided once: how many numbers a shard has, and of a scale's form
   how many of them are one, and how many of those have one span, 0 where they have none. */
struct NumbersView {
    ScaleForm form;
    int64_t repeats, span_repeats;
};
struct PieceView {
    const CodesPart *piece;
    int64_t piece_index, shards, steps, numbers;
    HalfPlaces places;
    NumbersView scale_numbers, low_numbers;
};

inline void view_pieces(const Packed &w, PieceView *views) {
    for (int64_t i = 0; i < w.piece_count; ++i) {
        const CodesPart &piece = pieces_of(w)[i];
        const int64_t steps = w.shard_steps(), repeats = repeats_of(w, piece, piece.group);
        const auto numbers = [&](const ScaleForm &form) -> NumbersView {
            return {form, repeats, form.span == 0 ? 0 : repeats_of(w, piece, form.span) / repeats};
        };
        views[i] = {&piece, i, w.shards, steps, steps * (piece.group == SPLIT ? 2 : 1), places_of(w, piece), numbers(piece.scales), numbers(piece.lows)};
    }
}

/* Half a panel: where it lies, and room for its scales and lows as float32 [shard][number][16], null where it has none. */
struct HalfView : PieceView {
    const char *at;
    float *scales, *lows;

    const char *shard_at(int64_t shard) const { return at + shard * places.end; }
};

inline HalfView view_of(const Packed &w, const PieceView *pieces, int64_t half, float *scales) {
    const HalfPanel &found = halves_of(w)[half];
    const PieceView &own = pieces[found.piece];
    return {own, reinterpret_cast<const char *>(&w) + found.at, scales,
            own.piece->lows.kind < 0 ? nullptr : scales + own.shards * own.numbers * HALF};
}

/* The scales of a half's shard, or the lows: the next number of each output, for each step or for each half of one. */
template <int KIND>
struct ReadNumbers {
    const char *parts, *spans;
    int64_t span_kind, repeats, span_repeats, left, spans_left;
    Lanes span, own;

    ReadNumbers(const NumbersView &numbers, const char *parts_at, const char *spans_at)
        : parts(parts_at), spans(spans_at), span_kind(numbers.form.span_kind), repeats(numbers.repeats), span_repeats(numbers.span_repeats),
          left(1), spans_left(1) {}

    ALWAYS_INLINE Lanes next() {
        if (--left > 0) return own;
        left = repeats;
        own = load_numbers<KIND>(parts);
        __builtin_prefetch(parts + FETCHED_AHEAD, 0, 2);
        parts += HALF * bytes_of(KIND);
        if (span_repeats == 0) return own;
        if (--spans_left == 0) {
            span = load_numbers(spans, span_kind);
            spans += HALF * bytes_of(span_kind), spans_left = span_repeats;
        }
        return own = own * span;
    }
};

/* The same where many rows have widened them: float32 [number][16]. */
struct WidenedNumbers {
    const float *at;

    ALWAYS_INLINE Lanes next() { return load(std::exchange(at, at + HALF)); }
};

template <int KIND>
inline ReadNumbers<KIND> read_scales(const HalfView &half, int64_t shard) {
    const char *at = half.shard_at(shard);
    return {half.scale_numbers, at, at + half.places.scale_spans};
}
template <int KIND>
inline ReadNumbers<KIND> read_lows(const HalfView &half, int64_t shard) {
    const char *at = half.shard_at(shard);
    return {half.low_numbers, at + half.places.lows, at + half.places.low_spans};
}

/* Call with the kind as a type. */
template <typename F>
inline void with_kind(int64_t kind, const F &call) {
    switch (kind) {
        case FLOAT32: return call(std::integral_constant<int, FLOAT32>());
        case BFLOAT16: return call(std::integral_constant<int, BFLOAT16>());
        case FLOAT16: return call(std::integral_constant<int, FLOAT16>());
        case UINT8: return call(std::integral_constant<int, UINT8>());
        default: return call(std::integral_constant<int, INT8>());
    }
}

template <int KIND>
inline void widen(ReadNumbers<KIND> numbers, int64_t count, float *to) {
    for (int64_t i = 0; i < count; ++i)
        store(to + i * HALF, numbers.next());
}

inline void widen_scales(const HalfView &half) {
    for (int64_t shard = 0; shard < half.shards; ++shard) {
        const int64_t to = shard * half.numbers * HALF;
        with_kind(half.piece->scales.kind, [&](auto kind) { widen(read_scales<kind>(half, shard), half.numbers, half.scales + to); });
        if (half.lows == nullptr) continue;
        with_kind(half.piece->lows.kind, [&](auto kind) { widen(read_lows<kind>(half, shard), half.numbers, half.lows + to); });
    }
}

/* What a row's whole numbers come to: R rows of a block, an output a lane. */
template <int BITS, int R, typename Numbers>
struct BlockSums {
    const int32_t *start;
    const float *scale, *total;
    bool has_lows;
    Numbers scales, lows;
    Dots dots[R];
    Lanes found[R];

    ALWAYS_INLINE void begin() {
        UNROLLED for (int r = 0; r < R; ++r)
            dots[r] = dots_from(BITS <= WORD_BITS ? 0 : start[r]);
        start += R;
    }
    /* Half a step's products, in words for as long as these hold them: those of a step, or fewer, of which pairs are then added. */
    ALWAYS_INLINE void add_in_words(const char *codes, int side, const int8_t *x) {
        const auto add = [&](int quad, Dots(&to)[R]) { add_words(quad_of<BITS>(codes, side * 4 + quad), x + side * SPLIT + 4 * quad, to); };
        constexpr int FIT = word_quads(BITS) < 4 ? word_quads(BITS) : 4;
        UNROLLED for (int i = 0; i < 4; i += FIT) {
            Dots words[R];
            UNROLLED for (int r = 0; r < R; ++r)
                words[r] = BITS <= WORD_BITS ? dots[r] : dots_from(0);
            UNROLLED for (int quad = i; quad < i + FIT; ++quad)
                add(quad, words);
            UNROLLED for (int r = 0; r < R; ++r)
                dots[r] = BITS <= WORD_BITS ? words[r] : with_pairs(dots[r], words[r]);
        }
    }
    ALWAYS_INLINE Lanes floats(int r) const {
        if constexpr (BITS <= WORD_BITS) return floats_of_words(dots[r], start[r - R]);
        else return floats_of(dots[r]);
    }
    ALWAYS_INLINE void end() {
        const Lanes own = scales.next();
        if (!has_lows) {
            UNROLLED for (int r = 0; r < R; ++r)
                found[r] = found[r] + all(scale[r]) * (floats(r) * own);
        } else {
            const Lanes low = lows.next();
            UNROLLED for (int r = 0; r < R; ++r)
                found[r] = found[r] + all(scale[r]) * (floats(r) * own - all(total[r]) * low);
            total += R;
        }
    }
};

/* The scales and lows of a half's shard, and whether they may change within a step. */
struct WidenedForm {
    static constexpr bool MAY_SPLIT = true;
    using Numbers = WidenedNumbers;
    static Numbers scales(const HalfView &half, int64_t shard) { return {half.scales + shard * half.numbers * HALF}; }
    static Numbers lows(const HalfView &half, int64_t shard) {
        return {half.lows == nullptr ? nullptr : half.lows + shard * half.numbers * HALF};
    }
};
template <int KIND>
struct ReadForm {
    static constexpr bool MAY_SPLIT = false;
    using Numbers = ReadNumbers<KIND>;
    static Numbers scales(const HalfView &half, int64_t shard) { return read_scales<KIND>(half, shard); }
    static Numbers lows(const HalfView &half, int64_t shard) { return read_lows<KIND>(half, shard); }
};

/* R rows from `row` on, a whole block, times a half's shards: `sums` 2 * R apart. */
template <int BITS, int R, typename Form>
__attribute__((noinline)) void half_rows(const LinearCall &call, const HalfView &half, int64_t row, Lanes *sums) {
    const RoundedRows &from = *call.rounded;
    const bool is_split = Form::MAY_SPLIT && half.piece->group == SPLIT;
    const int64_t steps = half.steps, first = row * half.shards * steps, first_number = row * half.shards * half.numbers;
    const int8_t *x = from.codes + first * STEP;
    for (int64_t shard = 0; shard < half.shards; ++shard, sums += 2 * R) {
        const int64_t number = first_number + shard * half.numbers * R;
        BlockSums<BITS, R, typename Form::Numbers> block{
            from.starts[half.piece_index] + number, from.scales + first + shard * steps * R, from.totals[half.piece_index] + number,
            half.lows != nullptr, Form::scales(half, shard), Form::lows(half, shard), {}, {}};
        const char *codes = half.shard_at(shard) + half.places.codes;
        UNROLLED for (int r = 0; r < R; ++r)
            block.found[r] = all(0.0f);
        for (int64_t step = 0; step < steps; ++step, codes += ALIGNMENT * BITS, x += R * STEP, block.scale += R) {
            UNROLLED for (int line = 0; (BITS < 8 || R > 1 || R <= ROWS_READING) && line < BITS; ++line)
                __builtin_prefetch(codes + FETCHED_AHEAD + line * 64, 0, 2);
            block.begin();
            UNROLLED for (int side = 0; side < 2; ++side) {
                if constexpr (word_quads(BITS) > 0) {
                    if (side == 1 && is_split) block.end(), block.begin();
                    block.add_in_words(codes, side, x);
                } else {
                    Quad quads[4];
                    UNROLLED for (int i = 0; i < 4; ++i)
                        quads[i] = quad_of<BITS>(codes, side * 4 + i);
                    if (side == 1 && is_split) block.end(), block.begin();
                    add_quads<BITS, R>(quads, x + side * SPLIT, block.dots);
                }
            }
            block.end();
        }
        UNROLLED for (int r = 0; r < R; ++r)
            sums[r] = block.found[r];
    }
}

template <int BITS, int R>
inline void half_rows(const LinearCall &call, const HalfView &half, bool is_first, int64_t row, Lanes *sums) {
    const int64_t kind = half.piece->scales.kind;
    if constexpr (R <= ROWS_READING)
        if (half.piece->group != SPLIT && (half.lows == nullptr || half.piece->lows.kind == kind))
            return with_kind(kind, [&](auto own) { half_rows<BITS, R, ReadForm<own>>(call, half, row, sums); });
    if (is_first) widen_scales(half);
    half_rows<BITS, R, WidenedForm>(call, half, row, sums);
}

/* R rows times a panel. */
template <int R>
void panel_rows(const LinearCall &call, const HalfView *halves, bool is_first, int64_t row, int64_t panel) {
    ShardSums<R> shards;
    for (int side = 0; side < 2; ++side) {
        const HalfView &half = halves[side];
        Lanes *sums = shards.at[0][side];
        switch (half.piece->bits) {
            case 8: half_rows<8, R>(call, half, is_first, row, sums); break;
            case 6: half_rows<6, R>(call, half, is_first, row, sums); break;
            case 5: half_rows<5, R>(call, half, is_first, row, sums); break;
            case 4: half_rows<4, R>(call, half, is_first, row, sums); break;
            case 3: half_rows<3, R>(call, half, is_first, row, sums); break;
            default: half_rows<2, R>(call, half, is_first, row, sums);
        }
    }
    shards.finish(call, row, panel);
}

template <int... R>
struct PanelForms {
    static constexpr decltype(&panel_rows<1>) AT[] = {panel_rows<R + 1>...};
};

void linear_codes(const LinearCall &call, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1) {
    const Packed &w = *call.weight;
    const int64_t numbers = w.steps() * 4 * HALF; /* at most, of scales and lows */
    float *scales = static_cast<float *>(scratch(SLOT_PARTIALS, size_t(2 * numbers) * 4));
    PieceView pieces[PIECES_MAX];
    view_pieces(w, pieces);
    for (int64_t panel = panel0; panel < panel1; ++panel) {
        const HalfView halves[] = {view_of(w, pieces, 2 * panel, scales), view_of(w, pieces, 2 * panel + 1, scales + numbers)};
        for (int64_t row = row0; row < row1; row += CODE_ROWS) {
            const int64_t count = row1 - row < CODE_ROWS ? row1 - row : CODE_ROWS;
            FormsUpTo<PanelForms, CODE_ROWS>::AT[count - 1](call, halves, row == row0, row, panel);
        }
    }
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
