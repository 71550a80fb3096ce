// What tiles of R rows by NB column blocks have in common, whatever the weights are.
#pragma once

#include "dispatch.h"
#include "linear_call.h"
#include "math.h"

namespace quire::QUIRE_UNIT {
namespace {

// Stores numbers of a large output past the caches: to fetch its lines first, only to overwrite them, took 15 % of the time at
// 512 rows on a Zen 5 and up to a fifth on a Xeon with AMX. The pool's atomic count at the end of a task orders these stores.
QUIRE_INLINE void store_out(const LinearCall& c, float* to, F value, int lanes) {
    if (c.past_caches && lanes == 16 && reinterpret_cast<uintptr_t>(to) % 64 == 0) store_past(to, value);
    else store_lanes(to, value, lanes);
}

QUIRE_INLINE LinearCall with_large_output(LinearCall c, int64_t m) {
    constexpr int64_t kCacheBytes = 2 << 20;
    c.past_caches = m * c.w.n * 4 > kCacheBytes;
    return c;
}

// Stores a tile, of which `rows` are of the output; the bias comes with the last part.
template <int R, int NB>
QUIRE_INLINE void store_tile(const LinearCall& c, F (&acc)[R][NB], int64_t row, int64_t block, const Part& part, int64_t rows = R) {
    for (int b = 0; b < NB; ++b) {
        if (b > 0 && part.block_step == 0) return;
        const int64_t column = (block + b) * 16;
        const int lanes = static_cast<int>(c.w.n - column < 16 ? c.w.n - column : 16);
        const F bias = c.bias ? load_lanes(c.bias + column, lanes) : set1(0.0f);
        for (int r = 0; r < R; ++r) {
            if (!part.last) store(part.sums + part.at + (r * NB + b) * 16, acc[r][b]);
            else if (r < rows) store_out(c, c.out + (row + r) * c.out_stride + column, c.bias ? add(acc[r][b], bias) : acc[r][b], lanes);
        }
    }
}

// What a tile starts from.
template <int R, int NB>
QUIRE_INLINE void load_tile(F (&acc)[R][NB], const Part& part) {
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < NB; ++b) acc[r][b] = part.begin && (b == 0 || part.block_step) ? load(part.sums + part.at + (r * NB + b) * 16) : set1(0.0f);
}

// From byte `at` of NB streams of `bytes` each to what to prefetch: behind a stream's end the same stream goes on in the
// next group of blocks.
template <int NB>
QUIRE_INLINE int64_t prefetch_offset(int64_t at, int64_t bytes, int64_t ahead) {
    return ahead + (at + ahead >= bytes ? (NB - 1) * bytes : 0);
}

// The tile of `rows` <= R rows: f.operator()<rows>(). Of interleaved rows there are no fewer than half of R.
template <int R, int kInterleaved, class Fn>
QUIRE_INLINE void with_rows(int64_t rows, const Fn& f) {
    with_count<R, (kInterleaved > 1 ? kInterleaved / 2 : 1)>(rows, f);
}

// f(block, part) for NB blocks from `block` on; where there are fewer, for each of them by itself (Part::block_step).
template <int NB, class Fn>
QUIRE_INLINE void for_tile_blocks(int64_t block, int64_t blocks_end, Part part, const Fn& f) {
    if (blocks_end - block >= NB) return f(block, part);
    part.block_step = 0;
    for (; block < blocks_end; ++block, part.at += 16, part.weights += part.stride) f(block, part);
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
