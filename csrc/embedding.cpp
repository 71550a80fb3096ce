// Rows of a packed matrix (layouts: pack.cpp) as f32: a table of tokens that is quantized, or that is the output head too, needs
// no second copy. The arithmetic is that of Weight.dequantize. A row's numbers are 4 bytes in each line of its block: 16 times
// the bytes of a row are read, a few microseconds for a token and little beside the matrices for a prompt.
#include <bit>
#include <cstdint>
#include <cstring>

#include "pool.h"
#include "registry.h"

namespace quire {
namespace {

constexpr int64_t kLanes = 16;
enum Kind : int64_t { kF32, kBf16, kBf12, kFp8, kInt8, kInt4, kTable4, kKinds };
constexpr int64_t kTogether[] = {1, 2, 8, 4, 4, 8, 8};  // columns in a word

float of_bf16(uint32_t half) { return std::bit_cast<float>(half << 16); }

float of_f16(uint32_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
    const float size = rest < 0x7c00u ? std::bit_cast<float>(rest << 13) * 0x1p112f : std::bit_cast<float>(rest << 13 | 0x7f800000u);
    return std::bit_cast<float>(std::bit_cast<uint32_t>(size) | sign);
}

float of_e4m3(uint32_t byte) {
    const uint32_t exponent = byte >> 3 & 15u, digits = byte & 7u;
    const float size = exponent ? std::bit_cast<float>((exponent + 120u) << 23 | digits << 20) : static_cast<float>(digits) * 0x1p-9f;
    return byte & 0x80u ? -size : size;
}

float rounded_to_bf16(float x) {
    const auto bits = std::bit_cast<uint32_t>(x);
    return x != x ? x : std::bit_cast<float>((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

struct Rows {
    const char* codes;
    const char* scales;
    const int8_t* zeros;
    const char* mins;
    const int32_t* order;
    float table[16];
    const uint8_t* exponents;
    int64_t d, kind, group, scales_f32, rounded;
};

// The columns of one word, as numbers without their scale. `offset`: what 4-bit codes lie above their numbers.
template <int64_t kKind>
inline void widen(const Rows& t, uint32_t word, float offset, float* to) {
    const auto byte = [&](int i) { return word >> (8 * i) & 255u; };
    const auto nibble = [&](int i) { return word >> (i < 4 ? 8 * i : 8 * i - 28) & 15u; };
    if constexpr (kKind == kF32) to[0] = std::bit_cast<float>(word);
    if constexpr (kKind == kBf16) to[0] = of_bf16(word & 0xffffu), to[1] = of_bf16(word >> 16);
    if constexpr (kKind == kFp8) to[0] = of_e4m3(byte(0)), to[1] = of_e4m3(byte(2)), to[2] = of_e4m3(byte(1)), to[3] = of_e4m3(byte(3));
    if constexpr (kKind == kInt8)
        for (int i = 0; i < 4; ++i) to[i] = static_cast<float>(static_cast<int32_t>(byte(i)) - 128);
    if constexpr (kKind == kInt4)
        for (int i = 0; i < 8; ++i) to[i] = static_cast<float>(static_cast<int32_t>(nibble(i))) - offset;
    if constexpr (kKind == kTable4)
        for (int i = 0; i < 8; ++i) to[i] = t.table[nibble(i)];
}

float float_at(const Rows& t, const char* floats, int64_t index) {
    if (t.scales_f32) return reinterpret_cast<const float*>(floats)[index];
    return of_f16(reinterpret_cast<const uint16_t*>(floats)[index]);
}

// The numbers of a row in the matrix's order of columns, without scales, to `out`.
template <int64_t kKind>
void codes_of_row(const Rows& t, int64_t row, float* out) {
    constexpr int64_t kColumns = kTogether[kKind];
    const int64_t words = (t.d + kColumns - 1) / kColumns;
    const char* at = t.codes + (row / kLanes * words * kLanes + row % kLanes) * 4;
    const float offset = t.mins ? 0.0f : 8.0f;
    for (int64_t w = 0; w < words; ++w) {
        uint32_t word;
        std::memcpy(&word, at + w * kLanes * 4, 4);
        float numbers[kColumns];
        widen<kKind>(t, word, offset, numbers);
        const int64_t rest = t.d - w * kColumns;
        std::memcpy(out + w * kColumns, numbers, static_cast<size_t>(rest < kColumns ? rest : kColumns) * 4);
    }
}

// A row of a matrix in 12 bits (layout: pack_bf12.cpp).
template <>
void codes_of_row<kBf12>(const Rows& t, int64_t row, float* out) {
    constexpr int64_t kChunk = 256, kExceptions = 16;
    const int64_t lane = row % kLanes;
    const char* at = t.codes + row / kLanes * (t.d * 24 + (t.d + kChunk - 1) / kChunk * kExceptions * 4);
    for (int64_t begin = 0; begin < t.d; begin += kChunk, out += kChunk) {
        const int64_t columns = t.d - begin < kChunk ? t.d - begin : kChunk;
        for (int64_t c = 0; c < columns; ++c) {
            const int64_t pair = c % 8 / 2, w = 2 * lane + c % 2;
            const char* unit = at + c / 8 * 192 + w / 8 * 16 + pair % 2 * 8 + w % 8;
            const auto rest = static_cast<uint8_t>(unit[pair / 2 * 64]), codes = static_cast<uint8_t>(unit[128]);
            const uint32_t code = codes >> (pair / 2 * 4) & 15u;
            const uint32_t low = t.exponents[code], high = t.exponents[16 + code];
            out[c] = of_bf16((rest & 0x7fu) | low | ((rest & 0x80u) | high) << 8);
        }
        at += columns * 24;
        for (int64_t i = 0; i < kExceptions; ++i) {
            uint32_t odd;
            std::memcpy(&odd, at + i * 4, 4);
            const int64_t place = odd & 0xffffu, column = place / 32 * 2 + place % 2;
            if (place % 32 / 2 == lane && column < columns) out[column] = of_bf16(odd >> 16);
        }
        at += kExceptions * 4;
    }
}

constexpr void (*kCodesOfRow[])(const Rows&, int64_t, float*) = {codes_of_row<kF32>,  codes_of_row<kBf16>, codes_of_row<kBf12>, codes_of_row<kFp8>,
                                                                 codes_of_row<kInt8>, codes_of_row<kInt4>, codes_of_row<kTable4>};
static_assert(sizeof(kCodesOfRow) / sizeof(kCodesOfRow[0]) == kKinds);

void scale_row(const Rows& t, int64_t row, float* x) {
    const int64_t groups = t.d / t.group;
    for (int64_t g = 0; g < groups; ++g, x += t.group) {
        const int64_t index = (row / kLanes * groups + g) * kLanes + row % kLanes;
        const float scale = float_at(t, t.scales, index), zero = t.zeros ? static_cast<float>(t.zeros[index]) : 0.0f;
        for (int64_t i = 0; i < t.group; ++i) x[i] = (x[i] - zero) * scale;
        if (!t.mins) continue;
        const float least = float_at(t, t.mins, index);
        for (int64_t i = 0; i < t.group; ++i) x[i] += least;
    }
}

void widen_row(const Rows& t, int64_t row, float* out) {
    auto* x = t.order ? static_cast<float*>(scratch(Scratch::kTasks, static_cast<size_t>(t.d) * 4)) : out;
    kCodesOfRow[t.kind](t, row, x);
    if (t.group) scale_row(t, row, x);
    for (int64_t i = 0; t.rounded && i < t.d; ++i) x[i] = rounded_to_bf16(x[i]);
    for (int64_t i = 0; t.order && i < t.d; ++i) out[t.order[i]] = x[i];
}

// Numbers of a 4-bit code: `planes` digits of base 255, each a byte 128 above it.
void read_table(Rows& t, const uint8_t* table, int64_t planes) {
    for (int i = 0; i < 16; ++i) {
        const int32_t first = table[i] - 128;
        t.table[i] = static_cast<float>(planes == 1 ? first : 255 * first + table[16 + i] - 128);
    }
}

void embedding_packed(float* out, const int32_t* tokens, const char* codes, Optional<const char> scales, Optional<const int8_t> zeros,
                      Optional<const char> mins, Optional<const uint8_t> table, Optional<const int32_t> order, int64_t rows, int64_t d,
                      int64_t vocabulary, int64_t kind, int64_t group, int64_t scales_f32, int64_t planes, int64_t rounded) {
    for (int64_t r = 0; r < rows; ++r)
        if (tokens[r] < 0 || tokens[r] >= vocabulary) fail("embedding: a token id lies outside the table");
    if (kind < 0 || kind >= kKinds || d < 1) fail("embedding: unknown kind of matrix");
    if ((kind >= kFp8) != (group > 0) || (group && (!scales.ptr || group % 8 || d % group))) fail("embedding: a group does not fit its matrix");
    if (kind == kBf12 && (!table.ptr || d % 8)) fail("embedding: 12 bits need their exponents, and columns in eights");
    if (kind == kTable4 && (!table.ptr || planes < 1 || planes > 2)) fail("embedding: codes without their table");
    if (order.ptr)
        for (int64_t i = 0; i < d; ++i)
            if (order.ptr[i] < 0 || order.ptr[i] >= d) fail("embedding: an order of columns that is none");
    Rows t{codes, scales.ptr, zeros.ptr, mins.ptr, order.ptr, {}, table.ptr, d, kind, group, scales_f32, rounded};
    if (kind == kTable4) read_table(t, table.ptr, planes);
    parallel_ranges(rows, 4 * d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) widen_row(t, tokens[r], out + r * d);
    });
}

const OpEntry kOps[] = {op_entry<&embedding_packed>("embedding_packed")};
const Register kRegister(kOps);

}  // namespace
}  // namespace quire
