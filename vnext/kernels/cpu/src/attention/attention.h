/* Paged attention: the plan of a step, made once and used by every layer, and its run. */
#pragma once

#include <memory>
#include <vector>

#include "kernels.h"

namespace vnx {

/* Work that reads one split, or all splits of a part of a long row. `split` -1: all, joined on the way.
   Lanes: `lane_count` queries of the rows members[first_member, ...), `lane0` the first one of the first member. */
struct AttentionItem {
    int32_t first_member, member_count, lane0, lane_count, split;
};

/* A row with queries. `lane_count` = queries * heads per key-value head. `part_at`: where its parts start, in lanes. */
struct AttentionRow {
    int64_t query0;
    int32_t query_count, context, split_count, lane_count;
    int64_t blocks_at, part_at;
};

struct AttentionPlan {
    int64_t heads, kv_heads, block_size;
    int64_t part_count = 0;  // lanes of all splits of short rows, per key-value head
    std::vector<AttentionRow> rows;
    std::vector<AttentionItem> items;
    std::vector<int32_t> members, blocks;
};

/* query_starts [rows + 1], context_lengths [rows], block_table [rows, table_stride]; what a table holds behind a row's
   context is not looked at. Rows without queries are idle. */
std::unique_ptr<AttentionPlan> plan_attention(const int64_t *query_starts, const int64_t *context_lengths,
                                              const int32_t *block_table, int64_t table_stride, int64_t rows,
                                              int64_t heads, int64_t kv_heads, int64_t block_size);

/* The plan of `count` of a plan's queries, which come in this order, close together: each sees what it sees there. What is no query
   of a row is left out. */
std::unique_ptr<AttentionPlan> plan_of_some(const AttentionPlan &plan, const int64_t *queries, int64_t count);

/* Causal attention into call.result, whose tokens of no row are left as they are. */
void run_attention(int kind, const AttentionPlan &plan, AttentionCall call);

}  // namespace vnx
