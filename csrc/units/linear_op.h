// linear: out [m, n] = x [m, k] times a packed matrix, plus bias.
#pragma once

// What a group's sum of codes is multiplied with to be the start of its sums, see LinearCall.
QUIRE_INLINE int32_t start_factor(const Matrix& w, const KindRow& row) {
    return w.zeros ? -1 : -(w.mins ? row.offset_with_mins : row.offset);
}

// Space for m rows of activations in the form that the kernels of `w` read.
Rows rows_for(const Matrix& w, int64_t m, Scratch codes, Scratch numbers) {
    const int64_t abreast = kernels_of(w).abreast(m);
    const Form form = row_of(w).form;
    if (form == Form::kCodes) return (w.digits == 1 ? coded_rows<1> : coded_rows<2>)(m, w.k, w.group, abreast, codes, numbers);
    const int64_t stride = form == Form::kHalves ? bf16_stride(w.k) : w.k * 4;
    auto* space = static_cast<char*>(scratch(codes, static_cast<size_t>((abreast > m ? abreast : m) * stride)));
    return {space, stride, 0, 0, abreast, nullptr, nullptr, nullptr};
}

// Columns column .. column + count of row r, rounded or quantized from f32 numbers; whole groups.
void fill_rows(const Matrix& w, const Rows& to, int64_t r, int64_t column, const float* from, int64_t count) {
    const KindRow& kind = row_of(w);
    char* row = to.codes + r * to.stride;
    if (kind.form == Form::kCodes) {
        const int64_t first = column / w.group;
        const int32_t factor = start_factor(w, kind);
        if (w.digits == 1) quantize_row<1>(to.from<1>(r, first, w.group), from, count, w.group, factor);
        else quantize_row<2>(to.from<2>(r, first, w.group), from, count, w.group, factor);
    } else if (to.abreast > 1) {
        round_pairs(to.codes + (column / 2 * to.abreast + r) * 4, to.abreast * 4, from, count);
    } else if (kind.form == Form::kHalves) {
        round_row(reinterpret_cast<uint16_t*>(row) + column, from, count);
    } else {
        std::memcpy(reinterpret_cast<float*>(row) + column, from, static_cast<size_t>(count) * 4);
    }
}

// x [m, k] as the kernels of `w` read it. Threads share columns out where rows lie side by side: neighbouring words are of
// different rows.
Rows read_rows(const Matrix& w, const float* x, int64_t m) {
    if (row_of(w).form == Form::kFloats)
        return {reinterpret_cast<char*>(const_cast<float*>(x)), w.k * 4, 0, 0, 1, nullptr, nullptr, nullptr};
    const Rows rows = rows_for(w, m, Scratch::kActivations, Scratch::kScales);
    if (rows.abreast > 1) {
        const int64_t columns = row_of(w).form == Form::kCodes ? kCodedColumns : kHalfColumns;
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

LinearCall call_of(const Matrix& w, const Rows& rows, const float* bias, float* out) {
    return {w, bias, out, w.n, w.group ? w.k / w.group : 0, rows.codes, rows.stride, rows.digit, rows.scales, rows.starts, rows.sums};
}

void check_rows(int64_t m) {
    if (m < 1 || m > int64_t{1} << 40) fail("linear: rows must lie in [1, 2^40]");
}

void multiply(float* out, const float* x, const Matrix& w, const float* bias, int64_t m) {
    const Kernels& kernels = kernels_of(w);
    if (w.order) x = reorder(x, w.order, m, w.k);
    kernels.run(call_of(w, read_rows(w, x, m), bias, out), m);
}

void linear(float* out, const float* x, const Matrix* w, Optional<const float> bias, int64_t m) {
    check_rows(m);
    multiply(out, x, *w, bias.ptr, m);
}
