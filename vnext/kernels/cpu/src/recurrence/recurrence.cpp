#include "recurrence/recurrence.h"

#include <algorithm>

#include "team.h"
#include "traced.h"

namespace vnx {
namespace {

constexpr int64_t UNIT_CHANNELS = 256;
constexpr int64_t LITTLE_WORK = 32 * 1024;  // less is done sooner than it is handed out

}  // namespace

void short_convolution(int kind, const ConvolutionCall &call) {
    const int64_t groups = (call.channels + UNIT_CHANNELS - 1) / UNIT_CHANNELS, rows = call.rows.count;
    const int64_t tokens = rows == 0 ? 0 : call.rows.starts[rows] - call.rows.starts[0];
    const Traced traced(OP_CONVOLUTION, tokens, call.channels);
    for_units(rows * groups, tokens * call.channels * call.width < LITTLE_WORK, [&](int64_t unit, int64_t) {
        const int64_t first = unit % groups * UNIT_CHANNELS;
        kernels().convolve(kind, call, unit / groups, first, std::min(call.channels, first + UNIT_CHANNELS));
    });
}

void recur(int kind, const RecurrenceCall &call) {
    const int64_t rows = call.rows.count, heads = call.value_heads;
    const int64_t tokens = rows == 0 ? 0 : call.rows.starts[rows] - call.rows.starts[0];
    const Traced traced(OP_RECURRENCE, tokens, heads);
    for_units(rows * heads, tokens * heads * call.key_dim * call.value_dim < LITTLE_WORK,
              [&](int64_t unit, int64_t) { kernels().recur(kind, call, unit / heads, unit % heads); });
}

}  // namespace vnx
