/* Divides attention into work items and joins their results.

   A context is read in splits of SPLIT_KEYS keys. Short rows (decodes, small chunks): each split is one work item, shared by
   all rows with the same blocks in it; the thread that finishes the last split of a row joins its parts, in order. Long rows:
   LANES_MAX queries at a time walk all their splits and join on the way. Both join the same parts in the same order, so the
   result does not depend on the batch or on prompt chunking. */
#include "attention/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "team.h"
#include "traced.h"

namespace vnx {
namespace {

int64_t splits_of(int64_t context) { return (context + SPLIT_KEYS - 1) / SPLIT_KEYS; }

/* The blocks that hold split `split` of a row: [first, last) of its block table. */
struct BlockRange {
    const int32_t *first;
    int64_t count;
    bool operator==(const BlockRange &other) const {
        return count == other.count && std::equal(first, first + count, other.first);
    }
};

BlockRange blocks_in(const AttentionPlan &plan, const AttentionRow &row, int64_t split) {
    const int64_t last_key = std::min<int64_t>(row.context, (split + 1) * SPLIT_KEYS);
    const int64_t first = split * SPLIT_KEYS / plan.block_size,
                  last = (last_key + plan.block_size - 1) / plan.block_size;
    return {plan.blocks.data() + row.blocks_at + first, last - first};
}

void plan_long_row(AttentionPlan &plan, int32_t row) {
    const int32_t member = int32_t(plan.members.size()), lanes = plan.rows[row].lane_count;
    plan.members.push_back(row);
    for (int32_t lane = (lanes - 1) / LANES_MAX * LANES_MAX; lane >= 0; lane -= LANES_MAX)
        plan.items.push_back({member, 1, lane, std::min(LANES_MAX, lanes - lane), -1});
}

/* One item for rows of equal blocks, as long as their lanes fit. */
void plan_shared(AttentionPlan &plan, const std::vector<int32_t> &rows, int32_t split) {
    AttentionItem item{int32_t(plan.members.size()), 0, 0, 0, split};
    for (int32_t row : rows) {
        const int32_t lanes = plan.rows[row].lane_count;
        if (item.lane_count + lanes > LANES_MAX) {
            plan.items.push_back(item);
            item = {int32_t(plan.members.size()), 0, 0, 0, split};
        }
        plan.members.push_back(row);
        item.member_count += 1;
        item.lane_count += lanes;
    }
    plan.items.push_back(item);
}

void plan_split(AttentionPlan &plan, const std::vector<int32_t> &short_rows, int32_t split) {
    std::vector<int32_t> rows;
    for (int32_t row : short_rows)
        if (split < plan.rows[row].split_count) rows.push_back(row);
    const auto first_block = [&](int32_t row) { return *blocks_in(plan, plan.rows[row], split).first; };
    std::stable_sort(rows.begin(), rows.end(), [&](int32_t a, int32_t b) { return first_block(a) < first_block(b); });
    for (size_t i = 0; i < rows.size();) {
        std::vector<int32_t> equal{rows[i]};
        const BlockRange range = blocks_in(plan, plan.rows[rows[i]], split);
        for (++i; i < rows.size() && blocks_in(plan, plan.rows[rows[i]], split) == range; ++i)
            equal.push_back(rows[i]);
        plan_shared(plan, equal, split);
    }
}

/* The queries of an item as lanes. */
void fill_lane_set(const AttentionPlan &plan, const AttentionItem &item, int64_t kv_head, int64_t window,
                   LaneSet &lanes) {
    const int64_t group = plan.heads / plan.kv_heads;
    int count = 0;
    for (int32_t m = 0; m < item.member_count; ++m) {
        const AttentionRow &row = plan.rows[plan.members[item.first_member + m]];
        const int64_t begin = m == 0 ? item.lane0 : 0,
                      end = std::min<int64_t>(row.lane_count, begin + item.lane_count - count);
        for (int64_t lane = begin; lane < end; ++lane, ++count) {
            const int64_t place = lane / group, high = row.context - row.query_count + place + 1;
            lanes.query[count] = (row.query0 + place) * plan.heads + kv_head * group + lane % group;
            lanes.high[count] = int32_t(high);
            lanes.low[count] = window > 0 ? int32_t(std::max<int64_t>(0, high - window)) : 0;
        }
    }
    lanes.count = count;
    for (; count % 16 != 0; ++count)
        lanes.low[count] = lanes.high[count] = 0, lanes.query[count] = 0;
}

/* What all members of one run share. Parts lie at [kv_head][part][padded_dim], peaks and sums beside them. */
struct Run {
    const AttentionPlan &plan;
    const AttentionCall &call;
    int kind;
    SplitState parts;
    std::atomic<int32_t> *open_splits;  // [kv_heads][rows]
};

/* The keys of an item: up to the longest context of its members, whose lanes end where theirs do. */
Split split_of(const Run &run, const AttentionItem &item, int64_t kv_head, int64_t split) {
    const AttentionRow &row = run.plan.rows[run.plan.members[item.first_member]];
    int64_t context = 0;
    for (int32_t m = 0; m < item.member_count; ++m)
        context = std::max<int64_t>(context, run.plan.rows[run.plan.members[item.first_member + m]].context);
    const int64_t last = std::min<int64_t>(context, (split + 1) * SPLIT_KEYS);
    return {run.plan.blocks.data() + row.blocks_at, kv_head, int32_t(split * SPLIT_KEYS), int32_t(last)};
}

/* What the lanes see of a split of codes, as a cache of one block in the calling thread's scratch. */
AttentionCall widened(const Run &run, const LaneSet &lanes, const Split &split, int32_t *blocks) {
    AttentionCall call = run.call;
    const int64_t row_bytes = call.head_dim * (run.kind == FLOAT32 ? 4 : 2), width = coded_bytes(call.head_dim);
    char *memory = static_cast<char *>(scratch(SLOT_CODES, size_t(2 * SPLIT_KEYS * row_bytes)));
    const int64_t first = std::max(split.first_key, *std::min_element(lanes.low, lanes.low + lanes.count));
    const int64_t last = std::min(split.last_key, *std::max_element(lanes.high, lanes.high + lanes.count));
    for (int64_t key = first; key < last;) {
        const int64_t count = std::min(last - key, call.block_size - key % call.block_size);
        const int64_t from = split.blocks[key / call.block_size] * call.block_stride +
                             (split.kv_head * call.block_size + key % call.block_size) * width;
        char *to = memory + (key - split.first_key) * row_bytes;
        const auto *keys = static_cast<const int8_t *>(call.key_cache), *values = static_cast<const int8_t *>(call.value_cache);
        kernels().widen_codes(run.kind, keys + from, call.head_dim, count, to);
        kernels().widen_codes(run.kind, values + from, call.head_dim, count, to + SPLIT_KEYS * row_bytes);
        key += count;
    }
    blocks[split.first_key / SPLIT_KEYS] = 0;
    call.number = 0;
    call.key_cache = memory;
    call.value_cache = memory + SPLIT_KEYS * row_bytes;
    call.block_size = SPLIT_KEYS;
    return call;
}

void attend(const Run &run, const LaneSet &lanes, const Split &split, const Split *next, const SplitState &state) {
    const auto function = run.kind == FLOAT32 ? kernels().attend_f32 : kernels().attend_bf16;
    const auto codes = kernels().attend_codes;
    if (run.call.cache_kind != INT8) return function(run.call, lanes, split, next, state);
    if (codes != nullptr && codes(run.kind, run.call, lanes, split, next, state)) return;
    thread_local std::vector<int32_t> blocks;
    blocks.resize(std::max(blocks.size(), size_t(split.first_key / SPLIT_KEYS + 1)));
    function(widened(run, lanes, split, blocks.data()), lanes, {blocks.data(), 0, split.first_key, split.last_key}, nullptr, state);
}

void clear(const SplitState &state, int64_t count, int64_t width) {
    std::fill(state.peak, state.peak + count, LOWEST);
    std::fill(state.weight_sum, state.weight_sum + count, 0.0f);
    std::fill(state.total, state.total + count * width, 0.0f);
}

SplitState state_at(float *memory, int64_t lanes) { return {memory, memory + lanes, memory + 2 * lanes}; }

constexpr int TOGETHER_MAX = 4;  // parts of a long row that one thread computes together
constexpr int64_t UNITS_LEAST = 8;  // a member, so that none waits long for another

/* The calling thread's states: [0] of one split, the others of joined ones. */
SplitState own_state(int64_t width, int index) {
    const int64_t size = LANES_MAX * (width + 2);
    return state_at(static_cast<float *>(scratch(SLOT_STATE, size_t((1 + TOGETHER_MAX) * size) * 4)) + index * size, LANES_MAX);
}

/* A head's sink takes its part of the sum; a lane that saw nothing gives zeros all the same. Peaks are powers of two. */
void add_sink(const Run &run, const SplitState &state, int lane, int64_t query) {
    if (run.call.sinks == nullptr || state.weight_sum[lane] == 0) return;
    const double sink = double(run.call.sinks[query % run.plan.heads]) * 1.4426950408889634;
    state.weight_sum[lane] += float(std::exp2(sink - double(state.peak[lane])));
}

void finish(const Run &run, const SplitState &state, int lane, int64_t query) {
    add_sink(run, state, lane, query);
    const int64_t bytes = run.call.head_dim * (run.kind == FLOAT32 ? 4 : 2);
    kernels().finish(run.kind, state, lane, run.call.padded_dim, run.call.head_dim,
                     static_cast<char *>(run.call.result) + query * bytes);
}

/* A part of a long row: its queries, and the splits that they see. */
struct LongPart {
    LaneSet lanes;
    int64_t first, last;

