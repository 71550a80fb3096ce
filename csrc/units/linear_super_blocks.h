// Linear layers of weights in super-blocks (layout: super_blocks.h): codes of 2 to 6 bits, groups whose scales
// are small multiples of a unit that 256 columns share.
//
// The product of multiple and unit is exact in f32, so the arithmetic, and every bit of it, is that of integer weights with f32
// scales. A few rows expand codes to bytes in registers, as they stream; for many rows a part of the blocks' columns is expanded
// into the first-level cache and multiplied there.
#pragma once

#include "linear_int.h"

namespace quire::QUIRE_UNIT {
namespace {

constexpr int64_t kExpandedColumns = 512;  // per block; those of two blocks stay in the first-level cache

QUIRE_INLINE int64_t super_block_bytes(const LinearCall& c, const SuperForm& form) { return c.w.k / kSuperColumns * form.bytes(); }

// Word kW of a chunk of 32 columns: the codes of columns 4 kW .. 4 kW + 3, one to a byte. plane(i) is plane i of the chunk.
template <int kBits, int kW, class Plane>
QUIRE_INLINE U super_word(const Plane& plane) {
    if constexpr (kBits >= 4) {
        const U low = kW % 2 ? high_nibbles(plane(kW / 2)) : low_nibbles(plane(kW / 2));
        if constexpr (kBits == 4) return low;
        if constexpr (kBits == 5) return masked_or(shift<4 - kW>(plane(4)), set1_u(0x10101010u), low);
        if constexpr (kBits == 6) return masked_or(shift<4 - kW % 4 * 2>(plane(4 + kW / 4)), set1_u(0x30303030u), low);
    } else if constexpr (kBits == 3) {
        if constexpr (kW < 6) return and_u(shift<kW % 2 * -3>(plane(kW / 2)), set1_u(0x07070707u));
        const U low = and_u(shift<-6>(plane(kW == 7)), set1_u(0x03030303u));
        return masked_or(shift<kW == 7 ? -5 : -4>(plane(2)), set1_u(0x04040404u), low);
    } else {
        return and_u(shift<kW % 4 * -2>(plane(kW / 4)), set1_u(0x03030303u));
    }
}

// f(std::integral_constant<int, i>) for i in [kFrom, kTo).
template <int kFrom, int kTo, class Fn>
QUIRE_INLINE void unrolled(const Fn& f) {
    if constexpr (kFrom < kTo) {
        f(std::integral_constant<int, kFrom>{});
        unrolled<kFrom + 1, kTo>(f);
    }
}

// Scales and minimums of group g of a block's super-block.
struct SuperScales {
    F scale, least;
};

template <class W>
QUIRE_INLINE SuperScales super_scales(const char* multiples, int64_t g, F unit, F least_unit) {
    constexpr SuperForm kForm = W::kForm;
    const char* at = multiples + g * 16;
    if constexpr (kForm.paired) {
        const U both = load_bytes(at);
        return {mul(to_f(as_i(and_u(both, set1_u(15)))), unit), mul(to_f(as_i(shift<-4>(both))), least_unit)};
    }
    const F scale = mul(to_f(load_i8(reinterpret_cast<const int8_t*>(at))), unit);
    if constexpr (!kForm.mins) return {scale, scale};
    return {scale, mul(to_f(load_i8(reinterpret_cast<const int8_t*>(at + kForm.groups() * 16))), least_unit)};
}

// Adds a group to a tile's sums, as add_group of linear_int.h does.
template <class W, int R, int NB, int kInterleaved>
QUIRE_INLINE void add_super_group(const LinearCall& c, F (&acc)[R][NB], const I (&sum)[R][NB], const SuperScales (&scales)[NB], int64_t row, int64_t g) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        const int64_t place = group_index<kInterleaved>(c, row, g, r);
        const F xs = set1(c.x_scales[place]);
#pragma GCC unroll 8
        for (int b = 0; b < NB; ++b) acc[r][b] = fma(to_f(sum[r][b]), mul(scales[b].scale, xs), acc[r][b]);
        if constexpr (W::kForm.mins) {
            const F total = set1(c.x_sums[place]);
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) acc[r][b] = fma(scales[b].least, total, acc[r][b]);
        }
    }
}

