// out [m, n] = x [m, k] times packed weights [n, k], plus bias.
//
// Every output element is one chain of sums in ascending k (integer weights: exact sums within a group, groups ascending),
// whatever the tile it was computed in, so a row does not depend on the batch. Activations are rounded or quantized once
// per call. A task is a few column blocks times a panel of rows that stays in the second-level cache; neighbouring tasks have
// the blocks in common, so that weights are read from memory once (with low panels in common: 5 % slower at 512 rows, Zen 5).
#pragma once

// A panel in tiles of up to R rows by NB blocks, one group of blocks after the other.
template <WeightKind kKind, int R, int NB, bool kAlone>
void run_panel(const LinearCall& c, int64_t m, Panel p) {
#if defined(QUIRE_AMX)
    if constexpr (has_tiles(kKind))
        if (tiles_serve<kKind>(c, p.rows_end - p.row)) return run_tile_panel<kKind>(c, p);
#endif
    if constexpr (kKind == WeightKind::kBf12) return bf12_panel<R, NB, kAlone>(c, p);
    if constexpr (is_sparse(kKind) && !chooses(kKind)) return sparse_panel<kKind, R, NB, kAlone>(c, p);
    if constexpr (is_super(kKind)) return super_panel<kKind, R, NB, kAlone>(c, p);
    constexpr int kAbreast = rows_abreast<kKind, R, kAlone>();
    const int64_t steps = is_bf16(kKind) ? (c.w.k + 1) / 2 : c.w.k, part_steps = steps_of_part<kKind, R, NB>(c, m);
    const int64_t tiles = (p.rows_end - p.row + R - 1) / R, tile_floats = R * NB * 16;
    auto* sums = reinterpret_cast<float*>(p.work);
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
            if constexpr (super_form(kKind).group == 32)
                if (m <= kStreamRows) return f.template operator()<kStreamRows, 1, true>();
        }
        return f.template operator()<kTileRows, kTileBlocks, false>();
    }
    constexpr int kDigits = digits_of(kKind), kPlanes = planes_of(kKind);
    constexpr int kFew = (kFewBlocks + kPlanes - 1) / kPlanes, kMost = (kTileBlocks + kPlanes - 1) / kPlanes;
    if (m == 1 && (g_tuning.row_streams == 1 || kKind == WeightKind::kBf12))
        return f.template operator()<1, is_bf16(kKind) ? kRowBlocks : widens(kKind) ? kWidenedBlocks : 1, true>();
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
        if (m > kSomeRows && !chooses(kKind)) return f.template operator()<kManyRows, kManyBlocks, false>();
    f.template operator()<kTileRows / kDigits, kMost, false>();
}

// How many of m rows lie side by side for these weights.
template <WeightKind kKind>
int64_t abreast_of(int64_t m) {
    int64_t rows = 1;
    with_tile<kKind>(m, [&]<int R, int, bool kAlone>() { rows = rows_abreast<kKind, R, kAlone>(); });
    return rows;
}

// Memory that a panel of up to `rows` rows and `blocks` column blocks needs.
template <WeightKind kKind, int R, int NB>
int64_t panel_bytes(const LinearCall& c, int64_t m, int64_t rows, int64_t blocks) {
#if defined(QUIRE_AMX)
    if constexpr (kKind == WeightKind::kBf16) return amx_panel_bytes(rows, blocks);
    if constexpr (has_tiles(kKind))
        if (tiles_serve<kKind>(c, rows)) return tile_panel_bytes<kKind>(c) + (is_super(kKind) ? super_panel_bytes<NB>(rows) : 0);
#endif
    (void)blocks;
    if constexpr (kKind == WeightKind::kBf12) return bf12_panel_bytes<R, NB>(rows);
    if constexpr (is_sparse(kKind) && !chooses(kKind)) return sparse_panel_bytes<kKind, R, NB>(c, rows);
    if constexpr (is_super(kKind)) return super_panel_bytes<NB>(rows);
    const int64_t steps = is_bf16(kKind) ? (c.w.k + 1) / 2 : c.w.k;
    return steps_of_part<kKind, R, NB>(c, m) < steps ? (rows + R - 1) / R * R * NB * 64 : 0;
}

// Some columns of a panel of the m rows that `c` has, by the fastest tiles of this unit.
template <WeightKind kKind>
void panel_of(const LinearCall& c, int64_t m, const Panel& p) {
#if defined(QUIRE_AMX)
    if constexpr (kKind == WeightKind::kBf16) return amx_bf16_panel(c, p);
#endif
    with_tile<kKind>(m, [&]<int R, int NB, bool kAlone>() { run_panel<kKind, R, NB, kAlone>(c, m, p); });
}

// Memory that such panels need.
template <WeightKind kKind>
int64_t bytes_of_panel(const LinearCall& c, int64_t m, int64_t rows, int64_t blocks) {
    int64_t bytes = 0;
    with_tile<kKind>(m, [&]<int R, int NB, bool>() { bytes = panel_bytes<kKind, R, NB>(c, m, rows, blocks); });
    return bytes;
}

// All rows and column blocks; a panel of rows that stays in the second-level cache and one group of blocks per task.
template <WeightKind kKind>
void run_linear(const LinearCall& call, int64_t m) {
    const LinearCall c = with_large_output(call, m);
#if defined(QUIRE_AMX)
    if constexpr (kKind == WeightKind::kBf16) return amx_bf16(c, m);
    if constexpr (has_tiles(kKind))
        if (tiles_serve<kKind>(c, m)) return run_tile_linear<kKind>(c, m);
#endif
    with_tile<kKind>(m, [&]<int R, int NB, bool kAlone>() {
        const int64_t blocks = (c.w.n + 15) / 16, column_groups = (blocks + NB - 1) / NB;
        int64_t panel = kPanelBytes / (is_float(kKind) ? steps_of_part<kKind, R, NB>(c, m) * 4 : c.x_stride) / R * R;
        if (panel < R) panel = R;
        int64_t panels = (m + panel - 1) / panel;
        panel = ((m + panels - 1) / panels + R - 1) / R * R;
        panels = (m + panel - 1) / panel;
        const Work work(panel_bytes<kKind, R, NB>(c, m, panel, NB));
        parallel_for(panels * column_groups, [&](int64_t index, int thread) {
            const int64_t row = index % panels * panel, block = index / panels * NB;
            run_panel<kKind, R, NB, kAlone>(
                c, m, {row, row + panel < m ? row + panel : m, block, block + NB < blocks ? block + NB : blocks, work.of(thread)});
        });
    });
}
