// bf16, int8 and int4 weights without their zeros (layout: sparse.h): they are expanded to what the dense kind has there, and multiplied
// as that kind does, so every sum has the dense kind's bits.
//
// Many rows share what was expanded into a cache, and are multiplied by the dense kind's own tiles, of which a build has no more than
// without these kinds. Few rows have tiles that expand in registers where the processor does so in one instruction, one for all numbers
// of rows up to its own: as many as the dense kind has, each with the shuffles for other processors, are the other part of what made a
// unit's build twice as long (see linear_two_of_four.h).
#pragma once

#include "expand.h"
#include "linear_bf12.h"
#include "linear_int.h"

namespace quire::QUIRE_UNIT {

// The tile that products of m rows have: linear_float.cpp and linear_int.cpp.
Tile bf16_tile_for(int64_t m);
Tile int8_tile_for(int64_t m);
Tile int4_tile_for(int64_t m);

namespace {

template <class Dense>
constexpr bool is_bf16 = std::is_same_v<Dense, Bf16>;
template <class Dense>
constexpr bool is_eight = std::is_same_v<Dense, Int8>;
template <class Dense>
constexpr bool is_four = std::is_same_v<Dense, Int4>;

// The weights of a block, register by register: chunks, and in a chunk the registers of its columns.
template <class Dense, bool kFast>
struct SparseStream {
    static constexpr int kRegisters = is_four<Dense> ? 2 : 1;  // that one of the dense layout becomes
    const char *masks = nullptr, *at;

    explicit SparseStream(const char* block) : at(block) {}
    __attribute__((always_inline)) void begin_chunk() {
        masks = at;
        at += kSparseMasks;
    }
    // Those of the next register of the dense layout: bf16 numbers, int8 codes + 128, or int4 codes + 8 of its low and high halves.
    __attribute__((always_inline)) void next(U (&out)[kRegisters]) {
        if constexpr (is_bf16<Dense>) {
            const uint32_t mask = word(masks);
            out[0] = Expander<kFast>::halves(mask, at);
            masks += 4;
            at += 2 * __builtin_popcount(mask);
        } else if constexpr (is_eight<Dense>) {
            const uint64_t mask = bits(0);
            out[0] = xor_u(Expander<kFast>::bytes(mask, at), set1_u(0x80808080u));
            masks += 8;
            at += __builtin_popcountll(mask);
        } else {
            const uint64_t low = bits(0), high = bits(8);
            Expander<kFast>::halves_of_bytes(out, low, high, at);
            for (U& half : out) half = masked_xor(half, set1_u(0x0f0f0f0fu), set1_u(0x08080808u));
            const int lows = __builtin_popcountll(low), highs = __builtin_popcountll(high);
            masks += 16;
            at += lows > highs ? lows : highs;
        }
    }

   private:
    __attribute__((always_inline)) uint64_t bits(int64_t from) const {
        uint64_t mask;
        std::memcpy(&mask, masks + from, 8);
        return mask;
    }
};

// Columns of a block as the dense kind has them; returns where the stream goes on.
template <class Dense, bool kFast>
const char* put_zeros_between(char* to, const char* at, int64_t columns) {
    SparseStream<Dense, kFast> from(at);
    for (int64_t column = 0; column < columns; column += kSparseColumns) {
        from.begin_chunk();
        for (int i = 0; i < kSparseColumns; i += Dense::kColumns, to += 64) {
            U out[SparseStream<Dense, kFast>::kRegisters];
            from.next(out);
            if constexpr (is_four<Dense>) out[0] = masked_or(shift<4>(out[1]), set1_u(~0u), out[0]);
            store_u(to, out[0]);
        }
    }
    return from.at;
}

// The same in one instruction where the processor has it.
template <class Dense>
[[gnu::noinline]] const char* widen_sparse(char* to, const char* at, int64_t columns) {
#if defined(__AVX512BW__)
    if (g_expands) return put_zeros_between<Dense, true>(to, at, columns);
#endif
    return put_zeros_between<Dense, false>(to, at, columns);
}

#if defined(__AVX512BW__)

// NB blocks' streams, beginning with block `block`.
template <class Dense, int NB>
struct SparseStreams {
    SparseStream<Dense, true> of[NB];
    SparseStreams(const LinearCall& c, int64_t block) : SparseStreams(c, block, std::make_integer_sequence<int, NB>()) {}

