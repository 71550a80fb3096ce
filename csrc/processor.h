// Whether this processor runs a unit of units.cmake: a function of the unit's name for each.
#pragma once

#if defined(QUIRE_X86)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>

#include <cstddef>
#endif

namespace quire::processor {

inline bool portable() { return true; }

#if defined(QUIRE_X86)

inline bool avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}

// The VNNI dot products without AVX-512. The state of 256-bit registers is part of AVX2.
inline bool avxvnni() {
#if defined(QUIRE_VNNI_ENCODING)
    return avx2() && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl");
#else
    unsigned a = 0, b = 0, c = 0, d = 0;
    return avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
#endif
}

inline bool avx512vnni() {
    return avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni");
}

inline bool avx512() { return avx512vnni() && __builtin_cpu_supports("avx512bf16"); }

// Tile registers: the processor has them for int8 and bf16, and the kernel lets this process use their state (Linux 5.16 and
// newer, "Using XSTATE features in user space applications"; all threads and forked children inherit the permission).
inline bool tiles_granted() {
#if defined(QUIRE_EMULATE_TILES)
    return true;  // csrc/emulate/tiles.cpp answers their instructions
#else
    constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25, kAll = kAmxBf16 | kAmxTile | kAmxInt8;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAll) != kAll) return false;
#if defined(__linux__)
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    (void)kRequestPermission, (void)kTileData;
    return false;
#endif
#endif
}

inline bool amx() { return avx512() && tiles_granted(); }

#elif defined(QUIRE_ARM64)

#if defined(__APPLE__)
inline bool has(const char* feature) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
}
inline bool neon() { return has("hw.optional.arm.FEAT_DotProd"); }
inline bool neon_i8mm() { return neon() && has("hw.optional.arm.FEAT_I8MM"); }
#else
inline bool neon() { return (getauxval(AT_HWCAP) & 1ul << 20) != 0; }                   // HWCAP_ASIMDDP
inline bool neon_i8mm() { return neon() && (getauxval(AT_HWCAP2) & 1ul << 13) != 0; }  // HWCAP2_I8MM
#endif

#endif

}  // namespace quire::processor
