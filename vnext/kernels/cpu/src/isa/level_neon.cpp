#define VNX_LEVEL level_neon
#define VNX_NEON
#include "attention/attention_few.h"
#include "linear/linear_lanes.h"
#include "recurrence/recurrence_lanes.h"
#include "rows/rows_lanes.h"
#include "sampling/sampling_lanes.h"
#include "select/select_lanes.h"
#include "thin/thin_lanes.h"

namespace vnx {

extern const Kernels neon_kernels = {
    level_neon::linear_f32, level_neon::linear_bf16, level_neon::attend_by_vectors<float>,
    level_neon::attend_by_vectors<uint16_t>, level_neon::attend_codes, level_neon::join, level_neon::finish, level_neon::norm,
    level_neon::gate, level_neon::rotary, level_neon::soft_cap, level_neon::convolve, level_neon::recur, level_neon::widen_codes, level_neon::thin, level_neon::keep_allowed,
    level_neon::find_peaks, level_neon::weigh, level_neon::collect, level_neon::score_keys,
};

}  // namespace vnx
