/* What sampling knows of a row: its random words, its weights, and searches among them.

   What a token is, and why it is exact, stands in vnext/runtime/sampling_weights.py: weights are whole numbers made of
   single rounded operations, so every sum over the vocabulary is the same in any order, and so is the token on any
   device. Histograms count such numbers by atomics, which therefore show in no bit. */
#pragma once

#include "platform.cuh"

constexpr int WEIGHT_BITS = 40;
constexpr float LEAST_EXPONENT = -64.0f;
constexpr int DIGIT_BITS = 10, BINS = 1 << DIGIT_BITS;
constexpr int WEIGHT_DIGITS = 3;             // of the bits of a weight less those of the weight 1
constexpr unsigned FIRST_KEY = 0x3f800000u;  // bits of the weight 1
constexpr int AT_ONCE = 3;                   // loads of 16 bytes that a thread has under way
using Mass = unsigned long long;

/* ---- random words: twins in vnext/kernels/random_numpy.py ---- */

enum Domain : unsigned { POSITION = 1, INVERSION = 3 };

struct Words {
    unsigned first, second;
};

__device__ __forceinline__ Words threefry(Words key, Words counter) {
    const unsigned schedule[3] = {key.first, key.second, key.first ^ key.second ^ 0x1BD11BDAu};
    const int rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
    unsigned left = counter.first + schedule[0], right = counter.second + schedule[1];
#pragma unroll
    for (unsigned group = 0; group < 5; ++group) {
#pragma unroll
        for (int turn = 0; turn < 4; ++turn) {
            const int bits = rotations[group % 2][turn];
            left += right;
            right = (right << bits | right >> (32 - bits)) ^ left;
        }
        left += schedule[(group + 1) % 3];
        right += schedule[(group + 2) % 3] + group + 1;
    }
    return {left, right};
}

/* floor(u * total / 2^62), u of 62 random bits. */
__device__ __forceinline__ Mass draw_target(long long seed, long long position, Mass total) {
    const Words root{unsigned(Mass(seed) >> 32), unsigned(seed)};
    const Words words = threefry(threefry(root, {unsigned(position), POSITION}), {0, INVERSION});
    const Mass uniform = Mass(words.first >> 1) << 31 | words.second >> 1;
    return __umul64hi(uniform, total) << 2 | uniform * total >> 62;
}

/* ---- the row ---- */

struct Row {
    const float *logits;
    int vocabulary;
    bool is_aligned;  // to 16 bytes
    float peak, scale;
};

/* 2^(exponent + WEIGHT_BITS) without its fraction, a whole number below 2^41; the exponent is at most 0. */
__device__ __forceinline__ float fixed_point(float exponent) {
    const float series[6] = {0x1.5bba14p-10f, 0x1.3cea88p-7f, 0x1.c6b752p-5f, 0x1.ebf9bcp-3f, 0x1.62e42ap-1f, 1.0f};
    const float whole = rintf(exponent), part = __fsub_rn(exponent, whole);
    float power = series[0];
#pragma unroll
    for (int i = 1; i < 6; ++i)
        power = __fadd_rn(__fmul_rn(power, part), series[i]);
    return truncf(__fmul_rn(power, __int_as_float((int(whole) + 127 + WEIGHT_BITS) << 23)));
}

__device__ __forceinline__ float exponent_of(const Row &row, float logit) {
    return __fmul_rn(__fsub_rn(logit, row.peak), row.scale);
}

__device__ __forceinline__ float weight_of(const Row &row, float logit) {
    const float exponent = exponent_of(row, logit);
    return fixed_point(exponent >= LEAST_EXPONENT ? exponent : LEAST_EXPONENT);  // a NaN weighs nothing
}

/* A half-open range of tokens. */
struct Tokens {
    int first, stop;
};

/* A warp's tokens: neighbours, so that the first one that a sum passes is found in one warp's. */
__device__ __forceinline__ Tokens tokens_of(int warp, int vocabulary) {
    const int warps = blockDim.x / 32, range = (vocabulary + warps * 128 - 1) / (warps * 128) * 128;
    return {min(vocabulary, warp * range), min(vocabulary, (warp + 1) * range)};
}

__device__ __forceinline__ float4 load_four(const Row &row, int first) {
    return *reinterpret_cast<const float4 *>(row.logits + first);
}

/* The same near the end of a row, and of rows that are not aligned. */
__device__ __forceinline__ float4 load_up_to_four(const Row &row, int first) {
    const float *at = row.logits + first;
    const int count = row.vocabulary - first;
    return {at[0], count > 1 ? at[1] : minus_infinity(), count > 2 ? at[2] : minus_infinity(), count > 3 ? at[3] : minus_infinity()};
}

template <typename Visit>
__device__ __forceinline__ void visit_four(int first, const float4 &four, Visit visit) {
    visit(first, four.x);
    visit(first + 1, four.y);
    visit(first + 2, four.z);
    visit(first + 3, four.w);
}

/* `visit(token, logit)` for all of the row, each thread its own, rising; behind the vocabulary some of minus infinity. */
template <typename Visit>
__device__ __forceinline__ void each_logit(const Row &row, Visit visit) {
    const Tokens own = tokens_of(threadIdx.x / 32, row.vocabulary);
    int first = own.first + int(threadIdx.x) % 32 * 4;
    if (row.is_aligned)
        for (; first + (AT_ONCE - 1) * 128 + 4 <= own.stop; first += AT_ONCE * 128) {
            float4 fours[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                fours[i] = load_four(row, first + i * 128);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                visit_four(first + i * 128, fours[i], visit);
        }
#pragma unroll 1
    for (; first < own.stop; first += 128)
        visit_four(first, load_up_to_four(row, first), visit);
}

/* ---- the likeliest token ---- */

struct Likeliest {
    float logit;
    int token;
};

/* A NaN is above everything, as in torch; the lower id among equals. */
__device__ __forceinline__ bool is_before(Likeliest a, Likeliest b) {
    const bool a_nan = a.logit != a.logit, b_nan = b.logit != b.logit;
    if (a_nan != b_nan) return a_nan;
    if (!a_nan && a.logit != b.logit) return a.logit > b.logit;
    return a.token < b.token;
}

/* Of this thread's tokens; where it has none, of no token. */
__device__ __forceinline__ Likeliest likeliest_of_thread(const Row &row) {
    Likeliest best{minus_infinity(), row.vocabulary};
    each_logit(row, [&](int token, float logit) {
        if (!(logit < best.logit) && is_before({logit, token}, best)) best = {logit, token};
    });
    return best;
}

/* Of the block's; `spare` has one for each warp. */
__device__ __forceinline__ Likeliest likeliest_of_block(Likeliest best, Likeliest *spare) {
#pragma unroll
    for (int bits = 16; bits > 0; bits /= 2) {
        const Likeliest other{__shfl_xor_sync(ALL_LANES, best.logit, bits), __shfl_xor_sync(ALL_LANES, best.token, bits)};
        if (is_before(other, best)) best = other;
    }
    if (threadIdx.x % 32 == 0) spare[threadIdx.x / 32] = best;
    __syncthreads();
    best = spare[0];
    for (unsigned warp = 1; warp < blockDim.x / 32; ++warp)
        if (is_before(spare[warp], best)) best = spare[warp];
    return best;
}

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
            if (Mass(key) >> (digit + 1) * DIGIT_BITS == prefix) atomicAdd(bins + place_of((key >> digit * DIGIT_BITS) % BINS), mass);
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
