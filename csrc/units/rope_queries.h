// Rotation of queries alone, for layers that read the keys and values of another layer.
#pragma once

#include "elementwise.h"
#include "rope.h"

namespace quire::QUIRE_UNIT {
namespace {

// out [rows, (heads + pad) * d] = rotated heads of q [rows, heads * d], then zeros.
void rope_queries(float* out, const float* q, const int32_t* positions, const RopeDescriptor* rotation, int64_t rows, int64_t pad, int64_t d) {
    const RopeDescriptor rope = *rotation;
    const int64_t heads = rope.heads;
    if (rope.half < 0 || 2 * rope.half > d || heads < 1 || pad < 0 || (rope.half > 0 && !rope.table)) fail("rope_queries: bad number of heads or rotated dimensions");
    for (int64_t r = 0; r < rows; ++r)
        if (positions[r] < 0 || positions[r] >= rope.positions) fail("rope_queries: a position lies outside the table");
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
            if (rope.q_norm) norm_row(x, source, rope.q_norm, d, rope.eps);
            else std::memcpy(x, source, static_cast<size_t>(d) * sizeof(float));
            if (rope.half > 0) rotate_head(x, rope.table + int64_t{positions[r]} * 2 * rope.half, rope.half);
        }
    });
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