template <class W, int R, int NB, int kInterleaved>
QUIRE_INLINE void start_super_sums(const LinearCall& c, I (&sum)[R][NB], int64_t row, int64_t g) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        const int32_t start = W::kForm.mins ? 0 : c.x_start[group_index<kInterleaved>(c, row, g, r)];
#pragma GCC unroll 8
        for (int b = 0; b < NB; ++b) sum[r][b] = set1_i(start);
    }
}

template <class W>
QUIRE_INLINE I super_dot(I sum, U codes, U x) {
    return W::kForm.table ? dot8(sum, codes, x) : dot4(sum, codes, x);
}

// All of `rows` <= R rows: weights are expanded in registers as they stream. What is computed for rows beyond is not stored. `step`:
// Part::block_step.
template <class W, int R, int NB, int kInterleaved>
[[gnu::noinline]] void super_tile(const LinearCall& c, int64_t rows, int64_t row, int64_t block, int64_t step) {
    constexpr SuperForm kForm = W::kForm;
    constexpr int kWords = kForm.group / 4;
    F acc[R][NB];
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < NB; ++b) acc[r][b] = set1(0.0f);
    const U table = kForm.table ? load_table(c.w.table) : set1_u(0);
    const int64_t supers = c.w.k / kSuperColumns, block_bytes = super_block_bytes(c, kForm), stride = block_bytes * step;
    const int64_t ahead = stream_ahead(NB);
    const int64_t x_step = kInterleaved > 1 ? 4 : c.x_stride;
    const char* from = c.w.codes + block * block_bytes;
    const char* x = c.x + row * c.x_stride;
    const auto prefetch_at = [&](const char* at) {
#pragma GCC unroll 8
        for (int b = 0; b < NB; ++b) prefetch(at + b * block_bytes + ahead);
    };
    for (int64_t s = 0; s < supers; ++s) {
        F unit[NB], least[NB];
        for (int b = 0; b < NB; ++b) {
            const int64_t at = (block + b * step) * supers + s;
            unit[b] = load_group(c, c.w.scales, at);
            least[b] = kForm.mins ? load_group(c, c.w.mins, at) : unit[b];
            prefetch(c.w.scales + (at + ahead / kForm.bytes()) * 32);
            if (kForm.mins) prefetch(c.w.mins + (at + ahead / kForm.bytes()) * 32);
        }
        const char* multiples = from;
        for (int64_t i = 0; i < kForm.multiples_bytes(); i += 64) prefetch_at(from + i);
        from += kForm.multiples_bytes();
        for (int64_t chunk = 0; chunk < kSuperColumns / 32; ++chunk, from += kForm.chunk_bytes(), x += 32 * kInterleaved) {
#pragma GCC unroll 8
            for (int i = 0; i < kForm.bits; ++i) prefetch_at(from + i * 64);
            unrolled<0, 8 / kWords>([&](auto part) {
                const int64_t g = chunk * (8 / kWords) + part;
                I sum[R][NB];
                start_super_sums<W, R, NB, kInterleaved>(c, sum, row, s * kForm.groups() + g);
                unrolled<part * kWords, part * kWords + kWords>([&](auto w) {
                    U codes[NB];
#pragma GCC unroll 8
                    for (int b = 0; b < NB; ++b) {
                        codes[b] = super_word<kForm.bits, w>([&](int i) { return load_u(from + b * stride + i * 64); });
                        if constexpr (kForm.table) codes[b] = look_up(table, codes[b]);
                    }
#pragma GCC unroll 16
                    for (int r = 0; r < R; ++r) {
                        const U xk = set1_u(word(x + r * x_step + w * 4 * kInterleaved));
#pragma GCC unroll 8
                        for (int b = 0; b < NB; ++b) sum[r][b] = super_dot<W>(sum[r][b], codes[b], xk);
                    }
                });
                SuperScales scales[NB];
#pragma GCC unroll 8
                for (int b = 0; b < NB; ++b) scales[b] = super_scales<W>(multiples + b * stride, g, unit[b], least[b]);
                add_super_group<W, R, NB, kInterleaved>(c, acc, sum, scales, row, s * kForm.groups() + g);
            });
        }
    }
    for (int b = 0; b < NB; ++b) {
        if (b > 0 && step == 0) return;
        const int64_t column = (block + b) * 16;
        const int lanes = static_cast<int>(c.w.n - column < 16 ? c.w.n - column : 16);
        const F bias = c.bias ? load_lanes(c.bias + column, lanes) : set1(0.0f);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            if (r < rows) store_out(c, c.out + (row + r) * c.out_stride + column, c.bias ? add(acc[r][b], bias) : acc[r][b], lanes);
    }
}

