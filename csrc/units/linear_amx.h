// Integer weights through tile registers, for many rows.
//
// A product of tiles adds up a group of 16 rows by 16 columns exactly; its integers go through memory into floats with the
// operations and the order of int_tile, so the results are those of the other units bit for bit. Weights are unpacked once
// per panel to signed bytes, in the layout that a tile of the second operand has anyway. The sums of one row of tiles are
// turned into floats between the products of the next. Beyond its unpacking no product knows the kind of its weights: codes, numbers of
// a table and chunks of super-blocks become the same bytes and f32 scales. Products of digits that weigh the same are one sum, as in
// linear_int.h; two and three sums leave registers for two column blocks and for one.
#pragma once

#include "linear_amx_few.h"
#include "linear_super_blocks.h"

namespace quire::QUIRE_UNIT {
namespace {

constexpr int kSumTiles = 4;  // tile registers that hold sums
constexpr int kTall = 4;    // row tiles whose floats stay in the first-level cache beside the weights of a group
// Activations of a panel; every processor with AMX so far has 2 MiB of second-level cache a core.
constexpr int64_t kTilePanelBytes = 1280 << 10;

struct alignas(64) TileArea {
    int32_t sums[2][kSumTiles * kTileInts];
    float acc[kTall + 1][kSumTiles * kTileInts];  // the last takes what the first flush of a panel makes of no sums
};

// What each group has beside its scale.
enum class Beside { kNothing, kZeros, kMins };

// What products differ in: tiles that hold a group's columns, digits of the weights' numbers and of the activations.
struct TileForm {
    Beside beside;
    int parts, planes, digits;
    constexpr int sums() const { return planes + digits - 1; }
    constexpr int wide() const { return kSumTiles / sums(); }  // column blocks that share a tile of activations
};

// A group of `blocks` unpacked blocks: signed digits [planes][blocks][group / 4][16][4], scales [blocks][16], zeros or minimums likewise.
struct TileGroup {
    char* at;
    int64_t codes_bytes, blocks, planes;
    char* codes(int64_t b, int64_t plane = 0) const { return at + (plane * blocks + b) * codes_bytes; }
    float* scales(int64_t b) const { return reinterpret_cast<float*>(codes(0, planes)) + b * 16; }
    float* beside(int64_t b) const { return scales(blocks + b); }
};

constexpr int64_t tile_group_bytes(int64_t group, int64_t blocks, int64_t planes) { return blocks * (planes * group * 16 + 2 * 64); }

// Group g of column block `block` becomes block b of `to`.
using UnpackGroup = void (*)(const TileGroup& to, int64_t b, const LinearCall& c, int64_t block, int64_t g);

QUIRE_INLINE void store_bytes(char* to, U codes, __m512i offset) { _mm512_store_si512(to, _mm512_sub_epi8(codes.v, offset)); }

template <class W>
void unpack_group(const TileGroup& to, int64_t b, const LinearCall& c, int64_t block, int64_t g) {
    constexpr int kStep = W::kColumns, kPlanes = W::kPlanes;
    constexpr bool kTable = W::kTable, kInt4 = W::kBits == 4 && !kTable;
    const int64_t block_bytes = c.w.k * (64 / kStep), begin = g * c.w.group * (64 / kStep), at = block * c.groups + g;
    const int64_t ahead = begin + g_tuning.ahead < block_bytes ? 0 : (to.blocks - 1) * block_bytes;
    const char* w = c.w.codes + block * block_bytes + begin;
    const __m512i offset = _mm512_set1_epi8(static_cast<char>(kInt4 ? (c.w.mins ? 0 : 8) : 128));
    U table[kPlanes];
    for (int p = 0; p < kPlanes; ++p) table[p] = {kTable ? _mm512_sub_epi8(load_table(c.w.table + p * 16).v, offset) : offset};
    char* codes = to.codes(b);
    for (int64_t i = 0; i < c.w.group / kStep; ++i, w += 64) {
        const U packed = load_u(w);
        prefetch(w + g_tuning.ahead + ahead);
        if constexpr (kTable) {
            for (int p = 0; p < kPlanes; ++p) {
                store_u(to.codes(b, p) + i * 128, look_up(table[p], low_nibbles(packed)));
                store_u(to.codes(b, p) + i * 128 + 64, look_up(table[p], high_nibbles(packed)));
            }
        } else if constexpr (kInt4) {
            store_bytes(codes + i * 128, low_nibbles(packed), offset);
            store_bytes(codes + i * 128 + 64, high_nibbles(packed), offset);
        } else {
            store_bytes(codes + i * 64, packed, offset);
        }
    }
    store(to.scales(b), load_group(c, c.w.scales, at));
    if (c.w.zeros) _mm512_store_si512(to.beside(b), load_i8(c.w.zeros + at * 16).v);
    if (c.w.mins) store(to.beside(b), load_group(c, c.w.mins, at));
}

// A group is a chunk of a super-block, or half of one.
template <class W>
void unpack_super_group(const TileGroup& to, int64_t b, const LinearCall& c, int64_t block, int64_t g) {
    constexpr SuperForm kForm = W::kForm;
    constexpr int kWords = kForm.group / 4, kPerChunk = 8 / kWords;
    const int64_t block_bytes = super_block_bytes(c, kForm), super = g / kForm.groups(), inner = g % kForm.groups();
    const int64_t at = block * (c.w.k / kSuperColumns) + super, begin = super * kForm.bytes();
    const int64_t ahead = begin + g_tuning.ahead < block_bytes ? 0 : (to.blocks - 1) * block_bytes;
    const char* multiples = c.w.codes + block * block_bytes + begin;
    const char* from = multiples + kForm.multiples_bytes() + inner / kPerChunk * kForm.chunk_bytes();
    const __m512i offset = _mm512_set1_epi8(static_cast<char>(kForm.table ? 128 : kForm.mins ? 0 : kForm.offset));
    const U table = {kForm.table ? _mm512_sub_epi8(load_table(c.w.table).v, offset) : offset};
    char* codes = to.codes(b);
    if (inner % kPerChunk == 0)
        for (int i = 0; i < kForm.bits; ++i) prefetch(from + i * 64 + g_tuning.ahead + ahead);
    unrolled<0, kPerChunk>([&](auto part) {
        if (inner % kPerChunk != part) return;
        unrolled<part * kWords, part * kWords + kWords>([&](auto w) {
            const U word = super_word<kForm.bits, w>([&](int i) { return load_u(from + i * 64); });
            char* to_word = codes + (w - part * kWords) * 64;
            if constexpr (kForm.table) store_u(to_word, look_up(table, word));
            else store_bytes(to_word, word, offset);
        });
    });
    const F unit = load_group(c, c.w.scales, at), least_unit = kForm.mins ? load_group(c, c.w.mins, at) : unit;
    const SuperScales scales = super_scales<W>(multiples, inner, unit, least_unit);
    store(to.scales(b), scales.scale);
    if constexpr (kForm.mins) store(to.beside(b), scales.least);
}

// Integer sums of a row of tiles on their way into floats.
struct Waiting {
    const int32_t* sums;
    float* acc;
    int64_t row, group;
    TileGroup weights;
};

template <TileForm kForm, int NB>
struct Flush {
    const int32_t* sums;  // [sums][NB][16][16]
    float* acc;
    const float* xs;
    const int32_t* starts;
    const float* totals;
    int64_t stride;
    int rows;
    F scale[NB];
    F least[NB];
    I zero[NB];
};

template <TileForm kForm, int NB>
QUIRE_INLINE Flush<kForm, NB> flush_of(const LinearCall& c, const Waiting& s, int rows) {
    const int64_t first = s.row * c.groups + s.group;
    Flush<kForm, NB> f{s.sums, s.acc, c.x_scales + first, c.x_start + first * kForm.digits, c.x_sums + first, c.groups, rows, {}, {}, {}};
#pragma GCC unroll 4
    for (int b = 0; b < NB; ++b) {
        f.scale[b] = load(s.weights.scales(b));
        if constexpr (kForm.beside == Beside::kZeros) f.zero[b] = load_i(s.weights.beside(b));
        if constexpr (kForm.beside == Beside::kMins) f.least[b] = load(s.weights.beside(b));
    }
    return f;
}

// Rows kFrom .. kTo of a tile, as far as there are so many: acc += sum times the scales of weights and activations, and the
// minimums times the activations' sum. Three sums do not fit into an integer, see add_group.
template <bool kFull, int kFrom, int kTo, TileForm kForm, int NB>
QUIRE_INLINE void flush_rows(Flush<kForm, NB>& f) {
#pragma GCC unroll 16
    for (int r = kFrom; r < kTo; ++r) {
        if (!kFull && r >= f.rows) return;
        const F xs = set1(*f.xs);
        f.xs += f.stride;
        I start[kForm.digits];
        F total = set1(0.0f);
        if constexpr (kForm.beside == Beside::kZeros) {
            for (int d = 0; d < kForm.digits; ++d) start[d] = set1_i(f.starts[d]);
            f.starts += f.stride * kForm.digits;
        }
        if constexpr (kForm.beside == Beside::kMins) {
            total = set1(*f.totals);
            f.totals += f.stride;
        }
#pragma GCC unroll 4
        for (int b = 0; b < NB; ++b) {
            I sum[kForm.sums()];
#pragma GCC unroll 3
            for (int s = 0; s < kForm.sums(); ++s) {
                sum[s] = load_i(f.sums + (s * NB + b) * kTileInts + r * 16);
                if constexpr (kForm.beside == Beside::kZeros) sum[s] = add_i(sum[s], mul16(start[s], f.zero[b]));
            }
            float* acc = f.acc + b * kTileInts + r * 16;
            I whole = sum[0];
            if constexpr (kForm.sums() > 1) whole = add_i(times255(whole), sum[1]);
            F value = to_f(whole);
            if constexpr (kForm.sums() > 2) value = fma(value, set1(255.0f), to_f(sum[2]));
            value = fma(value, mul(f.scale[b], xs), load(acc));
            if constexpr (kForm.beside == Beside::kMins) value = fma(f.least[b], total, value);
            store(acc, value);
        }
    }
}

// Part kPart of the activations of a group, or with two digits both of it: tiles 4 and 5.
template <TileForm kForm, int kPart>
QUIRE_INLINE void load_x(const LinearCall& c, const char* x) {
    tile_load<4 + (kForm.digits == 1 ? kPart : 0)>(x + kPart * 64, c.x_stride);
    if constexpr (kForm.digits == 2) tile_load<5>(x + c.x_digit + kPart * 64, c.x_stride);
}

// Tiles 0 .. 3: sums, [sum][block]; 4, 5: activations; 6, 7: weights. One tile of weights, of part kPart and plane kPlane of block
// kBlock, and as many rows of the sums that wait.
template <TileForm kForm, int NB, bool kFull, int kAt>
QUIRE_INLINE void dot_step(const LinearCall& c, const char* x, const TileGroup& w, Flush<kForm, NB>& flush) {
    constexpr int kSteps = kForm.parts * kForm.planes * NB, kBlock = kAt % NB, kPlane = kAt / NB % kForm.planes, kPart = kAt / NB / kForm.planes;
    if constexpr (kForm.digits == 2 && kAt == kPart * kForm.planes * NB) load_x<kForm, kPart>(c, x);
    tile_load<6 + kAt % 2>(w.codes(kBlock, kPlane) + kPart * 64 * 16, 64);
    if constexpr (kForm.digits == 1) {
        tile_dot_s8<kPlane * NB + kBlock, 4 + kPart, 6 + kAt % 2>();
    } else {
        tile_dot_s8<kPlane * NB + kBlock, 4, 6 + kAt % 2>();
        tile_dot_s8<(kPlane + 1) * NB + kBlock, 5, 6 + kAt % 2>();
    }
    flush_rows<kFull, kAt * kSide / kSteps, (kAt + 1) * kSide / kSteps>(flush);
}

template <TileForm kForm, bool kFull, int NB, int... kAt>
QUIRE_INLINE void dot_group(const LinearCall& c, const char* x, const TileGroup& w, Flush<kForm, NB>& flush, std::integer_sequence<int, kAt...>) {
    if constexpr (kForm.digits == 1) load_x<kForm, 0>(c, x);
    if constexpr (kForm.digits == 1 && kForm.parts == 2) load_x<kForm, 1>(c, x);
    (dot_step<kForm, NB, kFull, kAt>(c, x, w, flush), ...);
}
template <int... b>
QUIRE_INLINE void zero_sums(std::integer_sequence<int, b...>) {
    (tile_zero<b>(), ...);
}
template <int... b>
QUIRE_INLINE void store_sums(int32_t* sums, std::integer_sequence<int, b...>) {
    (tile_store<b>(sums + b * kTileInts, 64), ...);
}

// The row where tile t of a panel begins: the last is moved up to end with the panel, its rows are computed twice alike.
QUIRE_INLINE int64_t tile_row(const Panel& p, int64_t top, int t, int rows) {
    const int64_t row = top + t * kSide;
    return row + rows <= p.rows_end ? row : p.rows_end - rows;
}

template <int NB>
QUIRE_INLINE void store_tiles(const LinearCall& c, const Panel& p, const float* acc, int64_t row, int rows) {
    for (int b = 0; b < NB; ++b) {
        const int64_t column = (p.block + b) * 16;
        const int lanes = static_cast<int>(c.w.n - column < 16 ? c.w.n - column : 16);
        const F bias = c.bias ? load_lanes(c.bias + column, lanes) : set1(0.0f);
        for (int r = 0; r < rows; ++r) {
            const F value = load(acc + b * kTileInts + r * 16);
            store_out(c, c.out + (row + r) * c.out_stride + column, c.bias ? add(value, bias) : value, lanes);
        }
    }
}

// NB column blocks of a panel. kFull: it is known to have 16 rows or more.
template <TileForm kForm, int NB, bool kFull>
void tile_blocks(const LinearCall& c, const Panel& p, UnpackGroup unpack, TileArea& area) {
    constexpr int kSteps = kForm.parts * kForm.planes * NB;
    const int64_t group = c.w.group, codes_bytes = group * 16;
    const int rows = p.rows_end - p.row < kSide ? static_cast<int>(p.rows_end - p.row) : kSide;
    const std::make_integer_sequence<int, kForm.sums() * NB> sums;
    for (int64_t top = p.row; top < p.rows_end; top += kTall * kSide) {
        const int64_t left = (p.rows_end - top + kSide - 1) / kSide;
        const int tall = static_cast<int>(left < kTall ? left : kTall);
        std::memset(area.acc, 0, static_cast<size_t>(tall) * sizeof(area.acc[0]));
        Waiting waiting{area.sums[1], area.acc[kTall], p.row, 0, {p.work, codes_bytes, NB, kForm.planes}};
        int buffer = 0;
        for (int64_t g = 0; g < c.groups; ++g) {
            const TileGroup weights{p.work + g * tile_group_bytes(group, NB, kForm.planes), codes_bytes, NB, kForm.planes};
            if (top == p.row)
                for (int b = 0; b < NB; ++b) unpack(weights, b, c, p.block + b, g);
            for (int t = 0; t < tall; ++t, buffer ^= 1) {
                const int64_t row = tile_row(p, top, t, rows);
                const char* x = c.x + row * c.x_stride + g * group;
                auto flush = flush_of<kForm, NB>(c, waiting, rows);
                zero_sums(sums);
                dot_group<kForm, kFull>(c, x, weights, flush, std::make_integer_sequence<int, kSteps>{});
                store_sums(area.sums[buffer], sums);
                waiting = {area.sums[buffer], area.acc[t], row, g, weights};
            }
        }
        auto flush = flush_of<kForm, NB>(c, waiting, rows);
        flush_rows<kFull, 0, kSide>(flush);
        for (int t = 0; t < tall; ++t) store_tiles<NB>(c, p, area.acc[t], tile_row(p, top, t, rows), rows);
    }
}

// Column blocks of a panel that share a tile of activations.
template <class W>
constexpr int tile_blocks_of() { return TileForm{Beside::kNothing, 1, W::kPlanes, W::kDigits}.wide(); }

// Memory that a panel needs: the unpacked weights of some blocks.
template <class W>
QUIRE_INLINE int64_t tile_panel_bytes(const LinearCall& c) { return c.groups * tile_group_bytes(c.w.group, tile_blocks_of<W>(), W::kPlanes); }

template <TileForm kForm>
void tile_panel(const LinearCall& c, Panel p, UnpackGroup unpack) {
    constexpr int kWide = kForm.wide();
    TileArea area;
    std::memset(&area, 0, sizeof area);
    const bool full = p.rows_end - p.row >= kSide;
    const int rows = full ? kSide : static_cast<int>(p.rows_end - p.row);
    const int columns = static_cast<int>(c.w.group) / kForm.parts;
    TileShapes shapes;
    for (int i = 0; i < kSumTiles; ++i) shapes.set(i, rows, 64);
    for (int i = 4; i < 6; ++i) shapes.set(i, rows, columns);
    for (int i = 6; i < 8; ++i) shapes.set(i, columns / 4, 64);
    const TileScope scope(shapes);
    for (; p.block + kWide <= p.blocks_end; p.block += kWide) {
        if (full) tile_blocks<kForm, kWide, true>(c, p, unpack, area);
        else tile_blocks<kForm, kWide, false>(c, p, unpack, area);
    }
    if constexpr (kWide > 1)
        for (; p.block < p.blocks_end; ++p.block) tile_blocks<kForm, 1, false>(c, p, unpack, area);
}

template <class W, Beside kBeside>
void tile_panel_of(const LinearCall& c, const Panel& p) {
    if (c.w.group <= 64) return tile_panel<TileForm{kBeside, 1, W::kPlanes, W::kDigits}>(c, p, &unpack_group<W>);
    tile_panel<TileForm{kBeside, 2, W::kPlanes, W::kDigits}>(c, p, &unpack_group<W>);
}

// With groups of 16 columns a product takes a tile as long as with 64, its time being that of the rows of activations, and so do its
// stores and floats: by count no faster than vectors, so the tuner may leave them to vectors.
template <class W>
void run_tile_panel(const LinearCall& c, const Panel& p) {
    if constexpr (requires { W::kForm; }) {
        constexpr Beside kBeside = W::kForm.mins ? Beside::kMins : Beside::kNothing;
        return tile_panel<TileForm{kBeside, 1, 1, 1}>(c, p, &unpack_super_group<W>);
    } else {
        if constexpr (W::kPlanes == 1 && W::kDigits == 1)
            if (p.rows_end - p.row <= kSide && c.w.group >= kFewGroup && !c.w.mins) return few_panel_of<W>(c, p);
        if constexpr (!W::kTable) {
            if (c.w.mins) return tile_panel_of<W, Beside::kMins>(c, p);
            if (c.w.zeros) return tile_panel_of<W, Beside::kZeros>(c, p);
        }
        tile_panel_of<W, Beside::kNothing>(c, p);
    }
}

// All rows and column blocks, in panels of about equal height.
template <class W>
void run_tile_linear(const LinearCall& c, int64_t m) {
    const int64_t most = kTilePanelBytes / c.x_stride < kSide ? 1 : kTilePanelBytes / c.x_stride / kSide;
    const int64_t tiles = (m + kSide - 1) / kSide, panels = (tiles + most - 1) / most;
    const int64_t height = (tiles + panels - 1) / panels * kSide;
    constexpr int kWide = tile_blocks_of<W>();
    const int64_t blocks = (c.w.n + 15) / 16, columns = (blocks + kWide - 1) / kWide;
    const Work work(tile_panel_bytes<W>(c));
    parallel_for((m + height - 1) / height * columns, [&](int64_t index, int thread) {
        const int64_t row = index / columns * height, block = index % columns * kWide;
        const int64_t blocks_end = block + kWide < blocks ? block + kWide : blocks;
        run_tile_panel<W>(c, {row, row + height < m ? row + height : m, block, blocks_end, work.of(thread)});
    });
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
