// Tiles of integer weights: codes of 8 or 4 bits, and 4-bit codes that a table turns into numbers.
//
// Activations are int8 codes per group, or 16-bit ones in two digits of base 255, each -127..127; so are the numbers of a
// table. Dot products of digits are exact, and the sums of equal weight are one sum: a group's value is the same integer in
// whatever order it is added up. Only then come the floats, groups ascending.
#pragma once

#include "linear_panel.h"
#include "look_up.h"

namespace quire::QUIRE_UNIT {
namespace {

QUIRE_INLINE F load_group(const LinearCall& c, const char* values, int64_t index) {
    return c.w.wide ? load(reinterpret_cast<const float*>(values) + index * 16)
                        : f16_load(reinterpret_cast<const uint16_t*>(values) + index * 16);
}

// Where row r of a tile that begins with row `row` has its scale of a group, its start and its sum.
template <int kInterleaved>
QUIRE_INLINE int64_t group_index(const LinearCall& c, int64_t row, int64_t g, int r) {
    return row * c.groups + (kInterleaved > 1 ? g * kInterleaved + r : r * c.groups + g);
}

// The start of each sum. `step`: blocks from one to the next, 0 where there is only the first. `x_start` holds minus the offset of
// the weights' codes times the sum of each digit's codes, or, with zeros, minus just the sum. The sum of digit pairs (p, d) has the
// index p + d; the first digit is the high one.
template <int kPlanes, int kDigits, int kOffset, int R, int NB, int kInterleaved>
QUIRE_INLINE void start_sums(const LinearCall& c, I (&sum)[kPlanes + kDigits - 1][R][NB], int64_t row, int64_t block, int64_t g, int64_t step = 1) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const int32_t* starts = c.x_start + group_index<kInterleaved>(c, row, g, r) * kDigits;
#pragma GCC unroll 4
        for (int s = 0; s < kPlanes + kDigits - 1; ++s) {
            int32_t start = 0;
            for (int p = 0; p < kPlanes; ++p)
                if (s - p >= 0 && s - p < kDigits) start += starts[s - p];
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) sum[s][r][b] = set1_i(start);
        }
    }
    if (!c.w.zeros) return;
#pragma GCC unroll 8
    for (int b = 0; b < NB; ++b) {
        const I zero = add_i(set1_i(kOffset), load_i8(c.w.zeros + ((block + b * step) * c.groups + g) * 16));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            for (int s = 0; s < kDigits; ++s) sum[s][r][b] = mul16(sum[s][r][b], zero);
    }
}

// acc += the group's integer times the scales of weights and activations, and the minimums times the activations' sum. Three
// digits do not fit into an integer: the last is added in floats.
template <int kSums, int R, int NB, int kInterleaved>
QUIRE_INLINE void add_group(const LinearCall& c, F (&acc)[R][NB], I (&sum)[kSums][R][NB], int64_t row, int64_t block, int64_t g, int64_t step = 1) {
    F scale[NB];
#pragma GCC unroll 8
    for (int b = 0; b < NB; ++b) scale[b] = load_group(c, c.w.scales, (block + b * step) * c.groups + g);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const F xs = set1(c.x_scales[group_index<kInterleaved>(c, row, g, r)]);
#pragma GCC unroll 8
        for (int b = 0; b < NB; ++b) {
            I whole = sum[0][r][b];
            if constexpr (kSums > 1) whole = add_i(times255(whole), sum[1][r][b]);
            F value = to_f(whole);
            if constexpr (kSums > 2) value = fma(value, set1(255.0f), to_f(sum[2][r][b]));
            acc[r][b] = fma(value, mul(scale[b], xs), acc[r][b]);
        }
    }
    if (!c.w.mins) return;
#pragma GCC unroll 8
    for (int b = 0; b < NB; ++b) {
        const F least = load_group(c, c.w.mins, (block + b * step) * c.groups + g);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[r][b] = fma(least, set1(c.x_sums[group_index<kInterleaved>(c, row, g, r)]), acc[r][b]);
    }
}

