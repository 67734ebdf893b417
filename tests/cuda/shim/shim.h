/* CUDA C++ on a CPU: include this, then a kernel's source, then SHIM_EXPORT(kernel).

   An exported kernel takes its arguments as cuLaunchKernel does, an array of pointers to them. It returns null, or what
   went wrong (until the next launch on the same OS thread). */
#pragma once

#include <tuple>
#include <utility>

#include "block.h"
#include "builtins.h"
#include "instructions.h"
#include "numbers.h"

#define VNX_SHIM
#define DYNAMIC_SHARED(type, name) type *name = reinterpret_cast<type *>(::shim::block->shared)

namespace shim {

template <typename... A>
struct Call {
    void (*kernel)(A...);
    void **arguments;
};

template <typename... A, size_t... I>
void make(const Call<A...> &call, std::index_sequence<I...>) {
    call.kernel(*static_cast<std::remove_const_t<A> *>(call.arguments[I])...);
}

template <typename... A>
void enter(void *call) {
    make(*static_cast<Call<A...> *>(call), std::index_sequence_for<A...>{});
}

template <typename... A>
const char *launch(void (*kernel)(A...), const Launch &how, void **arguments) {
    static thread_local std::string error;
    Call<A...> call{kernel, arguments};
    error = launch_blocks(how, &enter<A...>, &call);
    return error.empty() ? nullptr : error.c_str();
}

}  // namespace shim

#define SHIM_EXPORT(kernel)                                                                                       \
    extern "C" const char *kernel##__launch(const unsigned *shape, unsigned shared_bytes, unsigned workers,       \
                                            unsigned order, void **arguments) {                                   \
        const shim::Launch how{dim3(shape[0], shape[1], shape[2]), dim3(shape[3], shape[4], shape[5]), shared_bytes, \
                               workers, order};                                                                   \
        return shim::launch(&kernel, how, arguments);                                                             \
    }
