#include "linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "team.h"

namespace vnx {
namespace {

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

int64_t steps_of(int64_t in) { return (in + STEP - 1) / STEP; }

int64_t panels_of(int64_t out) { return (out + PANEL - 1) / PANEL; }

int64_t panel_bytes_of(int64_t in, int kind) {
    if (kind == FLOAT32) return in * PANEL * 4;
    return steps_of(in) * STEP * PANEL * (kind == BFLOAT16 ? 2 : 1);
}

/* Offsets and sizes; a gated weight is padded to whole halves so that gate and up end in the same panel. */
Packed layout(int64_t out, int64_t in, int kind, int gate) {
    Packed p{};
    p.magic = PACKED_MAGIC;
    p.kind = kind;
    p.gate = gate;
    p.out = out;
    p.in = in;
    p.panel_count = gate == NO_GATE ? panels_of(out) : (out / 2 + 15) / 16;
    p.panel_bytes = panel_bytes_of(in, kind);
    const int64_t column_bytes = p.panel_count * PANEL * 4;
    p.bias_at = round_up(sizeof(Packed), ALIGNMENT);
    p.scales_at = p.bias_at + column_bytes;
    p.panels_at = round_up(p.scales_at + column_bytes, 4096);
    p.total_bytes = p.panels_at + p.panel_count * p.panel_bytes;
    return p;
}

struct Source {
    const void *data;
    int kind;
    int64_t stride;
    float at(int64_t row, int64_t column) const {
        const int64_t index = row * stride + column;
        if (kind == FLOAT32) return static_cast<const float *>(data)[index];
        const uint32_t bits = uint32_t(static_cast<const uint16_t *>(data)[index]) << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }
};

uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return std::isnan(x) ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* The row of the weight at a place of a panel, -1 for padding. */
int64_t row_at(const Packed &p, int64_t panel, int64_t place) {
    if (p.gate == NO_GATE) {
        const int64_t row = panel * PANEL + place;
        return row < p.out ? row : -1;
    }
    const int64_t row = panel * 16 + place % 16;
    if (row >= p.out / 2) return -1;
    return place < 16 ? row : p.out / 2 + row;
}

uint8_t quantised(float value, float scale) {
    const int magnitude = std::min(127, int(std::nearbyint(std::fabs(value) / scale)));
    return uint8_t(magnitude | (value < 0 && magnitude > 0 ? 0x80 : 0));
}

float scale_of_row(const Source &source, int64_t row, int64_t in) {
    float largest = 0;
    for (int64_t k = 0; k < in; ++k)
        largest = std::max(largest, std::fabs(source.at(row, k)));
    return largest > 0 ? largest / 127 : 1;
}

/* One output's weights into its place of a panel. */
void pack_row(const Packed &p, const Source &source, int64_t row, int64_t place, float scale, char *panel) {
    for (int64_t k = 0; k < p.in; ++k) {
        if (p.kind == FLOAT32) {
            reinterpret_cast<float *>(panel)[k * PANEL + place] = source.at(row, k);
            continue;
        }
        const int64_t at = k / STEP * 1024 + place / 16 * 512 + k % STEP / 2 * 32 + place % 16 * 2 + k % 2;
        if (p.kind == BFLOAT16)
            reinterpret_cast<uint16_t *>(panel)[at] = to_bf16(source.at(row, k));
        else
            reinterpret_cast<uint8_t *>(panel)[at] = quantised(source.at(row, k), scale);
    }
}

void pack_panel(const Packed &p, const Source &source, const Source &bias, int64_t panel, char *base) {
    char *to = base + p.panels_at + panel * p.panel_bytes;
    float *bias_to = reinterpret_cast<float *>(base + p.bias_at) + panel * PANEL;
    float *scales_to = reinterpret_cast<float *>(base + p.scales_at) + panel * PANEL;
    std::memset(to, 0, size_t(p.panel_bytes));
    for (int64_t place = 0; place < PANEL; ++place) {
        const int64_t row = row_at(p, panel, place);
        bias_to[place] = row < 0 || bias.data == nullptr ? 0.0f : bias.at(0, row);
        scales_to[place] = row < 0 || p.kind != INT8 ? 1.0f : scale_of_row(source, row, p.in);
        if (row >= 0) pack_row(p, source, row, place, scales_to[place], to);
    }
}

/* x with its rows padded to whole steps in the caller's scratch: tiles read whole steps, and what lies behind a row's
   end may be another row, whose infinity times a zero weight would be NaN. */
void pad_rows(LinearCall &call) {
    const int64_t in = call.weight->in, width = steps_of(in) * STEP;
    uint16_t *copy = static_cast<uint16_t *>(scratch(SLOT_STATE, size_t(call.rows * width) * 2));
    for (int64_t row = 0; row < call.rows; ++row) {
        std::memcpy(copy + row * width, static_cast<const uint16_t *>(call.x) + row * call.x_stride, size_t(in) * 2);
        std::memset(copy + row * width + in, 0, size_t(width - in) * 2);
    }
    call.x = copy;
    call.x_stride = width;
}

constexpr int64_t CHUNK_BYTES = 768 * 1024;  // of x, so that it stays in a core's own cache while the panels pass
constexpr int64_t ALONE_BYTES = 48 * 1024;   // less weight than this is done sooner than a team starts

int64_t chunk_rows(int64_t rows, int64_t row_bytes) {
    const int64_t largest = std::max<int64_t>(32, CHUNK_BYTES / row_bytes / 32 * 32);
    const int64_t count = (rows + largest - 1) / largest;
    return round_up((rows + count - 1) / count, 32);
}

}  // namespace

int64_t packed_bytes(int64_t out, int64_t in, int kind, int gate) { return layout(out, in, kind, gate).total_bytes; }

void pack_linear(const void *weight, int weight_kind, int64_t stride, const void *bias, int64_t out, int64_t in,
                 int kind, int gate, void *buffer) {
    Packed p = layout(out, in, kind, gate);
    const Source source{weight, weight_kind, stride}, bias_source{bias, weight_kind, 0};
    char *base = static_cast<char *>(buffer);
    auto work = [&](int member, int members) {
        const int64_t first = p.panel_count * member / members, last = p.panel_count * (member + 1) / members;
        for (int64_t panel = first; panel < last; ++panel)
            pack_panel(p, source, bias_source, panel, base);
    };
    for_team(false, work);
    if (bias == nullptr) p.bias_at = 0;
    if (kind != INT8) p.scales_at = 0;
    std::memcpy(base, &p, sizeof p);
}

void linear(const void *x, int64_t x_stride, int64_t rows, const void *packed, void *result, int64_t result_stride,
            int result_kind) {
    LinearCall call{static_cast<const Packed *>(packed), x, x_stride, rows, result, result_stride, result_kind};
    const Packed &w = *call.weight;
    if (w.kind != FLOAT32 && w.in % STEP != 0) pad_rows(call);
    const int64_t height = chunk_rows(rows, w.in * (w.kind == FLOAT32 ? 4 : 2)), chunks = (rows + height - 1) / height;
    const auto block = w.kind == FLOAT32 ? kernels().linear_f32 : kernels().linear_bf16;
    const int64_t units = chunks * w.panel_count;
    auto work = [&](int member, int members) {
        const int64_t end = units * (member + 1) / members;
        for (int64_t unit = units * member / members; unit < end;) {
            const int64_t chunk = unit / w.panel_count, panel = unit % w.panel_count;
            const int64_t last = std::min(w.panel_count, panel + end - unit);
            block(call, chunk * height, std::min(rows, (chunk + 1) * height), panel, last);
            unit += last - panel;
        }
    };
    if (rows > 0) for_team(w.panel_count * w.panel_bytes * rows < ALONE_BYTES * 4, work);
}

void packed_rows(const int64_t *ids, int64_t count, int64_t first, const void *packed, void *result) {
    const Packed &w = *static_cast<const Packed *>(packed);
    const int64_t element = w.kind == FLOAT32 ? 4 : 2;
    auto work = [&](int member, int members) {
        for (int64_t i = count * member / members; i < count * (member + 1) / members; ++i) {
            char *to = static_cast<char *>(result) + i * w.in * element;
            const int64_t row = ids[i] - first;
            if (row < 0 || row >= w.out) {
                std::memset(to, 0, size_t(w.in * element));
                continue;
            }
            const char *panel = static_cast<const char *>(packed) + w.panels_at + row / PANEL * w.panel_bytes;
            const int64_t place = row % PANEL;
            for (int64_t k = 0; k < w.in; ++k) {
                if (w.kind == FLOAT32)
                    reinterpret_cast<float *>(to)[k] = reinterpret_cast<const float *>(panel)[k * PANEL + place];
                else
                    reinterpret_cast<uint16_t *>(to)[k] = reinterpret_cast<const uint16_t *>(
                        panel)[k / STEP * 1024 + place / 16 * 512 + k % STEP / 2 * 32 + place % 16 * 2 + k % 2];
            }
        }
    };
    for_team(count < 8, work);
}

}  // namespace vnx
