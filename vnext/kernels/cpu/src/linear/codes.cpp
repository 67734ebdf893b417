#include "linear/codes.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "linear/blocks.h"
#include "linear/linear_turned.h"
#include "team.h"

namespace vnx {
namespace {

constexpr int64_t STEP_CODES = STEP * HALF;

/* Where the parts begin, and which rows of them share a half. */
struct Halves {
    Packed p{};
    const int64_t *types = nullptr;  // BlockType of each part
    std::vector<HalfPanel> at;
    std::vector<int64_t> first;  // row of each part
};

bool has_row(const Packed &p, int64_t half) { return row_at(p, half / 2, half % 2 * HALF) >= 0; }

int64_t part_of(const Halves &halves, int64_t row) {
    int64_t part = int64_t(halves.first.size()) - 1;
    while (part > 0 && halves.first[size_t(part)] > row)
        --part;
    return part;
}

Halves layout(const CodesPart *parts, int64_t count, int64_t in, int x_kind, int gate, int shards) {
    Halves found;
    Packed &p = found.p;
    for (int64_t i = 0; i < count; p.out += parts[i++].rows)
        found.first.push_back(p.out);
    p.magic = PACKED_MAGIC;
    p.kind = CODES, p.gate = gate, p.shards = shards, p.x_kind = x_kind;
    p.in = in;
    p.panel_count = panels_of(p.out, gate);
    p.piece_count = int32_t(count);
    p.bias_at = round_up(sizeof(Packed), ALIGNMENT);
    p.pieces_at = p.bias_at + p.panel_count * PANEL * 4;
    p.halves_at = p.pieces_at + count * int64_t(sizeof(CodesPart));
    p.panels_at = round_up(p.halves_at + (2 * p.panel_count + 1) * int64_t(sizeof(HalfPanel)), 4096);
    int64_t end = p.panels_at;
    for (int64_t half = 0; half < 2 * p.panel_count; ++half) {
        const int64_t piece = has_row(p, half) ? part_of(found, row_at(p, half / 2, half % 2 * HALF)) : found.at.back().piece;
        found.at.push_back({end, piece});
        end += shards * places_of(p, parts[piece]).end;
    }
    found.at.push_back({end, 0});
    p.total_bytes = end;
    p.panel_bytes = (end - p.panels_at) / p.panel_count;
    return found;
}

/* A step's codes [quad][16][4] as fields of WIDTH bits, of which FROM is the lowest bit in a code. Eight codes at a time. */
template <int WIDTH, int FROM>
char *squeeze(const uint8_t (*quads)[64], char *to) {
    constexpr int FIELDS = 8 / WIDTH;
    constexpr uint64_t MASK = uint64_t(0x0101010101010101) * ((1 << WIDTH) - 1);
    for (int vector = 0; vector < WIDTH; ++vector, to += 64)
        for (int b = 0; b < 64; b += 8) {
            uint64_t bytes = 0, codes;
            for (int i = 0; i < FIELDS; ++i) {
                std::memcpy(&codes, &quads[vector * FIELDS + i][b], 8);
                bytes |= (codes >> FROM & MASK) << (i * WIDTH);
            }
            std::memcpy(to + b, &bytes, 8);
        }
    return to;
}

/* Row pointers of a half; null where it is padding. */
void pack_step(const char *const *rows, int64_t inputs, int64_t bits, char *to) {
    uint8_t quads[QUADS][64];
    char ends[HALF][STEP];
    const char *whole[HALF];
    for (int i = 0; i < HALF; ++i) {
        whole[i] = rows[i] == nullptr ? ends[i] : rows[i];
        if (rows[i] != nullptr && inputs == STEP) continue;
        std::memset(ends[i], 0, STEP);
        if (rows[i] != nullptr) std::memcpy(ends[i], rows[i], size_t(inputs));
        whole[i] = ends[i];
    }
    for (int64_t word = 0; word < QUADS; word += 4)
        for (int64_t row = 0; row < HALF; row += 4)
            turn_four(whole + row, word * 4, reinterpret_cast<char *>(quads[word]) + row * 4, 64);
    switch (bits) {
        case 8: squeeze<8, 0>(quads, to); break;
        case 6: squeeze<2, 4>(quads, squeeze<4, 0>(quads, to)); break;
        case 5: squeeze<1, 4>(quads, squeeze<4, 0>(quads, to)); break;
        case 4: squeeze<4, 0>(quads, to); break;
        case 3: squeeze<1, 2>(quads, squeeze<2, 0>(quads, to)); break;
        default: squeeze<2, 0>(quads, to);
    }
}

/* Numbers [rows][row_numbers] of a part, from number `first` of its row on, to [number][16]. */
void pack_numbers(const void *from, int64_t kind, int64_t row_numbers, int64_t first, int64_t count, int64_t row, int64_t place, char *to) {
    const int64_t size = bytes_of(kind);
    const char *at = static_cast<const char *>(from) + (row * row_numbers + first) * size;
    for (int64_t i = 0; i < count; ++i)
        std::memcpy(to + (i * HALF + place) * size, at + i * size, size_t(size));
}

void pack_scales(const Packed &p, const CodesPart &part, const ScaleForm &form, int64_t shard, int64_t row, int64_t place, char *parts,
                 char *spans) {
    if (form.kind < 0) return;
    const auto pack = [&](const void *from, int64_t kind, int64_t inputs, char *to) {
        const int64_t count = p.shard_in() / shared_inputs(p, inputs);
        pack_numbers(from, kind, p.in / inputs, shard * p.shard_in() / inputs, count, row, place, to);
    };
    pack(form.parts, form.kind, part.group, parts);
    if (form.span > 0) pack(form.spans, form.span_kind, form.span, spans);
}

/* Whether a block's numbers are: with a finite float16 all are. */
bool is_finite(const CodesPart &part, const ScaleForm &form, const uint8_t *numbers, const uint8_t *span) {
    const uint8_t *wide = form.span > 0 ? span : numbers;
    if ((form.span > 0 ? form.span_kind : form.kind) == FLOAT16) return (wide[1] & 0x7c) != 0x7c;
    float scale;
    std::memcpy(&scale, wide, sizeof scale);
    return std::isfinite(scale * float(1 << part.bits) + scale * float(part.zero));
}

/* A row's blocks, and its place in a half. */
struct BlockScales {
    const Packed &p;
    const CodesPart &part;
    const BlockReader &reader;
    int64_t place;
};

/* The numbers that a block has for its inputs [inside, end), as many of which share one, to [number][16]. The place of the next one. */
template <size_t SIZE>
char *put(const uint8_t *numbers, int64_t inside, int64_t end, int64_t shared, int group_log, char *to) {
    for (; inside < end; inside += shared, to += HALF * SIZE)
        std::memcpy(to, numbers + (inside >> group_log) * int64_t(SIZE), SIZE);
    return to;
}

/* Where the next numbers of a row's scales, or of its lows, go. */
struct NextScales {
    char *parts, *spans;
    NextScales(const ScaleForm &form, int64_t place, char *first_part, char *first_span)
        : parts(first_part + place * (form.kind < 0 ? 0 : bytes_of(form.kind))), spans(first_span + place * 2) {}
    /* Those of a block; whether they are finite. */
    bool put_block(const BlockScales &row, const ScaleForm &form, const uint8_t *numbers, const uint8_t *span, int64_t inside, int64_t end) {
        const int64_t shared = shared_inputs(row.p, row.part.group);
        const int group_log = row.reader.group_log;
        switch (bytes_of(form.kind)) {
            case 1: parts = put<1>(numbers, inside, end, shared, group_log, parts); break;
            case 2: parts = put<2>(numbers, inside, end, shared, group_log, parts); break;
            default: parts = put<4>(numbers, inside, end, shared, group_log, parts);
        }
        if (form.span > 0) spans = put<2>(span, inside, end, shared_inputs(row.p, form.span), row.reader.inputs_log, spans);
        return is_finite(row.part, form, numbers, span);
    }
};

/* The scales of a shard's inputs, from the row's input `first` on, to the row's place of a half; whether they are finite. */
bool pack_block_scales(const BlockScales &row, const uint8_t *blocks, int64_t first, char *to, const HalfPlaces &at) {
    const CodesPart &part = row.part;
    const int64_t inputs = int64_t(1) << row.reader.inputs_log;
    NextScales scales(part.scales, row.place, to, to + at.scale_spans), lows(part.lows, row.place, to + at.lows, to + at.low_spans);
    bool finite = true;
    blocks += (first >> row.reader.inputs_log) * row.reader.bytes;
    for (int64_t inside = first & (inputs - 1), left = row.p.shard_in(), end; left > 0; left -= end - inside, inside = 0) {
        end = std::min(inputs, inside + left);
        BlockNumbers found;
        row.reader.numbers(blocks, found);
        finite = scales.put_block(row, part.scales, found.parts, found.span, inside, end) && finite;
        if (part.lows.kind >= 0) finite = lows.put_block(row, part.lows, found.lows, found.low_span, inside, end) && finite;
        blocks += row.reader.bytes;
    }
    return finite;
}

/* A row of a half: null where it is padding, codes where it has no reader. */
struct HalfRow {
    const uint8_t *at = nullptr;
    const BlockReader *reader = nullptr;
};

/* Where the codes of 32 inputs of each row from `first` on are: `codes` where they come out of blocks. */
void rows_of_step(const HalfRow *from, int64_t first, uint8_t (*codes)[STEP], const char **rows) {
    for (int64_t place = 0; place < HALF; ++place) {
        const auto &[at, reader] = from[place];
        rows[place] = at == nullptr ? nullptr : reinterpret_cast<const char *>(at + first);
        if (reader == nullptr) continue;
        const int64_t block = first >> reader->inputs_log;
        reader->codes(at + block * reader->bytes, (first - (block << reader->inputs_log)) / STEP, codes[place]);
        rows[place] = reinterpret_cast<const char *>(codes[place]);
    }
}

HalfRow half_row(const Halves &halves, const CodesPart *parts, int64_t index, int64_t inside) {
    const int64_t type = halves.types == nullptr ? BLOCKLESS : halves.types[index];
    return {parts[index].codes + inside * parts[index].stride, type == BLOCKLESS ? nullptr : &block_reader(type)};
}

/* Whether all scales that blocks have are finite. */
bool pack_half(const Halves &halves, const CodesPart *parts, int64_t half, char *base) {
    const Packed &p = halves.p;
    const HalfPanel &own = halves.at[size_t(half)];
    const HalfPlaces at = places_of(p, parts[own.piece]);
    char *to = base + own.at;
    std::memset(to, 0, size_t(p.shards * at.end));
    bool finite = true;
    for (int64_t shard = 0; shard < p.shards; ++shard, to += at.end) {
        HalfRow from[HALF];
        for (int64_t place = 0; place < HALF; ++place) {
            const int64_t row = row_at(p, half / 2, half % 2 * HALF + place);
            if (row < 0) continue;
            const int64_t index = part_of(halves, row), inside = row - halves.first[size_t(index)];
            const CodesPart &part = parts[index];
            from[place] = half_row(halves, parts, index, inside);
            if (from[place].reader != nullptr) {
                finite = pack_block_scales({p, part, *from[place].reader, place}, from[place].at, shard * p.shard_in(), to, at) && finite;
                continue;
            }
            pack_scales(p, part, part.scales, shard, inside, place, to, to + at.scale_spans);
            pack_scales(p, part, part.lows, shard, inside, place, to + at.lows, to + at.low_spans);
        }
        for (int64_t step = 0; step < p.shard_steps(); ++step) {
            const int64_t left = p.shard_in() - step * STEP, bits = parts[own.piece].bits;
            uint8_t codes[HALF][STEP];
            const char *rows[HALF];
            rows_of_step(from, shard * p.shard_in() + step * STEP, codes, rows);
            pack_step(rows, left < STEP ? left : STEP, bits, to + at.codes + step * ALIGNMENT * bits);
        }
    }
    return finite;
}

/* The number at a place of a half, times that of its span. */
float scale_at(const Packed &p, const CodesPart &piece, const ScaleForm &form, int64_t k, int64_t place, const char *parts,
               const char *spans) {
    const auto index = [&](int64_t inputs) { return k / shared_inputs(p, inputs) * HALF + place; };
    const float part = number_at(parts, form.kind, index(piece.group));
    return form.span == 0 ? part : part * number_at(spans, form.span_kind, index(form.span));
}

int field_at(const char *vectors, int width, int64_t quad, int64_t byte) {
    const int fields = 8 / width;
    return uint8_t(vectors[quad / fields * 64 + byte]) >> (quad % fields * width) & ((1 << width) - 1);
}

}  // namespace

int64_t codes_bytes(const CodesPart *parts, int64_t count, int64_t in, int gate, int shards) {
    return layout(parts, count, in, BFLOAT16, gate, shards).p.total_bytes;
}

bool pack_codes(const CodesPart *parts, const int64_t *types, int64_t count, const void *bias, int bias_kind, int64_t in, int x_kind,
                int multiplied, int gate, int shards, int64_t first, int64_t last, void *buffer) {
    Halves halves = layout(parts, count, in, x_kind, gate, shards);
    halves.types = types, halves.p.multiplied = multiplied;
    std::atomic<bool> finite{true};
    Packed p = halves.p;
    char *base = static_cast<char *>(buffer);
    for_units(last - first, false, [&](int64_t unit, int64_t) {
        const int64_t panel = first + unit;
        float *bias_to = reinterpret_cast<float *>(base + p.bias_at) + panel * PANEL;
        for (int64_t place = 0; place < PANEL; ++place) {
            const int64_t row = row_at(p, panel, place);
            bias_to[place] = row < 0 || bias == nullptr ? 0.0f : number_at(bias, bias_kind, row);
        }
        const bool front = pack_half(halves, parts, 2 * panel, base), back = pack_half(halves, parts, 2 * panel + 1, base);
        if (!front || !back) finite = false;
    });
    for (int64_t i = 0; i < count; ++i) {
        CodesPart piece = parts[i];
        piece.stride = 0, piece.codes = nullptr, piece.scales.parts = piece.scales.spans = piece.lows.parts = piece.lows.spans = nullptr;
        std::memcpy(base + p.pieces_at + i * int64_t(sizeof piece), &piece, sizeof piece);
    }
    std::memcpy(base + p.halves_at, halves.at.data(), halves.at.size() * sizeof(HalfPanel));
    if (bias == nullptr) p.bias_at = 0;
    std::memcpy(base, &p, sizeof p);
    return finite;
}

void round_groups(int kind, const void *x, int64_t count, int bits, uint8_t *codes, uint16_t *scales) {
    constexpr int64_t TOGETHER = 1024;
    for_units((count + TOGETHER - 1) / TOGETHER, false, [&](int64_t unit, int64_t) {
        const int64_t first = unit * TOGETHER, own = std::min(TOGETHER, count - first);
        const char *from = static_cast<const char *>(x) + first * STEP * bytes_of(kind);
        codes_kernels().round_groups(kind, from, own, bits, codes + first * STEP, scales + first);
    });
}

void codes_row(const Packed &w, int64_t row, float *to) {
    const HalfPanel &half = halves_of(w)[row / HALF];
    const CodesPart &piece = pieces_of(w)[half.piece];
    const HalfPlaces at = places_of(w, piece);
    const char *base = reinterpret_cast<const char *>(&w) + half.at;
    const int low = low_bits(int(piece.bits)), high = high_bits(int(piece.bits));
    const int64_t place = row % HALF;
    for (int64_t k = 0; k < w.in; ++k) {
        const char *step = base + at.codes + k / STEP * ALIGNMENT * piece.bits;
        const int64_t quad = k % STEP / 4, byte = place * 4 + k % 4;
        int code = field_at(step, low, quad, byte);
        if (high > 0) code |= field_at(step + 64 * low, high, quad, byte) << low;
        const float scale = scale_at(w, piece, piece.scales, k, place, base, base + at.scale_spans);
        const float lowest = piece.lows.kind < 0 ? float(piece.zero) * scale
                                                 : scale_at(w, piece, piece.lows, k, place, base + at.lows, base + at.low_spans);
        const float wide = float(code) * scale;
        to[k] = wide - lowest;
    }
}

}  // namespace vnx
