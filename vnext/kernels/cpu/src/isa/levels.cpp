#include "kernels.h"

#include <initializer_list>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace vnx {
namespace {

#if defined(__x86_64__)
struct Registers {
    unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned part) {
    Registers r;
    if (!__get_cpuid_count(leaf, part, &r.a, &r.b, &r.c, &r.d)) return {};
    return r;
}

/* Which register files the system saves on a task switch. */
uint64_t saved_state() {
    if (!(cpuid(1, 0).c >> 27 & 1)) return 0;
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t(high) << 32 | low;
}

bool has(uint64_t bits, std::initializer_list<int> wanted) {
    for (int bit : wanted)
        if (!(bits >> bit & 1)) return false;
    return true;
}

/* Linux gives the tile registers' memory only to a process that asks. */
bool tiles_permitted() {
#if defined(__linux__)
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}

Level find_level() {
    const Registers one = cpuid(1, 0), seven = cpuid(7, 0), seven_one = cpuid(7, 1);
    const uint64_t saved = saved_state();
    if (!has(saved, {1, 2}) || !has(one.c, {12, 28, 29}) || !has(seven.b, {5})) return PORTABLE;  // fma avx f16c; avx2
    if (!has(saved, {5, 6, 7}) || !has(seven.b, {16, 17, 30, 31})) return AVX2;                   // f dq bw vl
    if (!has(seven_one.a, {5}) || !has(seven.c, {1})) return AVX512;                              // avx512_bf16; vbmi
    if (!has(seven.d, {22, 24}) || !has(saved, {17, 18})) return AVX512_BF16;                     // amx_bf16 amx_tile
    return tiles_permitted() ? AMX : AVX512_BF16;
}

bool is_intel() { return cpuid(0, 0).b == 0x756e6547; }  // "Genu"

/* Intel's dot product of pairs takes two cycles, four times as long as a multiply-add: its processors are faster without it. */
Level find_fastest() { return best_level() == AVX512_BF16 && is_intel() ? AVX512 : best_level(); }

/* Of its dot products of int8, which not every processor of a level has. */
bool has_wide_dots() { return has(cpuid(7, 0).c, {11}); }   // avx512_vnni
bool has_narrow_dots() { return has(cpuid(7, 1).a, {4}); }  // avx_vnni
#elif defined(__aarch64__)
/* Every one has NEON. Linux names the rest. */
Level find_level() {
#if defined(__linux__)
    constexpr unsigned long BF16 = 1ul << 14;  // HWCAP2_BF16: bfdot and bfmmla
    if (getauxval(AT_HWCAP2) & BF16) return NEON_BF16;
#endif
    return NEON;
}

/* Its dot product of int8, which those with bf16 have. */
bool has_dots() {
#if defined(__linux__)
    constexpr unsigned long DOTS = 1ul << 20;  // HWCAP_ASIMDDP
    return getauxval(AT_HWCAP) & DOTS;
#else
    return false;
#endif
}
#else
Level find_level() { return PORTABLE; }
#endif
#if !defined(__x86_64__)
Level find_fastest() { return best_level(); }
#endif

/* Null for a level of another architecture, or one that was not built. */
const Kernels *table_of(int level) {
    switch (level) {
#if defined(__x86_64__)
        case AVX2:
            return &avx2_kernels;
        case AVX512:
            return &avx512_kernels;
        case AVX512_BF16:
            return &avx512_bf16_kernels;
        case AMX:
            return &amx_kernels;
#elif defined(__aarch64__)
        case NEON:
            return &neon_kernels;
        case NEON_BF16:
            return &neon_bf16_kernels;
#endif
        case PORTABLE:
            return &portable_kernels;
        default:
            return nullptr;
    }
}

const CodesKernels &codes_of(int level) {
#if defined(__x86_64__)
    static const bool has_wide = has_wide_dots() && &avx512_vnni_codes, has_narrow = has_narrow_dots() && &avx_vnni_codes;
    if (level >= AVX512 && has_wide) return avx512_vnni_codes;
    if (level >= AVX2) return has_narrow ? avx_vnni_codes : avx2_codes;
#elif defined(__aarch64__)
    if (level == NEON_BF16 && has_dots()) return neon_dot_codes;
    if (level >= NEON) return neon_codes;
#endif
    return portable_codes;
}

Level chosen = find_fastest();
const Kernels *chosen_kernels = table_of(chosen);

}  // namespace

Level machine_level() {
    static const Level found = find_level();
    return found;
}

bool has_level(int level) { return level <= machine_level() && table_of(level) != nullptr; }

Level best_level() {
    static const Level best = [] {
        int level = machine_level();
        while (!has_level(level))
            --level;
        return static_cast<Level>(level);
    }();
    return best;
}

bool is_complete() {
#if defined(__x86_64__)
    if (best_level() >= AVX512 && has_wide_dots() && !&avx512_vnni_codes) return false;
    if (best_level() >= AVX2 && has_narrow_dots() && !&avx_vnni_codes) return false;
#endif
    return best_level() == machine_level();
}

bool set_level(int level) {
    if (!has_level(level)) return false;
    chosen = static_cast<Level>(level);
    chosen_kernels = table_of(chosen);
    return true;
}

Level current_level() { return chosen; }

const Kernels &kernels() { return *chosen_kernels; }

const CodesKernels &codes_kernels() { return codes_of(chosen); }

}  // namespace vnx
