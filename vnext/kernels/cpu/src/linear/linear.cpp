#include "linear/linear.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#if defined(__unix__)
#include <unistd.h>
#endif

#include "linear/codes.h"
#include "linear/linear_turned.h"
#include "team.h"
#include "traced.h"

namespace vnx {
namespace {

int64_t panel_bytes_of(const Packed &p) {
    if (p.kind == FLOAT32) return p.in * PANEL * 4;
    return p.steps() * STEP * PANEL * 2;
}

/* Offsets and sizes. */
Packed layout(int64_t out, int64_t in, int kind, int gate, int shards) {
    Packed p{};
    p.magic = PACKED_MAGIC;
    p.kind = kind;
    p.x_kind = kind;
    p.gate = gate;
    p.shards = shards;
    p.out = out;
    p.in = in;
    p.panel_count = panels_of(out, gate);
    p.panel_bytes = panel_bytes_of(p);
    p.bias_at = round_up(sizeof(Packed), ALIGNMENT);
    p.panels_at = round_up(p.bias_at + p.panel_count * PANEL * 4, 4096);
    p.total_bytes = p.panels_at + p.panel_count * p.panel_bytes;
    return p;
}

/* A weight whose parts lie one below the other, each where it is. */
struct Source {
    const WeightPart *parts;
    int kind;
    const void *row(int64_t index) const {
        const WeightPart *part = parts;
        for (; index >= part->rows; ++part)
            index -= part->rows;
        return static_cast<const char *>(part->data) + index * part->stride * (kind == FLOAT32 ? 4 : 2);
    }
};

/* Where input k of the output at `place` lies in a panel of bfloat16. */
int64_t place_in_panel(int64_t k, int64_t place) {
    return k / STEP * 1024 + place / 16 * 512 + k % STEP / 2 * 32 + place % 16 * 2 + k % 2;
}

/* The rows of a whole panel in a shard, as they are: sixteen words of each at a time, which are as many inputs of float32 or twice as
   many of bfloat16. Returns the inputs that are done. */
int64_t pack_words(const Packed &p, const char *const *rows, char *panel) {
    const int64_t word_bytes = p.kind == FLOAT32 ? PANEL * 4 : 64, half_bytes = p.kind == FLOAT32 ? 64 : 1024;
    const int64_t count = p.shard_in() * (p.kind == FLOAT32 ? 4 : 2) / 64;
    for (int64_t i = 0; i < count; ++i)
        for (int64_t half = 0; half < 2; ++half)
            turn_sixteen(rows + 16 * half, i * 64, panel + i * 2048 + half * half_bytes, word_bytes);
    return count * (p.kind == FLOAT32 ? 16 : 32);
}

/* One output's weights in a shard from input `first` on, into its place of the shard's part of a panel. */
void pack_row(const Packed &p, const void *row, int64_t place, int64_t first, char *panel) {
    for (int64_t k = first; k < p.shard_in(); ++k)
        if (p.kind == FLOAT32)
            reinterpret_cast<float *>(panel)[k * PANEL + place] = static_cast<const float *>(row)[k];
        else
            reinterpret_cast<uint16_t *>(panel)[place_in_panel(k, place)] = static_cast<const uint16_t *>(row)[k];
}

void pack_panel(const Packed &p, const Source &source, const void *bias, int64_t panel, char *base) {
    char *to = base + p.panels_at + panel * p.panel_bytes;
    float *bias_to = reinterpret_cast<float *>(base + p.bias_at) + panel * PANEL;
    const int64_t row_bytes = p.shard_in() * (p.kind == FLOAT32 ? 4 : 2);
    const char *rows[PANEL];
    int64_t row_count = 0;
    for (int64_t place = 0; place < PANEL; ++place) {
        const int64_t index = row_at(p, panel, place);
        bias_to[place] = index < 0 || bias == nullptr ? 0.0f : number_at(bias, p.kind, index);
        rows[place] = index < 0 ? nullptr : static_cast<const char *>(source.row(index));
        row_count += index >= 0;
    }
    if (row_count < PANEL || p.shard_in() % STEP != 0) std::memset(to, 0, size_t(p.panel_bytes));
    for (int64_t shard = 0; shard < p.shards; ++shard, to += p.panel_bytes / p.shards) {
        const int64_t first = row_count == PANEL ? pack_words(p, rows, to) : 0;
        for (int64_t place = 0; place < PANEL; ++place) {
            if (rows[place] == nullptr) continue;
            pack_row(p, rows[place], place, first, to);
            rows[place] += row_bytes;
        }
    }
}

/* x with the shards of its rows padded to whole steps in the caller's scratch: kernels read whole steps, and what lies
   behind a shard's end may be another row, whose infinity times a zero weight would be NaN. */
void pad_rows(LinearCall &call) {
    const int64_t shards = call.weight->shards, in = call.weight->shard_in(), width = call.weight->shard_steps() * STEP;
    uint16_t *to = static_cast<uint16_t *>(scratch(SLOT_STATE, size_t(call.rows * shards * width) * 2));
    const uint16_t *from = static_cast<const uint16_t *>(call.x);
    call.x = to;
    for (int64_t i = 0; i < call.rows * shards; ++i, to += width) {
        std::memcpy(to, from + i / shards * call.x_stride + i % shards * in, size_t(in) * 2);
        std::memset(to + in, 0, size_t(width - in) * 2);
    }
    call.x_stride = shards * width;
}

const CodesProduct &codes_product(const Packed &w) { return w.multiplied == BFLOAT16 ? codes_kernels().wide : codes_kernels().narrow; }

/* What a product with codes makes of x first, in the caller's scratch. */
struct Rounding {
    RoundedRows to{};

