// Rows of a file in ggml's formats of blocks of 32 numbers straight into integers of 4 or 8 bits in the layouts of pack.cpp. Rows of
// tables of tokens, which stay in the file, become numbers when they are asked for.
// What the bytes mean is defined in quant/gguf_decode.py, to whose numbers these are equal to the bit.
#include <bit>
#include <cstdint>
#include <cstring>

#include "block_rows.h"
#include "registry.h"
#include "super_block_planes.h"

namespace quire {
namespace {

constexpr int64_t kColumns = 32;

// Codes 0 .. 15 of 32 columns, in eight words of four, from 16 bytes: low halves, then high ones.
void nibbles(Words* w, const uint8_t* const* rows, int64_t at) {
    Words q[4];
    transpose_words<4>(q, rows, at);
    for (int i = 0; i < 4; ++i) {
        w[i] = q[i] & 0x0f0f0f0fu;
        w[4 + i] = q[i] >> 4 & 0x0f0f0f0fu;
    }
}

// Codes 0 .. 31: their fifth bits are those of the four bytes at `high`.
void with_fifths(Words* w, const uint8_t* const* rows, int64_t high, int64_t at) {
    nibbles(w, rows, at);
    Words bits{};
    for (int j = 0; j < kTogether; ++j) bits[j] = load<uint32_t>(rows[j] + high);
    for (int i = 0; i < 8; ++i) {
        const Words four = bits >> (4 * i) & 15u, pairs = four | four << 14, spread = pairs | pairs << 7;  // bit j is at 8 j
        w[i] |= (spread & 0x01010101u) << 4;
    }
}

bool is_finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }
bool is_finite(uint32_t) { return true; }  // a power of two
float number_of(uint16_t half) { return of_f16(half); }
float number_of(uint32_t bits) { return std::bit_cast<float>(bits); }

// Each format: `kBytes` of a block; `kBits` of a code; `kMin`, where its float16 minimum lies (-1: none); `kFill`, a word of codes that
// stand for zero; `kTable`: codes stand for numbers of a table. `codes` gives the eight words of 32 columns of four rows, four codes
// each, with the offset of the packed layout.

struct Halves {
    static uint16_t scale(const uint8_t* block) { return load<uint16_t>(block); }
};

struct Q40 : Halves {
    static constexpr int kBytes = 18, kBits = 4, kMin = -1;
    static constexpr bool kTable = false;
    static constexpr uint32_t kFill = 0x88888888u;
    static void codes(Words* w, const uint8_t* const* rows) { nibbles(w, rows, 2); }
};

struct Q41 : Halves {
    static constexpr int kBytes = 20, kBits = 4, kMin = 2;
    static constexpr bool kTable = false;
    static constexpr uint32_t kFill = 0;
    static void codes(Words* w, const uint8_t* const* rows) { nibbles(w, rows, 4); }
};

struct Q50 : Halves {
    static constexpr int kBytes = 22, kBits = 8, kMin = -1;
    static constexpr bool kTable = false;
    static constexpr uint32_t kFill = 0x80808080u;
    static void codes(Words* w, const uint8_t* const* rows) {
        with_fifths(w, rows, 2, 6);
        for (int i = 0; i < 8; ++i) w[i] += 0x70707070u;  // 16 less, 128 more
    }
};

struct Q51 : Halves {
    static constexpr int kBytes = 24, kBits = 8, kMin = 2;
    static constexpr bool kTable = false;
    static constexpr uint32_t kFill = 0x80808080u;
    static void codes(Words* w, const uint8_t* const* rows) {
        with_fifths(w, rows, 4, 8);
        for (int i = 0; i < 8; ++i) w[i] |= 0x80808080u;
    }
};

struct Q80 : Halves {
    static constexpr int kBytes = 34, kBits = 8, kMin = -1;
    static constexpr bool kTable = false;
    static constexpr uint32_t kFill = 0x80808080u;
    static void codes(Words* w, const uint8_t* const* rows) {
        transpose_words<8>(w, rows, 2);
        for (int i = 0; i < 8; ++i) w[i] ^= 0x80808080u;
    }
};

struct IQ4NL : Q40 {
    static constexpr bool kTable = true;
    static constexpr uint32_t kFill = 0;
};

struct MXFP4 {
    static constexpr int kBytes = 17, kBits = 4, kMin = -1;
    static constexpr bool kTable = true;
    static constexpr uint32_t kFill = 0;
    // 2^(e - 128) as a float32: subnormal for 0 and 1.
    static uint32_t scale(const uint8_t* block) { return *block < 2 ? 0x00200000u << *block : (*block - 1u) << 23; }
    static void codes(Words* w, const uint8_t* const* rows) { nibbles(w, rows, 1); }
};

struct Target {
    uint8_t* codes;
    uint8_t* scales;
    uint16_t* mins;  // null where the format has none
};

template <class Format>
void pack_codes(uint8_t* to, const uint8_t* const* blocks, int64_t rows) {
    for (int64_t first = 0; first < kLanes; first += kTogether) {
        Words w[8], four_bits[4];
        Format::codes(w, blocks + first);
        if constexpr (Format::kBits == 4) planes_of<4>(four_bits, w);
        const Words* words = Format::kBits == 4 ? four_bits : w;
        for (int i = 0; i < Format::kBits; ++i) std::memcpy(to + i * 64 + first * 4, words + i, 16);
    }
    for (int64_t lane = rows; lane < kLanes; ++lane)
        for (int i = 0; i < Format::kBits; ++i) std::memcpy(to + i * 64 + lane * 4, &Format::kFill, 4);
}

template <class Format>
bool pack_format(const Target& out, const BlockRows& from) {
    return for_each_block<kColumns, Format::kBytes>(from, [&](int64_t at, const uint8_t* const* blocks, int64_t rows) {
        pack_codes<Format>(out.codes + at * kColumns * kLanes * Format::kBits / 8, blocks, rows);
        bool good = true;
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            auto scale = Format::scale(blocks[lane]);
            if (lane >= rows) scale = 0;
            good &= is_finite(scale);
            std::memcpy(out.scales + (at * kLanes + lane) * static_cast<int64_t>(sizeof scale), &scale, sizeof scale);
            if constexpr (Format::kMin >= 0) {
                const auto least = load<uint16_t>(blocks[lane] + Format::kMin);
                good &= is_finite(least);
                out.mins[at * kLanes + lane] = least;
            }
        }
        return good;
    });
}

