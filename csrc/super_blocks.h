// Matrices in super-blocks: 256 columns of a row share a float16 unit, of which their groups' scales (and minimums) are small
// whole multiples. The layout, for packing (pack_super_blocks.cpp), the kernels (units/linear_super_blocks.h) and rows of a table (units/look_up.h).
//
// A block of 16 rows holds, for each super-block,
//   [256 / group][16] int8   the groups' multiples, 8 bits each; with minimums of 4 bits, both in one byte (minimum in the high half)
//   [256 / group][16] int8   those of the minimums, where they are bytes of their own
//   [8][bits][16][4]         codes of 32 columns: eight words of four (word w: columns 4 w .. 4 w + 3, a byte each) of every row,
//                            in planes of four bytes a row, by bits:
//     4, 5, 6  plane i < 4: word 2 i in the low halves, word 2 i + 1 in the high ones (of 4 bits, or the lower 4)
//     5        plane 4: bit 4 of word w at bit w
//     6        planes 4, 5: bits 4 and 5 of word w at bit 2 (w % 4) of plane 4 + w / 4
//     3        plane i: word 2 i at bit 0, word 2 i + 1 at bit 3; the lower 2 bits of words 6 and 7 at bit 6 of planes 0 and 1,
//              their bit 2 at bits 6 and 7 of plane 2
//     2        plane i: word 4 i + j at bit 2 j
// All of it is one stream; units f16 [n / 16][k / 256][16] lie apart.
#pragma once

#include <cstdint>

#include "matrix.h"

namespace quire {

constexpr int64_t kSuperColumns = 256;

// What a kind's row of kinds.inc comes to.
struct SuperForm {
    int bits;
    int group;    // columns
    int offset;   // what codes lie above their numbers
    bool mins;
    bool paired;  // multiples of scale and minimum share a byte
    bool table;   // codes stand for the numbers of a table
    constexpr int64_t groups() const { return kSuperColumns / group; }
    constexpr int64_t multiples_bytes() const { return groups() * 16 * (mins && !paired ? 2 : 1); }
    constexpr int64_t chunk_bytes() const { return bits * 64; }  // of 32 columns
    constexpr int64_t bytes() const { return multiples_bytes() + kSuperColumns / 32 * chunk_bytes(); }
};

consteval bool is_super(Kind kind) { return kKindFacts[static_cast<int64_t>(kind)].multiples > 0; }

consteval SuperForm super_form(Kind kind) {
    const KindFacts& facts = kKindFacts[static_cast<int64_t>(kind)];
    const bool mins = facts.mins == Has::kMust, table = facts.table == Has::kMust;
    return {facts.bits, facts.least_group, table ? 0 : facts.offset, mins, mins && facts.multiples == 8, table};
}

}  // namespace quire