    Rounding() = default;
    explicit Rounding(const LinearCall &call) {
        const Packed &w = *call.weight;
        const CodesPart *pieces = pieces_of(w);
        const bool is_wide = w.multiplied == BFLOAT16;
        const int64_t places = call.rows * w.steps();
        int64_t floats = is_wide ? places * STEP : places;
        for (int i = 0; i < w.piece_count; ++i)
            floats += 2 * places * numbers_of(pieces[i]);
        float *at = static_cast<float *>(scratch(SLOT_STATE, size_t(floats) * 4 + size_t(places * STEP)));
        to.block_rows = codes_product(w).block_rows;
        to.scales = to.wide = at, at += is_wide ? places * STEP : places;
        for (int i = 0; i < w.piece_count; at += places * numbers_of(pieces[i++])) {
            to.starts[i] = reinterpret_cast<int32_t *>(at), at += places * numbers_of(pieces[i]);
            to.totals[i] = at;
        }
        to.codes = reinterpret_cast<int8_t *>(at);
    }
    static int64_t numbers_of(const CodesPart &piece) { return piece.group == SPLIT ? 2 : 1; }

    void run(const LinearCall &call) const {
        const int64_t height = to.block_rows, blocks = (call.rows + height - 1) / height;
        for_units(blocks, blocks < 4, [&](int64_t block, int64_t) {
            codes_product(*call.weight).round(call, block * height, std::min(call.rows, (block + 1) * height));
        });
    }
};

constexpr int64_t CHUNK_LEAST = 256 * 1024, CHUNK_MOST = 1024 * 1024;
constexpr int64_t UNIT_BYTES = 64 * 1024;  // of weight: less is done sooner than it is handed out
constexpr int64_t FEW_ROWS = 256, UNITS_FEW = 8, UNITS_MANY = 32;  // a member: with many rows a unit is long to wait for

/* Bytes of x that stay in a core's own cache while the panels pass: of its second one what a panel and the results leave.
   Which rows pass together shows in no result. */
int64_t chunk_bytes() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
    static const int64_t share = sysconf(_SC_LEVEL2_CACHE_SIZE) * 5 / 8;
#else
    static const int64_t share = 0;
#endif
    return share <= 0 ? CHUNK_MOST : std::clamp(share, CHUNK_LEAST, CHUNK_MOST);
}

/* Rows of x that one unit of work takes, in whole blocks of 32. */
int64_t chunk_rows(int64_t rows, int64_t row_bytes) {
    const int64_t largest = std::max<int64_t>(32, chunk_bytes() / row_bytes / 32 * 32);
    const int64_t count = (rows + largest - 1) / largest;
    return round_up((rows + count - 1) / count, 32);
}

/* Into how many groups of neighbouring panels the weight is cut. */
int64_t group_count(const Packed &w, int64_t rows, int64_t chunks) {
    const int64_t units = (rows > FEW_ROWS ? UNITS_MANY : UNITS_FEW) * team_size();
    return std::max<int64_t>(1, std::min({units / chunks, w.panel_count, w.panel_count * w.panel_bytes / UNIT_BYTES}));
}

std::atomic<uint64_t> calls{0};

/* `alone`: in the calling thread. */
void multiply(LinearCall call, bool alone) {
    const Packed &w = *call.weight;
    const bool is_coded = w.kind == CODES;
    if (w.kind != FLOAT32 && !is_coded && w.shard_in() % STEP != 0) pad_rows(call);
    const Rounding rounding = is_coded ? Rounding(call) : Rounding();
    call.rounded = &rounding.to;
    if (is_coded) rounding.run(call);
    const int64_t size = !is_coded ? bytes_of(w.kind) : w.multiplied == BFLOAT16 ? 4 : 1;
    const int64_t height = chunk_rows(call.rows, w.in * size), chunks = (call.rows + height - 1) / height;
    const int64_t groups = group_count(w, call.rows, chunks);
    const auto block = is_coded ? codes_product(w).linear : w.kind == FLOAT32 ? kernels().linear_f32 : kernels().linear_bf16;
    for_units(chunks * groups, alone, [&](int64_t unit, int64_t) {
        const int64_t chunk = unit / groups, group = unit % groups;
        block(call, chunk * height, std::min(call.rows, (chunk + 1) * height), w.panel_count * group / groups,
              w.panel_count * (group + 1) / groups);
    });
}

}  // namespace

