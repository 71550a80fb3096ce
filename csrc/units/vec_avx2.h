// 16 lanes in two 256-bit registers. Float operations round exactly as the AVX-512 ones; integer dot products are exact, in one
// instruction where the unit's flags have AVX-VNNI.
#pragma once

#include <immintrin.h>
#include <cstdint>
#include <cstring>

namespace quire::QUIRE_UNIT {
namespace {

#define QUIRE_INLINE static inline __attribute__((always_inline))

struct F {
    __m256 a, b;
};
struct I {
    __m256i a, b;
};
struct U {
    __m256i a, b;
};

#if defined(__AVXVNNI__)
constexpr int kStart8 = 128;
#else
// maddubs saturates with 8-bit unsigned weights, so `dot8` works on |weight| and the signed activation: no offset is left.
constexpr int kStart8 = 0;
#endif
// Linear: rows by column blocks of a tile, of a tile for a few rows, blocks for a single row (one by one, or side by
// side, Tuning::row_streams), and a tile of float weights for
// many rows. Attention: rows by vectors.
constexpr int kTileRows = 4, kTileBlocks = 1, kFewRows = 2, kFewBlocks = 1, kRowBlocks = 1, kRowStreams = 4;
constexpr int kStreamRows = 0;
constexpr int kManyRows = kTileRows, kManyBlocks = kTileBlocks;
constexpr int kAttentionRows = 2, kAttentionTiles = 2;

QUIRE_INLINE __m256i lane_mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
QUIRE_INLINE __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

QUIRE_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
QUIRE_INLINE void store(float* p, F v) {
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
}
// To a multiple of 64 bytes, without fetching the line into the caches.
QUIRE_INLINE void store_past(float* p, F v) {
    _mm256_stream_ps(p, v.a);
    _mm256_stream_ps(p + 8, v.b);
}
QUIRE_INLINE F load_n(const float* p, int n) {
    return {_mm256_maskload_ps(p, lane_mask(n)), _mm256_maskload_ps(p + 8, lane_mask(n - 8))};
}
QUIRE_INLINE void store_n(float* p, F v, int n) {
    _mm256_maskstore_ps(p, lane_mask(n), v.a);
    _mm256_maskstore_ps(p + 8, lane_mask(n - 8), v.b);
}
QUIRE_INLINE F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
QUIRE_INLINE I set1_i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
QUIRE_INLINE U set1_u(uint32_t x) {
    const __m256i v = _mm256_set1_epi32(static_cast<int>(x));
    return {v, v};
}
QUIRE_INLINE U load_u(const void* p) { return {load256(p), load256(static_cast<const char*>(p) + 32)}; }
QUIRE_INLINE I load_i(const void* p) { return {load256(p), load256(static_cast<const char*>(p) + 32)}; }
QUIRE_INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
QUIRE_INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
QUIRE_INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
QUIRE_INLINE F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
QUIRE_INLINE F fma(F x, F y, F c) { return {_mm256_fmadd_ps(x.a, y.a, c.a), _mm256_fmadd_ps(x.b, y.b, c.b)}; }
QUIRE_INLINE F vmin(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
QUIRE_INLINE F vmax(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
QUIRE_INLINE F vabs(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
QUIRE_INLINE F vsqrt(F x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
QUIRE_INLINE F to_f(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
QUIRE_INLINE I round_i(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
QUIRE_INLINE __m256 exp2_half(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
QUIRE_INLINE F exp2_int(I n) { return {exp2_half(n.a), exp2_half(n.b)}; }
// The integer nearest to a, and p * 2^n for integral n in [kLeastPower, 127]; 0 at kLeastPower.
constexpr float kLeastPower = -127.0f;
QUIRE_INLINE F round_f(F x) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, kNearest), _mm256_round_ps(x.b, kNearest)};
}
QUIRE_INLINE F scale2(F p, F n) { return mul(p, exp2_int(round_i(n))); }
QUIRE_INLINE F keep(F v, int from, int to, F other) {
    const auto blend = [&](__m256 x, __m256 y, int shift) {
        const __m256i in = _mm256_andnot_si256(lane_mask(from - shift), lane_mask(to - shift));
        return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(in));
    };
    return {blend(v.a, other.a, 0), blend(v.b, other.b, 8)};
}
// x in lanes where a < b, else y.
QUIRE_INLINE F where_less(F a, F b, F x, F y) {
    return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ)), _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ))};
}
QUIRE_INLINE float hsum(F v) {
    const __m256 h = _mm256_add_ps(v.a, v.b);
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
QUIRE_INLINE float hmax(F v) {
    const __m256 h = _mm256_max_ps(v.a, v.b);
    const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}
QUIRE_INLINE int32_t hsum_i(I v) {
    const __m256i h = _mm256_add_epi32(v.a, v.b);
    const __m128i q = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
    const __m128i d = _mm_add_epi32(q, _mm_unpackhi_epi64(q, q));
    return _mm_cvtsi128_si32(_mm_add_epi32(d, _mm_shuffle_epi32(d, 1)));
}

QUIRE_INLINE __m256 bf16_half(const uint16_t* p) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
QUIRE_INLINE F bf16_load(const uint16_t* p) { return {bf16_half(p), bf16_half(p + 8)}; }
QUIRE_INLINE __m256i bf16_round(__m256 x) {
    const __m256i u = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
    return _mm256_blendv_epi8(r, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
QUIRE_INLINE void bf16_store(uint16_t* p, F v) {
    const __m256i mixed = _mm256_packus_epi32(bf16_round(v.a), bf16_round(v.b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(mixed, 0xd8));
}
QUIRE_INLINE __m256 dot_half(__m256 acc, __m256i x, __m256i y) {
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    acc = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(x, high)), _mm256_castsi256_ps(_mm256_and_si256(y, high)), acc);
    return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(y, 16)), acc);
}
QUIRE_INLINE F dot_bf16(F acc, U x, U y) { return {dot_half(acc.a, x.a, y.a), dot_half(acc.b, x.b, y.b)}; }
QUIRE_INLINE F f16_load(const uint16_t* p) {
    const auto* q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
QUIRE_INLINE void f16_store(uint16_t* p, F v) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    auto* q = reinterpret_cast<__m128i*>(p);
    _mm_storeu_si128(q, _mm256_cvtps_ph(v.a, kNearest));
    _mm_storeu_si128(q + 1, _mm256_cvtps_ph(v.b, kNearest));
}
// e4m3, moved to the bits of an fp16 number 2^8 times smaller; codes of NaN read as 480.
QUIRE_INLINE F fp8_load(const uint8_t* p) {
    const __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0x80)), 8);
    const __m256i half = _mm256_or_si256(sign, _mm256_slli_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0x7f)), 7));
    const __m256 unit = _mm256_set1_ps(256.0f);
    return {_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), unit),
            _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), unit)};
}
// The low byte of each half, e4m3, as bf16; exact, codes of NaN read as 480. Numbers below 2^-6 come from a table.
QUIRE_INLINE __m256i fp8_widen(__m256i w) {
    const __m256i low = _mm256_set1_epi64x(0x6040'2000'c080'0000), high = _mm256_set1_epi64x(0x3c3c'3c3c'3b3b'3b00);
    const __m256i size = _mm256_and_si256(w, _mm256_set1_epi16(0x7f)), at = _mm256_and_si256(w, _mm256_set1_epi16(7));
    const __m256i normal = _mm256_add_epi16(_mm256_slli_epi16(size, 4), _mm256_set1_epi16(120 << 7));
    const __m256i index = _mm256_add_epi16(_mm256_or_si256(at, _mm256_slli_epi16(at, 8)), _mm256_set1_epi16(0x0800));
    const __m256i small = _mm256_shuffle_epi8(_mm256_unpacklo_epi64(low, high), index);
    const __m256i number = _mm256_blendv_epi8(normal, small, _mm256_cmpgt_epi16(_mm256_set1_epi16(8), size));
    return _mm256_or_si256(number, _mm256_and_si256(_mm256_slli_epi16(w, 8), _mm256_set1_epi16(static_cast<int16_t>(0x8000))));
}
QUIRE_INLINE U fp8_to_bf16(U w) { return {fp8_widen(w.a), fp8_widen(w.b)}; }
QUIRE_INLINE U high_bytes(U w) { return {_mm256_srli_epi16(w.a, 8), _mm256_srli_epi16(w.b, 8)}; }
QUIRE_INLINE U low_nibbles(U w) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(w.a, mask), _mm256_and_si256(w.b, mask)};
}
QUIRE_INLINE U high_nibbles(U w) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(_mm256_srli_epi16(w.a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(w.b, 4), mask)};
}
// Bits moved within the halves of words, up where kBy > 0: of a byte those that a mask may then choose.
template <int kBy>
QUIRE_INLINE U shift(U w) {
    constexpr int kUp = kBy > 0 ? kBy : 0, kDown = kBy < 0 ? -kBy : 0;
    if constexpr (kBy == 0) return w;
    else if constexpr (kBy > 0) return {_mm256_slli_epi16(w.a, kUp), _mm256_slli_epi16(w.b, kUp)};
    else return {_mm256_srli_epi16(w.a, kDown), _mm256_srli_epi16(w.b, kDown)};
}
QUIRE_INLINE I as_i(U x) { return {x.a, x.b}; }
// x as it is: of 16 registers none is kept for what a load brings again.
QUIRE_INLINE U kept(U x) { return x; }
// 16 bytes, one to a lane.
QUIRE_INLINE U load_bytes(const void* p) {
    const __m128i b = _mm_loadu_si128(static_cast<const __m128i*>(p));
    return {_mm256_cvtepu8_epi32(b), _mm256_cvtepu8_epi32(_mm_srli_si128(b, 8))};
}
QUIRE_INLINE U and_u(U x, U y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
#if defined(__AVXVNNI__)
// Tests build the same code in the encoding of AVX-512's form of the instruction, which more machines have.
#if !defined(QUIRE_VNNI_ENCODING)
#define QUIRE_VNNI_ENCODING "%{vex%}"
#endif
QUIRE_INLINE __m256i dot_words(__m256i acc, __m256i w, __m256i x) {
    asm(QUIRE_VNNI_ENCODING " vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x));
    return acc;
}
QUIRE_INLINE I dot4(I acc, U w, U x) { return {dot_words(acc.a, w.a, x.a), dot_words(acc.b, w.b, x.b)}; }
QUIRE_INLINE I dot8(I acc, U w, U x) { return dot4(acc, w, x); }
#else
QUIRE_INLINE __m256i madd_bytes(__m256i acc, __m256i w, __m256i x) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
// 15 * 127 * 2 fits in 16 bits: no saturation.
QUIRE_INLINE I dot4(I acc, U w, U x) { return {madd_bytes(acc.a, w.a, x.a), madd_bytes(acc.b, w.b, x.b)}; }
QUIRE_INLINE __m256i madd_signed(__m256i acc, __m256i w, __m256i x) {
    const __m256i code = _mm256_xor_si256(w, _mm256_set1_epi8(static_cast<char>(0x80)));
    return madd_bytes(acc, _mm256_abs_epi8(code), _mm256_sign_epi8(x, code));
}
// 128 * 127 * 2 fits in 16 bits as well.
QUIRE_INLINE I dot8(I acc, U w, U x) { return {madd_signed(acc.a, w.a, x.a), madd_signed(acc.b, w.b, x.b)}; }
#endif
QUIRE_INLINE I mul16(I x, I y) {
    const __m256i low = _mm256_set1_epi32(0xffff);
    return {_mm256_madd_epi16(x.a, _mm256_and_si256(y.a, low)), _mm256_madd_epi16(x.b, _mm256_and_si256(y.b, low))};
}
QUIRE_INLINE I max_i(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
QUIRE_INLINE I bits_of(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
QUIRE_INLINE int32_t hmax_i(I v) {
    const __m256i h = _mm256_max_epi32(v.a, v.b);
    const __m128i q = _mm_max_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
    const __m128i d = _mm_max_epi32(q, _mm_unpackhi_epi64(q, q));
    return _mm_cvtsi128_si32(_mm_max_epi32(d, _mm_shuffle_epi32(d, 1)));
}
QUIRE_INLINE F as_f(U x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
QUIRE_INLINE U low_half(U x) {
    const __m256i low = _mm256_set1_epi32(0xffff);
    return {_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low)};
}
QUIRE_INLINE I add_i(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
QUIRE_INLINE I sub_i(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
QUIRE_INLINE I times255(I x) { return sub_i({_mm256_slli_epi32(x.a, 8), _mm256_slli_epi32(x.b, 8)}, x); }
// Byte of a table of 16 for each byte of `at`, all of them below 16.
QUIRE_INLINE U load_table(const void* p) {
    const __m256i v = _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    return {v, v};
}
QUIRE_INLINE U look_up(U table, U at) { return {_mm256_shuffle_epi8(table.a, at.a), _mm256_shuffle_epi8(table.b, at.b)}; }
QUIRE_INLINE U xor_u(U a, U b) { return {_mm256_xor_si256(a.a, b.a), _mm256_xor_si256(a.b, b.b)}; }
// a & mask ^ b
QUIRE_INLINE U masked_xor(U a, U mask, U b) { return xor_u(and_u(a, mask), b); }
// a & mask | b
QUIRE_INLINE U masked_or(U a, U mask, U b) {
    return {_mm256_or_si256(_mm256_and_si256(a.a, mask.a), b.a), _mm256_or_si256(_mm256_and_si256(a.b, mask.b), b.b)};
}
// Bytes of a and b in turn, of the first half or the second of each 16 bytes.
QUIRE_INLINE U zip_low(U a, U b) { return {_mm256_unpacklo_epi8(a.a, b.a), _mm256_unpacklo_epi8(a.b, b.b)}; }
QUIRE_INLINE U zip_high(U a, U b) { return {_mm256_unpackhi_epi8(a.a, b.a), _mm256_unpackhi_epi8(a.b, b.b)}; }
QUIRE_INLINE void store_u(void* p, U a) { std::memcpy(p, &a, 64); }
QUIRE_INLINE I load_i8(const int8_t* p) {
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi8_epi32(b), _mm256_cvtepi8_epi32(_mm_srli_si128(b, 8))};
}
QUIRE_INLINE void store_i8(int8_t* p, I v) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.a, v.b), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
// 16 pairs of halves: low in the lower 16 bits of each lane.
QUIRE_INLINE void zip16(char* to, const char* low, const char* high) {
    for (int i = 0; i < 2; ++i) {
        const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low + 16 * i));
        const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(high + 16 * i));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 32 * i), _mm_unpacklo_epi16(a, b));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 32 * i + 16), _mm_unpackhi_epi16(a, b));
    }
}
// 16 words of each of 16 places, transposed: to[i][lane] = from[lane][i].
QUIRE_INLINE void transpose_words(char* to, const char* const* from, int64_t at) {
    for (int lane = 0; lane < 16; ++lane)
        for (int i = 0; i < 16; ++i) std::memcpy(to + i * 64 + lane * 4, from[lane] + at + i * 4, 4);
}
QUIRE_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
QUIRE_INLINE void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace
}  // namespace quire::QUIRE_UNIT
