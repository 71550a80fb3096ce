// A product of activations and a packed matrix as its kernels see it: the call, and the pieces that it is computed in.
#pragma once

#include "unit.h"

namespace quire::QUIRE_UNIT {

struct LinearCall {
    Matrix w;
    const float* bias;
    float* out;
    int64_t out_stride;           // floats
    int64_t groups;               // of a row
    const char* x;                // rows of int8 codes, bf16 or f32
    int64_t x_stride, x_digit;    // bytes to the next row, from a row's high digits to its low ones
    const float* x_scales;        // [m][groups], as are x_start and x_sums; [groups][rows] of interleaved rows
    const int32_t* x_start;       // [digits] each: start values of a group's sums, or minus those of codes with zeros
    const float* x_sums;          // sums of a group's rounded activations
    bool past_caches = false;     // the output is larger than a core's caches, see store_out
};

// A rectangle of rows and column blocks, and memory for what its kernel keeps meanwhile (`panel_bytes`).
struct Panel {
    int64_t row, rows_end, block, blocks_end;
    char* work;
};

// A part of the k axis, in the weights' steps: [begin, end). The sums of a first part wait in `sums` [R][NB * 16] and the next
// part goes on from there, so that the chain of sums is the one an undivided axis has.
struct Part {
    int64_t begin, end;
    bool last;
    float* sums;
    int64_t at;           // of the tile's sums
    int64_t tile, tiles;  // which of the tiles of several rows that share the weights it is: each prefetches its share of what follows
    const char* weights = nullptr;  // of bf16: step `begin` of a tile's first block; `stride` bytes from one block to the next
    int64_t stride = 0;
    const char* next = nullptr;     // what to prefetch meanwhile, `next_step` bytes a step, if anything
    int64_t next_stride = 0, next_step = 0;
    int64_t block_step = 1;         // 0: of a tile's blocks there is only the first, which it multiplies once for each and stores once
};

// The tile of `rows` rows of activations from `row` on, and the column blocks from `block` on, of a part of the k axis.
using Tile = void (*)(const LinearCall& c, int64_t rows, int64_t row, int64_t block, const Part& part);

namespace {

// Tiles "stream" where one takes all rows and reads each weight once (kStream), and "interleave" rows where their numbers lie side by
// side, a word of each row (kInterleaved rows; 1: rows lie one below the other).
//
// A single row streams its weights and prefetches those g_tuning.ahead bytes ahead (measured at 4 bits: 8 KiB brings 100 instead of 73
// of 113 GB/s on a Zen 5, 1 KiB 14.4 instead of 11.2 GB/s a core on a Xeon with AMX, where 8 KiB bring nothing), in one stream of blocks
// or in kRowStreams of them side by side (by AVX2 on that Xeon, of 36 to 45 GB/s: 34 instead of 27 at 4 bits, 34 instead of 24 at 8, 44
// instead of 31 of bf16); tiles of more rows prefetch the next column group's.
//
// Where the unit has kStreamRows, few rows stream their weights too: one tile takes all of them, and their numbers are
// interleaved, so that they too are one stream. Up to kStreamRows rows of bf16, block by block: on a Zen 5 products of
// 16 were 15-30 % faster than in two tiles of 8 x 2 that prefetch the next group's. Up to kTileRows rows of integers of one digit:
// 4-20 % faster than the same tile prefetching the next group's, and 30-50 % while the machine had much bandwidth to spare. Up to
// kStreamRows rows of super-blocks in groups of 32 columns: 10-14 % faster than in two tiles of 8 x 2 of what was expanded for them
// (groups of 16 columns keep too few of their sums in registers: a quarter slower).
//
// They prefetch further ahead in one stream of blocks than in several (16 rows of bf16: 4 KiB 5-11 % slower, 1 KiB a third; integers: 8
// KiB 0-6 % slower, 16 KiB 0-10).
constexpr int64_t stream_ahead(int blocks) { return blocks == 1 ? 8192 : 4096; }
// Blocks of 16-bit weights that a single row widens at a time: one chain of sums would wait for itself.
constexpr int kWidenedBlocks = kRowBlocks > 2 ? kRowBlocks : 2;
constexpr int64_t kSomeRows = 64;  // up to which tiles of float weights stay narrow (6 x 4 was 3-7 % slower than 8 x 2 at 48 and 64)
constexpr int64_t kPartSteps = 1024;
constexpr int64_t kPanelBytes = 384 << 10;  // of a 1 MiB second-level cache; weights stream through the rest

// Whether it is this tile that prefetches: of tiles that share the weights each does at its own steps.
struct PrefetchShare {
    int64_t left, tiles;
    explicit PrefetchShare(const Part& p) : left(p.tile), tiles(p.tiles) {}
    bool now() {
        const bool mine = left == 0;
        left = mine ? tiles - 1 : left - 1;
        return mine;
    }
};

// `bytes` of memory for each thread that runs tasks. It is taken before they begin: a task cannot fail.
struct Work {
    char* at;
    int64_t bytes;
    explicit Work(int64_t wanted) : at(nullptr), bytes((wanted + 4095) / 4096 * 4096) {
        if (bytes) at = static_cast<char*>(scratch(Scratch::kWork, static_cast<size_t>(bytes * thread_count())));
    }
    char* of(int thread) const { return at + thread * bytes; }
};

}  // namespace
}  // namespace quire::QUIRE_UNIT
