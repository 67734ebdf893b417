#define VNX_LEVEL codes_avx512_vnni
#define VNX_AVX512
#define VNX_VNNI
#include "linear/linear_codes.h"
#include "linear/linear_codes_wide.h"
#include "linear/linear_rounded.h"

namespace vnx {

extern const CodesKernels avx512_vnni_codes = {
    {codes_avx512_vnni::CODE_ROWS, codes_avx512_vnni::round_rows, codes_avx512_vnni::linear_codes},
    {codes_avx512_vnni::WIDE_ROWS, codes_avx512_vnni::widen_rows, codes_avx512_vnni::linear_codes_wide},
    codes_avx512_vnni::round_groups,
};

}  // namespace vnx
