#define VNX_LEVEL codes_portable
#include "linear/linear_codes.h"
#include "linear/linear_codes_wide.h"
#include "linear/linear_rounded.h"

namespace vnx {

extern const CodesKernels portable_codes = {
    {codes_portable::CODE_ROWS, codes_portable::round_rows, codes_portable::linear_codes},
    {codes_portable::WIDE_ROWS, codes_portable::widen_rows, codes_portable::linear_codes_wide},
    codes_portable::round_groups,
};

}  // namespace vnx