   private:
    template <int... kB>
    SparseStreams(const LinearCall& c, int64_t block, std::integer_sequence<int, kB...>)
        : of{SparseStream<Dense, true>(c.w.codes + (block + kB) * c.w.code_step)...} {}
};

// Prefetches what a stream reads later: as many bytes ahead as a dense one, which is further in columns.
template <class Dense, int NB>
QUIRE_INLINE void prefetch_streams(const SparseStreams<Dense, NB>& from, int64_t ahead) {
#pragma GCC unroll 8
    for (int b = 0; b < NB; ++b) prefetch(from.of[b].at + ahead);
}

// All of `rows` <= R rows; what is computed for those beyond is not stored. A single row has two sums of a group, which are exact: with
// one, every product waits for the one before it, which took longer than to expand the weights (from the caches, Zen 4: 1.14 instead of
// 0.84 ns for a register of 64 codes).
template <class Dense, int R, int NB, int kInterleaved>
[[gnu::noinline]] void sparse_int_tile(const LinearCall& c, int64_t rows, int64_t row, int64_t block, int64_t ahead) {
    constexpr bool kFour = is_four<Dense>, kTwo = R == 1;
    constexpr int kStep = Dense::kColumns, kOffset = Dense::kOffset;
    const Part whole{0, c.w.k, true, nullptr, 0, 0, 1};
    F acc[R][NB];
    load_tile<R, NB>(acc, whole);
    SparseStreams<Dense, NB> from(c, block);
    const int64_t scales_ahead = ahead / (c.w.group * 8) + 1;  // of half as many numbers as the dense kind's bytes are
    const int64_t x_step = kInterleaved > 1 ? 4 : c.x_stride;
    const char* x = c.x + row * c.x_stride;
    for (int64_t g = 0; g < c.groups; ++g) {
        I sum[1][R][NB], more[NB];
        for (int b = 0; b < NB; ++b) more[b] = set1_i(0);
        start_sums<1, 1, kOffset, R, NB, kInterleaved>(c, sum, row, block, g);
        prefetch_scales<NB>(c, block, g + scales_ahead);
        for (int64_t k = 0; k < c.w.group; k += kSparseColumns) {
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) from.of[b].begin_chunk();
#pragma GCC unroll 8
            for (int i = 0; i < kSparseColumns; i += kStep, x += kStep * kInterleaved) {
                U w[NB][SparseStream<Dense, true>::kRegisters];
                prefetch_streams<Dense, NB>(from, ahead);
#pragma GCC unroll 8
                for (int b = 0; b < NB; ++b) from.of[b].next(w[b]);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const U x0 = set1_u(word(x + r * x_step)), x1 = set1_u(kFour ? word(x + r * x_step + 4 * kInterleaved) : 0);
#pragma GCC unroll 8
                    for (int b = 0; b < NB; ++b) {
                        I& s = sum[0][r][b];
                        if constexpr (kFour) {
                            s = dot4(s, w[b][0], x0);
                            I& next = kTwo ? more[b] : s;
                            next = dot4(next, w[b][1], x1);
                        } else {
                            I& next = kTwo && i & kStep ? more[b] : s;
                            next = dot8(next, w[b][0], x0);
                        }
                    }
                }
            }
        }
        if constexpr (kTwo)
            for (int b = 0; b < NB; ++b) sum[0][0][b] = add_i(sum[0][0][b], more[b]);
        add_group<1, R, NB, kInterleaved>(c, acc, sum, row, block, g);
    }
    store_tile<R, NB>(c, acc, row, block, whole, rows);
}

