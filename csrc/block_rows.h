// How rows are packed sixteen beside each other: those of numbers and codes (pack.cpp), and those of a file in ggml's block formats
// (pack_blocks.cpp, pack_blocks32.cpp), of which single rows are taken as numbers, too.
//
// Four rows go together. Their bytes are transposed, so that a vector holds the same four bytes of each; taking codes apart and
// putting them together are then operations on whole vectors.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "facts.h"
#include "pool.h"
#include "table_rows.h"

namespace quire {

constexpr int64_t kTogether = 4;

typedef uint32_t Words __attribute__((vector_size(16)));  // a word of each of four rows
typedef uint64_t Doubles __attribute__((vector_size(16)));

template <class T>
inline T load(const uint8_t* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// Words 0 .. count - 1 of four rows.
template <int kCount>
inline void transpose_words(Words* to, const uint8_t* const* rows, int64_t at) {
    static_assert(kCount % 4 == 0);
    for (int i = 0; i < kCount; i += 4) {
        Words r[4];
        for (int j = 0; j < 4; ++j) r[j] = load<Words>(rows[j] + at + 4 * i);
        const auto a = reinterpret_cast<Doubles>(__builtin_shufflevector(r[0], r[1], 0, 4, 1, 5));
        const auto b = reinterpret_cast<Doubles>(__builtin_shufflevector(r[2], r[3], 0, 4, 1, 5));
        const auto c = reinterpret_cast<Doubles>(__builtin_shufflevector(r[0], r[1], 2, 6, 3, 7));
        const auto d = reinterpret_cast<Doubles>(__builtin_shufflevector(r[2], r[3], 2, 6, 3, 7));
        to[i] = reinterpret_cast<Words>(__builtin_shufflevector(a, b, 0, 2));
        to[i + 1] = reinterpret_cast<Words>(__builtin_shufflevector(a, b, 1, 3));
        to[i + 2] = reinterpret_cast<Words>(__builtin_shufflevector(c, d, 0, 2));
        to[i + 3] = reinterpret_cast<Words>(__builtin_shufflevector(c, d, 1, 3));
    }
}

struct BlockRows {
    const uint8_t* data;
    const int64_t* order;  // row of the data that is row i, or null
    int64_t n, k, stride;
};

// pack(at, blocks, rows) for the blocks of kColumns columns, kBytes each, of every 16 rows: those beyond `rows` are zeros, `at` counts
// the calls in the order of the packed matrix. False when one of them was.
template <int64_t kColumns, int64_t kBytes, class Pack>
bool for_each_block(const BlockRows& from, const Pack& pack) {
    static constexpr uint8_t kBlank[kBytes] = {};
    const int64_t count = from.k / kColumns;
    std::atomic<bool> good{true};
    parallel_for((from.n + kLanes - 1) / kLanes, [&](int64_t block, int) {
        const int64_t row = block * kLanes, rows = from.n - row < kLanes ? from.n - row : kLanes;
        const uint8_t* firsts[kLanes];
        for (int64_t lane = 0; lane < rows; ++lane)
            firsts[lane] = from.data + (from.order ? from.order[row + lane] : row + lane) * from.stride;
        for (int64_t i = 0; i < count; ++i) {
            const uint8_t* blocks[kLanes];
            for (int64_t lane = 0; lane < kLanes; ++lane) blocks[lane] = lane < rows ? firsts[lane] + i * kBytes : kBlank;
            if (!pack(block * count + i, blocks, rows)) good.store(false, std::memory_order_relaxed);
        }
    });
    return good.load();
}

// A table of tokens that lies in a file: `vocabulary` rows of blocks, `stride` bytes apart; `first` as of row_of_token. `numbers`: those
// that 4-bit codes stand for, or null.
struct BlockTable {
    const uint8_t* data;
    int64_t vocabulary, k, stride, first;
    const int16_t* numbers;
};

// decode(to, block) for the blocks of kColumns columns, kBytes each, of the row of each token: out [rows, k].
template <int64_t kColumns, int64_t kBytes, class Decode>
void rows_of_table(float* out, const int32_t* tokens, int64_t rows, const BlockTable& table, const Decode& decode) {
    for (int64_t r = 0; r < rows; ++r) row_of_token(tokens[r], table.first, table.vocabulary);
    parallel_ranges(rows, 4 * table.k, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const int64_t row = row_of_token(tokens[r], table.first, table.vocabulary);
            float* to = out + r * table.k;
            if (row < 0) {
                std::fill_n(to, table.k, -0.0f);
                continue;
            }
            const uint8_t* block = table.data + row * table.stride;
            for (int64_t i = 0; i < table.k; i += kColumns, block += kBytes) decode(to + i, block);
        }
    });
}

}  // namespace quire
