// Rows of a file in ggml's block formats straight into super-blocks (super_blocks.h): every byte is read once and written once. Rows
// of tables of tokens, which stay in the file, become numbers when they are asked for.
// What the bytes mean is defined in quant/gguf_decode.py, to whose numbers these are equal to the bit.
#include <array>
#include <cstdint>
#include <cstring>

#include "block_rows.h"
#include "registry.h"
#include "super_blocks.h"
#include "super_block_planes.h"

namespace quire {
namespace {

typedef uint8_t Bytes __attribute__((vector_size(16)));

using Multiples = std::array<uint8_t, 16>;  // of a row's groups: scales, then minimums

// Each format: `kKind`, what it becomes; `kBytes` of a block; `kFirst` of the bytes that hold codes, `kWords` words of four;
// `kUnit` and `kMinUnit` (-1: none), where the float16 lie. `code` gives word `w` (four columns) of the 32 columns `c` from the
// words that hold codes, `multiples` those of a row.

// Eight scales and eight minimums of 6 bits in 12 bytes.
Multiples six_bits(const uint8_t* packed) {
    const auto a = load<uint32_t>(packed), b = load<uint32_t>(packed + 4), c = load<uint32_t>(packed + 8);
    const uint32_t all[4] = {a & 0x3f3f3f3fu, (c & 0x0f0f0f0fu) | (a >> 6 & 0x03030303u) << 4,
                             b & 0x3f3f3f3fu, (c >> 4 & 0x0f0f0f0fu) | (b >> 6 & 0x03030303u) << 4};
    Multiples found;
    std::memcpy(found.data(), all, sizeof all);
    return found;
}

struct Q2K {
    static constexpr Kind kKind = Kind::kSuper2;
    static constexpr int kBytes = 84, kFirst = 16, kWords = 16, kUnit = 80, kMinUnit = 82;
    static Words code(const Words* q, int c, int w) { return q[c / 4 * 8 + w] >> (c % 4 * 2) & 0x03030303u; }
    static Multiples multiples(const uint8_t* block) { return load<Multiples>(block); }
};

struct Q3K {
    static constexpr Kind kKind = Kind::kSuper3;
    static constexpr int kBytes = 110, kFirst = 0, kWords = 24, kUnit = 108, kMinUnit = -1;
    static Words code(const Words* q, int c, int w) {
        return (q[8 + c / 4 * 8 + w] >> (c % 4 * 2) & 0x03030303u) | (q[w] >> c & 0x01010101u) << 2;
    }
    static Multiples multiples(const uint8_t* block) {
        const auto a = load<uint32_t>(block + 96), b = load<uint32_t>(block + 100), top = load<uint32_t>(block + 104);
        const uint32_t low[4] = {a & 0x0f0f0f0fu, b & 0x0f0f0f0fu, a >> 4 & 0x0f0f0f0fu, b >> 4 & 0x0f0f0f0fu};
        Multiples found;
        for (int i = 0; i < 4; ++i) {
            const uint32_t four = low[i] | (top >> (2 * i) & 0x03030303u) << 4;
            std::memcpy(found.data() + 4 * i, &four, 4);
        }
        for (uint8_t& multiple : found) multiple = static_cast<uint8_t>(multiple - 32);
        return found;
    }
};

struct Q4K {
    static constexpr Kind kKind = Kind::kSuper4;
    static constexpr int kBytes = 144, kFirst = 16, kWords = 32, kUnit = 0, kMinUnit = 2;
    static Words code(const Words* q, int c, int w) { return q[c / 2 * 8 + w] >> (c % 2 * 4) & 0x0f0f0f0fu; }
    static Multiples multiples(const uint8_t* block) { return six_bits(block + 4); }
};

struct Q5K {
    static constexpr Kind kKind = Kind::kSuper5;
    static constexpr int kBytes = 176, kFirst = 16, kWords = 40, kUnit = 0, kMinUnit = 2;
    static Words code(const Words* q, int c, int w) {
        return (q[8 + c / 2 * 8 + w] >> (c % 2 * 4) & 0x0f0f0f0fu) | (q[w] >> c & 0x01010101u) << 4;
    }
    static Multiples multiples(const uint8_t* block) { return six_bits(block + 4); }
};

struct Q6K {
    static constexpr Kind kKind = Kind::kSuper6;
    static constexpr int kBytes = 210, kFirst = 0, kWords = 48, kUnit = 208, kMinUnit = -1;
    static Words code(const Words* q, int c, int w) {
        const int half = c / 4, part = c % 4;
        return (q[half * 16 + part % 2 * 8 + w] >> (part / 2 * 4) & 0x0f0f0f0fu) | (q[32 + half * 8 + w] >> (part * 2) & 0x03030303u) << 4;
    }
    static Multiples multiples(const uint8_t* block) { return load<Multiples>(block + 192); }
};

struct IQ4XS {
    static constexpr Kind kKind = Kind::kSuperTable4;
    static constexpr int kBytes = 136, kFirst = 8, kWords = 32, kUnit = 0, kMinUnit = -1;
    static Words code(const Words* q, int c, int w) { return q[c * 4 + w % 4] >> (w / 4 * 4) & 0x0f0f0f0fu; }
    static Multiples multiples(const uint8_t* block) {
        const auto high = load<uint16_t>(block + 2);
        Multiples found{};
        for (int g = 0; g < 8; ++g) {
            const int low = block[4 + g / 2] >> (g % 2 * 4) & 15;
            found[static_cast<size_t>(g)] = static_cast<uint8_t>((low | (high >> (2 * g) & 3) << 4) - 32);
        }
        return found;
    }
};

// Byte i of row j to byte j of row i, 16 by 16: four perfect shuffles of the two halves.
void transpose_bytes(Bytes* rows) {
    for (int step = 0; step < 4; ++step) {
        Bytes next[16];
        for (int i = 0; i < 8; ++i) {
            next[2 * i] = __builtin_shufflevector(rows[i], rows[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            next[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        std::memcpy(rows, next, sizeof next);
    }
}

struct Target {
    uint8_t* codes;
    uint16_t* units;
    uint16_t* min_units;  // null where the kind has none
};

// What the groups of one super-block of 16 rows have; false when a unit is nan or inf. A zero unit has no multiples.
template <class Format>
bool pack_groups_of(const Target& to, const uint8_t* const* blocks, int64_t rows) {
    constexpr SuperForm kOf = super_form(Format::kKind);
    constexpr int64_t kScales = kOf.groups();
    Bytes bytes[16] = {};
    bool good = true;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
        if (lane >= rows) {
            to.units[lane] = 0;
            if constexpr (kOf.mins) to.min_units[lane] = 0;
            continue;
        }
        Multiples found = Format::multiples(blocks[lane]);
        const auto unit = load<uint16_t>(blocks[lane] + Format::kUnit);
        good = good && (unit & 0x7c00) != 0x7c00;
        to.units[lane] = unit;
        uint16_t least = 1;
        if constexpr (kOf.mins) {
            least = load<uint16_t>(blocks[lane] + Format::kMinUnit);
            good = good && (least & 0x7c00) != 0x7c00;
            to.min_units[lane] = least ^ 0x8000;
        }
        if ((unit & 0x7fff) == 0 || (least & 0x7fff) == 0) {
            const bool no_scales = (unit & 0x7fff) == 0, no_mins = (least & 0x7fff) == 0;
            for (size_t i = 0; i < found.size(); ++i) {
                if constexpr (kOf.paired) found[i] &= static_cast<uint8_t>((no_scales ? 0 : 0x0f) | (no_mins ? 0 : 0xf0));
                else if (static_cast<int64_t>(i) < kScales ? no_scales : no_mins) found[i] = 0;
            }
        }
        std::memcpy(bytes + lane, found.data(), sizeof found);
    }
    transpose_bytes(bytes);
    std::memcpy(to.codes, bytes, kOf.multiples_bytes());
    return good;
}

template <class Format>
void pack_codes_of(uint8_t* to, const uint8_t* const* blocks) {
    constexpr SuperForm kOf = super_form(Format::kKind);
    for (int64_t first = 0; first < kLanes; first += kTogether) {
        Words q[Format::kWords];
        transpose_words<Format::kWords>(q, blocks + first, Format::kFirst);
#pragma GCC unroll 8
        for (int c = 0; c < 8; ++c) {
            Words w[8], planes[kOf.bits];
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) w[i] = Format::code(q, c, i);
            planes_of<kOf.bits>(planes, w);
            for (int p = 0; p < kOf.bits; ++p) std::memcpy(to + c * kOf.chunk_bytes() + p * 64 + first * 4, planes + p, 16);
        }
    }
}

template <class Format>
bool pack_format(const Target& out, const BlockRows& from) {
    constexpr SuperForm kOf = super_form(Format::kKind);
    return for_each_block<kSuperColumns, Format::kBytes>(from, [&](int64_t at, const uint8_t* const* blocks, int64_t rows) {
        uint8_t* to = out.codes + at * kOf.bytes();
        const Target target{to, out.units + at * kLanes, kOf.mins ? out.min_units + at * kLanes : nullptr};
        const bool good = pack_groups_of<Format>(target, blocks, rows);
        pack_codes_of<Format>(to + kOf.multiples_bytes(), blocks);
        return good;
    });
}

template <class Format>
void decode_block(float* to, const uint8_t* block, const int16_t* numbers) {
    constexpr SuperForm kOf = super_form(Format::kKind);
    const uint8_t* same[kTogether] = {block, block, block, block};
    Words q[Format::kWords];
    transpose_words<Format::kWords>(q, same, Format::kFirst);
    const Multiples multiples = Format::multiples(block);
    const float unit = of_f16(load<uint16_t>(block + Format::kUnit));
    float scales[kOf.groups()], mins[kOf.groups()];
    for (int64_t g = 0; g < kOf.groups(); ++g) {
        const uint8_t multiple = multiples[static_cast<size_t>(g)];
        scales[g] = unit * static_cast<float>(kOf.paired ? multiple & 15 : static_cast<int8_t>(multiple));
        if constexpr (kOf.mins) {
            const int least = kOf.paired ? multiple >> 4 : multiples[static_cast<size_t>(kOf.groups() + g)];
            mins[g] = -(of_f16(load<uint16_t>(block + Format::kMinUnit)) * static_cast<float>(least));
        }
    }
    for (int c = 0; c < 8; ++c)
        for (int w = 0; w < 8; ++w) {
            const uint32_t four = Format::code(q, c, w)[0];
            for (int i = 0; i < 4; ++i) {
                const int column = 32 * c + 4 * w + i, code = static_cast<int>(four >> (8 * i) & 255u);
                const int64_t g = column / kOf.group;
                float x;
                if constexpr (kOf.table) x = static_cast<float>(numbers[code]) * scales[g];
                else x = static_cast<float>(code - kOf.offset) * scales[g];
                if constexpr (kOf.mins) x += mins[g];
                to[column] = x;
            }
        }
}

template <class Format>
void look_up_format(float* out, const int32_t* tokens, int64_t rows, const BlockTable& table) {
    rows_of_table<kSuperColumns, Format::kBytes>(out, tokens, rows, table, [&](float* to, const uint8_t* block) {
        decode_block<Format>(to, block, table.numbers);
    });
}

struct PackFormat {
    Kind kind;
    bool (*pack)(const Target& out, const BlockRows& from);
    void (*look_up)(float* out, const int32_t* tokens, int64_t rows, const BlockTable& table);
    int64_t bytes;  // of a block
};

template <class Format>
constexpr PackFormat format() { return {Format::kKind, &pack_format<Format>, &look_up_format<Format>, Format::kBytes}; }

constexpr PackFormat kFormats[] = {format<Q2K>(), format<Q3K>(), format<Q4K>(), format<Q5K>(), format<Q6K>(), format<IQ4XS>()};

const PackFormat& format_of(int64_t kind) {
    for (const PackFormat& format : kFormats)
        if (static_cast<int64_t>(format.kind) == kind) return format;
    fail("pack_blocks: no format becomes this kind");
}

// `kind`: the number of what the blocks become. data: rows of k / 256 blocks, `stride` bytes apart; row i is number order[i], or i. `units`
// and, where the kind has minimums, `min_units`: float16 [n / 16][k / 256][16]. `bad` becomes 1 when a unit is nan or inf.
void pack_blocks(uint8_t* out, uint16_t* units, Optional<uint16_t> min_units, int64_t* bad, const uint8_t* data,
                 Optional<const int64_t> order, int64_t n, int64_t k, int64_t stride, int64_t kind) {
    constexpr int64_t kMost = int64_t{1} << 40;
    if (n < 1 || k < 1 || n > kMost || k > kMost) fail("pack_blocks: sizes must lie in [1, 2^40]");
    if (k % kSuperColumns) fail("columns are not a multiple of 256");
    const PackFormat& format = format_of(kind);
    if ((kKindFacts[kind].mins == Has::kMust) != (min_units.ptr != nullptr)) fail("pack_blocks: minimums are not what the kind has");
    if (stride < k / kSuperColumns * format.bytes || stride > kMost) fail("pack_blocks: rows overlap");
    *bad = !format.pack({out, units, min_units.ptr}, {data, order.ptr, n, k, stride});
}

// out [rows, k] f32: rows of a table of `vocabulary` rows of k / 256 blocks, `stride` bytes apart; `kind` as of pack_blocks, `first` as of
// row_of_token. `numbers` [16]: those that codes stand for, where they stand for any.
void embedding_blocks(float* out, const int32_t* tokens, const uint8_t* table, int64_t rows, int64_t k, int64_t vocabulary, int64_t stride,
                      int64_t kind, Optional<const int16_t> numbers, int64_t first) {
    const PackFormat& format = format_of(kind);
    if (k < 1 || k % kSuperColumns || stride < k / kSuperColumns * format.bytes) fail("embedding_blocks: rows are no whole blocks");
    if ((kKindFacts[kind].table == Has::kMust) != (numbers.ptr != nullptr)) fail("embedding_blocks: numbers of codes are not what the kind has");
    format.look_up(out, tokens, rows, {table, vocabulary, k, stride, first, numbers.ptr});
}

const OpEntry kOps[] = {op_entry<&pack_blocks>("pack_blocks"), op_entry<&embedding_blocks>("embedding_blocks")};
const Register kRegister(kOps);

}  // namespace
}  // namespace quire
