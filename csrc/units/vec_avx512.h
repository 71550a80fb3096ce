// 16 lanes in one 512-bit register, with the VNNI dot product and, where the unit's flags have it, the BF16 one.
#pragma once

#include <immintrin.h>
#include <cstdint>
#include <cstring>

namespace quire::QUIRE_UNIT {
namespace {

#if defined(QUIRE_EMULATE_AVX512)
#define QUIRE_INLINE static inline
#include "emulate/avx512.h"
#else
#define QUIRE_INLINE static inline __attribute__((always_inline))
#endif

struct F {
    __m512 v;
};
struct I {
    __m512i v;
};
struct U {
    __m512i v;
};

constexpr int kStart8 = 128;
// Linear: rows by column blocks of a tile, of a tile for a few rows, blocks for a single row (one by one, or side by
// side, Tuning::row_streams), and a tile of float weights for
// many rows; the most rows that stream bf16 weights, where 0 says that only single rows stream weights at all (tile registers do
// better). Attention: rows by vectors.
constexpr int kTileRows = 8, kTileBlocks = 2, kFewRows = 4, kFewBlocks = 4, kRowBlocks = 2, kRowStreams = 4;
#if defined(QUIRE_AMX)
constexpr int kStreamRows = 0;
#else
constexpr int kStreamRows = 16;
#endif
// A dot product of bf16 in two multiply-adds holds every vector of weights twice: 6 x 4 sums would not fit beside them.
#if defined(__AVX512BF16__)
constexpr int kManyRows = 6, kManyBlocks = 4;
#else
constexpr int kManyRows = kTileRows, kManyBlocks = kTileBlocks;
#endif
constexpr int kAttentionRows = 8, kAttentionTiles = 4;

QUIRE_INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

QUIRE_INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
QUIRE_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
// To a multiple of 64 bytes, without fetching the line into the caches.
QUIRE_INLINE void store_past(float* p, F a) { _mm512_stream_ps(p, a.v); }
QUIRE_INLINE F load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
QUIRE_INLINE void store_n(float* p, F a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
QUIRE_INLINE F set1(float x) { return {_mm512_set1_ps(x)}; }
QUIRE_INLINE I set1_i(int32_t x) { return {_mm512_set1_epi32(x)}; }
QUIRE_INLINE U set1_u(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
QUIRE_INLINE U load_u(const void* p) { return {_mm512_loadu_si512(p)}; }
QUIRE_INLINE I load_i(const void* p) { return {_mm512_loadu_si512(p)}; }
QUIRE_INLINE F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
QUIRE_INLINE F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
QUIRE_INLINE F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
QUIRE_INLINE F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
QUIRE_INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
QUIRE_INLINE F vmin(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
QUIRE_INLINE F vmax(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
QUIRE_INLINE F vabs(F a) { return {_mm512_abs_ps(a.v)}; }
QUIRE_INLINE F vsqrt(F a) { return {_mm512_sqrt_ps(a.v)}; }
QUIRE_INLINE F to_f(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
QUIRE_INLINE I round_i(F a) { return {_mm512_cvtps_epi32(a.v)}; }
// The integer nearest to a, and p * 2^n for integral n; 0 at kLeastPower.
constexpr float kLeastPower = -160.0f;
QUIRE_INLINE F round_f(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
QUIRE_INLINE F scale2(F p, F n) { return {_mm512_scalef_ps(p.v, n.v)}; }
QUIRE_INLINE F exp2_int(I n) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)), 23))};
}
QUIRE_INLINE F keep(F a, int from, int to, F other) {
    const int f = from < 0 ? 0 : from > 16 ? 16 : from, t = to < 0 ? 0 : to > 16 ? 16 : to;
    const auto mask = static_cast<__mmask16>(((1u << t) - 1u) & ~((1u << f) - 1u));
    return {_mm512_mask_mov_ps(other.v, mask, a.v)};
}
// x in lanes where a < b, else y.
QUIRE_INLINE F where_less(F a, F b, F x, F y) {
    return {_mm512_mask_mov_ps(y.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), x.v)};
}
QUIRE_INLINE float hsum(F a) {
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
QUIRE_INLINE float hmax(F a) {
    const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}
QUIRE_INLINE int32_t hsum_i(I a) { return _mm512_reduce_add_epi32(a.v); }

QUIRE_INLINE F bf16_load(const uint16_t* p) {
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
#if defined(__AVX512BF16__)
QUIRE_INLINE void bf16_store(uint16_t* p, F a) {
    const __m256bh h = _mm512_cvtneps_pbh(a.v);
    std::memcpy(p, &h, sizeof h);
}
QUIRE_INLINE F dot_bf16(F acc, U a, U b) {
    return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v))};
}
#else
// Round half to even; NaN stays NaN.
QUIRE_INLINE void bf16_store(uint16_t* p, F a) {
    const __m512i u = _mm512_castps_si512(a.v), high = _mm512_srli_epi32(u, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    const __m512i words = _mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(words));
}
// The odd product, then the even one: the order of the instruction and of the other units.
QUIRE_INLINE F dot_bf16(F acc, U a, U b) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const auto odd = [&](U x) { return _mm512_castsi512_ps(_mm512_and_si512(x.v, high)); };
    const auto even = [](U x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x.v, 16)); };
    return {_mm512_fmadd_ps(even(a), even(b), _mm512_fmadd_ps(odd(a), odd(b), acc.v))};
}
#endif
QUIRE_INLINE F f16_load(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
QUIRE_INLINE void f16_store(uint16_t* p, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// e4m3, moved to the bits of an fp16 number 2^8 times smaller; codes of NaN read as 480.
QUIRE_INLINE F fp8_load(const uint8_t* p) {
    const __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0x80)), 8);
    const __m256i half = _mm256_or_si256(sign, _mm256_slli_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0x7f)), 7));
    return {_mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f))};
}
// The low byte of each half, e4m3, as bf16; exact, codes of NaN read as 480. Numbers below 2^-6 come from a table, because the dot
// product takes bf16 numbers without exponent for zeros; of them the low five bits, which choose the entry, are the mantissa.
QUIRE_INLINE U fp8_to_bf16(U w) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    const __m512i size = _mm512_slli_epi16(_mm512_and_si512(w.v, _mm512_set1_epi16(0x7f)), 4);
    const __m512i normal = _mm512_add_epi16(size, _mm512_set1_epi16(120 << 7));
    const __mmask32 small = _mm512_testn_epi16_mask(w.v, _mm512_set1_epi16(0x78));
    const __m512i number = _mm512_mask_permutexvar_epi16(normal, small, w.v, table);
    const __m512i sign = _mm512_slli_epi16(w.v, 8);
    return {_mm512_ternarylogic_epi32(number, sign, _mm512_set1_epi16(static_cast<int16_t>(0x8000)), 0xf8)};  // number | sign & top
}
QUIRE_INLINE U high_bytes(U w) { return {_mm512_srli_epi16(w.v, 8)}; }
QUIRE_INLINE U low_nibbles(U w) { return {_mm512_and_si512(w.v, _mm512_set1_epi8(15))}; }
QUIRE_INLINE U high_nibbles(U w) { return {_mm512_and_si512(_mm512_srli_epi16(w.v, 4), _mm512_set1_epi8(15))}; }
// Bits moved within the halves of words, up where kBy > 0: of a byte those that a mask may then choose.
template <int kBy>
QUIRE_INLINE U shift(U w) {
    if constexpr (kBy == 0) return w;
    else return {kBy > 0 ? _mm512_slli_epi16(w.v, kBy > 0 ? kBy : 0) : _mm512_srli_epi16(w.v, kBy < 0 ? -kBy : 0)};
}
QUIRE_INLINE I as_i(U a) { return {a.v}; }
// a, which stays in a register instead of being read again by every instruction that uses it (single rows of super-blocks from
// the second-level cache, Zen 4: 5 % faster at 4 bits, 11 % at 6).
QUIRE_INLINE U kept(U a) {
#if !defined(QUIRE_EMULATE_AVX512)
    asm("" : "+v"(a.v));
#endif
    return a;
}
// 16 bytes, one to a lane.
QUIRE_INLINE U load_bytes(const void* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)))}; }
QUIRE_INLINE U and_u(U a, U b) { return {_mm512_and_si512(a.v, b.v)}; }
// GCC 12 copies the accumulator before and after its intrinsic for this instruction: two moves per dot product.
QUIRE_INLINE I dot4(I acc, U w, U x) {
#if defined(QUIRE_EMULATE_AVX512)
    acc.v = _mm512_dpbusd_epi32(acc.v, w.v, x.v);
#else
    asm("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(w.v), "v"(x.v));
#endif
    return acc;
}
QUIRE_INLINE I dot8(I acc, U w, U x) { return dot4(acc, w, x); }
QUIRE_INLINE I mul16(I a, I b) {
    const __m512i low = _mm512_set1_epi32(0xffff);
    return {_mm512_madd_epi16(a.v, _mm512_and_si512(b.v, low))};
}
QUIRE_INLINE I max_i(I a, I b) { return {_mm512_max_epi32(a.v, b.v)}; }
QUIRE_INLINE I bits_of(F a) { return {_mm512_castps_si512(a.v)}; }
QUIRE_INLINE int32_t hmax_i(I a) { return _mm512_reduce_max_epi32(a.v); }
QUIRE_INLINE F as_f(U a) { return {_mm512_castsi512_ps(a.v)}; }
QUIRE_INLINE U low_half(U a) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(0xffff))}; }
QUIRE_INLINE I add_i(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
QUIRE_INLINE I sub_i(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
QUIRE_INLINE I times255(I a) { return {_mm512_sub_epi32(_mm512_slli_epi32(a.v, 8), a.v)}; }
// Byte of a table of 16 for each byte of `at`, all of them below 16.
QUIRE_INLINE U load_table(const void* p) { return {_mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(p)))}; }
QUIRE_INLINE U look_up(U table, U at) { return {_mm512_shuffle_epi8(table.v, at.v)}; }
// Four halves of words, again and again, and halves of such a register by the low bits of `at`.
QUIRE_INLINE U four_halves(const void* p) {
    long long x;
    std::memcpy(&x, p, 8);
    return {_mm512_set1_epi64(x)};
}
QUIRE_INLINE U choose_halves(U four, U at) { return {_mm512_permutexvar_epi16(at.v, four.v)}; }
// Words times 2^kBy, rounded down where kBy < 0.
template <int kBy>
QUIRE_INLINE I shift_i(I a) {
    return {kBy > 0 ? _mm512_slli_epi32(a.v, kBy > 0 ? kBy : 0) : _mm512_srai_epi32(a.v, kBy < 0 ? -kBy : 0)};
}
QUIRE_INLINE U xor_u(U a, U b) { return {_mm512_xor_si512(a.v, b.v)}; }
// a & mask ^ b
QUIRE_INLINE U masked_xor(U a, U mask, U b) { return {_mm512_ternarylogic_epi32(a.v, mask.v, b.v, 0x6a)}; }
// a & mask | b
QUIRE_INLINE U masked_or(U a, U mask, U b) { return {_mm512_ternarylogic_epi32(a.v, mask.v, b.v, 0xea)}; }
// Bytes of a and b in turn, of the first half or the second of each 16 bytes.
QUIRE_INLINE U zip_low(U a, U b) { return {_mm512_unpacklo_epi8(a.v, b.v)}; }
QUIRE_INLINE U zip_high(U a, U b) { return {_mm512_unpackhi_epi8(a.v, b.v)}; }
QUIRE_INLINE void store_u(void* p, U a) { _mm512_storeu_si512(p, a.v); }
QUIRE_INLINE I load_i8(const int8_t* p) {
    return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
QUIRE_INLINE void store_i8(int8_t* p, I a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
// 16 pairs of halves: low in the lower 16 bits of each lane.
QUIRE_INLINE void zip16(char* to, const char* low, const char* high) {
    const __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(low)));
    const __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(high)));
    _mm512_storeu_si512(to, _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
}
// 16 words of each of 16 places, transposed: to[i][lane] = from[lane][i].
QUIRE_INLINE void transpose_words(char* to, const char* const* from, int64_t at) {
    __m512i q[4][4];  // [a][w]: quarter c of it holds word 4 c + w of lanes 4 a .. 4 a + 3
    for (int a = 0; a < 4; ++a) {
        __m512i r[4];
        for (int b = 0; b < 4; ++b) r[b] = _mm512_loadu_si512(from[4 * a + b] + at);
        const __m512i x = _mm512_unpacklo_epi32(r[0], r[1]), y = _mm512_unpackhi_epi32(r[0], r[1]);
        const __m512i z = _mm512_unpacklo_epi32(r[2], r[3]), u = _mm512_unpackhi_epi32(r[2], r[3]);
        q[a][0] = _mm512_unpacklo_epi64(x, z);
        q[a][1] = _mm512_unpackhi_epi64(x, z);
        q[a][2] = _mm512_unpacklo_epi64(y, u);
        q[a][3] = _mm512_unpackhi_epi64(y, u);
    }
    for (int w = 0; w < 4; ++w) {
        const __m512i a = _mm512_shuffle_i32x4(q[0][w], q[1][w], 0x88), b = _mm512_shuffle_i32x4(q[0][w], q[1][w], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(q[2][w], q[3][w], 0x88), d = _mm512_shuffle_i32x4(q[2][w], q[3][w], 0xdd);
        _mm512_storeu_si512(to + w * 64, _mm512_shuffle_i32x4(a, c, 0x88));
        _mm512_storeu_si512(to + (4 + w) * 64, _mm512_shuffle_i32x4(b, d, 0x88));
        _mm512_storeu_si512(to + (8 + w) * 64, _mm512_shuffle_i32x4(a, c, 0xdd));
        _mm512_storeu_si512(to + (12 + w) * 64, _mm512_shuffle_i32x4(b, d, 0xdd));
    }
}
QUIRE_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
QUIRE_INLINE void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace
}  // namespace quire::QUIRE_UNIT
