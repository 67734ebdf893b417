#define VNX_LEVEL codes_neon
#define VNX_NEON
#include "linear/linear_codes.h"
#include "linear/linear_codes_wide.h"
#include "linear/linear_rounded.h"

namespace vnx {

extern const CodesKernels neon_codes = {
    {codes_neon::CODE_ROWS, codes_neon::round_rows, codes_neon::linear_codes},
    {codes_neon::WIDE_ROWS, codes_neon::widen_rows, codes_neon::linear_codes_wide},
    codes_neon::round_groups,
};

}  // namespace vnx
