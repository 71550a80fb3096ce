// Linear layers of integer weights: activations to integers, then tiles (included by linear.h).
#pragma once

// Where the codes, scales, sums and starts of a row's groups go: a word of four codes and a group of one row, then those of the
// other rows `abreast`; the codes of the second digit lie `digit` bytes behind those of the first.
struct CodedRow {
    char* codes;
    int64_t abreast, digit;
    float* scales;
    float* sums;
    int32_t* starts;
};

// Rows of activations in integers, one below the other, `stride` bytes of codes and `groups` groups for each, or all `abreast`.
// The gated MLP keeps rows of numbers in it too: they have no groups.
struct CodedRows {
    char* codes;
    int64_t stride, digit, groups, abreast;
    float* scales;
    float* sums;
    int32_t* starts;

    // Group g of row r and those behind it.
    template <int kDigits>
    CodedRow from(int64_t r, int64_t g, int64_t group) const {
        const int64_t at = g * abreast + r * (abreast > 1 ? 1 : groups);
        char* first = codes + g * group * abreast + r * (abreast > 1 ? 4 : stride);
        return {first, abreast, digit, scales + at, sums + at, starts + at * kDigits};
    }
};

constexpr int64_t kCodedColumns = 512;  // that a thread takes at least, a multiple of every group

template <int kDigits>
CodedRows coded_rows(int64_t m, int64_t k, int64_t group, int64_t abreast, Scratch codes, Scratch numbers) {
    const int64_t rows = abreast > m ? abreast : m, groups = k / group, digit = (k + 63) / 64 * 64;
    const int64_t stride = (digit * kDigits) | 64;  // odd multiples of 64: rows fall into different cache sets
    auto* scales = static_cast<float*>(scratch(numbers, static_cast<size_t>(rows * groups) * (8 + 4 * kDigits)));
    return {static_cast<char*>(scratch(codes, static_cast<size_t>(rows * stride))), stride, digit * abreast, groups, abreast,
            scales, scales + rows * groups, reinterpret_cast<int32_t*>(scales + 2 * rows * groups)};
}

// 16 codes of a row.
QUIRE_INLINE void store_codes(char* to, int64_t abreast, I codes) {
    if (abreast == 1) return store_i8(reinterpret_cast<int8_t*>(to), codes);
    int8_t words[16];
    store_i8(words, codes);
    for (int i = 0; i < 4; ++i) std::memcpy(to + i * 4 * abreast, words + i * 4, 4);
}

// Codes, scale, start values and sum of each group of a row. The maximum is taken over bit patterns, which orders NaN above
// all numbers: a NaN activation makes the scale and with it the whole output NaN instead of vanishing.
template <int kDigits>
QUIRE_INLINE void quantize_row(const CodedRow& to, const float* x, int64_t k, int64_t group, int32_t factor) {
    constexpr float kMost = kDigits == 1 ? 127.0f : 127.0f * 256.0f;
    constexpr float kLeast = 2e-34f;  // below it the inverse of a step is infinite
    for (int64_t g = 0; g < k / group; ++g) {
        const float* in = x + g * group;
        I most = set1_i(0);
        for (int64_t i = 0; i < group; i += 16) most = max_i(most, bits_of(vabs(load(in + i))));
        const int32_t bits = hmax_i(most);
        float top;
        std::memcpy(&top, &bits, 4);
        const F inverse = set1(top > kLeast ? kMost / top : 0.0f);
        I sum[kDigits];
        for (int d = 0; d < kDigits; ++d) sum[d] = set1_i(0);
        for (int64_t i = 0; i < group; i += 16) {
            const F scaled = vmin(vmax(mul(load(in + i), inverse), set1(-kMost)), set1(kMost));  // NaN: a code like any other
            I code = round_i(scaled);
            char* at = to.codes + (g * group + i) * to.abreast;
            if constexpr (kDigits == 2) {
                // never halfway between two digits, as 255 is odd
                const I high = round_i(mul(to_f(code), set1(1.0f / 255.0f)));
                code = sub_i(code, times255(high));
                sum[0] = add_i(sum[0], high);
                store_codes(at, to.abreast, high);
            }
            sum[kDigits - 1] = add_i(sum[kDigits - 1], code);
            store_codes(at + (kDigits - 1) * to.digit, to.abreast, code);
        }
        int32_t total = 0;
        for (int d = 0; d < kDigits; ++d) {
            const int32_t part = hsum_i(sum[d]);
            to.starts[g * to.abreast * kDigits + d] = factor * part;
            total = total * 255 + part;
        }
        to.scales[g * to.abreast] = top / kMost;
        to.sums[g * to.abreast] = static_cast<float>(total) * (top / kMost);
    }
}

