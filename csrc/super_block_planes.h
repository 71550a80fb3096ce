// Codes of 32 columns, eight words of four a byte each, into the planes of super_blocks.h. A word is a uint32_t, or a vector with
// the same word of several rows.
#pragma once

#include <cstdint>

namespace quire {

template <int kBits, class Word>
inline void planes_of(Word* to, const Word* w) {
    if constexpr (kBits >= 4)
        for (int i = 0; i < 4; ++i) to[i] = (w[2 * i] & 0x0f0f0f0fu) | (w[2 * i + 1] & 0x0f0f0f0fu) << 4;
    if constexpr (kBits == 5) {
        to[4] = w[0] >> 4 & 0x01010101u;
        for (int i = 1; i < 8; ++i) to[4] |= (w[i] >> 4 & 0x01010101u) << i;
    }
    if constexpr (kBits == 6)
        for (int i = 0; i < 2; ++i) {
            to[4 + i] = w[4 * i] >> 4 & 0x03030303u;
            for (int j = 1; j < 4; ++j) to[4 + i] |= (w[4 * i + j] >> 4 & 0x03030303u) << (2 * j);
        }
    if constexpr (kBits == 3) {
        for (int i = 0; i < 3; ++i) to[i] = w[2 * i] | w[2 * i + 1] << 3;
        to[0] |= (w[6] & 0x03030303u) << 6;
        to[1] |= (w[7] & 0x03030303u) << 6;
        to[2] |= (w[6] & 0x04040404u) << 4 | (w[7] & 0x04040404u) << 5;
    }
    if constexpr (kBits == 2)
        for (int i = 0; i < 2; ++i) to[i] = w[4 * i] | w[4 * i + 1] << 2 | w[4 * i + 2] << 4 | w[4 * i + 3] << 6;
}

}  // namespace quire
