/* Launches from C++: the interface of kernels and devices for the operations (operations.cpp).

   A kernel is identified by the values from which Python derives its macros. Each thread asks Python for a kernel once;
   afterwards a launch is an array of addresses and one call. Independent of torch: tensors are addresses here. */
#pragma once

#include <cstdint>

namespace vnext_cuda {

enum class Kernel : int { RMS_NORM, GATE_AND_MUL, ROTARY_KV_WRITE, PAGED_ATTENTION, MERGE_SPLITS };  // as compiled.KERNELS
enum class Scalar : int { FLOAT32, BFLOAT16, FLOAT16, FLOAT8_E4M3FN, INT8 };                         // as compiled.SCALAR_TYPES
enum class DeviceType : int { CPU, CUDA };                                                           // as compiled.DEVICE_TYPES
constexpr int DEVICE_TYPES = 2;

struct Device {
    DeviceType type;
    int index;  // -1: a CPU has none
};

/* What the macros of a source depend on. `head_dim` is 0 where a source does not ask for it. */
struct Form {
    Kernel kernel;
    Scalar scalar, weight, cache;
    int head_dim;
};

struct Shape {
    unsigned grid[3], block, shared_bytes;
};

/* cuLaunchKernel, or a function that is called as it is: function, grid, block, shared bytes, stream, pointers to the
   arguments, nothing. 0 is success. */
using LaunchFunction = int (*)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                               void **);
/* The current stream of a device, as aoti_torch_get_current_cuda_stream tells it. 0 is success. */
using StreamFunction = int (*)(int32_t, void **);

/* Launches `form` on the device's current stream. Throws std::runtime_error with Python's words where there is no such kernel
   or it may not have so much shared memory, and with the driver's where it refuses the launch. */
void launch_pointers(Device device, const Form &form, const Shape &shape, void **pointers);

/* The kernel's arguments, in its order and of its types. */
template <typename... Values>
void launch(Device device, const Form &form, const Shape &shape, Values... values) {
    void *pointers[] = {&values...};
    launch_pointers(device, form, shape, pointers);
}

/* The operations' entries in torch's dispatcher (operations.cpp). */
void register_operations(DeviceType type);
void forget_operations(DeviceType type);

}  // namespace vnext_cuda
