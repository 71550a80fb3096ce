// Weights of which each four columns have two at most (kinds "sparse24_...", layout: sparse.h). A weight's position among four columns
// chooses the activation that it meets: half of the products, and no zeros in between. The sums have the dense kind's bits: integers
// are exact in any order, and of bf16 the pair is added in the dense order, in which products with zeros change nothing.
#pragma once

#include "linear_sparse.h"

namespace quire::QUIRE_UNIT {
namespace {

// Bytes of 32 columns of a block: the positions, and half as many numbers as the dense family has.
template <class Dense>
constexpr int64_t kTwoOfFourChunk = kPositions + kSparseColumns / Dense::kColumns * 32;

// A chunk of a matrix of 2:4 as the dense kind has it.
template <class Dense>
void put_zeros_back(char* wide, const char* chunk) {
    constexpr int kEach = is_bf16<Dense> ? 2 : 4, kPieces = is_bf16<Dense> ? 8 : 4;
    const char* numbers = chunk + kPositions;
    std::memset(wide, is_eight<Dense> ? 0x80 : is_four<Dense> ? 0x88 : 0, static_cast<size_t>(kSparseColumns / Dense::kColumns * 64));
    for (int at = 0; at < 16 * kEach; ++at) {
        for (int piece = 0; piece < kPieces; ++piece) {
            if constexpr (is_bf16<Dense>) {
                uint16_t positions;
                std::memcpy(&positions, chunk + 2 * at, 2);
                const int position = positions >> (2 * piece) & 3;
                // A zero of a row that has fewer than two lies where there is none.
                std::memcpy(wide + piece * 128 + position / 2 * 64 + at / 2 * 4 + position % 2 * 2, numbers + piece * 64 + 2 * at, 2);
            } else {
                const int position = static_cast<uint8_t>(chunk[at]) >> (2 * piece) & 3, later = at % 4 / 2;
                if constexpr (is_eight<Dense>) {
                    wide[piece * 128 + later * 64 + at / 4 * 4 + position] = static_cast<char>(numbers[piece * 64 + at] ^ 0x80);
                } else {
                    const int code = (static_cast<uint8_t>(numbers[piece / 2 * 64 + at]) >> (piece % 2 * 4) & 15) ^ 8;
                    char& both = wide[piece * 64 + at / 4 * 4 + position];
                    both = static_cast<char>(later ? (both & 15) | code << 4 : (both & 0xf0) | code);
                }
            }
        }
    }
}

// Columns of a block as the dense family has them, from the chunk at `at` on; returns the chunk behind them.
template <class Dense>
[[gnu::noinline]] const char* widen_two_of_four(char* to, const char* at, int64_t columns) {
    constexpr int64_t kWide = kSparseColumns / Dense::kColumns * 64;
    for (int64_t column = 0; column < columns; column += kSparseColumns, to += kWide, at += kTwoOfFourChunk<Dense>) put_zeros_back<Dense>(to, at);
    return at;
}

#if defined(__AVX512BW__)

// Prefetches a chunk of NB blocks of `block_bytes`. Tiles of several rows by two blocks are most often those that share weights; one row
// and as many as a tile has prefetch without a look at whose share it is (kStream): 2:4 of bf16 is 1.65 times as fast as dense with one row,
// and was 1.44 times where that was looked up.
template <class Dense, int R, int NB, bool kStream>
QUIRE_INLINE void prefetch_chunk(const char* at, int64_t block_bytes) {
#pragma GCC unroll 9
    for (int64_t line = 0; line < kTwoOfFourChunk<Dense>; line += 64)
#pragma GCC unroll 8
        for (int b = 0; b < NB; ++b)
            !kStream && R > 1 && NB == 2 ? prefetch_far(at + b * block_bytes + line) : prefetch(at + b * block_bytes + line);
}

// Of 16 columns: the codes of their two pieces, and the positions among 16 activations that they meet. 4-bit codes are 16 times as large.
template <class Dense>
struct Chosen {
    U codes[2], at[2];

