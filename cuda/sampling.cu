/* Sampling: one token per row of logits, and the adjustments of logits before it: bias, bans, penalties.

   One block per row. The logits are read twice: to find the likeliest token, and to weigh or filter the tokens; a third time
   only if a filter keeps more than CANDIDATES tokens. Between the two reads, each thread's heaviest token gives a lower bound
   of the weight that the filters need: if n threads reach a weight, at least n tokens do.
   shared: SHARED_BYTES of vnext/kernels/cuda/sampling.py. */
#include "sampling_search.cuh"

constexpr int CANDIDATES = 4096, WARPS_MAX = 32;

/* In shared memory. */
struct Workspace {
    Mass bins[PLACES];
    Search search[1];
    Part parts[WARPS_MAX];
    Likeliest spare[WARPS_MAX];
    int count[2], tokens[CANDIDATES];
    float weights[CANDIDATES];
};

/* A row's wishes. */
struct Filters {
    Mass top_k;  // 0: off
    float top_p;

    __device__ bool by_count() const { return top_k > 0; }
    __device__ bool by_mass() const { return top_p < 1.0f; }
    __device__ Mass wanted(Mass of) const { return min(Mass(ceil(__dmul_rn(double(top_p), double(of)))), of); }
};

/* A weight that the heaviest tokens of `rank` threads reach. */
__device__ __forceinline__ float edge_of(const Row &row, float likeliest, int rank, Workspace &space) {
    const float weight = fmaxf(weight_of(row, likeliest), 1.0f);
    const unsigned key = find_key(WEIGHT_DIGITS, rank, space.bins, space.search, [&](auto add) {
        add(__float_as_uint(weight) - FIRST_KEY, 1);
    });
    return __uint_as_float(key + FIRST_KEY);
}

/* Puts tokens of at least `edge` into the workspace and says how many there are, even of those that find no room; where
   all are to be weighed, what those of at least `floor` weigh. */
__device__ __forceinline__ Part collect(const Row &row, float floor, float edge, bool weighs_all, Workspace &space, int &count) {
    const float least = log2f(edge) - float(WEIGHT_BITS) - 0x1p-6f;  // what is less likely surely weighs less
    Part own{0, 0};
    if (threadIdx.x == 0) *space.count = 0;
    __syncthreads();
    each_logit(row, [&](int token, float logit) {
        if (!weighs_all && !(exponent_of(row, logit) >= least)) return;
        const float weight = weight_of(row, logit);
        if (weight < floor) return;
        own.mass += Mass(weight);
        ++own.count;
        if (weight < edge) return;
        const int place = atomicAdd(space.count, 1);
        if (place < CANDIDATES) space.tokens[place] = token, space.weights[place] = weight;
    });
    const Part sum = sum_parts(own, space.parts);
    count = *space.count;
    return sum;
}

/* The draw among all: within the warp's tokens where the sum passes the target; `parts` are those of the last weighing. */
__device__ __forceinline__ int draw_of_all(const Row &row, float floor, Mass target, Workspace &space) {
    int warp = 0;
    for (; target >= space.parts[warp].mass; ++warp)
        target -= space.parts[warp].mass;
    const Tokens range = tokens_of(warp, row.vocabulary);
    return draw(Ranged{row, range}, range, floor, target, space.bins, space.search);
}

/* The token of a row with a temperature; `likeliest` is the logit of this thread's, `floor` what min-p lets it keep. */
__device__ __forceinline__ int choose(const Row &row, float likeliest, float floor, const Filters &filters, long long seed,
                                      long long position, int otherwise, Workspace &space) {
    const int threads = int(blockDim.x);
    const bool can_rank = filters.by_count() ? filters.top_k <= threads : filters.by_mass();
    if (can_rank) {
        const float edge = fmaxf(floor, edge_of(row, likeliest, filters.by_count() ? int(filters.top_k) : threads - threads / 32, space));
        Few few{space.tokens, space.weights, 0};
        Part kept = collect(row, floor, edge, !filters.by_count(), space, few.count);
        if (few.count <= CANDIDATES && few.count > 0) {
            float least = edge;
            if (filters.by_count() && filters.top_k < few.count) least = reach(few, edge, filters.top_k, COUNT, space.bins, space.search);
            const Part found = weigh(few, least, space.parts);
            if (filters.by_count()) kept = found;
            const Mass wanted = filters.by_mass() ? filters.wanted(kept.mass) : 0;
            if (wanted <= found.mass) {
                if (filters.by_mass()) least = reach(few, least, wanted, MASS, space.bins, space.search);
                const Mass mass = weigh(few, least, space.parts).mass;
                return draw(few, {0, row.vocabulary}, least, draw_target(seed, position, mass), space.bins, space.search);
            }
        }
    }
    const Everything all{row};
    Part kept = weigh(all, floor, space.parts);
    if (filters.by_count() && filters.top_k < kept.count) {
        floor = reach(all, floor, filters.top_k, COUNT, space.bins, space.search);
        kept = weigh(all, floor, space.parts);
    }
    if (filters.by_mass() && kept.count > 0) {
        floor = reach(all, floor, filters.wanted(kept.mass), MASS, space.bins, space.search);
        kept = weigh(all, floor, space.parts);
    }
    return kept.mass > 0 ? draw_of_all(row, floor, draw_target(seed, position, kept.mass), space) : otherwise;
}

