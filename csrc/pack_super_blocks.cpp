// Matrices in super-blocks into the layout of super_blocks.h.
#include "super_blocks.h"

#include <atomic>
#include <cstring>

#include "facts.h"
#include "pool.h"
#include "registry.h"
#include "super_block_planes.h"

namespace quire {
namespace {

struct SuperSource {
    const int8_t* codes;
    const int8_t* multiples;
    const int8_t* min_multiples;
    int64_t n, k;
};

// Codes of a super-block of up to 16 rows; false when one of them does not fit its bits.
template <Kind kKind>
bool pack_codes(uint8_t* to, const SuperSource& from, int64_t row, int64_t rows, int64_t column) {
    constexpr SuperForm kOf = super_form(kKind);
    constexpr uint32_t kAdd = 0x01010101u * kOf.offset, kAbove = 0x01010101u * (0xffu & ~((1u << kOf.bits) - 1u));
    uint32_t outside = 0;
    for (int64_t chunk = 0; chunk < kSuperColumns / 32; ++chunk, to += kOf.chunk_bytes()) {
        for (int64_t lane = 0; lane < rows; ++lane) {
            uint32_t words[8], planes[kOf.bits];
            std::memcpy(words, from.codes + (row + lane) * from.k + column + chunk * 32, 32);
            for (uint32_t& word : words) {
                // each byte plus the offset, without a carry into the next
                word = ((word & 0x7f7f7f7fu) + kAdd) ^ (word & 0x80808080u);
                outside |= word & kAbove;
            }
            planes_of<kOf.bits>(planes, words);
            for (int p = 0; p < kOf.bits; ++p) std::memcpy(to + p * 64 + lane * 4, planes + p, 4);
        }
    }
    return outside == 0;
}

template <Kind kKind>
void pack_multiples(uint8_t* to, const SuperSource& from, int64_t row, int64_t rows, int64_t column) {
    constexpr SuperForm kOf = super_form(kKind);
    for (int64_t lane = 0; lane < rows; ++lane) {
        const int64_t first = ((row + lane) * from.k + column) / kOf.group;
        for (int64_t g = 0; g < kOf.groups(); ++g) {
            auto multiple = static_cast<uint8_t>(from.multiples[first + g]);
            if constexpr (kOf.mins) {
                const auto least = static_cast<uint8_t>(from.min_multiples[first + g]);
                if constexpr (kOf.paired) multiple = static_cast<uint8_t>(multiple | least << 4);
                else to[(kOf.groups() + g) * kLanes + lane] = least;
            }
            to[g * kLanes + lane] = multiple;
        }
    }
}

template <Kind kKind>
void pack_form(uint8_t* out, const SuperSource& from) {
    constexpr SuperForm kOf = super_form(kKind);
    const int64_t supers = from.k / kSuperColumns;
    std::atomic<bool> good{true};
    parallel_for((from.n + kLanes - 1) / kLanes, [&](int64_t block, int) {
        const int64_t row = block * kLanes, rows = from.n - row < kLanes ? from.n - row : kLanes;
        uint8_t* to = out + block * supers * kOf.bytes();
        for (int64_t s = 0; s < supers; ++s, to += kOf.bytes()) {
            if (rows < kLanes) std::memset(to, 0, kOf.bytes());
            pack_multiples<kKind>(to, from, row, rows, s * kSuperColumns);
            if (!pack_codes<kKind>(to + kOf.multiples_bytes(), from, row, rows, s * kSuperColumns)) good.store(false, std::memory_order_relaxed);
        }
    });
    if (!good.load()) fail("a code has more bits than its kind");
}

using PackForm = void (*)(uint8_t* out, const SuperSource& from);

template <Kind kKind>
consteval PackForm packer() {
    if constexpr (is_super(kKind)) return &pack_form<kKind>;
    return nullptr;
}

constexpr PackForm kPack[] = {
#define KIND(id, ...) packer<Kind::id>(),
#include "kinds.inc"
};

// `kind`: the number of one in super-blocks. codes [n, k]; multiples (and those of minimums) [n, k / group].
void pack_super_blocks(uint8_t* out, const int8_t* codes, const int8_t* multiples, Optional<const int8_t> min_multiples, int64_t n, int64_t k,
                int64_t kind) {
    if (n < 1 || k < 1 || n > (int64_t{1} << 40) || k > (int64_t{1} << 40)) fail("pack_super_blocks: sizes must lie in [1, 2^40]");
    if (k % kSuperColumns) fail("columns are not a multiple of 256");
    if (kind < 0 || kind >= kKindCount || !kPack[kind]) fail("pack_super_blocks: not a kind in super-blocks");
    if ((kKindFacts[kind].mins == Has::kMust) != (min_multiples.ptr != nullptr)) fail("pack_super_blocks: minimums are not what the kind has");
    kPack[kind](out, {codes, multiples, min_multiples.ptr, n, k});
}

const OpEntry kOps[] = {op_entry<&pack_super_blocks>("pack_super_blocks")};
const Register kRegister(kOps);

}  // namespace
}  // namespace quire