// Prefetches the scales of group `g` of NB blocks.
template <int NB>
QUIRE_INLINE void prefetch_scales(const LinearCall& c, int64_t block, int64_t g) {
#pragma GCC unroll 8
    for (int b = 0; b < NB; ++b) prefetch(c.w.scales + ((block + b) * c.groups + g) * (c.w.wide ? 64 : 32));
}

// Prefetches what follows 64 bytes of NB blocks: a streaming tile those `ahead`, others the next blocks'.
template <int NB, bool kStream>
QUIRE_INLINE void prefetch_weights(const char* w, int64_t block_bytes, int64_t ahead) {
#pragma GCC unroll 8
    for (int b = 0; b < NB; ++b) {
        if constexpr (kStream) {
            prefetch(w + b * block_bytes + ahead);
        } else {
            prefetch_far(w + (NB + b) * block_bytes);
        }
    }
}

// Matrix product of R rows by NB column blocks; with R = 1 it is the matrix-vector product (GEMV) of decoding.
template <class W, int R, int NB, int kInterleaved, bool kStream>
[[gnu::noinline]] void int_tile(const LinearCall& c, int64_t row, int64_t block, const Part& part) {
    constexpr bool kFour = W::kBits == 4, kTable = W::kTable;
    constexpr int kStep = W::kColumns, kDigits = W::kDigits, kPlanes = W::kPlanes, kSums = kPlanes + kDigits - 1;
    F acc[R][NB];
    load_tile<R, NB>(acc, part);
    U table[kPlanes];
    if constexpr (kTable)
        for (int p = 0; p < kPlanes; ++p) table[p] = load_table(c.w.table + p * 16);
    const int64_t block_bytes = c.w.k / kStep * 64, group_bytes = c.w.group / kStep * 64;
    const char* w = c.w.codes + block * block_bytes;
    const int64_t stride = block_bytes * part.block_step;
    const int64_t x_step = kInterleaved > 1 ? 4 : c.x_stride;
    const char* x = c.x + row * c.x_stride;
    PrefetchShare share(part), scale_share(part);
    for (int64_t g = 0; g < c.groups; ++g) {
        I sum[kSums][R][NB];
        start_sums<kPlanes, kDigits, W::kOffset, R, NB, kInterleaved>(c, sum, row, block, g, part.block_step);
        const int64_t ahead = prefetch_offset<NB>(g * group_bytes, block_bytes, R == 1 ? g_tuning.ahead : stream_ahead(NB));
        if constexpr (kStream) {
            prefetch_scales<NB>(c, block, g + ahead / group_bytes);
        } else if (scale_share.now()) {
            prefetch_scales<NB>(c, block + NB, g);
        }
        for (int64_t k = 0; k < c.w.group; k += kStep, w += 64, x += kStep * kInterleaved) {
            U low[kPlanes][NB], high[kPlanes][NB];
            if (kStream || share.now()) prefetch_weights<NB, kStream>(w, block_bytes, ahead);
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) {
                low[0][b] = load_u(w + b * stride);
                if constexpr (kFour) {
                    high[0][b] = high_nibbles(low[0][b]);
                    low[0][b] = low_nibbles(low[0][b]);
                }
                if constexpr (kTable) {
#pragma GCC unroll 2
                    for (int p = kPlanes - 1; p >= 0; --p) {
                        low[p][b] = look_up(table[p], low[0][b]);
                        high[p][b] = look_up(table[p], high[0][b]);
                    }
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
                for (int d = 0; d < kDigits; ++d) {
                    const char* at = x + r * x_step + d * c.x_digit;
                    const U x0 = set1_u(word(at)), x1 = set1_u(kFour ? word(at + 4 * kInterleaved) : 0);
#pragma GCC unroll 2
                    for (int p = 0; p < kPlanes; ++p) {
#pragma GCC unroll 8
                        for (int b = 0; b < NB; ++b) {
                            I& s = sum[p + d][r][b];
                            if constexpr (kFour && !kTable) {
                                s = dot4(dot4(s, low[p][b], x0), high[p][b], x1);
                            } else if constexpr (kTable) {
                                s = dot8(dot8(s, low[p][b], x0), high[p][b], x1);
                            } else {
                                s = dot8(s, low[p][b], x0);
                            }
                        }
                    }
                }
            }
        }
        add_group<kSums, R, NB, kInterleaved>(c, acc, sum, row, block, g, part.block_step);
    }
    store_tile<R, NB>(c, acc, row, block, part);
}

