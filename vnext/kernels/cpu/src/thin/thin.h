/* Thin products of LoRA adapters: the entry point. */
#pragma once

#include "kernels.h"

namespace vnx {

/* Multiplications of a call. */
int64_t thin_work(const ThinCall &call);

/* Add up(down(x)) of each part to the rows of its tokens. Parts with one token have other columns. */
void add_thin(int kind, const ThinCall &call);

}  // namespace vnx
