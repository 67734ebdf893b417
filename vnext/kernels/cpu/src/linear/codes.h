/* Packed weights of few bits: where their codes and scales lie. vnext/kernels/codes.py defines the numbers and their product.

   Each half of a panel, sixteen outputs, is of one piece, whose form it has; halves follow one another. Of a half and shard:
     scales  [group][16], spans [span][16], then those of the lows; each list in whole lines of 64 bytes
     codes   [step][64 * bits bytes]: the lowest 8, 4 or 2 bits of all codes, then the others. Eight quads, four inputs of all sixteen
             outputs each, [16][4], share bytes: of W bits a code, byte b of vector v has that of quad v * 8 / W + i at bit i * W
   So a half is read from its start to its end. */
#pragma once

#include "linear/layout.h"

namespace vnx {

constexpr int HALF = 16;   // outputs
constexpr int QUADS = 8;   // of a step
constexpr int SPLIT = 16;  // inputs of the shortest group: two in a step

/* Bits of a code that lie together, and those that lie behind. */
static constexpr int low_bits(int bits) { return bits == 8 ? 8 : bits >= 4 ? 4 : 2; }
static constexpr int high_bits(int bits) { return bits - low_bits(bits); }

struct HalfPlaces {
    int64_t scale_spans, lows, low_spans, codes, end; /* scales come first */
};

/* How many of a shard's inputs share a number, and how many such numbers there are: two a step where groups are that short. */
static inline int64_t shared_inputs(const Packed &p, int64_t inputs) { return inputs == 0 || inputs > p.shard_in() ? p.shard_in() : inputs; }
static inline int64_t numbers_in(const Packed &p, int64_t inputs) {
    return inputs == SPLIT ? 2 * p.shard_steps() : p.shard_in() / shared_inputs(p, inputs);
}

static inline HalfPlaces places_of(const Packed &p, const CodesPart &piece) {
    const auto lines = [&](int64_t kind, int64_t inputs) { return round_up(numbers_in(p, inputs) * HALF * bytes_of(kind), ALIGNMENT); };
    const auto parts = [&](const ScaleForm &form) { return form.kind < 0 ? 0 : lines(form.kind, piece.group); };
    const auto spans = [&](const ScaleForm &form) { return form.kind < 0 || form.span == 0 ? 0 : lines(form.span_kind, form.span); };
    HalfPlaces at{};
    at.scale_spans = parts(piece.scales);
    at.lows = at.scale_spans + spans(piece.scales);
    at.low_spans = at.lows + parts(piece.lows);
    at.codes = at.low_spans + spans(piece.lows);
    at.end = at.codes + p.shard_steps() * ALIGNMENT * piece.bits;
    return at;
}

static inline const CodesPart *pieces_of(const Packed &p) {
    return reinterpret_cast<const CodesPart *>(reinterpret_cast<const char *>(&p) + p.pieces_at);
}
static inline const HalfPanel *halves_of(const Packed &p) {
    return reinterpret_cast<const HalfPanel *>(reinterpret_cast<const char *>(&p) + p.halves_at);
}

/* Bytes that `pack_codes` fills: of parts [count], one below the other, of which only forms and rows are read. */
int64_t codes_bytes(const CodesPart *parts, int64_t count, int64_t in, int gate, int shards);

/* Pack the parts with bias [out] of `bias_kind`, or null, for activations of `x_kind` that are `multiplied` as such. Parts of unlike forms meet between halves.
   Of panels `first` to `last` alone, what describes the whole with each: only their rows are read. Where `types` names a BlockType of a
   part, its `codes` are rows of such blocks, which have its scales as well, and a shard is whole steps of inputs. Returns whether
   the scales of blocks are finite. */
bool pack_codes(const CodesPart *parts, const int64_t *types, int64_t count, const void *bias, int bias_kind, int64_t in, int x_kind,
                int multiplied, int gate, int shards, int64_t first, int64_t last, void *buffer);

/* Groups [count] of STEP numbers of `kind`, FLOAT32 or BFLOAT16, as codes, and their scales in bfloat16: NaN where a number is not finite. */
void round_groups(int kind, const void *x, int64_t count, int bits, uint8_t *codes, uint16_t *scales);

/* A row of a packed weight that is neither gated nor in shards, float32 [in]. */
void codes_row(const Packed &w, int64_t row, float *to);

}  // namespace vnx
