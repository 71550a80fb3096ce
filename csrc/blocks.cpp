// Copying and scrubbing whole cache blocks.
#include <cstdint>
#include <cstring>

#include "pool.h"
#include "registry.h"

namespace quire {
namespace {

// where [tensors][2] = (address, bytes of a block)
void copy_blocks(const int64_t* where, int64_t tensors, const int64_t* pairs, int64_t count, int64_t blocks) {
    for (int64_t i = 0; i < 2 * count; ++i)
        if (pairs[i] < 0 || pairs[i] >= blocks) fail("copy_blocks: a block lies outside the cache");
    parallel_for(tensors, [&](int64_t t, int) {
        auto* base = reinterpret_cast<char*>(where[2 * t]);
        const int64_t bytes = where[2 * t + 1];
        for (int64_t i = 0; i < count; ++i)
            if (pairs[2 * i] != pairs[2 * i + 1])
                std::memcpy(base + pairs[2 * i + 1] * bytes, base + pairs[2 * i] * bytes, static_cast<size_t>(bytes));
    });
}

void zero_blocks(const int64_t* where, int64_t tensors, const int64_t* ids, int64_t count, int64_t blocks) {
    for (int64_t i = 0; i < count; ++i)
        if (ids[i] < 0 || ids[i] >= blocks) fail("zero_blocks: a block lies outside the cache");
    parallel_for(tensors, [&](int64_t t, int) {
        auto* base = reinterpret_cast<char*>(where[2 * t]);
        for (int64_t i = 0; i < count; ++i)
            std::memset(base + ids[i] * where[2 * t + 1], 0, static_cast<size_t>(where[2 * t + 1]));
    });
}

const OpEntry kOps[] = {op_entry<&copy_blocks>("copy_blocks"), op_entry<&zero_blocks>("zero_blocks")};
const Register kRegister(kOps);

}  // namespace
}  // namespace quire
