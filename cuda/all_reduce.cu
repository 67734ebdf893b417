/* Sums and joins over ranks, one GPU each, through memory mapped by all ranks.

   A launch is one operation; all ranks launch the same operations in the same order, each on one stream. A block copies its
   span of the rank's part into the rank's slot, signals the same block on every rank, and waits for their signals. Then it
       one-shot   adds the span of all ranks
       two-shot   adds its rank's share of the span, signals and waits once more, and reads the shares of the others
       joining    reads the span of every rank
   Each element is summed by one tree in float32 and rounded once: the same bits on every rank in every variant. The tree is
   that of the products' shards (vnext/kernels/shards.py): by halves while the ranks are even in number, then in order.

   Slots come in two sets, used alternately. A rank that rewrites a set has completed the operation in between, for which
   every rank signalled; and a rank signals an operation only after the previous launch, and so its reads, finished.
   A counter in memory numbers the operations, so a relaunched graph continues the count. The same counter numbers the blocks
   in the order they start. The lowest unfinished block of each rank is therefore running, and only blocks of the same number
   wait for it: ranks cannot deadlock, whatever the start order.
   A wait that lasts `patience_ns`, or that the host cancels, names the missing rank in `Watch`. From then on this rank
   computes nothing and its results are invalid: the host checks `Watch` before it uses a result.

   Macros: SCALAR, WORLD (ranks). */
#include "instructions.cuh"

#ifndef SCALAR
#define SCALAR __nv_bfloat16
#endif
#ifndef WORLD
#define WORLD 2
#endif

constexpr int RANKS_MAX = 8, TURNS_MAX = 64, SETS = 2;
constexpr int SIGNALS_BYTES = 8192;  // slots begin behind them
constexpr int CHUNK = Chunk<SCALAR>::SIZE;
constexpr unsigned LOOKS_BETWEEN_CHECKS = 1024, PAUSE_NS = 32;

enum Phase { ENTERED, ADDED, PHASES };

/* At the beginning of each rank's memory. The others write `tickets` and `reported`, each rank its own place. */
struct Signals {
    unsigned long long progress;  // operations so far, and in the lower half the blocks of this one that have started
    unsigned broken;              // some rank did not come: there are no results any more
    unsigned unused;
    unsigned long long tickets[SETS][RANKS_MAX];  // what a rank came for
    unsigned reported[PHASES][TURNS_MAX][RANKS_MAX];  // the last operation that a rank's block has reported
};
static_assert(WORLD <= RANKS_MAX && sizeof(Signals) <= SIGNALS_BYTES, "more than a rank's memory has room for");

/* In the host's memory. */
struct Watch {
    unsigned called_off;          // by the host: wait no longer
    unsigned missing[RANKS_MAX];  // did not come
    unsigned differs[RANKS_MAX];  // came for something else
};

/* A group as this rank sees it: the ranks' memory, then its own watch. */
struct Group {
    const unsigned long long *memories;
    int rank;
    long long capacity_bytes, patience_ns;

    __device__ Signals *signals(int of) const { return reinterpret_cast<Signals *>(memories[of]); }
    __device__ Watch *watch() const { return reinterpret_cast<Watch *>(memories[WORLD]); }
    template <typename V>
    __device__ V *slot(int of, unsigned operation) const {
        return reinterpret_cast<V *>(memories[of] + SIGNALS_BYTES + operation % SETS * capacity_bytes);
    }
};

/* What a block knows, in shared memory. */
struct Turn {
    unsigned turn, operation, is_whole;
};

/* A half-open range of chunks or units. */
struct Span {
    int first, stop;
};

/* ---- meeting ---- */

/* The block's number among those of its launch, by the order in which they start. */
__device__ __forceinline__ void take_turn(const Group &group, Turn *turn) {
    if (threadIdx.x == 0) {
        Signals *own = group.signals(group.rank);
        const unsigned long long before = atomicAdd(&own->progress, 1ull);
        if (unsigned(before) + 1 == gridDim.x) atomicAdd(&own->progress, (1ull << 32) - gridDim.x);
        *turn = {unsigned(before), unsigned(before >> 32) + 1, !*const_cast<volatile unsigned *>(&own->broken)};
    }
    __syncthreads();
}

// A rank is at most one operation ahead, so anything else is a turn that slept, by 2^31 operations and more too.
__device__ __forceinline__ bool is_before(unsigned reported, unsigned operation) { return reported - operation > 1u; }

enum Coming { CAME, MISSING, BROKEN };

