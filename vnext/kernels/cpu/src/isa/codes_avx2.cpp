#define VNX_LEVEL codes_avx2
#define VNX_AVX2
#include "linear/linear_codes.h"
#include "linear/linear_codes_wide.h"
#include "linear/linear_rounded.h"

namespace vnx {

extern const CodesKernels avx2_codes = {
    {codes_avx2::CODE_ROWS, codes_avx2::round_rows, codes_avx2::linear_codes},
    {codes_avx2::WIDE_ROWS, codes_avx2::widen_rows, codes_avx2::linear_codes_wide},
    codes_avx2::round_groups,
};

}  // namespace vnx