int64_t packed_bytes(int64_t out, int64_t in, int kind, int gate, int shards) {
    return layout(out, in, kind, gate, shards).total_bytes;
}

void pack_linear(const WeightPart *parts, int kind, const void *bias, int64_t out, int64_t in, int gate, int shards, void *buffer) {
    Packed p = layout(out, in, kind, gate, shards);
    const Source source{parts, kind};
    char *base = static_cast<char *>(buffer);
    for_units(p.panel_count, false, [&](int64_t panel, int64_t) { pack_panel(p, source, bias, panel, base); });
    if (bias == nullptr) p.bias_at = 0;
    std::memcpy(base, &p, sizeof p);
}

void linear(const void *x, int64_t x_stride, int64_t rows, const Packed *weight, const void *bias, void *result,
            int64_t result_stride, int result_kind, bool apart, const ThinCall *behind) {
    if (rows == 0) return;
    Traced traced(OP_PRODUCT, rows, weight->in, weight->out);
    traced.did(2 * rows * weight->in * weight->out, weight->total_bytes);
    multiply({weight, bias, x, x_stride, rows, result, result_stride, result_kind, apart, behind, ++calls}, false);
}

void head_products(int kind, const HeadRows &x, int64_t rows, const Packed *const *weights, int64_t heads, const HeadRows &result) {
    const int64_t size = kind == FLOAT32 ? 4 : 2;
    Traced traced(OP_PRODUCT, heads * rows, weights[0]->in, weights[0]->out);
    traced.did(2 * heads * rows * weights[0]->in * weights[0]->out, heads * weights[0]->total_bytes);
    for_units(rows == 0 ? 0 : heads, false, [&](int64_t head, int64_t) {
        const void *from = static_cast<const char *>(x.data) + head * x.head_stride * size;
        void *to = static_cast<char *>(result.data) + head * result.head_stride * size;
        multiply({weights[head], nullptr, from, x.stride, rows, to, result.stride, kind, false, nullptr, ++calls}, true);
    });
}

/* One row of a packed weight that is neither gated nor in shards. */
void unpack_row(const Packed &w, int64_t row, float *to) {
    const char *panel = reinterpret_cast<const char *>(&w) + w.panels_at + row / PANEL * w.panel_bytes;
    const float *from = reinterpret_cast<const float *>(panel) + row % PANEL;
    for (int64_t k = 0; k < w.in; ++k)
        to[k] = from[k * PANEL];
}

void unpack_row(const Packed &w, int64_t row, uint16_t *to) {
    const char *panel = reinterpret_cast<const char *>(&w) + w.panels_at + row / PANEL * w.panel_bytes;
    const uint16_t *from = reinterpret_cast<const uint16_t *>(panel);
    const int64_t place = row % PANEL, pairs = w.in / 2;
    for (int64_t pair = 0; pair < pairs; ++pair)
        std::memcpy(to + 2 * pair, from + place_in_panel(2 * pair, place), 4);
    if (w.in % 2 != 0) to[w.in - 1] = from[place_in_panel(w.in - 1, place)];
}

/* The same of codes. */
void unpack_codes(const Packed &w, int64_t row, char *to) {
    float *wide = w.x_kind == FLOAT32 ? reinterpret_cast<float *>(to) : static_cast<float *>(scratch(SLOT_ROWS, size_t(w.in) * 4));
    codes_row(w, row, wide);
    for (int64_t k = 0; w.x_kind != FLOAT32 && k < w.in; ++k)
        reinterpret_cast<uint16_t *>(to)[k] = to_bf16(wide[k]);
}

void packed_rows(const int64_t *ids, int64_t count, int64_t first, const void *packed, void *result) {
    const Packed &w = *static_cast<const Packed *>(packed);
    const int64_t row_bytes = w.in * (w.x_kind == FLOAT32 ? 4 : 2);
    for_units(count, count < 8, [&](int64_t i, int64_t) {
        char *to = static_cast<char *>(result) + i * row_bytes;
        const int64_t row = ids[i] - first;
        if (row < 0 || row >= w.out)
            std::memset(to, 0, size_t(row_bytes));
        else if (w.kind == CODES)
            unpack_codes(w, row, to);
        else if (w.kind == FLOAT32)
            unpack_row(w, row, reinterpret_cast<float *>(to));
        else
            unpack_row(w, row, reinterpret_cast<uint16_t *>(to));
    });
}

}  // namespace vnx
