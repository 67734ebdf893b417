#define VNX_LEVEL level_avx512_bf16
#define VNX_AVX512
#define VNX_BF16
#define VNX_VBMI
#include "attention/attention_few.h"
#include "attention/attention_pairs_few.h"
#include "linear/linear_pairs.h"
#include "recurrence/recurrence_lanes.h"
#include "rows/rows_lanes.h"
#include "sampling/sampling_lanes.h"
#include "select/select_lanes.h"
#include "thin/thin_lanes.h"

namespace vnx {

extern const Kernels avx512_bf16_kernels = {
    level_avx512_bf16::linear_f32, level_avx512_bf16::linear_pairs, level_avx512_bf16::attend_by_vectors<float>,
    level_avx512_bf16::attend_by_pairs, level_avx512_bf16::attend_codes_by_pairs, level_avx512_bf16::join, level_avx512_bf16::finish,
    level_avx512_bf16::norm, level_avx512_bf16::gate, level_avx512_bf16::rotary, level_avx512_bf16::soft_cap, level_avx512_bf16::convolve, level_avx512_bf16::recur, level_avx512_bf16::widen_codes, level_avx512_bf16::thin, level_avx512_bf16::keep_allowed, level_avx512_bf16::find_peaks,
    level_avx512_bf16::weigh, level_avx512_bf16::collect, level_avx512_bf16::score_keys,
};

}  // namespace vnx
