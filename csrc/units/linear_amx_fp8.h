// Widened groups of float8 weights by tile registers: the tiles of linear_amx_bf16.h, emptied at every group.
#pragma once

#include "linear_amx_bf16.h"
#include "linear_fp8_groups.h"

namespace quire::QUIRE_UNIT {
namespace {

// Group g of RT row tiles by NB blocks. sums: [RT][2 blocks][256].
template <int RT, int NB>
void fp8_step(const LinearCall& c, const char* w, const int64_t (&rows)[2], int64_t g, float* sums) {
    const char* x0 = c.x + rows[0] * c.x_stride + g * c.w.group * 2;
    const char* x1 = c.x + rows[1] * c.x_stride + g * c.w.group * 2;
    tile_zero<0>();
    if constexpr (NB == 2) tile_zero<1>();
    if constexpr (RT == 2) tile_zero<2>();
    if constexpr (RT == 2 && NB == 2) tile_zero<3>();
    bf16_sums<RT, NB>(x0, x1, c.x_stride, w, w + c.w.group * 32, c.w.group / 32);
    tile_store<0>(sums, 64);
    if constexpr (NB == 2) tile_store<1>(sums + 256, 64);
    if constexpr (RT == 2) tile_store<2>(sums + 512, 64);
    if constexpr (RT == 2 && NB == 2) tile_store<3>(sums + 768, 64);
}

// NB blocks of a panel. The last row tile overlaps the one before it when rows are not a multiple of 16: of its sums only those
// of new rows are added.
template <int NB>
void fp8_tiles(const LinearCall& c, const Panel& p, int rows, float* to) {
    alignas(64) char w[NB * kFp8Group * 32];
    alignas(64) float sums[4 * 256];
    const int64_t count = p.rows_end - p.row, row_tiles = (count + kAmxRows - 1) / kAmxRows;
    const auto row_of = [&](int64_t t) { return t * kAmxRows + rows <= count ? p.row + t * kAmxRows : p.rows_end - rows; };
    for (int64_t g = 0; g < c.groups; ++g) {
        F scale[NB];
        for (int b = 0; b < NB; ++b) {
            widen_group(w + b * c.w.group * 32, c, p.block + b, g);
            scale[b] = load(reinterpret_cast<const float*>(c.w.scales) + ((p.block + b) * c.groups + g) * 16);
        }
        for (int64_t t = 0; t < row_tiles; t += 2) {
            const int tall = t + 1 < row_tiles ? 2 : 1;
            const int64_t at[2] = {row_of(t), row_of(t + tall - 1)};
            if (tall == 2) fp8_step<2, NB>(c, w, at, g, sums);
            else fp8_step<1, NB>(c, w, at, g, sums);
            for (int i = 0; i < tall; ++i) {
                const int64_t fresh = p.row + (t + i) * kAmxRows;
                const float* found = sums + i * 512 + (fresh - at[i]) * 16;
                for (int64_t row = 0; row < at[i] + rows - fresh; ++row)
                    for (int b = 0; b < NB; ++b)
                        add_scaled(to + ((fresh - p.row + row) * NB + b) * 16, load(found + b * 256 + row * 16), scale[b], g);
            }
        }
    }
}

// One or two blocks of a panel.
template <int R, int NB>
void fp8_panel(const LinearCall& c, const Panel& p) {
    const int rows = p.rows_end - p.row < kAmxRows ? static_cast<int>(p.rows_end - p.row) : kAmxRows;
    TileShapes shapes;
    for (int i = 0; i < 6; ++i) shapes.set(i, rows, 64);
    for (int i = 6; i < 8; ++i) shapes.set(i, 16, 64);
    const TileScope scope(shapes);
    with_own_sums(c, p, [&](float* sums, int64_t) {
        if (p.blocks_end - p.block == 2) fp8_tiles<2>(c, p, rows, sums);
        else fp8_tiles<1>(c, p, rows, sums);
    });
}

template <class Fn>
QUIRE_INLINE void with_fp8_tile(int64_t /*m*/, const Fn& f) {
    f.template operator()<kAmxRows, 2>();
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
