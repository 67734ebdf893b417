#define VNX_LEVEL level_portable
#include "attention/attention_lanes.h"
#include "linear/linear_lanes.h"
#include "recurrence/recurrence_lanes.h"
#include "rows/rows_lanes.h"
#include "sampling/sampling_lanes.h"
#include "select/select_lanes.h"
#include "thin/thin_lanes.h"

namespace vnx {

extern const Kernels portable_kernels = {
    level_portable::linear_f32, level_portable::linear_bf16, level_portable::attend<float>,
    level_portable::attend<uint16_t>, nullptr, level_portable::join, level_portable::finish, level_portable::norm,
    level_portable::gate, level_portable::rotary, level_portable::soft_cap, level_portable::convolve, level_portable::recur, level_portable::widen_codes, level_portable::thin, level_portable::keep_allowed, level_portable::find_peaks, level_portable::weigh,
    level_portable::collect, level_portable::score_keys,
};

}  // namespace vnx
