// How keys and values lie in their cache blocks (ops/layout.py has the shapes, ops/reference/caches.py reads them as torch tensors), and how
// numbers get there.
#pragma once

#include "math.h"

namespace quire::QUIRE_UNIT {
namespace {

struct CacheShape : CacheDescriptor {
    bool bf16() const { return format != kFormatF32 && format != kFormatF16; }
    bool scaled() const { return format >= kFormatInt8; }
    // Stored in fewer bytes than the kernels read: copied before use.
    bool narrow() const { return format >= kFormatF16; }
    int64_t lanes() const { return block_size < 16 ? block_size : 16; }
    int64_t pair() const { return bf16() ? 2 : 1; }
    int64_t vpair() const { return bf16() && block_size > 1 ? 2 : 1; }
    // Bytes of a number: as stored, and as the kernels read it.
    int64_t width() const { return format == kFormatF32 ? 4 : scaled() ? 1 : 2; }
    int64_t wide() const { return bf16() ? 2 : 4; }
    // Bytes of a (block, head): the numbers, then a scale per token.
    int64_t numbers() const { return block_size * d * width(); }
    int64_t piece() const { return numbers() + (scaled() ? block_size * 4 : 0); }
    int64_t piece_at(int64_t block, int64_t head) const { return block * step + head * piece(); }
};

inline void check_cache(const CacheShape& c) {
    if (c.d < 8 || c.d % 8 || c.d > kMaxHeadDim) fail("cache: head_dim must be a multiple of 8 up to 512");
    if (c.block_size < 1 || c.block_size > 128 || (c.block_size & (c.block_size - 1))) fail("cache: block_size must be a power of two up to 128");
    if (c.kv_heads < 1 || c.blocks < 1) fail("cache: needs heads and blocks");
    if (c.format < 0 || c.format >= kFormats) fail("cache: unknown format");
    if (c.step < c.kv_heads * c.piece()) fail("cache: blocks overlap");
}

// x in [-448, 448] to e4m3, to the nearest, ties to even. Below 2^-6 codes are multiples of 2^-9: adding 2^14, whose last
// place is 2^-9, rounds to them.
QUIRE_INLINE uint8_t to_fp8(float x) {
    uint32_t bits, small;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
    float magnitude;
    std::memcpy(&magnitude, &size, 4);
    const float shifted = magnitude + 16384.0f;
    std::memcpy(&small, &shifted, 4);
    const uint32_t large = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    return static_cast<uint8_t>(sign | (size < 0x3c800000 ? small - 0x46800000 : large));
}

// Codes of a scaled cache; returns the scale.
QUIRE_INLINE float quantize_row(char* to, const float* x, const CacheShape& c) {
    I top = set1_i(0);  // among magnitudes the order of the bits is that of the numbers, and NaN is above inf
    for_lanes(c.d, [&](int64_t i, int n) { top = max_i(top, bits_of(vabs(load_lanes(x + i, n)))); });
    const int32_t bits = hmax_i(top);
    float most;
    std::memcpy(&most, &bits, 4);
    const float largest = c.format == kFormatInt8 ? 127.0f : 448.0f;
    const bool finite = bits < 0x7f800000;
    const float inverse = finite && most > 1e-36f ? largest / most : 0.0f;
    if (!finite) {
        std::memset(to, 0, static_cast<size_t>(c.d));
        return NAN;
    }
    if (c.format == kFormatInt8) {
        int8_t codes[kMaxHeadDim + 16];
        for_lanes(c.d, [&](int64_t i, int n) { store_i8(codes + i, round_i(mul(load_lanes(x + i, n), set1(inverse)))); });
        std::memcpy(to, codes, static_cast<size_t>(c.d));
    } else {
        for (int64_t i = 0; i < c.d; ++i) to[i] = static_cast<char>(to_fp8(x[i] * inverse));
    }
    return most / largest;
}

// The d numbers of a head as the cache stores them, side by side; returns their scale. `to` has room for 16 more.
QUIRE_INLINE float narrow_row(char* to, const float* x, const CacheShape& c) {
    auto* halves = reinterpret_cast<uint16_t*>(to);
    switch (c.format) {
        case kFormatF32: std::memcpy(to, x, static_cast<size_t>(c.d) * 4); return 1.0f;
        case kFormatBf16: for_lanes(c.d, [&](int64_t i, int n) { bf16_store(halves + i, load_lanes(x + i, n)); }); return 1.0f;
        case kFormatF16: for_lanes(c.d, [&](int64_t i, int n) { f16_store(halves + i, load_lanes(x + i, n)); }); return 1.0f;
        default: return quantize_row(to, x, c);
    }
}

template <int kBytes>
QUIRE_INLINE void scatter(char* to, int64_t stride, const char* from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * stride, from + i * kBytes, kBytes);
}

// Where a token's numbers of a head lie.
struct Place {
    char* piece;
    int64_t offset;
    Place(char* cache, const CacheShape& c, int64_t slot, int64_t head)
        : piece(cache + c.piece_at(slot / c.block_size, head)), offset(slot % c.block_size) {}
    void set_scale(const CacheShape& c, float scale) const {
        if (c.scaled()) std::memcpy(piece + c.numbers() + offset * 4, &scale, 4);
    }
};

QUIRE_INLINE void store_key(char* keys, const float* k, const CacheShape& c, int64_t slot, int64_t head) {
    alignas(64) char rounded[(kMaxHeadDim + 16) * 4];
    const Place place(keys, c, slot, head);
    place.set_scale(c, narrow_row(rounded, k, c));
    const int64_t lanes = c.lanes(), word = c.pair() * c.width(), first = place.offset / lanes * lanes;
    char* to = place.piece + first * c.d * c.width() + place.offset % lanes * word;
    if (word == 4) {
        scatter<4>(to, lanes * 4, rounded, c.d / c.pair());
    } else {
        scatter<2>(to, lanes * 2, rounded, c.d / c.pair());
    }
}

QUIRE_INLINE void store_value(char* values, const float* v, const CacheShape& c, int64_t slot, int64_t head) {
    alignas(64) char rounded[(kMaxHeadDim + 16) * 4];
    const Place place(values, c, slot, head);
    place.set_scale(c, narrow_row(rounded, v, c));
    const int64_t pair = c.vpair(), width = c.width(), first = place.offset / pair * pair;
    char* to = place.piece + first * c.d * width + place.offset % pair * width;
    if (pair == 1) {
        std::memcpy(to, rounded, static_cast<size_t>(c.d * width));
    } else if (width == 2) {
        scatter<2>(to, 4, rounded, c.d);
    } else {
        scatter<1>(to, 2, rounded, c.d);
    }
}

// 16 rows of bf16, which become those of tokens that lie side by side.
struct SixteenRows {
    alignas(64) char rows[16][(kMaxHeadDim + 32) * 2];
    const char* at[16];

