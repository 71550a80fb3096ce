// Activations rounded to bf16, in the order that the tiles of linear.h read (included by linear.h).
#pragma once

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

// Rows of x [m, k] side by side. Threads share columns out, not rows: neighbouring words are of different rows.
QUIRE_INLINE void round_abreast(char* to, const float* x, int64_t m, int64_t k, int64_t abreast) {
    constexpr int64_t kColumns = 128;
    parallel_ranges((k + kColumns - 1) / kColumns, kColumns * m, [&](int64_t begin, int64_t end) {
        const int64_t first = begin * kColumns, last = end * kColumns < k ? end * kColumns : k;
        for (int64_t r = 0; r < m; ++r) round_pairs(to + (first / 2 * abreast + r) * 4, abreast * 4, x + r * k + first, last - first);
    });
}

// Activations [m, k] in bf16, in the space of rows `bf16_stride` bytes apart; words of `abreast` rows lie side by side.
const char* rounded_rows(const float* x, int64_t m, int64_t k, int64_t abreast) {
    const int64_t stride = bf16_stride(k);
    auto* rounded = static_cast<char*>(scratch(Scratch::kActivations, static_cast<size_t>((m + abreast - 1) / abreast * abreast * stride)));
    if (abreast > 1) {
        round_abreast(rounded, x, m, k, abreast);
    } else {
        parallel_ranges(m, k, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r) round_row(reinterpret_cast<uint16_t*>(rounded + r * stride), x + r * k, k);
        });
    }
    return rounded;
}
