// Low-rank additions to a linear's output, each row with the adapter it names.
#pragma once

#include "math.h"

namespace quire::QUIRE_UNIT {
namespace {

// h [rows, rank] = a[slot] x for rows with a slot; a [slots, rank, k].
void lora_shrink(float* h, const float* x, const float* a, const int32_t* slot_of, int64_t rows, int64_t k, int64_t rank, int64_t slots) {
    for (int64_t r = 0; r < rows; ++r)
        if (slot_of[r] >= slots) fail("lora: a row names an adapter that there is no room for");
    parallel_ranges(rows * rank, 2 * k, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) {
            const int64_t r = at / rank, j = at % rank, slot = slot_of[r];
            if (slot < 0) continue;
            const float *row = x + r * k, *weight = a + (slot * rank + j) * k;
            F sum = set1(0.0f);
            for_lanes(k, [&](int64_t i, int n) { sum = fma(load_lanes(row + i, n), load_lanes(weight + i, n), sum); });
            h[at] = hsum(sum);
        }
    });
}

// y [rows, width]: columns start .. start + n += h b[slot] for rows with a slot; b [slots, rank, n].
void lora_expand(float* y, const float* h, const float* b, const int32_t* slot_of, int64_t rows, int64_t n, int64_t rank,
                 int64_t width, int64_t start) {
    if (start < 0 || start > width - n) fail("lora: the columns do not fit the row");
    constexpr int64_t kStep = 512;
    const int64_t pieces = (n + kStep - 1) / kStep;
    parallel_ranges(rows * pieces, rank * (n < kStep ? n : kStep), [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) {
            const int64_t r = at / pieces, from = at % pieces * kStep, slot = slot_of[r];
            if (slot < 0) continue;
            float* target = y + r * width + start + from;
            const float* weight = b + slot * rank * n + from;
            for_lanes(n - from < kStep ? n - from : kStep, [&](int64_t i, int count) {
                F sum = set1(0.0f);
                for (int64_t j = 0; j < rank; ++j) sum = fma(set1(h[r * rank + j]), load_lanes(weight + j * n + i, count), sum);
                store_lanes(target + i, add(load_lanes(target + i, count), sum), count);
            });
        }
    });
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