__device__ __forceinline__ Coming await(const Group &group, const unsigned *reported, unsigned operation) {
    const unsigned *called_off = &group.watch()->called_off, *broken = &group.signals(group.rank)->broken;
    const long long begin = clock_ns();
    for (unsigned looks = 1; is_before(load_acquire_system(reported), operation); ++looks) {
        __nanosleep(PAUSE_NS);
        if (looks % LOOKS_BETWEEN_CHECKS) continue;
        const bool is_broken = load_acquire_system(broken);
        if (!is_broken && !load_acquire_system(called_off) && clock_ns() - begin < group.patience_ns) continue;
        return !is_before(load_acquire_system(reported), operation) ? CAME : is_broken ? BROKEN : MISSING;
    }
    return CAME;
}

/* Tells of a phase that the whole block has come through, and waits for the other ranks' blocks of the same turn. False in
   every thread where one does not come, or came for something else. A thread a rank. */
__device__ __forceinline__ bool meet(const Group &group, Turn *turn, Phase phase, unsigned long long ticket) {
    __syncthreads();
    const int other = threadIdx.x;
    if (other < WORLD) {
        Signals *own = group.signals(group.rank), *theirs = group.signals(other);
        const unsigned operation = turn->operation, set = operation % SETS;
        const bool is_asked = phase == ENTERED && turn->turn == 0;
        if (is_asked) theirs->tickets[set][group.rank] = ticket;
        store_release_system(&theirs->reported[phase][turn->turn][group.rank], operation);
        const Coming coming = await(group, &own->reported[phase][turn->turn][other], operation);
        const bool differs = is_asked && coming == CAME && own->tickets[set][other] != ticket;
        if (coming == MISSING) store_release_system(&group.watch()->missing[other], 1);
        if (differs) store_release_system(&group.watch()->differs[other], 1);
        if (coming != CAME || differs) {
            store_release_system(&own->broken, 1);
            turn->is_whole = 0;
        }
    }
    __syncthreads();
    return turn->is_whole;
}

/* ---- a block's work ---- */

__device__ __forceinline__ Span part(Span whole, int of, int parts) {
    const int length = whole.stop - whole.first;
    return {whole.first + int((long long)length * of / parts), whole.first + int((long long)length * (of + 1) / parts)};
}

/* Elements as they are; zeros behind the end. `aligned`: to 16 bytes. */
__device__ __forceinline__ Chunk<SCALAR> load_raw(const SCALAR *from, int count, bool aligned) {
    if (aligned && count >= CHUNK) return *reinterpret_cast<const Chunk<SCALAR> *>(from);
    Chunk<SCALAR> chunk;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i)
        chunk.at[i] = i < count ? from[i] : narrow(0.0f, SCALAR{});
    return chunk;
}

__device__ __forceinline__ void store_raw(SCALAR *to, const Chunk<SCALAR> &chunk, int count, bool aligned) {
    if (aligned && count >= CHUNK) {
        *reinterpret_cast<Chunk<SCALAR> *>(to) = chunk;
        return;
    }
#pragma unroll
    for (int i = 0; i < CHUNK; ++i)
        if (i < count) to[i] = chunk.at[i];
}

/* The sum of COUNT numbers, one of each of neighbouring ranks. */
template <int COUNT>
__device__ __forceinline__ float joined(const float *numbers) {
    constexpr int HALF = COUNT % 2 == 0 ? COUNT / 2 : 1;
    if (COUNT % 2 == 0) return __fadd_rn(joined<HALF>(numbers), joined<HALF>(numbers + HALF));
    float total = numbers[0];
#pragma unroll
    for (int i = 1; i < COUNT; ++i)
        total = __fadd_rn(total, numbers[i]);
    return total;
}

/* One chunk of all ranks, summed. */
__device__ __forceinline__ Chunk<SCALAR> summed(const Group &group, unsigned operation, int at) {
    Chunk<SCALAR> parts[WORLD], sum;
#pragma unroll
    for (int rank = 0; rank < WORLD; ++rank)
        parts[rank] = take(group.slot<Chunk<SCALAR>>(rank, operation) + at);
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        float numbers[WORLD];
#pragma unroll
        for (int rank = 0; rank < WORLD; ++rank)
            numbers[rank] = to_float(parts[rank].at[i]);
        sum.at[i] = narrow(joined<WORLD>(numbers), SCALAR{});
    }
    return sum;
}

/* ---- kernels: memories [WORLD + 1]; grid up to TURNS_MAX blocks of any size of at least WORLD threads, shared: a Turn.
   `ticket`: what this is, the same on every rank ---- */

