// Packed matrices without their zeros (kinds "sparse_..."). Blocks of 16 rows as in pack.cpp, each `code_step` bytes, and in them
// chunks of 32 columns, one right behind the other:
//   [64 B]  a bit for each of the 512 numbers, in the order of the dense layout (of 4 bits: the low halves of 64 bytes, then their
//           high halves); a zero has none. -0, which masks make of negative
//           numbers, is one: sums begin at +0, which neither changes
//   [...]   the numbers that have one, in that order: bf16, or int8 and int4 codes without an offset. Codes of 4 bits: those that 64
//           bits choose for the low halves of a dense register lie in the low halves of bytes, those of its high halves in the high
//           ones, and the next register's begin behind the longer row. Two of four columns: both are of one length; half of all
//           numbers at random: 7 % more bytes, for which a register is unpacked in fewer instructions (with two neighbours
//           in a byte a half took 1.25 instead of 0.88 ns on Zen 4)
// The longest block decides `code_step`; readers may read 64 bytes past what they need.
//
// Two of each four columns at most (kinds "sparse24_..."): blocks of chunks of one size, whose numbers say where they belong instead:
//   [64 B]  integers: byte 4 * row + j has of each of the chunk's four pieces of 8 columns, the first in the low bits, two bits: the place
//           of number j among four columns, the piece's first four for j of 0 and 1, its last four for 2 and 3. bf16: half 2 * row + j
//           likewise of each of the chunk's eight pieces of 4 columns
//   [...]   the numbers, 4 * row + j of a piece: int8 codes without an offset, piece after piece, or int4 codes, a piece in the low halves of
//           64 bytes, the next in the high ones; bf16: 2 * row + j of a piece, of which j = 1 is the one that the dense kind adds first
// A row that has fewer has zeros at places that nothing else takes.
#pragma once

#include <cstdint>

namespace quire {

constexpr int64_t kSparseColumns = 32, kSparseMasks = 64, kSparseSlack = 64;
constexpr int64_t kPositions = 64;  // bytes of positions of a chunk

// Whether the processor expands bytes by a mask in one instruction (AVX-512 VBMI2), which no unit's flags say.
extern const bool g_expands;

}  // namespace quire
