// Integer weights through tile registers, for many rows .
//
// A product of tiles adds up a group of 16 rows by 16 columns exactly; its integers go through memory into floats with the
// operations and the order of int_tile, so the results are those of the other units bit for bit. Weights are unpacked once
// per panel to signed bytes, in the layout that a tile of the second operand has anyway. The sums of one row of tiles are
// turned into floats between the products of the next.
#pragma once

constexpr int kWide = 4;    // column blocks that share a tile of activations
constexpr int kTall = 4;    // row tiles whose floats stay in the first-level cache beside the weights of a group
// Activations of a panel; every processor with AMX so far has 2 MiB of second-level cache a core.
constexpr int64_t kTilePanelBytes = 1280 << 10;

struct alignas(64) TileArea {
    int32_t sums[2][kWide * kTileInts];
    float acc[kTall + 1][kWide * kTileInts];  // the last takes what the first flush of a panel makes of no sums
};

template <WeightKind kKind, int NB>
QUIRE_INLINE void unpack_group(int8_t* to, const LinearCall& c, int64_t block, int64_t g) {
    constexpr int kStep = is_int4(kKind) ? 8 : 4;
    const char* w = c.w.codes + (block * c.w.k + g * c.w.group) * (64 / kStep);
    const __m512i offset = _mm512_set1_epi8(static_cast<char>(is_int4(kKind) ? 8 : 128));
    const int64_t ahead = place_ahead<NB>(g * c.w.group * (64 / kStep), c.w.k * (64 / kStep), g_tuning.ahead);
    for (int64_t i = 0; i < c.w.group / kStep; ++i, w += 64) {
        const U packed = load_u(w);
        prefetch(w + ahead);
        if constexpr (is_int4(kKind)) {
            _mm512_store_si512(to + i * 128, _mm512_sub_epi8(low_nibbles(packed).v, offset));
            _mm512_store_si512(to + i * 128 + 64, _mm512_sub_epi8(high_nibbles(packed).v, offset));
        } else {
            _mm512_store_si512(to + i * 64, _mm512_sub_epi8(packed.v, offset));
        }
    }
}

// Integer sums of a row of tiles on their way into floats.
struct Waiting {
    const int32_t* sums;
    float* acc;
    int64_t row, block, group;
};

template <bool kZeros, int NB>
struct Flush {
    const int32_t* sums;
    float* acc;
    const float* xs;
    const int32_t* starts;
    int64_t stride;
    int rows;
    F scale[NB];
    I zero[NB];
};

template <bool kZeros, int NB>
QUIRE_INLINE Flush<kZeros, NB> flush_of(const LinearCall& c, const Waiting& s, int rows) {
    const int64_t first = s.row * c.groups + s.group;
    Flush<kZeros, NB> f{s.sums, s.acc, c.x_scales + first, c.x_start + first, c.groups, rows, {}, {}};
#pragma GCC unroll 4
    for (int b = 0; b < NB; ++b) {
        const int64_t at = (s.block + b) * c.groups + s.group;
        f.scale[b] = load_group(c, c.w.scales, at);
        if constexpr (kZeros) f.zero[b] = load_i8(c.w.zeros + at * 16);
    }
    return f;
}

// Rows kFrom .. kTo of a tile, as far as there are so many: acc += sum times the scales of weights and activations.
template <bool kFull, int kFrom, int kTo, bool kZeros, int NB>
QUIRE_INLINE void flush_rows(Flush<kZeros, NB>& f) {
#pragma GCC unroll 16
    for (int r = kFrom; r < kTo; ++r) {
        if (!kFull && r >= f.rows) return;
        const F xs = set1(*f.xs);
        f.xs += f.stride;
        I start = set1_i(0);
        if constexpr (kZeros) {
            start = set1_i(*f.starts);
            f.starts += f.stride;
        }
#pragma GCC unroll 4
        for (int b = 0; b < NB; ++b) {
            I sum = load_i(f.sums + b * kTileInts + r * 16);
            if constexpr (kZeros) sum = add_i(sum, mul16(start, f.zero[b]));
            float* acc = f.acc + b * kTileInts + r * 16;
            store(acc, fma(to_f(sum), mul(f.scale[b], xs), load(acc)));
        }
    }
}

// Tiles 0 .. 3: sums of as many blocks; 4, 5: activations; 6, 7: weights. `w` holds [block][k / 4][16][4] of one group.
template <int kGroup, int NB, bool kFull, int kAt, bool kZeros>
QUIRE_INLINE void dot_step(const int8_t* w, Flush<kZeros, NB>& flush) {
    constexpr int kBytes = kGroup < 64 ? kGroup : 64, kSteps = kGroup / kBytes * NB, kBlock = kAt % NB, kPart = kAt / NB;
    tile_load<6 + kAt % 2>(w + kBlock * kGroup * 16 + kPart * kBytes * 16, 64);
    tile_dot_s8<kBlock, 4 + kPart, 6 + kAt % 2>();
    flush_rows<kFull, kAt * kSide / kSteps, (kAt + 1) * kSide / kSteps>(flush);
}