// The expanded part of a block: bytes [columns / 4][64], then f32 scales [columns / group][16], then minimums likewise.
struct Expanded {
    char* codes;
    float* scales;
    float* mins;
    static constexpr int64_t kBytes = kExpandedColumns * 16 + 2 * kExpandedColumns / 16 * 64;
    explicit Expanded(char* at) : codes(at), scales(reinterpret_cast<float*>(at + kExpandedColumns * 16)), mins(scales + kExpandedColumns / 16 * 16) {}
};

// Super-blocks begin .. end of a block.
template <class W>
QUIRE_INLINE void expand(Expanded to, const LinearCall& c, int64_t block, int64_t begin, int64_t end) {
    constexpr SuperForm kForm = W::kForm;
    const U table = kForm.table ? load_table(c.w.table) : set1_u(0);
    const int64_t supers = c.w.k / kSuperColumns;
    const char* from = c.w.codes + block * super_block_bytes(c, kForm) + begin * kForm.bytes();
    for (int64_t s = begin; s < end; ++s) {
        const F unit = load_group(c, c.w.scales, block * supers + s), least = kForm.mins ? load_group(c, c.w.mins, block * supers + s) : unit;
        for (int64_t g = 0; g < kForm.groups(); ++g, to.scales += 16, to.mins += 16) {
            const SuperScales scales = super_scales<W>(from, g, unit, least);
            store(to.scales, scales.scale);
            if (kForm.mins) store(to.mins, scales.least);
        }
        from += kForm.multiples_bytes();
        for (int64_t chunk = 0; chunk < kSuperColumns / 32; ++chunk, from += kForm.chunk_bytes(), to.codes += 512) {
            unrolled<0, 8>([&](auto w) {
                U codes = super_word<kForm.bits, w>([&](int i) { return load_u(from + i * 64); });
                if constexpr (kForm.table) codes = look_up(table, codes);
                store_u(to.codes + w * 64, codes);
            });
        }
    }
}

// R rows by NB expanded blocks, groups part.begin .. part.end.
template <class W, int R, int NB>
[[gnu::noinline]] void expanded_tile(const LinearCall& c, char* expanded, int64_t row, int64_t block, const Part& part) {
    constexpr SuperForm kForm = W::kForm;
    F acc[R][NB];
    load_tile<R, NB>(acc, part);
    const Expanded first(expanded);
    const int64_t stride = Expanded::kBytes * part.block_step;
    const char* w = first.codes;
    const char* x = c.x + row * c.x_stride + part.begin * kForm.group;
    const char* next = part.next;
    PrefetchShare share(part);
    for (int64_t g = part.begin; g < part.end; ++g, next += part.next_step) {
        I sum[R][NB];
        start_super_sums<W, R, NB, 1>(c, sum, row, g);
        if (share.now()) {
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b)
                for (int64_t i = 0; i < part.next_step; i += 64) prefetch_far(next + b * part.next_stride + i);
        }
#pragma GCC unroll 8
        for (int i = 0; i < kForm.group / 4; ++i, w += 64, x += 4) {
            U codes[NB];
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) codes[b] = load_u(w + b * stride);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const U xk = set1_u(word(x + r * c.x_stride));
#pragma GCC unroll 8
                for (int b = 0; b < NB; ++b) sum[r][b] = super_dot<W>(sum[r][b], codes[b], xk);
            }
        }
        SuperScales scales[NB];
#pragma GCC unroll 8
        for (int b = 0; b < NB; ++b) {
            const Expanded at(expanded + b * stride);
            scales[b].scale = load(at.scales + (g - part.begin) * 16);
            if (kForm.mins) scales[b].least = load(at.mins + (g - part.begin) * 16);
        }
        add_super_group<W, R, NB, 1>(c, acc, sum, scales, row, g);
    }
    store_tile<R, NB>(c, acc, row, block, part);
}