template <class Format>
void look_up_format(float* out, const int32_t* tokens, int64_t rows, const BlockTable& table) {
    rows_of_table<kColumns, Format::kBytes>(out, tokens, rows, table, [&](float* to, const uint8_t* block) {
        const uint8_t* same[kTogether] = {block, block, block, block};
        Words w[8];
        Format::codes(w, same);
        const float scale = number_of(Format::scale(block));
        for (int i = 0; i < kColumns; ++i) {
            const int code = static_cast<int>(w[i / 4][0] >> (i % 4 * 8) & 255u);
            if constexpr (Format::kTable) to[i] = static_cast<float>(table.numbers[code]) * scale;
            else to[i] = static_cast<float>(code - static_cast<int>(Format::kFill & (Format::kBits == 4 ? 15u : 255u))) * scale;
            if constexpr (Format::kMin >= 0) to[i] += of_f16(load<uint16_t>(block + Format::kMin));
        }
    });
}

struct Row {
    bool (*pack)(const Target&, const BlockRows&);
    void (*look_up)(float*, const int32_t*, int64_t, const BlockTable&);
    int bytes;
    bool mins, table;
};

template <class Format>
constexpr Row row_of() {
    return {pack_format<Format>, look_up_format<Format>, Format::kBytes, Format::kMin >= 0, Format::kTable};
}

constexpr Row kRows[] = {row_of<Q40>(), row_of<Q41>(), row_of<Q50>(), row_of<Q51>(), row_of<Q80>(), row_of<IQ4NL>(), row_of<MXFP4>()};

// `form`: index into kRows, as in ops/cpu/pack_stored.py. data: rows of k / 32 blocks, `stride` bytes apart; row i is number order[i], or i.
// `scales` (float16; float32 of MXFP4) and, where the form has them, `mins` (float16): [n / 16][k / 32][16]. `bad` becomes 1 when one
// of them is nan or inf.
void pack_blocks32(uint8_t* out, uint8_t* scales, Optional<uint16_t> mins, int64_t* bad, const uint8_t* data, Optional<const int64_t> order,
                   int64_t n, int64_t k, int64_t stride, int64_t form) {
    constexpr int64_t kMost = int64_t{1} << 40, kCount = sizeof(kRows) / sizeof(kRows[0]);
    if (n < 1 || k < 1 || n > kMost || k > kMost) fail("pack_blocks32: sizes must lie in [1, 2^40]");
    if (k % kColumns) fail("columns are not a multiple of 32");
    if (form < 0 || form >= kCount || kRows[form].mins != (mins.ptr != nullptr)) fail("pack_blocks32: unknown form");
    if (stride < k / kColumns * kRows[form].bytes || stride > kMost) fail("pack_blocks32: rows overlap");
    *bad = !kRows[form].pack({out, scales, mins.ptr}, {data, order.ptr, n, k, stride});
}

// As embedding_blocks (pack_blocks.cpp), in blocks of 32; `form` as of pack_blocks32.
void embedding_blocks32(float* out, const int32_t* tokens, const uint8_t* table, int64_t rows, int64_t k, int64_t vocabulary, int64_t stride,
                        int64_t form, Optional<const int16_t> numbers, int64_t first) {
    constexpr int64_t kCount = sizeof(kRows) / sizeof(kRows[0]);
    if (form < 0 || form >= kCount || kRows[form].table != (numbers.ptr != nullptr)) fail("embedding_blocks32: unknown form");
    if (k < 1 || k % kColumns || stride < k / kColumns * kRows[form].bytes) fail("embedding_blocks32: rows are no whole blocks");
    kRows[form].look_up(out, tokens, rows, {table, vocabulary, k, stride, first, numbers.ptr});
}

const OpEntry kOps[] = {op_entry<&pack_blocks32>("pack_blocks32"), op_entry<&embedding_blocks32>("embedding_blocks32")};
const Register kRegister(kOps);

}  // namespace
}  // namespace quire
