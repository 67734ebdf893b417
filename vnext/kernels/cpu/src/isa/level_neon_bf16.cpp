#define VNX_LEVEL level_neon_bf16
#define VNX_NEON
#include "attention/attention_few.h"
#include "linear/linear_dots.h"
#include "recurrence/recurrence_lanes.h"
#include "rows/rows_lanes.h"
#include "sampling/sampling_lanes.h"
#include "select/select_lanes.h"
#include "thin/thin_lanes.h"

namespace vnx {

extern const Kernels neon_bf16_kernels = {
    level_neon_bf16::linear_f32, level_neon_bf16::linear_dots, level_neon_bf16::attend_by_vectors<float>,
    level_neon_bf16::attend_by_vectors<uint16_t>, level_neon_bf16::attend_codes, level_neon_bf16::join, level_neon_bf16::finish, level_neon_bf16::norm,
    level_neon_bf16::gate, level_neon_bf16::rotary, level_neon_bf16::soft_cap, level_neon_bf16::convolve, level_neon_bf16::recur, level_neon_bf16::widen_codes, level_neon_bf16::thin, level_neon_bf16::keep_allowed,
    level_neon_bf16::find_peaks, level_neon_bf16::weigh, level_neon_bf16::collect, level_neon_bf16::score_keys,
};

}  // namespace vnx
