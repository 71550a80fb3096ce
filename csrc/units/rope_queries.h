// Rotation of queries alone, for layers that read the keys and values of another layer.
#pragma once

#include "elementwise.h"
#include "rope.h"

namespace quire::QUIRE_UNIT {
namespace {

// out [rows, (heads + pad) * d] = rotated heads of q [rows, heads * d], then zeros; table [max_positions, 2, half].
void rope_queries(float* out, const float* q, const int32_t* positions, Optional<const float> table, Optional<const float> norm,
                  int64_t rows, int64_t heads, int64_t pad, int64_t d, int64_t half, int64_t max_positions, double eps) {
    if (half < 0 || 2 * half > d || heads < 1 || pad < 0 || (half > 0 && !table.ptr)) fail("rope_queries: bad number of heads or rotated dimensions");
    for (int64_t r = 0; r < rows; ++r)
        if (positions[r] < 0 || positions[r] >= max_positions) fail("rope_queries: a position lies outside the table");
    const int64_t all = heads + pad;
    parallel_ranges(rows * all, 2 * d, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) {
            const int64_t r = at / all, head = at % all;
            float* x = out + at * d;
            if (head >= heads) {
                std::memset(x, 0, static_cast<size_t>(d) * sizeof(float));
                continue;
            }
            const float* source = q + (r * heads + head) * d;
            if (norm.ptr) norm_row(x, source, norm.ptr, d, static_cast<float>(eps));
            else std::memcpy(x, source, static_cast<size_t>(d) * sizeof(float));
            if (half > 0) rotate_head(x, table.ptr + int64_t{positions[r]} * 2 * half, half);
        }
    });
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