template <int R, int NB, int kInterleaved>
[[gnu::noinline]] void sparse_bf16_tile(const LinearCall& c, int64_t rows, int64_t row, int64_t block, int64_t ahead) {
    const Part whole{0, c.w.k, true, nullptr, 0, 0, 1};
    F acc[R][NB];
    load_tile<R, NB>(acc, whole);
    SparseStreams<Bf16, NB> from(c, block);
    const int64_t x_step = kInterleaved > 1 ? 4 : c.x_stride;
    const char* x = c.x + row * c.x_stride;
    for (int64_t k = 0; k < c.w.k; k += kSparseColumns) {
#pragma GCC unroll 8
        for (int b = 0; b < NB; ++b) from.of[b].begin_chunk();
        for (int i = 0; i < kSparseColumns; i += 2, x += 4 * kInterleaved) {
            U wk[NB][1];
            prefetch_streams<Bf16, NB>(from, ahead);
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) from.of[b].next(wk[b]);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const U xk = set1_u(word(x + r * x_step));
#pragma GCC unroll 8
                for (int b = 0; b < NB; ++b) acc[r][b] = dot_bf16(acc[r][b], wk[b][0], xk);
            }
        }
    }
    store_tile<R, NB>(c, acc, row, block, whole, rows);
}

// Whether tiles of R rows expand in registers, for up to two tiles. Integers that are two tiles do so twice: beside products it is nearly
// free, and whole columns of two blocks leave the first-level cache (16 rows by 8192 x 2048 of int8, one thread of a Zen 4: 2.3 instead
// of 2.8 ms).
template <class Dense, int R, bool kStream>
constexpr bool expands_in_tiles() { return kStream || ((kStreamRows == 0 || !is_bf16<Dense>) && (R == kFewRows || R == kTileRows)); }

template <class Dense, int R, int NB, bool kStream>
void sparse_few_rows(const LinearCall& c, const Panel& p) {
    constexpr int kRows = Dense::template interleaved<R, kStream>();
    const int64_t ahead = !kStream ? NB * c.w.code_step : R == 1 ? g_tuning.ahead : stream_ahead(NB);
    const auto tiles = [&]<int kBlocks>(int64_t block) {
        for (int64_t row = p.row; row < p.rows_end; row += R) {
            if constexpr (is_bf16<Dense>) sparse_bf16_tile<R, kBlocks, kRows>(c, p.rows_end - row, row, block, ahead);
            else sparse_int_tile<Dense, R, kBlocks, kRows>(c, p.rows_end - row, row, block, ahead);
        }
    };
    int64_t block = p.block;
    for (; block + NB <= p.blocks_end; block += NB) tiles.template operator()<NB>(block);
    for (; block < p.blocks_end; ++block) tiles.template operator()<1>(block);
}

#endif

// Columns of NB blocks that are expanded at a time: of integers, whose sums of groups do not wait in memory, all.
template <class Dense, int NB>
QUIRE_INLINE int64_t sparse_columns(const LinearCall& c) { return is_bf16<Dense> ? widened_columns(NB) : c.w.k; }

// Memory that a panel of `rows` rows needs.
template <class Dense, int R, int NB>
QUIRE_INLINE int64_t widened_panel_bytes(const LinearCall& c, int64_t rows) {
    const int64_t wide = NB * sparse_columns<Dense, NB>(c) / Dense::kColumns * 64;
    return wide + (is_bf16<Dense> ? (rows + R - 1) / R * R * NB * 64 : 0);
}

// The dense family's tile for m rows, which its own file has.
template <class Dense>
QUIRE_INLINE Tile dense_tile(int64_t m) {
    if constexpr (is_bf16<Dense>) return bf16_tile_for(m);
    else if constexpr (is_eight<Dense>) return int8_tile_for(m);
    else return int4_tile_for(m);
}

