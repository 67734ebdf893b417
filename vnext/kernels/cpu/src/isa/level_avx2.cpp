#define VNX_LEVEL level_avx2
#define VNX_AVX2
#include "attention/attention_few.h"
#include "linear/linear_blocked.h"
#include "recurrence/recurrence_lanes.h"
#include "rows/rows_lanes.h"
#include "sampling/sampling_lanes.h"
#include "select/select_lanes.h"
#include "thin/thin_lanes.h"

namespace vnx {

extern const Kernels avx2_kernels = {
    level_avx2::linear_f32, level_avx2::linear_bf16_blocked, level_avx2::attend_by_vectors<float>,
    level_avx2::attend_by_vectors<uint16_t>, level_avx2::attend_codes, level_avx2::join, level_avx2::finish, level_avx2::norm, level_avx2::gate,
    level_avx2::rotary, level_avx2::soft_cap, level_avx2::convolve, level_avx2::recur, level_avx2::widen_codes, level_avx2::thin, level_avx2::keep_allowed, level_avx2::find_peaks, level_avx2::weigh, level_avx2::collect, level_avx2::score_keys,
};

}  // namespace vnx
