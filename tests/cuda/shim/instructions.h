/* Instructions that the kernels use by name, as cuda/instructions.cuh has them for a GPU: mma, ldmatrix, cp.async, words
   between GPUs. */
#pragma once

#include "builtins.h"

/* ---- mma.sync.m16n8k16: d += a * b, fragments as the PTX manual lays them out ---- */

namespace shim {

inline float narrow_value(__nv_bfloat16, uint16_t bits) { return __bfloat162float({bits}); }
inline float narrow_value(__half, uint16_t bits) { return half_value(bits); }

struct Product {
    float *d;
    const unsigned *a, *b;
};

template <typename T>
void multiply_tiles(void **offers) {
    float a[16][16], b[16][8];
    const auto value = [](unsigned word, int half) { return narrow_value(T{}, uint16_t(half ? word >> 16 : word)); };
    for (int lane = 0; lane < 32; ++lane) {
        const auto &part = *static_cast<Product *>(offers[lane]);
        const int row = lane / 4, column = lane % 4 * 2;
        for (int i = 0; i < 8; ++i)
            a[row + i / 2 % 2 * 8][column + i / 4 * 8 + i % 2] = value(part.a[i / 2], i % 2);
        for (int i = 0; i < 4; ++i)
            b[column + i / 2 * 8 + i % 2][row] = value(part.b[i / 2], i % 2);
    }
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i) {
            float sum = 0.0f;
            for (int k = 0; k < 16; ++k)
                sum += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
            static_cast<Product *>(offers[lane])->d[i] += sum;
        }
}

}  // namespace shim

template <typename T>
void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    shim::Product mine{d, a, b};
    shim::together(0xffffffffu, "mma_m16n8k16", &mine, shim::multiply_tiles<T>);
}

/* ---- ldmatrix: four 8 x 8 tiles of 16-bit elements; lane l brings the address of row l % 8 of tile l / 8 ---- */

namespace shim {

struct Tiles {
    unsigned *words;
    const uint16_t *row;
};

inline void load_tiles(void **offers, bool transposed) {
    const auto at = [&](int tile, int row, int column) {
        return unsigned(static_cast<Tiles *>(offers[tile * 8 + row])->row[column]);
    };
    for (int lane = 0; lane < 32; ++lane)
        for (int tile = 0; tile < 4; ++tile) {
            const int row = lane / 4, column = lane % 4 * 2;
            const unsigned low = transposed ? at(tile, column, row) : at(tile, row, column);
            const unsigned high = transposed ? at(tile, column + 1, row) : at(tile, row, column + 1);
            static_cast<Tiles *>(offers[lane])->words[tile] = low | high << 16;
        }
}

inline const uint16_t *aligned_row(const void *row, const char *what) {
    if (reinterpret_cast<uintptr_t>(row) % 16) fail("%s of a row that is not aligned to 16 bytes", what);
    return static_cast<const uint16_t *>(row);
}

}  // namespace shim

inline void ldmatrix_x4(unsigned (&words)[4], const void *row) {
    shim::Tiles mine{words, shim::aligned_row(row, "ldmatrix_x4")};
    shim::together(0xffffffffu, "ldmatrix_x4", &mine, [](void **offers) { shim::load_tiles(offers, false); });
}
inline void ldmatrix_x4_transposed(unsigned (&words)[4], const void *row) {
    shim::Tiles mine{words, shim::aligned_row(row, "ldmatrix_x4_transposed")};
    shim::together(0xffffffffu, "ldmatrix_x4_transposed", &mine, [](void **offers) { shim::load_tiles(offers, true); });
}

inline float power_of_two(float x) { return x < -126.0f ? 0.0f : std::exp2(x); }

/* ---- cp.async: bytes arrive when their group is waited for, or at once (EARLY_COPIES): a GPU may do either ---- */

namespace shim {

inline void carry_out(const Copy &copy) {
    std::memcpy(copy.to, copy.from, copy.valid);
    std::memset(static_cast<char *>(copy.to) + copy.valid, 0, copy.bytes - copy.valid);
}

}  // namespace shim

/* 16 bytes, of which the first `valid` are read and the others become zero. */
inline void copy_async_16(void *to, const void *from, unsigned valid = 16) {
    const auto low = reinterpret_cast<uintptr_t>(to) | (valid ? reinterpret_cast<uintptr_t>(from) : 0);
    if (low % 16) shim::fail("copy_async_16 between addresses that are not aligned to 16 bytes");
    const shim::Copy copy{to, from, 16, valid};
    if (shim::block->order & shim::EARLY_COPIES) return shim::carry_out(copy);
    shim::self().copies.back().push_back(copy);
}
inline void copy_async_commit() { shim::self().copies.emplace_back(); }

/* Waits until at most `PENDING` of the committed groups are under way. */
template <int PENDING>
void copy_async_wait() {
    auto &groups = shim::self().copies;
    while (groups.size() > PENDING + 1) {
        for (const shim::Copy &copy : groups.front())
            shim::carry_out(copy);
        groups.erase(groups.begin());
    }
}

/* ---- memory that several processes map: what is published arrives at a release behind it, or at once (EARLY_COPIES), and
   what is taken without an acquire before it is poison: both are allowed to a GPU ---- */

inline void store_release_system(unsigned *at, unsigned value) {
    shim::arrive(shim::block->settled);
    shim::arrive(shim::self().published);
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
}
inline unsigned load_acquire_system(const unsigned *at) {
    shim::self().has_acquired = true;
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}

template <typename V>
void publish(V *to, const V &value) {
    if (reinterpret_cast<uintptr_t>(to) % sizeof(V)) shim::fail("publish to an address that is not aligned to %u bytes", unsigned(sizeof(V)));
    shim::Published published{to, sizeof(V), {}};
    std::memcpy(published.value, &value, sizeof(V));
    shim::self().published.push_back(published);
    if (shim::block->order & shim::EARLY_COPIES) shim::arrive(shim::self().published);
}
template <typename V>
V take(const V *from) {
    V value;
    std::memset(&value, 0xff, sizeof(V));
    if (shim::self().has_acquired) value = *from;
    return value;
}

inline long long clock_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
