/* Fibers: stacks that take turns on one OS thread.

   Owns the switch and nothing else: by hand on x86-64, by ucontext elsewhere (or with -DSHIM_UCONTEXT, to test it). */
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if !defined(__x86_64__) && !defined(SHIM_UCONTEXT)
#define SHIM_UCONTEXT
#endif
#ifdef SHIM_UCONTEXT
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace shim {

constexpr size_t STACK_BYTES = 128 * 1024;
constexpr int CANARY = 0x5a;
constexpr size_t CANARY_BYTES = 256;

#ifdef SHIM_UCONTEXT

struct Fiber {
    ucontext_t context;
};

inline void start_fiber(Fiber &fiber, char *stack, void (*entry)()) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stack;
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
}

inline void switch_fiber(Fiber &from, Fiber &to) { swapcontext(&from.context, &to.context); }

#else

struct Fiber {
    void *top;
};

extern "C" __attribute__((visibility("hidden"))) void shim_switch(void **save, void *next);

/* What a callee must keep (System V ABI) goes to the stack that is left; the other one's is taken up. */
asm(R"(
    .text
    .hidden shim_switch
    .globl shim_switch
    .type shim_switch, @function
shim_switch:
    pushq %rbx
    pushq %rbp
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbp
    popq %rbx
    retq
    .size shim_switch, . - shim_switch
)");

/* A first frame as if the fiber had been left at the beginning of `entry`, which never returns. */
inline void start_fiber(Fiber &fiber, char *stack, void (*entry)()) {
    void **frame = reinterpret_cast<void **>(stack + STACK_BYTES) - 8;
    for (int i = 0; i < 8; ++i)
        frame[i] = nullptr;
    frame[6] = reinterpret_cast<void *>(entry);
    fiber.top = frame;
}

inline void switch_fiber(Fiber &from, Fiber &to) { shim_switch(&from.top, to.top); }

#endif

/* The lowest bytes of a stack show whether a fiber needed more than it had. */
inline void prepare_stack(char *stack) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack, STACK_BYTES);  // frames of the fiber that was here last were never left
#endif
    std::memset(stack, CANARY, CANARY_BYTES);
}

inline bool is_overrun(const char *stack) {
    for (size_t i = 0; i < CANARY_BYTES; ++i)
        if (stack[i] != CANARY) return true;
    return false;
}

}  // namespace shim
