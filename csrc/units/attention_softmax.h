// Scores to probabilities with a running maximum and sum, and how states over disjoint keys are merged.
#pragma once

// q.k of one row and tile to softcap * tanh(q.k * scale / softcap) + slope * (key - row), times log2(e).
QUIRE_INLINE void adjust_scores(const AttentionCall& c, const AttentionBuffers& b, int64_t r, int64_t start) {
    constexpr float kIndex[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const F slope = set1(c.alibi ? c.alibi[b.head + r % c.group] * kLog2E : 0.0f);
    F distance = add(load(kIndex), set1(static_cast<float>(start + 1 - b.to[r])));
    for (int64_t j = 0; j < kTile; j += 16) {
        float* at = b.scores + r * kTile + j;
        F s = mul(load(at), set1(c.softcap > 0.0f ? c.scale / c.softcap : c.scale * kLog2E));
        if (c.softcap > 0.0f) s = mul(vtanh(s), set1(c.softcap * kLog2E));
        store(at, fma(slope, distance, s));
        distance = add(distance, set1(16.0f));
    }
}

// The factor that turns a row's sums over keys into its output when a key without a value of score `sink` is added.
QUIRE_INLINE F with_sink(float sink, float most, float sum) {
    const float top = most > sink ? most : sink;
    const F own = exp2(set1(most - top));
    return div(own, fma(set1(sum), own, exp2(set1(sink - top))));
}

// Scores of one row and tile to probabilities; updates maximum, lane sums and the factor for what was summed before.
template <bool kBf16>
QUIRE_INLINE void softmax_row(const AttentionCall& c, AttentionBuffers& b, int64_t r, int64_t start) {
    char* p = b.p + r * kTile * (kBf16 ? 2 : 4);
    const auto put = [&](int64_t j, F v) __attribute__((always_inline)) {
        if constexpr (kBf16) {
            bf16_store(reinterpret_cast<uint16_t*>(p) + j * 16, v);
        } else {
            store(reinterpret_cast<float*>(p) + j * 16, v);
        }
    };
    b.rescale[r] = 1.0f;
    if (b.from[r] >= start + kTile || b.to[r] <= start) {
        for (int64_t j = 0; j < kTile / 16; ++j) put(j, set1(0.0f));
        return;
    }
    const int from = static_cast<int>(b.from[r] > start ? b.from[r] - start : 0);
    const int to = static_cast<int>(b.to[r] < start + kTile ? b.to[r] - start : kTile);
    F s[kTile / 16];
    F top = set1(-INFINITY);
#pragma GCC unroll 4
    for (int j = 0; j < kTile / 16; ++j) {
        s[j] = keep(mul(load(b.scores + r * kTile + j * 16), set1(c.factor())), from - 16 * j, to - 16 * j, set1(-INFINITY));
        top = vmax(s[j], top);
    }
    const float before = b.split.most[r], found = hmax(top);
    const float most = found > before ? found : before;
    b.split.most[r] = most;
    const F factor = exp2(set1(before - most));
    F sum = mul(load(b.lanes + r * 16), factor);
#pragma GCC unroll 4
    for (int j = 0; j < kTile / 16; ++j) {
        const F e = exp2(sub(s[j], set1(most)));
        sum = add(sum, e);
        put(j, e);
    }
    store(b.lanes + r * 16, sum);
    store_n(b.rescale + r, factor, 1);
}

// total = total merged with part (both over disjoint keys, part's after total's); a part without visible keys has sum 0.
QUIRE_INLINE void merge_row(const State& total, const State& part, int64_t r, int64_t padded) {
    if (part.sum[r] == 0.0f) return;
    float* to = total.acc + r * padded;
    const float* from = part.acc + r * padded;
    if (total.sum[r] == 0.0f) {
        total.most[r] = part.most[r];
        total.sum[r] = part.sum[r];
        for (int64_t i = 0; i < padded; i += 16) store(to + i, load(from + i));
        return;
    }
    const float most = total.most[r] > part.most[r] ? total.most[r] : part.most[r];
    const F a = exp2(set1(total.most[r] - most)), b = exp2(set1(part.most[r] - most));
    store_n(&total.sum[r], fma(set1(part.sum[r]), b, mul(set1(total.sum[r]), a)), 1);
    total.most[r] = most;
    for (int64_t i = 0; i < padded; i += 16) store(to + i, fma(load(from + i), b, mul(load(to + i), a)));
}

QUIRE_INLINE void clear(const State& s, int64_t rows, int64_t padded) {
    std::memset(s.acc, 0, static_cast<size_t>(rows * padded) * 4);
    std::memset(s.sum, 0, static_cast<size_t>(rows) * 4);
    for (int64_t r = 0; r < rows; ++r) s.most[r] = -INFINITY;
}