// A part of the blocks' columns is expanded for all rows, then tiles of the dense kind multiply it.
template <class Dense, int R, int NB>
void widened_panel(const LinearCall& c, int64_t m, const Panel& p, const char* (*widen)(char* to, const char* at, int64_t columns)) {
    constexpr bool kParts = is_bf16<Dense>;
    const int64_t columns = sparse_columns<Dense, NB>(c), block_bytes = columns / Dense::kColumns * 64;
    const int64_t tiles = (p.rows_end - p.row + R - 1) / R, tile_floats = R * NB * 16;
    const Tile tile = dense_tile<Dense>(m);
    char* wide = p.work;
    auto* sums = reinterpret_cast<float*>(wide + NB * block_bytes);
    for (int64_t block = p.block; block < p.blocks_end; block += NB) {
        const int64_t blocks = p.blocks_end - block < NB ? p.blocks_end - block : NB;
        const char* from[NB];
        for (int64_t b = 0; b < blocks; ++b) from[b] = c.w.codes + (block + b) * c.w.code_step;
        for (int64_t begin = 0; begin < c.w.k; begin += columns) {
            const int64_t end = begin + columns < c.w.k ? begin + columns : c.w.k;
            for (int64_t b = 0; b < blocks; ++b) from[b] = widen(wide + b * block_bytes, from[b], end - begin);
            LinearCall dense = c;
            // Tiles of integers find their block from the first one's.
            if constexpr (!kParts) dense.w.codes = wide - block * block_bytes;
            for (int64_t t = 0; t < tiles; ++t) {
                const int64_t row = p.row + t * R, rows = p.rows_end - row < R ? p.rows_end - row : R;
                Part part{begin / 2, end / 2, end == c.w.k, sums, t * tile_floats, t, tiles, wide, block_bytes};
                if constexpr (!kParts) part = {0, c.w.k, true, nullptr, 0, t, tiles};
                for_tile_blocks<NB>(block, p.blocks_end, part, [&](int64_t b, const Part& of) { tile(dense, rows, row, b, of); });
            }
        }
    }
}

// A row of a block of such a matrix; the numbers of the 15 others are stepped over.
template <class Dense>
void widened_row(const Matrix& w, int64_t row, float* out, const char* (*widen)(char* to, const char* at, int64_t columns)) {
    const char* at = w.codes + row / 16 * w.code_step;
    float* to = out;
    const Decode decode(w);
    for (int64_t column = 0; column < w.k; column += kSparseColumns) {
        char words[kSparseColumns / Dense::kColumns * 64];
        at = widen(words, at, kSparseColumns);
        for (int64_t i = 0; i < kSparseColumns / Dense::kColumns; ++i, to += Dense::kColumns) Dense::widen(word(words + i * 64 + row % 16 * 4), decode, to);
    }
    if (w.group) scale_row(w, row, out);
}

// What packed matrices without their zeros have in common: tiles, rows and sums are those of the dense family.
template <class Dense>
struct Widened {
    static constexpr bool kWidens = true, kTileRegisters = false, kWideScales = false;
    static constexpr int kRoom = 16;  // tiles read up to so many rows, whether there are so many or not

    template <class Fn>
    static void with_tile(int64_t m, const Fn& f) { Dense::with_tile(m, f); }
    template <int R, bool kStream>
    static constexpr int interleaved() { return Dense::template interleaved<R, kStream>(); }
    static int64_t row_bytes(const LinearCall& c, int64_t part_steps) { return Dense::row_bytes(c, part_steps); }
    template <int R, int NB>
    static int64_t part_steps(const LinearCall&, int64_t) { return widened_columns(NB) / 2; }
    template <int R, int NB>
    static int64_t panel_bytes(const LinearCall& c, int64_t, int64_t rows) { return widened_panel_bytes<Dense, R, NB>(c, rows); }
};

template <class Dense>
struct Sparse : Widened<Dense> {
    template <int R, int NB, bool kStream>
    static void panel(const LinearCall& c, int64_t m, const Panel& p) {
#if defined(__AVX512BW__)
        if constexpr (expands_in_tiles<Dense, R, kStream>())
            if (g_expands && p.rows_end - p.row <= (kStream ? R : 2 * kTileRows)) return sparse_few_rows<Dense, R, NB, kStream>(c, p);
#endif
        widened_panel<Dense, R, NB>(c, m, p, &widen_sparse<Dense>);
    }
    static void decode_row(const Matrix& w, int64_t row, float* out) { widened_row<Dense>(w, row, out, &widen_sparse<Dense>); }
};

}  // namespace
}  // namespace quire::QUIRE_UNIT
