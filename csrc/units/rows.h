// Rows of activations in the form that a kind's kernels read: numbers as they are, bf16, or integers with a scale per group.
#pragma once

#include "math.h"

namespace quire::QUIRE_UNIT {
namespace {

// Bytes from one row of bf16 activations to the next: room for zeros up to a multiple of 32, and an odd multiple of 64, so that
// rows fall into different cache sets.
constexpr int64_t bf16_stride(int64_t k) { return (k * 2 + 127) / 128 * 128 + 64; }

// `count` numbers rounded to bf16, and zeros behind them up to a multiple of 32.
QUIRE_INLINE void round_row(uint16_t* to, const float* from, int64_t count) {
    for_lanes(count, [&](int64_t i, int lanes) { bf16_store(to + i, load_lanes(from + i, lanes)); });
    if (count % 32 && count % 32 <= 16) bf16_store(to + (count + 15) / 16 * 16, set1(0.0f));
}

// `count` numbers rounded to bf16, and a zero behind an odd one; `step` bytes from one pair to the next.
QUIRE_INLINE void round_pairs(char* to, int64_t step, const float* from, int64_t count) {
    for_lanes(count, [&](int64_t i, int lanes) {
        uint16_t pairs[16];
        bf16_store(pairs, load_lanes(from + i, lanes));
        for (int j = 0; j < 8; ++j) std::memcpy(to + (i / 2 + j) * step, pairs + 2 * j, 4);
    });
}

// Where the codes, scales, sums and starts of a row's groups go: a word of four codes and a group of one row, then those of the
// other `interleaved` rows; the codes of the second digit lie `digit` bytes behind those of the first.
struct CodedRow {
    char* codes;
    int64_t interleaved, digit;
    float* scales;
    float* sums;
    int32_t* starts;
};

// Rows of activations one below the other, `stride` bytes each, or all interleaved; integers have `groups` groups a row, numbers none.
struct Rows {
    char* codes;
    int64_t stride, digit, groups, interleaved;
    float* scales;
    float* sums;
    int32_t* starts;

    // Group g of row r and those behind it.
    template <int kDigits>
    CodedRow from(int64_t r, int64_t g, int64_t group) const {
        const int64_t at = g * interleaved + r * (interleaved > 1 ? 1 : groups);
        char* first = codes + g * group * interleaved + r * (interleaved > 1 ? 4 : stride);
        return {first, interleaved, digit, scales + at, sums + at, starts + at * kDigits};
    }
};

// Columns that a thread takes at least of rows that lie side by side; of codes a multiple of every group.
constexpr int64_t kCodedColumns = 512, kHalfColumns = 128;

// Bytes of rows of activations: of their numbers or codes, and of codes' scales, sums and starts.
struct RowBytes {
    int64_t codes, numbers;
};

// Bytes of a digit of a row of codes.
constexpr int64_t digit_bytes(int64_t k) { return (k + 63) / 64 * 64; }
// Odd multiples of 64: rows fall into different cache sets.
constexpr int64_t coded_stride(int64_t k, int64_t digits) { return (digit_bytes(k) * digits) | 64; }

// 16 codes of a row.
QUIRE_INLINE void store_codes(char* to, int64_t interleaved, I codes) {
    if (interleaved == 1) return store_i8(reinterpret_cast<int8_t*>(to), codes);
    int8_t words[16];
    store_i8(words, codes);
    for (int i = 0; i < 4; ++i) std::memcpy(to + i * 4 * interleaved, words + i * 4, 4);
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
            char* at = to.codes + (g * group + i) * to.interleaved;
            if constexpr (kDigits == 2) {
                // never halfway between two digits, as 255 is odd
                const I high = round_i(mul(to_f(code), set1(1.0f / 255.0f)));
                code = sub_i(code, times255(high));
                sum[0] = add_i(sum[0], high);
                store_codes(at, to.interleaved, high);
            }
            sum[kDigits - 1] = add_i(sum[kDigits - 1], code);
            store_codes(at + (kDigits - 1) * to.digit, to.interleaved, code);
        }
        int32_t total = 0;
        for (int d = 0; d < kDigits; ++d) {
            const int32_t part = hsum_i(sum[d]);
            to.starts[g * to.interleaved * kDigits + d] = factor * part;
            total = total * 255 + part;
        }
        to.scales[g * to.interleaved] = top / kMost;
        to.sums[g * to.interleaved] = static_cast<float>(total) * (top / kMost);
    }
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
