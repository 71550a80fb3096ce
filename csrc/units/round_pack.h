// Round-to-nearest quantization of groups of columns straight into the layouts of pack.cpp: what round_groups.h and then pack_int4 or
// pack_int8 give, bit for bit. Sixteen rows go together, a row to a lane: nothing is summed or compared across lanes.
#pragma once

#include "math.h"
#include "round_groups.h"

namespace quire::QUIRE_UNIT {
namespace {

struct RoundRule {
    int64_t group;
    float low, high;
    const float* divisors;
    int64_t tries;
};

struct RoundPack {
    const char* w;
    const int64_t* order;  // row of w that is row i, or null
    int64_t n, k, stride;  // bytes from row to row
    RoundRule rule;
    uint8_t* out;
    uint16_t* scales;
};

// Columns of a group of 16 rows as f32: x[column][row].
template <bool kBf16>
QUIRE_INLINE void columns_of(float (*x)[16], const char* const* rows, int64_t group) {
    alignas(64) uint32_t words[16][16];
    if constexpr (!kBf16) {
        for (int64_t i = 0; i < group; i += 16) transpose_words(reinterpret_cast<char*>(x + i), rows, i * 4);
    } else {
        for (int64_t i = 0; i < group; i += 32) {
            transpose_words(reinterpret_cast<char*>(words), rows, i * 2);
            alignas(64) uint32_t both[2][16];
            for (int w = 0; w < 16; ++w) {
                for (int lane = 0; lane < 16; ++lane) both[0][lane] = words[w][lane] << 16;
                for (int lane = 0; lane < 16; ++lane) both[1][lane] = words[w][lane] & 0xffff0000u;
                std::memcpy(x[i + 2 * w], both, sizeof both);
            }
        }
    }
}

// Of each row the number of largest magnitude, the first of several; where there is NaN or inf, that.
QUIRE_INLINE F extremes(const float (*x)[16], int64_t group) {
    I most = set1_i(0);
    F up = set1(-1.0f), down = set1(1.0f);
    for (int64_t c = 0; c < group; ++c) {
        const F v = load(x[c]);
        most = max_i(most, bits_of(vabs(v)));
        up = vmax(up, v);
        down = vmin(down, v);
    }
    alignas(64) float size[16], high[16], low[16], top[16];
    std::memcpy(size, &most, sizeof size);
    store(high, up);
    store(low, down);
    bool several = false;
    for (int lane = 0; lane < 16; ++lane) {
        const bool positive = high[lane] == size[lane], negative = low[lane] == -size[lane];
        top[lane] = positive || !(size[lane] <= 3.4028235e38f) ? size[lane] : -size[lane];
        several |= positive && negative;
    }
    if (several)
        for (int lane = 0; lane < 16; ++lane) {
            if (high[lane] != size[lane] || low[lane] != -size[lane]) continue;
            int64_t c = 0;
            while (c + 1 < group && x[c][lane] != size[lane] && x[c][lane] != -size[lane]) ++c;
            top[lane] = x[c][lane];
        }
    return load(top);
}

QUIRE_INLINE F inverse_of(F scale) {
    const F zero = set1(0.0f);
    return where_less(zero, vabs(scale), div(set1(1.0f), scale), zero);
}

// Squared errors of the rows at `scale`, summed in the order of round_groups.h: 16 partial sums, then by halves.
QUIRE_INLINE F errors_at(const RoundRule& c, const float (*x)[16], F scale) {
    const F inverse = inverse_of(scale), low = set1(c.low), high = set1(c.high);
    const auto error = [&](int64_t at) {
        const F v = load(x[at]);
        const F off = sub(mul(round_f(vmin(high, vmax(low, mul(v, inverse)))), scale), v);
        return mul(off, off);
    };
    F sums[8];
    for (int i = 0; i < 8; ++i) {
        F a = error(i), b = error(i + 8);
        for (int64_t at = 16; at < c.group; at += 16) {
            a = add(a, error(at + i));
            b = add(b, error(at + i + 8));
        }
        sums[i] = add(a, b);
    }
    for (int width = 4; width; width /= 2)
        for (int i = 0; i < width; ++i) sums[i] = add(sums[i], sums[i + width]);
    return sums[0];
}

// Codes of a group of 16 rows at `scale`, in words of 32 bits.
template <int kBits>
QUIRE_INLINE void codes_at(const RoundRule& c, uint8_t* to, const float (*x)[16], F scale) {
    constexpr int kColumns = 32 / kBits, kOffset = 1 << (kBits - 1);
    const F inverse = inverse_of(scale), low = set1(c.low), high = set1(c.high);
    for (int64_t at = 0; at < c.group; at += kColumns, to += 64) {
        alignas(64) uint32_t words[16] = {};
        for (int j = 0; j < kColumns; ++j) {
            const I code = round_i(vmin(high, vmax(low, mul(load(x[at + j]), inverse))));
            alignas(64) uint32_t codes[16];
            std::memcpy(codes, &code, sizeof codes);
            const int place = kBits == 8 ? 8 * j : j < 4 ? 8 * j : 8 * (j - 4) + 4;
            for (int lane = 0; lane < 16; ++lane) words[lane] |= (codes[lane] + kOffset) << place;
        }
        std::memcpy(to, words, sizeof words);
    }
}

template <bool kBf16, int kBits>
QUIRE_INLINE bool round_block(const RoundPack& p, int64_t block) {
    static constexpr char kNothing[512] = {};
    const RoundRule& c = p.rule;
    const int64_t first = block * 16, rows = p.n - first < 16 ? p.n - first : 16, groups = p.k / c.group;
    alignas(64) float x[128][16];
    bool good = true;
    const char* firsts[16];
    for (int64_t lane = 0; lane < rows; ++lane) firsts[lane] = p.w + (p.order ? p.order[first + lane] : first + lane) * p.stride;
    for (int64_t g = 0; g < groups; ++g) {
        const char* from[16];
        for (int64_t lane = 0; lane < 16; ++lane) from[lane] = lane < rows ? firsts[lane] + g * c.group * (kBf16 ? 2 : 4) : kNothing;
        columns_of<kBf16>(x, from, c.group);
        const F top = extremes(x, c.group);
        alignas(64) uint16_t halves[16];
        F scale = set1(0.0f), least = set1(0.0f);
        for (int64_t t = 0; t < c.tries; ++t) {
            f16_store(halves, div(top, set1(c.divisors[t])));
            const F tried = f16_load(halves), error = c.tries > 1 ? errors_at(c, x, tried) : least;
            scale = t ? where_less(error, least, tried, scale) : tried;
            least = t ? where_less(error, least, error, least) : error;
        }
        f16_store(halves, scale);
        for (int64_t lane = 0; lane < 16; ++lane) {
            if (lane >= rows) halves[lane] = 0;
            good = good && (halves[lane] & 0x7c00) != 0x7c00;
        }
        std::memcpy(p.scales + (block * groups + g) * 16, halves, sizeof halves);
        codes_at<kBits>(c, p.out + (block * p.k + g * c.group) * 2 * kBits, x, scale);
    }
    return good;
}

// The n rows `order` (all where it is null) of w [., k], `stride` bytes apart, as int4 (`bits` 4) or int8 in the layouts of pack.cpp, and
// their scales [n / 16][k / group][16] f16; *bad becomes 1 when a scale is not finite.
void round_pack(uint8_t* out, uint16_t* scales, int64_t* bad, const char* w, Optional<const int64_t> order, const RoundingDescriptor* by,
                int64_t n) {
    constexpr int64_t kMost = int64_t{1} << 40;
    const int64_t k = by->k, stride = by->stride, group = by->group, low = by->low, high = by->high, bf16 = by->bf16, bits = by->bits;
    if (n < 1 || k < 1 || n > kMost || k > kMost || stride < k * (bf16 ? 2 : 4)) fail("round_pack: sizes must lie in [1, 2^40]");
    if ((group != 32 && group != 64 && group != 128) || k % group) fail("round_pack: columns must be a multiple of the group (32, 64, 128)");
    if (by->tries < 1 || by->tries > kMostDivisors || (bits != 4 && bits != 8) || low < -(1 << (bits - 1)) || high >= 1 << (bits - 1) || low > high)
        fail("round_pack: codes or divisors out of range");
    const RoundPack p{w, order.ptr, n, k, stride, {group, static_cast<float>(low), static_cast<float>(high), by->divisors, by->tries}, out, scales};
    *bad = 0;
    parallel_for((n + 15) / 16, [&](int64_t block, int) {
        const bool good = bits == 4 ? (bf16 ? round_block<true, 4>(p, block) : round_block<false, 4>(p, block))
                                    : (bf16 ? round_block<true, 8>(p, block) : round_block<false, 8>(p, block));
        if (!good) __atomic_store_n(bad, int64_t{1}, __ATOMIC_RELAXED);
    });
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