/* The logit that lies `top_n_sigma` standard deviations below the peak: see deviation in vnext/sampling/weights.py. A function
   of its own with plain loops, so that it takes no registers from the kernel, which has all 64. */
__device__ __noinline__ float sigma_edge(const Row row, float top_n_sigma, Workspace &space) {
    constexpr int STEP_BITS = 20;
    const double peak = row.peak;
    Likeliest lowest{-row.peak, row.vocabulary};  // with the sign turned round
#pragma unroll 1
    for (int token = threadIdx.x; token < row.vocabulary; token += blockDim.x) {
        const float logit = row.logits[token];
        if (-logit > lowest.logit && logit > minus_infinity()) lowest = {-logit, token};
    }
    __syncthreads();  // those who still read the likeliest tokens
    const long long range = __double_as_longlong(peak + double(likeliest_of_block(lowest, space.spare).logit));
    const long long exponent = range > 0 ? (range >> 52) - 1022 : 0;  // as frexp's: of normal numbers and of zero
    const double scale = __longlong_as_double(STEP_BITS - exponent + 1023 << 52);
    const double step = __longlong_as_double(exponent - STEP_BITS + 1023 << 52);  // 1 / scale
    Part own{0, 0};
    Mass squares = 0;
#pragma unroll 1
    for (int token = threadIdx.x; token < row.vocabulary; token += blockDim.x) {
        const float logit = row.logits[token];
        if (!(logit > minus_infinity())) continue;
        const unsigned steps = unsigned(__dmul_rn(peak - double(logit), scale));  // at most 2**20
        own.mass += steps;
        ++own.count;
        squares += Mass(steps) * steps;
    }
    const Part all = sum_parts(own, space.parts);
    const double count = double(all.count), mean = double(all.mass) / count;
    const double variance = double(sum_parts({squares, 0}, space.parts).mass) / count - __dmul_rn(mean, mean);
    return float(peak - __dmul_rn(double(top_n_sigma), sqrt(fmax(variance, 0.0)) * step));
}

/* ---- the kernels ---- */

/* logits [rows, vocabulary] with a stride in elements, everything else [rows]; temperature 0: greedy, top_k 0, top_p 1,
   min_p 0 and top_n_sigma 0: off. `aligned`: every row to 16 bytes. `spoilt`, if not null: 1 for rows with a NaN, else 0. */
extern "C" __global__ void __launch_bounds__(1024)
sample_rows(long long *tokens, const float *logits, const float *temperature, const long long *top_k, const float *top_p,
            const float *min_p, const float *top_n_sigma, const long long *seed, const long long *position, long long stride,
            int vocabulary, int aligned, unsigned char *spoilt) {
    DYNAMIC_SHARED(Workspace, memory);
    Workspace &space = *memory;
    const int at = blockIdx.x;
    Row row{logits + at * stride, vocabulary, aligned != 0, 0.0f, 0.0f};
    const Likeliest own = likeliest_of_thread(row), best = likeliest_of_block(own, space.spare);
    int token = best.token;
    if (temperature[at] > 0.0f && fabsf(best.logit) <= -NOTHING) {  // without a finite peak no token is possible
        row.peak = best.logit;
        const float edge = top_n_sigma[at] > 0.0f ? sigma_edge(row, top_n_sigma[at], space) : minus_infinity();
        row.scale = float(fmin(1.4426950408889634 / double(temperature[at]), 3.4028234663852886e38));
        float floor = fmaxf(1.0f, truncf(__fmul_rn(min_p[at], 1099511627776.0f)));
        if (edge > minus_infinity()) floor = fmaxf(floor, weight_of(row, edge));
        const Filters filters{top_k[at] > 0 && top_k[at] < vocabulary ? Mass(top_k[at]) : 0, top_p[at]};
        token = choose(row, own.logit, floor, filters, seed[at], position[at], token, space);
    }
    if (threadIdx.x == 0) {
        tokens[at] = token;
        const float logit = row.logits[token];  // the first NaN, where there is one
        if (spoilt) spoilt[at] = logit != logit;
    }
}

