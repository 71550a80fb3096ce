// Scores to probabilities with a running maximum and sum, and how states over disjoint keys are merged.
#pragma once

#include "attention_call.h"

namespace quire::QUIRE_UNIT {
namespace {

// q.k of n rows and a tile times the scales of the keys.
QUIRE_INLINE void scale_scores(const AttentionBuffers& b, int64_t first, int64_t n) {
    for (int64_t j = 0; j < kTile; j += 16) {
        const F scale = load(b.key_scales + j);
        for (int64_t r = first; r < first + n; ++r) store(b.scores_of(r) + j, mul(load(b.scores_of(r) + j), scale));
    }
}

// Adds a row's bias by distance, times log2(e), to its scores of a tile. Keys that it does not see get any entry.
QUIRE_INLINE void add_bias(const AttentionCall& c, const AttentionBuffers& b, int64_t r, int64_t start) {
    const float* bias = c.bias + (b.head + r % c.group) * c.distances;
    const int64_t last = c.distances - 1, nearest = b.own[r] - 1 - start + c.behind;
    float* at = b.scores_of(r);
    for (int64_t j = 0; j < kTile; ++j) {
        const int64_t distance = nearest - j;
        at[j] += kLog2E * bias[distance < 0 ? 0 : distance < last ? distance : last];
    }
}

// q.k of one row and tile to softcap * tanh(q.k * scale / softcap) - slope * |key - row| + bias, times log2(e).
QUIRE_INLINE void adjust_scores(const AttentionCall& c, const AttentionBuffers& b, int64_t r, int64_t start) {
    constexpr float kIndex[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const F slope = set1(c.alibi ? c.alibi[b.head + r % c.group] * kLog2E : 0.0f);
    F distance = add(load(kIndex), set1(static_cast<float>(start + 1 - b.own[r])));
    for (int64_t j = 0; j < kTile; j += 16) {
        float* at = b.scores_of(r) + j;
        F s = mul(load(at), set1(c.softcap > 0.0f ? c.scale / c.softcap : c.scale * kLog2E));
        if (c.softcap > 0.0f) s = mul(vtanh(s), set1(c.softcap * kLog2E));
        store(at, fma(slope, vmin(distance, sub(set1(0.0f), distance)), s));
        distance = add(distance, set1(16.0f));
    }
    if (c.bias) add_bias(c, b, r, start);
}

// The factor that turns a row's sums over keys into its output when a key without a value of score `sink` is added.
QUIRE_INLINE F with_sink(float sink, float most, float sum) {
    const float top = most > sink ? most : sink;
    const F own = exp2(set1(most - top));
    return div(own, fma(set1(sum), own, exp2(set1(sink - top))));
}

// The largest of a row's first `keys` scores in a tile, times `factor`; scores that the row does not see become -inf. False
// when it sees none.
QUIRE_INLINE bool largest(const AttentionBuffers& b, float factor, int64_t r, int64_t start, int64_t keys, float& found) {
    const int64_t from = b.from[r] - start, to = b.to[r] - start;
    float* scores = b.scores_of(r);
    if (from >= kTile || to <= 0) return false;
    if (from > 0 || to < kTile)
        for (int64_t j = 0; j < keys; j += 16) {
            const int low = static_cast<int>(from > j ? from - j : 0), high = static_cast<int>(to < j ? 0 : to - j);
            store(scores + j, keep(load(scores + j), low, high, set1(-INFINITY)));
        }
    F top = load(scores);
#pragma GCC unroll 4
    for (int64_t j = 16; j < keys; j += 16) top = vmax(load(scores + j), top);
    found = hmax(top) * factor;
    return true;
}

// How far (in powers of two) scores may exceed the running maximum before it follows: what was summed before is then rarely
// rescaled, and 2^8 more changes no relative error.
constexpr float kSlack = 8.0f;

// Scores of n rows and a tile to probabilities, times the scales of the values if they have any; updates maxima, lane sums and the factors for what was summed
// before. Keys from `keys` (a multiple of 16) on are not seen. Three passes over the rows: each has independent work where one row alone would wait for its maximum.
template <bool kBf16>
QUIRE_INLINE void softmax_rows(const AttentionCall& c, AttentionBuffers& b, int64_t first, int64_t n, int64_t start, int64_t keys) {
    static_assert(kAttentionRows <= 16);
    const F factor = set1(c.factor());
    float change[16] = {};
    bool seen[16];
    for (int64_t i = 0; i < n; ++i) {
        float found;
        seen[i] = largest(b, c.factor(), first + i, start, keys, found);
        if (!seen[i]) continue;
        float& most = b.split.most[first + i];
        const float before = most;
        most = found > before + kSlack ? found : before;
        change[i] = before - most;
    }
    const F factors = exp2_below<false>(load(change));
    store_n(b.rescale + first, factors, static_cast<int>(n));
    for (int64_t i = 0; i < n; ++i) {
        const int64_t r = first + i;
        char* p = b.p + (r - b.low) * kTile * (kBf16 ? 2 : 4);
        if (!seen[i]) {
            std::memset(p, 0, kTile * (kBf16 ? 2 : 4));
            continue;
        }
        const F most = set1(-b.split.most[r]);
        F sum = mul(load(b.lanes + r * 16), set1(b.rescale[r]));
#pragma GCC unroll 4
        for (int64_t j = 0; j < keys; j += 16) {
            const F e = exp2_below<kBf16>(fma(load(b.scores_of(r) + j), factor, most));
            sum = add(sum, e);
            if constexpr (kBf16) {
                bf16_store(reinterpret_cast<uint16_t*>(p) + j, c.cache.scaled() ? mul(e, load(b.value_scales + j)) : e);
            } else {
                store(reinterpret_cast<float*>(p) + j, e);
            }
        }
        if (kBf16 && keys % 32) bf16_store(reinterpret_cast<uint16_t*>(p) + keys, set1(0.0f));
        store(b.lanes + r * 16, sum);
    }
}

// total = total merged with part (both over disjoint keys, part's after total's), of `columns` numbers each, rows `padded` apart; a
// part without visible keys has sum 0. Factors are made of 16 rows at a time.
void merge_rows(const State& total, const State& part, int64_t rows, int64_t padded, int64_t columns) {
    for (int64_t first = 0; first < rows; first += 16) {
        const int n = static_cast<int>(rows - first < 16 ? rows - first : 16);
        const F before = load_lanes(total.most + first, n), own = load_lanes(part.most + first, n), most = vmax(before, own);
        alignas(64) float a[16], b[16], sums[16], top[16];
        const F scale = exp2(sub(before, most)), part_scale = exp2(sub(own, most));
        store(a, scale);
        store(b, part_scale);
        store(sums, fma(load_lanes(part.sum + first, n), part_scale, mul(load_lanes(total.sum + first, n), scale)));
        store(top, most);
        for (int64_t i = 0; i < n; ++i) {
            const int64_t r = first + i;
            if (part.sum[r] == 0.0f) continue;
            float* to = total.acc + r * padded;
            const float* from = part.acc + r * padded;
            if (total.sum[r] == 0.0f) {
                total.most[r] = part.most[r];
                total.sum[r] = part.sum[r];
                for (int64_t j = 0; j < columns; j += 16) store(to + j, load(from + j));
                continue;
            }
            total.sum[r] = sums[i];
            total.most[r] = top[i];
            const F change = set1(a[i]), share = set1(b[i]);
            for (int64_t j = 0; j < columns; j += 16) store(to + j, fma(load(from + j), share, mul(load(to + j), change)));
        }
    }
}

QUIRE_INLINE void clear(const State& s, int64_t rows, int64_t padded) {
    std::memset(s.acc, 0, static_cast<size_t>(rows * padded) * 4);
    std::memset(s.sum, 0, static_cast<size_t>(rows) * 4);
    for (int64_t r = 0; r < rows; ++r) s.most[r] = -INFINITY;
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
