#include "rows/rows.h"

#include <algorithm>
#include <cstring>

#include "team.h"
#include "traced.h"

namespace vnx {
namespace {

constexpr int64_t UNIT_ELEMENTS = 16 * 1024;  // less is done sooner than it is handed out

float widened(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* To the nearest bfloat16, ties to even; a NaN stays one. */
uint16_t rounded(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (x != x) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* `body(first, last)` for groups of neighbouring rows. */
template <typename Body>
void for_rows(int64_t rows, int64_t elements_per_row, const Body &body) {
    const int64_t units = std::max<int64_t>(1, std::min(rows, rows * elements_per_row / UNIT_ELEMENTS));
    for_units(units, false, [&](int64_t unit, int64_t) { body(rows * unit / units, rows * (unit + 1) / units); });
}

}  // namespace

void rms_norm(int kind, int64_t rows, const NormCall &call) {
    const Traced traced(OP_NORM, rows, call.width);
    for_rows(rows, call.width, [&](int64_t first, int64_t last) { kernels().norm(kind, call, first, last); });
}

void gate_and_mul(int kind, int64_t rows, const GateCall &call) {
    const Traced traced(OP_GATE, rows, call.width);
    for_rows(rows, call.width * 4, [&](int64_t first, int64_t last) { kernels().gate(kind, call, first, last); });
}

void rotary_kv_write(int kind, int64_t tokens, const RotaryCall &call) {
    const int64_t elements = (call.heads + 2 * call.kv_heads) * call.head_dim;
    const Traced traced(OP_ROTARY, tokens, elements);
    for_rows(tokens, elements, [&](int64_t first, int64_t last) { kernels().rotary(kind, call, first, last); });
}

void soft_cap(int64_t rows, int64_t width, float cap, float *x) {
    for_rows(rows, width, [&](int64_t first, int64_t last) { kernels().soft_cap(x + first * width, (last - first) * width, cap); });
}

void scale_rows(int kind, int64_t rows, int64_t width, float factor, void *x) {
    for_rows(rows, width, [&](int64_t first, int64_t last) {
        float *wide = static_cast<float *>(x);
        uint16_t *narrow = static_cast<uint16_t *>(x);
        for (int64_t i = first * width; i < last * width; ++i)
            if (kind == FLOAT32)
                wide[i] *= factor;
            else
                narrow[i] = rounded(widened(narrow[i]) * factor);
    });
}

void add_rows(int kind, int64_t rows, int64_t width, const void *from, void *to) {
    for_rows(rows, width, [&](int64_t first, int64_t last) {
        const float *wide = static_cast<const float *>(from);
        const uint16_t *narrow = static_cast<const uint16_t *>(from);
        float *wide_sums = static_cast<float *>(to);
        uint16_t *narrow_sums = static_cast<uint16_t *>(to);
        for (int64_t i = first * width; i < last * width; ++i)
            if (kind == FLOAT32)
                wide_sums[i] += wide[i];
            else
                narrow_sums[i] = rounded(widened(narrow_sums[i]) + widened(narrow[i]));
    });
}

template <typename Element>
void part_row(Element *row, const PairsCall &call) {
    Element pairs[HEAD_MAX];
    const int64_t half = call.turning / 2;
    for (int64_t head = 0; head < call.heads; ++head, row += call.head_dim) {
        std::copy(row, row + call.turning, pairs);
        for (int64_t i = 0; i < half; ++i) {
            row[i] = pairs[2 * i];
            row[half + i] = pairs[2 * i + 1];
        }
    }
}

void part_pairs(int kind, int64_t rows, const PairsCall &call) {
    for_rows(rows, call.heads * call.head_dim, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row)
            if (kind == FLOAT32)
                part_row(static_cast<float *>(call.x) + row * call.stride, call);
            else
                part_row(static_cast<uint16_t *>(call.x) + row * call.stride, call);
    });
}

void gather_rows(const void *table, int64_t row_bytes, int64_t table_rows, const int64_t *ids, int64_t count,
                 int64_t first, void *result) {
    for_rows(count, row_bytes / 2, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            char *to = static_cast<char *>(result) + i * row_bytes;
            const int64_t row = ids[i] - first;
            if (row < 0 || row >= table_rows)
                std::memset(to, 0, size_t(row_bytes));
            else
                std::memcpy(to, static_cast<const char *>(table) + row * row_bytes, size_t(row_bytes));
        }
    });
}

}  // namespace vnx
