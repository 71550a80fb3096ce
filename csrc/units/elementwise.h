// What several ops do to a row: its norm, an activation, a table's numbers.
#pragma once

#include "math.h"
#include "table_rows.h"

namespace quire::QUIRE_UNIT {
namespace {

QUIRE_INLINE void norm_row(float* out, const float* x, const float* weight, int64_t d, float eps) {
    F sum = set1(0.0f);
    for_lanes(d, [&](int64_t i, int n) {
        const F v = load_lanes(x + i, n);
        sum = fma(v, v, sum);
    });
    const float scale = 1.0f / __builtin_sqrtf(hsum(sum) / static_cast<float>(d) + eps);
    const F s = set1(scale);
    for_lanes(d, [&](int64_t i, int n) {
        store_lanes(out + i, mul(mul(load_lanes(x + i, n), s), load_lanes(weight + i, n)), n);
    });
}

// Numbers at .. at + n of a table, n up to 16.
QUIRE_INLINE F load_numbers(const void* table, int64_t at, int n, int64_t numbers) {
    if (numbers == kNumbersF32) return load_lanes(static_cast<const float*>(table) + at, n);
    uint16_t halves[16] = {};
    std::memcpy(halves, static_cast<const uint16_t*>(table) + at, static_cast<size_t>(n) * 2);
    return numbers == kNumbersBf16 ? bf16_load(halves) : f16_load(halves);
}

template <int64_t kKind>
QUIRE_INLINE F activate(F x) {
    if constexpr (kKind == kSilu) return times_sigmoid(x, x);
    if constexpr (kKind == kGelu) {
        const F half = mul(x, set1(0.5f));
        return fma(half, verf(mul(x, set1(0.70710678f))), half);
    }
    if constexpr (kKind == kGeluTanh) {
        // 0.5 x (1 + tanh u) = x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
        const F u = mul(x, fma(mul(x, x), set1(0.0713548163f), set1(1.5957691216f)));
        return times_sigmoid(x, u);
    }
    const F positive = vmax(set1(0.0f), x);
    return kKind == kRelu2 ? mul(positive, positive) : positive;
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
