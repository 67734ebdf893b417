/* Team: the threads of one rank. The caller is member 0; the others spin a bounded time for the next call, then sleep.

   Owns threads, their sleep and each thread's scratch memory. Knows no arithmetic. What a member does may depend on its
   number, what it computes may not: results are the same for any number of members. */
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace vnx {

/* Does one unit of work. `next` is the unit that this thread will likely be given afterwards, -1 where not known. */
using Work = void (*)(void *context, int64_t unit, int64_t next);

constexpr int MEMBERS_MAX = 256;

/* Set the number of members (1 to MEMBERS_MAX) and how long an idle one spins before it sleeps. Not while work runs. */
void configure_team(int member_count, int spin_us);

int team_size();

/* Let a member run on `count` logical processors only, the caller being member 0. Whether the system allows it. */
bool bind_member(int member, const int32_t *cpus, int count);

/* Do units 0 .. count - 1, each once, in any order and any thread; return when all are done. Each member has a share of
   neighbouring units and takes from the others' when its own is done. A helper that comes late, or never, delays
   nothing: the caller goes on alone. Called from two threads at once, the second works alone. */
void run_team(Work work, void *context, int64_t count);

/* Scratch of the calling thread: whole pages, huge ones from 2 MiB on, kept for the thread's life, contents undefined. Slots are apart. */
enum Slot { SLOT_ROWS, SLOT_TILES, SLOT_STATE, SLOT_PARTIALS, SLOT_STACK, SLOT_STEP, SLOT_CODES, SLOT_SPLIT, SLOT_EXPERTS, SLOT_ROUTES, SLOT_COUNT };
void *scratch(Slot slot, size_t bytes);

/* run_team for a callable `body(unit, next)`; `alone`: too little work to share. */
template <typename Body>
void for_units(int64_t count, bool alone, const Body &body) {
    if (alone || count < 2 || team_size() == 1) {
        for (int64_t unit = 0; unit < count; ++unit)
            body(unit, unit + 1 < count ? unit + 1 : -1);
        return;
    }
    const Work work = [](void *context, int64_t unit, int64_t next) {
        (*static_cast<const Body *>(context))(unit, next);
    };
    run_team(work, const_cast<Body *>(&body), count);
}

}  // namespace vnx
