#define VNX_LEVEL level_avx512
#define VNX_AVX512
#include "attention/attention_few.h"
#include "linear/linear_blocked.h"
#include "recurrence/recurrence_lanes.h"
#include "rows/rows_lanes.h"
#include "sampling/sampling_lanes.h"
#include "select/select_lanes.h"
#include "thin/thin_lanes.h"

namespace vnx {

extern const Kernels avx512_kernels = {
    level_avx512::linear_f32, level_avx512::linear_bf16_blocked, level_avx512::attend_by_vectors<float>,
    level_avx512::attend_by_vectors<uint16_t>, level_avx512::attend_codes, level_avx512::join, level_avx512::finish, level_avx512::norm,
    level_avx512::gate, level_avx512::rotary, level_avx512::soft_cap, level_avx512::convolve, level_avx512::recur, level_avx512::widen_codes, level_avx512::thin, level_avx512::keep_allowed, level_avx512::find_peaks, level_avx512::weigh, level_avx512::collect, level_avx512::score_keys,
};

}  // namespace vnx
