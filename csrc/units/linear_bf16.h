// Products of bf16 activations and bf16 weights, in pairs of columns.
#pragma once

#include "linear_panel.h"
#include "look_up.h"

namespace quire::QUIRE_UNIT {
namespace {

// Inlined into its callers, GCC 12 keeps the sums of 16 rows in memory: a third of the speed.
template <int R, int NB, int kInterleaved, bool kStream>
[[gnu::noinline]] void bf16_tile(const LinearCall& c, int64_t row, int64_t block, const Part& part) {
    F acc[R][NB];
    load_tile<R, NB>(acc, part);
    const int64_t stride = part.stride * part.block_step, x_step = kInterleaved > 1 ? 4 : c.x_stride;
    const char* x = c.x + row * c.x_stride + part.begin * 4 * kInterleaved;
    PrefetchShare share(part);
    for (int64_t p = 0; p < part.end - part.begin; ++p, x += 4 * kInterleaved) {
        U wk[NB];
#pragma GCC unroll 8
        for (int b = 0; b < NB; ++b) wk[b] = load_u(part.weights + b * stride + p * 64);
        if (part.next && (kStream || share.now())) {
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) {
                const char* at = part.next + b * part.next_stride + p * part.next_step;
                kStream ? prefetch(at) : prefetch_far(at);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const U xk = set1_u(word(x + r * x_step));
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) acc[r][b] = dot_bf16(acc[r][b], wk[b], xk);
        }
    }
    store_tile<R, NB>(c, acc, row, block, part);
}

// Calls f.operator()<R, NB, kStream>() with the tile for m > 1 rows. `kFew`: blocks for a few rows where they do not stream; `kMany`:
// many rows have larger tiles.
template <int kFew, bool kMany, class Fn>
QUIRE_INLINE void with_bf16_rows(int64_t m, const Fn& f) {
    if constexpr (kStreamRows > 0) {
        if (m <= kFewRows) return f.template operator()<kFewRows, 1, true>();
        if (m <= kTileRows) return f.template operator()<kTileRows, 1, true>();
        if (m <= kStreamRows) return f.template operator()<kStreamRows, 1, true>();
    } else {
        if (m <= kFewRows) return f.template operator()<kFewRows, kFew, false>();
    }
    if constexpr (kMany)
        if (m > kSomeRows) return f.template operator()<kManyRows, kManyBlocks, false>();
    f.template operator()<kTileRows, kTileBlocks, false>();
}

// The same for any number of rows.
template <bool kMany, class Fn>
QUIRE_INLINE void with_bf16_tile(int64_t m, const Fn& f) {
    if (m > 1) return with_bf16_rows<kFewBlocks, kMany>(m, f);
    g_tuning.row_streams == 1 ? f.template operator()<1, kRowBlocks, true>() : f.template operator()<1, kRowStreams, true>();
}

struct Bf16 {
    static constexpr bool kWidens = false, kTileRegisters = false, kWideScales = false;
    static constexpr int kRoom = 1;
    static constexpr int kColumns = 2;  // of a word

    template <class Fn>
    static void with_tile(int64_t m, const Fn& f) { with_bf16_tile<true>(m, f); }
    template <int R, bool kStream>
    static constexpr int interleaved() { return kStreamRows && kStream ? R : 1; }
    static int64_t steps(const Matrix& w) { return (w.k + 1) / 2; }
    static int64_t row_bytes(const LinearCall&, int64_t part_steps) { return part_steps * 4; }
    template <int R, int NB>
    static int64_t part_steps(const LinearCall& c, int64_t m) { return part_of_steps<R>(steps(c.w), m); }
    // Where the weights of a part lie; a tile that streams them prefetches those ahead, others the next part's, then the next blocks'.
    template <int R, int NB, bool kStream>
    static void read(Part& part, const LinearCall& c, int64_t block) {
        const int64_t ahead = R == 1 ? g_tuning.ahead : kStream ? stream_ahead(NB) : 0;
        part.stride = part.next_stride = steps(c.w) * 64;
        part.weights = c.w.codes + block * part.stride + part.begin * 64;
        part.next = part.weights + (ahead ? ahead : part.last ? NB * part.stride - part.begin * 64 : (part.end - part.begin) * 64);
        part.next_step = 64;
    }
    template <int NB, int R, bool kStream>
    static void tile(const LinearCall& c, int64_t rows, int64_t row, int64_t block, const Part& part) {
        constexpr int kRows = interleaved<R, kStream>();
        with_rows<R, kRows>(rows, [&]<int kCount>() { bf16_tile<kCount, NB, kRows, kStream>(c, row, block, part); });
    }
    template <int R, int NB, bool kStream>
    static void panel(const LinearCall& c, int64_t m, const Panel& p) { tiled_panel<Bf16, R, NB, kStream>(c, m, p); }
    template <int R, int NB>
    static int64_t panel_bytes(const LinearCall& c, int64_t m, int64_t rows) { return tiled_panel_bytes<Bf16, R, NB>(c, m, rows); }

    // The columns of one word as numbers.
    QUIRE_INLINE void widen(uint32_t word, const Decode&, float* to) { to[0] = of_bf16(word & 0xffffu), to[1] = of_bf16(word >> 16); }
    static void decode_row(const Matrix& w, int64_t row, float* out) { words_of_row<Bf16>(w, row, out); }
};

}  // namespace
}  // namespace quire::QUIRE_UNIT
