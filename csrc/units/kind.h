// What the ops know of a kind of packed matrix: its row of kinds.inc, with what this unit has for it.
#pragma once

enum class Form { kFloats, kHalves, kCodes };  // activations as they are, in bf16, in integers with a scale per group

using Gate = void (*)(float* gate, const float* up, int64_t count);  // gate = act(gate) * up

struct Kernels {
    void (*run)(const LinearCall& c, int64_t m);  // c.out [m, n], whether m is one, few or many
    int64_t (*abreast)(int64_t m);                // how many of m rows lie side by side
    void (*panel)(const LinearCall& c, int64_t m, const Panel& p);  // a panel of those m rows and some columns, within a task
    int64_t (*panel_bytes)(const LinearCall& c, int64_t m, int64_t rows, int64_t blocks);  // memory of panels of so many, or fewer
    int64_t mlp_rows;                             // rows of a task of gated_mlp; 0: it is made of other ops
};

struct KindRow {
    KindFacts facts;
    Form form;
    int64_t multiple;                    // of the columns
    int32_t offset, offset_with_mins;    // codes less the numbers that they stand for
    void (*look_up)(const Matrix& w, int64_t row, float* out);  // a row's numbers [k], in the matrix's order of columns
    Kernels kernels[2][2];               // [planes - 1][digits - 1]; none: there are no such matrices
};

// The row of w's kind; throws std::invalid_argument unless w is what that row says.
const KindRow& row_of(const Matrix& w);

QUIRE_INLINE const Kernels& kernels_of(const Matrix& w) { return row_of(w).kernels[w.planes - 1][w.digits - 1]; }
