// linear: out [m, n] = x [m, k] times a packed matrix, plus bias.
#pragma once

#include "kind.h"

namespace quire::QUIRE_UNIT {
namespace {

// What a group's sum of codes is multiplied with to be the start of its sums, see LinearCall.
QUIRE_INLINE int32_t start_factor(const Matrix& w, const KindRow& row) {
    return w.zeros ? -1 : -(w.mins ? row.offset_with_mins : row.offset);
}

// Rows that there is room for: tiles of weights without zeros read up to 16 at a time, whether there are so many or not.
QUIRE_INLINE int64_t rows_of_room(const Matrix& w, int64_t m, int64_t interleaved) {
    const int64_t rows = interleaved > m ? interleaved : m;
    return (rows + row_of(w).of->room - 1) / row_of(w).of->room * row_of(w).of->room;
}

// Bytes of m rows of activations in the form that the kernels of `w` read, `interleaved` of them interleaved.
RowBytes bytes_of_rows(const Matrix& w, int64_t m, int64_t interleaved) {
    const int64_t rows = rows_of_room(w, m, interleaved);
    switch (row_of(w).facts.form) {
        case Form::kCodes: return {rows * coded_stride(w.k, w.digits), rows * (w.k / w.group) * (8 + 4 * w.digits)};
        case Form::kHalves: return {rows * bf16_stride(w.k), 0};
        default: return {rows * w.k * 4, 0};
    }
}

// The same rows in memory of so many bytes.
Rows rows_at(const Matrix& w, int64_t m, int64_t interleaved, char* codes, char* numbers) {
    const Form form = row_of(w).facts.form;
    if (form != Form::kCodes) return {codes, form == Form::kHalves ? bf16_stride(w.k) : w.k * 4, 0, 0, interleaved, nullptr, nullptr, nullptr};
    const int64_t groups = w.k / w.group, all = rows_of_room(w, m, interleaved) * groups;
    auto* scales = reinterpret_cast<float*>(numbers);
    return {codes, coded_stride(w.k, w.digits), digit_bytes(w.k) * interleaved, groups, interleaved,
            scales, scales + all, reinterpret_cast<int32_t*>(scales + 2 * all)};
}

// Space for m rows of activations, `interleaved` of them interleaved.
Rows rows_for(const Matrix& w, int64_t m, int64_t interleaved, Scratch codes, Scratch numbers) {
    const RowBytes bytes = bytes_of_rows(w, m, interleaved);
    auto* first = static_cast<char*>(scratch(codes, static_cast<size_t>(bytes.codes)));
    return rows_at(w, m, interleaved, first, static_cast<char*>(scratch(numbers, static_cast<size_t>(bytes.numbers))));
}

// Columns column .. column + count of row r, rounded or quantized from f32 numbers; whole groups.
void fill_rows(const Matrix& w, const Rows& to, int64_t r, int64_t column, const float* from, int64_t count) {
    const KindRow& kind = row_of(w);
    char* row = to.codes + r * to.stride;
    if (kind.facts.form == Form::kCodes) {
        const int64_t first = column / w.group;
        const int32_t factor = start_factor(w, kind);
        if (w.digits == 1) quantize_row<1>(to.from<1>(r, first, w.group), from, count, w.group, factor);
        else quantize_row<2>(to.from<2>(r, first, w.group), from, count, w.group, factor);
    } else if (to.interleaved > 1) {
        round_pairs(to.codes + (column / 2 * to.interleaved + r) * 4, to.interleaved * 4, from, count);
    } else if (kind.facts.form == Form::kHalves) {
        round_row(reinterpret_cast<uint16_t*>(row) + column, from, count);
    } else {
        std::memcpy(reinterpret_cast<float*>(row) + column, from, static_cast<size_t>(count) * 4);
    }
}

// x [m, k] as the kernels of `w` read it, `interleaved` rows interleaved. Threads share columns out where rows are interleaved:
// neighbouring words are of different rows.
Rows read_rows(const Matrix& w, const float* x, int64_t m, int64_t interleaved) {
    if (row_of(w).facts.form == Form::kFloats)
        return {reinterpret_cast<char*>(const_cast<float*>(x)), w.k * 4, 0, 0, 1, nullptr, nullptr, nullptr};
    const Rows rows = rows_for(w, m, interleaved, Scratch::kActivations, Scratch::kScales);
    if (rows.interleaved > 1) {
        const int64_t columns = row_of(w).facts.form == Form::kCodes ? kCodedColumns : kHalfColumns;
        parallel_ranges((w.k + columns - 1) / columns, columns * m, [&](int64_t begin, int64_t end) {
            const int64_t first = begin * columns, last = end * columns < w.k ? end * columns : w.k;
            for (int64_t r = 0; r < m; ++r) fill_rows(w, rows, r, first, x + r * w.k + first, last - first);
        });
    } else {
        parallel_ranges(m, w.k, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r) fill_rows(w, rows, r, 0, x + r * w.k, w.k);
        });
    }
    return rows;
}

// The columns of rows in the weights' order.
const float* reorder(const float* x, const int32_t* order, int64_t m, int64_t k) {
    auto* out = static_cast<float*>(scratch(Scratch::kTasks, static_cast<size_t>(m * k) * 4));
    parallel_ranges(m, k, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
            for (int64_t i = 0; i < k; ++i) out[r * k + i] = x[r * k + order[i]];
    });
    return out;
}

LinearCall call_of(const Matrix& w, const Rows& rows, const float* bias, float* out) {
    return {w, bias, out, w.n, w.group ? w.k / w.group : 0, rows.codes, rows.stride, rows.digit, rows.scales, rows.starts, rows.sums};
}

void check_rows(int64_t m) {
    if (m < 1 || m > int64_t{1} << 40) fail("linear: rows must lie in [1, 2^40]");
}

void multiply(float* out, const float* x, const Matrix& w, const float* bias, int64_t m) {
    const Kernels& kernels = kernels_of(w);
    if (w.order) x = reorder(x, w.order, m, w.k);
    kernels.run(call_of(w, read_rows(w, x, m, kernels.interleaved(m)), bias, out), m);
}

void linear(float* out, const float* x, const Matrix* w, Optional<const float> bias, int64_t m) {
    check_rows(m);
    multiply(out, x, *w, bias.ptr, m);
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
