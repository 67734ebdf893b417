#include "thin/thin.h"

#include <algorithm>

#include "team.h"
#include "traced.h"

namespace vnx {
namespace {

constexpr int64_t UNIT_TOKENS = 8;         // as many share what a core reads of an adapter
constexpr int64_t ALONE_WORK = 64 * 1024;  // multiplications that are done sooner than they are handed out

int64_t units_of(const ThinPart &part) { return (part.count + UNIT_TOKENS - 1) / UNIT_TOKENS; }

}  // namespace

int64_t thin_work(const ThinCall &call) {
    int64_t work = 0;
    for (const ThinPart *part = call.parts; part < call.parts + call.part_count; ++part)
        work += part->count * part->rank * (call.in + part->width);
    return work;
}

void add_thin(int kind, const ThinCall &call) {
    int64_t units = 0;
    for (const ThinPart *part = call.parts; part < call.parts + call.part_count; ++part)
        units += units_of(*part);
    const Traced traced(OP_ADAPTERS, call.part_count, call.in);
    for_units(units, thin_work(call) < ALONE_WORK, [&](int64_t unit, int64_t) {
        const ThinPart *part = call.parts;
        float *narrow = call.narrow;
        for (; unit >= units_of(*part); ++part) {
            unit -= units_of(*part);
            if (narrow != nullptr) narrow += part->count * part->padded_rank;
        }
        kernels().thin(kind, call, *part, unit * UNIT_TOKENS, std::min(part->count, (unit + 1) * UNIT_TOKENS), narrow);
    });
}

}  // namespace vnx
