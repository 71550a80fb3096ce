// bf16 matrices [n, k] in 12 bits a number without loss, for csrc/units/linear_bf12.h. Blocks of 16 rows, in each of them chunks of
// 256 columns (the last may be shorter), in each of them
//   [columns/8][192 B]  eight columns of 16 rows, in four pairs of columns:
//                       64 B sign and mantissa (7 bits) of pairs 0 and 1, 64 B of pairs 2 and 3, 64 B exponents: byte i holds the
//                       numbers, in the table of 16, of those of byte i of the first 64 (low half) and of the second (high half)
//   [16] uint32         exceptions, numbers whose exponent is not in the table: bf16 number << 16 | position, positions ascending;
//                       all ones where there is none
// Of a pair p of the eight columns, number w = 2 * row + column (0 .. 31) lies at byte w / 8 * 16 + p % 2 * 8 + w % 8: bytes of
// two registers zipped within 16 bytes give whole pairs. Its position is pair in the chunk * 32 + w.
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>

#include "facts.h"
#include "pool.h"
#include "registry.h"

namespace quire {
namespace {

int exponent_of(uint16_t number) { return number >> 7 & 255; }

std::array<int64_t, 256> count_exponents(const uint16_t* values, int64_t n, int64_t k) {
    std::array<int64_t, 256> total{};
    std::mutex mutex;
    parallel_ranges(n, k, [&](int64_t begin, int64_t end) {
        std::array<int64_t, 256> counts{};
        for (int64_t i = begin * k; i < end * k; ++i) ++counts[static_cast<size_t>(exponent_of(values[i]))];
        const std::lock_guard<std::mutex> lock(mutex);
        for (size_t e = 0; e < 256; ++e) total[e] += counts[e];
    });
    return total;
}

// Number in the table of each exponent, -1 where it is not among the 16 commonest.
std::array<int8_t, 256> choose(std::array<int64_t, 256> counts, uint8_t* table) {
    std::array<int8_t, 256> number;
    number.fill(-1);
    for (int i = 0; i < 16; ++i) {
        size_t most = 0;
        for (size_t e = 1; e < 256; ++e)
            if (counts[e] > counts[most]) most = e;
        if (counts[most] <= 0) {
            table[i] = table[16 + i] = 0;
            continue;
        }
        counts[most] = -1;
        number[most] = static_cast<int8_t>(i);
        table[i] = static_cast<uint8_t>((most & 1) << 7);
        table[16 + i] = static_cast<uint8_t>(most >> 1);
    }
    return number;
}

// A chunk of up to 16 rows; false when it has too many exceptions.
bool pack_chunk(uint8_t* to, const uint16_t* values, int64_t rows, int64_t k, int64_t columns, const std::array<int8_t, 256>& number) {
    std::memset(to, 0, static_cast<size_t>(columns * 24));
    std::array<uint32_t, kBf12Exceptions> odd;
    odd.fill(~0u);
    int64_t found = 0;
    for (int64_t c = 0; c < columns; ++c) {  // positions ascend when columns go first
        uint8_t* unit = to + c / 8 * 192;
        const int64_t pair = c % 8 / 2;
        for (int64_t row = 0; row < rows; ++row) {
            const uint16_t value = values[row * k + c];
            const int64_t w = 2 * row + c % 2, at = w / 8 * 16 + pair % 2 * 8 + w % 8;
            const int8_t code = number[static_cast<size_t>(exponent_of(value))];
            unit[pair / 2 * 64 + at] = static_cast<uint8_t>((value >> 8 & 0x80) | (value & 0x7f));
            if (code >= 0) {
                unit[128 + at] = static_cast<uint8_t>(unit[128 + at] | code << (pair / 2 * 4));
                continue;
            }
            if (found == kBf12Exceptions) return false;
            const auto position = static_cast<uint32_t>(c / 2 * 32 + w);
            int64_t i = found++;  // the two columns of a pair alternate
            for (; i > 0 && (odd[static_cast<size_t>(i - 1)] & 0xffffu) > position; --i) odd[static_cast<size_t>(i)] = odd[static_cast<size_t>(i - 1)];
            odd[static_cast<size_t>(i)] = static_cast<uint32_t>(value) << 16 | position;
        }
    }
    std::memcpy(to + columns * 24, odd.data(), sizeof odd);
    return true;
}

// `table` [2][16]: the low bit of each exponent, as bit 7, and the seven others. *fits becomes 0, and the rest is worth nothing,
// when a chunk has more exceptions than it has room for.
void pack_bf12(uint8_t* out, uint8_t* table, int64_t* fits, const uint16_t* values, int64_t n, int64_t k) {
    if (n < 1 || k < 1 || n > (int64_t{1} << 40) || k > (int64_t{1} << 40)) fail("pack_bf12: sizes must lie in [1, 2^40]");
    if (k % 8) fail("pack_bf12: columns must be a multiple of 8");
    const auto number = choose(count_exponents(values, n, k), table);
    const int64_t block_bytes = k * 24 + (k + kBf12Chunk - 1) / kBf12Chunk * kBf12Exceptions * 4;
    std::atomic<bool> good{true};
    parallel_for((n + kLanes - 1) / kLanes, [&](int64_t block, int) {
        const int64_t rows = n - block * kLanes < kLanes ? n - block * kLanes : kLanes;
        uint8_t* to = out + block * block_bytes;
        for (int64_t c = 0; c < k && good.load(std::memory_order_relaxed); c += kBf12Chunk) {
            const int64_t columns = k - c < kBf12Chunk ? k - c : kBf12Chunk;
            if (!pack_chunk(to, values + block * kLanes * k + c, rows, k, columns, number)) good.store(false, std::memory_order_relaxed);
            to += columns * 24 + kBf12Exceptions * 4;
        }
    });
    *fits = good.load();
}

const OpEntry kOps[] = {op_entry<&pack_bf12>("pack_bf12")};
const Register kRegister(kOps);

}  // namespace
}  // namespace quire