// `rows` rows in tiles of R, R / 2, ... 1.
template <class W, int NB, int R>
void expanded_tiles(const LinearCall& c, char* expanded, int64_t row, int64_t rows, int64_t block, Part& part) {
    for (; rows >= R; row += R, rows -= R, part.at += R * NB * 16, ++part.tile) expanded_tile<W, R, NB>(c, expanded, row, block, part);
    if constexpr (R > 1) expanded_tiles<W, NB, R / 2>(c, expanded, row, rows, block, part);
}

// 32 columns of a block and a row: the planes of the weights and the bytes from there to those to prefetch, the multiples of their
// super-block and which of them are theirs, the units, the row's codes and its first group.
struct Chunk {
    const char* planes;
    int64_t ahead;
    const char* multiples;
    int64_t first;
    F unit, least;
    const char* x;
    int64_t group;
};

// Adds the product of a chunk to the row's sums.
template <class W>
QUIRE_INLINE F add_chunk(F acc, const LinearCall& c, const Chunk& of, U table) {
    constexpr SuperForm kForm = W::kForm;
    constexpr int kWords = kForm.group / 4;
    U planes[kForm.bits];
#pragma GCC unroll 8
    for (int i = 0; i < kForm.bits; ++i) {
        prefetch(of.planes + i * 64 + of.ahead);
        planes[i] = kept(load_u(of.planes + i * 64));
    }
    unrolled<0, 8 / kWords>([&](auto part) __attribute__((always_inline)) {
        I sum = set1_i(kForm.mins ? 0 : c.x_start[of.group + part]);
        unrolled<part * kWords, part * kWords + kWords>([&](auto w) __attribute__((always_inline)) {
            U codes = super_word<kForm.bits, w>([&](int i) __attribute__((always_inline)) { return planes[i]; });
            if constexpr (kForm.table) codes = look_up(table, codes);
            sum = super_dot<W>(sum, codes, set1_u(word(of.x + w * 4)));
        });
        const SuperScales scales = super_scales<W>(of.multiples, of.first + part, of.unit, of.least);
        acc = fma(to_f(sum), mul(scales.scale, set1(c.x_scales[of.group + part])), acc);
        if constexpr (kForm.mins) acc = fma(scales.least, set1(c.x_sums[of.group + part]), acc);
    });
    return acc;
}

// A single row and `blocks` <= NB blocks, which take turns chunk by chunk: a core that reads four places at a time gets 15 to 20 % more
// from memory than one that reads a single one (a Xeon with AMX, its AVX2 unit too).
template <class W, int NB>
[[gnu::noinline]] void super_row(const LinearCall& c, int64_t row, int64_t block, int64_t blocks) {
    constexpr SuperForm kForm = W::kForm;
    constexpr int64_t kGroups = 32 / kForm.group;  // of a chunk
    const U table = kForm.table ? load_table(c.w.table) : set1_u(0);
    const int64_t supers = c.w.k / kSuperColumns, bytes = super_block_bytes(c, kForm);
    const char* x = c.x + row * c.x_stride;
    F acc[NB][1][1], unit[NB], least[NB];
    for (int b = 0; b < NB; ++b) acc[b][0][0] = set1(0.0f);
    for (int64_t s = 0; s < supers; ++s) {
        const char* multiples = c.w.codes + block * bytes + s * kForm.bytes();
        const int64_t ahead = prefetch_offset<NB>(s * kForm.bytes(), bytes, g_tuning.ahead);
        for (int64_t b = 0; b < blocks; ++b) {
            const int64_t at = (block + b) * supers + s;
            unit[b] = load_group(c, c.w.scales, at);
            least[b] = kForm.mins ? load_group(c, c.w.mins, at) : unit[b];
            prefetch(c.w.scales + (at + ahead / kForm.bytes()) * 32);
            if (kForm.mins) prefetch(c.w.mins + (at + ahead / kForm.bytes()) * 32);
            for (int64_t i = 0; i < kForm.multiples_bytes(); i += 64) prefetch(multiples + b * bytes + i + ahead);
        }
        for (int64_t chunk = 0; chunk < kSuperColumns / 32; ++chunk, x += 32) {
            const char* planes = multiples + kForm.multiples_bytes() + chunk * kForm.chunk_bytes();
            const int64_t first = chunk * kGroups, group = row * c.groups + s * kForm.groups() + first;
            for (int64_t b = 0; b < blocks; ++b)
                acc[b][0][0] = add_chunk<W>(acc[b][0][0], c, {planes + b * bytes, ahead, multiples + b * bytes, first, unit[b], least[b], x, group}, table);
        }
    }
    const Part whole{0, supers, true, nullptr, 0, 0, 1};
    for (int64_t b = 0; b < blocks; ++b) store_tile<1, 1>(c, acc[b], row, block + b, whole);
}