// All of x [m, k]. Threads share columns out where rows lie side by side: neighbouring words are of different rows.
template <int kDigits>
void quantize_rows(const CodedRows& to, const float* x, int64_t m, int64_t k, int64_t group, int32_t factor) {
    const auto part = [&](int64_t r, int64_t first, int64_t last) {
        quantize_row<kDigits>(to.from<kDigits>(r, first / group, group), x + r * k + first, last - first, group, factor);
    };
    if (to.abreast > 1) {
        parallel_ranges((k + kCodedColumns - 1) / kCodedColumns, kCodedColumns * m, [&](int64_t begin, int64_t end) {
            for (int64_t r = 0; r < m; ++r) part(r, begin * kCodedColumns, end * kCodedColumns < k ? end * kCodedColumns : k);
        });
    } else {
        parallel_ranges(m, k, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r) part(r, 0, k);
        });
    }
}

// What integer weights come with, beside their codes.
struct CodeParts {
    Optional<const int8_t> zeros;
    Optional<const char> mins;
    Optional<const uint8_t> table;
    Optional<const int32_t> order;  // the activation that each column of the weights multiplies
    bool scales_f32;
};

// The columns of rows in the weights' order.
const float* reorder(const float* x, const int32_t* order, int64_t m, int64_t k) {
    auto* out = static_cast<float*>(scratch(Scratch::kTasks, static_cast<size_t>(m * k) * 4));
    parallel_ranges(m, k, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
            for (int64_t i = 0; i < k; ++i) out[r * k + i] = x[r * k + order[i]];
    });
    return out;
}

template <WeightKind kKind>
void linear_codes(float* out, const float* x, const char* weights, const char* scales, const CodeParts& parts, const float* bias,
                  int64_t m, int64_t n, int64_t k, int64_t group) {
    constexpr int kDigits = digits_of(kKind);
    check_linear(m, n, k);
    if ((group != 16 && group != 32 && group != 64 && group != 128) || k % group)
        fail("linear: columns must be a multiple of the group (16, 32, 64, 128)");
    if (parts.order.ptr) x = reorder(x, parts.order.ptr, m, k);
    const CodedRows rows = coded_rows<kDigits>(m, k, group, abreast_of<kKind>(m), Scratch::kActivations, Scratch::kScales);
    // 4-bit codes lie 8 above their numbers unless a minimum says what 0 stands for
    const int32_t offset = is_int4(kKind) ? (parts.mins.ptr ? 0 : 8) : kStart8;
    quantize_rows<kDigits>(rows, x, m, k, group, parts.zeros.ptr ? -1 : -offset);
    const LinearCall c{out, n, weights, scales, parts.zeros.ptr, bias, n, k, group, rows.groups, parts.scales_f32,
                       rows.codes, rows.stride, rows.scales, rows.starts, parts.mins.ptr, rows.sums, parts.table.ptr, rows.digit};
    run_linear<kKind>(c, m);
}

template <WeightKind kNarrow, WeightKind kWide, class... Args>
void linear_digits(int64_t digits, Args... args) {
    if (digits == 1) return linear_codes<kNarrow>(args...);
    if (digits == 2) return linear_codes<kWide>(args...);
    fail("linear: activations have one or two digits");
}

void linear_int4(float* out, const float* x, const char* weights, const char* scales, Optional<const int8_t> zeros,
                 Optional<const char> mins, Optional<const int32_t> order, int64_t scales_f32, int64_t digits,
                 Optional<const float> bias, int64_t m, int64_t n, int64_t k, int64_t group) {
    const CodeParts parts{zeros, mins, {nullptr}, order, scales_f32 != 0};
    linear_digits<WeightKind::kInt4, WeightKind::kInt4Wide>(digits, out, x, weights, scales, parts, bias.ptr, m, n, k,
                                                                  group);
}

void linear_int8(float* out, const float* x, const char* weights, const char* scales, Optional<const int8_t> zeros,
                 Optional<const char> mins, Optional<const int32_t> order, int64_t scales_f32, int64_t digits,
                 Optional<const float> bias, int64_t m, int64_t n, int64_t k, int64_t group) {
    const CodeParts parts{zeros, mins, {nullptr}, order, scales_f32 != 0};
    linear_digits<WeightKind::kInt8, WeightKind::kInt8Wide>(digits, out, x, weights, scales, parts, bias.ptr, m, n, k,
                                                                  group);
}

// `table`: [2][16] digits + 128; the second half is not read when numbers have one digit.
void linear_table4(float* out, const float* x, const char* weights, const char* scales, const uint8_t* table, int64_t planes,
                   Optional<const int32_t> order, int64_t scales_f32, int64_t digits, Optional<const float> bias, int64_t m,
                   int64_t n, int64_t k, int64_t group) {
    const CodeParts parts{{nullptr}, {nullptr}, {table}, order, scales_f32 != 0};
    if (planes == 1) return linear_digits<WeightKind::kTable, WeightKind::kTableWide>(digits, out, x, weights, scales, parts, bias.ptr, m, n, k,
                                                                  group);
    if (planes != 2) fail("linear: numbers of a table have one or two digits");
    linear_digits<WeightKind::kTablePair, WeightKind::kTablePairWide>(digits, out, x, weights, scales, parts, bias.ptr, m, n, k,
                                                                  group);
}
