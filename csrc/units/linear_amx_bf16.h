// bf16 weights by tile registers: 32 rows by 32 columns of sums at a time, for any number of rows.
//
// The packed layout [n / 16][k / 2][16][2] is the one the instruction reads, so a tile of weights is 1 KiB of it. A sum is one
// chain over k in steps of 32 whatever the number of rows, as everywhere in linear_kernels.h; between parts of k it waits in memory.
#pragma once

#include "amx.h"
#include "kind.h"
#include "linear_tiles.h"

namespace quire::QUIRE_UNIT {
namespace {

// A part: at most 9 tiles of two blocks, a third of the first-level cache; with 16, activations that pass through displace them
// (measured; of 36 tiles, 4 parts of 9 are 3 % faster than 4 of 8 and one of 4).
constexpr int kAmxRows = 16, kAmxPartTiles = 9;
constexpr int64_t kAmxPanelRows = 384, kAmxBlocks = 18;

// What a step prefetches meanwhile: `lines` of one block, then those of the next, `stride` bytes further. One after the other: prefetched
// at once they take the places of all loads that may be under way (5 to 17 % slower at 256 rows).
struct Ahead {
    const char* from;
    int64_t lines, stride;
};

// Tiles 0 to 3: sums of (row tile, block) 00 01 10 11; 4, 5: activations; 6, 7: weights.
template <int RT, int NB>
QUIRE_INLINE void bf16_sums(const char* x0, const char* x1, int64_t x_stride, const char* w0, const char* w1, int64_t tiles, const Ahead& ahead = {}) {
    // Of one row tile, weights are left to the hardware's prefetcher: it streams 28 GB/s here, and 25 with lines prefetched 8 KiB ahead.
    const int64_t each = tiles ? (ahead.lines + tiles - 1) / tiles : 0;
    for (int64_t t = 0; t < tiles; ++t) {
        for (int64_t i = t * each; i < (t + 1) * each; ++i) {
            prefetch_far(ahead.from + i * 64);
            prefetch_far(ahead.from + ahead.stride + i * 64);
        }
        tile_load<4>(x0 + t * 64, x_stride);
        tile_load<6>(w0 + t * 1024, 64);
        tile_dot_bf16<0, 4, 6>();
        if constexpr (NB == 2) {
            tile_load<7>(w1 + t * 1024, 64);
            tile_dot_bf16<1, 4, 7>();
        }
        if constexpr (RT == 2) {
            tile_load<5>(x1 + t * 64, x_stride);
            tile_dot_bf16<2, 5, 6>();
            if constexpr (NB == 2) tile_dot_bf16<3, 5, 7>();
        }
    }
}

template <int kTile>
QUIRE_INLINE void begin_sum(const float* from, bool first) {
    if (first) tile_zero<kTile>();
    else tile_load<kTile>(from, 64);
}

// A part of k of one or two row tiles by one or two blocks. sums: [2 blocks][256] of each row tile.
template <int RT, int NB>
void bf16_step(const LinearCall& c, const int64_t (&rows)[2], int64_t block, int64_t begin, int64_t end, float* (&sums)[2], const Ahead& ahead) {
    const int64_t pairs = (c.w.k + 1) / 2, whole = pairs / 16, block_bytes = pairs * 64;
    const char* w = c.w.codes + block * block_bytes + begin * 1024;
    const char* x0 = c.x + rows[0] * c.x_stride + begin * 64;
    const char* x1 = c.x + rows[1] * c.x_stride + begin * 64;
    begin_sum<0>(sums[0], begin == 0);
    if constexpr (NB == 2) begin_sum<1>(sums[0] + 256, begin == 0);
    if constexpr (RT == 2) begin_sum<2>(sums[1], begin == 0);
    if constexpr (RT == 2 && NB == 2) begin_sum<3>(sums[1] + 256, begin == 0);
    const int64_t tiles = (end < whole ? end : whole) - begin;
    bf16_sums<RT, NB>(x0, x1, c.x_stride, w, w + block_bytes, tiles, ahead);
    if (end > whole) {  // the last tile is not full: activations end in zeros, and so must the weights
        alignas(64) char rest[2][1024] = {};
        for (int b = 0; b < NB; ++b)
            std::memcpy(rest[b], w + b * block_bytes + tiles * 1024, static_cast<size_t>(pairs - whole * 16) * 64);
        bf16_sums<RT, NB>(x0 + tiles * 64, x1 + tiles * 64, c.x_stride, rest[0], rest[1], 1);
    }
    tile_store<0>(sums[0], 64);
    if constexpr (NB == 2) tile_store<1>(sums[0] + 256, 64);
    if constexpr (RT == 2) tile_store<2>(sums[1], 64);
    if constexpr (RT == 2 && NB == 2) tile_store<3>(sums[1] + 256, 64);
}

// Sums of a row tile, `stride` apart for the next block, to where they belong, with the bias. Row by row: a row of a block is one
// line of its own page.
QUIRE_INLINE void store_sums(const LinearCall& c, const float* sums, int64_t stride, int64_t row, int rows, int64_t first, int64_t end) {
    for (int r = 0; r < rows; ++r)
        for (int64_t block = first; block < end; ++block) {
            const int64_t column = block * 16;
            const int lanes = static_cast<int>(c.w.n - column < 16 ? c.w.n - column : 16);
            const F sum = load(sums + (block - first) * stride + r * 16);
            store_out(c, c.out + (row + r) * c.out_stride + column, c.bias ? add(sum, load_lanes(c.bias + column, lanes)) : sum, lanes);
        }
}

// Slice `at` of `slices` of what a part has of the blocks `block` and the next.
QUIRE_INLINE Ahead ahead_of(const LinearCall& c, int64_t block, int64_t begin, int64_t part, int64_t at, int64_t slices) {
    const int64_t block_bytes = (c.w.k + 1) / 2 * 64, first = part * 16 * at / slices;
    return {c.w.codes + block * block_bytes + begin * 1024 + first * 64, part * 16 * (at + 1) / slices - first, block_bytes};
}

// Memory that a panel of so many rows and blocks needs.
QUIRE_INLINE int64_t amx_panel_bytes(int64_t rows, int64_t blocks) { return (rows + kAmxRows - 1) / kAmxRows * (blocks + 1) * 1024; }

// At most kAmxPanelRows rows. The last row tile overlaps the one before it when rows are not a multiple of 16: its sums are the
// same again.
void amx_bf16_panel(const LinearCall& c, const Panel& p) {
    const int64_t count = p.rows_end - p.row, row_tiles = (count + kAmxRows - 1) / kAmxRows, blocks = p.blocks_end - p.block;
    const int rows = count < kAmxRows ? static_cast<int>(count) : kAmxRows;
    const auto row_of = [&](int64_t t) { return t * kAmxRows + rows <= count ? p.row + t * kAmxRows : p.rows_end - rows; };
    auto* area = reinterpret_cast<float*>(p.work);
    TileShapes shapes;
    for (int i = 0; i < 6; ++i) shapes.set(i, rows, 64);
    for (int i = 6; i < 8; ++i) shapes.set(i, 16, 64);
    const TileScope scope(shapes);
    const int64_t tiles = ((c.w.k + 1) / 2 + 15) / 16, parts = row_tiles > 2 ? (tiles + kAmxPartTiles - 1) / kAmxPartTiles : 1;
    const int64_t part = (tiles + parts - 1) / parts;
    const auto sums_of = [&](int64_t t, int64_t b) { return area + (t * (blocks + 1) + b) * 256; };
    for (int64_t begin = 0; begin < tiles; begin += part) {
        const int64_t end = begin + part < tiles ? begin + part : tiles;
        for (int64_t b = 0; b < blocks; b += 2) {
            const bool more = b + 2 < blocks;
            const int64_t next_block = more ? p.block + b + 2 : end < tiles ? p.block : p.blocks_end;
            const int64_t next_begin = more ? begin : end < tiles ? end : 0;
            for (int64_t t = 0; t < row_tiles; t += 2) {
                const Ahead ahead = row_tiles > 2 ? ahead_of(c, next_block, next_begin, part, t / 2, (row_tiles + 1) / 2) : Ahead{};
                const bool two = t + 1 < row_tiles;
                const int64_t at[2] = {row_of(t), row_of(two ? t + 1 : t)};
                float* sums[2] = {sums_of(t, b), sums_of(two ? t + 1 : t, b)};
                if (b + 1 < blocks) {
                    if (two) bf16_step<2, 2>(c, at, p.block + b, begin, end, sums, ahead);
                    else bf16_step<1, 2>(c, at, p.block + b, begin, end, sums, ahead);
                } else {
                    if (two) bf16_step<2, 1>(c, at, p.block + b, begin, end, sums, ahead);
                    else bf16_step<1, 1>(c, at, p.block + b, begin, end, sums, ahead);
                }
            }
        }
    }
    for (int64_t t = 0; t < row_tiles; ++t) store_sums(c, sums_of(t, 0), 256, row_of(t), rows, p.block, p.blocks_end);
}

// Blocks of a task: as many that threads finish at about the same time; what a task has beside its blocks is counted as one more.
int64_t amx_width(int64_t blocks, int64_t panels) {
    const int64_t threads = thread_count();
    int64_t best = 2, least = INT64_MAX;
    for (int64_t width = kAmxBlocks; width >= 2; width -= 2) {
        const int64_t tasks = (blocks + width - 1) / width * panels, time = (tasks + threads - 1) / threads * (width + 1);
        if (time < least) best = width, least = time;
    }
    return best;
}

// Few rows stream weights: two blocks per task. Many share a block's weights among a panel of rows; panels have about equal height.
void amx_bf16(const LinearCall& c, int64_t m) {
    const int64_t blocks = (c.w.n + 15) / 16, panels = (m + kAmxPanelRows - 1) / kAmxPanelRows;
    const int64_t height = ((m + panels - 1) / panels + kAmxRows - 1) / kAmxRows * kAmxRows;
    const int64_t width = m <= kAmxRows ? 2 : amx_width(blocks, panels), columns = (blocks + width - 1) / width;
    const Work work(amx_panel_bytes(m < height ? m : height, width));
    parallel_for((m + height - 1) / height * columns, [&](int64_t index, int thread) {
        const int64_t row = index / columns * height, block = index % columns * width;
        amx_bf16_panel(c, {row, row + height < m ? row + height : m, block, block + width < blocks ? block + width : blocks, work.of(thread)});
    });
}

constexpr Kernels kBf16Tiles = {
    [](const LinearCall& c, int64_t m) { amx_bf16(with_large_output(c, m), m); },
    &one_below_another,
    [](const LinearCall& c, int64_t, const Panel& p) { amx_bf16_panel(c, p); },
    [](const LinearCall&, int64_t, int64_t rows, int64_t blocks) { return amx_panel_bytes(rows, blocks); },
    kMlpRows,
};

}  // namespace
}  // namespace quire::QUIRE_UNIT
