// bf16 weights kept in 12 bits without loss: sign and mantissa as they are, and for the exponent the
// number of one of the matrix's 16 commonest; the few weights with another exponent are kept whole, as exceptions. The idea is
// that of DFloat11 (Zhang et al. 2025), with codes of one length, which a vector register decodes in a few instructions.
//
// Chunks of columns are widened into a cache, in the layout of bf16 weights, and multiplied there, so every sum is
// the one of bf16 weights. The layout is described in csrc/pack_bf12.cpp.
#pragma once

#include "linear_bf16.h"

namespace quire::QUIRE_UNIT {
namespace {

// Columns of 12-bit weights (and of those without zeros) that are widened at a time: two blocks of them stay in the first-level cache, the four of a tile for
// many rows in the second (256 columns of those, in the first, were 2-5 % slower at 512 rows).
constexpr int64_t widened_columns(int blocks) { return blocks > 2 ? 1024 : 512; }

// Bytes of the chunks of `columns` columns of a block.
constexpr int64_t bf12_bytes(int64_t columns) { return columns * 24 + (columns + kBf12Chunk - 1) / kBf12Chunk * kBf12Exceptions * 4; }

// What a matrix's codes stand for, in registers.
struct Bf12Table {
    U low, high;
    const U mantissa = set1_u(0x7f7f7f7fu), sign = set1_u(0x80808080u);
    explicit Bf12Table(const LinearCall& c) : low(load_table(c.w.table)), high(load_table(c.w.table + 16)) {}
};

// Two pairs of columns of 16 rows, from their signs and mantissas and the numbers of their exponents.
QUIRE_INLINE void widen_pairs(U (&to)[2], const Bf12Table& t, U rest, U exponents) {
    const U bottom = masked_or(rest, t.mantissa, look_up(t.low, exponents)), top = masked_or(rest, t.sign, look_up(t.high, exponents));
    to[0] = zip_low(bottom, top);
    to[1] = zip_high(bottom, top);
}

// A chunk of a block as [columns / 2][16][2].
QUIRE_INLINE void widen_chunk(char* to, const char* from, int64_t columns, const Bf12Table& t) {
    for (int64_t i = 0; i < columns; i += 8, from += 192, to += 256) {
        const U codes = load_u(from + 128);
        U wide[2][2];
        widen_pairs(wide[0], t, load_u(from), low_nibbles(codes));
        widen_pairs(wide[1], t, load_u(from + 64), high_nibbles(codes));
        for (int j = 0; j < 4; ++j) store_u(to + j * 64, wide[j / 2][j % 2]);
    }
}

// The exceptions of a chunk in ascending order of their positions: number << 16 | position. None follows one of all ones.
struct Exceptions {
    const char *at, *end;
    Exceptions() = default;
    explicit Exceptions(const char* list) : at(list), end(list + kBf12Exceptions * 4) {}
    bool before(int64_t position) const { return at < end && static_cast<int64_t>(word(at) & 0xffffu) < position; }
    // Those before `position`, into kNumbers numbers (a power of two) whose first has a position that they divide.
    template <uint32_t kNumbers>
    void put(char* to, int64_t position) {
        for (; before(position); at += 4) {
            const auto number = static_cast<uint16_t>(word(at) >> 16);
            std::memcpy(to + (word(at) & (kNumbers - 1)) * 2, &number, 2);
        }
    }
};

// Columns begin .. end of a block, whole chunks.
QUIRE_INLINE void widen_columns(char* to, const LinearCall& c, const char* block, int64_t begin, int64_t end) {
    const Bf12Table table(c);
    for (int64_t column = begin; column < end; column += kBf12Chunk, to += kBf12Chunk * 32) {
        const int64_t columns = end - column < kBf12Chunk ? end - column : kBf12Chunk;
        const char* from = block + bf12_bytes(column);
        widen_chunk(to, from, columns, table);
        Exceptions(from + columns * 24).put<kBf12Chunk * 16>(to, columns * 16);
    }
}

// Two pairs of columns with exceptions among them, which begin at `position` of their chunk.
[[maybe_unused]] void replace_pairs(U (&pairs)[2], Exceptions& odd, int64_t position) {
    alignas(64) char numbers[128];
    store_u(numbers, pairs[0]);
    store_u(numbers + 64, pairs[1]);
    odd.put<64>(numbers, position + 64);
    pairs[0] = load_u(numbers);
    pairs[1] = load_u(numbers + 64);
}

// Few rows: weights are widened in registers, for each tile anew.
template <int R, int NB, int kInterleaved, bool kStream>
[[gnu::noinline]] void bf12_tile(const LinearCall& c, int64_t row, int64_t block, const Part& part) {
    F acc[R][NB];
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < NB; ++b) acc[r][b] = set1(0.0f);
    const Bf12Table table(c);
    const int64_t block_bytes = bf12_bytes(c.w.k), stride = block_bytes * part.block_step, ahead = R == 1 ? g_tuning.ahead : kStream ? stream_ahead(NB) : NB * block_bytes;
    const int64_t x_step = kInterleaved > 1 ? 4 : c.x_stride;
    const char* from = c.w.codes + block * block_bytes;
    const char* x = c.x + row * c.x_stride;
    PrefetchShare share(part);
    for (int64_t column = 0; column < c.w.k; column += kBf12Chunk, from += kBf12Exceptions * 4) {
        const int64_t columns = c.w.k - column < kBf12Chunk ? c.w.k - column : kBf12Chunk;
        const char* list = from + columns * 24;
        Exceptions odd[NB];
        for (int b = 0; b < NB; ++b) odd[b] = Exceptions(list + b * stride);
        for (int64_t i = 0; i < columns; i += 8, from += 192) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half, x += 8 * kInterleaved) {
                U wide[NB][2];
#pragma GCC unroll 8
                for (int b = 0; b < NB; ++b) {
                    const char* at = from + b * stride;
                    const U codes = load_u(at + 128);
                    widen_pairs(wide[b], table, load_u(at + half * 64), half ? high_nibbles(codes) : low_nibbles(codes));
                    const int64_t position = i * 16 + half * 64;
                    if (odd[b].before(position + 64)) [[unlikely]] replace_pairs(wide[b], odd[b], position);
                }
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
                    for (int j = 0; j < 2; ++j) {
                        const U xk = set1_u(word(x + r * x_step + j * 4 * kInterleaved));
#pragma GCC unroll 8
                        for (int b = 0; b < NB; ++b) acc[r][b] = dot_bf16(acc[r][b], wide[b][j], xk);
                    }
                }
            }
            if (kStream || share.now()) {
#pragma GCC unroll 8
                for (int b = 0; b < NB; ++b)
                    for (int j = 0; j < 3; ++j) {
                        const char* at = from + b * block_bytes + j * 64 + ahead;
                        kStream ? prefetch(at) : prefetch_far(at);
                    }
            }
        }
    }
    store_tile<R, NB>(c, acc, row, block, part);
}

