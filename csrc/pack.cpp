// Packing of weight matrices [n, k] into blocks of 16 rows whose k axis is innermost but for a few values per lane:
//   4 bits  [n/16][k/8][16 lanes][4 bytes], byte j of a lane = codes k+j (low nibble) and k+4+j (high), both + `offset`
//   8 bits  [n/16][k/4][16][4], code + 128
//   e4m3    [n/16][k/4][16][4], the four being columns k, k + 2, k + 1, k + 3: widened halves of words are pairs of columns
//   bf16    [n/16][k/2][16][2]        f32 [n/16][k][16]        bf16 for f32 activations [n/16][k][16]
//   scales  [n/16][k/group][16]       zeros likewise
// Rows beyond n are filled with what contributes nothing.
#include <atomic>
#include <cstdint>
#include <cstring>

#include "pool.h"
#include "registry.h"

namespace quire {
namespace {

constexpr int64_t kLanes = 16;

void check_sizes(int64_t n, int64_t k, int64_t multiple) {
    if (n < 1 || k < 1 || n > (int64_t{1} << 40) || k > (int64_t{1} << 40)) fail("pack: sizes must lie in [1, 2^40]");
    if (k % multiple) fail("pack: columns are not a multiple of what the layout holds together");
}

// Writes blocks of 16 rows of `words` 4-byte words each, word by word: out[block][word][row] = convert(row, word) for rows < n,
// `fill` beyond. Rows are read and blocks written in order, so packing runs at the speed of memory.
template <class Convert>
void pack_words(uint8_t* out, int64_t n, int64_t words, uint32_t fill, const Convert& convert) {
    constexpr int64_t kPiece = 64;  // words: a block's piece of 4 KiB and the rows it comes from stay in the first-level cache
    parallel_for((n + kLanes - 1) / kLanes, [&](int64_t block, int) {
        uint8_t* target = out + block * words * 64;
        for (int64_t begin = 0; begin < words; begin += kPiece) {
            const int64_t end = begin + kPiece < words ? begin + kPiece : words;
            for (int64_t lane = 0; lane < kLanes; ++lane) {
                const int64_t row = block * kLanes + lane;
                for (int64_t w = begin; w < end; ++w) {
                    const uint32_t word = row < n ? convert(row, w) : fill;
                    std::memcpy(target + (w * kLanes + lane) * 4, &word, 4);
                }
            }
        }
    });
}

template <class T>
T read_as(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// `offset` 8: codes -8..7; 0: codes 0..15.
void pack_int4(uint8_t* out, const int8_t* codes, int64_t n, int64_t k, int64_t offset) {
    check_sizes(n, k, 8);
    if (offset != 0 && offset != 8) fail("pack_int4: the offset is 0 or 8");
    const uint64_t add = 0x0101010101010101u * static_cast<uint64_t>(offset);
    std::atomic<bool> outside{false};
    pack_words(out, n, k / 8, 0x11111111u * static_cast<uint32_t>(offset), [&](int64_t row, int64_t w) {
        const auto eight = read_as<uint64_t>(codes + row * k + w * 8);
        // Code + offset in each byte without a carry into the next; a code outside the range leaves something in the high half.
        const uint64_t plus = ((eight & 0x7f7f7f7f7f7f7f7fu) + add) ^ (eight & 0x8080808080808080u);
        if (plus & 0xf0f0f0f0f0f0f0f0u) outside.store(true, std::memory_order_relaxed);
        return static_cast<uint32_t>(plus | plus >> 28);
    });
    if (outside.load()) fail(offset ? "codes lie outside -8..7" : "codes lie outside 0..15");
}

void pack_int8(uint8_t* out, const int8_t* codes, int64_t n, int64_t k) {
    check_sizes(n, k, 4);
    pack_words(out, n, k / 4, 0x80808080u, [&](int64_t row, int64_t w) { return read_as<uint32_t>(codes + row * k + w * 4) ^ 0x80808080u; });
}

void pack_fp8(uint8_t* out, const uint8_t* codes, int64_t n, int64_t k) {
    check_sizes(n, k, 4);
    std::atomic<bool> nan{false};
    pack_words(out, n, k / 4, 0, [&](int64_t row, int64_t w) {
        const auto four = read_as<uint32_t>(codes + row * k + w * 4);
        // A byte whose seven low bits are ones carries into its own sign bit when one is added.
        if (((four & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) nan.store(true, std::memory_order_relaxed);
        return (four & 0xff0000ffu) | (four & 0x0000ff00u) << 8 | (four & 0x00ff0000u) >> 8;
    });
    if (nan.load()) fail("a weight is nan");
}

// Pairs of columns stay together; an odd k is padded with a zero.
void pack_bf16(uint8_t* out, const uint16_t* values, int64_t n, int64_t k) {
    check_sizes(n, k, 1);
    pack_words(out, n, (k + 1) / 2, 0, [&](int64_t row, int64_t w) {
        const uint16_t* at = values + row * k + w * 2;
        return w * 2 + 1 < k ? read_as<uint32_t>(at) : uint32_t{*at};
    });
}

void pack_f32(uint8_t* out, const float* values, int64_t n, int64_t k) {
    check_sizes(n, k, 1);
    pack_words(out, n, k, 0, [&](int64_t row, int64_t w) { return read_as<uint32_t>(values + row * k + w); });
}

// One number per row and group; zeros beyond n.
template <class T>
void pack_groups(T* out, const T* values, int64_t n, int64_t groups) {
    check_sizes(n, groups, 1);
    parallel_for((n + kLanes - 1) / kLanes, [&](int64_t block, int) {
        T* target = out + block * groups * kLanes;
        for (int64_t at = 0; at < groups; ++at) {
            for (int64_t row = block * kLanes; row < (block + 1) * kLanes; ++row) *target++ = row < n ? values[row * groups + at] : T{0};
        }
    });
}

const OpEntry kOps[] = {
    op_entry<&pack_int4>("pack_int4"),         op_entry<&pack_int8>("pack_int8"),
    op_entry<&pack_bf16>("pack_bf16"),         op_entry<&pack_f32>("pack_f32"),
    op_entry<&pack_fp8>("pack_fp8"),
    op_entry<&pack_groups<uint16_t>>("pack_scales16"), op_entry<&pack_groups<float>>("pack_scales32"),
    op_entry<&pack_groups<int8_t>>("pack_zeros"),
};
const Register kRegister(kOps);

}  // namespace
}  // namespace quire
