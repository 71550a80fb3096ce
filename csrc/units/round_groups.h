// Round-to-nearest quantization of groups of columns; the definition is in src/quire/quant/rtn.py.
#pragma once

#include "unit.h"

namespace quire::QUIRE_UNIT {
namespace {

constexpr int64_t kMostDivisors = 8;

struct RoundCall {
    const void* w;
    int64_t k, group;
    float low, high;
    const float* divisors;
    int64_t tries;
};

template <bool kBf16>
QUIRE_INLINE F load_weight(const void* w, int64_t at) {
    if constexpr (kBf16) return bf16_load(static_cast<const uint16_t*>(w) + at);
    return load(static_cast<const float*>(w) + at);
}

// The number of largest magnitude, the first of several; NaN when there is one.
template <bool kBf16>
QUIRE_INLINE float extreme(const void* w, int64_t at, int64_t group) {
    I most = set1_i(0);
    F up = set1(-1.0f), down = set1(-1.0f);
    for (int64_t i = 0; i < group; i += 16) {
        const F x = load_weight<kBf16>(w, at + i);
        most = max_i(most, bits_of(vabs(x)));
        up = vmax(up, x);
        down = vmax(down, sub(set1(0.0f), x));
    }
    const int32_t bits = hmax_i(most);
    float top;
    std::memcpy(&top, &bits, 4);
    if (!(top <= 3.4028235e38f)) return top;
    const bool positive = hmax(up) == top, negative = hmax(down) == top;
    if (positive != negative) return positive ? top : -top;
    for (int64_t i = 0; i < group; ++i) {
        float x;
        if constexpr (kBf16) {
            const uint32_t wide = static_cast<uint32_t>(static_cast<const uint16_t*>(w)[at + i]) << 16;
            std::memcpy(&x, &wide, 4);
        } else {
            x = static_cast<const float*>(w)[at + i];
        }
        if (x == top || x == -top) return x;
    }
    return top;
}

// Codes of a group at `scale`; returns the sum of squared errors, 16 lanes wide and then by halves.
template <bool kBf16>
QUIRE_INLINE float round_at(const RoundCall& c, int8_t* codes, int64_t at, float scale) {
    const F used = set1(scale), inverse = set1(scale == 0.0f ? 0.0f : 1.0f / scale);
    F error = set1(0.0f);
    for (int64_t i = 0; i < c.group; i += 16) {
        const F x = load_weight<kBf16>(c.w, at + i);
        const I code = round_i(vmin(set1(c.high), vmax(set1(c.low), mul(x, inverse))));
        const F off = sub(mul(to_f(code), used), x);
        error = add(error, mul(off, off));
        store_i8(codes + i, code);
    }
    return hsum(error);
}

#if defined(__aarch64__)
using Half = __fp16;  // GCC 12 knows _Float16 in C++ on x86 only
#else
using Half = _Float16;
#endif

template <bool kBf16>
QUIRE_INLINE bool round_row(const RoundCall& c, int8_t* codes, uint16_t* scales, int64_t row) {
    int8_t other[128];
    bool good = true;
    for (int64_t g = 0; g < c.k / c.group; ++g) {
        const int64_t at = row * c.k + g * c.group;
        const float top = extreme<kBf16>(c.w, at, c.group);
        float least = 0.0f, scale = 0.0f;
        for (int64_t t = 0; t < c.tries; ++t) {
            const auto half = static_cast<Half>(top / c.divisors[t]);
            const float error = round_at<kBf16>(c, t ? other : codes + at, at, static_cast<float>(half));
            if (t && !(error < least)) continue;
            if (t) std::memcpy(codes + at, other, static_cast<size_t>(c.group));
            least = error;
            scale = static_cast<float>(half);
            std::memcpy(scales + row * (c.k / c.group) + g, &half, 2);
        }
        good = good && scale - scale == 0.0f;
    }
    return good;
}

// codes [n, k] int8 and scales [n, k / group] f16 of w [n, k]; *bad becomes 1 when a scale is not finite.
void round_groups(int8_t* codes, uint16_t* scales, int64_t* bad, const char* w, const RoundingDescriptor* by, int64_t n) {
    constexpr int64_t kMost = int64_t{1} << 40;
    const int64_t k = by->k, group = by->group, low = by->low, high = by->high, bf16 = by->bf16;
    if (n < 1 || k < 1 || n > kMost || k > kMost) fail("round_groups: sizes must lie in [1, 2^40]");
    if (by->stride != k * (bf16 ? 2 : 4)) fail("round_groups: rows must lie without gaps");
    if ((group != 32 && group != 64 && group != 128) || k % group) fail("round_groups: columns must be a multiple of the group (32, 64, 128)");
    if (by->tries < 1 || by->tries > kMostDivisors || low < -128 || high > 127 || low > high) fail("round_groups: codes or divisors out of range");
    const RoundCall c{w, k, group, static_cast<float>(low), static_cast<float>(high), by->divisors, by->tries};
    *bad = 0;
    parallel_ranges(n, k, [&](int64_t begin, int64_t end) {
        bool good = true;
        for (int64_t r = begin; r < end; ++r)
            good = (bf16 ? round_row<true>(c, codes, scales, r) : round_row<false>(c, codes, scales, r)) && good;
        if (!good) __atomic_store_n(bad, int64_t{1}, __ATOMIC_RELAXED);
    });
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
