/* Layers with a state of one size a request: short convolutions, and heads that keep a matrix. */
#pragma once

#include "kernels.h"

namespace vnx {

/* Rows of a step are shared out by groups of channels. */
void short_convolution(int kind, const ConvolutionCall &call);

/* Rows of a step are shared out by heads of values. */
void recur(int kind, const RecurrenceCall &call);

}  // namespace vnx
