/* Products with weights of few bits: the order of vnext/kernels/codes.py. A half of a panel at a time meets the rows of a block: few rows
   unpack codes in registers, for more a whole half is unpacked into scratch first. */
#pragma once

#include "linear/codes_dots.h"
#include "rows/codes_lanes.h"
#include "team.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

constexpr int DIRECT_ROWS = 4;
constexpr int64_t UNPACKED_STEP = STEP * HALF;
constexpr int64_t FETCHED_AHEAD = 4096;  // bytes

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

inline int32_t sum_of(const int8_t *codes) {
    int32_t sum = 0;
    for (int i = 0; i < SPLIT; ++i)
        sum += codes[i];
    return sum;
}

/* What the pieces ask of a step of a row: `at` counts numbers of whole steps before it, `rows` apart. */
inline void note_sums(const LinearCall &call, int64_t step_at, int64_t rows, int64_t r, const int8_t *codes) {
    const int32_t front = sum_of(codes), back = sum_of(codes + SPLIT);
    const CodesPart *piece = pieces_of(*call.weight);
    for (int i = 0; i < call.weight->piece_count; ++i, ++piece) {
        const int32_t start = (piece->lows.kind < 0 ? -int32_t(piece->zero) : 0) + (piece->bits == 8 ? OFFSET : 0);
        const int64_t numbers = piece->group == SPLIT ? 2 : 1, at = step_at * numbers + r;
        for (int64_t n = 0; n < numbers; ++n) {
            const int32_t sum = numbers == 1 ? front + back : n == 0 ? front : back;
            call.rounded->starts[i][at + n * rows] = start * sum;
            call.rounded->totals[i][at + n * rows] = float(sum);
        }
    }
}

