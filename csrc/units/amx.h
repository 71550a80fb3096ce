// Tile registers (AMX): eight of up to 16 rows by 64 bytes, and one instruction that adds the product of two to a third.
// Shapes are set by a configuration that belongs to the thread.
#pragma once

#include "unit.h"

namespace quire::QUIRE_UNIT {
namespace {

// Rows and bytes per row of each tile register; palette 1 of the architecture, 64 bytes in its order.
struct alignas(64) TileShapes {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int tile_rows, int bytes) {
        rows[tile] = static_cast<uint8_t>(tile_rows);
        row_bytes[tile] = static_cast<uint16_t>(bytes);
    }
};
static_assert(sizeof(TileShapes) == 64);

// Sets the shapes of this thread's tiles for the lifetime of the object, which must end on the same thread within one task of
// a parallel region: released tiles keep context switches cheap (8 KiB less state). Tiles hold zeros at the start.
class TileScope {
   public:
    explicit TileScope(const TileShapes& shapes) {
        // GCC 12's intrinsic does not say that it reads all 64 bytes: without this their stores are dropped.
        asm volatile("" : : "r"(&shapes) : "memory");
        _tile_loadconfig(&shapes);
    }
    ~TileScope() { _tile_release(); }
    TileScope(const TileScope&) = delete;
    TileScope& operator=(const TileScope&) = delete;
};

// The instructions with the numbers of the tiles as template arguments (compilers' intrinsics take literals only).
template <int kTile>
QUIRE_INLINE void tile_zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
template <int kTile>
QUIRE_INLINE void tile_load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(from), "r"(stride) : "memory");
}
template <int kTile>
QUIRE_INLINE void tile_store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(kTile), "r"(to), "r"(stride) : "memory");
}
// sum += a times b, a of signed bytes [rows][k], b of signed bytes [k / 4][columns][4].
template <int kSum, int kA, int kB>
QUIRE_INLINE void tile_dot_s8() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kA), "i"(kB));
}
// The same with unsigned bytes in b.
template <int kSum, int kA, int kB>
QUIRE_INLINE void tile_dot_su8() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kA), "i"(kB));
}
// sum += a times b, a of bf16 [rows][k], b of bf16 [k / 2][columns][2].
template <int kSum, int kA, int kB>
QUIRE_INLINE void tile_dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kA), "i"(kB));
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
