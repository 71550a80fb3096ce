// What the ops know of a kind of packed matrix: its row of kinds.inc, with what this unit has for it.
#pragma once

#include "linear_call.h"
#include "rows.h"

namespace quire::QUIRE_UNIT {

using Gate = void (*)(float* gate, const float* up, int64_t count);  // gate = act(gate) * up

struct Kernels {
    void (*run)(const LinearCall& c, int64_t m);  // c.out [m, n], whether m is one, few or many
    int64_t (*interleaved)(int64_t m);            // how many of m rows lie interleaved
    void (*panel)(const LinearCall& c, int64_t m, const Panel& p);  // a panel of those m rows and some columns, within a task
    int64_t (*panel_bytes)(const LinearCall& c, int64_t m, int64_t rows, int64_t blocks);  // memory of panels of so many, or fewer
    int64_t mlp_rows;                             // rows of a task of gated_mlp
};

// Rows of a task of gated_mlp at least.
#if defined(QUIRE_AMX)
constexpr int64_t kMlpRows = 256;
#else
constexpr int64_t kMlpRows = 96;
#endif

// Rows of activations that no tile interleaves.
static constexpr int64_t one_below_another(int64_t /*m*/) { return 1; }

// What a unit has for a kind of matrix.
struct KernelSet {
    void (*decode_row)(const Matrix& w, int64_t row, float* out);  // a row's numbers [k], in the matrix's order of columns
    int64_t room;                                                  // rows of activations are read up to a multiple of it
    bool wide_scales;                                              // scales must be f32
    Kernels kernels[2][2];                                         // [planes - 1][digits - 1]; none: there are no such matrices
};

// Of each kind; the .cpp of its family defines it.
#define KIND(id, ...) extern const KernelSet id##Kernels;
#include "kinds.inc"

struct KindRow {
    KindFacts facts;
    int64_t multiple;                    // of the columns
    int32_t offset, offset_with_mins;    // codes less the numbers that they stand for
    const KernelSet* of;
};

// The row of w's kind; throws std::invalid_argument unless w is what that row says.
const KindRow& row_of(const Matrix& w);

QUIRE_INLINE const Kernels& kernels_of(const Matrix& w) { return row_of(w).of->kernels[w.planes - 1][w.digits - 1]; }

// Rows of a task of gated_mlp; 0: it is made of other ops.
QUIRE_INLINE int64_t mlp_rows(const Matrix& w) { return row_of(w).facts.fuses && w.planes == 1 && w.digits == 1 ? kernels_of(w).mlp_rows : 0; }

}  // namespace quire::QUIRE_UNIT
