// Ops of embeddings of n-grams: which rows of a table the last tokens of a row name, and what gates the values that are made of these.
#pragma once

#include "streams.h"

namespace quire::QUIRE_UNIT {
namespace {

constexpr int64_t kMostNgram = 8;

// out [rows, heads]: where n-grams of 2, 3, ... n tokens that end at a token lie, heads / (n - 1) places for each. `before` [rows, width] f32:
// of each of the n - 1 tokens before, the nearest first, the three digits to the base 256 of its number and 1, 0 where there is none.
// `tables` [2, heads]: how many rows there are for each place, and which is the first.
void ngram_rows(int32_t* out, const int32_t* tokens, const float* before, const int64_t* factors, const int64_t* tables, int64_t rows,
                int64_t width, int64_t n, int64_t heads, int64_t end) {
    if (n < 2 || n > kMostNgram || heads < 1 || heads % (n - 1) || width < 3 * (n - 1)) fail("ngram_rows: bad numbers of tokens and heads");
    const int64_t *sizes = tables, *firsts = tables + heads;
    for (int64_t i = 0; i < heads; ++i)
        if (sizes[i] < 1) fail("ngram_rows: a table without rows");
    const int64_t each = heads / (n - 1);
    parallel_ranges(rows, 16 * heads, [&](int64_t begin, int64_t stop) {
        for (int64_t r = begin; r < stop; ++r) {
            auto mixed = static_cast<uint64_t>(tokens[r]) * static_cast<uint64_t>(factors[0]);
            bool cut = false;
            for (int64_t back = 1; back < n; ++back) {
                const float* digits = before + r * width + 3 * (back - 1);
                const int64_t token = static_cast<int64_t>(digits[0] + 256.0f * digits[1] + 65536.0f * digits[2]) - 1;
                cut = cut || token < 0 || token == end;
                mixed ^= static_cast<uint64_t>(cut ? end : token) * static_cast<uint64_t>(factors[back]);
                for (int64_t i = (back - 1) * each; i < back * each; ++i)
                    out[r * heads + i] = static_cast<int32_t>(mixed % static_cast<uint64_t>(sizes[i]) + static_cast<uint64_t>(firsts[i]));
            }
        }
    });
}

// out [rows, n h]: value [rows, h] by a gate for each stream, of the product of key and query [rows, n h].
void gate_values(float* out, const float* key, const float* query, const float* value, int64_t rows, int64_t h, int64_t n) {
    if (h < 1 || n < 1) fail("gate_values: bad numbers of streams");
    const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(h));
    parallel_ranges(rows, 4 * n * h, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            for (int64_t j = r * n; j < (r + 1) * n; ++j) {
                F sum = set1(0.0f);
                for_lanes(h, [&](int64_t i, int lanes) { sum = fma(load_lanes(key + j * h + i, lanes), load_lanes(query + j * h + i, lanes), sum); });
                const float product = hsum(sum) * scale, size = product < 0.0f ? -product : product;
                const float root = __builtin_sqrtf(size < 1e-6f ? 1e-6f : size);
                const float depth = product > 0.0f ? root : product < 0.0f ? -root : 0.0f;
                const F gate = times_sigmoid(set1(1.0f), set1(depth));
                for_lanes(h, [&](int64_t i, int lanes) { store_lanes(out + j * h + i, mul(gate, load_lanes(value + r * h + i, lanes)), lanes); });
            }
        }
    });
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
