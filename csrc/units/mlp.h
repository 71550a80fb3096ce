// out [m, hidden] = down(act(gate(x)) * up(x)): the gated MLP (Shazeer 2020) without its two wide intermediates in memory; and
// down(act(up(x))), which has no gate.
//
// A task computes one piece of gate and the same piece of up for a panel of rows into its own small buffer, applies the
// activation there, and leaves the product in the form `down` reads. Element by element the arithmetic is that of linear,
// the activation and linear in turn. Why: at 512 rows of a 1 B model the intermediates are 100 MB of traffic a layer.
#pragma once

#include "elementwise.h"
#include "linear_op.h"

namespace quire::QUIRE_UNIT {
namespace {

constexpr int64_t kMlpColumns = 128;
// Neighbouring tasks have the piece of weights in common, or the panel of rows: where panels are low the weights would be read
// from memory again for each (4 % of the time at 512 rows on a Zen 5).
#if defined(QUIRE_AMX)
constexpr bool kPieceInCommon = false;
#else
constexpr bool kPieceInCommon = true;
#endif

// The call that computes columns first .. first + count (multiples of 16) of `c` for rows from `row` on.
QUIRE_INLINE LinearCall part_of(const LinearCall& c, int64_t row, int64_t first, int64_t count, float* out, int64_t out_stride) {
    LinearCall part = c;
    part.w = rows_from(c.w, first, count);
    part.out = out - row * out_stride;
    part.out_stride = out_stride;
    if (c.bias) part.bias += first;
    return part;
}

// gate = act(gate) * up.
template <int64_t kActivation>
void gate_row(float* gate, const float* up, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) store(gate + i, mul(activate<kActivation>(load(gate + i)), load(up + i)));
}

constexpr Gate kGates[] = {gate_row<kSilu>, gate_row<kGelu>, gate_row<kGeluTanh>, gate_row<kRelu>, gate_row<kRelu2>};
static_assert(sizeof(kGates) / sizeof(Gate) == kActivations);

// x = act(x).
template <int64_t kActivation>
void activate_row(float* x, const float* /*up*/, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) store(x + i, activate<kActivation>(load(x + i)));
}

constexpr Gate kUngated[] = {activate_row<kSilu>, activate_row<kGelu>, activate_row<kGeluTanh>, activate_row<kRelu>, activate_row<kRelu2>};
static_assert(sizeof(kUngated) / sizeof(Gate) == kActivations);

// act(gate) * up for all rows, or, of one part instead of two, act(up), into the form `down` reads. Pieces are computed by the
// kernels' panels: code of its own for each kind and tile is the same code again, and a unit is built for longer.
void inner_rows(const LinearCall& c, const Matrix& down, const Rows& inner, int64_t m, int64_t parts, Gate act) {
    const Kernels& kernels = kernels_of(c.w);
    const int64_t most = mlp_rows(c.w), width = kMlpColumns, f = down.k, pieces = (f + width - 1) / width;
    const int64_t panels = (m + most - 1) / most, rows = ((m + panels - 1) / panels + 15) / 16 * 16;
    const int64_t own = rows * parts * width * 4;
    const Work work(own + kernels.panel_bytes(c, m, m < rows ? m : rows, width / 16));
    parallel_for(panels * pieces, [&](int64_t index, int thread) {
        const int64_t row = (kPieceInCommon ? index % panels : index / pieces) * rows, end = row + rows < m ? row + rows : m;
        const int64_t first = (kPieceInCommon ? index / panels : index % pieces) * width, count = f - first < width ? f - first : width;
        auto* buffer = reinterpret_cast<float*>(work.of(thread));
        const Panel panel{row, end, 0, count / 16, work.of(thread) + own};
        for (int64_t p = 0; p < parts; ++p) kernels.panel(part_of(c, row, p * f + first, count, buffer + p * count, parts * count), m, panel);
        for (int64_t r = row; r < end; ++r) {
            float* gate = buffer + (r - row) * parts * count;
            act(gate, gate + (parts - 1) * count, count);
            fill_rows(down, inner, r, first, gate, count);
        }
    });
}

void mlp(float* out, const float* x, const Matrix& up, const float* bias, const Matrix& down, const float* down_bias, int64_t m, int64_t parts, Gate act) {
    check_rows(m);
    const Kernels &wide = kernels_of(up), &narrow = kernels_of(down);
    if (down.k % 16) fail("mlp: the inner size must be a multiple of 16");
    if (up.n != parts * down.k || down.n != up.k) fail("mlp: the matrices do not fit each other");
    if (!mlp_rows(up) || !mlp_rows(down) || up.order || down.order) fail("mlp: a kind of weights that it does not fuse");
    const Rows inner = rows_for(down, m, narrow.interleaved(m), Scratch::kHidden, Scratch::kHiddenScales);
    inner_rows(call_of(up, read_rows(up, x, m, wide.interleaved(m)), bias, nullptr), down, inner, m, parts, act);
    narrow.run(call_of(down, inner, down_bias, out), m);
}

Gate gate_of(const Gate* gates, int64_t act) {
    if (act < 0 || act >= kActivations) fail("mlp: unknown activation");
    return gates[act];
}

// gate_up [2 f, hidden], down [hidden, f]; f a multiple of 16.
void gated_mlp(float* out, const float* x, const Matrix* gate_up, Optional<const float> bias, const Matrix* down,
               Optional<const float> down_bias, int64_t m, int64_t act) {
    mlp(out, x, *gate_up, bias.ptr, *down, down_bias.ptr, m, 2, gate_of(kGates, act));
}

// up [f, hidden], down [hidden, f]; f a multiple of 16.
void plain_mlp(float* out, const float* x, const Matrix* up, Optional<const float> bias, const Matrix* down, Optional<const float> down_bias,
               int64_t m, int64_t act) {
    mlp(out, x, *up, bias.ptr, *down, down_bias.ptr, m, 1, gate_of(kUngated, act));
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
