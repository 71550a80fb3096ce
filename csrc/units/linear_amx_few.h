// Integer weights through tile registers for the rows of one tile: a decode batch.
//
// Weights are read once, so nothing is kept: one column block after the other streams through, its floats stay in registers, and
// 8-bit codes go from memory to the tile as they lie. Codes are unsigned here, as in int_tile, and so are the starts of the sums.
// Measured at 16 rows: 10 to 20 % faster than the tiles of many rows with groups of 128, and no faster with groups of 32, where
// turning sums into floats takes the time.
#pragma once

#include "amx.h"
#include "linear_int.h"

namespace quire::QUIRE_UNIT {
namespace {

constexpr int kSide = 16;   // rows of a tile, and columns
constexpr int kTileInts = kSide * 16;
constexpr int kFewWide = 2;  // two streams of weights for the hardware's prefetcher
constexpr int kFewGroup = 64;

struct alignas(64) FewArea {
    int32_t sums[2][kFewWide][kTileInts];
    uint8_t weights[2][kFewWide][128 * kSide];
};

// The unsigned bytes of a group of 4-bit codes, [k / 4][16][4]; with a table, of its numbers, 128 more.
template <int kGroup, bool kTable>
QUIRE_INLINE void unpack_nibbles(uint8_t* to, const char* w, U table) {
#pragma GCC unroll 16
    for (int i = 0; i < kGroup / 8; ++i) {
        const U packed = load_u(w + i * 64);
        const U low = low_nibbles(packed), high = high_nibbles(packed);
        store_u(to + i * 128, kTable ? look_up(table, low) : low);
        store_u(to + i * 128 + 64, kTable ? look_up(table, high) : high);
    }
}

// acc += a group's sums times the scales of weights and activations.
template <int kOffset, bool kZeros, bool kFull>
QUIRE_INLINE void few_floats(const LinearCall& c, F (&acc)[kSide], const int32_t* sums, int64_t row, int rows, int64_t block, int64_t g) {
    const int64_t at = block * c.groups + g;
    const F scale = load_group(c, c.w.scales, at);
    I zero = set1_i(kOffset);
    if constexpr (kZeros) zero = add_i(zero, load_i8(c.w.zeros + at * 16));
    const float* xs = c.x_scales + row * c.groups + g;
    const int32_t* starts = c.x_start + row * c.groups + g;
#pragma GCC unroll 16
    for (int r = 0; r < kSide; ++r) {
        if (!kFull && r >= rows) return;
        I start = set1_i(starts[r * c.groups]);
        if constexpr (kZeros) start = mul16(start, zero);
        acc[r] = fma(to_f(add_i(load_i(sums + r * 16), start)), mul(scale, set1(xs[r * c.groups])), acc[r]);
    }
}

// Prefetches as many bytes as a group has in each of NB blocks. Measured with 8-bit codes at 16 rows: 17.1 instead of 13.8 GB/s.
template <int64_t kGroupBytes, int NB>
QUIRE_INLINE void prefetch_group(const char* w, int64_t at, int64_t block_bytes) {
    const int64_t ahead = prefetch_offset<NB>(at, block_bytes, g_tuning.ahead);
#pragma GCC unroll 2
    for (int b = 0; b < NB; ++b)
#pragma GCC unroll 32
        for (int64_t i = 0; i < kGroupBytes; i += 64) prefetch(w + b * block_bytes + ahead + i);
}

// The integer sums of a group of NB blocks: tiles 2 kBuffer and 2 kBuffer + 1, activations 4 and 5, weights 6 and 7.
template <int kGroup, int kBuffer, int NB>
QUIRE_INLINE void few_dots(const char* x, int64_t x_stride, const void* w0, const void* w1, FewArea& area) {
    constexpr int kBytes = kGroup < 64 ? kGroup : 64;
    constexpr int kA = kBuffer * 2, kB = kA + 1;
    const auto* v0 = static_cast<const char*>(w0);
    const auto* v1 = static_cast<const char*>(w1);
    tile_zero<kA>();
    if constexpr (NB == 2) tile_zero<kB>();
    tile_load<4>(x, x_stride);
    tile_load<6>(v0, 64);
    tile_dot_su8<kA, 4, 6>();
    if constexpr (NB == 2) {
        tile_load<7>(v1, 64);
        tile_dot_su8<kB, 4, 7>();
    }
    if constexpr (kGroup > kBytes) {
        tile_load<5>(x + kBytes, x_stride);
        tile_load<6>(v0 + kBytes * kSide, 64);
        tile_dot_su8<kA, 5, 6>();
        if constexpr (NB == 2) {
            tile_load<7>(v1 + kBytes * kSide, 64);
            tile_dot_su8<kB, 5, 7>();
        }
    }
    tile_store<kA>(area.sums[kBuffer][0], 64);
    if constexpr (NB == 2) tile_store<kB>(area.sums[kBuffer][1], 64);
}

// NB column blocks for up to 16 rows.
template <class W, bool kZeros, int kGroup, int NB, bool kFull>
void few_blocks(const LinearCall& c, int64_t row, int rows, int64_t block, FewArea& area) {
    constexpr bool kTable = W::kTable, kFour = W::kBits == 4;
    constexpr int64_t kGroupBytes = kGroup * (kFour ? 8 : 16);
    const int64_t block_bytes = c.groups * kGroupBytes;
    const char* w = c.w.codes + block * block_bytes;
    const char* x = c.x + row * c.x_stride;
    F acc[NB][kSide];
    for (int b = 0; b < NB; ++b)
        for (int r = 0; r < kSide; ++r) acc[b][r] = set1(0.0f);
    const U table = kTable ? load_table(c.w.table) : set1_u(0);
    const auto unpack = [&](int64_t g, int buffer) {
        if constexpr (kFour) {
            if (g >= c.groups) return;
            for (int b = 0; b < NB; ++b) unpack_nibbles<kGroup, kTable>(area.weights[buffer][b], w + b * block_bytes + g * kGroupBytes, table);
        }
    };
    const auto dots = [&]<int kBuffer>(int64_t g) {
        prefetch_group<kGroupBytes, NB>(w + g * kGroupBytes, g * kGroupBytes, block_bytes);
        const char* w0 = w + g * kGroupBytes;
        if constexpr (kFour) few_dots<kGroup, kBuffer, NB>(x + g * kGroup, c.x_stride, area.weights[kBuffer][0], area.weights[kBuffer][NB - 1], area);
        else few_dots<kGroup, kBuffer, NB>(x + g * kGroup, c.x_stride, w0, w0 + (NB - 1) * block_bytes, area);
    };
    const auto floats = [&](int64_t g, int buffer) {
#pragma GCC unroll 2
        for (int b = 0; b < NB; ++b)
            few_floats<W::kOffset, kZeros, kFull>(c, acc[b], area.sums[buffer][b], row, rows, block + b, g);
    };
    unpack(0, 0);
    for (int64_t g = 0; g < c.groups; g += 2) {
        dots.template operator()<0>(g);
        unpack(g + 1, 1);
        if (g) floats(g - 1, 1);
        if (g + 1 == c.groups) {
            floats(g, 0);
            break;
        }
        dots.template operator()<1>(g + 1);
        unpack(g + 2, 0);
        floats(g, 0);
        if (g + 2 >= c.groups) floats(g + 1, 1);
    }
    for (int b = 0; b < NB; ++b) {
        const int64_t column = (block + b) * 16;
        const int lanes = static_cast<int>(c.w.n - column < 16 ? c.w.n - column : 16);
        const F bias = c.bias ? load_lanes(c.bias + column, lanes) : set1(0.0f);
#pragma GCC unroll 16
        for (int r = 0; r < kSide; ++r) {
            if (!kFull && r >= rows) break;
            store_lanes(c.out + (row + r) * c.out_stride + column, c.bias ? add(acc[b][r], bias) : acc[b][r], lanes);
        }
    }
}

// A panel of at most 16 rows.
template <class W, bool kZeros, int kGroup>
void few_panel(const LinearCall& c, const Panel& p) {
    constexpr int kBytes = kGroup < 64 ? kGroup : 64;
    const int rows = static_cast<int>(p.rows_end - p.row);
    FewArea area;
    TileShapes shapes;
    for (int i = 0; i < 4; ++i) shapes.set(i, rows, 64);
    for (int i = 4; i < 6; ++i) shapes.set(i, rows, kBytes);
    for (int i = 6; i < 8; ++i) shapes.set(i, kBytes / 4, 64);
    const TileScope scope(shapes);
    const auto run = [&]<int NB>(int64_t block) {
        if (rows == kSide) few_blocks<W, kZeros, kGroup, NB, true>(c, p.row, rows, block, area);
        else few_blocks<W, kZeros, kGroup, NB, false>(c, p.row, rows, block, area);
    };
    int64_t block = p.block;
    for (; block + kFewWide <= p.blocks_end; block += kFewWide) run.template operator()<kFewWide>(block);
    for (; block < p.blocks_end; ++block) run.template operator()<1>(block);
}

// Groups of kFewGroup columns or more; a table has no zeros.
template <class W>
void few_panel_of(const LinearCall& c, const Panel& p) {
    if constexpr (!W::kTable)
        if (c.w.zeros) return c.w.group == 64 ? few_panel<W, true, 64>(c, p) : few_panel<W, true, 128>(c, p);
    c.w.group == 64 ? few_panel<W, false, 64>(c, p) : few_panel<W, false, 128>(c, p);
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
