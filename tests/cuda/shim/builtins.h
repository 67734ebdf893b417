/* What CUDA C++ knows without a header: keywords, indices, barriers, shuffles, atomics and the mathematics. */
#pragma once

#include <algorithm>
#include <type_traits>

#include "block.h"
#include "numbers.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__  // empty, as the system's headers write __attribute__((__noinline__))
#define __launch_bounds__(...)
#define __restrict__ __restrict

#define threadIdx (::shim::self().index)
#define blockIdx (::shim::block->index)
#define blockDim (::shim::block->size)
#define gridDim (::shim::block->grid)
#define __syncthreads() ::shim::barrier(__FILE__, __LINE__)

using std::max;
using std::min;

/* ---- shuffles and votes ---- */

namespace shim {

template <typename T>
struct Shuffle {
    T value, result;
    unsigned source;
};

template <typename T>
T shuffle(unsigned mask, const char *what, T value, unsigned source) {
    Shuffle<T> mine{value, value, source};
    together(mask, what, &mine, [mask, what](void **offers) {
        for (unsigned lane = 0; lane < WARP; ++lane) {
            if (!offers[lane]) continue;
            auto *reader = static_cast<Shuffle<T> *>(offers[lane]);
            if (!(mask >> reader->source & 1)) fail("%s reads lane %u, which is not in the mask %08x", what, reader->source, mask);
            reader->result = static_cast<Shuffle<T> *>(offers[reader->source])->value;
        }
    });
    return mine.result;
}

}  // namespace shim

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const unsigned lane = shim::self().lane;
    return shim::shuffle(mask, "__shfl_sync", value, lane / width * width + unsigned(source) % width);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    const unsigned lane = shim::self().lane, source = lane ^ unsigned(bits);
    return shim::shuffle(mask, "__shfl_xor_sync", value, source / width > lane / width ? lane : source);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32) {
    const unsigned lane = shim::self().lane;
    return shim::shuffle(mask, "__shfl_down_sync", value, lane % width + distance < unsigned(width) ? lane + distance : lane);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32) {
    const unsigned lane = shim::self().lane;
    return shim::shuffle(mask, "__shfl_up_sync", value, lane % width >= distance ? lane - distance : lane);
}

inline unsigned __ballot_sync(unsigned mask, int vote) {
    struct Ballot {
        int vote;
        unsigned result;
    } mine{vote, 0};
    shim::together(mask, "__ballot_sync", &mine, [](void **offers) {
        unsigned result = 0;
        for (unsigned lane = 0; lane < shim::WARP; ++lane)
            if (offers[lane] && static_cast<Ballot *>(offers[lane])->vote) result |= 1u << lane;
        for (unsigned lane = 0; lane < shim::WARP; ++lane)
            if (offers[lane]) static_cast<Ballot *>(offers[lane])->result = result;
    });
    return mine.result;
}
inline int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
inline int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) == mask; }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
    shim::together(mask, "__syncwarp", nullptr, [](void **) {});
}

/* ---- words ---- */

/* Bytes of two words, 0 to 3 of the first; a digit of the selector names one. */
inline unsigned __byte_perm(unsigned first, unsigned second, unsigned selector) {
    const unsigned long long both = (unsigned long long)second << 32 | first;
    unsigned result = 0;
    for (unsigned i = 0; i < 4; ++i)
        result |= unsigned(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return result;
}
/* 32 bits of high and low, `shift` % 32 of low left out. */
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return unsigned(((unsigned long long)high << 32 | low) >> shift % 32);
}

/* ---- memory ---- */

template <typename T>
T atomicAdd(T *at, T value) {
    if constexpr (std::is_integral_v<T>) return __atomic_fetch_add(at, value, __ATOMIC_ACQ_REL);
    T old = *at;
    for (T sum = old + value; !__atomic_compare_exchange(at, &old, &sum, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);)
        sum = old + value;
    return old;
}
template <typename T>
T atomicMax(T *at, T value) {
    T old = __atomic_load_n(at, __ATOMIC_ACQUIRE);
    while (old < value && !__atomic_compare_exchange_n(at, &old, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {}
    return old;
}
template <typename T>
T atomicMin(T *at, T value) {
    T old = __atomic_load_n(at, __ATOMIC_ACQUIRE);
    while (value < old && !__atomic_compare_exchange_n(at, &old, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {}
    return old;
}
template <typename T>
T atomicCAS(T *at, T expected, T value) {
    __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return expected;
}
template <typename T>
T atomicExch(T *at, T value) { return __atomic_exchange_n(at, value, __ATOMIC_ACQ_REL); }

inline void __threadfence_block() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
template <typename T>
T __ldg(const T *at) { return *at; }

/* Others go on meanwhile, in this block and, where the machine has one core, in other processes. */
inline void __nanosleep(unsigned) {
    shim::wait();
    std::this_thread::yield();
}

/* ---- mathematics; single operations, each rounded once ---- */

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __expf(float x) { return std::exp(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
