/* The module vnext.kernels.cuda._native: the driver of each device kind, and all launches through it.

   Owns the kernels of each thread. It calls Python (compiled.py) only when a thread first needs a kernel, or needs more shared
   memory for one; Python compiles and loads it and binds the thread to its device, or raises. All other operations run without
   the interpreter's lock. */

#include "compiled.h"

#include <atomic>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "launch.h"

namespace vnext_cuda {
namespace {

struct Driver {
    LaunchFunction launch = nullptr;
    StreamFunction stream = nullptr;  // none: the stream is null
    PyObject *prepare = nullptr, *explain = nullptr;
};

struct Ready {
    void *function = nullptr;
    unsigned shared_bytes_max = 0;
};

Driver drivers[DEVICE_TYPES];  // written with the interpreter's lock, while no operation runs on that kind of device
std::atomic<unsigned> generation{0};  // of all drivers: what threads were given belongs to one

struct Given {
    unsigned generation = 0;
    std::unordered_map<uint64_t, Ready> kernels;
};
thread_local Given given;

struct Lock {
    PyGILState_STATE state = PyGILState_Ensure();
    ~Lock() { PyGILState_Release(state); }
};

uint64_t key_of(Device device, const Form &form) {
    uint64_t key = uint64_t(device.index + 1);
    for (int part : {int(device.type), int(form.kernel), int(form.scalar), int(form.weight), int(form.cache)})
        key = key << 4 | part;
    return key << 16 | form.head_dim;
}

/* What Python says to a call, taken over; throws where it raises. */
std::string text_of(PyObject *answer) {
    const char *text = PyUnicode_Check(answer) ? PyUnicode_AsUTF8(answer) : "";
    return text ? text : "";
}

/* (function, shared bytes at most), or a sentence why not. */
Ready prepare(Device device, const Form &form, unsigned shared_bytes) {
    std::string why;
    Ready ready;
    {
        const Lock lock;
        PyObject *answer = PyObject_CallFunction(
            drivers[int(device.type)].prepare, "iiiiiiI", device.index, int(form.kernel), int(form.scalar), int(form.weight),
            int(form.cache), form.head_dim, shared_bytes);
        unsigned long long function = 0;
        if (answer && PyTuple_Check(answer) && PyArg_ParseTuple(answer, "KI", &function, &ready.shared_bytes_max))
            ready.function = reinterpret_cast<void *>(function);
        else
            why = answer ? text_of(answer) : "the kernel's driver was interrupted";
        if (PyErr_Occurred()) PyErr_WriteUnraisable(drivers[int(device.type)].prepare);
        Py_XDECREF(answer);
    }
    if (!why.empty()) throw std::runtime_error(why);
    return ready;
}

[[noreturn]] void fail(Device device, int code) {
    std::string why;
    {
        const Lock lock;
        PyObject *answer = PyObject_CallFunction(drivers[int(device.type)].explain, "i", code);
        why = answer ? text_of(answer) : "a launch failed with code " + std::to_string(code);
        if (PyErr_Occurred()) PyErr_WriteUnraisable(drivers[int(device.type)].explain);
        Py_XDECREF(answer);
    }
    throw std::runtime_error(why);
}

const Ready &kernel_of(Device device, const Form &form, unsigned shared_bytes) {
    const unsigned now = generation.load(std::memory_order_acquire);
    if (given.generation != now) {
        given.kernels.clear();
        given.generation = now;
    }
    Ready &ready = given.kernels[key_of(device, form)];
    if (ready.function == nullptr || shared_bytes > ready.shared_bytes_max) ready = prepare(device, form, shared_bytes);
    return ready;
}

}  // namespace

void launch_pointers(Device device, const Form &form, const Shape &shape, void **pointers) {
    const Ready &ready = kernel_of(device, form, shape.shared_bytes);
    const Driver &driver = drivers[int(device.type)];
    void *stream = nullptr;
    if (driver.stream && driver.stream(device.index, &stream) != 0)
        throw std::runtime_error("torch does not name the current stream of the device");
    const int code = driver.launch(ready.function, shape.grid[0], shape.grid[1], shape.grid[2], shape.block, 1, 1,
                                   shape.shared_bytes, stream, pointers, nullptr);
    if (code != 0) fail(device, code);
}

/* ---- the module ---- */

namespace {

bool is_device_type(int type) {
    if (type >= 0 && type < DEVICE_TYPES) return true;
    PyErr_Format(PyExc_ValueError, "there is no kind of device %d", type);
    return false;
}

void replace(PyObject *&held, PyObject *by) {
    Py_XINCREF(by);
    Py_XSETREF(held, by);
}

PyObject *serve(PyObject *, PyObject *arguments) {
    int type;
    unsigned long long launch, stream;
    PyObject *prepare, *explain;
    if (!PyArg_ParseTuple(arguments, "iKKOO", &type, &launch, &stream, &prepare, &explain)) return nullptr;
    if (!is_device_type(type)) return nullptr;
    Driver &driver = drivers[type];
    if (driver.launch) {
        PyErr_SetString(PyExc_RuntimeError, "this kind of device is served already");
        return nullptr;
    }
    driver.launch = reinterpret_cast<LaunchFunction>(launch);
    driver.stream = reinterpret_cast<StreamFunction>(stream);
    replace(driver.prepare, prepare);
    replace(driver.explain, explain);
    ++generation;
    try {
        register_operations(DeviceType(type));
    } catch (const std::exception &error) {
        driver.launch = nullptr;
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
    Py_RETURN_NONE;
}

PyObject *leave(PyObject *, PyObject *arguments) {
    int type;
    if (!PyArg_ParseTuple(arguments, "i", &type) || !is_device_type(type)) return nullptr;
    forget_operations(DeviceType(type));
    drivers[type].launch = nullptr;
    replace(drivers[type].prepare, nullptr);
    replace(drivers[type].explain, nullptr);
    ++generation;
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"serve", serve, METH_VARARGS,
     "serve(device type, address of a launch function, of a stream function or 0, prepare, explain): from now on the operations\n"
     "of that kind of device are the compiled ones. prepare(index, kernel, scalar, weight, cache, head_dim, shared bytes) gives\n"
     "(function, shared bytes at most) or a sentence, explain(code) a sentence."},
    {"leave", leave, METH_VARARGS,
     "leave(device type): back to the plain form. No operation may be running on that kind of device."},
    {nullptr, nullptr, 0, nullptr},
};

#define NUMBERED(kind, name) {#kind "." #name, int(kind::name)}
const Constant constants[] = {
    NUMBERED(Kernel, RMS_NORM), NUMBERED(Kernel, GATE_AND_MUL), NUMBERED(Kernel, ROTARY_KV_WRITE), NUMBERED(Kernel, PAGED_ATTENTION),
    NUMBERED(Kernel, MERGE_SPLITS), NUMBERED(Scalar, FLOAT32), NUMBERED(Scalar, BFLOAT16), NUMBERED(Scalar, FLOAT16),
    NUMBERED(Scalar, FLOAT8_E4M3FN), NUMBERED(Scalar, INT8), NUMBERED(DeviceType, CPU), NUMBERED(DeviceType, CUDA), NO_CONSTANT,
};

PyModuleDef definition = MODULE("_native", "Launches of CUDA kernels from C++: see compiled.py.", methods);

}  // namespace
}  // namespace vnext_cuda

PyMODINIT_FUNC PyInit__native() { return begin_module(&vnext_cuda::definition, vnext_cuda::constants, nullptr); }
