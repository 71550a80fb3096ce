// One linear per expert over its pairs (token, choice). Which expert has how many pairs is read from memory when the op runs, so
// that a recorded step can be replayed for other tokens.
#pragma once

void check_pairs(const Matrix& w, const int32_t* tokens, const float* gathered, const int32_t* offsets, int64_t experts, int64_t x_rows,
                 int64_t pairs, int64_t n) {
    if (experts < 1 || n < 1 || w.n != experts * ((n + 15) / 16 * 16)) fail("grouped_linear: the matrix is not that of so many experts");
    if (tokens && !gathered) fail("grouped_linear: nowhere to gather rows");
    if (offsets[0] != 0 || offsets[experts] != pairs) fail("grouped_linear: offsets must run from 0 to the number of pairs");
    for (int64_t e = 0; e < experts; ++e)
        if (offsets[e + 1] < offsets[e]) fail("grouped_linear: offsets must ascend");
    for (int64_t i = 0; tokens && i < pairs; ++i)
        if (tokens[i] < 0 || tokens[i] >= x_rows) fail("grouped_linear: a token lies outside the batch");
}

// `w`: the experts' matrices of n rows, each padded to whole blocks, below each other; bias [experts, n]. With `tokens`, the rows
// of an expert are first gathered into `gathered` [pairs, k].
void grouped_linear(float* out, const float* x, Optional<float> gathered, const Matrix* w, Optional<const float> bias,
                    Optional<const int32_t> tokens, const int32_t* offsets, int64_t experts, int64_t x_rows, int64_t pairs, int64_t n) {
    check_pairs(*w, tokens.ptr, gathered.ptr, offsets, experts, x_rows, pairs, n);
    const int64_t padded = w->n / experts, k = w->k;
    for (int64_t e = 0; e < experts; ++e) {
        const int64_t begin = offsets[e], rows = offsets[e + 1] - begin;
        if (rows == 0) continue;
        const float* from = x + begin * k;
        if (tokens.ptr) {
            parallel_ranges(rows, k, [&](int64_t first, int64_t last) {
                for (int64_t i = begin + first; i < begin + last; ++i)
                    std::memcpy(gathered.ptr + i * k, x + tokens.ptr[i] * k, static_cast<size_t>(k) * sizeof(float));
            });
            from = gathered.ptr + begin * k;
        }
        multiply(out + begin * n, from, rows_from(*w, e * padded, n), bias.ptr ? bias.ptr + e * n : nullptr, rows);
    }
}
