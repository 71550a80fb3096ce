// A packed matrix [n, k] as every op gets it: the address of this struct, which Python fills in once and keeps where it lies
// (class Matrix of src/quire/ops/matrix.py, the same fields in the same order). Layouts: pack.cpp, pack_bf12.cpp,
// super_blocks.h.
#pragma once

#include <cstdint>

namespace quire {

// The number of a kind is its row in units/kinds.h and in KINDS of src/quire/ops/matrix.py.
enum class Kind : int64_t { kF32, kBf16, kBf12, kFp8, kInt8, kInt4, kTable4, kBf16Floats, kSuper2, kSuper3, kSuper4, kSuper5, kSuper6, kSuperTable4 };

// Of super-blocks, `scales` and `mins` are the units of 256 columns, and `group` columns share a multiple of them.
// Parts a matrix does not have are null. A part that grows with the rows has a step: bytes from 16 rows to the next 16.
struct Matrix {
    Kind kind;
    int64_t n, k, group;   // rows, columns, columns that share a scale (0: none)
    int64_t wide;          // scales and minimums are f32, else f16
    int64_t digits;        // of the integers that activations become
    int64_t planes;        // digits of the numbers of `table`
    const char* codes;
    const char* scales;
    const int8_t* zeros;
    const char* mins;      // added to every number of a group
    const uint8_t* table;  // [planes][16], the digits of the numbers that 4-bit codes stand for, + 128; or exponents, see pack_bf12.cpp
    const int32_t* order;  // the activation that each column multiplies
    int64_t code_step, scale_step, zero_step, min_step;
};

// Rows first .. first + count of w as a matrix; `first` is a multiple of 16.
inline Matrix rows_from(const Matrix& w, int64_t first, int64_t count) {
    Matrix part = w;
    const int64_t block = first / 16;
    part.n = count;
    part.codes += block * w.code_step;
    if (w.scales) part.scales += block * w.scale_step;
    if (w.zeros) part.zeros += block * w.zero_step;
    if (w.mins) part.mins += block * w.min_step;
    return part;
}

}  // namespace quire