template <typename T>
inline void round_rows_of(const LinearCall &call, int64_t first, int64_t last) {
    const Packed &w = *call.weight;
    const RoundedRows &to = *call.rounded;
    const int64_t rows = last - first, steps = w.steps();
    for (int64_t row = first; row < last; ++row) {
        const T *x = static_cast<const T *>(call.x) + row * call.x_stride;
        for (int64_t step = 0; step < steps; ++step) {
            const int64_t inside = step % w.shard_steps() * STEP, at = first * steps + step * rows + row - first;
            alignas(64) float group[STEP];
            load_group(x + step / w.shard_steps() * w.shard_in() + inside, w.shard_in() - inside, group);
            to.scales[at] = round_group(group, to.codes + at * STEP);
            note_sums(call, first * steps + step * rows, rows, row - first, to.codes + at * STEP);
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

template <int BITS>
void unpack(const char *from, int64_t steps, char *to) {
    for (int64_t step = 0; step < steps; ++step, from += ALIGNMENT * BITS, to += UNPACKED_STEP)
        UNROLLED for (int quad = 0; quad < QUADS; ++quad)
            store_quad(to + 64 * quad, quad_of<BITS>(from, quad));
}

/* The scales or lows of a half's shard, one for each number of a piece. */
class Numbers {
  public:
    Numbers() = default;
    Numbers(const Packed &w, const CodesPart &piece, const ScaleForm &form, const char *parts, const char *spans)
        : parts_(parts), spans_(spans), kind_(form.kind), span_kind_(form.span_kind),
          repeats_(shared_inputs(w, piece.group) / (piece.group == SPLIT ? SPLIT : STEP)),
          parts_in_span_(form.span == 0 ? 0 : shared_inputs(w, form.span) / shared_inputs(w, piece.group)) {
        if (shared_inputs(w, piece.group) == w.shard_in()) repeats_ = 2 * w.shard_steps();
        if (form.span > 0 && shared_inputs(w, form.span) == w.shard_in()) parts_in_span_ = 2 * w.shard_steps();
    }
    ALWAYS_INLINE Lanes next() {
        if (left_ == 0) {
            now_ = load_numbers(parts_, kind_);
            parts_ += HALF * bytes_of(kind_);
            if (parts_in_span_ > 0) now_ = now_ * span();
            left_ = repeats_;
        }
        --left_;
        return now_;
    }

  private:
    const char *parts_ = nullptr, *spans_ = nullptr;
    int64_t kind_ = 0, span_kind_ = 0, repeats_ = 0, parts_in_span_ = 0, left_ = 0, left_in_span_ = 0;
    Lanes now_, span_;

    ALWAYS_INLINE Lanes span() {
        if (left_in_span_ == 0) {
            span_ = load_numbers(spans_, span_kind_);
            spans_ += HALF * bytes_of(span_kind_);
            left_in_span_ = parts_in_span_;
        }
        --left_in_span_;
        return span_;
    }
};

/* Half a panel: where it lies, and its codes unpacked, or null. */
struct HalfView {
    const CodesPart *piece;
    int64_t piece_index;
    HalfPlaces places;
    const char *at, *unpacked;
};

inline HalfView view_of(const Packed &w, int64_t half) {
    const HalfPanel &found = halves_of(w)[half];
    const CodesPart *piece = pieces_of(w) + found.piece;
    return {piece, found.piece, places_of(w, *piece), reinterpret_cast<const char *>(&w) + found.at, nullptr};
}

/* R rows from `row` on, a whole block, times a half's shards: `sums` 2 * R apart. */
template <int BITS, int R, bool UNPACKED>
__attribute__((noinline)) void half_rows(const LinearCall &call, const HalfView &half, int64_t row, Lanes *sums) {
    const Packed &w = *call.weight;
    const CodesPart &piece = *half.piece;
    const RoundedRows &from = *call.rounded;
    const bool is_split = piece.group == SPLIT, has_lows = piece.lows.kind >= 0;
    const int64_t first = row * w.steps(), steps = w.shard_steps(), first_number = first * (is_split ? 2 : 1);
    const int8_t *x = from.codes + first * STEP;
    const float *scale = from.scales + first, *total = from.totals[half.piece_index] + first_number;
    const int32_t *start = from.starts[half.piece_index] + first_number;
    for (int64_t shard = 0; shard < w.shards; ++shard, sums += 2 * R) {
        const char *at = half.at + shard * half.places.end, *codes = UNPACKED ? half.unpacked + shard * steps * UNPACKED_STEP : at;
        Numbers scales(w, piece, piece.scales, at + half.places.scales, at + half.places.scale_spans), lows;
        if (has_lows) lows = Numbers(w, piece, piece.lows, at + half.places.lows, at + half.places.low_spans);
        Dots dots[R];
        Lanes found[R];
        UNROLLED for (int r = 0; r < R; ++r)
            found[r] = all(0.0f);
        const auto begin = [&]() {
            UNROLLED for (int r = 0; r < R; ++r)
                dots[r] = dots_from(start[r]);
            start += R;
        };
        const auto end = [&]() {
            const Lanes own = scales.next(), low = has_lows ? lows.next() : own;
            UNROLLED for (int r = 0; r < R; ++r) {
                Lanes part = floats_of(dots[r]) * own;
                if (has_lows) part = part - all(total[r]) * low;
                found[r] = found[r] + all(scale[r]) * part;
            }
            total += R;
        };
        constexpr int64_t STEP_BYTES = UNPACKED ? UNPACKED_STEP : ALIGNMENT * BITS;
        for (int64_t step = 0; step < steps; ++step, codes += STEP_BYTES, x += R * STEP, scale += R) {
            if (!UNPACKED)
                for (int64_t line = 0; line < STEP_BYTES; line += 64)
                    __builtin_prefetch(codes + FETCHED_AHEAD + line, 0, 3);
            begin();
            UNROLLED for (int side = 0; side < 2; ++side) {
                Quad quads[4];
                UNROLLED for (int i = 0; i < 4; ++i)
                    quads[i] = UNPACKED ? load_quad(codes + (side * 4 + i) * 64) : quad_of<BITS>(codes, side * 4 + i);
                if (side == 1 && is_split) end(), begin();
                add_quads<BITS, R>(quads, x + side * SPLIT, dots);
            }
            end();
        }
        UNROLLED for (int r = 0; r < R; ++r)
            sums[r] = found[r];
    }
}

template <int BITS, int R>
inline void half_rows_of(const LinearCall &call, const HalfView &half, int64_t row, Lanes *sums) {
    if (half.unpacked != nullptr) return half_rows<unpacked_bits(BITS), R, true>(call, half, row, sums);
    if constexpr (R <= DIRECT_ROWS) half_rows<BITS, R, false>(call, half, row, sums);
}

/* R rows times a panel. */
template <int R>
void panel_rows(const LinearCall &call, const HalfView *halves, int64_t row, int64_t panel) {
    ShardSums<R> shards;
    for (int side = 0; side < 2; ++side) {
        Lanes *sums = shards.at[0][side];
        switch (halves[side].piece->bits) {
            case 8: half_rows<8, R, false>(call, halves[side], row, sums); break;
            case 6: half_rows_of<6, R>(call, halves[side], row, sums); break;
            case 5: half_rows_of<5, R>(call, halves[side], row, sums); break;
            case 4: half_rows_of<4, R>(call, halves[side], row, sums); break;
            case 3: half_rows_of<3, R>(call, halves[side], row, sums); break;
            default: half_rows_of<2, R>(call, halves[side], row, sums);
        }
    }
    shards.finish(call, row, panel);
}

template <int... R>
struct PanelForms {
    static constexpr decltype(&panel_rows<1>) AT[] = {panel_rows<R + 1>...};
};

/* The codes of a half's shards, one behind the other, in `to`. */
inline void unpack_half(const Packed &w, HalfView &half, char *to) {
    half.unpacked = to;
    for (int64_t shard = 0; shard < w.shards; ++shard, to += w.shard_steps() * UNPACKED_STEP) {
        const char *from = half.at + shard * half.places.end;
        switch (half.piece->bits) {
            case 6: unpack<6>(from, w.shard_steps(), to); break;
            case 5: unpack<5>(from, w.shard_steps(), to); break;
            case 4: unpack<4>(from, w.shard_steps(), to); break;
            case 3: unpack<3>(from, w.shard_steps(), to); break;
            case 2: unpack<2>(from, w.shard_steps(), to); break;
        }
    }
}

void linear_codes(const LinearCall &call, int64_t row0, int64_t row1, int64_t panel0, int64_t panel1) {
    const Packed &w = *call.weight;
    const int64_t half_bytes = w.steps() * UNPACKED_STEP;
    const bool is_unpacked = row1 - row0 > DIRECT_ROWS;
    char *unpacked = is_unpacked ? static_cast<char *>(scratch(SLOT_TILES, size_t(2 * half_bytes))) : nullptr;
    for (int64_t panel = panel0; panel < panel1; ++panel) {
        HalfView halves[] = {view_of(w, 2 * panel), view_of(w, 2 * panel + 1)};
        for (int side = 0; side < 2; ++side)
            if (is_unpacked && halves[side].piece->bits != 8) unpack_half(w, halves[side], unpacked + side * half_bytes);
        for (int64_t row = row0; row < row1; row += CODE_ROWS) {
            const int64_t count = row1 - row < CODE_ROWS ? row1 - row : CODE_ROWS;
            FormsUpTo<PanelForms, CODE_ROWS>::AT[count - 1](call, halves, row, panel);
        }
    }
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
