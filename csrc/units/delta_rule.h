// The gated delta rule: S *= decay; d = beta (v - S^T k); S += k d^T; o = S^T q (Yang et al. 2024; Kimi's with a decay for each channel).
#pragma once

#include "recurrent.h"

namespace quire::QUIRE_UNIT {
namespace {

// out = x / |x| * scale
QUIRE_INLINE void unit_row(float* out, const float* x, int64_t d, float scale) {
    F sum = set1(0.0f);
    for_lanes(d, [&](int64_t i, int n) {
        const F v = load_lanes(x + i, n);
        sum = fma(v, v, sum);
    });
    const F s = set1(scale / __builtin_sqrtf(hsum(sum) + 1e-6f));
    for_lanes(d, [&](int64_t i, int n) { store_lanes(out + i, mul(load_lanes(x + i, n), s), n); });
}

// One row over a tile: the deltas d are known, o is read, and `next` what the row behind it reads along, where there is one.
template <int kVectors, bool kChannels, bool kNext>
QUIRE_INLINE void delta_row(const HeadRow& row, const float* next, int64_t dk, int lanes, StateTile in, StateTile to, Ahead& ahead,
                            const F (&d)[kVectors], F (&o)[kVectors], F (&seen)[kVectors]) {
    const float *keys = row.k, *queries = row.q, *decays = row.decays;
    F decay = set1(row.decay);
    for (int64_t i = 0; i < dk; ++i) {
        const F k = set1(keys[i]), q = set1(queries[i]);
        F n = q;
        if constexpr (kNext) n = set1(next[i]);
        if constexpr (!kNext) ahead.fetch();
        if constexpr (kChannels) decay = set1(decays[i]);
        for (int c = 0; c < kVectors; ++c) {
            const F s = fma(k, d[c], mul(load_tile<kVectors>(in.at + i * in.step, c, lanes), decay));
            store_tile<kVectors>(to.at + i * to.step, c, s, lanes);
            o[c] = fma(s, q, o[c]);
            if constexpr (kNext) seen[c] = fma(s, n, seen[c]);
        }
    }
}

template <bool kChannels>
struct DeltaRule {
    const DeltaDescriptor& by;
    float* out;
    const float *qkv, *gates, *decay;  // [rows, heads ...]; decay only where kChannels

    int64_t padded() const { return (by.key_dim + 15) / 16 * 16; }
    int64_t room() const { return kBlockRows * padded() * (kChannels ? 4 : 2); }

    // The logarithm of a decay; x: what is computed of the row, and the bias.
    F log_decay(F x, float a) const {
        if (by.lower_bound < 0.0f) return times_sigmoid(set1(by.lower_bound), mul(x, set1(-a)));
        return mul(set1(a), softplus(x));
    }

    void prepare(HeadRow* rows, float* room, int64_t head, int64_t first, int64_t count) const {
        const int64_t dk = by.key_dim, keys = by.key_heads * dk, key = head / (by.value_heads / by.key_heads) * dk;
        const int64_t width = 2 * keys + by.value_heads * by.value_dim, gate_width = by.value_heads * (kChannels ? 1 : 2);
        float b[kBlockRows] = {}, a[kBlockRows] = {};
        for (int64_t r = 0; r < count; ++r) {
            const float* gate = gates + (first + r) * gate_width + head;
            b[r] = gate[0];
            if constexpr (!kChannels) a[r] = gate[by.value_heads];
        }
        store(b, times_sigmoid(set1(by.beta_scale), load(b)));
        if constexpr (!kChannels) store(a, vexp(log_decay(add(load(a), set1(by.dt_bias[head])), by.a[head])));
        for (int64_t r = 0; r < count; ++r) {
            const float* x = qkv + (first + r) * width;
            float* q = room + r * padded() * (kChannels ? 4 : 2);
            float* k = q + padded();
            unit_row(q, x + key, dk, 1.0f / __builtin_sqrtf(static_cast<float>(dk)));
            unit_row(k, x + keys + key, dk, 1.0f);
            const int64_t at = head * by.value_dim;
            float* to = out + (first + r) * by.value_heads * by.value_dim + at;
            rows[r] = {.q = q, .k = k, .v = x + 2 * keys + at, .out = to, .rate = b[r], .decay = a[r], .decays = nullptr, .seen_by = k,
                       .steps = nullptr, .skip = 0.0f};
            if constexpr (kChannels) decay_channels(rows[r], k + padded(), head, first + r);
        }
    }

