#include "traced.h"

#include <chrono>

namespace vnx {
namespace {

std::atomic<int64_t> count{0};
int64_t room = 0;

int64_t now_ns() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

int64_t thread_number() {
    static std::atomic<int64_t> threads{0};
    thread_local const int64_t own = threads++;
    return own;
}

}  // namespace

std::atomic<TracedCall *> trace_record{nullptr};

void trace_operations(TracedCall *record, int64_t entries) {
    count = 0;
    room = entries;
    trace_record = record;
}

int64_t traced_operations() { return count; }

void Traced::begin(Operation operation, int64_t rows, int64_t in, int64_t out) {
    const int64_t at = count++;
    if (at >= room) return;
    place_ = trace_record.load() + at;
    *place_ = {operation, thread_number(), now_ns(), 0, rows, in, out, 0, 0};
}

void Traced::end() { place_->ended_ns = now_ns(); }

}  // namespace vnx