template <int R, int NB, bool kStream>
void bf12_few_rows(const LinearCall& c, const Panel& p) {
    constexpr int kRows = Bf16::interleaved<R, kStream>();
    const int64_t tiles = (p.rows_end - p.row + R - 1) / R;
    for (int64_t block = p.block; block < p.blocks_end; block += NB) {
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t row = p.row + t * R, rows = p.rows_end - row < R ? p.rows_end - row : R;
            for_tile_blocks<NB>(block, p.blocks_end, {0, c.w.k / 2, true, nullptr, 0, t, tiles}, [&](int64_t b, const Part& part) {
                with_rows<R, kRows>(rows, [&]<int kCount>() { bf12_tile<kCount, NB, kRows, kStream>(c, row, b, part); });
            });
        }
    }
}

// Many rows: a part of the blocks' columns is widened for all of them.
template <int R, int NB, bool kStream>
void bf12_many_rows(const LinearCall& c, const Panel& p) {
    constexpr int64_t kColumns = widened_columns(NB);
    char* wide = p.work;
    const int64_t block_bytes = bf12_bytes(c.w.k), tiles = (p.rows_end - p.row + R - 1) / R, tile_floats = R * NB * 16;
    auto* sums = reinterpret_cast<float*>(p.work + NB * kColumns * 32);
    for (int64_t block = p.block; block < p.blocks_end; block += NB) {
        const int64_t blocks = p.blocks_end - block < NB ? p.blocks_end - block : NB;
        const char* at = c.w.codes + block * block_bytes;
        for (int64_t begin = 0; begin < c.w.k; begin += kColumns) {
            const int64_t end = begin + kColumns < c.w.k ? begin + kColumns : c.w.k;
            for (int64_t b = 0; b < blocks; ++b)
                widen_columns(wide + b * kColumns * 32, c, at + b * block_bytes, begin, end);
            for (int64_t t = 0; t < tiles; ++t) {
                const int64_t row = p.row + t * R, rows = p.rows_end - row < R ? p.rows_end - row : R;
                Part part{begin / 2, end / 2, end == c.w.k, sums, t * tile_floats, t, tiles, wide, kColumns * 32};
                part.next = end == c.w.k ? at + NB * block_bytes : at + bf12_bytes(end);
                part.next_stride = block_bytes;
                part.next_step = 48;
                for_tile_blocks<NB>(block, p.blocks_end, part, [&](int64_t b, const Part& of) { Bf16::tile<NB, R, kStream>(c, rows, row, b, of); });
            }
        }
    }
}