    // d numbers from x on, and of each row `stride` floats further.
    SixteenRows(const float* x, int64_t stride, const CacheShape& c) {
        for (int64_t i = 0; i < 16; ++i) {
            (void)narrow_row(rows[i], x + i * stride, c);
            at[i] = rows[i];
        }
    }
};

// Whether the tokens of 16 rows are 16 of a block of bf16 one after the other, from a multiple of 16 on.
QUIRE_INLINE bool side_by_side(const CacheShape& c, const int64_t* slots) {
    bool found = c.format == kFormatBf16 && c.block_size >= 16 && slots[0] >= 0 && slots[0] % 16 == 0;
    for (int64_t i = 1; i < 16; ++i) found = found && slots[i] == slots[0] + i;
    return found;
}

// `store_key` of 16 such tokens: a word of two numbers of each is a line (a word at a time took twice as long).
inline void store_keys(char* keys, const float* k, int64_t stride, const CacheShape& c, int64_t slot, int64_t head) {
    const SixteenRows rounded(k, stride, c);
    const Place place(keys, c, slot, head);
    char* to = place.piece + place.offset * c.d * 2;
    const int64_t words = c.d / 2;
    int64_t i = 0;
    for (; i + 16 <= words; i += 16) transpose_words(to + i * 64, rounded.at, i * 4);
    if (i == words) return;
    alignas(64) char rest[16 * 64];
    transpose_words(rest, rounded.at, i * 4);
    std::memcpy(to + i * 64, rest, static_cast<size_t>(words - i) * 64);
}

// `store_value` of 16 such tokens.
inline void store_values(char* values, const float* v, int64_t stride, const CacheShape& c, int64_t slot, int64_t head) {
    const SixteenRows rounded(v, stride, c);
    const Place place(values, c, slot, head);
    for (int64_t t = 0; t < 16; t += 2) {
        char* to = place.piece + (place.offset + t) * c.d * 2;
        int64_t i = 0;
        for (; i + 16 <= c.d; i += 16) zip16(to + i * 4, rounded.at[t] + i * 2, rounded.at[t + 1] + i * 2);
        if (i == c.d) continue;
        alignas(64) char rest[64];
        zip16(rest, rounded.at[t] + i * 2, rounded.at[t + 1] + i * 2);
        std::memcpy(to + i * 4, rest, static_cast<size_t>(c.d - i) * 4);
    }
}

// 16 numbers of a narrow cache, without their scale.
QUIRE_INLINE F widened(const char* from, int64_t format) {
    if (format == kFormatInt8) return to_f(load_i8(reinterpret_cast<const int8_t*>(from)));
    if (format == kFormatFp8) return fp8_load(reinterpret_cast<const uint8_t*>(from));
    return f16_load(reinterpret_cast<const uint16_t*>(from));
}

// `count` numbers (a multiple of 8) of a narrow cache as the kernels read them; asks for as many at `next` meanwhile.
template <int64_t kFormat>
QUIRE_INLINE void widen_as(char* to, const char* from, const char* next, int64_t count) {
    constexpr int64_t kWidth = kFormat == kFormatF16 ? 2 : 1, kWide = kFormat == kFormatF16 ? 4 : 2;
    const auto put = [](char* at, F x) __attribute__((always_inline)) {
        if constexpr (kFormat == kFormatF16) {
            store(reinterpret_cast<float*>(at), x);
        } else {
            bf16_store(reinterpret_cast<uint16_t*>(at), x);
        }
    };
    int64_t i = 0;
    for (; i + 64 <= count; i += 64) {
        for (int64_t line = 0; line < kWidth; ++line) prefetch(next + i * kWidth + line * 64);
#pragma GCC unroll 4
        for (int64_t j = i; j < i + 64; j += 16) put(to + j * kWide, widened(from + j * kWidth, kFormat));
    }
    for (; i + 16 <= count; i += 16) put(to + i * kWide, widened(from + i * kWidth, kFormat));
    if (i == count) return;
    alignas(64) char narrow[32] = {}, wide[64];
    std::memcpy(narrow, from + i * kWidth, 8 * kWidth);
    put(wide, widened(narrow, kFormat));
    std::memcpy(to + i * kWide, wide, 8 * kWide);
}

QUIRE_INLINE void widen(const CacheShape& c, char* to, const char* from, const char* next, int64_t count) {
    switch (c.format) {
        case kFormatInt8: return widen_as<kFormatInt8>(to, from, next, count);
        case kFormatFp8: return widen_as<kFormatFp8>(to, from, next, count);
        default: return widen_as<kFormatF16>(to, from, next, count);
    }
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
