/* Rows of queries, keys and values as families join them, brought into one order. */
#pragma once

#include <cstdint>

namespace vnx {

constexpr int64_t GATES_APART = 2, GATE_A_HEAD = 3;

/* `count` rows, `row` bytes apart, of heads of `head` bytes. */
struct JoinedRows {
    char *rows;
    int64_t count, row, heads, kv_heads, head, element;
};

/* Queries come with a gate behind each, or all before all gates, or before one number for each, as `is_gated` of a StackLayer says: the
   gates go to `gates` [count, heads * head], queries, keys and values one behind the other. */
void part_gates(const JoinedRows &joined, int64_t is_gated, void *gates);
/* Heads come in `from` with query, key and value side by side: all queries come first, then all keys, then all values. */
void part_heads(const JoinedRows &joined, const void *from);

}  // namespace vnx
