/* Wrappers of PTX instructions: tensor cores, tile loads from shared memory, asynchronous copies, signals between GPUs
   (sm_80 and later).

   The tests' host shim implements the same functions in tests/cuda/shim/instructions.h. */
#pragma once

#include "platform.cuh"

#ifndef VNX_SHIM

__device__ __forceinline__ unsigned shared_address(const void *at) {
    return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

/* d += a * b: a 16 x 16 (rows), b 16 x 8 (columns), d float 16 x 8; fragments as in the PTX manual, mma.m16n8k16. */
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]);

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Four 8 x 8 tiles of 16-bit elements: lane l brings the address of row l % 8 of tile l / 8, aligned to 16 bytes. */
__device__ __forceinline__ void ldmatrix_x4(unsigned (&words)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_transposed(unsigned (&words)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(row))
                 : "memory");
}

/* 16 bytes from global to shared memory, of which the first `valid` are read and the others become zero. */
__device__ __forceinline__ void copy_async_16(void *to, const void *from, unsigned valid = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid)
                 : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* Waits until at most `PENDING` of the committed groups of this thread are under way; a barrier for the others follows. */
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* 2^x to two units in the last place; 0 where that is below the normal numbers. */
__device__ __forceinline__ float power_of_two(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

/* ---- memory that several GPUs map ---- */

/* A word by which another GPU learns that what was published before it is there: by this thread, or by others of its
   block before a barrier. */
__device__ __forceinline__ void store_release_system(unsigned *at, unsigned value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

/* What was published before the value that is found may be taken, by the block's other threads after a barrier. */
__device__ __forceinline__ unsigned load_acquire_system(const unsigned *at) {
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

/* Up to 16 bytes, aligned to their size, for others to take: ordinary accesses, ordered by the two above alone. */
template <typename V>
__device__ __forceinline__ void publish(V *to, const V &value) {
    *to = value;
}

template <typename V>
__device__ __forceinline__ V take(const V *from) {
    return *from;
}

/* A clock that goes on while other work has the GPU. */
__device__ __forceinline__ long long clock_ns() {
    long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

#endif
