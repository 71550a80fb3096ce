// Rows of a table of tokens: numbers as they are (elementwise.h), or taken out of a packed matrix.
#pragma once

#include "elementwise.h"
#include "kind.h"
#include "linear_op.h"
#include "look_up.h"

namespace quire::QUIRE_UNIT {
namespace {

// out [rows, k] f32; `rounded`: to bf16, as the rows of a bf16 table are; `first` as of row_of_token.
void embedding_packed(float* out, const int32_t* tokens, const Matrix* w, int64_t rows, int64_t rounded, int64_t first) {
    const KindRow& kind = row_of(*w);
    const int64_t k = w->k;
    const int32_t* order = w->order;
    for (int64_t r = 0; r < rows; ++r) row_of_token(tokens[r], first, w->n);
    for (int64_t i = 0; order && i < k; ++i)
        if (order[i] < 0 || order[i] >= k) fail("embedding: an order of columns that is none");
    auto* in_order = order ? static_cast<float*>(scratch(Scratch::kTasks, static_cast<size_t>(rows * k) * 4)) : out;
    parallel_ranges(rows, 4 * k, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const int64_t row = row_of_token(tokens[r], first, w->n);
            if (row < 0) {
                std::fill_n(out + r * k, k, -0.0f);
                continue;
            }
            float* x = in_order + r * k;
            kind.of->decode_row(*w, row, x);
            for (int64_t i = 0; rounded && i < k; ++i) x[i] = rounded_to_bf16(x[i]);
            for (int64_t i = 0; order && i < k; ++i) out[r * k + order[i]] = x[i];
        }
    });
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
