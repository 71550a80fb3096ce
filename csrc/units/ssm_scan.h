// Selective scans: S = S exp(dt A) + B (dt x)^T; y = S^T C + D x. Mamba-2 has one A and dt for a head, Mamba-1 of each channel its own
// (Gu and Dao 2023, Dao and Gu 2024).
#pragma once

#include "recurrent.h"

namespace quire::QUIRE_UNIT {
namespace {

// One row over a tile: what is added is d, what is read y. Of channels that have their own time steps `step` are these times log2(e), and
// `a` the rates, `dv` numbers from one row to the next.
template <int kVectors, bool kSelective, bool kLast>
QUIRE_INLINE void scan_row(const HeadRow& row, const float* a, int64_t dk, int64_t dv, int lanes, StateTile in, StateTile to, Ahead& ahead,
                           const F (&step)[kVectors], const F (&d)[kVectors], F (&y)[kVectors]) {
    const float *keys = row.k, *queries = row.q;
    F decay = set1(row.decay);
    for (int64_t i = 0; i < dk; ++i) {
        const F k = set1(keys[i]), q = set1(queries[i]);
        for (int c = 0; kLast && c < kVectors; ++c) ahead.fetch();
        for (int c = 0; c < kVectors; ++c) {
            if constexpr (kSelective) decay = exp2_below<false>(mul(step[c], load_tile<kVectors>(a + i * dv, c, lanes)));
            const F s = fma(k, d[c], mul(load_tile<kVectors>(in.at + i * in.step, c, lanes), decay));
            store_tile<kVectors>(to.at + i * to.step, c, s, lanes);
            y[c] = fma(s, q, y[c]);
        }
    }
}

template <bool kSelective>
struct ScanRule {
    const ScanDescriptor& by;
    float* out;
    const float *x, *bc, *dt;
    int64_t x_width, bc_width;

    static constexpr int64_t room() { return 0; }

    F limited(F given, F bias) const { return vmin(set1(by.high), vmax(set1(by.low), softplus(add(given, bias)))); }

    void prepare(HeadRow* rows, float*, int64_t head, int64_t first, int64_t count) const {
        const int64_t inner = by.heads * by.head_dim, group = head / (by.heads / by.groups) * by.state;
        float steps[kBlockRows] = {}, decays[kBlockRows] = {};
        if constexpr (!kSelective) {
            for (int64_t r = 0; dt && r < count; ++r) steps[r] = dt[(first + r) * by.heads + head];
            const F step = dt ? limited(load(steps), set1(by.dt_bias ? by.dt_bias[head] : 0.0f)) : set1(1.0f);
            store(steps, step);
            store(decays, vexp(mul(step, set1(by.a[head]))));
        }
        for (int64_t r = 0; r < count; ++r) {
            const float* b = bc + (first + r) * bc_width + group;
            const int64_t at = head * by.head_dim;
            rows[r] = {.q = b + by.groups * by.state, .k = b, .v = x + (first + r) * x_width + at, .out = out + (first + r) * inner + at,
                       .rate = steps[r], .decay = decays[r], .decays = nullptr, .seen_by = nullptr,
                       .steps = kSelective ? dt + (first + r) * inner : nullptr, .skip = !kSelective && by.d ? by.d[head] : 0.0f};
        }
    }

    template <int kVectors>
    F time_step(const HeadRow& row, int64_t column, int c, int lanes) const {
        if constexpr (!kSelective) return set1(row.rate);
        const F bias = by.dt_bias ? load_tile<kVectors>(by.dt_bias + column, c, lanes) : set1(0.0f);
        return limited(load_tile<kVectors>(row.steps + column, c, lanes), bias);
    }
    template <int kVectors>
    F skip(const HeadRow& row, int64_t column, int c, int lanes) const {
        return kSelective ? load_tile<kVectors>(by.d + column, c, lanes) : set1(row.skip);
    }

    template <int kVectors>
    void advance(const HeadRow* rows, int64_t count, int64_t column, int lanes, StateTile in, StateTile out_tile, StateTile own,
                 Ahead& ahead) const {
        for (int64_t r = 0; r < count; ++r) {
            const HeadRow& row = rows[r];
            F step[kVectors], d[kVectors], y[kVectors];
            for (int c = 0; c < kVectors; ++c) {
                const F rate = time_step<kVectors>(row, column, c, lanes);
                d[c] = mul(rate, load_tile<kVectors>(row.v + column, c, lanes));
                step[c] = mul(rate, set1(1.44269504f));
                y[c] = set1(0.0f);
            }
            if (r + 1 < count) {
                scan_row<kVectors, kSelective, false>(row, by.a + column, by.state, by.head_dim, lanes, in, own, ahead, step, d, y);
            } else {
                scan_row<kVectors, kSelective, true>(row, by.a + column, by.state, by.head_dim, lanes, in, out_tile, ahead, step, d, y);
            }
            for (int c = 0; c < kVectors; ++c) {
                const F x = load_tile<kVectors>(row.v + column, c, lanes);
                store_tile<kVectors>(row.out + column, c, by.d ? fma(skip<kVectors>(row, column, c, lanes), x, y[c]) : y[c], lanes);
            }
            in = own;
        }
    }
};

// x [rows, heads head_dim] with B | C [rows, 2 groups state] in `bc`, or behind the columns of x; dt [rows, heads], or [rows, head_dim]
// where `selective`, else it may be missing: all steps are 1 then; states [slots, heads, state, head_dim], `step` numbers from one slot to the next.
void ssm_scan(float* out, const float* x, Optional<const float> bc, Optional<const float> dt, float* states,
              const StateBatchDescriptor* batch, const ScanDescriptor* by, int64_t rows, int64_t slots, int64_t step) {
    const States all{states, slots, step, by->state, by->head_dim};
    if (by->groups < 1 || by->heads % by->groups) fail("ssm_scan: heads must be a multiple of groups");
    if (by->selective && !dt.ptr) fail("ssm_scan: channels with their own time steps need these");
    if (by->selective && by->heads != 1) fail("ssm_scan: channels with their own time steps are one head");
    const int64_t inner = by->heads * by->head_dim, pairs = 2 * by->groups * by->state;
    const int64_t x_width = bc.ptr ? inner : inner + pairs, bc_width = bc.ptr ? pairs : x_width;
    const float* from = bc.ptr ? bc.ptr : x + inner;
    if (by->selective) return walk_states(ScanRule<true>{*by, out, x, from, dt.ptr, x_width, bc_width}, all, *batch, rows, 1);
    walk_states(ScanRule<false>{*by, out, x, from, dt.ptr, x_width, bc_width}, all, *batch, rows, by->heads);
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
