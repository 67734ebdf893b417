/* Which keys of their contexts queries see, where an index chooses them. */
#pragma once

#include "kernels.h"

namespace vnx {

/* The `count` keys of each token's context, all longer, that have the highest scores, of equal ones the first, as places in the cache,
   block * block_size + offset, in the order of the context: places [tokens, count]. */
void choose_keys(int kind, const ScoreCall &call, int64_t tokens, int64_t count, int32_t *places);

}  // namespace vnx
