/* Traced: when each operation began and ended, while somebody asks.

   Owns the record, an array that Python gives. While nobody asks, an operation pays for one test. */
#pragma once

#include <atomic>
#include <cstdint>

#include "kernels.h"

namespace vnx {

enum Operation : int {
    OP_LAYER, OP_PRODUCT, OP_ATTENTION, OP_NORM, OP_GATE, OP_ROTARY, OP_ADAPTERS, OP_ROUTE, OP_EXPERTS, OP_CONVOLUTION, OP_RECURRENCE,
    OP_SAMPLE, OP_COUNT
};

/* `work`: multiplications and additions; `bytes`: of weights or of keys and values, as often as they are read. The `in` of a layer is
   its number. Times are those of the monotonic clock; `ended_ns` is 0 of what has not ended. */
#define VNX_TRACED_CALL(X)                                                                          \
    X(int64_t, operation) X(int64_t, thread) X(int64_t, began_ns) X(int64_t, ended_ns) X(int64_t, rows) \
    X(int64_t, in) X(int64_t, out) X(int64_t, work) X(int64_t, bytes)
struct TracedCall {
    VNX_TRACED_CALL(VNX_FIELD)
};

/* Write the calls from now on to `record`, as many as there is room for; null: none. Not while an operation runs. */
void trace_operations(TracedCall *record, int64_t room);

/* How many operations there were since then. */
int64_t traced_operations();

extern std::atomic<TracedCall *> trace_record;

/* The operation that runs while this lives. */
class Traced {
  public:
    explicit Traced(Operation operation, int64_t rows = 0, int64_t in = 0, int64_t out = 0) {
        if (trace_record.load(std::memory_order_relaxed) != nullptr) begin(operation, rows, in, out);
    }
    ~Traced() {
        if (place_ != nullptr) end();
    }
    Traced(const Traced &) = delete;
    Traced &operator=(const Traced &) = delete;

    void did(int64_t work, int64_t bytes) {
        if (place_ != nullptr) place_->work = work, place_->bytes = bytes;
    }

  private:
    TracedCall *place_ = nullptr;

    void begin(Operation operation, int64_t rows, int64_t in, int64_t out);
    void end();
};

}  // namespace vnx
