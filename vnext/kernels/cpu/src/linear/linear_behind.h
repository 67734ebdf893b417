/* Memory that the thin product behind a linear one reads, fetched while the weights are multiplied. */
#pragma once

#include <algorithm>

#include "kernels.h"

namespace vnx {
namespace VNX_LEVEL {
namespace {

/* Walks over the matrices of a ThinCall, some lines at each step. Products of 32 tokens leave the memory idle. */
class Behind {
  public:
    /* For one of the units that multiply the panels [panel0, panel1), in so many steps. */
    Behind(const LinearCall &call, int64_t panel0, int64_t panel1, int64_t steps) {
        if (call.behind == nullptr) return;
        part_ = call.behind->parts;
        end_ = part_ + call.behind->part_count;
        element_ = call.weight->x_kind == FLOAT32 ? 4 : 2;
        in_ = call.behind->in;
        int64_t lines = 0;
        for (const ThinPart *part = part_; part < end_; ++part)
            lines += (bytes_of(*part, false) + bytes_of(*part, true)) / LINE;
        const int64_t panels = call.weight->panel_count;
        skip(lines * panel0 / panels);
        lines_ = lines * (panel1 - panel0) / panels / steps + 1;
    }

    void fetch() {
        for (int64_t lines = lines_; lines > 0 && part_ < end_;) {
            const int64_t count = std::min(lines, left_);
            for (int64_t i = 0; i < count; ++i, at_ += LINE)
                __builtin_prefetch(at_, 0, 2);
            lines -= count;
            left_ -= count;
            if (left_ == 0) next();
        }
    }

  private:
    static constexpr int64_t LINE = 64;
    const ThinPart *part_ = nullptr, *end_ = nullptr;
    const char *at_ = nullptr;
    int64_t left_ = 0, lines_ = 0, in_ = 0, element_ = 0;
    bool is_up_ = false;

    int64_t bytes_of(const ThinPart &part, bool is_up) const {
        return element_ * (is_up ? (part.width + 15) / 16 * 16 * part.rank : in_ * part.padded_rank);
    }
    void begin() {
        at_ = static_cast<const char *>(is_up_ ? part_->up : part_->down);
        left_ = bytes_of(*part_, is_up_) / LINE;
    }
    void next() {
        if (is_up_) ++part_;
        is_up_ = !is_up_;
        if (part_ < end_) begin();
    }
    void skip(int64_t lines) {
        begin();
        for (; part_ < end_ && lines >= left_; next())
            lines -= left_;
        at_ += lines * LINE;
        left_ -= lines;
    }
};

}  // namespace
}  // namespace VNX_LEVEL
}  // namespace vnx
