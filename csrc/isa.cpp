#include "isa.h"

#if defined(QUIRE_X86)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace quire {

#if defined(QUIRE_X86)
namespace amx {
extern const OpEntry kOps[];
extern const size_t kOpCount;
}  // namespace amx
namespace avx512 {
extern const OpEntry kOps[];
extern const size_t kOpCount;
}  // namespace avx512
namespace avx512vnni {
extern const OpEntry kOps[];
extern const size_t kOpCount;
extern const OpEntry kLoadOps[];
extern const size_t kLoadOpCount;
}  // namespace avx512vnni
namespace avxvnni {
extern const OpEntry kOps[];
extern const size_t kOpCount;
}  // namespace avxvnni
namespace avx2 {
extern const OpEntry kOps[];
extern const size_t kOpCount;
extern const OpEntry kLoadOps[];
extern const size_t kLoadOpCount;
}  // namespace avx2
#elif defined(QUIRE_ARM64)
namespace neon_i8mm {
extern const OpEntry kOps[];
extern const size_t kOpCount;
}  // namespace neon_i8mm
namespace neon {
extern const OpEntry kOps[];
extern const size_t kOpCount;
extern const OpEntry kLoadOps[];
extern const size_t kLoadOpCount;
}  // namespace neon
#endif
namespace portable {
extern const OpEntry kOps[];
extern const size_t kOpCount;
extern const OpEntry kLoadOps[];
extern const size_t kLoadOpCount;
}  // namespace portable

namespace {

#if defined(QUIRE_X86)
// Tile registers: the processor has them for int8 and bf16, and the kernel lets this process use their state (Linux 5.16 and
// newer, "Using XSTATE features in user space applications"; all threads and forked children inherit the permission).
bool tiles_granted() {
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

// AVX-VNNI: the VNNI dot products without AVX-512. The state of 256-bit registers is part of v3.
bool dots_of_256_bits() {
#if defined(QUIRE_VNNI_ENCODING)
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl");
#else
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
#endif
}
#elif defined(QUIRE_ARM64)
struct Arm {
    bool dots, i8mm;
};

#if defined(__APPLE__)
bool has(const char* feature) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
}
Arm arm() { return {has("hw.optional.arm.FEAT_DotProd"), has("hw.optional.arm.FEAT_I8MM")}; }
#else
Arm arm() {
    constexpr unsigned long kDotProducts = 1ul << 20, kI8mm = 1ul << 13;  // HWCAP_ASIMDDP, HWCAP2_I8MM
    return {(getauxval(AT_HWCAP) & kDotProducts) != 0, (getauxval(AT_HWCAP2) & kI8mm) != 0};
}
#endif
#endif

}  // namespace

const std::vector<Unit>& supported_units() {
    static const std::vector<Unit> units = [] {
        std::vector<Unit> found;
#if defined(QUIRE_X86)
        __builtin_cpu_init();
        const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
#if defined(QUIRE_EMULATE_AVX512)
        const bool dots = v3, bf16 = v3;  // csrc/emulate/avx512.h answers their instructions
#else
        const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512cd");
        const bool dots = v3 && v4 && __builtin_cpu_supports("avx512vnni");
        const bool bf16 = dots && __builtin_cpu_supports("avx512bf16");
#endif
        if (bf16 && tiles_granted()) found.push_back({"amx", amx::kOps, amx::kOpCount, avx512vnni::kLoadOps, avx512vnni::kLoadOpCount});
        if (bf16) found.push_back({"avx512", avx512::kOps, avx512::kOpCount, avx512vnni::kLoadOps, avx512vnni::kLoadOpCount});
        if (dots) found.push_back({"avx512vnni", avx512vnni::kOps, avx512vnni::kOpCount, avx512vnni::kLoadOps, avx512vnni::kLoadOpCount});
        if (v3 && dots_of_256_bits()) found.push_back({"avxvnni", avxvnni::kOps, avxvnni::kOpCount, avx2::kLoadOps, avx2::kLoadOpCount});
        if (v3) found.push_back({"avx2", avx2::kOps, avx2::kOpCount, avx2::kLoadOps, avx2::kLoadOpCount});
#elif defined(QUIRE_ARM64)
        const Arm has = arm();
        if (has.dots && has.i8mm) found.push_back({"neon_i8mm", neon_i8mm::kOps, neon_i8mm::kOpCount, neon::kLoadOps, neon::kLoadOpCount});
        if (has.dots) found.push_back({"neon", neon::kOps, neon::kOpCount, neon::kLoadOps, neon::kLoadOpCount});
#endif
        found.push_back({"portable", portable::kOps, portable::kOpCount, portable::kLoadOps, portable::kLoadOpCount});
        return found;
    }();
    return units;
}

}  // namespace quire