    void fill(const Run &run, const AttentionItem &item, int64_t kv_head) {
        fill_lane_set(run.plan, item, kv_head, run.call.window, lanes);
        first = *std::min_element(lanes.low, lanes.low + lanes.count) / SPLIT_KEYS;
        last = splits_of(*std::max_element(lanes.high, lanes.high + lanes.count));
    }
};

/* Neighbouring parts of a long row, split by split: what is read of a split from memory, and what a level widens of it, serves all of
   them. */
void run_long(Run &run, const AttentionItem *items, int count, int64_t kv_head) {
    const int64_t width = run.call.padded_dim;
    LongPart parts[TOGETHER_MAX];
    int64_t first = INT64_MAX, last = 0;
    for (int i = 0; i < count; ++i) {
        parts[i].fill(run, items[i], kv_head);
        clear(own_state(width, 1 + i), parts[i].lanes.count, width);
        first = std::min(first, parts[i].first), last = std::max(last, parts[i].last);
    }
    for (int64_t split = first; split < last; ++split) {
        const Split here = split_of(run, items[0], kv_head, split), next = split_of(run, items[0], kv_head, split + 1);
        for (int i = 0; i < count; ++i) {
            const LongPart &part = parts[i];
            if (split < part.first || split >= part.last) continue;
            attend(run, part.lanes, here, split + 1 < part.last ? &next : nullptr, own_state(width, 0));
            kernels().join(own_state(width, 1 + i), 0, own_state(width, 0), 0, part.lanes.count, width);
        }
    }
    for (int i = 0; i < count; ++i)
        for (int lane = 0; lane < parts[i].lanes.count; ++lane)
            finish(run, own_state(width, 1 + i), lane, parts[i].lanes.query[lane]);
}

/* Join the parts of a short row, in order, and write its results. */
void join_row(const Run &run, const AttentionRow &row, int64_t kv_head) {
    const int64_t width = run.call.padded_dim, base = kv_head * run.plan.part_count + row.part_at,
                  group = run.plan.heads / run.plan.kv_heads;
    const SplitState sum = own_state(width, 1);
    clear(sum, row.lane_count, width);
    for (int64_t split = 0; split < row.split_count; ++split) {
        const int64_t at = base + split * row.lane_count;
        const SplitState part{run.parts.peak + at, run.parts.weight_sum + at, run.parts.total + at * width};
        kernels().join(sum, 0, part, 0, row.lane_count, width);
    }
    for (int lane = 0; lane < row.lane_count; ++lane)
        finish(run, sum, lane, (row.query0 + lane / group) * run.plan.heads + kv_head * group + lane % group);
}

void run_short(Run &run, const AttentionItem &item, int64_t kv_head, const Split *next) {
    const int64_t width = run.call.padded_dim;
    const SplitState part = own_state(width, 0);
    LaneSet lanes;
    fill_lane_set(run.plan, item, kv_head, run.call.window, lanes);
    attend(run, lanes, split_of(run, item, kv_head, item.split), next, part);
    int64_t from = 0;
    for (int32_t m = 0; m < item.member_count; ++m) {
        const int32_t index = run.plan.members[item.first_member + m];
        const AttentionRow &row = run.plan.rows[index];
        const int64_t to = kv_head * run.plan.part_count + row.part_at + int64_t(item.split) * row.lane_count;
        std::copy_n(part.peak + from, row.lane_count, run.parts.peak + to);
        std::copy_n(part.weight_sum + from, row.lane_count, run.parts.weight_sum + to);
        std::copy_n(part.total + from * width, row.lane_count * width, run.parts.total + to * width);
        from += row.lane_count;
        if (run.open_splits[kv_head * int64_t(run.plan.rows.size()) + index].fetch_sub(1) == 1)
            join_row(run, row, kv_head);
    }
}

/* The first items of the units, and the end: some parts of a long row together where enough units are left, else single items. */
std::vector<int32_t> units_of(const AttentionPlan &plan) {
    const std::vector<AttentionItem> &items = plan.items;
    const int64_t fair = int64_t(items.size()) * plan.kv_heads / (UNITS_LEAST * team_size());
    const int64_t together = std::clamp<int64_t>(fair, 1, TOGETHER_MAX);
    std::vector<int32_t> starts;
    for (int32_t i = 0; i < int32_t(items.size()); ++i) {
        const bool fits = !starts.empty() && i - starts.back() < together && items[i].split < 0 &&
                          items[i].first_member == items[starts.back()].first_member;
        if (!fits) starts.push_back(i);
    }
    starts.push_back(int32_t(items.size()));
    return starts;
}

/* One unit for one key-value head; neighbouring units are neighbouring heads of the same blocks. */
void run_unit(Run &run, const std::vector<int32_t> &starts, int64_t unit, int64_t next) {
    const int64_t at = unit / run.plan.kv_heads, kv_head = unit % run.plan.kv_heads;
    const AttentionItem &item = run.plan.items[starts[at]];
    if (item.split < 0) return run_long(run, &item, starts[at + 1] - starts[at], kv_head);
    if (next < 0 || run.call.window > 0) return run_short(run, item, kv_head, nullptr);
    const AttentionItem &later = run.plan.items[starts[next / run.plan.kv_heads]];
    const Split ahead = split_of(run, later, next % run.plan.kv_heads, std::max(0, later.split));
    run_short(run, item, kv_head, &ahead);
}

constexpr int64_t ALONE_KEYS = 512;  // rows that read less together are done sooner than a team starts

bool is_small(const AttentionPlan &plan) {
    int64_t keys = 0;
    for (const AttentionRow &row : plan.rows)
        keys += row.context * row.query_count;
    return keys * plan.kv_heads < ALONE_KEYS;
}

/* A plan in the making: rows are added in the order of their queries. */
struct Planner {
    std::unique_ptr<AttentionPlan> plan = std::make_unique<AttentionPlan>();
    std::vector<int32_t> short_rows;
    int64_t split_max = 0;

