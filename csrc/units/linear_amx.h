// Integer weights through tile registers, for many rows.
//
// A product of tiles adds up a group of 16 rows by 16 columns exactly; its integers go through memory into floats with the
// operations and the order of int_tile, so the results are those of the other units bit for bit. Weights are unpacked once
// per panel to signed bytes, in the layout that a tile of the second operand has anyway. The sums of one row of tiles are
// turned into floats between the products of the next. Beyond its unpacking no product knows the kind of its weights: codes, numbers of
// a table and chunks of super-blocks become the same bytes and f32 scales.
#pragma once

constexpr int kWide = 4;    // column blocks that share a tile of activations
constexpr int kTall = 4;    // row tiles whose floats stay in the first-level cache beside the weights of a group
// Activations of a panel; every processor with AMX so far has 2 MiB of second-level cache a core.
constexpr int64_t kTilePanelBytes = 1280 << 10;

struct alignas(64) TileArea {
    int32_t sums[2][kWide * kTileInts];
    float acc[kTall + 1][kWide * kTileInts];  // the last takes what the first flush of a panel makes of no sums
};

// What each group has beside its scale.
enum class Beside { kNothing, kZeros, kMins };

// A group of `blocks` unpacked blocks: signed codes [blocks][group / 4][16][4], scales [blocks][16], zeros or minimums likewise.
struct TileGroup {
    char* at;
    int64_t codes_bytes, blocks;
    char* codes(int64_t b) const { return at + b * codes_bytes; }
    float* scales(int64_t b) const { return reinterpret_cast<float*>(at + blocks * codes_bytes) + b * 16; }
    float* beside(int64_t b) const { return scales(blocks + b); }
};

constexpr int64_t tile_group_bytes(int64_t group, int64_t blocks) { return blocks * (group * 16 + 2 * 64); }

// Group g of column block `block` becomes block b of `to`.
using UnpackGroup = void (*)(const TileGroup& to, int64_t b, const LinearCall& c, int64_t block, int64_t g);

QUIRE_INLINE void store_bytes(char* to, U codes, __m512i offset) { _mm512_store_si512(to, _mm512_sub_epi8(codes.v, offset)); }

