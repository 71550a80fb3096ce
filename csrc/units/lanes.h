// Runs of numbers that are no whole vectors, and words of memory.
#pragma once

#include "unit.h"

namespace quire::QUIRE_UNIT {
namespace {

// Calls body(offset, lanes) over [0, n) in steps of 16; lanes < 16 only at the end.
template <class Body>
QUIRE_INLINE void for_lanes(int64_t n, const Body& body) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) body(i, 16);
    if (i < n) body(i, static_cast<int>(n - i));
}
QUIRE_INLINE F load_lanes(const float* p, int lanes) { return lanes == 16 ? load(p) : load_n(p, lanes); }
QUIRE_INLINE void store_lanes(float* p, F v, int lanes) {
    if (lanes == 16) {
        store(p, v);
    } else {
        store_n(p, v, lanes);
    }
}

QUIRE_INLINE uint32_t word(const char* p) {
    uint32_t x;
    std::memcpy(&x, p, 4);
    return x;
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
