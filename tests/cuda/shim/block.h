/* Blocks: CUDA threads as fibers, one block after the other on an OS thread.

   Owns who runs when, the barriers, what warps do together and what is reported as an error. A thread runs until it
   waits; the order in which waiting threads go on is the caller's, so that code which depends on one is found. */
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "fibers.h"

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace shim {

constexpr unsigned WARP = 32;

/* How a launch is carried out: bits of the caller's `order`; the rest of it is the seed of SHUFFLED and STRAGGLING. */
enum Order : unsigned {
    REVERSE_THREADS = 1,
    REVERSE_BLOCKS = 2,
    EARLY_COPIES = 4,
    SHUFFLED = 8,
    STRAGGLING = 16,  // sleeps behind barriers, now and then: other processes go on meanwhile
    SEED_SHIFT = 5
};
constexpr unsigned STRAGGLES_ONE_IN = 4, STRAGGLE_US = 5000;

enum class State : unsigned char { READY, AT_COLLECTIVE, AT_BARRIER, DONE };

/* 16 (or fewer) bytes on their way to shared memory; `valid` of them are copied, the others become zero. */
struct Copy {
    void *to;
    const void *from;
    unsigned bytes, valid;
};

/* Bytes on their way to memory that other processes map. */
struct Published {
    void *to;
    unsigned bytes;
    alignas(16) char value[16];
};

struct Thread {
    Fiber fiber;
    dim3 index;
    unsigned lane, warp, mask;
    State state;
    const char *what;  // the collective or the file of the barrier
    int line;
    void *offer;
    std::vector<std::vector<Copy>> copies;  // groups, oldest first; the last is still open
    std::vector<Published> published;       // since the last barrier
    bool has_acquired;                      // or was behind a barrier with one who had
};

struct Block {
    std::vector<Thread> threads;
    Fiber driver;
    dim3 index, size, grid;
    unsigned order, running, live, waiting;
    uint64_t random;
    char *stacks, *shared;
    std::vector<Published> settled;  // published before a barrier
    void (*entry)(void *);
    void *argument;
    std::string error;
};

inline thread_local Block *block = nullptr;

inline Thread &self() { return block->threads[block->running]; }

/* ---- who runs ---- */

inline uint64_t next_random(uint64_t &state) {  // xorshift64*
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 0x2545F4914F6CDD1Dull;
}

/* Gives up the block: nothing of it runs any more. */
[[noreturn]] inline void fail(const char *format, ...) {
    char text[512], place[128];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    const Thread &thread = self();
    std::snprintf(place, sizeof place, " (thread %u,%u,%u of block %u,%u,%u)", thread.index.x, thread.index.y,
                  thread.index.z, block->index.x, block->index.y, block->index.z);
    block->error = std::string(text) + place;
    switch_fiber(self().fiber, block->driver);
    std::abort();
}

/* Hands over to the next thread that can run; with none, to the driver. */
inline void run_next(Fiber &from) {
    Block &b = *block;
    const unsigned count = unsigned(b.threads.size());
    const bool back = b.order & REVERSE_THREADS;
    unsigned at = b.running;
    if (b.order & SHUFFLED) at = unsigned(next_random(b.random) >> 33) % count;
    for (unsigned step = 0; step < count; ++step) {
        at = back ? (at + count - 1) % count : (at + 1) % count;
        if (b.threads[at].state != State::READY) continue;
        b.running = at;
        if (&b.threads[at].fiber != &from) switch_fiber(from, b.threads[at].fiber);
        return;
    }
    switch_fiber(from, b.driver);
}

inline void wait() { run_next(self().fiber); }

/* ---- barriers ---- */

inline void arrive(std::vector<Published> &published) {
    for (const Published &each : published)
        std::memcpy(each.to, each.value, each.bytes);
    published.clear();
}

/* What any thread has published or acquired holds for all of them behind a barrier. */
inline void share_order(Block &b) {
    bool has_acquired = false;
    for (Thread &thread : b.threads) {
        has_acquired |= thread.has_acquired;
        b.settled.insert(b.settled.end(), thread.published.begin(), thread.published.end());
        thread.published.clear();
    }
    for (Thread &thread : b.threads)
        thread.has_acquired = has_acquired;
}

inline void straggle(Block &b) {
    const uint64_t drawn = next_random(b.random) >> 33;
    if (drawn % STRAGGLES_ONE_IN == 0) std::this_thread::sleep_for(std::chrono::microseconds(STRAGGLE_US));
}

inline void release_barrier() {
    block->waiting = 0;
    for (Thread &thread : block->threads)
        if (thread.state == State::AT_BARRIER) thread.state = State::READY;
    share_order(*block);
    if (block->order & STRAGGLING) straggle(*block);
}

inline void barrier(const char *file, int line) {
    Block &b = *block;
    Thread &me = self();
    me.what = file;
    me.line = line;
    for (Thread &thread : b.threads) {
        if (thread.state == State::DONE) fail("barrier at line %d of %s after thread %u has ended", line, file, thread.index.x);
        if (thread.state == State::AT_BARRIER && (thread.line != line || std::strcmp(thread.what, file) != 0))
            fail("barrier at line %d of %s meets the one at line %d of %s", line, file, thread.line, thread.what);
        if (thread.state == State::AT_BARRIER) break;  // the others that wait agree with this one
    }
    if (++b.waiting == b.threads.size()) return release_barrier();
    me.state = State::AT_BARRIER;
    wait();
}

/* ---- what a warp does together ---- */

/* Every lane of `mask` comes with an offer; the last one to come carries `work(offers)` out for all of them. */
template <typename Work>
void together(unsigned mask, const char *what, void *offer, const Work &work) {
    Block &b = *block;
    Thread &me = self();
    const unsigned first = me.warp * WARP, count = unsigned(b.threads.size());
    if (!(mask >> me.lane & 1)) fail("%s by lane %u, which is not in its mask %08x", what, me.lane, mask);
    me.state = State::AT_COLLECTIVE;
    me.what = what;
    me.line = 0;
    me.mask = mask;
    me.offer = offer;
    void *offers[WARP] = {};
    for (unsigned lane = 0; lane < WARP; ++lane) {
        if (!(mask >> lane & 1)) continue;
        if (first + lane >= count) fail("%s waits for lane %u, which the block does not have", what, lane);
        Thread &other = b.threads[first + lane];
        if (other.state == State::DONE) fail("%s waits for lane %u, which has ended", what, lane);
        if (other.state != State::AT_COLLECTIVE) return wait();
        if (other.mask != mask || std::strcmp(other.what, what) != 0)
            fail("%s with mask %08x meets %s with mask %08x", what, mask, other.what, other.mask);
        offers[lane] = other.offer;
    }
    work(offers);
    for (unsigned lane = 0; lane < WARP; ++lane)
        if (mask >> lane & 1) b.threads[first + lane].state = State::READY;
}

/* ---- a block from its beginning to its end ---- */

inline void thread_main() {
    block->entry(block->argument);
    Thread &me = self();
    if (block->waiting) fail("a thread ends while %u others wait at a barrier", block->waiting);
    me.state = State::DONE;
    --block->live;
    run_next(me.fiber);
    std::abort();
}

inline std::string deadlock_report(const Block &b) {
    for (const Thread &thread : b.threads)
        if (thread.state == State::AT_COLLECTIVE || thread.state == State::AT_BARRIER)
            return "deadlock: thread " + std::to_string(thread.index.x) + " waits for ever at " + thread.what +
                   (thread.line ? ":" + std::to_string(thread.line) : std::string());
    return "deadlock";
}

inline void run_block(Block &b) {
    block = &b;
    const unsigned count = unsigned(b.threads.size());
    b.live = count;
    b.waiting = 0;
    for (unsigned i = 0; i < count; ++i) {
        Thread &thread = b.threads[i];
        thread.index = dim3(i % b.size.x, i / b.size.x % b.size.y, i / (b.size.x * b.size.y));
        thread.lane = i % WARP;
        thread.warp = i / WARP;
        thread.state = State::READY;
        thread.copies.assign(1, {});
        thread.published.clear();
        thread.has_acquired = false;
        prepare_stack(b.stacks + i * STACK_BYTES);
        start_fiber(thread.fiber, b.stacks + i * STACK_BYTES, thread_main);
    }
    b.running = b.order & REVERSE_THREADS ? 0 : count - 1;
    run_next(b.driver);
    share_order(b);
    arrive(b.settled);  // the end of a kernel releases
    if (b.live && b.error.empty()) b.error = deadlock_report(b);
    for (unsigned i = 0; i < count && b.error.empty(); ++i)
        if (is_overrun(b.stacks + i * STACK_BYTES)) b.error = "a thread needs a larger stack";
}

/* ---- a launch ---- */

struct Launch {
    dim3 grid, block;
    unsigned shared_bytes, workers, order;
};

/* Shared memory of its own for each block, exactly as large as asked for and full of NaN (in any float type). */
inline char *poisoned_memory(unsigned bytes) {
    void *memory = nullptr;
    if (posix_memalign(&memory, 128, bytes ? bytes : 1)) std::abort();
    std::memset(memory, 0xff, bytes);
    return static_cast<char *>(memory);
}

inline void run_blocks(const Launch &launch, std::atomic<uint64_t> &next, void (*entry)(void *), void *argument,
                       std::string &error, std::atomic<bool> &failed) {
    Block b;
    b.threads.resize(launch.block.x * launch.block.y * launch.block.z);
    b.size = launch.block;
    b.grid = launch.grid;
    b.order = launch.order;
    b.entry = entry;
    b.argument = argument;
    const size_t bytes = (b.threads.size() + 1) * STACK_BYTES;  // one below the first, for a thread that overruns its own
    void *stacks = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    b.stacks = static_cast<char *>(stacks) + STACK_BYTES;
    const uint64_t total = uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z;
    for (uint64_t turn; (turn = next++) < total && !failed;) {
        const uint64_t at = launch.order & REVERSE_BLOCKS ? total - 1 - turn : turn;
        b.index = dim3(unsigned(at % launch.grid.x), unsigned(at / launch.grid.x % launch.grid.y),
                       unsigned(at / launch.grid.x / launch.grid.y));
        b.random = (uint64_t(launch.order >> SEED_SHIFT) + 1) * 0x9E3779B97F4A7C15ull + at;
        b.shared = poisoned_memory(launch.shared_bytes);
        run_block(b);
        std::free(b.shared);
        if (!b.error.empty() && !failed.exchange(true)) error = b.error;
    }
    munmap(stacks, bytes);
}

inline std::string launch_blocks(const Launch &launch, void (*entry)(void *), void *argument) {
    std::atomic<uint64_t> next{0};
    std::atomic<bool> failed{false};
    std::string error;
    std::vector<std::thread> workers;
    for (unsigned i = 1; i < launch.workers; ++i)
        workers.emplace_back([&] { run_blocks(launch, next, entry, argument, error, failed); });
    run_blocks(launch, next, entry, argument, error, failed);
    for (std::thread &worker : workers)
        worker.join();
    return error;
}

}  // namespace shim
