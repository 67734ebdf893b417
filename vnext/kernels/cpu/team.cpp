#include "team.h"

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <new>
#include <pthread.h>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace vnx {
namespace {

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield" ::: "memory");
#endif
}

/* Sleep while `word` holds `expected`; may return early. */
#if defined(__linux__)
void sleep_on(std::atomic<uint32_t> &word, uint32_t expected) {
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}
void wake_all(std::atomic<uint32_t> &word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0);
}
#else
std::mutex sleep_mutex;
std::condition_variable sleep_condition;
void sleep_on(std::atomic<uint32_t> &word, uint32_t expected) {
    std::unique_lock<std::mutex> lock(sleep_mutex);
    sleep_condition.wait(lock, [&] { return word.load() != expected; });
}
void wake_all(std::atomic<uint32_t> &) {
    std::lock_guard<std::mutex> lock(sleep_mutex);
    sleep_condition.notify_all();
}
#endif

/* `epoch` counts the calls: a change of it is the signal to start. `pending` counts the helpers still at work. Words
   that one side spins on lie in cache lines of their own. */
struct Team {
    alignas(64) std::atomic<uint32_t> epoch{0};
    alignas(64) std::atomic<uint32_t> pending{0};
    alignas(64) std::atomic<uint32_t> sleepers{0};
    std::atomic<uint32_t> caller_sleeps{0};
    Work work = nullptr;
    void *context = nullptr;
    int size = 1;
    bool ending = false;
    std::chrono::nanoseconds spin{0};
    std::vector<std::thread> helpers;
    std::mutex busy;
};

Team &team() {
    static Team *the_team = new Team;  // never destroyed: helpers may outlive static destructors
    return *the_team;
}

/* Wait until `word` is no longer `old`: spin for the budget, then sleep, counted in `sleepers`. Returns the new value.
 */
uint32_t await_change(std::atomic<uint32_t> &word, uint32_t old, std::atomic<uint32_t> &sleepers,
                      std::chrono::nanoseconds spin) {
    uint32_t now = word.load(std::memory_order_acquire);
    if (now != old) return now;
    const auto end = std::chrono::steady_clock::now() + spin;
    do {
        for (int i = 0; i < 32; ++i) {
            if ((now = word.load(std::memory_order_acquire)) != old) return now;
            relax();
        }
    } while (std::chrono::steady_clock::now() < end);
    sleepers.fetch_add(1);
    while ((now = word.load()) == old)
        sleep_on(word, old);
    sleepers.fetch_sub(1);
    return now;
}

void help(int member, uint32_t seen) {
    Team &t = team();
    for (;;) {
        seen = await_change(t.epoch, seen, t.sleepers, t.spin);
        if (t.ending) return;
        t.work(t.context, member, t.size);
        if (t.pending.fetch_sub(1) == 1 && t.caller_sleeps.load() != 0) wake_all(t.pending);
    }
}

void signal_start(Team &t) {
    t.epoch.fetch_add(1);
    if (t.sleepers.load() != 0) wake_all(t.epoch);
}

void end_helpers(Team &t) {
    t.ending = true;
    signal_start(t);
    for (auto &helper : t.helpers)
        helper.join();
    t.helpers.clear();
    t.ending = false;
}

/* A child process has no helpers: it works alone until it configures a team of its own. */
void forget_helpers() {
    Team &t = team();
    for (auto &helper : t.helpers)
        helper.detach();
    t.helpers.clear();
    t.size = 1;
    t.sleepers.store(0);
    new (&t.busy) std::mutex;
}

}  // namespace

int team_size() { return team().size; }

void configure_team(int member_count, int spin_us) {
    Team &t = team();
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(nullptr, nullptr, forget_helpers); });
    std::lock_guard<std::mutex> guard(t.busy);
    t.spin = std::chrono::microseconds(spin_us);
    if (member_count == t.size) return;
    end_helpers(t);
    t.size = 1;
    const uint32_t seen = t.epoch.load();
    for (int member = 1; member < member_count; ++member)
        t.helpers.emplace_back(help, member, seen);
    t.size = member_count;
}

void run_team(Work work, void *context) {
    Team &t = team();
    std::unique_lock<std::mutex> guard(t.busy, std::try_to_lock);
    if (!guard.owns_lock() || t.size == 1) {
        work(context, 0, 1);
        return;
    }
    t.work = work;
    t.context = context;
    t.pending.store(static_cast<uint32_t>(t.size - 1));
    signal_start(t);
    work(context, 0, t.size);
    uint32_t left = t.pending.load(std::memory_order_acquire);
    while (left != 0)
        left = await_change(t.pending, left, t.caller_sleeps, t.spin);
}

void *scratch(Slot slot, size_t bytes) {
    struct Buffers {
        void *data[SLOT_COUNT] = {};
        size_t size[SLOT_COUNT] = {};
        ~Buffers() {
            for (void *buffer : data)
                std::free(buffer);
        }
    };
    thread_local Buffers buffers;
    if (buffers.size[slot] < bytes) {
        const size_t rounded = (bytes + bytes / 2 + 4095) & ~size_t(4095);
        std::free(buffers.data[slot]);
        buffers.data[slot] = std::aligned_alloc(64, rounded);
        if (buffers.data[slot] == nullptr) throw std::bad_alloc();
        buffers.size[slot] = rounded;
    }
    return buffers.data[slot];
}

}  // namespace vnx