// Codes of kBits bits, or of four that stand for the numbers of a table; kDigits of activations, kPlanes of the table's numbers.
template <int kBitsOfCode, bool kFromTable = false, int kDigitsOfRow = 1, int kPlanesOfTable = 1>
struct Ints {
    static constexpr int kBits = kBitsOfCode, kDigits = kDigitsOfRow, kPlanes = kPlanesOfTable;
    static constexpr bool kTable = kFromTable, kWidens = false, kTileRegisters = true, kWideScales = false;
    static constexpr int kRoom = 1;
    static constexpr int kColumns = 32 / kBits;  // of a word, and of 64 bytes of weights
    static constexpr int kOffset = kBits == 4 && !kTable ? 8 : kStart8;
    static constexpr bool kStreams = kStreamRows > 0 && kDigits == 1;  // tiles of few rows

    // Two digits take as many more sums, so tiles have fewer rows or blocks.
    template <class Fn>
    static void with_tile(int64_t m, const Fn& f) {
        constexpr int kFew = (kFewBlocks + kPlanes - 1) / kPlanes, kMost = (kTileBlocks + kPlanes - 1) / kPlanes;
        constexpr int kSideBySide = (kRowStreams + kPlanes - 1) / kPlanes;
        if (m == 1) return g_tuning.row_streams == 1 ? f.template operator()<1, 1, true>() : f.template operator()<1, kSideBySide, true>();
        if (m <= kFewRows) return f.template operator()<kFewRows / kDigits, kFew, kStreams>();
        if constexpr (kStreams)
            if (m <= kTileRows) return f.template operator()<kTileRows, kMost, true>();
        f.template operator()<kTileRows / kDigits, kMost, false>();
    }
    template <int R, bool kStream>
    static constexpr int interleaved() { return kStreamRows && kStream ? R : 1; }
    static int64_t steps(const Matrix& w) { return w.k; }
    static int64_t row_bytes(const LinearCall& c, int64_t) { return c.x_stride; }
    template <int R, int NB>
    static int64_t part_steps(const LinearCall& c, int64_t) { return c.w.k; }
    template <int R, int NB, bool kStream>
    static void read(Part&, const LinearCall&, int64_t) {}
    template <int NB, int R, bool kStream>
    static void tile(const LinearCall& c, int64_t rows, int64_t row, int64_t block, const Part& part) {
        constexpr int kRows = interleaved<R, kStream>();
        with_rows<R, kRows>(rows, [&]<int kCount>() { int_tile<Ints, kCount, NB, kRows, kStream>(c, row, block, part); });
    }
    template <int R, int NB, bool kStream>
    static void panel(const LinearCall& c, int64_t m, const Panel& p) { tiled_panel<Ints, R, NB, kStream>(c, m, p); }
    template <int R, int NB>
    static int64_t panel_bytes(const LinearCall&, int64_t, int64_t) { return 0; }

    QUIRE_INLINE void widen(uint32_t word, const Decode& decode, float* to) {
        for (int i = 0; i < kColumns; ++i) {
            const auto code = static_cast<int32_t>(kBits == 8 ? word >> (8 * i) & 255u : word >> (i < 4 ? 8 * i : 8 * i - 28) & 15u);
            to[i] = kTable ? decode.table[code] : static_cast<float>(code - (kBits == 8 ? 128 : 0)) - (kBits == 8 ? 0.0f : decode.offset);
        }
    }
    static void decode_row(const Matrix& w, int64_t row, float* out) {
        words_of_row<Ints>(w, row, out);
        scale_row(w, row, out);
    }
};

using Int8 = Ints<8>;
using Int4 = Ints<4>;
using Table4 = Ints<4, true>;

}  // namespace
}  // namespace quire::QUIRE_UNIT
