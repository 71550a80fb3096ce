// Products of f32 activations with f32 weights, or with 16-bit ones, which are widened as they are read.
#pragma once

#include "linear_panel.h"
#include "look_up.h"

namespace quire::QUIRE_UNIT {
namespace {

// 16 rows of a column: of 16 bits the f32 numbers that they are, so a sum has the bits that f32 weights give it.
struct F32 {
    static constexpr int kBytes = 64, kRowBlocks = 1;  // of a column; of a single row's tile
    QUIRE_INLINE F load_column(const char* from) { return load(reinterpret_cast<const float*>(from)); }
    QUIRE_INLINE float number(const char* from) { return read_as<float>(from); }
};

struct F16 {
    static constexpr int kBytes = 32, kRowBlocks = kWidenedBlocks;
    QUIRE_INLINE F load_column(const char* from) { return f16_load(reinterpret_cast<const uint16_t*>(from)); }
    QUIRE_INLINE float number(const char* from) { return of_f16(read_as<uint16_t>(from)); }
};

struct Bf16Floats {
    static constexpr int kBytes = 32, kRowBlocks = kWidenedBlocks;
    QUIRE_INLINE F load_column(const char* from) { return bf16_load(reinterpret_cast<const uint16_t*>(from)); }
    QUIRE_INLINE float number(const char* from) { return of_bf16(read_as<uint16_t>(from)); }
};

template <class Number, int R, int NB>
[[gnu::noinline]] void float_tile(const LinearCall& c, int64_t row, int64_t block, const Part& part) {
    F acc[R][NB];
    load_tile<R, NB>(acc, part);
    const int64_t block_bytes = c.w.k * Number::kBytes, step = block_bytes * part.block_step;
    const char* w = c.w.codes + block * block_bytes;
    const char* x = c.x + row * c.x_stride;
    for (int64_t k = part.begin; k < part.end; ++k) {
        F wk[NB];
#pragma GCC unroll 8
        for (int b = 0; b < NB; ++b) {
            const char* at = w + b * step + k * Number::kBytes;
            wk[b] = Number::load_column(at);
            if constexpr (R == 1) prefetch(at + g_tuning.ahead);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const F xk = set1(reinterpret_cast<const float*>(x + r * c.x_stride)[k]);
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) acc[r][b] = fma(wk[b], xk, acc[r][b]);
        }
    }
    store_tile<R, NB>(c, acc, row, block, part);
}

// f32, float16 and bf16 weights for f32 activations.
template <class Number>
struct Floats {
    static constexpr bool kWidens = false, kTileRegisters = false, kWideScales = false;
    static constexpr int kRoom = 1;

    template <class Fn>
    static void with_tile(int64_t m, const Fn& f) {
        if (m == 1) return g_tuning.row_streams == 1 ? f.template operator()<1, Number::kRowBlocks, true>() : f.template operator()<1, kRowStreams, true>();
        if (m <= kFewRows) return f.template operator()<kFewRows, kFewBlocks, false>();
        if (m > kSomeRows) return f.template operator()<kManyRows, kManyBlocks, false>();
        f.template operator()<kTileRows, kTileBlocks, false>();
    }
    template <int R, bool kStream>
    static constexpr int interleaved() { return 1; }
    static int64_t steps(const Matrix& w) { return w.k; }
    static int64_t row_bytes(const LinearCall& c, int64_t part_steps) { (void)c; return part_steps * 4; }
    template <int R, int NB>
    static int64_t part_steps(const LinearCall& c, int64_t m) { return part_of_steps<R>(c.w.k, m); }
    template <int R, int NB, bool kStream>
    static void read(Part&, const LinearCall&, int64_t) {}
    template <int NB, int R, bool kStream>
    static void tile(const LinearCall& c, int64_t rows, int64_t row, int64_t block, const Part& part) {
        with_rows<R, 1>(rows, [&]<int kRows>() { float_tile<Number, kRows, NB>(c, row, block, part); });
    }
    template <int R, int NB, bool kStream>
    static void panel(const LinearCall& c, int64_t m, const Panel& p) { tiled_panel<Floats, R, NB, kStream>(c, m, p); }
    template <int R, int NB>
    static int64_t panel_bytes(const LinearCall& c, int64_t m, int64_t rows) { return tiled_panel_bytes<Floats, R, NB>(c, m, rows); }
    static void decode_row(const Matrix& w, int64_t row, float* out) {
        constexpr int64_t kEach = Number::kBytes / 16;
        const char* at = w.codes + row / 16 * w.code_step + row % 16 * kEach;
        for (int64_t i = 0; i < w.k; ++i) out[i] = Number::number(at + i * Number::kBytes);
    }
};

}  // namespace
}  // namespace quire::QUIRE_UNIT
