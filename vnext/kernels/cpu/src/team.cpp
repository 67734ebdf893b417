#include "team.h"

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <new>
#include <pthread.h>
#include <sched.h>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/mman.h>
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

/* A member's share of the units: `next` is the first one that nobody took. */
struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
};

/* `gate`: OPEN while units may be left, plus the number of helpers inside. A helper enters only through an open gate;
   the caller closes it when no unit is left and waits until nobody is inside, so that nobody looks at a call that is
   over. `epoch` changes with each call and wakes who sleeps. Words that threads spin on lie apart. */
constexpr uint32_t OPEN = 0x80000000u;

struct Team {
    alignas(64) std::atomic<uint32_t> gate{0};
    alignas(64) std::atomic<uint32_t> epoch{0};
    alignas(64) std::atomic<uint32_t> sleepers{0};
    std::atomic<uint32_t> caller_sleeps{0};
    Work work = nullptr;
    void *context = nullptr;
    Share shares[MEMBERS_MAX];
    int size = 1;
    bool ending = false;
    std::atomic<bool> lacks_memory{false};
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

/* Do what is left of one share. */
void take_from(Team &t, Share &share) {
    for (;;) {
        const int64_t unit = share.next.fetch_add(1, std::memory_order_relaxed);
        if (unit >= share.end) return;
        try {
            t.work(t.context, unit, unit + 1 < share.end ? unit + 1 : -1);
        } catch (const std::bad_alloc &) { /* a helper's thread has no caller: the one of run_team hears of it */
            t.lacks_memory.store(true);
        }
    }
}

/* Do one's own share, then what the others left. */
void take_all(Team &t, int member) {
    for (int i = 0; i < t.size; ++i)
        take_from(t, t.shares[(member + i) % t.size]);
}

bool enter(Team &t) {
    uint32_t gate = t.gate.load(std::memory_order_acquire);
    while ((gate & OPEN) != 0)
        if (t.gate.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) return true;
    return false;
}

void help(int member, uint32_t seen) {
    Team &t = team();
    for (;;) {
        seen = await_change(t.epoch, seen, t.sleepers, t.spin);
        if (t.ending) return;
        if (!enter(t)) continue;
        take_all(t, member);
        if (t.gate.fetch_sub(1) == 1 && t.caller_sleeps.load() != 0) wake_all(t.gate);
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
    t.gate.store(0);
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

bool bind_member(int member, const int32_t *cpus, int count) {
#if defined(__linux__)
    Team &t = team();
    std::lock_guard<std::mutex> guard(t.busy);
    if (member < 0 || member >= t.size) return false;
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    for (int i = 0; i < count; ++i)
        if (cpus[i] >= 0 && cpus[i] < CPU_SETSIZE) CPU_SET(cpus[i], &allowed);
    const pthread_t thread = member == 0 ? pthread_self() : t.helpers[size_t(member) - 1].native_handle();
    return pthread_setaffinity_np(thread, sizeof allowed, &allowed) == 0;
#else
    return member < 0 && cpus == nullptr && count < 0;
#endif
}

void run_team(Work work, void *context, int64_t count) {
    Team &t = team();
    std::unique_lock<std::mutex> guard(t.busy, std::try_to_lock);
    if (!guard.owns_lock() || t.size == 1) {
        for (int64_t unit = 0; unit < count; ++unit)
            work(context, unit, unit + 1 < count ? unit + 1 : -1);
        return;
    }
    t.work = work;
    t.context = context;
    for (int member = 0; member < t.size; ++member) {
        t.shares[member].next.store(count * member / t.size, std::memory_order_relaxed);
        t.shares[member].end = count * (member + 1) / t.size;
    }
    t.gate.store(OPEN, std::memory_order_release);
    signal_start(t);
    take_all(t, 0);
    uint32_t inside = t.gate.fetch_and(~OPEN) & ~OPEN;
    while (inside != 0)
        inside = await_change(t.gate, inside, t.caller_sleeps, t.spin);
    if (t.lacks_memory.exchange(false)) throw std::bad_alloc();
}

void *scratch(Slot slot, size_t bytes) {
    constexpr size_t HUGE_PAGE = size_t(2) << 20;
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
        const size_t unit = bytes < HUGE_PAGE ? 4096 : HUGE_PAGE, rounded = (bytes + bytes / 2 + unit - 1) & ~(unit - 1);
        std::free(buffers.data[slot]);
        buffers.size[slot] = 0;
        buffers.data[slot] = std::aligned_alloc(unit, rounded);
        if (buffers.data[slot] == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
        if (unit == HUGE_PAGE) madvise(buffers.data[slot], rounded, MADV_HUGEPAGE);  // where there are none it does without
#endif
        buffers.size[slot] = rounded;
    }
    return buffers.data[slot];
}

}  // namespace vnx
