/* Memory of the shim's GPU: torch's allocator for CPU tensors, of which another process may take all but a few bytes.

   It refuses as torch's allocator of a GPU does, before anything is written and with its words, from within whatever operation of
   torch or launcher asks. Pinned memory is refused as the CUDA runtime does. Nothing is kept: a GPU's allocator gives back what it
   keeps before it refuses. */
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace {

constexpr int64_t BLOCK = 512;  // sizes are multiples of it, as a GPU's are
constexpr int32_t CUDA_ERROR_MEMORY_ALLOCATION = 2;
std::atomic<int64_t> held{0}, peak{0}, most{INT64_MAX}, asked{0}, refused{0}, refuse_at{-1};
thread_local bool is_pinned = false;

int64_t rounded(size_t bytes) { return (int64_t(bytes) + BLOCK - 1) / BLOCK * BLOCK; }

struct Block {
    at::DataPtr data;
    int64_t size;
};

void give_back(void *block) {
    held -= static_cast<Block *>(block)->size;
    delete static_cast<Block *>(block);
}

void refuse(size_t bytes, int64_t free) {
    ++refused;
    const c10::SourceLocation here{__func__, __FILE__, uint32_t(__LINE__)};
    if (is_pinned)
        throw c10::AcceleratorError(here, CUDA_ERROR_MEMORY_ALLOCATION, "CUDA error: out of memory");
    throw c10::OutOfMemoryError(here, "CUDA out of memory. Tried to allocate " + std::to_string(bytes) + " bytes. GPU 0 has " +
                                          std::to_string(free) + " bytes of which are free.");
}

struct Memory : at::Allocator {
    at::Allocator *host = c10::GetCPUAllocator();

    at::DataPtr allocate(size_t bytes) override {
        if (!bytes) return host->allocate(0);
        const int64_t size = rounded(bytes), free = most - held;
        if (asked++ == refuse_at) refuse(bytes, 0);
        if (size > free) refuse(bytes, free);
        if (const int64_t now = held += size; now > peak) peak = now;
        Block *block = new Block{host->allocate(bytes), size};
        return {block->data.get(), block, &give_back, at::Device(at::DeviceType::CPU)};
    }

    at::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void *to, const void *from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

Memory *memory = nullptr;

}  // namespace

extern "C" {

/* From now on tensors of the CPU are the GPU's, until `memory_end`. Those that are there may end later. */
void memory_begin() {
    if (!memory) memory = new Memory;
    most = INT64_MAX, refuse_at = -1, asked = refused = peak = 0;
    c10::SetCPUAllocator(memory);
}

void memory_end() { c10::SetCPUAllocator(memory->host); }

/* Leave so many bytes beside what tensors hold now; -1: all. */
void memory_leave(int64_t free) { most = free < 0 ? INT64_MAX : held + free; }

/* Refuse one request, behind so many others; -1: none. */
void memory_refuse(int64_t behind) { refuse_at = behind < 0 ? -1 : asked + behind; }

void memory_pinned(bool pinned) { is_pinned = pinned; }
int64_t memory_held() { return held; }
int64_t memory_peak() { return peak; }
int64_t memory_refused() { return refused; }

}