template <class W, int NB>
void super_rows(const LinearCall& c, const Panel& p) {
    for (int64_t block = p.block; block < p.blocks_end; block += NB) super_row<W, NB>(c, p.row, block, p.blocks_end - block < NB ? p.blocks_end - block : NB);
}

// Rows that are one tile; an odd number of them takes as long as the next even one.
template <class W, int R, int NB>
void super_few_rows(const LinearCall& c, const Panel& p) {
    constexpr int kRows = W::template interleaved<R, true>();
    const int64_t rows = p.rows_end - p.row;
    for (int64_t block = p.block; block < p.blocks_end; block += NB) {
        for_tile_blocks<NB>(block, p.blocks_end, {}, [&](int64_t b, const Part& part) {
            with_count<(R + 1) / 2, (kRows > 4 ? kRows / 4 : 1)>((rows + 1) / 2, [&]<int kPairs>() { super_tile<W, 2 * kPairs, NB, kRows>(c, rows, p.row, b, part.block_step); });
        });
    }
}

template <class W, int R, int NB>
void super_many_rows(const LinearCall& c, const Panel& p) {
    constexpr SuperForm kForm = W::kForm;
    constexpr int64_t kPart = kExpandedColumns / kSuperColumns;
    char* expanded = p.work;
    const int64_t supers = c.w.k / kSuperColumns, block_bytes = super_block_bytes(c, kForm), rows = p.rows_end - p.row;
    auto* sums = reinterpret_cast<float*>(p.work + NB * Expanded::kBytes);
    for (int64_t block = p.block; block < p.blocks_end; block += NB) {
        const int64_t blocks = p.blocks_end - block < NB ? p.blocks_end - block : NB;
        const char* at = c.w.codes + block * block_bytes;
        for (int64_t begin = 0; begin < supers; begin += kPart) {
            const int64_t end = begin + kPart < supers ? begin + kPart : supers;
            for (int64_t b = 0; b < blocks; ++b) expand<W>(Expanded(expanded + b * Expanded::kBytes), c, block + b, begin, end);
            Part part{begin * kForm.groups(), end * kForm.groups(), end == supers, sums, 0, 0, (rows + R - 1) / R, expanded, Expanded::kBytes};
            part.next = end == supers ? at + NB * block_bytes : at + end * kForm.bytes();
            part.next_stride = block_bytes;
            part.next_step = kForm.bytes() / kForm.groups();
            for_tile_blocks<NB>(block, p.blocks_end, part, [&](int64_t b, Part of) {
                expanded_tiles<typename W::Tiles, NB, R>(c, const_cast<char*>(of.weights), p.row, rows, b, of);
            });
        }
    }
}

// Word i of a chunk of super-blocks from its planes (layout: super_blocks.h).
template <int kBits>
QUIRE_INLINE uint32_t word_of_planes(const uint32_t* planes, int i) {
    const auto bits = [&](int plane, int from, uint32_t mask) { return planes[plane] >> from & mask * 0x01010101u; };
    if constexpr (kBits == 2) return bits(i / 4, i % 4 * 2, 3);
    if constexpr (kBits == 3) return i < 6 ? bits(i / 2, i % 2 * 3, 7) : bits(i - 6, 6, 3) | bits(2, i, 1) << 2;
    const uint32_t low = bits(i / 2, i % 2 * 4, 15);
    if constexpr (kBits == 5) return low | bits(4, i, 1) << 4;
    if constexpr (kBits == 6) return low | bits(4 + i / 4, i % 4 * 2, 3) << 4;
    return low;
}

