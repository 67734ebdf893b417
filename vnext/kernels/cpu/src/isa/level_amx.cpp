#define VNX_LEVEL level_amx
#define VNX_AVX512
#define VNX_BF16
#define VNX_VBMI
#include "attention/attention_few.h"
#include "attention/attention_narrow.h"
#include "linear/linear_tiles.h"
#include "recurrence/recurrence_lanes.h"
#include "rows/rows_lanes.h"
#include "sampling/sampling_lanes.h"
#include "select/select_lanes.h"
#include "thin/thin_lanes.h"

namespace vnx {

extern const Kernels amx_kernels = {
    level_amx::linear_f32, level_amx::linear_tiles, level_amx::attend_by_vectors<float>, level_amx::attend_by_tiles, level_amx::attend_codes_but_bf16,
    level_amx::join, level_amx::finish, level_amx::norm, level_amx::gate, level_amx::rotary, level_amx::soft_cap, level_amx::convolve, level_amx::recur, level_amx::widen_codes, level_amx::thin, level_amx::keep_allowed, level_amx::find_peaks,
    level_amx::weigh, level_amx::collect, level_amx::score_keys,
};

}  // namespace vnx
