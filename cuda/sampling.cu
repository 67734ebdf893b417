/* Sampling: a token for each row of logits, and the penalties before it.

   What a token is, and why it is exact, stands in vnext/runtime/sampling_weights.py: weights are whole numbers made of
   single rounded operations, so every sum over the vocabulary is the same in any order, and so is the token on any
   device. Histograms count such numbers by atomics, which therefore show in no bit.

   One block a row. shared: sample_shared_bytes of vnext/kernels/cuda/sampling.py. */
#include "platform.cuh"

constexpr int WEIGHT_BITS = 40;
constexpr float LEAST_EXPONENT = -64.0f;
constexpr int DIGIT_BITS = 10, DIGITS = 3, BINS = 1 << DIGIT_BITS;
constexpr unsigned FIRST_KEY = 0x3f800000u;  // bits of the weight 1
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

/* ---- weights ---- */

struct Row {
    const float *logits;
    int vocabulary;
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

__device__ __forceinline__ float weight_of(const Row &row, int token) {
    const float exponent = __fmul_rn(__fsub_rn(row.logits[token], row.peak), row.scale);
    return fixed_point(exponent >= LEAST_EXPONENT ? exponent : LEAST_EXPONENT);  // a NaN weighs nothing
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

__device__ __forceinline__ Likeliest best_of_warp(Likeliest best) {
#pragma unroll
    for (int bits = 16; bits > 0; bits /= 2) {
        const Likeliest other{__shfl_xor_sync(ALL_LANES, best.logit, bits), __shfl_xor_sync(ALL_LANES, best.token, bits)};
        if (is_before(other, best)) best = other;
    }
    return best;
}

__device__ __forceinline__ Likeliest find_likeliest(const float *logits, int vocabulary, Likeliest *spare) {
    Likeliest best{minus_infinity(), vocabulary};
    for (int token = threadIdx.x; token < vocabulary; token += blockDim.x)
        if (is_before({logits[token], token}, best)) best = {logits[token], token};
    best = best_of_warp(best);
    if (threadIdx.x % 32 == 0) spare[threadIdx.x / 32] = best;
    __syncthreads();
    best = spare[0];
    for (unsigned warp = 1; warp < blockDim.x / 32; ++warp)
        if (is_before(spare[warp], best)) best = spare[warp];
    return best;
}

/* ---- floors ---- */

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

/* By one warp: the bin at which those above and it reach the need. There is one. */
__device__ __forceinline__ void find_digit(const Mass *bins, Search *search) {
    constexpr int OWN = BINS / 32;
    const int lane = threadIdx.x % 32;
    const Mass need = search->need;
    Mass mine = 0;
    for (int i = 0; i < OWN; ++i)
        mine += bins[lane * OWN + i];
    Mass above = sum_above(mine);
    __syncwarp();
    if (above >= need || above + mine < need) return;
    int bin = lane * OWN + OWN - 1;
    for (; above + bins[bin] < need; --bin)
        above += bins[bin];
    search->prefix = search->prefix << DIGIT_BITS | unsigned(bin);
    search->need = need - above;
}

enum Measure { COUNT, MASS };

/* The weight at which the heaviest ones, one after the other, reach `need` in count or in mass; only those of at least
   `floor`, which is above 0, and which together reach it. Digit by digit of their bits, from the top. */
__device__ __forceinline__ float reach(const Row &row, float floor, Mass need, Measure measure, Mass *bins, Search *search) {
    if (threadIdx.x == 0) *search = {0, need > 0 ? need : 1};
    for (int digit = DIGITS - 1; digit >= 0; --digit) {
        for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x)
            bins[bin] = 0;
        __syncthreads();
        const unsigned prefix = search->prefix;
        for (int token = threadIdx.x; token < row.vocabulary; token += blockDim.x) {
            const float weight = weight_of(row, token);
            if (weight < floor) continue;
            const Mass key = __float_as_uint(weight) - FIRST_KEY;
            if (key >> (digit + 1) * DIGIT_BITS != prefix) continue;
            atomicAdd(bins + (key >> digit * DIGIT_BITS) % BINS, measure == COUNT ? Mass(1) : Mass(weight));
        }
        __syncthreads();
        if (threadIdx.x < 32) find_digit(bins, search);
        __syncthreads();
    }
    const float found = __uint_as_float(search->prefix + FIRST_KEY);
    __syncthreads();
    return found;
}

/* Tokens go to warps in ranges of neighbours: the sum and the count of what each range keeps. */
struct Part {
    Mass mass, count;
};

__device__ __forceinline__ int range_of(int vocabulary) {
    const int warps = blockDim.x / 32;
    return (vocabulary + warps * 32 - 1) / (warps * 32) * 32;
}

/* Sums over all warps; the parts stay in `parts`. */
__device__ __forceinline__ Part weigh(const Row &row, float floor, Part *parts) {
    const int warp = threadIdx.x / 32, range = range_of(row.vocabulary);
    Part own{0, 0};
    for (int token = warp * range + threadIdx.x % 32; token < min(row.vocabulary, (warp + 1) * range); token += 32) {
        const float weight = weight_of(row, token);
        if (weight < floor) continue;
        own.mass += Mass(weight);
        ++own.count;
    }
    own = {warp_total(own.mass), warp_total(own.count)};
    __syncthreads();  // those who still read the parts of the last time
    if (threadIdx.x % 32 == 0) parts[warp] = own;
    __syncthreads();
    Part sum{0, 0};
    for (unsigned i = 0; i < blockDim.x / 32; ++i) {
        sum.mass += parts[i].mass;
        sum.count += parts[i].count;
    }
    return sum;
}

/* ---- the draw ---- */

/* The first token at which the running sum of what is kept passes the target, which is below the sum of all. */
__device__ __forceinline__ void draw(long long *token, const Row &row, float floor, Mass target, const Part *parts) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, range = range_of(row.vocabulary);
    for (int i = 0; i < warp; ++i) {
        if (target < parts[i].mass) return;  // another warp's
        target -= parts[i].mass;
    }
    if (target >= parts[warp].mass) return;
    for (int first = warp * range;; first += 32) {
        const int at = first + lane;
        const float weight = at < row.vocabulary ? weight_of(row, at) : 0.0f;
        const Mass kept = weight >= floor ? Mass(weight) : 0;
        const Mass all = warp_total(kept), up_to = all - sum_above(kept);
        const unsigned passed = __ballot_sync(ALL_LANES, up_to > target);
        if (passed) {
            if (lane == 0) *token = first + __ffs(int(passed)) - 1;
            return;
        }
        target -= all;
    }
}

