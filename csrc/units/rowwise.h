// What some families need besides elementwise.h: LayerNorm, norms of parts of a row, learned positions, factors and caps.
#pragma once

// out may be x. Two passes: the mean first, so that a large common offset does not cancel the variance away.
QUIRE_INLINE void layernorm_row(float* out, const float* x, const float* weight, const float* bias, int64_t d, float eps) {
    F sum = set1(0.0f);
    for_lanes(d, [&](int64_t i, int n) { sum = add(sum, load_lanes(x + i, n)); });
    const F mean = set1(hsum(sum) / static_cast<float>(d));
    for_lanes(d, [&](int64_t i, int n) { store_lanes(out + i, sub(load_lanes(x + i, n), mean), n); });
    F squares = set1(0.0f);
    for_lanes(d, [&](int64_t i, int n) {
        const F v = load_lanes(out + i, n);
        squares = fma(v, v, squares);
    });
    const F s = set1(1.0f / __builtin_sqrtf(hsum(squares) / static_cast<float>(d) + eps));
    for_lanes(d, [&](int64_t i, int n) {
        const F y = mul(mul(load_lanes(out + i, n), s), load_lanes(weight + i, n));
        store_lanes(out + i, bias ? add(y, load_lanes(bias + i, n)) : y, n);
    });
}

QUIRE_INLINE void add_row(float* x, const float* delta, int64_t d) {
    for_lanes(d, [&](int64_t i, int n) { store_lanes(x + i, add(load_lanes(x + i, n), load_lanes(delta + i, n)), n); });
}

void layernorm(float* out, const float* x, const float* weight, Optional<const float> bias, int64_t rows, int64_t d, double eps) {
    parallel_ranges(rows, 2 * d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
            layernorm_row(out + r * d, x + r * d, weight, bias.ptr, d, static_cast<float>(eps));
    });
}

void add_layernorm(float* out, float* x, const float* delta, const float* weight, Optional<const float> bias, int64_t rows,
                   int64_t d, double eps) {
    parallel_ranges(rows, 3 * d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            add_row(x + r * d, delta + r * d, d);
            layernorm_row(out + r * d, x + r * d, weight, bias.ptr, d, static_cast<float>(eps));
        }
    });
}

// Columns start .. start + count of every row of `width` numbers, in pieces of `span`.
void norm_spans(float* x, const SpansDescriptor* by, int64_t rows, int64_t width) {
    const SpansDescriptor s = *by;
    if (s.span < 1 || s.count % s.span || s.start < 0 || s.start > width - s.count) fail("norm_spans: the spans do not fit the row");
    const int64_t span = s.span, spans = s.count / span;
    parallel_ranges(rows * spans, 2 * span, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) {
            const int64_t offset = at % spans * span;
            float* part = x + at / spans * width + s.start + offset;
            if (s.centered) layernorm_row(part, part, s.weight + offset, nullptr, span, s.eps);
            else norm_row(part, part, s.weight + offset, span, s.eps);
        }
    });
}

void add_rows(float* x, const float* delta, int64_t rows, int64_t d) {
    parallel_ranges(rows, d, [&](int64_t begin, int64_t end) { add_row(x + begin * d, delta + begin * d, (end - begin) * d); });
}

// x [rows, d] into columns at .. at + d of out [rows, width].
void place_columns(float* out, const float* x, int64_t rows, int64_t d, int64_t stride, int64_t width, int64_t at) {
    if (at < 0 || at > width - d) fail("place_columns: the columns do not fit the row");
    parallel_ranges(rows, d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) std::memcpy(out + r * width + at, x + r * stride, static_cast<size_t>(d) * sizeof(float));
    });
}

// table [entries, d].
void add_positions(float* x, const int32_t* positions, const void* table, int64_t rows, int64_t d, int64_t entries, int64_t offset,
                   int64_t numbers) {
    if (numbers < 0 || numbers >= kNumbers) fail("add_positions: unknown numbers");
    for (int64_t r = 0; r < rows; ++r)
        if (offset < 0 || positions[r] < 0 || positions[r] >= entries - offset) fail("add_positions: a position lies outside the table");
    parallel_ranges(rows, d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const int64_t at = (positions[r] + offset) * d;
            for_lanes(d, [&](int64_t i, int n) {
                float* to = x + r * d + i;
                store_lanes(to, add(load_lanes(to, n), load_numbers(table, at + i, n, numbers)), n);
            });
        }
    });
}

constexpr int64_t kRowPiece = 4096;

// f(F) -> F over `count` numbers in place.
template <typename Change>
void change_all(float* x, int64_t count, Change f) {
    const int64_t pieces = (count + kRowPiece - 1) / kRowPiece;
    parallel_ranges(pieces, kRowPiece, [&](int64_t begin, int64_t end) {
        const int64_t from = begin * kRowPiece, stop = end * kRowPiece < count ? end * kRowPiece : count;
        for_lanes(stop - from, [&](int64_t i, int n) { store_lanes(x + from + i, f(load_lanes(x + from + i, n)), n); });
    });
}

void scale(float* x, int64_t count, double factor) {
    const F s = set1(static_cast<float>(factor));
    change_all(x, count, [&](F v) { return mul(v, s); });
}

void softcap(float* x, int64_t count, double cap) {
    const F c = set1(static_cast<float>(cap));
    change_all(x, count, [&](F v) { return mul(vtanh(div(v, c)), c); });
}

void clip(float* x, int64_t count, double limit) {
    const F high = set1(static_cast<float>(limit)), low = set1(static_cast<float>(-limit));
    change_all(x, count, [&](F v) { return vmin(high, vmax(low, v)); });
}
