#include "isa.h"

namespace quire {

#if defined(QUIRE_X86)
namespace avx512 {
extern const OpEntry kOps[];
extern const size_t kOpCount;
}  // namespace avx512
namespace avx2 {
extern const OpEntry kOps[];
extern const size_t kOpCount;
}  // namespace avx2
#endif
namespace portable {
extern const OpEntry kOps[];
extern const size_t kOpCount;
}  // namespace portable

const std::vector<Unit>& supported_units() {
    static const std::vector<Unit> units = [] {
        std::vector<Unit> found;
#if defined(QUIRE_X86)
        __builtin_cpu_init();
        const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
        const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512cd");
        if (v3 && v4 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16"))
            found.push_back({"avx512", avx512::kOps, avx512::kOpCount});
        if (v3) found.push_back({"avx2", avx2::kOps, avx2::kOpCount});
#endif
        found.push_back({"portable", portable::kOps, portable::kOpCount});
        return found;
    }();
    return units;
}

}  // namespace quire
