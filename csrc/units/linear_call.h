// A product of activations and a packed matrix as its kernels see it: the call, and the pieces that it is computed in.
#pragma once

// The kinds of matrix, then what kernels make differences of: `Pair`: a table of numbers of two digits; `Wide`: activations of two.
enum class WeightKind {
#define KIND(id, ...) id,
#include "kinds.inc"
    kTable4Pair, kInt8Wide, kInt4Wide, kTable4Wide, kTable4PairWide
};

// Whether it is a kind of matrix, with one digit everywhere.
constexpr bool is_plain(WeightKind kind) { return static_cast<int64_t>(kind) < kKindCount; }

constexpr bool is_bf16(WeightKind kind) { return kind == WeightKind::kBf16 || kind == WeightKind::kBf12 || kind == WeightKind::kSparse16 || kind == WeightKind::kTwoOfFour16; }
// Without its zeros, see sparse.h.
constexpr bool is_two_of_four(WeightKind kind) { return kind >= WeightKind::kTwoOfFour16 && kind <= WeightKind::kTwoOfFour4; }
constexpr bool is_sparse(WeightKind kind) { return kind >= WeightKind::kSparse16 && kind <= WeightKind::kTwoOfFour4; }
// Whether a unit multiplies such weights with the activations that they choose, instead of putting the zeros back.
#if defined(__AVX512BW__)
constexpr bool chooses(WeightKind kind) { return is_two_of_four(kind); }
#else
constexpr bool chooses(WeightKind /*kind*/) { return false; }
#endif
// Products with f32 activations, of f32 numbers or of those of 16 bits, which are widened as they are read.
constexpr bool widens(WeightKind kind) { return kind == WeightKind::kBf16Floats || kind == WeightKind::kF16; }
constexpr bool reads_floats(WeightKind kind) { return kind == WeightKind::kF32 || widens(kind); }
constexpr bool is_float(WeightKind kind) { return reads_floats(kind) || is_bf16(kind); }
constexpr bool is_int8(WeightKind kind) { return kind == WeightKind::kInt8 || kind == WeightKind::kInt8Wide; }
constexpr bool is_int4(WeightKind kind) { return kind == WeightKind::kInt4 || kind == WeightKind::kInt4Wide; }
// In super-blocks, see super_blocks.h.
consteval bool is_super(WeightKind kind) { return is_plain(kind) && is_super(static_cast<Kind>(kind)); }
consteval SuperForm super_form(WeightKind kind) { return super_form(static_cast<Kind>(kind)); }
constexpr int digits_of(WeightKind kind) { return kind >= WeightKind::kInt8Wide ? 2 : 1; }
constexpr int planes_of(WeightKind kind) {
    return kind == WeightKind::kTable4Pair || kind == WeightKind::kTable4PairWide ? 2 : 1;
}

struct LinearCall {
    Matrix w;
    const float* bias;
    float* out;
    int64_t out_stride;           // floats
    int64_t groups;               // of a row
    const char* x;                // rows of int8 codes, bf16 or f32
    int64_t x_stride, x_digit;    // bytes to the next row, from a row's high digits to its low ones
    const float* x_scales;        // [m][groups], as are x_start and x_sums; [groups][rows] of rows side by side
    const int32_t* x_start;       // [digits] each: start values of a group's sums, or minus those of codes with zeros
    const float* x_sums;          // sums of a group's rounded activations
    bool past_caches = false;     // the output is larger than a core's caches, see store_out
};

// A single row streams its weights once and asks for those g_tuning.ahead bytes ahead (measured at 4 bits: 8 KiB brings 100
// instead of 73 of 113 GB/s on a Zen 5, 1 KiB 14.4 instead of 11.2 GB/s a core on a Xeon with AMX, where 8 KiB bring nothing);
// tiles of more rows ask for the next column group's.
//
// Where the unit has kStreamRows, few rows stream their weights too: one tile takes all of them, and their numbers lie side by
// side, a word of each, so that they too are one stream. Up to kStreamRows rows of bf16, block by block: on a Zen 5 products of
// 16 were 15-30 % faster than in two tiles of 8 x 2 that ask for the next group's. Up to kTileRows rows of integers of one digit:
// 4-20 % faster than the same tile asking for the next group's, and 30-50 % while the machine had much bandwidth to spare. Up to
// kStreamRows rows of super-blocks in groups of 32 columns: 10-14 % faster than in two tiles of 8 x 2 of what was expanded for them
// (groups of 16 columns keep too few of their sums in registers: a quarter slower).
//
// They ask further ahead in one stream of blocks than in several (16 rows of bf16: 4 KiB 5-11 % slower, 1 KiB a third; integers: 8
// KiB 0-6 % slower, 16 KiB 0-10).
constexpr int64_t stream_ahead(int blocks) { return blocks == 1 ? 8192 : 4096; }
// Blocks of 16-bit weights that a single row widens at a time: one chain of sums would wait for itself.
constexpr int kWidenedBlocks = kRowBlocks > 2 ? kRowBlocks : 2;
constexpr int64_t kSomeRows = 64;  // up to which tiles of float weights stay narrow (6 x 4 was 3-7 % slower than 8 x 2 at 48 and 64)
constexpr int64_t kPartSteps = 1024;
constexpr int64_t kPanelBytes = 384 << 10;  // of a 1 MiB second-level cache; weights stream through the rest

// How many rows of activations lie side by side for tiles of R rows; 1: they lie one below the other.
template <WeightKind kKind, int R, bool kAlone>
constexpr int rows_abreast() {
    return kStreamRows && kAlone && !reads_floats(kKind) && !is_two_of_four(kKind) ? R : 1;
}

// A part of the k axis, in the weights' steps: [begin, end). The sums of a first part wait in `sums` [R][NB * 16] and the next
// part goes on from there, so that the chain of sums is the one an undivided axis has.
struct Part {
    int64_t begin, end;
    bool last;
    float* sums;
    int64_t at;           // of the tile's sums
    int64_t turn, turns;  // of the tiles of several rows that share the weights: each asks for its share of what follows
    const char* weights = nullptr;  // of bf16: step `begin` of a tile's first block; `stride` bytes from one block to the next
    int64_t stride = 0;
    const char* next = nullptr;     // what to ask for meanwhile, `next_step` bytes a step, if anything
    int64_t next_stride = 0, next_step = 0;
};

// Says at every `turns`-th step, beginning with step `turn`, that it is a tile's turn.
struct Turns {
    int64_t left, turns;
    explicit Turns(const Part& p) : left(p.turn), turns(p.turns) {}
    bool now() {
        const bool mine = left == 0;
        left = mine ? turns - 1 : left - 1;
        return mine;
    }
};

// A rectangle of rows and column blocks, and memory for what its kernel keeps meanwhile (`panel_bytes`).
struct Panel {
    int64_t row, rows_end, block, blocks_end;
    char* work;
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
