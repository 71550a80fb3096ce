// Numbers that are known when the program runs, as template arguments.
#pragma once

#include "unit.h"

namespace quire::QUIRE_UNIT {
namespace {

// f.template operator()<N>() with N = count, or the nearest of kLeast .. kMost.
template <int kMost, int kLeast = 1, class Fn>
QUIRE_INLINE void with_count(int64_t count, const Fn& f) {
    if constexpr (kMost > kLeast)
        if (count < kMost) return with_count<kMost - 1, kLeast>(count, f);
    f.template operator()<kMost>();
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
