// out [m, n] = x [m, k] times packed weights [n, k], plus bias.
//
// Every output element is one chain of sums in ascending k (integer weights: exact sums within a group, groups ascending),
// whatever the tile it was computed in, so a row does not depend on the batch. Activations are rounded or quantized once
// per call. A task is a few column blocks times a panel of rows that stays in the second-level cache; neighbouring tasks have
// the blocks in common, so that weights are read from memory once (with low panels in common: 5 % slower at 512 rows, Zen 5).
#pragma once

// bf16 numbers, also kept in 12 bits; integer codes and tables of numbers of one digit or of two; `Wide`: activations of two digits.
enum class WeightKind { kF32, kBf16, kBf12, kInt8, kInt4, kTable, kTablePair, kSuper2, kSuper3, kSuper4, kSuper5, kSuper6, kSuperTable, kInt8Wide, kInt4Wide, kTableWide, kTablePairWide };

constexpr bool is_bf16(WeightKind kind) { return kind == WeightKind::kBf16 || kind == WeightKind::kBf12; }
constexpr bool is_float(WeightKind kind) { return kind == WeightKind::kF32 || is_bf16(kind); }
constexpr bool is_int8(WeightKind kind) { return kind == WeightKind::kInt8 || kind == WeightKind::kInt8Wide; }
constexpr bool is_int4(WeightKind kind) { return kind == WeightKind::kInt4 || kind == WeightKind::kInt4Wide; }
// In super-blocks, see super_blocks.h.
constexpr bool is_super(WeightKind kind) { return kind >= WeightKind::kSuper2 && kind <= WeightKind::kSuperTable; }
constexpr SuperForm super_form(WeightKind kind) { return kSuperForms[static_cast<int>(kind) - static_cast<int>(WeightKind::kSuper2)]; }
constexpr int digits_of(WeightKind kind) { return kind >= WeightKind::kInt8Wide ? 2 : 1; }
constexpr int planes_of(WeightKind kind) {
    return kind == WeightKind::kTablePair || kind == WeightKind::kTablePairWide ? 2 : 1;
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
// 4-20 % faster than the same tile asking for the next group's, and 30-50 % while the machine had much bandwidth to spare.
//
// They ask further ahead in one stream of blocks than in several (16 rows of bf16: 4 KiB 5-11 % slower, 1 KiB a third; integers: 8
// KiB 0-6 % slower, 16 KiB 0-10).
constexpr int64_t stream_ahead(int blocks) { return blocks == 1 ? 8192 : 4096; }
constexpr int64_t kSomeRows = 64;  // up to which tiles of float weights stay narrow (6 x 4 was 3-7 % slower than 8 x 2 at 48 and 64)
constexpr int64_t kPartSteps = 1024;
constexpr int64_t kBf12Chunk = 256;  // columns, see linear_bf12.h
constexpr int64_t kPanelBytes = 384 << 10;  // of a 1 MiB second-level cache; weights stream through the rest

// How many rows of activations lie side by side for tiles of R rows; 1: they lie one below the other.
template <WeightKind kKind, int R, bool kAlone>
constexpr int rows_abreast() {
    return kStreamRows && kAlone && kKind != WeightKind::kF32 ? R : 1;
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

// Stores a tile; the bias comes with the last part.
template <int R, int NB>
QUIRE_INLINE void store_tile(const LinearCall& c, F (&acc)[R][NB], int64_t row, int64_t block, const Part& part) {
    for (int b = 0; b < NB; ++b) {
        const int64_t column = (block + b) * 16;
        const int lanes = static_cast<int>(c.w.n - column < 16 ? c.w.n - column : 16);
        const F bias = c.bias ? load_lanes(c.bias + column, lanes) : set1(0.0f);
        for (int r = 0; r < R; ++r) {
            if (!part.last) store(part.sums + part.at + (r * NB + b) * 16, acc[r][b]);
            else store_out(c, c.out + (row + r) * c.out_stride + column, c.bias ? add(acc[r][b], bias) : acc[r][b], lanes);
        }
    }
}

// What a tile starts from.
template <int R, int NB>
QUIRE_INLINE void load_tile(F (&acc)[R][NB], const Part& part) {
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < NB; ++b) acc[r][b] = part.begin ? load(part.sums + part.at + (r * NB + b) * 16) : set1(0.0f);
}

QUIRE_INLINE uint32_t word(const char* p) {
    uint32_t x;
    std::memcpy(&x, p, 4);
    return x;
}

// From byte `at` of NB streams of `bytes` each to the place to ask for: behind a stream's end the same stream goes on in the
// next group of blocks.
template <int NB>
QUIRE_INLINE int64_t place_ahead(int64_t at, int64_t bytes, int64_t ahead) {
    return ahead + (at + ahead >= bytes ? (NB - 1) * bytes : 0);
}

template <int R, int NB>
void f32_tile(const LinearCall& c, int64_t row, int64_t block, const Part& part) {
    F acc[R][NB];
    load_tile<R, NB>(acc, part);
    const char* w = c.w.codes + block * c.w.k * 64;
    const char* x = c.x + row * c.x_stride;
    for (int64_t k = part.begin; k < part.end; ++k) {
        F wk[NB];
#pragma GCC unroll 8
        for (int b = 0; b < NB; ++b) wk[b] = load(reinterpret_cast<const float*>(w + (b * c.w.k + k) * 64));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const F xk = set1(reinterpret_cast<const float*>(x + r * c.x_stride)[k]);
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) acc[r][b] = fma(wk[b], xk, acc[r][b]);
        }
    }
    store_tile<R, NB>(c, acc, row, block, part);
}

