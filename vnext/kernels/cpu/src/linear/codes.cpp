#include "linear/codes.h"

#include <vector>

#include "linear/linear_turned.h"
#include "team.h"

namespace vnx {
namespace {

constexpr int64_t STEP_CODES = STEP * HALF;

/* Where the parts begin, and which rows of them share a half. */
struct Halves {
    Packed p{};
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

/* A step's codes [quad][16][4] as fields of `width` bits; `from` is the lowest bit of a code that goes there. */
char *squeeze(const uint8_t (*quads)[64], int width, int from, char *to) {
    const int fields = 8 / width, mask = (1 << width) - 1;
    for (int vector = 0; vector < width; ++vector, to += 64)
        for (int b = 0; b < 64; ++b) {
            int byte = 0;
            for (int i = 0; i < fields; ++i)
                byte |= (quads[vector * fields + i][b] >> from & mask) << (i * width);
            to[b] = char(byte);
        }
    return to;
}

/* Row pointers of a half; null where it is padding. */
void pack_step(const char *const *rows, int64_t at, int64_t inputs, int64_t bits, char *to) {
    uint8_t quads[QUADS][64];
    char ends[HALF][STEP];
    const char *whole[HALF];
    for (int i = 0; i < HALF; ++i) {
        whole[i] = rows[i] == nullptr ? ends[i] : rows[i] + at;
        if (rows[i] != nullptr && inputs == STEP) continue;
        std::memset(ends[i], 0, STEP);
        if (rows[i] != nullptr) std::memcpy(ends[i], rows[i] + at, size_t(inputs));
        whole[i] = ends[i];
    }
    for (int64_t word = 0; word < QUADS; word += 4)
        for (int64_t row = 0; row < HALF; row += 4)
            turn_four(whole + row, word * 4, reinterpret_cast<char *>(quads[word]) + row * 4, 64);
    const int low = low_bits(int(bits)), high = high_bits(int(bits));
    to = squeeze(quads, low, 0, to);
    if (high > 0) squeeze(quads, high, low, to);
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

void pack_half(const Halves &halves, const CodesPart *parts, int64_t half, char *base) {
    const Packed &p = halves.p;
    const HalfPanel &own = halves.at[size_t(half)];
    const HalfPlaces at = places_of(p, parts[own.piece]);
    char *to = base + own.at;
    std::memset(to, 0, size_t(p.shards * at.end));
    const char *rows[HALF];
    for (int64_t shard = 0; shard < p.shards; ++shard, to += at.end) {
        for (int64_t place = 0; place < HALF; ++place) {
            const int64_t row = row_at(p, half / 2, half % 2 * HALF + place);
            rows[place] = nullptr;
            if (row < 0) continue;
            const int64_t index = part_of(halves, row), inside = row - halves.first[size_t(index)];
            const CodesPart &part = parts[index];
            rows[place] = reinterpret_cast<const char *>(part.codes) + inside * part.stride + shard * p.shard_in();
            pack_scales(p, part, part.scales, shard, inside, place, to, to + at.scale_spans);
            pack_scales(p, part, part.lows, shard, inside, place, to + at.lows, to + at.low_spans);
        }
        for (int64_t step = 0; step < p.shard_steps(); ++step) {
            const int64_t left = p.shard_in() - step * STEP, bits = parts[own.piece].bits;
            pack_step(rows, step * STEP, left < STEP ? left : STEP, bits, to + at.codes + step * ALIGNMENT * bits);
        }
    }
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

void pack_codes(const CodesPart *parts, int64_t count, const void *bias, int bias_kind, int64_t in, int x_kind, int gate, int shards,
                int64_t first, int64_t last, void *buffer) {
    const Halves halves = layout(parts, count, in, x_kind, gate, shards);
    Packed p = halves.p;
    char *base = static_cast<char *>(buffer);
    for_units(last - first, false, [&](int64_t unit, int64_t) {
        const int64_t panel = first + unit;
        float *bias_to = reinterpret_cast<float *>(base + p.bias_at) + panel * PANEL;
        for (int64_t place = 0; place < PANEL; ++place) {
            const int64_t row = row_at(p, panel, place);
            bias_to[place] = row < 0 || bias == nullptr ? 0.0f : number_at(bias, bias_kind, row);
        }
        pack_half(halves, parts, 2 * panel, base);
        pack_half(halves, parts, 2 * panel + 1, base);
    });
    for (int64_t i = 0; i < count; ++i) {
        CodesPart piece = parts[i];
        piece.codes = nullptr, piece.scales.parts = piece.scales.spans = piece.lows.parts = piece.lows.spans = nullptr;
        std::memcpy(base + p.pieces_at + i * int64_t(sizeof piece), &piece, sizeof piece);
    }
    std::memcpy(base + p.halves_at, halves.at.data(), halves.at.size() * sizeof(HalfPanel));
    if (bias == nullptr) p.bias_at = 0;
    std::memcpy(base, &p, sizeof p);
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
