#define VNX_LEVEL codes_neon_dot
#define VNX_NEON
#include "linear/linear_codes.h"
#include "linear/linear_codes_wide.h"
#include "linear/linear_rounded.h"

namespace vnx {

extern const CodesKernels neon_dot_codes = {
    {codes_neon_dot::CODE_ROWS, codes_neon_dot::round_rows, codes_neon_dot::linear_codes},
    {codes_neon_dot::WIDE_ROWS, codes_neon_dot::widen_rows, codes_neon_dot::linear_codes_wide},
    codes_neon_dot::round_groups,
};

}  // namespace vnx
