// out [m, n] = x [m, k] times packed weights [n, k], plus bias.
//
// Every output element is one chain of sums in ascending k (integer weights: exact sums within a group, groups ascending),
// whatever the tile it was computed in, so a row does not depend on the batch. Activations are rounded or quantized once
// per call. A task is a few column blocks times a panel of rows that stays in the second-level cache; neighbouring tasks have
// the blocks in common, so that weights are read from memory once (with low panels in common: 5 % slower at 512 rows, Zen 5).
#pragma once

#include "kind.h"
#include "linear_tiles.h"

#if defined(QUIRE_AMX)
#include "linear_amx.h"
#endif

namespace quire::QUIRE_UNIT {
namespace {

// The kernels of a family W, a struct that says what its matrices differ in:
//   with_tile(m, f)              calls f.operator()<R, NB, kStream>() with the tile for m rows: its rows, column blocks, and whether it
//                                takes all rows and streams the weights
//   interleaved<R, kStream>()    rows of activations that lie interleaved for that tile, 1: one below the other
//   part_steps<R, NB>(c, m)      steps of the k axis that are walked at a time
//   row_bytes(c, part_steps)     bytes of a row of activations in a cache meanwhile
//   panel<R, NB, kStream>(c, m, p)        a panel in such tiles
//   panel_bytes<R, NB>(c, m, rows)        memory of a panel of so many rows
//   decode_row(w, row, out)      a row's numbers
//   kWidens                      rows share what was widened for them
//   kTileRegisters               whether tile registers serve it, where a unit has some (linear_amx.h): products of kDigits by kPlanes
//                                digits, from kBits, kColumns, kTable and kOffset of a family of integers, or kForm of super-blocks
//   kRoom                        rows of activations are as many as a multiple of it
//   kWideScales                  scales must be f32
// A family whose panels are made by tiled_panel says steps, read and tile, too (linear_panel.h).

// Whether tile registers serve so many rows.
template <class W>
QUIRE_INLINE bool in_tile_registers(int64_t rows) {
#if defined(QUIRE_AMX)
    return W::kTileRegisters && rows >= g_tuning.tile_rows;
#else
    return (void)rows, false;
#endif
}

// How many of m rows lie interleaved.
template <class W>
int64_t interleaved_of(int64_t m) {
    int64_t rows = 1;
    W::with_tile(m, [&]<int R, int, bool kStream>() { rows = W::template interleaved<R, kStream>(); });
    return rows;
}

template <class W, int R, int NB, bool kStream>
void run_panel(const LinearCall& c, int64_t m, const Panel& p) {
#if defined(QUIRE_AMX)
    if constexpr (W::kTileRegisters)
        if (in_tile_registers<W>(p.rows_end - p.row)) return run_tile_panel<W>(c, p);
#endif
    W::template panel<R, NB, kStream>(c, m, p);
}

// Memory that a panel of up to `rows` rows and `blocks` column blocks needs.
template <class W, int R, int NB>
int64_t panel_bytes(const LinearCall& c, int64_t m, int64_t rows) {
    int64_t bytes = W::template panel_bytes<R, NB>(c, m, rows);
#if defined(QUIRE_AMX)
    if constexpr (W::kTileRegisters)
        if (in_tile_registers<W>(rows)) bytes += tile_panel_bytes<W>(c);
#endif
    return bytes;
}

// Some columns of a panel of the m rows that `c` has, by the fastest tiles of this unit.
template <class W>
void panel_of(const LinearCall& c, int64_t m, const Panel& p) {
    W::with_tile(m, [&]<int R, int NB, bool kStream>() { run_panel<W, R, NB, kStream>(c, m, p); });
}

// Memory that such panels need.
template <class W>
int64_t bytes_of_panel(const LinearCall& c, int64_t m, int64_t rows, int64_t /*blocks*/) {
    int64_t bytes = 0;
    W::with_tile(m, [&]<int R, int NB, bool>() { bytes = panel_bytes<W, R, NB>(c, m, rows); });
    return bytes;
}

// All rows and column blocks; a panel of rows that stays in the second-level cache and one group of blocks per task.
template <class W>
void run_linear(const LinearCall& call, int64_t m) {
    const LinearCall c = with_large_output(call, m);
#if defined(QUIRE_AMX)
    if constexpr (W::kTileRegisters)
        if (in_tile_registers<W>(m)) return run_tile_linear<W>(c, m);
#endif
    W::with_tile(m, [&]<int R, int NB, bool kStream>() {
        const int64_t blocks = (c.w.n + 15) / 16, column_groups = (blocks + NB - 1) / NB;
        int64_t panel = kPanelBytes / W::row_bytes(c, W::template part_steps<R, NB>(c, m)) / R * R;
        if (panel < R) panel = R;
        int64_t panels = (m + panel - 1) / panel;
        panel = ((m + panels - 1) / panels + R - 1) / R * R;
        panels = (m + panel - 1) / panel;
        const Work work(panel_bytes<W, R, NB>(c, m, panel));
        parallel_for(panels * column_groups, [&](int64_t index, int thread) {
            const int64_t row = index % panels * panel, block = index / panels * NB;
            run_panel<W, R, NB, kStream>(c, m, {row, row + panel < m ? row + panel : m, block, block + NB < blocks ? block + NB : blocks, work.of(thread)});
        });
    });
}

template <class W>
constexpr Kernels kernels() {
    return {&run_linear<W>, &interleaved_of<W>, &panel_of<W>, &bytes_of_panel<W>, W::kWidens ? 2 * kMlpRows : kMlpRows};
}

// The tile that products of m rows have.
template <class W>
Tile tile_for(int64_t m) {
    Tile tile = nullptr;
    W::with_tile(m, [&]<int R, int NB, bool kStream>() { tile = &W::template tile<NB, R, kStream>; });
    return tile;
}

// Of a kind: the kernels for activations of one digit and of two, and for a table of numbers of two.
template <class W, class... Others>
constexpr KernelSet kernel_set() {
    KernelSet set{&W::decode_row, W::kRoom, W::kWideScales, {{kernels<W>(), {}}, {{}, {}}}};
    ((set.kernels[Others::kPlanes - 1][Others::kDigits - 1] = kernels<Others>()), ...);
    return set;
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
