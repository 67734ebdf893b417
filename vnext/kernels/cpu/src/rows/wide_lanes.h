/* Activations that are made in float64, eight numbers at a time, and rounded once: the same bits at every level, since each
   operation is one of IEEE 754 and none is fused. */
#pragma once

#include "isa/lanes.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

typedef double Doubles __attribute__((vector_size(64)));
typedef uint64_t Longs __attribute__((vector_size(64)));
typedef float Eight __attribute__((vector_size(32)));

/* The series by falling powers of x, of an even number of factors: those of even and of odd powers side by side. */
template <int COUNT>
ALWAYS_INLINE Doubles series(const double (&factors)[COUNT], Doubles x) {
    const Doubles square = x * x;
    Doubles odd = Doubles{} + factors[0], even = Doubles{} + factors[1];
#pragma GCC unroll 16
    for (int i = 2; i < COUNT; i += 2) {
        odd = odd * square + factors[i];
        even = even * square + factors[i + 1];
    }
    return odd * x + even;
}

/* Taylor's, of e^x on [-ln 2 / 2, ln 2 / 2]. */
constexpr double EXP_WIDE[14] = {1 / 6227020800.0, 1 / 479001600.0, 1 / 39916800.0, 1 / 3628800.0, 1 / 362880.0, 1 / 40320.0, 1 / 5040.0,
                                 1 / 720.0, 1 / 120.0, 1 / 24.0, 1 / 6.0, 0.5, 1.0, 1.0};
/* P in erfc(z) = t * e^(P(2 t - 1) - z^2) with t = 2 / (2 + z), the form of Press et al., Numerical Recipes, 3rd edition, 6.2.2, for z
   from 0 on; fitted at Chebyshev's nodes, to 3e-14. */
constexpr double ERFC_WIDE[24] = {
    0, 0x1.38473a8fb48a8p-24, -0x1.3f577130e1fe8p-23, -0x1.e1b3d8fe493a5p-23, 0x1.0f9ab4fcb956cp-20, -0x1.bdc928ef7ef41p-21,
    -0x1.69fab27a12b8fp-19, 0x1.06199ca05e42ep-17, 0x1.def3d56157c53p-27, -0x1.ef10b99db82d6p-16, 0x1.0a5b7da9c7b7ap-15,
    0x1.29ea37ab16c78p-14, -0x1.6d7d7847c1268p-13, -0x1.889e975bbd7c1p-14, 0x1.6131f3d9cf1f4p-11, -0x1.32c1f501f82b3p-13,
    -0x1.33784ed64fee5p-9, 0x1.cd183f498e3f2p-10, 0x1.212cf28862174p-7, -0x1.43821f64c5c60p-7, -0x1.802b39065f745p-5,
    0x1.83d61c52e1ff5p-5, 0x1.5864b151b7d8dp-1, -0x1.57f564e956f5cp-1};

/* e^x for x up to 700, about 0 below -700. ln 2 is taken off in two parts. */
ALWAYS_INLINE Doubles exp_wide(Doubles x) {
    const Doubles low = Doubles{} - 700, inside = x < low ? low : x;
    const Doubles moved = inside * 0x1.71547652b82fep0 + 0x1.8p52; /* its last bits are the nearest whole number's */
    const Doubles whole = moved - 0x1.8p52, part = inside - whole * 0x1.62e42feep-1 - whole * 0x1.a39ef35793c76p-33;
    return series(EXP_WIDE, part) * (Doubles)(((Longs)moved + 1023) << 52);
}

ALWAYS_INLINE Doubles erfc_wide(Doubles z) {
    const Doubles t = 2 / (2 + z);
    return t * exp_wide(series(ERFC_WIDE, 2 * t - 1) - z * z);
}

/* x times the share of a normal distribution below it. */
ALWAYS_INLINE Doubles gelu_wide(Doubles x) {
    const Doubles beyond = erfc_wide((x < 0 ? -x : x) * 0x1.6a09e667f3bcdp-1);
    return x * 0.5 * (x < 0 ? beyond : 2 - beyond);
}

/* xIELU, of slopes as GateCall has them. Constants as in vnext/kernels/references.py. */
ALWAYS_INLINE Doubles xielu_wide(Doubles x, double above, double below) {
    const Doubles edge = Doubles{} - 1e-6, low = x < edge ? x : edge;
    const Doubles curved = (exp_wide(low) - 1 - x) * (below + 0.5);
    return (x <= 0 ? curved : x * x * above) + x * 0.5;
}

ALWAYS_INLINE Lanes activate_wide(Lanes x, const GateCall &call) {
    float numbers[16];
    store(numbers, x);
    Eight low, high;
    memcpy(&low, numbers, sizeof low);
    memcpy(&high, numbers + 8, sizeof high);
    const Doubles first = __builtin_convertvector(low, Doubles), second = __builtin_convertvector(high, Doubles);
    if (call.gate == GELU) {
        low = __builtin_convertvector(gelu_wide(first), Eight);
        high = __builtin_convertvector(gelu_wide(second), Eight);
    } else {
        low = __builtin_convertvector(xielu_wide(first, call.above, call.below), Eight);
        high = __builtin_convertvector(xielu_wide(second, call.above, call.below), Eight);
    }
    memcpy(numbers, &low, sizeof low);
    memcpy(numbers + 8, &high, sizeof high);
    return load(numbers);
}

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
