// A panel of rows and column blocks in tiles, for weights that tiles read as they are packed.
#pragma once

#include "linear_tiles.h"

namespace quire::QUIRE_UNIT {
namespace {

// How float weights walk their k axis: in parts where there are more rows than one tile, because a group of blocks of the whole k
// would not stay cached.
template <int R>
QUIRE_INLINE int64_t part_of_steps(int64_t steps, int64_t m) { return m > R && steps > kPartSteps ? kPartSteps : steps; }

// One group of NB blocks after the other, each in parts of the k axis, and in a part all tiles of R rows.
//
// Of a family W: steps(w), the steps that its k axis has; part_steps<R, NB>(c, m), those of a part; read<R, NB, kStream>(part, c, block),
// what a part must know before its tiles; tile<NB, R, kStream>(c, rows, row, block, part), the tile of `rows` <= R rows.
template <class W, int R, int NB, bool kStream>
void tiled_panel(const LinearCall& c, int64_t m, const Panel& p) {
    const int64_t steps = W::steps(c.w), part_steps = W::template part_steps<R, NB>(c, m);
    const int64_t tiles = (p.rows_end - p.row + R - 1) / R, tile_floats = R * NB * 16;
    auto* sums = reinterpret_cast<float*>(p.work);
    for (int64_t block = p.block; block < p.blocks_end; block += NB) {
        for (int64_t begin = 0; begin < steps; begin += part_steps) {
            const int64_t end = begin + part_steps < steps ? begin + part_steps : steps;
            for (int64_t t = 0; t < tiles; ++t) {
                const int64_t row = p.row + t * R, rows = p.rows_end - row < R ? p.rows_end - row : R;
                Part part{begin, end, end == steps, sums, t * tile_floats, t, tiles};
                W::template read<R, NB, kStream>(part, c, block);
                for_tile_blocks<NB>(block, p.blocks_end, part, [&](int64_t b, const Part& at) { W::template tile<NB, R, kStream>(c, rows, row, b, at); });
            }
        }
    }
}

// Memory for the sums of all tiles of a panel, which wait from one part of the k axis to the next.
template <class W, int R, int NB>
QUIRE_INLINE int64_t tiled_panel_bytes(const LinearCall& c, int64_t m, int64_t rows) {
    return W::template part_steps<R, NB>(c, m) < W::steps(c.w) ? (rows + R - 1) / R * R * NB * 64 : 0;
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
