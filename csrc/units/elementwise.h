// Norms, activations, embedding and row selection: a row's result depends on that row only.
#pragma once

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

void rmsnorm(float* out, const float* x, const float* weight, int64_t rows, int64_t d, double eps) {
    parallel_ranges(rows, d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) norm_row(out + r * d, x + r * d, weight, d, static_cast<float>(eps));
    });
}

void add_rmsnorm(float* out, float* x, const float* delta, const float* weight, int64_t rows, int64_t d, double eps) {
    parallel_ranges(rows, 2 * d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            float* row = x + r * d;
            for_lanes(d, [&](int64_t i, int n) {
                store_lanes(row + i, add(load_lanes(row + i, n), load_lanes(delta + r * d + i, n)), n);
            });
            norm_row(out + r * d, row, weight, d, static_cast<float>(eps));
        }
    });
}

// The row of a table of `rows` that a token has, or -1: another table has it. `first`: of the table's tokens, or -1: it has all.
inline int64_t row_of_token(int64_t token, int64_t first, int64_t rows) {
    const int64_t row = token - std::max<int64_t>(first, 0);
    const bool here = row >= 0 && row < rows;
    if (!here && (first < 0 || token < 0)) fail("embedding: a token id lies outside the table");
    return here ? row : -1;
}

enum Numbers : int64_t { kNumbersF32, kNumbersBf16, kNumbersF16, kNumbers };  // of a table; TABLES of ops/cpu/layers.py

// Numbers at .. at + n of a table, n up to 16.
QUIRE_INLINE F load_numbers(const void* table, int64_t at, int n, int64_t numbers) {
    if (numbers == kNumbersF32) return load_lanes(static_cast<const float*>(table) + at, n);
    uint16_t halves[16] = {};
    std::memcpy(halves, static_cast<const uint16_t*>(table) + at, static_cast<size_t>(n) * 2);
    return numbers == kNumbersBf16 ? bf16_load(halves) : f16_load(halves);
}

// table [vocabulary, d].
void embedding(float* out, const int32_t* tokens, const void* table, int64_t rows, int64_t d, int64_t vocabulary, int64_t numbers, int64_t first) {
    if (numbers < 0 || numbers >= kNumbers) fail("embedding: unknown numbers");
    for (int64_t r = 0; r < rows; ++r) row_of_token(tokens[r], first, vocabulary);
    parallel_ranges(rows, d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const int64_t row = row_of_token(tokens[r], first, vocabulary);
            if (row < 0) {
                std::fill_n(out + r * d, d, -0.0f);
                continue;
            }
            for_lanes(d, [&](int64_t i, int n) { store_lanes(out + r * d + i, load_numbers(table, row * d + i, n, numbers), n); });
        }
    });
}

enum Activation : int64_t { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kRelu2 = 4, kActivations = 5 };

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

template <int64_t kKind, bool kGated>
void activate_rows(float* out, const float* x, int64_t rows, int64_t f) {
    const int64_t stride = kGated ? 2 * f : f;
    constexpr int64_t kStep = 1024;
    const int64_t pieces = (f + kStep - 1) / kStep;
    parallel_ranges(rows * pieces, 4 * (f < kStep ? f : kStep), [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) {
            const int64_t r = at / pieces, from = at % pieces * kStep, count = f - from < kStep ? f - from : kStep;
            const float* gate = x + r * stride + from;
            float* target = out + r * f + from;
            for_lanes(count, [&](int64_t i, int n) {
                F y = activate<kKind>(load_lanes(gate + i, n));
                if constexpr (kGated) y = mul(y, load_lanes(gate + f + i, n));
                store_lanes(target + i, y, n);
            });
        }
    });
}

template <bool kGated>
void activate_kind(float* out, const float* x, int64_t rows, int64_t f, int64_t kind) {
    switch (kind) {
        case kSilu: return activate_rows<kSilu, kGated>(out, x, rows, f);
        case kGelu: return activate_rows<kGelu, kGated>(out, x, rows, f);
        case kGeluTanh: return activate_rows<kGeluTanh, kGated>(out, x, rows, f);
        case kRelu: return activate_rows<kRelu, kGated>(out, x, rows, f);
        case kRelu2: return activate_rows<kRelu2, kGated>(out, x, rows, f);
        default: fail("activation: unknown kind");
    }
}

void gated_activation(float* out, const float* gate_up, int64_t rows, int64_t f, int64_t kind) {
    activate_kind<true>(out, gate_up, rows, f, kind);
}

void activation(float* out, const float* x, int64_t rows, int64_t f, int64_t kind) {
    activate_kind<false>(out, x, rows, f, kind);
}

// out [count, d] = rows of x [total, d] (null: all in turn), plus those of delta.
void take_rows(float* out, const float* x, Optional<const float> delta, Optional<const int32_t> rows, int64_t count, int64_t d, int64_t total) {
    if (!rows.ptr && count != total) fail("take_rows: all rows are not as many");
    for (int64_t r = 0; rows.ptr && r < count; ++r)
        if (rows.ptr[r] < 0 || rows.ptr[r] >= total) fail("take_rows: a row lies outside the batch");
    parallel_ranges(count, d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const int64_t at = (rows.ptr ? rows.ptr[r] : r) * d;
            for_lanes(d, [&](int64_t i, int n) {
                const F v = load_lanes(x + at + i, n);
                store_lanes(out + r * d + i, delta.ptr ? add(v, load_lanes(delta.ptr + at + i, n)) : v, n);
            });
        }
    });
}
