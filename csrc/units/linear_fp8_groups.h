// Linear layers of float8 (e4m3) weights with a scale per row and group of columns, and bf16 activations.
//
// A number of 4 significant bits is one of bf16 exactly, so codes need no arithmetic of their own: a group of a few column
// blocks is widened into a buffer of the first-level cache, in the layout of bf16 weights, and multiplied there for a panel
// of rows. Each group's sum is one chain in ascending k; groups are scaled and added in f32 in ascending order. Both are the
// same whatever the number of rows.
#pragma once

#include "linear_tiles.h"

namespace quire::QUIRE_UNIT {
namespace {

constexpr int64_t kFp8Group = 256;      // columns of the longest group: 8 KiB of bf16 a block
constexpr int64_t kFp8PanelRows = 256;  // rows that share a widened group

// Group g of a column block as bf16: [group / 2][16][2].
QUIRE_INLINE void widen_group(char* to, const LinearCall& c, int64_t block, int64_t g) {
    const char* w = c.w.codes + (block * c.w.k + g * c.w.group) * 16;
    const int64_t ahead = g_tuning.ahead;
    for (int64_t i = 0; i < c.w.group / 4; ++i) {
        const U codes = load_u(w + i * 64);
        prefetch(w + i * 64 + ahead);
        const U first = fp8_to_bf16(codes), second = fp8_to_bf16(high_bytes(codes));
        std::memcpy(to + i * 128, &first, 64);
        std::memcpy(to + i * 128 + 64, &second, 64);
    }
}

// sums += a group's sum times its scale, from zero at the first group.
QUIRE_INLINE void add_scaled(float* sums, F sum, F scale, int64_t g) { store(sums, fma(sum, scale, g ? load(sums) : set1(0.0f))); }

// body(sums, width): the sums of a panel, [rows][width = blocks * 16], which go to the output with the bias. They wait in an area
// of their own so that a group adds whole registers, not masked rows of the output (measured at 512 rows: 1.4 to 1.8 times the speed).
template <class Body>
QUIRE_INLINE void with_own_sums(const LinearCall& c, const Panel& p, const Body& body) {
    const int64_t width = (p.blocks_end - p.block) * 16;
    auto* sums = reinterpret_cast<float*>(p.work);
    body(sums, width);
    for (int64_t block = p.block; block < p.blocks_end; ++block) {
        const int64_t column = block * 16;
        const int lanes = static_cast<int>(c.w.n - column < 16 ? c.w.n - column : 16);
        for (int64_t row = p.row; row < p.rows_end; ++row) {
            const F sum = load(sums + (row - p.row) * width + column - p.block * 16);
            store_lanes(c.out + row * c.out_stride + column, c.bias ? add(sum, load_lanes(c.bias + column, lanes)) : sum, lanes);
        }
    }
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
