/* Team: the threads of one rank. The caller is member 0; the others spin a bounded time for the next call, then sleep.

   Owns threads, their sleep and each thread's scratch memory. Knows no arithmetic. What a member does may depend on its
   number, what it computes may not: results are the same for any number of members. */
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace vnx {

using Work = void (*)(void *context, int member, int member_count);

constexpr int MEMBERS_MAX = 256;

/* Set the number of members (1 to MEMBERS_MAX) and how long an idle one spins before it sleeps. Not while work runs. */
void configure_team(int member_count, int spin_us);

int team_size();

/* Run `work` once in every member; return when all are done. Called from two threads at once, the second runs alone. */
void run_team(Work work, void *context);

/* Scratch of the calling thread: 64-byte aligned, kept for the thread's life, contents undefined. Slots are apart. */
enum Slot { SLOT_ROWS, SLOT_TILES, SLOT_STATE, SLOT_PARTIALS, SLOT_COUNT };
void *scratch(Slot slot, size_t bytes);

/* Hands out 0, 1, 2, ... to whoever asks next. */
struct Counter {
    std::atomic<int64_t> next{0};
    int64_t take(int64_t count = 1) { return next.fetch_add(count, std::memory_order_relaxed); }
};

/* Run `body(member, member_count)`, a callable, in every member; in the caller alone where `alone`. */
template <typename Body>
void for_team(bool alone, Body &body) {
    if (alone || team_size() == 1) {
        body(0, 1);
        return;
    }
    run_team([](void *context, int member, int count) { (*static_cast<Body *>(context))(member, count); }, &body);
}

}  // namespace vnx