    Planner(int64_t heads, int64_t kv_heads, int64_t block_size) {
        plan->heads = heads;
        plan->kv_heads = kv_heads;
        plan->block_size = block_size;
    }

    /* `queries` of them, the last one at the end of the context. */
    void add(int64_t query0, int64_t queries, int64_t context, const int32_t *blocks) {
        const int64_t lanes = queries * (plan->heads / plan->kv_heads), splits = splits_of(context),
                      block_count = (context + plan->block_size - 1) / plan->block_size;
        AttentionRow row{query0, int32_t(queries), int32_t(context), int32_t(splits), int32_t(lanes), int64_t(plan->blocks.size()), 0};
        plan->blocks.insert(plan->blocks.end(), blocks, blocks + block_count);
        if (lanes <= LANES_MAX) {
            row.part_at = plan->part_count;
            plan->part_count += splits * lanes;
            short_rows.push_back(int32_t(plan->rows.size()));
            split_max = std::max(split_max, splits);
        }
        plan->rows.push_back(row);
        if (lanes > LANES_MAX) plan_long_row(*plan, int32_t(plan->rows.size()) - 1);
    }

    std::unique_ptr<AttentionPlan> planned() {
        for (int64_t split = 0; split < split_max; ++split)
            plan_split(*plan, short_rows, int32_t(split));
        return std::move(plan);
    }
};

}  // namespace

std::unique_ptr<AttentionPlan> plan_attention(const int64_t *query_starts, const int64_t *context_lengths,
                                              const int32_t *block_table, int64_t table_stride, int64_t rows,
                                              int64_t heads, int64_t kv_heads, int64_t block_size) {
    Planner planner(heads, kv_heads, block_size);
    for (int64_t r = 0; r < rows; ++r)
        if (query_starts[r] < query_starts[r + 1])
            planner.add(query_starts[r], query_starts[r + 1] - query_starts[r], context_lengths[r], block_table + r * table_stride);
    return planner.planned();
}

std::unique_ptr<AttentionPlan> plan_of_some(const AttentionPlan &plan, const int64_t *queries, int64_t count) {
    Planner planner(plan.heads, plan.kv_heads, plan.block_size);
    for (int64_t at = 0, next = 0; at < count; at = next) {
        next = at + 1;
        const auto behind = std::upper_bound(plan.rows.begin(), plan.rows.end(), queries[at],
                                             [](int64_t query, const AttentionRow &row) { return query < row.query0; });
        if (behind == plan.rows.begin()) continue;
        const AttentionRow &row = behind[-1];
        const int64_t end = row.query0 + row.query_count;
        if (queries[at] >= end) continue;
        while (next < count && queries[next] == queries[next - 1] + 1 && queries[next] < end)
            ++next;
        planner.add(at, next - at, row.context - (end - 1 - queries[next - 1]), plan.blocks.data() + row.blocks_at);
    }
    return planner.planned();
}

namespace {

/* As if no rows shared their keys, and every query saw all that its row has before it. */
void count_work(const AttentionPlan &plan, const AttentionCall &call, int kind, Traced &traced) {
    int64_t pairs = 0, keys = 0;
    for (const AttentionRow &row : plan.rows) {
        pairs += int64_t(row.query_count) * row.context - int64_t(row.query_count) * (row.query_count - 1) / 2;
        keys += row.context;
    }
    const int64_t row_bytes = call.cache_kind == INT8 ? coded_bytes(call.head_dim) : call.head_dim * (kind == FLOAT32 ? 4 : 2);
    traced.did(4 * pairs * plan.heads * call.head_dim, 2 * keys * plan.kv_heads * row_bytes);
}

}  // namespace

void run_attention(int kind, const AttentionPlan &plan, AttentionCall call) {
    static std::atomic<uint64_t> calls{0};
    call.number = ++calls;
    call.heads = plan.heads;
    call.kv_heads = plan.kv_heads;
    call.block_size = plan.block_size;
    call.padded_dim = (call.head_dim + 31) / 32 * 32;
    Traced traced(OP_ATTENTION, int64_t(plan.rows.size()), 0, call.heads);
    if (trace_record.load() != nullptr) count_work(plan, call, kind, traced);
    const int64_t parts = plan.part_count * plan.kv_heads, rows = int64_t(plan.rows.size()),
                  open = rows * plan.kv_heads;
    char *memory =
        static_cast<char *>(scratch(SLOT_PARTIALS, size_t(parts) * (call.padded_dim + 2) * 4 + size_t(open) * 4 + 64));
    Run run{plan, call, kind, state_at(reinterpret_cast<float *>(memory + (open * 4 + 63) / 64 * 64), parts),
            reinterpret_cast<std::atomic<int32_t> *>(memory)};
    for (int64_t kv_head = 0; kv_head < plan.kv_heads; ++kv_head)
        for (int64_t row = 0; row < rows; ++row)
            new (run.open_splits + kv_head * rows + row) std::atomic<int32_t>(plan.rows[row].split_count);
    const std::vector<int32_t> starts = units_of(plan);
    const int64_t units = int64_t(starts.size() - 1) * plan.kv_heads;
    for_units(units, is_small(plan), [&](int64_t unit, int64_t next) { run_unit(run, starts, unit, next); });
}

}  // namespace vnx
