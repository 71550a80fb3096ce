// Numbers that a mask chooses, put where its bits are, with zeros between them: the inverse of leaving zeros out. In one
// instruction where the processor has VBMI2, by a table of shuffles where the unit has 128-bit shuffles, else one by one. They read
// up to 64 bytes, however few the mask asks for.
#pragma once

#include "unit.h"

namespace quire::QUIRE_UNIT {
namespace {

#if defined(__AVX2__)

// For each mask of eight bits, the number's place among those chosen, 128 where there is none (`pshufb` makes it a zero).
struct ExpandTable {
    uint8_t at[256][8];
    constexpr ExpandTable() : at() {
        for (int mask = 0; mask < 256; ++mask)
            for (int i = 0, next = 0; i < 8; ++i) at[mask][i] = static_cast<uint8_t>(mask >> i & 1 ? next++ : 128);
    }
};
alignas(64) constexpr ExpandTable kExpand;

QUIRE_INLINE __m128i expand_places(uint64_t mask) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kExpand.at[mask & 255]));
}

// 16 bytes by the low 16 bits of `mask`; `from` moves past those that were taken.
QUIRE_INLINE __m128i expand16(uint64_t mask, const char*& from) {
    const __m128i low = _mm_shuffle_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)), expand_places(mask));
    from += __builtin_popcountll(mask & 255);
    const __m128i high = _mm_shuffle_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)), expand_places(mask >> 8));
    from += __builtin_popcountll(mask >> 8 & 255);
    return _mm_unpacklo_epi64(low, high);
}

// Eight halves of words by the low 8 bits of `mask`, likewise.
QUIRE_INLINE __m128i expand8(uint64_t mask, const char*& from) {
    const __m128i places = expand_places(mask), first = _mm_adds_epu8(places, places);
    const __m128i both = _mm_unpacklo_epi8(first, _mm_adds_epu8(first, _mm_set1_epi8(1)));
    const __m128i halves = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)), both);
    from += 2 * __builtin_popcountll(mask & 255);
    return halves;
}

QUIRE_INLINE U shuffled_bytes(uint64_t mask, const char* from) {
    alignas(64) __m128i quarters[4];
    for (int i = 0; i < 4; ++i, mask >>= 16) quarters[i] = expand16(mask, from);
    return load_u(quarters);
}

QUIRE_INLINE U shuffled_halves(uint32_t mask, const char* from) {
    alignas(64) __m128i quarters[4];
    for (int i = 0; i < 4; ++i, mask >>= 8) quarters[i] = expand8(mask, from);
    return load_u(quarters);
}

#else

QUIRE_INLINE U shuffled_bytes(uint64_t mask, const char* from) {
    alignas(64) char to[64] = {};
    for (; mask; mask &= mask - 1) to[__builtin_ctzll(mask)] = *from++;
    return load_u(to);
}

QUIRE_INLINE U shuffled_halves(uint32_t mask, const char* from) {
    alignas(64) char to[64] = {};
    for (; mask; mask &= mask - 1, from += 2) std::memcpy(to + 2 * __builtin_ctz(mask), from, 2);
    return load_u(to);
}

#endif

#if defined(__AVX512BW__)

// The instructions are spelled out because no unit is compiled for VBMI2: there are processors with VNNI, and with BF16, but
// without it. Zen 4 takes them from a register; from memory they are microcode there.
QUIRE_INLINE U expanded_bytes(uint64_t mask, U packed) {
    U out;
    asm("vpexpandb %2, %0%{%1%}%{z%}" : "=v"(out.v) : "Yk"(static_cast<__mmask64>(mask)), "v"(packed.v));
    return out;
}

// Halves of words by 32 bits.
QUIRE_INLINE U expanded_halves(uint32_t mask, U packed) {
    U out;
    asm("vpexpandw %2, %0%{%1%}%{z%}" : "=v"(out.v) : "Yk"(static_cast<__mmask32>(mask)), "v"(packed.v));
    return out;
}

#endif

// What expands: whether in one instruction is asked once for a run of columns, not for each register of them.
template <bool kFast>
struct Expander {
    QUIRE_INLINE U bytes(uint64_t mask, const char* from) {
#if defined(__AVX512BW__)
        if constexpr (kFast) return expanded_bytes(mask, load_u(from));
#endif
        return shuffled_bytes(mask, from);
    }

    // Halves of words by 32 bits.
    QUIRE_INLINE U halves(uint32_t mask, const char* from) {
#if defined(__AVX512BW__)
        if constexpr (kFast) return expanded_halves(mask, load_u(from));
#endif
        return shuffled_halves(mask, from);
    }

    // The bytes that both masks choose from: halves of bytes for those of `low`, and of `high`; what else is in a byte stays there.
    QUIRE_INLINE void halves_of_bytes(U (&out)[2], uint64_t low, uint64_t high, const char* from) {
#if defined(__AVX512BW__)
        if constexpr (kFast) {
            const U both = load_u(from);
            out[0] = expanded_bytes(low, both);
            out[1] = expanded_bytes(high, shift<-4>(both));
            return;
        }
#endif
        out[0] = shuffled_bytes(low, from);
        out[1] = shift<-4>(shuffled_bytes(high, from));
    }
};

}  // namespace
}  // namespace quire::QUIRE_UNIT