template <WeightKind kKind>
void unpack_group(const TileGroup& to, int64_t b, const LinearCall& c, int64_t block, int64_t g) {
    constexpr int kStep = is_int8(kKind) ? 4 : 8;
    constexpr bool kTable = kKind == WeightKind::kTable4;
    const int64_t block_bytes = c.w.k * (64 / kStep), begin = g * c.w.group * (64 / kStep), at = block * c.groups + g;
    const int64_t ahead = begin + g_tuning.ahead < block_bytes ? 0 : (to.blocks - 1) * block_bytes;
    const char* w = c.w.codes + block * block_bytes + begin;
    const __m512i offset = _mm512_set1_epi8(static_cast<char>(is_int4(kKind) ? (c.w.mins ? 0 : 8) : 128));
    const U table = {kTable ? _mm512_sub_epi8(load_table(c.w.table).v, offset) : offset};
    char* codes = to.codes(b);
    for (int64_t i = 0; i < c.w.group / kStep; ++i, w += 64) {
        const U packed = load_u(w);
        prefetch(w + g_tuning.ahead + ahead);
        if constexpr (kTable) {
            store_u(codes + i * 128, look_up(table, low_nibbles(packed)));
            store_u(codes + i * 128 + 64, look_up(table, high_nibbles(packed)));
        } else if constexpr (is_int4(kKind)) {
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

// A group of 32 columns is a chunk of a super-block.
template <WeightKind kKind>
void unpack_super_group(const TileGroup& to, int64_t b, const LinearCall& c, int64_t block, int64_t g) {
    constexpr SuperForm kForm = super_form(kKind);
    const int64_t block_bytes = super_block_bytes(c, kForm), super = g / kForm.groups(), chunk = g % kForm.groups();
    const int64_t at = block * (c.w.k / kSuperColumns) + super, begin = super * kForm.bytes();
    const int64_t ahead = begin + g_tuning.ahead < block_bytes ? 0 : (to.blocks - 1) * block_bytes;
    const char* multiples = c.w.codes + block * block_bytes + begin;
    const char* from = multiples + kForm.multiples_bytes() + chunk * kForm.chunk_bytes();
    const __m512i offset = _mm512_set1_epi8(static_cast<char>(128));
    const U table = {kForm.table ? _mm512_sub_epi8(load_table(c.w.table).v, offset) : offset};
    char* codes = to.codes(b);
    for (int i = 0; i < kForm.bits; ++i) prefetch(from + i * 64 + g_tuning.ahead + ahead);
    unrolled<0, 8>([&](auto w) {
        const U word = super_word<kForm.bits, w>([&](int i) { return load_u(from + i * 64); });
        store_u(codes + w * 64, kForm.table ? look_up(table, word) : word);
    });
    const F unit = load_group(c, c.w.scales, at), least_unit = kForm.mins ? load_group(c, c.w.mins, at) : unit;
    const SuperScales scales = super_scales<kKind>(multiples, chunk, unit, least_unit);
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

template <Beside kBeside, int NB>
struct Flush {
    const int32_t* sums;
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

template <Beside kBeside, int NB>
QUIRE_INLINE Flush<kBeside, NB> flush_of(const LinearCall& c, const Waiting& s, int rows) {
    const int64_t first = s.row * c.groups + s.group;
    Flush<kBeside, NB> f{s.sums, s.acc, c.x_scales + first, c.x_start + first, c.x_sums + first, c.groups, rows, {}, {}, {}};
#pragma GCC unroll 4
    for (int b = 0; b < NB; ++b) {
        f.scale[b] = load(s.weights.scales(b));
        if constexpr (kBeside == Beside::kZeros) f.zero[b] = load_i(s.weights.beside(b));
        if constexpr (kBeside == Beside::kMins) f.least[b] = load(s.weights.beside(b));
    }
    return f;
}

// Rows kFrom .. kTo of a tile, as far as there are so many: acc += sum times the scales of weights and activations, and the
// minimums times the activations' sum.
template <bool kFull, int kFrom, int kTo, Beside kBeside, int NB>
QUIRE_INLINE void flush_rows(Flush<kBeside, NB>& f) {
#pragma GCC unroll 16
    for (int r = kFrom; r < kTo; ++r) {
        if (!kFull && r >= f.rows) return;
        const F xs = set1(*f.xs);
        f.xs += f.stride;
        I start = set1_i(0);
        F total = set1(0.0f);
        if constexpr (kBeside == Beside::kZeros) {
            start = set1_i(*f.starts);
            f.starts += f.stride;
        }
        if constexpr (kBeside == Beside::kMins) {
            total = set1(*f.totals);
            f.totals += f.stride;
        }
#pragma GCC unroll 4
        for (int b = 0; b < NB; ++b) {
            I sum = load_i(f.sums + b * kTileInts + r * 16);
            if constexpr (kBeside == Beside::kZeros) sum = add_i(sum, mul16(start, f.zero[b]));
            float* acc = f.acc + b * kTileInts + r * 16;
            F value = fma(to_f(sum), mul(f.scale[b], xs), load(acc));
            if constexpr (kBeside == Beside::kMins) value = fma(f.least[b], total, value);
            store(acc, value);
        }
    }
}

// Tiles 0 .. 3: sums of as many blocks; 4, 5: activations; 6, 7: weights. `w` holds [block][k / 4][16][4] of one group.
template <int kGroup, int NB, bool kFull, int kAt, Beside kBeside>
QUIRE_INLINE void dot_step(const char* w, Flush<kBeside, NB>& flush) {
    constexpr int kBytes = kGroup < 64 ? kGroup : 64, kSteps = kGroup / kBytes * NB, kBlock = kAt % NB, kPart = kAt / NB;
    tile_load<6 + kAt % 2>(w + kBlock * kGroup * 16 + kPart * kBytes * 16, 64);
    tile_dot_s8<kBlock, 4 + kPart, 6 + kAt % 2>();
    flush_rows<kFull, kAt * kSide / kSteps, (kAt + 1) * kSide / kSteps>(flush);
}

template <int kGroup, bool kFull, Beside kBeside, int NB, int... kAt>
QUIRE_INLINE void dot_group(const char* w, Flush<kBeside, NB>& flush, std::integer_sequence<int, kAt...>) {
    (dot_step<kGroup, NB, kFull, kAt>(w, flush), ...);
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
template <Beside kBeside, int kGroup, int NB, bool kFull>
void tile_blocks(const LinearCall& c, const Panel& p, UnpackGroup unpack, TileArea& area) {
    constexpr int kBytes = kGroup < 64 ? kGroup : 64;
    const int rows = p.rows_end - p.row < kSide ? static_cast<int>(p.rows_end - p.row) : kSide;
    const std::make_integer_sequence<int, NB> blocks;
    for (int64_t top = p.row; top < p.rows_end; top += kTall * kSide) {
        const int64_t left = (p.rows_end - top + kSide - 1) / kSide;
        const int tall = static_cast<int>(left < kTall ? left : kTall);
        std::memset(area.acc, 0, static_cast<size_t>(tall) * sizeof(area.acc[0]));
        Waiting waiting{area.sums[1], area.acc[kTall], p.row, 0, {p.work, kGroup * 16, NB}};
        int turn = 0;
        for (int64_t g = 0; g < c.groups; ++g) {
            const TileGroup weights{p.work + g * tile_group_bytes(kGroup, NB), kGroup * 16, NB};
            if (top == p.row)
                for (int b = 0; b < NB; ++b) unpack(weights, b, c, p.block + b, g);
            for (int t = 0; t < tall; ++t, turn ^= 1) {
                const int64_t row = tile_row(p, top, t, rows);
                const char* x = c.x + row * c.x_stride + g * kGroup;
                auto flush = flush_of<kBeside, NB>(c, waiting, rows);
                zero_sums(blocks);
                tile_load<4>(x, c.x_stride);
                if constexpr (kGroup > kBytes) tile_load<5>(x + kBytes, c.x_stride);
                dot_group<kGroup, kFull>(weights.at, flush, std::make_integer_sequence<int, kGroup / kBytes * NB>{});
                store_sums(area.sums[turn], blocks);
                waiting = {area.sums[turn], area.acc[t], row, g, weights};
            }
        }
        auto flush = flush_of<kBeside, NB>(c, waiting, rows);
        flush_rows<kFull, 0, kSide>(flush);
        for (int t = 0; t < tall; ++t) store_tiles<NB>(c, p, area.acc[t], tile_row(p, top, t, rows), rows);
    }
}

// Memory that a panel needs: the unpacked weights of some blocks.
QUIRE_INLINE int64_t tile_panel_bytes(const LinearCall& c) { return c.groups * tile_group_bytes(c.w.group, kWide); }

template <Beside kBeside, int kGroup>
void tile_panel(const LinearCall& c, Panel p, UnpackGroup unpack) {
    constexpr int kBytes = kGroup < 64 ? kGroup : 64;
    TileArea area;
    std::memset(&area, 0, sizeof area);
    const bool full = p.rows_end - p.row >= kSide;
    const int rows = full ? kSide : static_cast<int>(p.rows_end - p.row);
    TileShapes shapes;
    for (int i = 0; i < 4; ++i) shapes.set(i, rows, 64);
    for (int i = 4; i < 6; ++i) shapes.set(i, rows, kBytes);
    for (int i = 6; i < 8; ++i) shapes.set(i, kBytes / 4, 64);
    const TileScope scope(shapes);
    for (; p.block + kWide <= p.blocks_end; p.block += kWide) {
        if (full) tile_blocks<kBeside, kGroup, kWide, true>(c, p, unpack, area);
        else tile_blocks<kBeside, kGroup, kWide, false>(c, p, unpack, area);
    }
    for (; p.block < p.blocks_end; ++p.block) tile_blocks<kBeside, kGroup, 1, false>(c, p, unpack, area);
}

// Weights that tiles can serve: integers of one digit, in groups of 32 or more. With groups of 16 a product takes a tile as long as
// with 64, its time being that of the rows of activations, and so do its stores and floats: some 85 cycles for 16 rows by 16
// columns (a third of 28 % of the peak, as measured of groups of 32); vectors need 32 for the products, about as many for the floats.
consteval bool has_tiles(WeightKind kind) {
    if (is_super(kind)) return super_form(kind).group >= 32;
    return kind == WeightKind::kInt8 || kind == WeightKind::kInt4 || kind == WeightKind::kTable4;
}

// Whether tiles serve these weights and so many rows.
template <WeightKind kKind>
QUIRE_INLINE bool tiles_serve(const LinearCall& c, int64_t rows) {
    return has_tiles(kKind) && rows >= g_tuning.tile_rows && c.w.group >= 32;
}

template <Beside kBeside>
void tile_panel_of(const LinearCall& c, const Panel& p, UnpackGroup unpack) {
    if (c.w.group == 32) return tile_panel<kBeside, 32>(c, p, unpack);
    if (c.w.group == 64) return tile_panel<kBeside, 64>(c, p, unpack);
    tile_panel<kBeside, 128>(c, p, unpack);
}

template <WeightKind kKind>
void run_tile_panel(const LinearCall& c, const Panel& p) {
    if constexpr (is_super(kKind)) {
        constexpr Beside kBeside = super_form(kKind).mins ? Beside::kMins : Beside::kNothing;
        return tile_panel<kBeside, 32>(c, p, &unpack_super_group<kKind>);
    } else {
        if (p.rows_end - p.row <= kSide && c.w.group >= kFewGroup && !c.w.mins) return few_panel_of<kKind>(c, p);
        if (c.w.mins) return tile_panel_of<Beside::kMins>(c, p, &unpack_group<kKind>);
        if (c.w.zeros) return tile_panel_of<Beside::kZeros>(c, p, &unpack_group<kKind>);
        tile_panel_of<Beside::kNothing>(c, p, &unpack_group<kKind>);
    }
}

// All rows and column blocks, in panels of about equal height.
template <WeightKind kKind>
void run_tile_linear(const LinearCall& c, int64_t m) {
    const int64_t most = kTilePanelBytes / c.x_stride < kSide ? 1 : kTilePanelBytes / c.x_stride / kSide;
    const int64_t tiles = (m + kSide - 1) / kSide, panels = (tiles + most - 1) / most;
    const int64_t height = (tiles + panels - 1) / panels * kSide;
    const int64_t blocks = (c.w.n + 15) / 16, columns = (blocks + kWide - 1) / kWide;
    const Work work(tile_panel_bytes(c));
    parallel_for((m + height - 1) / height * columns, [&](int64_t index, int thread) {
        const int64_t row = index / columns * height, block = index % columns * kWide;
        const int64_t blocks_end = block + kWide < blocks ? block + kWide : blocks;
        run_tile_panel<kKind>(c, {row, row + height < m ? row + height : m, block, blocks_end, work.of(thread)});
    });
}