// A group of a super-block is one scale and one minimum.
template <class W>
void decode_super_row(const Matrix& w, int64_t row, float* out) {
    constexpr SuperForm kForm = W::kForm;
    const int64_t lane = row % 16, supers = w.k / kSuperColumns;
    const char* at = w.codes + row / 16 * w.code_step;
    float table[16];
    if constexpr (kForm.table) read_table(table, w);
    for (int64_t s = 0; s < supers; ++s, at += kForm.bytes()) {
        const int64_t index = (row / 16 * supers + s) * 16 + lane;
        const float unit = float_at(w, w.scales, index), least_unit = kForm.mins ? float_at(w, w.mins, index) : 0.0f;
        for (int64_t column = 0; column < kSuperColumns; column += 4, out += 4) {
            uint32_t planes[kForm.bits];
            for (int p = 0; p < kForm.bits; ++p) planes[p] = word(at + kForm.multiples_bytes() + column / 32 * kForm.chunk_bytes() + p * 64 + lane * 4);
            const uint32_t codes = word_of_planes<kForm.bits>(planes, static_cast<int>(column % 32 / 4));
            const int64_t g = column / kForm.group;
            const char multiple = at[g * 16 + lane];
            const float scale = static_cast<float>(kForm.paired ? multiple & 15 : static_cast<int8_t>(multiple)) * unit;
            for (int j = 0; j < 4; ++j) {
                const auto code = static_cast<int>(codes >> (8 * j) & 255u);
                out[j] = (kForm.table ? table[code] : static_cast<float>(code - kForm.offset)) * scale;
            }
            if constexpr (!kForm.mins) continue;
            const int least = kForm.paired ? multiple >> 4 & 15 : at[(kForm.groups() + g) * 16 + lane];
            for (int j = 0; j < 4; ++j) out[j] += static_cast<float>(least) * least_unit;
        }
    }
}

// A kind of super-blocks. Tiles: the kind that stands for all whose expanded tiles are the same.
template <Kind kKind, Kind kTiles = kKind>
struct Super {
    using Tiles = Super<kTiles>;
    static constexpr SuperForm kForm = super_form(kKind);
    static constexpr bool kWidens = true, kTileRegisters = true, kWideScales = false;
    static constexpr int kRoom = 1, kDigits = 1, kPlanes = 1;

    template <class Fn>
    static void with_tile(int64_t m, const Fn& f) {
        if (m == 1) return g_tuning.row_streams == 1 ? f.template operator()<1, 1, true>() : f.template operator()<1, kRowStreams, true>();
        if constexpr (kStreamRows > 0) {
            if (m <= kFewRows) return f.template operator()<kFewRows, kTileBlocks, true>();
            if (m <= kTileRows) return f.template operator()<kTileRows, kTileBlocks, true>();
            if constexpr (kForm.group == 32)
                if (m <= kStreamRows) return f.template operator()<kStreamRows, 1, true>();
        }
        f.template operator()<kTileRows, kTileBlocks, false>();
    }
    template <int R, bool kStream>
    static constexpr int interleaved() { return kStreamRows && kStream ? R : 1; }
    static int64_t row_bytes(const LinearCall& c, int64_t) { return c.x_stride; }
    template <int R, int NB>
    static int64_t part_steps(const LinearCall& c, int64_t) { return c.w.k; }
    template <int R, int NB, bool kStream>
    static void panel(const LinearCall& c, int64_t, const Panel& p) {
        if constexpr (R == 1) super_rows<Super, NB>(c, p);
        else if constexpr (kStream) super_few_rows<Super, R, NB>(c, p);
        else super_many_rows<Super, R, NB>(c, p);
    }
    template <int R, int NB>
    static int64_t panel_bytes(const LinearCall&, int64_t, int64_t rows) { return NB * Expanded::kBytes + rows * NB * 64; }
    static void decode_row(const Matrix& w, int64_t row, float* out) { decode_super_row<Super>(w, row, out); }
};

}  // namespace
}  // namespace quire::QUIRE_UNIT