    // The decays of a row's channels at `to`, and behind them their products with k.
    void decay_channels(HeadRow& row, float* to, int64_t head, int64_t at) const {
        const int64_t dk = by.key_dim;
        const float *given = decay + (at * by.value_heads + head) * dk, *bias = by.dt_bias + head * dk;
        for_lanes(dk, [&](int64_t i, int n) {
            const F e = vexp(log_decay(add(load_lanes(given + i, n), load_lanes(bias + i, n)), by.a[head]));
            store_lanes(to + i, e, n);
            store_lanes(to + padded() + i, mul(e, load_lanes(row.k + i, n)), n);
        });
        row.decays = to;
        row.seen_by = to + padded();
    }

    template <int kVectors>
    void advance(const HeadRow* rows, int64_t count, int64_t column, int lanes, StateTile in, StateTile out_tile, StateTile own,
                 Ahead& ahead) const {
        const float* first = rows[0].seen_by;
        F seen[kVectors];
        for (int c = 0; c < kVectors; ++c) seen[c] = set1(0.0f);
        for (int64_t i = 0; i < by.key_dim; ++i) {
            ahead.fetch();
            for (int c = 0; c < kVectors; ++c)
                seen[c] = fma(load_tile<kVectors>(in.at + i * in.step, c, lanes), set1(first[i]), seen[c]);
        }
        for (int64_t r = 0; r < count; ++r) {
            const HeadRow& row = rows[r];
            F d[kVectors], o[kVectors];
            for (int c = 0; c < kVectors; ++c) {
                if constexpr (!kChannels) seen[c] = mul(seen[c], set1(row.decay));
                d[c] = mul(sub(load_tile<kVectors>(row.v + column, c, lanes), seen[c]), set1(row.rate));
                o[c] = seen[c] = set1(0.0f);
            }
            if (r + 1 < count) {
                delta_row<kVectors, kChannels, true>(row, rows[r + 1].seen_by, by.key_dim, lanes, in, own, ahead, d, o, seen);
            } else {
                delta_row<kVectors, kChannels, false>(row, nullptr, by.key_dim, lanes, in, out_tile, ahead, d, o, seen);
            }
            for (int c = 0; c < kVectors; ++c) store_tile<kVectors>(row.out + column, c, o[c], lanes);
            in = own;
        }
    }
};

// qkv [rows, 2 key_heads key_dim + value_heads value_dim]; gates b | a [rows, 2 value_heads], or b alone where `decay` [rows, value_heads,
// key_dim] is there; states [slots, value_heads, key_dim, value_dim], `step` numbers from one slot to the next.
void delta_rule(float* out, const float* qkv, const float* gates, Optional<const float> decay, float* states,
                const StateBatchDescriptor* batch, const DeltaDescriptor* by, int64_t rows, int64_t slots, int64_t step) {
    const States all{states, slots, step, by->key_dim, by->value_dim};
    if (by->key_heads < 1 || by->value_heads % by->key_heads) fail("delta_rule: value heads must be a multiple of key heads");
    if (decay.ptr) return walk_states(DeltaRule<true>{*by, out, qkv, gates, decay.ptr}, all, *batch, rows, by->value_heads);
    walk_states(DeltaRule<false>{*by, out, qkv, gates, nullptr}, all, *batch, rows, by->value_heads);
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
