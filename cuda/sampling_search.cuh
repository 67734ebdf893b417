/* Searches in the weights of a row or of some of its tokens: where the heaviest reach a count or a mass, and the draw.

   Histograms count whole numbers with atomics, so the order of the additions does not affect the result. */
#pragma once

#include "sampling_rows.cuh"

constexpr int DIGIT_BITS = 10, BINS = 1 << DIGIT_BITS;
constexpr int WEIGHT_DIGITS = 3;             // of the bits of a weight less those of the weight 1
constexpr unsigned FIRST_KEY = 0x3f800000u;  // bits of the weight 1

/* ---- searches: keys of whole digits, each with a mass ---- */

__device__ __forceinline__ Mass warp_total(Mass x) {
#pragma unroll
    for (int bits = 16; bits > 0; bits /= 2)
        x += __shfl_xor_sync(ALL_LANES, x, bits);
    return x;
}

/* The sum over the lanes above this one. */
__device__ __forceinline__ Mass sum_above(Mass x) {
    Mass sum = x;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const Mass other = __shfl_down_sync(ALL_LANES, sum, distance);
        if (threadIdx.x % 32 + distance < 32) sum += other;
    }
    return sum - x;
}

struct Search {
    unsigned prefix;  // digits of the key that are known
    Mass need;        // still, within this prefix
};

/* A bin's place: lanes that read theirs in turn touch different banks. */
__device__ __forceinline__ int place_of(int bin) { return bin + bin / 32; }
constexpr int PLACES = BINS + BINS / 32;

/* In two halves: shared memory adds 32 bits by one instruction, and 64 by a loop of compare-and-swap. */
__device__ __forceinline__ void add_to(Mass *bin, Mass mass) {
    unsigned *halves = reinterpret_cast<unsigned *>(bin);
    const unsigned low = unsigned(mass), carry = atomicAdd(halves, low) > ~low;
    const unsigned high = unsigned(mass >> 32) + carry;
    if (high) atomicAdd(halves + 1, high);
}

/* By one warp: the bin at which those above and it reach the need. There is one. */
__device__ __forceinline__ void find_digit(const Mass *bins, Search *search) {
    constexpr int OWN = BINS / 32;
    const int lane = threadIdx.x % 32;
    const Mass need = search->need;
    Mass mine = 0;
    for (int i = 0; i < OWN; ++i)
        mine += bins[place_of(lane * OWN + i)];
    Mass above = sum_above(mine);
    __syncwarp();
    if (above >= need || above + mine < need) return;
    int bin = lane * OWN + OWN - 1;
    for (; above + bins[place_of(bin)] < need; --bin)
        above += bins[place_of(bin)];
    search->prefix = search->prefix << DIGIT_BITS | unsigned(bin);
    search->need = need - above;
}

/* The greatest key at which those from it on reach `need`, at least 1; together they do. `offer(add)` has every thread
   add(key, mass) its own, the same each time: once for each digit, from the top. */
template <typename Offer>
__device__ __forceinline__ unsigned find_key(int digits, Mass need, Mass *bins, Search *search, Offer offer) {
    if (threadIdx.x == 0) *search = {0, need};
    for (int digit = digits - 1; digit >= 0; --digit) {
        for (int place = threadIdx.x; place < PLACES; place += blockDim.x)
            bins[place] = 0;
        __syncthreads();
        const unsigned prefix = search->prefix;
        offer([&](unsigned key, Mass mass) {
            if (Mass(key) >> (digit + 1) * DIGIT_BITS == prefix) add_to(bins + place_of((key >> digit * DIGIT_BITS) % BINS), mass);
        });
        __syncthreads();
        if (threadIdx.x < 32) find_digit(bins, search);
        __syncthreads();
    }
    const unsigned found = search->prefix;
    __syncthreads();
    return found;
}

/* ---- what is kept of a row, or of the few of its tokens that matter ---- */

struct Part {
    Mass mass, count;
};

/* Sums over all warps; the parts stay in `parts`. */
__device__ __forceinline__ Part sum_parts(Part own, Part *parts) {
    own = {warp_total(own.mass), warp_total(own.count)};
    __syncthreads();  // those who still read the parts of the last time
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = own;
    __syncthreads();
    Part sum{0, 0};
    for (unsigned i = 0; i < blockDim.x / 32; ++i) {
        sum.mass += parts[i].mass;
        sum.count += parts[i].count;
    }
    return sum;
}

/* All tokens: `each(visit)` gives token and weight. */
struct Everything {
    const Row &row;

    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        each_logit(row, [&](int token, float logit) { visit(token, weight_of(row, logit)); });
    }
};

/* The tokens of one range, by the whole block. */
struct Ranged {
    const Row &row;
    Tokens range;

    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        for (int token = range.first + int(threadIdx.x); token < range.stop; token += blockDim.x)
            visit(token, weight_of(row, row.logits[token]));
    }
};

/* Some of them, in no order, in shared memory. */
struct Few {
    const int *tokens;
    const float *weights;
    int count;

    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        for (int at = threadIdx.x; at < count; at += blockDim.x)
            visit(tokens[at], weights[at]);
    }
};

/* Of those that weigh `floor` or more. */
template <typename Source>
__device__ __forceinline__ Part weigh(const Source &source, float floor, Part *parts) {
    Part own{0, 0};
    source.each([&](int, float weight) {
        if (weight < floor) return;
        own.mass += Mass(weight);
        ++own.count;
    });
    return sum_parts(own, parts);
}

enum Measure { COUNT, MASS };

/* The weight at which the heaviest ones, one after the other, reach `need` in count or in mass; only those of at least
   `floor`, which is above 0, and which together reach it. */
template <typename Source>
__device__ __forceinline__ float reach(const Source &source, float floor, Mass need, Measure measure, Mass *bins, Search *search) {
    const unsigned key = find_key(WEIGHT_DIGITS, need > 0 ? need : 1, bins, search, [&](auto add) {
        source.each([&](int, float weight) {
            if (weight >= floor) add(__float_as_uint(weight) - FIRST_KEY, measure == COUNT ? Mass(1) : Mass(weight));
        });
    });
    return __uint_as_float(key + FIRST_KEY);
}

/* The first token at which the running sum of what is kept passes `target`, which is below the sum of all; the source's
   tokens are within `range`. */
template <typename Source>
__device__ __forceinline__ int draw(const Source &source, Tokens range, float floor, Mass target, Mass *bins, Search *search) {
    const int last = range.stop - 1, digits = range.stop - range.first <= BINS * BINS ? 2 : 3;
    return last - int(find_key(digits, target + 1, bins, search, [&](auto add) {
        source.each([&](int token, float weight) {
            if (weight >= floor) add(unsigned(last - token), Mass(weight));
        });
    }));
}