/* In place, logits become minus infinity where the bit of their token is 0: for row `rows[i]` those of masks[i], `words` of 32
   tokens each, the lowest bit first. Grid (slices of SLICE tokens, masks). */
constexpr int SLICE = 4096, IN_PROMPT = 1 << 30;

extern "C" __global__ void __launch_bounds__(256)
mask_rows(float *logits, const long long *rows, const unsigned *masks, long long stride, int vocabulary, int words) {
    const int first = blockIdx.x * SLICE, last = min(first + SLICE, vocabulary);
    const unsigned *mask = masks + (long long)blockIdx.y * words;
    float *own = logits + rows[blockIdx.y] * stride;
    for (int token = first + threadIdx.x; token < last; token += blockDim.x)
        if (!(mask[token / 32] >> token % 32 & 1)) own[token] = __uint_as_float(0xff800000u);
}

/* In place, for each row of logits what its batch row `places` [rows] asks for, by the tables of row_count batch rows (see
   vnext/sampling/inputs.py): bias; no stop token at a position before `marks[0]`; then penalties: repetition divides
   positive and multiplies other logits of tokens in prompt or output, frequency and presence take off for tokens of the output.
   rates [3, row_count], marks [2, row_count], history [row_count, vocabulary]. A row that follows depths[row] drafts of its request
   counts these too: the `fed` tokens of itself and of the rows just before it; both may be null. Grid (slices of SLICE tokens, rows). */
extern "C" __global__ void __launch_bounds__(256)
adjust_rows(float *logits, const long long *places, const long long *positions, const float *rates, const long long *marks,
            const int *history, const long long *bias_tokens, const float *bias_values, const long long *stop_tokens,
            const long long *fed, const long long *depths, long long stride, int vocabulary, int row_count, int bias_room, int stop_room) {
    const int at = blockIdx.y, first = blockIdx.x * SLICE, last = min(first + SLICE, vocabulary);
    const long long row = places[at];
    float *own = logits + at * stride;
    const auto is_here = [&](long long token) { return token >= first && token < last; };
    const long long bias_count = marks[row_count + row];
    if (bias_count > 0) {
        for (int entry = threadIdx.x; entry < bias_count; entry += blockDim.x) {
            const long long token = bias_tokens[row * bias_room + entry];
            if (is_here(token)) own[token] = __fadd_rn(own[token], bias_values[row * bias_room + entry]);
        }
        __syncthreads();
    }
    if (positions[at] < marks[row]) {
        for (int entry = threadIdx.x; entry < stop_room; entry += blockDim.x) {
            const long long token = stop_tokens[row * stop_room + entry];
            if (is_here(token)) own[token] = __uint_as_float(0xff800000u);
        }
        __syncthreads();
    }
    const float repetition = rates[row], presence = rates[row_count + row], frequency = rates[2 * row_count + row];
    if (repetition == 1.0f && presence == 0.0f && frequency == 0.0f) return;
    const int depth = depths ? int(depths[at]) : 0;
    for (int token = first + threadIdx.x; token < last; token += blockDim.x) {
        int entry = history[row * vocabulary + token];
        for (int draft = at - depth + 1; draft <= at; ++draft)
            entry += fed[draft] == token;
        const int count = entry & (IN_PROMPT - 1);
        const float before = own[token];
        float after = before;
        if (entry != 0) after = before > 0.0f ? __fdiv_rn(before, repetition) : __fmul_rn(before, repetition);
        after = __fsub_rn(after, __fmul_rn(frequency, float(count)));
        own[token] = __fsub_rn(after, count > 0 ? presence : 0.0f);
    }
}
