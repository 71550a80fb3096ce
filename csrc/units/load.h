// Ops that run at a load only, once per vector width: apart from the kernels of unit.h, so that both are compiled quickly. As there,
// nothing may be emitted as a shared inline function.
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(QUIRE_X86)
#include <immintrin.h>
#elif defined(QUIRE_ARM64)
#include <arm_neon.h>
#endif

#include "pool.h"
#include "registry.h"

namespace quire::QUIRE_UNIT {
namespace {

#include QUIRE_UNIT_VEC

#include "round_pack.h"

}  // namespace

extern const OpEntry kLoadOps[];
extern const size_t kLoadOpCount;
constexpr OpEntry kLoadOps[] = {op_entry<&round_pack>("round_pack")};
constexpr size_t kLoadOpCount = sizeof(kLoadOps) / sizeof(kLoadOps[0]);

}  // namespace quire::QUIRE_UNIT
