#include "rows/rows.h"

#include <algorithm>
#include <cmath>
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

void activate(int kind, int64_t rows, GateCall call, const float *above, const float *below) {
    call.alone = true;
    if (call.gate == XIELU) {
        call.above = std::log1p(std::exp(double(*above)));
        call.below = std::log1p(std::exp(double(*below)));
    }
    gate_and_mul(kind, rows, call);
}

void rotary_kv_write(int kind, int64_t tokens, const RotaryCall &call) {
    const int64_t elements = (call.heads + 2 * call.kv_heads) * call.head_dim;
    const Traced traced(OP_ROTARY, tokens, elements);
    for_rows(tokens, elements, [&](int64_t first, int64_t last) { kernels().rotary(kind, call, first, last); });
}

void soft_cap(int64_t rows, int64_t width, float cap, float *x) {
    for_rows(rows, width, [&](int64_t first, int64_t last) { kernels().soft_cap(x + first * width, (last - first) * width, cap); });
}

/* The factor of a row is `step` from that of the one before. */
void scale(int kind, int64_t rows, int64_t width, int64_t stride, const float *factors, int64_t step, void *x) {
    for_rows(rows, width, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            float *wide = static_cast<float *>(x) + row * stride;
            uint16_t *narrow = static_cast<uint16_t *>(x) + row * stride;
            const float factor = factors[row * step];
            for (int64_t i = 0; i < width; ++i)
                if (kind == FLOAT32)
                    wide[i] *= factor;
                else
                    narrow[i] = rounded(widened(narrow[i]) * factor);
        }
    });
}

void scale_rows(int kind, int64_t rows, int64_t width, float factor, void *x) { scale(kind, rows, width, width, &factor, 0, x); }

void scale_by(int kind, int64_t rows, int64_t width, const void *factor, void *x) {
    scale_rows(kind, rows, width, kind == FLOAT32 ? *static_cast<const float *>(factor) : widened(*static_cast<const uint16_t *>(factor)), x);
}

void scale_each(int kind, int64_t rows, int64_t width, int64_t stride, const float *factors, void *x) {
    scale(kind, rows, width, stride, factors, 1, x);
}

/* to += from, `stride` elements from one row of it to the next. */
void add(int kind, int64_t rows, int64_t width, const void *from, int64_t stride, void *to) {
    for_rows(rows, width, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            const float *wide = static_cast<const float *>(from) + row * stride;
            const uint16_t *narrow = static_cast<const uint16_t *>(from) + row * stride;
            float *wide_sums = static_cast<float *>(to) + row * width;
            uint16_t *narrow_sums = static_cast<uint16_t *>(to) + row * width;
            for (int64_t i = 0; i < width; ++i)
                if (kind == FLOAT32)
                    wide_sums[i] += wide[i];
                else
                    narrow_sums[i] = rounded(widened(narrow_sums[i]) + widened(narrow[i]));
        }
    });
}

void add_rows(int kind, int64_t rows, int64_t width, const void *from, void *to) { add(kind, rows, width, from, width, to); }

void add_bias(int kind, int64_t rows, int64_t width, const void *bias, void *to) { add(kind, rows, width, bias, 0, to); }

void multiply_rows(int kind, int64_t rows, int64_t width, const void *from, int64_t stride, const int64_t *at, void *to) {
    for_rows(rows, width, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            const int64_t place = (at == nullptr ? row : at[row]) * stride;
            for (int64_t i = 0; i < width; ++i)
                if (kind == FLOAT32) {
                    static_cast<float *>(to)[row * width + i] *= static_cast<const float *>(from)[place + i];
                } else {
                    uint16_t *product = static_cast<uint16_t *>(to) + row * width + i;
                    *product = rounded(widened(*product) * widened(static_cast<const uint16_t *>(from)[place + i]));
                }
        }
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

/* By halves while the number of parts is even, then in order. */
template <typename Part>
float joined_parts(int64_t first, int64_t count, const Part &part) {
    if (count % 2 == 0) return joined_parts(first, count / 2, part) + joined_parts(first + count / 2, count / 2, part);
    float total = part(first);
    for (int64_t i = 1; i < count; ++i)
        total += part(first + i);
    return total;
}

float number(float x) { return x; }
float number(uint16_t x) { return widened(x); }
void put(float x, float *to) { *to = x; }
void put(float x, uint16_t *to) { *to = rounded(x); }

template <typename T>
void sum_squares_of(int64_t rows, const HeadsCall &call) {
    for_rows(rows, call.heads * call.head_dim, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            const T *x = static_cast<const T *>(call.x) + row * call.stride;
            const auto square = [&](int64_t i) { return number(x[i]) * number(x[i]); };
            const auto head = [&](int64_t i) { return joined_parts(i * call.head_dim, call.head_dim, square); };
            call.squares[row * call.square_stride] = joined_parts(0, call.heads, head);
        }
    });
}

template <typename T, typename W>
void norm_heads_of(int64_t rows, const HeadsCall &call) {
    const W *weight = static_cast<const W *>(call.weight);
    for_rows(rows, call.heads * call.head_dim, [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            T *x = static_cast<T *>(call.x) + row * call.stride;
            const float scale = 1.0f / std::sqrt(call.squares[row * call.square_stride] / float(call.count) + call.eps);
            for (int64_t i = 0; i < call.heads * call.head_dim; ++i)
                put(number(x[i]) * scale * number(weight[i]), x + i);
        }
    });
}

void sum_squares(int kind, int64_t rows, const HeadsCall &call) {
    kind == FLOAT32 ? sum_squares_of<float>(rows, call) : sum_squares_of<uint16_t>(rows, call);
}

void norm_heads(int kind, int64_t rows, const HeadsCall &call) {
    if (kind == FLOAT32) return norm_heads_of<float, float>(rows, call);
    call.is_wide ? norm_heads_of<uint16_t, float>(rows, call) : norm_heads_of<uint16_t, uint16_t>(rows, call);
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
