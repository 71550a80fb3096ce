// Packing of weight matrices [n, k] into blocks of 16 rows, in which a few columns of every row lie together, then the next few:
//   4 bits  [n/16][k/8][16 lanes][4 bytes], byte j of a lane = codes k+j (low nibble) and k+4+j (high), both + `offset`
//   8 bits  [n/16][k/4][16][4], code + 128
//   e4m3    [n/16][k/4][16][4], the four being columns k, k + 2, k + 1, k + 3: widened halves of words are pairs of columns
//   bf16    [n/16][k/2][16][2]        f32 [n/16][k][16]        bf16 for f32 activations, and f16 [n/16][k][16]
//   scales  [n/16][k/group][16]       zeros likewise
// Rows beyond n are filled with what contributes nothing.
#include <atomic>
#include <cstdint>
#include <cstring>

#include "block_rows.h"
#include "pool.h"
#include "registry.h"

namespace quire {
namespace {

void check_sizes(int64_t n, int64_t k, int64_t multiple) {
    if (n < 1 || k < 1 || n > (int64_t{1} << 40) || k > (int64_t{1} << 40)) fail("pack: sizes must lie in [1, 2^40]");
    if (k % multiple) fail("pack: columns are not a multiple of what the layout holds together");
}

constexpr int64_t kPiece = 64;  // bytes of a row: a whole line of the caches, of which rows a power of two apart drive each other out

// Pieces of 16 rows, word by word: to[word][row] = convert(the next kFrom words of the row, bad).
template <int kFrom, class Convert>
void pack_piece(uint8_t* to, const uint8_t* const* rows, Words& bad, const Convert& convert) {
    for (int64_t first = 0; first < kLanes; first += kTogether) {
        for (int64_t word = 0; word < 16; word += 4) {
            Words from[4];
            transpose_words<4>(from, rows + first, word * 4);
            for (int64_t i = 0; i < 4; i += kFrom) {
                const Words made = convert(from + i, bad);
                std::memcpy(to + (word + i) / kFrom * 64 + first * 4, &made, sizeof made);
            }
        }
    }
}

// Blocks of 16 rows, `bytes` each, as `pack_piece` has them; rows are zeros beyond n and beyond their end. False when convert has set
// a bit of `bad`.
template <int kFrom, class Convert>
bool pack_words(uint8_t* out, const void* data, int64_t n, int64_t bytes, const Convert& convert) {
    constexpr int64_t kPacked = kPiece * kLanes / kFrom;
    const int64_t whole = bytes / kPiece, rest = bytes % kPiece, rest_packed = (rest + 4 * kFrom - 1) / (4 * kFrom) * 64;
    std::atomic<bool> good{true};
    parallel_for((n + kLanes - 1) / kLanes, [&](int64_t block, int) {
        uint8_t ends[kLanes][kPiece] = {}, last[kPacked];
        uint8_t* to = out + block * (whole * kPacked + rest_packed);
        const uint8_t* rows[kLanes];
        Words bad{};
        const auto row_at = [&](int64_t lane) { return static_cast<const uint8_t*>(data) + (block * kLanes + lane) * bytes; };
        const int64_t count = n - block * kLanes < kLanes ? n - block * kLanes : kLanes;
        for (int64_t lane = 0; lane < kLanes; ++lane) rows[lane] = ends[lane];
        for (int64_t piece = 0; piece < whole; ++piece, to += kPacked) {
            for (int64_t lane = 0; lane < count; ++lane) rows[lane] = row_at(lane) + piece * kPiece;
            pack_piece<kFrom>(to, rows, bad, convert);
        }
        for (int64_t lane = 0; lane < count; ++lane) {
            rows[lane] = ends[lane];
            std::memcpy(ends[lane], row_at(lane) + whole * kPiece, static_cast<size_t>(rest));
        }
        if (rest) pack_piece<kFrom>(last, rows, bad, convert);
        std::memcpy(to, last, static_cast<size_t>(rest_packed));
        if (bad[0] | bad[1] | bad[2] | bad[3]) good.store(false, std::memory_order_relaxed);
    });
    return good.load();
}

// `offset` 8: codes -8..7; 0: codes 0..15.
void pack_int4(uint8_t* out, const int8_t* codes, int64_t n, int64_t k, int64_t offset) {
    check_sizes(n, k, 8);
    if (offset != 0 && offset != 8) fail("pack_int4: the offset is 0 or 8");
    const uint32_t add = 0x01010101u * static_cast<uint32_t>(offset);
    // Code + offset in each byte without a carry into the next; a code outside the range leaves something in the high half.
    const auto plus = [add](Words four) { return ((four & 0x7f7f7f7fu) + add) ^ (four & 0x80808080u); };
    const bool inside = pack_words<2>(out, codes, n, k, [&](const Words* w, Words& bad) {
        const Words low = plus(w[0]), high = plus(w[1]);
        bad |= (low | high) & 0xf0f0f0f0u;
        return low | high << 4;
    });
    if (!inside) fail(offset ? "codes lie outside -8..7" : "codes lie outside 0..15");
}

void pack_int8(uint8_t* out, const int8_t* codes, int64_t n, int64_t k) {
    check_sizes(n, k, 4);
    pack_words<1>(out, codes, n, k, [](const Words* w, Words&) { return *w ^ 0x80808080u; });
}

void pack_fp8(uint8_t* out, const uint8_t* codes, int64_t n, int64_t k) {
    check_sizes(n, k, 4);
    const bool numbers = pack_words<1>(out, codes, n, k, [](const Words* w, Words& bad) {
        // A byte whose seven low bits are ones carries into its own sign bit when one is added.
        bad |= ((*w & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
        return (*w & 0xff0000ffu) | (*w & 0x0000ff00u) << 8 | (*w & 0x00ff0000u) >> 8;
    });
    if (!numbers) fail("a weight is nan");
}

// Pairs of columns stay together; an odd k is padded with a zero.
void pack_bf16(uint8_t* out, const uint16_t* values, int64_t n, int64_t k) {
    check_sizes(n, k, 1);
    pack_words<1>(out, values, n, k * 2, [](const Words* w, Words&) { return *w; });
}

void pack_f32(uint8_t* out, const float* values, int64_t n, int64_t k) {
    check_sizes(n, k, 1);
    pack_words<1>(out, values, n, k * 4, [](const Words* w, Words&) { return *w; });
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
