// What all that reads rows of tables shares: the row of a token, and the number of a float16.
#pragma once

#include <bit>
#include <cstdint>

#include "registry.h"

namespace quire {

// The row of a table of `rows` that a token has, or -1: another table has it. `first`: of the table's tokens, or -1: it has all.
__attribute__((always_inline)) static inline int64_t row_of_token(int64_t token, int64_t first, int64_t rows) {
    const int64_t row = token - (first > 0 ? first : 0);
    const bool here = row >= 0 && row < rows;
    if (!here && (first < 0 || token < 0)) fail("embedding: a token id lies outside the table");
    return here ? row : -1;
}

__attribute__((always_inline)) static inline float of_f16(uint32_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
    const float size = rest < 0x7c00u ? std::bit_cast<float>(rest << 13) * 0x1p112f : std::bit_cast<float>(rest << 13 | 0x7f800000u);
    return std::bit_cast<float>(std::bit_cast<uint32_t>(size) | sign);
}

}  // namespace quire
