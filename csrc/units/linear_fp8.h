// Linear layers of float8 (e4m3) weights with a scale per row and group of columns, and bf16 activations (included by unit.h).
//
// A number of 4 significant bits is one of bf16 exactly, so codes need no arithmetic of their own: a group of a few column
// blocks is widened into a buffer of the first-level cache, in the layout of bf16 weights, and multiplied there for a panel
// of rows. Each group's sum is one chain in ascending k; groups are scaled and added in f32 in ascending order. Both are the
// same whatever the number of rows.
#pragma once

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
    auto* sums = static_cast<float*>(scratch(Scratch::kSums, static_cast<size_t>((p.rows_end - p.row) * width) * 4));
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

#if defined(QUIRE_AMX)
#include "linear_amx_fp8.h"
#else

// A group of R rows by NB blocks; `w` holds the blocks' widened group, `to` are the rows' sums.
template <int R, int NB>
void fp8_tile(const LinearCall& c, const char* w, int64_t row, int64_t block, int64_t g, float* to) {
    F sum[R][NB];
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < NB; ++b) sum[r][b] = set1(0.0f);
    const char* x = c.x + row * c.x_stride + g * c.w.group * 2;
    for (int64_t p = 0; p < c.w.group / 2; ++p) {
        U wk[NB];
#pragma GCC unroll 8
        for (int b = 0; b < NB; ++b) wk[b] = load_u(w + b * c.w.group * 32 + p * 64);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const U xk = set1_u(word(x + r * c.x_stride + p * 4));
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) sum[r][b] = dot_bf16(sum[r][b], wk[b], xk);
        }
    }
    for (int b = 0; b < NB; ++b) {
        const F scale = load(reinterpret_cast<const float*>(c.w.scales) + ((block + b) * c.groups + g) * 16);
        for (int r = 0; r < R; ++r) add_scaled(to + (r * NB + b) * 16, sum[r][b], scale, g);
    }
}

// The tile of `rows` <= R rows: tries R, R - 1, ... 1.
template <int NB, int R>
void fp8_tile_of(const LinearCall& c, const char* w, int64_t rows, int64_t row, int64_t block, int64_t g, float* to) {
    if (rows == R) return fp8_tile<R, NB>(c, w, row, block, g, to);
    if constexpr (R > 1) return fp8_tile_of<NB, R - 1>(c, w, rows, row, block, g, to);
}

// NB blocks of a panel of rows.
template <int R, int NB>
void fp8_blocks(const LinearCall& c, const Panel& p) {
    alignas(64) char w[NB * kFp8Group * 32];
    with_own_sums(c, {p.row, p.rows_end, p.block, p.block + NB}, [&](float* sums, int64_t width) {
        for (int64_t g = 0; g < c.groups; ++g) {
            for (int b = 0; b < NB; ++b) widen_group(w + b * c.w.group * 32, c, p.block + b, g);
            for (int64_t row = p.row; row < p.rows_end; row += R)
                fp8_tile_of<NB, R>(c, w, p.rows_end - row < R ? p.rows_end - row : R, row, p.block, g, sums + (row - p.row) * width);
        }
    });
}

template <int R, int NB>
void fp8_panel(const LinearCall& c, Panel p) {
    if (p.blocks_end - p.block == NB) return fp8_blocks<R, NB>(c, p);
    for (; p.block < p.blocks_end; ++p.block) fp8_blocks<R, 1>(c, p);
}

// Calls f.template operator()<R, NB>() with the tile for m rows. A single row takes as many blocks as a few rows do: one chain
// of dot products alone would wait for each of them.
template <class Fn>
QUIRE_INLINE void with_fp8_tile(int64_t m, const Fn& f) {
    if (m <= kFewRows) return f.template operator()<kFewRows, kFewBlocks>();
    f.template operator()<kTileRows, kTileBlocks>();
}
#endif

// All rows and column blocks. Codes [n / 16][k / 4][16][4], the four of a lane being columns k, k + 2, k + 1, k + 3.
void run_fp8(const LinearCall& c, int64_t m) {
    const int64_t blocks = (c.w.n + 15) / 16, panels = (m + kFp8PanelRows - 1) / kFp8PanelRows;
    with_fp8_tile(m, [&]<int R, int NB>() {
        const int64_t columns = (blocks + NB - 1) / NB;
        parallel_for(panels * columns, [&](int64_t index, int) {
            const int64_t row = index / columns * kFp8PanelRows, block = index % columns * NB;
            fp8_panel<R, NB>(c, {row, row + kFp8PanelRows < m ? row + kFp8PanelRows : m, block, block + NB < blocks ? block + NB : blocks});
        });
    });
}