template <int kGroup, bool kFull, bool kZeros, int NB, int... kAt>
QUIRE_INLINE void dot_group(const int8_t* w, Flush<kZeros, NB>& flush, std::integer_sequence<int, kAt...>) {
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
template <WeightKind kKind, bool kZeros, int kGroup, int NB, bool kFull>
void tile_blocks(const LinearCall& c, const Panel& p, int8_t* weights, TileArea& area) {
    constexpr int kBytes = kGroup < 64 ? kGroup : 64;
    const int rows = p.rows_end - p.row < kSide ? static_cast<int>(p.rows_end - p.row) : kSide;
    const std::make_integer_sequence<int, NB> blocks;
    for (int64_t top = p.row; top < p.rows_end; top += kTall * kSide) {
        const int64_t left = (p.rows_end - top + kSide - 1) / kSide;
        const int tall = static_cast<int>(left < kTall ? left : kTall);
        std::memset(area.acc, 0, static_cast<size_t>(tall) * sizeof(area.acc[0]));
        Waiting waiting{area.sums[1], area.acc[kTall], p.row, p.block, 0};
        int turn = 0;
        for (int64_t g = 0; g < c.groups; ++g) {
            int8_t* w = weights + g * kGroup * 16 * NB;
            if (top == p.row)
                for (int b = 0; b < NB; ++b) unpack_group<kKind, NB>(w + b * kGroup * 16, c, p.block + b, g);
            for (int t = 0; t < tall; ++t, turn ^= 1) {
                const int64_t row = tile_row(p, top, t, rows);
                const char* x = c.x + row * c.x_stride + g * kGroup;
                auto flush = flush_of<kZeros, NB>(c, waiting, rows);
                zero_sums(blocks);
                tile_load<4>(x, c.x_stride);
                if constexpr (kGroup > kBytes) tile_load<5>(x + kBytes, c.x_stride);
                dot_group<kGroup, kFull>(w, flush, std::make_integer_sequence<int, kGroup / kBytes * NB>{});
                store_sums(area.sums[turn], blocks);
                waiting = {area.sums[turn], area.acc[t], row, p.block, g};
            }
        }
        auto flush = flush_of<kZeros, NB>(c, waiting, rows);
        flush_rows<kFull, 0, kSide>(flush);
        for (int t = 0; t < tall; ++t) store_tiles<NB>(c, p, area.acc[t], tile_row(p, top, t, rows), rows);
    }
}

// Memory that a panel needs: the unpacked weights of some blocks.
QUIRE_INLINE int64_t tile_panel_bytes(const LinearCall& c) { return kWide * c.w.k * 16; }

template <WeightKind kKind, bool kZeros, int kGroup>
void tile_panel(const LinearCall& c, Panel p) {
    if constexpr (kGroup >= kFewGroup)
        if (p.rows_end - p.row <= kSide) return few_panel<kKind, kZeros, kGroup>(c, p);
    constexpr int kBytes = kGroup < 64 ? kGroup : 64;
    TileArea area;
    std::memset(&area, 0, sizeof area);
    auto* weights = reinterpret_cast<int8_t*>(p.work);
    const bool full = p.rows_end - p.row >= kSide;
    const int rows = full ? kSide : static_cast<int>(p.rows_end - p.row);
    TileShapes shapes;
    for (int i = 0; i < 4; ++i) shapes.set(i, rows, 64);
    for (int i = 4; i < 6; ++i) shapes.set(i, rows, kBytes);
    for (int i = 6; i < 8; ++i) shapes.set(i, kBytes / 4, 64);
    const TileScope scope(shapes);
    for (; p.block + kWide <= p.blocks_end; p.block += kWide) {
        if (full) tile_blocks<kKind, kZeros, kGroup, kWide, true>(c, p, weights, area);
        else tile_blocks<kKind, kZeros, kGroup, kWide, false>(c, p, weights, area);
    }
    for (; p.block < p.blocks_end; ++p.block) tile_blocks<kKind, kZeros, kGroup, 1, false>(c, p, weights, area);
}

// Whether tiles serve these weights and so many rows.
template <WeightKind kKind>
QUIRE_INLINE bool tiles_serve(const LinearCall& c, int64_t rows) {
    return (kKind == WeightKind::kInt8 || kKind == WeightKind::kInt4) && rows >= g_tuning.tile_rows && c.w.group >= 32 && !c.w.mins;
}

template <WeightKind kKind, bool kZeros>
void tile_panel_of(const LinearCall& c, const Panel& p) {
    if (c.w.group == 32) return tile_panel<kKind, kZeros, 32>(c, p);
    if (c.w.group == 64) return tile_panel<kKind, kZeros, 64>(c, p);
    tile_panel<kKind, kZeros, 128>(c, p);
}

template <WeightKind kKind>
void run_tile_panel(const LinearCall& c, const Panel& p) {
    if (c.w.zeros) return tile_panel_of<kKind, true>(c, p);
    tile_panel_of<kKind, false>(c, p);
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