/* out = the ranks' x, summed; count elements, at most a slot; out may be x. */
extern "C" __global__ void __launch_bounds__(512)
sum_one_shot(SCALAR *out, const SCALAR *x, const unsigned long long *memories, int rank, long long capacity_bytes,
             long long patience_ns, int count, unsigned long long ticket, int aligned) {
    DYNAMIC_SHARED(Turn, turn);
    const Group group{memories, rank, capacity_bytes, patience_ns};
    take_turn(group, turn);
    if (!turn->is_whole) return;
    const unsigned operation = turn->operation;
    const Span span = part({0, (count + CHUNK - 1) / CHUNK}, int(turn->turn), int(gridDim.x));
    for (int at = span.first + int(threadIdx.x); at < span.stop; at += int(blockDim.x))
        publish(group.slot<Chunk<SCALAR>>(rank, operation) + at, load_raw(x + at * CHUNK, count - at * CHUNK, aligned));
    if (!meet(group, turn, ENTERED, ticket)) return;
    for (int at = span.first + int(threadIdx.x); at < span.stop; at += int(blockDim.x))
        store_raw(out + at * CHUNK, summed(group, operation, at), count - at * CHUNK, aligned);
}

/* The same by two meetings: an element crosses between two ranks once for its sum and once for its result. */
extern "C" __global__ void __launch_bounds__(512)
sum_two_shot(SCALAR *out, const SCALAR *x, const unsigned long long *memories, int rank, long long capacity_bytes,
             long long patience_ns, int count, unsigned long long ticket, int aligned) {
    DYNAMIC_SHARED(Turn, turn);
    const Group group{memories, rank, capacity_bytes, patience_ns};
    take_turn(group, turn);
    if (!turn->is_whole) return;
    const unsigned operation = turn->operation;
    const Span span = part({0, (count + CHUNK - 1) / CHUNK}, int(turn->turn), int(gridDim.x));
    Chunk<SCALAR> *slot = group.slot<Chunk<SCALAR>>(rank, operation);
    for (int at = span.first + int(threadIdx.x); at < span.stop; at += int(blockDim.x))
        publish(slot + at, load_raw(x + at * CHUNK, count - at * CHUNK, aligned));
    if (!meet(group, turn, ENTERED, ticket)) return;
    const Span share = part(span, rank, WORLD);
    for (int at = share.first + int(threadIdx.x); at < share.stop; at += int(blockDim.x))
        publish(slot + at, summed(group, operation, at));
    if (!meet(group, turn, ADDED, ticket)) return;
    for (int step = 0; step < WORLD; ++step) {
        const int other = (rank + step) % WORLD;  // each rank begins at another
        const Span theirs = part(span, other, WORLD);
        const Chunk<SCALAR> *from = group.slot<Chunk<SCALAR>>(other, operation);
        for (int at = theirs.first + int(threadIdx.x); at < theirs.stop; at += int(blockDim.x))
            store_raw(out + at * CHUNK, take(from + at), count - at * CHUNK, aligned);
    }
}

template <typename Unit>
__device__ __forceinline__ void join(void *out, const void *x, const Group &group, Turn *turn, long long done, int count,
                                     long long row, unsigned long long ticket) {
    const unsigned operation = turn->operation;
    const Span span = part({0, count}, int(turn->turn), int(gridDim.x));
    for (int at = span.first + int(threadIdx.x); at < span.stop; at += int(blockDim.x))
        publish(group.slot<Unit>(group.rank, operation) + at, static_cast<const Unit *>(x)[done + at]);
    if (!meet(group, turn, ENTERED, ticket)) return;
    for (int step = 0; step < WORLD; ++step) {
        const int other = (group.rank + step) % WORLD;
        for (int at = span.first + int(threadIdx.x); at < span.stop; at += int(blockDim.x)) {
            const long long index = done + at, place = (index / row * WORLD + other) * row + index % row;
            static_cast<Unit *>(out)[place] = take(group.slot<Unit>(other, operation) + at);
        }
    }
}

/* Units [done, done + count) of every rank's x, which is rows of `row` units: out has in each row the ranks' rows, in rank
   order. A unit has 16, 4, 2 or 1 bytes. */
extern "C" __global__ void __launch_bounds__(512)
join_ranks(void *out, const void *x, const unsigned long long *memories, int rank, long long capacity_bytes,
           long long patience_ns, long long done, int count, long long row, int unit_bytes, unsigned long long ticket) {
    DYNAMIC_SHARED(Turn, turn);
    const Group group{memories, rank, capacity_bytes, patience_ns};
    take_turn(group, turn);
    if (!turn->is_whole) return;
    if (unit_bytes == 16) join<uint4>(out, x, group, turn, done, count, row, ticket);
    if (unit_bytes == 4) join<unsigned>(out, x, group, turn, done, count, row, ticket);
    if (unit_bytes == 2) join<unsigned short>(out, x, group, turn, done, count, row, ticket);
    if (unit_bytes == 1) join<unsigned char>(out, x, group, turn, done, count, row, ticket);
}
