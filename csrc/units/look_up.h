// Rows of a packed matrix (layouts: pack.cpp) as f32: a table of tokens that is quantized, or that is the output head too, needs
// no second copy. The arithmetic is that of Weight.dequantize. A row's numbers are 4 bytes in each line of its block: 16 times
// the bytes of a row are read, a few microseconds for a token and little beside the matrices for a prompt.
#pragma once

QUIRE_INLINE float of_bf16(uint32_t half) { return std::bit_cast<float>(half << 16); }

QUIRE_INLINE float of_f16(uint32_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
    const float size = rest < 0x7c00u ? std::bit_cast<float>(rest << 13) * 0x1p112f : std::bit_cast<float>(rest << 13 | 0x7f800000u);
    return std::bit_cast<float>(std::bit_cast<uint32_t>(size) | sign);
}

QUIRE_INLINE float of_e4m3(uint32_t byte) {
    const uint32_t exponent = byte >> 3 & 15u, digits = byte & 7u;
    const float size = exponent ? std::bit_cast<float>((exponent + 120u) << 23 | digits << 20) : static_cast<float>(digits) * 0x1p-9f;
    return byte & 0x80u ? -size : size;
}

QUIRE_INLINE float rounded_to_bf16(float x) {
    const auto bits = std::bit_cast<uint32_t>(x);
    return x != x ? x : std::bit_cast<float>((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

// The columns of one word, as numbers without their scale. `offset`: what 4-bit codes lie above their numbers.
template <Kind kKind>
QUIRE_INLINE void widen(uint32_t word, const float* table, float offset, float* to) {
    const auto byte = [&](int i) { return word >> (8 * i) & 255u; };
    const auto nibble = [&](int i) { return word >> (i < 4 ? 8 * i : 8 * i - 28) & 15u; };
    if constexpr (kKind == Kind::kF32) to[0] = std::bit_cast<float>(word);
    if constexpr (kKind == Kind::kBf16) to[0] = of_bf16(word & 0xffffu), to[1] = of_bf16(word >> 16);
    if constexpr (kKind == Kind::kFp8) to[0] = of_e4m3(byte(0)), to[1] = of_e4m3(byte(2)), to[2] = of_e4m3(byte(1)), to[3] = of_e4m3(byte(3));
    if constexpr (kKind == Kind::kInt8)
        for (int i = 0; i < 4; ++i) to[i] = static_cast<float>(static_cast<int32_t>(byte(i)) - 128);
    if constexpr (kKind == Kind::kInt4)
        for (int i = 0; i < 8; ++i) to[i] = static_cast<float>(static_cast<int32_t>(nibble(i))) - offset;
    if constexpr (kKind == Kind::kTable4)
        for (int i = 0; i < 8; ++i) to[i] = table[nibble(i)];
}

QUIRE_INLINE float float_at(const Matrix& w, const char* floats, int64_t index) {
    if (w.wide) return reinterpret_cast<const float*>(floats)[index];
    return of_f16(reinterpret_cast<const uint16_t*>(floats)[index]);
}

// The numbers that 4-bit codes stand for.
QUIRE_INLINE void read_table(float (&to)[16], const Matrix& w) {
    for (int i = 0; i < 16; ++i) {
        const int32_t first = w.table[i] - 128;
        to[i] = static_cast<float>(w.planes == 1 ? first : 255 * first + w.table[16 + i] - 128);
    }
}

// The numbers of a row without scales.
template <Kind kKind>
void codes_of_row(const Matrix& w, int64_t row, float* out) {
    constexpr int64_t kColumns = kKindFacts[static_cast<int64_t>(kKind)].together;
    const int64_t words = (w.k + kColumns - 1) / kColumns;
    const char* at = w.codes + row / 16 * w.code_step + row % 16 * 4;
    const float offset = w.mins ? 0.0f : 8.0f;
    float table[16];
    if constexpr (kKind == Kind::kTable4) read_table(table, w);
    for (int64_t i = 0; i < words; ++i) {
        float numbers[kColumns];
        widen<kKind>(word(at + i * 64), table, offset, numbers);
        const int64_t rest = w.k - i * kColumns;
        std::memcpy(out + i * kColumns, numbers, static_cast<size_t>(rest < kColumns ? rest : kColumns) * 4);
    }
}

// Numbers of 16 bits, column by column.
template <class Widen>
QUIRE_INLINE void halves_of_row(const Matrix& w, int64_t row, float* out, const Widen& widen) {
    const char* at = w.codes + row / 16 * w.code_step + row % 16 * 2;
    for (int64_t i = 0; i < w.k; ++i) {
        uint16_t number;
        std::memcpy(&number, at + i * 32, 2);
        out[i] = widen(number);
    }
}

template <>
void codes_of_row<Kind::kBf16Floats>(const Matrix& w, int64_t row, float* out) {
    halves_of_row(w, row, out, [](uint16_t half) { return of_bf16(half); });
}

template <>
void codes_of_row<Kind::kF16>(const Matrix& w, int64_t row, float* out) {
    halves_of_row(w, row, out, [](uint16_t half) { return of_f16(half); });
}

// A row of a matrix in 12 bits (layout: pack_bf12.cpp).
template <>
void codes_of_row<Kind::kBf12>(const Matrix& w, int64_t row, float* out) {
    const int64_t lane = row % 16;
    const char* at = w.codes + row / 16 * w.code_step;
    for (int64_t begin = 0; begin < w.k; begin += kBf12Chunk, out += kBf12Chunk) {
        const int64_t columns = w.k - begin < kBf12Chunk ? w.k - begin : kBf12Chunk;
        for (int64_t c = 0; c < columns; ++c) {
            const int64_t pair = c % 8 / 2, place = 2 * lane + c % 2;
            const char* unit = at + c / 8 * 192 + place / 8 * 16 + pair % 2 * 8 + place % 8;
            const auto rest = static_cast<uint8_t>(unit[pair / 2 * 64]), codes = static_cast<uint8_t>(unit[128]);
            const uint32_t code = codes >> (pair / 2 * 4) & 15u;
            const uint32_t low = w.table[code], high = w.table[16 + code];
            out[c] = of_bf16((rest & 0x7fu) | low | ((rest & 0x80u) | high) << 8);
        }
        at += columns * 24;
        for (int64_t i = 0; i < kBf12Exceptions; ++i) {
            const uint32_t odd = word(at + i * 4);
            const int64_t place = odd & 0xffffu, column = place / 32 * 2 + place % 2;
            if (place % 32 / 2 == lane && column < columns) out[column] = of_bf16(odd >> 16);
        }
        at += kBf12Exceptions * 4;
    }
}

// A row of a matrix without its zeros (layout: sparse.h); the numbers of the 15 others of its block are stepped over.
template <WeightKind kKind>
void sparse_codes_of_row(const Matrix& w, int64_t row, float* out) {
    constexpr auto kDense = static_cast<Kind>(dense_of(kKind));
    constexpr int64_t kColumns = kKindFacts[static_cast<int64_t>(kDense)].together;
    const char* at = w.codes + row / 16 * w.code_step;
    for (int64_t column = 0; column < w.k; column += kSparseColumns) {
        char words[kSparseColumns / kColumns * 64];
        at = widen_sparse<kKind>(words, at, kSparseColumns);
        for (int64_t i = 0; i < kSparseColumns / kColumns; ++i, out += kColumns) widen<kDense>(word(words + i * 64 + row % 16 * 4), nullptr, 8.0f, out);
    }
}

template <>
void codes_of_row<Kind::kSparse16>(const Matrix& w, int64_t row, float* out) { sparse_codes_of_row<WeightKind::kSparse16>(w, row, out); }
template <>
void codes_of_row<Kind::kSparse8>(const Matrix& w, int64_t row, float* out) { sparse_codes_of_row<WeightKind::kSparse8>(w, row, out); }
template <>
void codes_of_row<Kind::kSparse4>(const Matrix& w, int64_t row, float* out) { sparse_codes_of_row<WeightKind::kSparse4>(w, row, out); }
template <>
void codes_of_row<Kind::kTwoOfFour16>(const Matrix& w, int64_t row, float* out) { sparse_codes_of_row<WeightKind::kTwoOfFour16>(w, row, out); }
template <>
void codes_of_row<Kind::kTwoOfFour8>(const Matrix& w, int64_t row, float* out) { sparse_codes_of_row<WeightKind::kTwoOfFour8>(w, row, out); }
template <>
void codes_of_row<Kind::kTwoOfFour4>(const Matrix& w, int64_t row, float* out) { sparse_codes_of_row<WeightKind::kTwoOfFour4>(w, row, out); }

void scale_row(const Matrix& w, int64_t row, float* x) {
    const int64_t groups = w.k / w.group;
    for (int64_t g = 0; g < groups; ++g, x += w.group) {
        const int64_t index = (row / 16 * groups + g) * 16 + row % 16;
        const float scale = float_at(w, w.scales, index), zero = w.zeros ? static_cast<float>(w.zeros[index]) : 0.0f;
        for (int64_t i = 0; i < w.group; ++i) x[i] = (x[i] - zero) * scale;
        if (!w.mins) continue;
        const float least = float_at(w, w.mins, index);
        for (int64_t i = 0; i < w.group; ++i) x[i] += least;
    }
}

// Word i of a chunk of super-blocks from its planes (layout: super_blocks.h).
template <int kBits>
QUIRE_INLINE uint32_t word_of_planes(const uint32_t* planes, int i) {
    const auto bits = [&](int plane, int from, uint32_t mask) { return planes[plane] >> from & mask * 0x01010101u; };
    if constexpr (kBits == 2) return bits(i / 4, i % 4 * 2, 3);
    if constexpr (kBits == 3) return i < 6 ? bits(i / 2, i % 2 * 3, 7) : bits(i - 6, 6, 3) | bits(2, i, 1) << 2;
    const uint32_t low = bits(i / 2, i % 2 * 4, 15);
    if constexpr (kBits == 5) return low | bits(4, i, 1) << 4;
    if constexpr (kBits == 6) return low | bits(4 + i / 4, i % 4 * 2, 3) << 4;
    return low;
}

// A group of a super-block is one scale and one minimum.
template <Kind kKind>
void look_up_super(const Matrix& w, int64_t row, float* out) {
    constexpr SuperForm kForm = super_form(kKind);
    const int64_t lane = row % 16, supers = w.k / kSuperColumns;
    const char* at = w.codes + row / 16 * w.code_step;
    float table[16];
    if constexpr (kForm.table) read_table(table, w);
    for (int64_t s = 0; s < supers; ++s, at += kForm.bytes()) {
        const int64_t index = (row / 16 * supers + s) * 16 + lane;
        const float unit = float_at(w, w.scales, index), least_unit = kForm.mins ? float_at(w, w.mins, index) : 0.0f;
        for (int64_t column = 0; column < kSuperColumns; column += 4, out += 4) {
            uint32_t planes[kForm.bits];
            for (int p = 0; p < kForm.bits; ++p) planes[p] = word(at + kForm.multiples_bytes() + column / 32 * kForm.chunk_bytes() + p * 64 + lane * 4);
            const uint32_t codes = word_of_planes<kForm.bits>(planes, static_cast<int>(column % 32 / 4));
            const int64_t g = column / kForm.group;
            const char multiple = at[g * 16 + lane];
            const float scale = static_cast<float>(kForm.paired ? multiple & 15 : static_cast<int8_t>(multiple)) * unit;
            for (int j = 0; j < 4; ++j) {
                const auto code = static_cast<int>(codes >> (8 * j) & 255u);
                out[j] = (kForm.table ? table[code] : static_cast<float>(code - kForm.offset)) * scale;
            }
            if constexpr (!kForm.mins) continue;
            const int least = kForm.paired ? multiple >> 4 & 15 : at[(kForm.groups() + g) * 16 + lane];
            for (int j = 0; j < 4; ++j) out[j] += static_cast<float>(least) * least_unit;
        }
    }
}

template <Kind kKind>
void look_up(const Matrix& w, int64_t row, float* out) {
    if constexpr (is_super(kKind)) {
        look_up_super<kKind>(w, row, out);
    } else {
        codes_of_row<kKind>(w, row, out);
        if (w.group) scale_row(w, row, out);
    }
}