// Rows lie kAbreast side by side. Inlined into its callers, GCC 12 keeps the sums of 16 rows in memory: a third of the speed.
template <int R, int NB, int kAbreast, bool kAlone>
[[gnu::noinline]] void bf16_tile(const LinearCall& c, int64_t row, int64_t block, const Part& part) {
    F acc[R][NB];
    load_tile<R, NB>(acc, part);
    const int64_t x_step = kAbreast > 1 ? 4 : c.x_stride;
    const char* x = c.x + row * c.x_stride + part.begin * 4 * kAbreast;
    Turns turns(part);
    for (int64_t p = 0; p < part.end - part.begin; ++p, x += 4 * kAbreast) {
        U wk[NB];
#pragma GCC unroll 8
        for (int b = 0; b < NB; ++b) wk[b] = load_u(part.weights + b * part.stride + p * 64);
        if (part.next && (kAlone || turns.now())) {
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) {
                const char* at = part.next + b * part.next_stride + p * part.next_step;
                kAlone ? prefetch(at) : prefetch_far(at);
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

#include "linear_int.h"

template <WeightKind kKind, int R, int NB, int kAbreast, bool kAlone>
void tile(const LinearCall& c, int64_t row, int64_t block, const Part& part) {
    if constexpr (kKind == WeightKind::kF32) {
        f32_tile<R, NB>(c, row, block, part);
    } else if constexpr (is_bf16(kKind)) {
        bf16_tile<R, NB, kAbreast, kAlone>(c, row, block, part);
    } else {
        int_tile<kKind, R, NB, kAbreast, kAlone>(c, row, block, part);
    }
}

// The tile of `rows` <= R rows: tries R, R - 1, ... 1, and alone no less than half of R.
template <WeightKind kKind, int NB, int R, int kAbreast, bool kAlone>
void tile_of(const LinearCall& c, int64_t rows, int64_t row, int64_t block, const Part& part) {
    if (rows == R) return tile<kKind, R, NB, kAbreast, kAlone>(c, row, block, part);
    if constexpr (R > 1 && (!kAlone || 2 * R > kAbreast)) return tile_of<kKind, NB, R - 1, kAbreast, kAlone>(c, rows, row, block, part);
}

// A rectangle of rows and column blocks.
struct Panel {
    int64_t row, rows_end, block, blocks_end;
};

// Columns of 12-bit weights that are widened at a time: two blocks of them stay in the first-level cache, the four of a tile for
// many rows in the second (256 columns of those, in the first, were 2-5 % slower at 512 rows).
constexpr int64_t bf12_columns(int blocks) { return blocks > 2 ? 1024 : 512; }

// How a weight's k axis is walked: float weights go in parts when there are more rows than one tile, because a group of blocks
// of the whole k would not stay cached.
template <WeightKind kKind, int R, int NB>
QUIRE_INLINE int64_t steps_of_part(const LinearCall& c, int64_t m) {
    const int64_t steps = is_bf16(kKind) ? (c.w.k + 1) / 2 : c.w.k;
    if constexpr (kKind == WeightKind::kBf12) return bf12_columns(NB) / 2;
    return is_float(kKind) && m > R && steps > kPartSteps ? kPartSteps : steps;
}

#if defined(QUIRE_AMX)
#include "linear_amx.h"
#endif

// Where the weights of a part lie; a tile that reads them alone asks for those ahead, others for the next part's, then the next blocks'.
template <int R, int NB, bool kAlone>
QUIRE_INLINE void read_bf16(Part& part, const LinearCall& c, int64_t block, int64_t steps) {
    const int64_t ahead = R == 1 ? g_tuning.ahead : kAlone ? stream_ahead(NB) : 0;
    part.stride = part.next_stride = steps * 64;
    part.weights = c.w.codes + block * part.stride + part.begin * 64;
    part.next = part.weights + (ahead ? ahead : part.last ? NB * part.stride - part.begin * 64 : (part.end - part.begin) * 64);
    part.next_step = 64;
}

#include "linear_bf12.h"
#include "linear_super.h"

// A panel in tiles of up to R rows by NB blocks, one group of blocks after the other.
template <WeightKind kKind, int R, int NB, bool kAlone>
void run_panel(const LinearCall& c, int64_t m, Panel p) {
#if defined(QUIRE_AMX)
    if constexpr (kKind == WeightKind::kInt8 || kKind == WeightKind::kInt4)
        if (tiles_serve<kKind>(c, p.rows_end - p.row)) return run_tile_panel<kKind>(c, p);
#endif
    if constexpr (kKind == WeightKind::kBf12) return bf12_panel<R, NB, kAlone>(c, p);
    if constexpr (is_super(kKind)) return super_panel<kKind, R, NB, kAlone>(c, p);
    constexpr int kAbreast = rows_abreast<kKind, R, kAlone>();
    const int64_t steps = is_bf16(kKind) ? (c.w.k + 1) / 2 : c.w.k, part_steps = steps_of_part<kKind, R, NB>(c, m);
    const int64_t tiles = (p.rows_end - p.row + R - 1) / R, tile_floats = R * NB * 16;
    float* sums = part_steps < steps ? static_cast<float*>(scratch(Scratch::kSums, static_cast<size_t>(tiles * tile_floats) * 4)) : nullptr;
    for (int64_t block = p.block; block < p.blocks_end; block += NB) {
        for (int64_t begin = 0; begin < steps; begin += part_steps) {
            const int64_t end = begin + part_steps < steps ? begin + part_steps : steps;
            for (int64_t t = 0; t < tiles; ++t) {
                const int64_t row = p.row + t * R, rows = p.rows_end - row < R ? p.rows_end - row : R;
                Part part{begin, end, end == steps, sums, t * tile_floats, t, tiles};
                if constexpr (kKind == WeightKind::kBf16) read_bf16<R, NB, kAlone>(part, c, block, steps);
                if (p.blocks_end - block >= NB) {
                    tile_of<kKind, NB, R, kAbreast, kAlone>(c, rows, row, block, part);
                } else {
                    for (int64_t b = block; b < p.blocks_end; ++b, part.at += R * 16, part.weights += part.stride) tile_of<kKind, 1, R, kAbreast, kAlone>(c, rows, row, b, part);
                }
            }
        }
    }
}

// Calls f.template operator()<R, NB, kAlone>() with the tile for m rows, and whether it takes all of them and reads the weights as
// a stream; two digits take as many more sums, so it has fewer rows or blocks.
template <WeightKind kKind, class Fn>
QUIRE_INLINE void with_tile(int64_t m, const Fn& f) {
    if constexpr (is_super(kKind)) {
        if (m == 1) return f.template operator()<1, 1, true>();
        if constexpr (kStreamRows > 0) {
            if (m <= kFewRows) return f.template operator()<kFewRows, kTileBlocks, true>();
            if (m <= kTileRows) return f.template operator()<kTileRows, kTileBlocks, true>();
        }
        return f.template operator()<kTileRows, kTileBlocks, false>();
    }
    constexpr int kDigits = digits_of(kKind), kPlanes = planes_of(kKind);
    constexpr int kFew = (kFewBlocks + kPlanes - 1) / kPlanes, kMost = (kTileBlocks + kPlanes - 1) / kPlanes;
    if (m == 1 && (g_tuning.row_streams == 1 || kKind == WeightKind::kBf12))
        return f.template operator()<1, kKind == WeightKind::kBf16 ? kRowBlocks : 1, true>();
    if (m == 1) return f.template operator()<1, kFew, true>();
    if constexpr (is_bf16(kKind) && kStreamRows > 0) {
        if (m <= kFewRows) return f.template operator()<kFewRows, 1, true>();
        if (m <= kTileRows) return f.template operator()<kTileRows, 1, true>();
        if (m <= kStreamRows) return f.template operator()<kStreamRows, 1, true>();
    }
    if constexpr (kKind == WeightKind::kBf12)
        if (m <= kFewRows) return f.template operator()<kFewRows, kRowBlocks, false>();
    constexpr bool kStream = kStreamRows > 0 && !is_float(kKind) && kDigits == 1;
    if (m <= kFewRows) return f.template operator()<kFewRows / kDigits, kFew, kStream>();
    if constexpr (kStream)
        if (m <= kTileRows) return f.template operator()<kTileRows, kMost, true>();
    if constexpr (is_float(kKind))
        if (m > kSomeRows) return f.template operator()<kManyRows, kManyBlocks, false>();
    f.template operator()<kTileRows / kDigits, kMost, false>();
}

// How many of m rows lie side by side for these weights.
template <WeightKind kKind>
int64_t abreast_of(int64_t m) {
    int64_t rows = 1;
    with_tile<kKind>(m, [&]<int R, int, bool kAlone>() { rows = rows_abreast<kKind, R, kAlone>(); });
    return rows;
}

#if defined(QUIRE_AMX)
#include "linear_amx_bf16.h"
#endif

// A panel by the fastest tiles of this unit.
template <WeightKind kKind, int R, int NB, bool kAlone>
QUIRE_INLINE void best_panel(const LinearCall& c, int64_t m, Panel p) {
#if defined(QUIRE_AMX)
    if constexpr (kKind == WeightKind::kBf16) return amx_bf16_panel(c, p);
#endif
    run_panel<kKind, R, NB, kAlone>(c, m, p);
}

// All rows and column blocks; a panel of rows that stays in the second-level cache and one group of blocks per task.
template <WeightKind kKind>
void run_linear(const LinearCall& call, int64_t m) {
    const LinearCall c = with_large_output(call, m);
#if defined(QUIRE_AMX)
    if constexpr (kKind == WeightKind::kBf16) return amx_bf16(c, m);
    if constexpr (kKind == WeightKind::kInt8 || kKind == WeightKind::kInt4)
        if (tiles_serve<kKind>(c, m)) return run_tile_linear<kKind>(c, m);
#endif
    with_tile<kKind>(m, [&]<int R, int NB, bool kAlone>() {
        const int64_t blocks = (c.w.n + 15) / 16, column_groups = (blocks + NB - 1) / NB;
        int64_t panel = kPanelBytes / (is_float(kKind) ? steps_of_part<kKind, R, NB>(c, m) * 4 : c.x_stride) / R * R;
        if (panel < R) panel = R;
        int64_t panels = (m + panel - 1) / panel;
        panel = ((m + panels - 1) / panels + R - 1) / R * R;
        panels = (m + panel - 1) / panel;
        parallel_for(panels * column_groups, [&](int64_t index, int) {
            const int64_t row = index % panels * panel, block = index / panels * NB;
            run_panel<kKind, R, NB, kAlone>(c, m, {row, row + panel < m ? row + panel : m, block, block + NB < blocks ? block + NB : blocks});
        });
    });
}
