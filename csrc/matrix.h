// A packed matrix [n, k] as every op gets it: the address of this struct, which Python fills in once and keeps where it lies
// (class CpuMatrix of src/quire/ops/cpu/matrix.py, the same fields in the same order). Layouts: pack.cpp, pack_bf12.cpp,
// super_blocks.h, sparse.h.
#pragma once

#include <cstdint>

namespace quire {

enum class Kind : int64_t {
#define KIND(id, ...) id,
#include "kinds.inc"
};

enum class Has { kNo, kMay, kMust };

enum class Form { kFloats, kHalves, kCodes };  // activations as they are, in bf16, in integers with a scale per group

// What kinds.inc says of a kind.
struct KindFacts {
    const char* name;      // in Python
    int bits;              // of a number; of 2:4 of all columns, positions among them
    int together;          // columns that share a word of the layout, or a super-block
    const char* codes;     // dtype of the unpacked codes, by numpy's name
    const char* packer = "";  // the op that packs any codes of that dtype; "": there is another, of the kind's own
    int least_group = 0, most_group = 0;  // columns that share a scale: powers of two, those between too; 0: none do
    int multiples = 0;     // in super-blocks, where groups have small multiples of floats that 256 columns share, the bits of a
                           // group's, of scale and minimum together; 0: a group has floats of its own
    Has zeros = Has::kNo, mins = Has::kNo;   // zeros of groups, minimums
    Has table = Has::kNo;                    // a table of the numbers that codes stand for, or of exponents (bf12)
    Has order = Has::kNo;                    // an order of columns
    bool fuses = false;    // gated_mlp takes it
    Form form;             // of the activations
    int offset = 0;        // what codes (numbers of a table: as bytes) lie above the numbers they stand for
};

// By the number of the kind.
constexpr KindFacts kKindFacts[] = {
#define KIND(id, ...) {__VA_ARGS__},
#include "kinds.inc"
};
constexpr int64_t kKindCount = sizeof(kKindFacts) / sizeof(kKindFacts[0]);

// Of super-blocks, `scales` and `mins` are the units of 256 columns, and `group` columns share a multiple of them.
// Parts a matrix does not have are null. A part that grows with the rows has a step: bytes from 16 rows to the next 16.
struct Matrix {
    Kind kind;
    int64_t n, k, group;   // rows, columns, columns that share a scale (0: none)
    int64_t wide;          // scales and minimums are f32, else f16
    int64_t digits;        // bytes that a number of the activations has: 1 as codes of 8 bits, 2 as codes of 16 or as bf16 of fp8
    int64_t planes;        // digits of the numbers of `table`
    const char* codes;
    const char* scales;
    const int8_t* zeros;
    const char* mins;      // added to every number of a group
    const uint8_t* table;  // [planes][16], the digits of the numbers that 4-bit codes stand for, + 128; or exponents, see pack_bf12.cpp
    const int32_t* order;  // the activation that each column multiplies
    int64_t code_step, scale_step, zero_step, min_step;
    const int64_t* places;  // of experts that come and go (stream.cpp): bytes from the parts above to those of each; null: below each other
};

// Rows first .. first + count of w as a matrix; `first` is a multiple of 16.
[[gnu::always_inline]] inline Matrix rows_from(const Matrix& w, int64_t first, int64_t count) {
    Matrix part = w;
    const int64_t block = first / 16;
    part.n = count;
    part.codes += block * w.code_step;
    if (w.scales) part.scales += block * w.scale_step;
    if (w.zeros) part.zeros += block * w.zero_step;
    if (w.mins) part.mins += block * w.min_step;
    return part;
}

// Expert number `expert` of those in w, of `count` rows each, padded to whole blocks.
[[gnu::always_inline]] inline Matrix expert_of(const Matrix& w, int64_t expert, int64_t count) {
    if (!w.places) return rows_from(w, expert * ((count + 15) / 16 * 16), count);
    Matrix part = w;
    const int64_t place = w.places[expert];
    part.n = count;
    part.codes += place;
    if (w.scales) part.scales += place;
    if (w.zeros) part.zeros += place;
    if (w.mins) part.mins += place;
    return part;
}

}  // namespace quire
