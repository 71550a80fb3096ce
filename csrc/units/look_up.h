// Rows of a packed matrix (layouts: pack.cpp) as f32: a table of tokens that is quantized, or that is the output head too, needs
// no second copy. The arithmetic is that of Weight.dequantize. A row's numbers are 4 bytes in each line of its block: 16 times
// the bytes of a row are read, a few microseconds for a token and little beside the matrices for a prompt.
#pragma once

#include "lanes.h"
#include "linear_call.h"
#include "table_rows.h"

namespace quire::QUIRE_UNIT {
namespace {

QUIRE_INLINE float of_bf16(uint32_t half) { return std::bit_cast<float>(half << 16); }

QUIRE_INLINE float of_e4m3(uint32_t byte) {
    const uint32_t exponent = byte >> 3 & 15u, digits = byte & 7u;
    const float size = exponent ? std::bit_cast<float>((exponent + 120u) << 23 | digits << 20) : static_cast<float>(digits) * 0x1p-9f;
    return byte & 0x80u ? -size : size;
}

QUIRE_INLINE float rounded_to_bf16(float x) {
    const auto bits = std::bit_cast<uint32_t>(x);
    return x != x ? x : std::bit_cast<float>((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

template <class T>
QUIRE_INLINE T read_as(const char* from) {
    T number;
    std::memcpy(&number, from, sizeof number);
    return number;
}

QUIRE_INLINE float float_at(const Matrix& w, const char* floats, int64_t index) {
    if (w.wide) return reinterpret_cast<const float*>(floats)[index];
    return of_f16(reinterpret_cast<const uint16_t*>(floats)[index]);
}

// The numbers that 4-bit codes stand for.
QUIRE_INLINE void read_table(float (&to)[16], const Matrix& w) {
    for (int i = 0; i < 16; ++i) {
        const int32_t first = w.table[i] - 128;
        to[i] = static_cast<float>(w.planes == 1 ? first : 255 * first + w.table[16 + i] - 128);
    }
}

// What the words of a matrix need to become numbers: what 4-bit codes lie above theirs, and the numbers of a table.
struct Decode {
    float offset;
    float table[16];
    explicit Decode(const Matrix& w) : offset(w.mins ? 0.0f : 8.0f) {
        if (w.table) read_table(table, w);
    }
};

// The numbers of a row without scales, of a family W whose words hold W::kColumns columns, which W::widen takes apart.
template <class W>
void words_of_row(const Matrix& w, int64_t row, float* out) {
    constexpr int64_t kColumns = W::kColumns;
    const int64_t words = (w.k + kColumns - 1) / kColumns;
    const char* at = w.codes + row / 16 * w.code_step + row % 16 * 4;
    const Decode decode(w);
    for (int64_t i = 0; i < words; ++i) {
        float numbers[kColumns];
        W::widen(word(at + i * 64), decode, numbers);
        const int64_t rest = w.k - i * kColumns;
        std::memcpy(out + i * kColumns, numbers, static_cast<size_t>(rest < kColumns ? rest : kColumns) * 4);
    }
}

inline void scale_row(const Matrix& w, int64_t row, float* x) {
    const int64_t groups = w.k / w.group;
    for (int64_t g = 0; g < groups; ++g, x += w.group) {
        const int64_t index = (row / 16 * groups + g) * 16 + row % 16;
        const float scale = float_at(w, w.scales, index), zero = w.zeros ? static_cast<float>(w.zeros[index]) : 0.0f;
        for (int64_t i = 0; i < w.group; ++i) x[i] = (x[i] - zero) * scale;
        if (!w.mins) continue;
        const float least = float_at(w, w.mins, index);
        for (int64_t i = 0; i < w.group; ++i) x[i] += least;
    }
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
