/* Tensors of torch as the operations see them: what they are, new ones, dense ones, and whether they are as a contract asks.

   Written against torch's stable interface of 2.11, so that one binary serves that torch and later ones. */
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor_struct.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <stdexcept>

#include "launch.h"

namespace vnext_cuda {

using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;

/* An argument that the operation's contract excludes. Its words are of contracts.py, which the table asks for them. */
struct Refused : std::runtime_error {
    Refused() : std::runtime_error("an argument is not what the operation's contract in vnext/kernels/contracts.py asks for") {}
};

inline void require(bool holds) {
    if (!holds) throw Refused();
}

inline void check(AOTITorchError error) {
    if (error != TORCH_SUCCESS) throw std::runtime_error("torch refuses what a kernel's launch asks of a tensor");
}

inline int32_t type_of(const Tensor &tensor) {
    int32_t type;
    check(aoti_torch_get_dtype(tensor.get(), &type));
    return type;
}

inline Scalar scalar_of(const Tensor &tensor) {
    const int32_t type = type_of(tensor);
    if (type == aoti_torch_dtype_bfloat16()) return Scalar::BFLOAT16;
    if (type == aoti_torch_dtype_float16()) return Scalar::FLOAT16;
    if (type == aoti_torch_dtype_float32()) return Scalar::FLOAT32;
    if (type == aoti_torch_dtype_float8_e4m3fn()) return Scalar::FLOAT8_E4M3FN;
    if (type == aoti_torch_dtype_int8()) return Scalar::INT8;
    throw Refused();
}

inline Device device_of(const Tensor &tensor) {
    return {tensor.is_cuda() ? DeviceType::CUDA : DeviceType::CPU, tensor.get_device_index()};
}

inline void *address(const Tensor &tensor) { return tensor.data_ptr(); }
inline void *address(const Maybe &tensor) { return tensor ? tensor->data_ptr() : nullptr; }

/* A new dense tensor of these sizes on the device of `like`. */
inline Tensor empty(std::initializer_list<int64_t> sizes, int32_t type, const Tensor &like) {
    int64_t strides[8], stride = 1;
    for (size_t i = sizes.size(); i-- > 0; stride *= std::max<int64_t>(sizes.begin()[i], 1)) strides[i] = stride;
    const Device device = device_of(like);
    const int32_t on = device.type == DeviceType::CUDA ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
    AtenTensorHandle made = nullptr;
    check(aoti_torch_empty_strided(sizes.size(), sizes.begin(), strides, type, on, device.index, &made));
    return Tensor(made);
}

/* The tensor, or a dense copy of it: [T, H, D] and what has fewer sizes. */
inline Tensor dense(const Tensor &tensor) {
    if (tensor.is_contiguous()) return tensor;
    const auto sizes = tensor.sizes();
    const int32_t type = type_of(tensor);
    Tensor copy = sizes.size() == 1   ? empty({sizes[0]}, type, tensor)
                  : sizes.size() == 2 ? empty({sizes[0], sizes[1]}, type, tensor)
                                      : empty({sizes[0], sizes[1], sizes[2]}, type, tensor);
    check(aoti_torch_copy_(copy.get(), tensor.get(), 0));
    return copy;
}

/* ---- contracts ---- */

constexpr int64_t ANY = -1;

/* Whether the tensor has these sizes, and its last ones lie side by side. */
inline bool fits(const Tensor &tensor, std::initializer_list<int64_t> wanted) {
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    if (sizes.size() != wanted.size()) return false;
    for (size_t i = 0; i < sizes.size(); ++i)
        if (wanted.begin()[i] != ANY && sizes[i] != wanted.begin()[i]) return false;
    const size_t last = sizes.size() - 1;
    return strides[last] == 1 || sizes[last] <= 1;
}

inline bool is_float(Scalar scalar) { return scalar != Scalar::FLOAT8_E4M3FN && scalar != Scalar::INT8; }

/* How many numbers a row of a cache holds: see mxint8.head_dim_of. */
inline int64_t head_dim_of(const Tensor &cache) {
    const int64_t width = cache.size(3);
    return scalar_of(cache) == Scalar::INT8 ? width - (width + 32) / 33 : width;
}

/* Whether all are on the first one's device. */
inline bool together(const Tensor &first, std::initializer_list<const Tensor *> others) {
    const Device device = device_of(first);
    for (const Tensor *other : others) {
        const Device found = device_of(*other);
        if (found.type != device.type || found.index != device.index) return false;
    }
    return true;
}

/* A norm's weight [width]: of the activations' type or float32. */
inline void expect_norm(const Tensor &weight, int64_t width, Scalar scalar, double eps) {
    require(fits(weight, {width}) && eps > 0);
    const Scalar found = scalar_of(weight);
    require(found == scalar || found == Scalar::FLOAT32);
}

/* [blocks, kv_heads, block_size, D or what a row of int8 takes] both, dense; on a CPU blocks may lie apart. 1 is the scale of all but fp8. */
inline void expect_caches(const Tensor &keys, const Tensor &values, double key_scale, double value_scale) {
    require(fits(keys, {ANY, ANY, ANY, ANY}));
    require(fits(values, {keys.size(0), keys.size(1), keys.size(2), keys.size(3)}));
    const Scalar scalar = scalar_of(keys);
    require(scalar == scalar_of(values) && together(keys, {&values}));
    const bool is_dense = keys.is_contiguous() && values.is_contiguous();
    if (!is_dense) {
        const auto own = keys.strides(), other = values.strides();
        const int64_t rows = keys.size(3), heads = keys.size(2) * rows;
        require(keys.is_cpu() && own[1] == heads && own[2] == rows && own[3] == 1);
        require(std::equal(own.begin(), own.end(), other.begin()));
    }
    require(key_scale > 0 && value_scale > 0);
    require(scalar == Scalar::FLOAT8_E4M3FN || (key_scale == 1 && value_scale == 1));
}

}  // namespace vnext_cuda