/* ---- the kernels ---- */

/* logits [rows, vocabulary] with a stride in elements, everything else [rows]; temperature 0: greedy, top_k 0, top_p 1 and
   min_p 0: off. */
extern "C" __global__ void __launch_bounds__(1024)
sample_rows(long long *tokens, const float *logits, const float *temperature, const long long *top_k, const float *top_p,
            const float *min_p, const long long *seed, const long long *position, long long stride, int vocabulary) {
    DYNAMIC_SHARED(Mass, bins);
    Search *search = reinterpret_cast<Search *>(bins + BINS);
    Part *parts = reinterpret_cast<Part *>(search + 1);
    Likeliest *spare = reinterpret_cast<Likeliest *>(parts + blockDim.x / 32);
    const int at = blockIdx.x;
    Row row{logits + at * stride, vocabulary, 0.0f, 0.0f};
    const Likeliest best = find_likeliest(row.logits, vocabulary, spare);
    if (threadIdx.x == 0) tokens[at] = best.token;
    if (!(temperature[at] > 0.0f)) return;
    row.peak = best.logit;
    row.scale = float(fmin(1.4426950408889634 / double(temperature[at]), 3.4028234663852886e38));
    float floor = fmaxf(1.0f, truncf(__fmul_rn(min_p[at], 1099511627776.0f)));
    Part kept = weigh(row, floor, parts);
    if (top_k[at] > 0 && Mass(top_k[at]) < kept.count) {
        floor = reach(row, floor, Mass(top_k[at]), COUNT, bins, search);
        kept = weigh(row, floor, parts);
    }
    if (top_p[at] < 1.0f && kept.count > 0) {
        const Mass wanted = Mass(ceil(__dmul_rn(double(top_p[at]), double(kept.mass))));
        floor = reach(row, floor, min(wanted, kept.mass), MASS, bins, search);
        kept = weigh(row, floor, parts);
    }
    if (kept.mass > 0) draw(tokens + at, row, floor, draw_target(seed[at], position[at], kept.mass), parts);
}

/* logits [*, vocabulary] dense, in place, of the rows `rows` [P]: repetition divides positive and multiplies other logits
   of tokens in prompt or output; frequency and presence take off for tokens of the output. Everything else [P] or
   [P, vocabulary]. Grid (parts of a row, P). */
extern "C" __global__ void __launch_bounds__(256)
penalise(float *logits, const long long *rows, const float *repetition, const float *presence, const float *frequency,
         const unsigned char *prompt_mask, const float *output_counts, int vocabulary) {
    const int token = blockIdx.x * blockDim.x + threadIdx.x, at = blockIdx.y;
    if (token >= vocabulary) return;
    const long long place = (long long)at * vocabulary + token;
    float *logit = logits + rows[at] * vocabulary + token;
    const float count = output_counts[place], before = *logit;
    float after = before;
    if (prompt_mask[place] || count > 0.0f)
        after = before > 0.0f ? __fdiv_rn(before, repetition[at]) : __fmul_rn(before, repetition[at]);
    after = __fsub_rn(after, __fmul_rn(frequency[at], count));
    *logit = __fsub_rn(after, count > 0.0f ? presence[at] : 0.0f);
}
