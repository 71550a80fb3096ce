// Rows that are multiplied by a gate and normed in spans, in either order.
#pragma once

#include <cmath>

#include "elementwise.h"

namespace quire::QUIRE_UNIT {
namespace {

QUIRE_INLINE void gate_span(float* x, const float* z, int64_t d, bool sigmoid) {
    for_lanes(d, [&](int64_t i, int n) {
        const F v = load_lanes(x + i, n), gate = load_lanes(z + i, n);
        store_lanes(x + i, mul(v, times_sigmoid(sigmoid ? set1(1.0f) : gate, gate)), n);
    });
}

// x [rows, width] in place; rows of z are `z_step` numbers apart.
void gated_rmsnorm(float* x, const float* z, const GatedNormDescriptor* by, int64_t rows, int64_t width, int64_t z_step) {
    const GatedNormDescriptor g = *by;
    const bool fits = g.span >= 1 && width % g.span == 0 && (!g.weight || g.weights == g.span || g.weights == width);
    if (!fits) fail("gated_rmsnorm: the spans do not fit the row");
    const int64_t span = g.span, spans = width / span;
    parallel_ranges(rows * spans, 6 * span, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) {
            const int64_t offset = at % spans * span;
            float* part = x + at * span;
            const float* gate = z + at / spans * z_step + offset;
            if (g.gate_first || !g.weight) gate_span(part, gate, span, g.sigmoid);
            if (g.weight) norm_row(part, part, g.weight + (g.weights == span ? 0 : offset), span, g.eps);
            if (!g.gate_first && g.weight) gate_span(part, gate, span, g.sigmoid);
        }
    });
}

// x [spans, d], gate [spans].
void scale_by_softplus(float* x, const float* gate, int64_t spans, int64_t d) {
    parallel_ranges(spans, d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const F s = set1(gate[r] > 20.0f ? gate[r] : std::log1p(std::exp(gate[r])));
            for_lanes(d, [&](int64_t i, int n) { store_lanes(x + r * d + i, mul(load_lanes(x + r * d + i, n), s), n); });
        }
    });
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
