#include "step/joined.h"

#include <cstring>

namespace vnx {
namespace {

/* Behind all queries there is one gate for each: it goes to `gates` as many times as a head has numbers. */
void spread_gates(const JoinedRows &joined, void *gates) {
    const int64_t element = joined.element, queries = joined.heads * joined.head, numbers = joined.head / element;
    for (int64_t token = 0; token < joined.count; ++token) {
        char *behind = joined.rows + token * joined.row + queries, *to = static_cast<char *>(gates) + token * queries;
        for (int64_t i = 0; i < joined.heads * numbers; ++i)
            std::memcpy(to + i * element, behind + i / numbers * element, size_t(element));
        std::memmove(behind, behind + joined.heads * element, size_t(2 * joined.kv_heads * joined.head));
    }
}

}  // namespace

void part_gates(const JoinedRows &joined, int64_t is_gated, void *gates) {
    if (is_gated == GATE_A_HEAD) return spread_gates(joined, gates);
    const int64_t head = joined.head, queries = joined.heads * head;
    for (int64_t token = 0; token < joined.count; ++token) {
        char *row = joined.rows + token * joined.row, *to = static_cast<char *>(gates) + token * queries;
        if (is_gated == GATES_APART) std::memcpy(to, row + queries, size_t(queries));
        for (int64_t i = 0; i < joined.heads && is_gated != GATES_APART; ++i) {
            std::memcpy(to + i * head, row + (2 * i + 1) * head, size_t(head));
            if (i > 0) std::memcpy(row + i * head, row + 2 * i * head, size_t(head));
        }
        std::memmove(row + queries, row + 2 * queries, size_t(2 * joined.kv_heads * head));
    }
}

void part_heads(const JoinedRows &joined, const void *from) {
    for (int64_t at = 0; at < joined.count * joined.row; at += joined.row)
        for (int64_t i = 0; i < 3 * joined.heads; ++i)
            std::memcpy(joined.rows + at + (i % 3 * joined.heads + i / 3) * joined.head, static_cast<const char *>(from) + at + i * joined.head,
                        size_t(joined.head));
}

}  // namespace vnx