    // `half`: which 16 of the chunk's columns; `positions` begin with theirs.
    static inline __attribute__((always_inline)) Chosen of(const char* chunk, int half, U positions) {
        Chosen out;
        if constexpr (is_eight<Dense>) {
            out.codes[0] = load_u(chunk + kPositions + half * 128);
            out.codes[1] = load_u(chunk + kPositions + half * 128 + 64);
        } else {
            const U both = load_u(chunk + kPositions + half * 64), high = set1_u(0xf0f0f0f0u);
            out.codes[0] = and_u(shift<4>(both), high);
            out.codes[1] = and_u(both, high);
        }
        out.at[0] = masked_or(positions, set1_u(0x03030303u), set1_u(0x04040000u));
        out.at[1] = masked_or(shift<-2>(positions), set1_u(0x03030303u), set1_u(0x0c0c0808u));
        return out;
    }
};

// A tile's first row and block, how many rows are its own (what it computes for those behind them is not stored), and how far ahead it
// prefetches weights; 0: tiles that share them do, for the next blocks'.
struct ChosenTile {
    int64_t row, rows, block, ahead;
};

// Dot products want one operand without a sign: it is the activations, 128 more than they are, as the sum of the codes, which is
// to be taken off as often, is the same for all rows.
template <class Dense, int R, int NB, bool kStream>
[[gnu::noinline]] void chosen_int_tile(const LinearCall& c, const ChosenTile& at, const Part& part) {
    constexpr int64_t kChunk = kTwoOfFourChunk<Dense>;
    F acc[R][NB];
    load_tile<R, NB>(acc, part);
    const int64_t block_bytes = c.w.k / kSparseColumns * kChunk, group_bytes = c.w.group / kSparseColumns * kChunk;
    const int64_t stride = block_bytes * part.block_step;
    const char* w = c.w.codes + at.block * block_bytes;
    const char* x = c.x + at.row * c.x_stride;
    PrefetchShare share(part), scale_share(part);
    for (int64_t g = 0; g < c.groups; ++g) {
        I sum[1][R][NB], codes[NB];
        for (int b = 0; b < NB; ++b) {
            codes[b] = set1_i(0);
            for (int r = 0; r < R; ++r) sum[0][r][b] = set1_i(0);
        }
        const bool streams = kStream || at.ahead;
        const int64_t ahead = streams ? prefetch_offset<NB>(g * group_bytes, block_bytes, at.ahead) : NB * block_bytes;
        if (kStream || scale_share.now()) prefetch_scales<NB>(c, streams ? at.block : at.block + NB, streams ? g + ahead / group_bytes : g);
        for (int64_t k = 0; k < c.w.group; k += kSparseColumns, w += kChunk) {
            if (kStream || share.now()) prefetch_chunk<Dense, R, NB, kStream>(w + ahead, block_bytes);
            U positions[NB];
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) positions[b] = load_u(w + b * stride);
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half, x += 16) {
                Chosen<Dense> chosen[NB];
#pragma GCC unroll 8
                for (int b = 0; b < NB; ++b) {
                    chosen[b] = Chosen<Dense>::of(w + b * stride, half, positions[b]);
                    positions[b] = shift<-4>(positions[b]);
                    codes[b] = dot4(dot4(codes[b], set1_u(0x01010101u), chosen[b].codes[0]), set1_u(0x01010101u), chosen[b].codes[1]);
                }
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const U xk = xor_u(load_table(x + r * c.x_stride), set1_u(0x80808080u));
#pragma GCC unroll 8
                    for (int b = 0; b < NB; ++b) {
                        I& s = sum[0][r][b];
                        s = dot4(s, look_up(xk, chosen[b].at[0]), chosen[b].codes[0]);
                        s = dot4(s, look_up(xk, chosen[b].at[1]), chosen[b].codes[1]);
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int b = 0; b < NB; ++b) {
            const I more = shift_i<7>(codes[b]);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                sum[0][r][b] = sub_i(sum[0][r][b], more);
                if constexpr (is_four<Dense>) sum[0][r][b] = shift_i<-4>(sum[0][r][b]);
            }
        }
        add_group<1, R, NB, 1>(c, acc, sum, at.row, at.block, g, part.block_step);
    }
    store_tile<R, NB>(c, acc, at.row, at.block, part, at.rows);
}

template <int R, int NB, bool kStream>
[[gnu::noinline]] void chosen_bf16_tile(const LinearCall& c, const ChosenTile& at, const Part& part) {
    using Dense = Bf16;
    constexpr int64_t kChunk = kTwoOfFourChunk<Dense>, kSteps = kSparseColumns / 2;
    F acc[R][NB];
    load_tile<R, NB>(acc, part);
    const int64_t block_bytes = c.w.k / kSparseColumns * kChunk, stride = block_bytes * part.block_step, first = part.begin / kSteps * kChunk;
    const char* w = c.w.codes + at.block * block_bytes + first;
    const char* x = c.x + at.row * c.x_stride + part.begin * 4;
    PrefetchShare share(part);
    for (int64_t step = part.begin; step < part.end; step += kSteps, w += kChunk) {
        U positions[NB];
        if (kStream || share.now()) {
            const int64_t ahead = kStream || at.ahead ? prefetch_offset<NB>(step / kSteps * kChunk, block_bytes, at.ahead) : NB * block_bytes;
            prefetch_chunk<Dense, R, NB, kStream>(w + ahead, block_bytes);
        }
#pragma GCC unroll 8
        for (int b = 0; b < NB; ++b) positions[b] = load_u(w + b * stride);
#pragma GCC unroll 8
        for (int piece = 0; piece < 8; ++piece, x += 8) {
            U wk[NB];
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) wk[b] = load_u(w + b * stride + kPositions + piece * 64);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const U xk = four_halves(x + r * c.x_stride);
#pragma GCC unroll 8
                for (int b = 0; b < NB; ++b) acc[r][b] = dot_bf16(acc[r][b], wk[b], choose_halves(xk, positions[b]));
            }
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) positions[b] = shift<-2>(positions[b]);
        }
    }
    store_tile<R, NB>(c, acc, at.row, at.block, part, at.rows);
}