struct Bf12 {
    static constexpr bool kWidens = true, kTileRegisters = false, kWideScales = false;
    static constexpr int kRoom = 1;
    static constexpr int64_t kMostUnwidened = 2 * kTileRows;  // rows whose tiles widen for themselves

    template <class Fn>
    static void with_tile(int64_t m, const Fn& f) {
        if (m == 1) return f.template operator()<1, kRowBlocks, true>();
        with_bf16_rows<kRowBlocks, true>(m, f);
    }
    template <int R, bool kStream>
    static constexpr int interleaved() { return Bf16::interleaved<R, kStream>(); }
    static int64_t row_bytes(const LinearCall&, int64_t part_steps) { return part_steps * 4; }
    template <int R, int NB>
    static int64_t part_steps(const LinearCall&, int64_t) { return widened_columns(NB) / 2; }
    template <int R, int NB, bool kStream>
    static void panel(const LinearCall& c, int64_t, const Panel& p) {
        if (p.rows_end - p.row <= kMostUnwidened) bf12_few_rows<R, NB, kStream>(c, p);
        else bf12_many_rows<R, NB, kStream>(c, p);
    }
    template <int R, int NB>
    static int64_t panel_bytes(const LinearCall&, int64_t, int64_t rows) {
        return rows <= kMostUnwidened ? 0 : NB * widened_columns(NB) * 32 + (rows + R - 1) / R * R * NB * 64;
    }
    static void decode_row(const Matrix& w, int64_t row, float* out);
};

// A row of a matrix in 12 bits (layout: pack_bf12.cpp).
inline void Bf12::decode_row(const Matrix& w, int64_t row, float* out) {
    const int64_t lane = row % 16;
    const char* at = w.codes + row / 16 * w.code_step;
    for (int64_t begin = 0; begin < w.k; begin += kBf12Chunk, out += kBf12Chunk) {
        const int64_t columns = w.k - begin < kBf12Chunk ? w.k - begin : kBf12Chunk;
        for (int64_t c = 0; c < columns; ++c) {
            const int64_t pair = c % 8 / 2, position = 2 * lane + c % 2;
            const char* unit = at + c / 8 * 192 + position / 8 * 16 + pair % 2 * 8 + position % 8;
            const auto rest = static_cast<uint8_t>(unit[pair / 2 * 64]), codes = static_cast<uint8_t>(unit[128]);
            const uint32_t code = codes >> (pair / 2 * 4) & 15u;
            const uint32_t low = w.table[code], high = w.table[16 + code];
            out[c] = of_bf16((rest & 0x7fu) | low | ((rest & 0x80u) | high) << 8);
        }
        at += columns * 24;
        for (int64_t i = 0; i < kBf12Exceptions; ++i) {
            const uint32_t odd = word(at + i * 4);
            const int64_t position = odd & 0xffffu, column = position / 32 * 2 + position % 2;
            if (position % 32 / 2 == lane && column < columns) out[column] = of_bf16(odd >> 16);
        }
        at += kBf12Exceptions * 4;
    }
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
