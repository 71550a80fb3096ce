// Products of float8 weights: tiles of widened groups, and all rows and blocks (with tile registers: linear_amx_fp8.h).
#pragma once

#include "dispatch.h"
#include "kind.h"
#include "linear_fp8_groups.h"
#include "look_up.h"

#if defined(QUIRE_AMX)
#include "linear_amx_fp8.h"
#endif

namespace quire::QUIRE_UNIT {
namespace {

#if !defined(QUIRE_AMX)

// A group of R rows by NB blocks; `w` holds the blocks' widened group, `to` are the rows' sums.
template <int R, int NB>
[[gnu::noinline]] void fp8_tile(const LinearCall& c, const char* w, int64_t row, int64_t block, int64_t g, float* to) {
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

// NB blocks of a panel of rows.
template <int R, int NB>
void fp8_blocks(const LinearCall& c, const Panel& p) {
    alignas(64) char w[NB * kFp8Group * 32];
    with_own_sums(c, {p.row, p.rows_end, p.block, p.block + NB, p.work}, [&](float* sums, int64_t width) {
        for (int64_t g = 0; g < c.groups; ++g) {
            for (int b = 0; b < NB; ++b) widen_group(w + b * c.w.group * 32, c, p.block + b, g);
            for (int64_t row = p.row; row < p.rows_end; row += R)
                with_count<R>(p.rows_end - row, [&]<int kRows>() { fp8_tile<kRows, NB>(c, w, row, p.block, g, sums + (row - p.row) * width); });
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

// Some columns of a panel of rows.
void fp8_panel_of(const LinearCall& c, int64_t m, const Panel& p) {
    with_fp8_tile(m, [&]<int R, int NB>() {
        for (int64_t block = p.block; block < p.blocks_end; block += NB)
            fp8_panel<R, NB>(c, {p.row, p.rows_end, block, block + NB < p.blocks_end ? block + NB : p.blocks_end, p.work});
    });
}

int64_t fp8_panel_bytes(const LinearCall& /*c*/, int64_t m, int64_t rows, int64_t /*blocks*/) {
    int64_t bytes = 0;
    with_fp8_tile(m, [&]<int, int NB>() { bytes = rows * NB * 64; });
    return bytes;
}

// All rows and column blocks. Codes [n / 16][k / 4][16][4], the four of a lane being columns k, k + 2, k + 1, k + 3.
void run_fp8(const LinearCall& c, int64_t m) {
    const int64_t blocks = (c.w.n + 15) / 16, panels = (m + kFp8PanelRows - 1) / kFp8PanelRows;
    with_fp8_tile(m, [&]<int R, int NB>() {
        const int64_t columns = (blocks + NB - 1) / NB;
        const Work work((m < kFp8PanelRows ? m : kFp8PanelRows) * NB * 64);
        parallel_for(panels * columns, [&](int64_t index, int thread) {
            const int64_t row = index / columns * kFp8PanelRows, block = index % columns * NB;
            fp8_panel<R, NB>(c, {row, row + kFp8PanelRows < m ? row + kFp8PanelRows : m, block, block + NB < blocks ? block + NB : blocks, work.of(thread)});
        });
    });
}

// The columns of a lane are k, k + 2, k + 1, k + 3.
struct Fp8Words {
    static constexpr int kColumns = 4;
    QUIRE_INLINE void widen(uint32_t word, const Decode&, float* to) {
        to[0] = of_e4m3(word & 255u), to[1] = of_e4m3(word >> 16 & 255u), to[2] = of_e4m3(word >> 8 & 255u), to[3] = of_e4m3(word >> 24);
    }
};

void decode_fp8_row(const Matrix& w, int64_t row, float* out) {
    words_of_row<Fp8Words>(w, row, out);
    scale_row(w, row, out);
}

constexpr Kernels kFp8Tiles = {&run_fp8, &one_below_another, &fp8_panel_of, &fp8_panel_bytes, kMlpRows};

}  // namespace
}  // namespace quire::QUIRE_UNIT