// The tile of `rows` <= R rows, or of a few more, which there is room for (see bytes_of_rows). Tiles for each number of rows, and each
// way to prefetch weights, are part of what made the AVX-512 units take twice as long to build (110 s of one with VNNI, 54 s without).
template <class Dense, int NB, int R, bool kStream>
void chosen_tile_of(const LinearCall& c, int64_t rows, int64_t row, int64_t block, const Part& part) {
    // Single blocks of integers are those that are left over.
    constexpr int kStep = R < 8 ? (R + 1) / 2 : R / 4, kMost = R / kStep, kLeast = NB == 1 && !is_bf16<Dense> ? kMost : R > 8 ? kMost - 1 : 1;
    const ChosenTile at{row, rows, block, kStream ? R == 1 ? g_tuning.ahead : stream_ahead(NB) : 0};
    with_count<kMost, kLeast>((rows + kStep - 1) / kStep, [&]<int kSteps>() {
        constexpr int kRows = kSteps * kStep;
        constexpr bool kOnly = kStream && (kRows == 1 || kRows == R);
        if constexpr (is_bf16<Dense>) chosen_bf16_tile<kRows, NB, kOnly>(c, at, part);
        else chosen_int_tile<Dense, kRows, NB, kOnly>(c, at, part);
    });
}

#endif

template <class Dense>
struct TwoOfFour : Widened<Dense> {
#if defined(__AVX512BW__)
    template <class Fn>
    static void with_tile(int64_t m, const Fn& f) {
        if constexpr (is_bf16<Dense>) with_bf16_tile<false>(m, f);
        else Dense::with_tile(m, f);
    }
    template <int R, bool kStream>
    static constexpr int interleaved() { return 1; }
    static int64_t steps(const Matrix& w) { return Dense::steps(w); }
    template <int R, int NB>
    static int64_t part_steps(const LinearCall& c, int64_t m) { return Dense::template part_steps<R, NB>(c, m); }
    template <int R, int NB, bool kStream>
    static void read(Part&, const LinearCall&, int64_t) {}
    template <int NB, int R, bool kStream>
    static void tile(const LinearCall& c, int64_t rows, int64_t row, int64_t block, const Part& part) { chosen_tile_of<Dense, NB, R, kStream>(c, rows, row, block, part); }
    template <int R, int NB, bool kStream>
    static void panel(const LinearCall& c, int64_t m, const Panel& p) { tiled_panel<TwoOfFour, R, NB, kStream>(c, m, p); }
    template <int R, int NB>
    static int64_t panel_bytes(const LinearCall& c, int64_t m, int64_t rows) { return tiled_panel_bytes<TwoOfFour, R, NB>(c, m, rows); }
#else
    template <int R, int NB, bool kStream>
    static void panel(const LinearCall& c, int64_t m, const Panel& p) { widened_panel<Dense, R, NB>(c, m, p, &widen_two_of_four<Dense>); }
#endif
    static void decode_row(const Matrix& w, int64_t row, float* out) { widened_row<Dense>(w, row, out, &widen_two_of_four<Dense>); }
};

}  // namespace
}  // namespace quire::QUIRE_UNIT
