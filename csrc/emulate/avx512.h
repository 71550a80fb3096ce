// The AVX-512 instructions that the units use, as functions of the intrinsics' names over two halves of AVX2, for processors without
// AVX-512: each gives what the instruction is documented to give (Intel's Software Developer's Manual, volume 2), and traps where a
// place must be aligned and is not. Included by units/vec_avx512.h into the unit's own namespace, where these names hide the compiler's.
#pragma once

// What the unit's flags would define; only from here on, because the compiler's own headers ask for them too.
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#define __AVX512CD__ 1
#define __AVX512VNNI__ 1
#if defined(QUIRE_EMULATE_BF16)
#define __AVX512BF16__ 1
#endif

#define QUIRE_HALVES static inline __attribute__((always_inline))

QUIRE_HALVES __m256 half(__m512 a, int i) {
    struct Halves {
        __m256 at[2];
    };
    return __builtin_bit_cast(Halves, a).at[i];
}
QUIRE_HALVES __m256i half(__m512i a, int i) {
    struct Halves {
        __m256i at[2];
    };
    return __builtin_bit_cast(Halves, a).at[i];
}
QUIRE_HALVES __m128i half(__m256i a, int i) { return i ? _mm256_extracti128_si256(a, 1) : _mm256_castsi256_si128(a); }

QUIRE_HALVES __m512 joined(__m256 low, __m256 high) {
    const struct {
        __m256 low, high;
    } both = {low, high};
    return __builtin_bit_cast(__m512, both);
}
QUIRE_HALVES __m512i joined(__m256i low, __m256i high) {
    const struct {
        __m256i low, high;
    } both = {low, high};
    return __builtin_bit_cast(__m512i, both);
}
QUIRE_HALVES __m256i joined(__m128i low, __m128i high) { return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1); }

// Called and not inlined: kernels of hundreds of vectors in halves would take the compiler many minutes.
#define QUIRE_CALLED static __attribute__((noinline, unused))

// The body of a function that does the same to both halves; `i` is the half.
#define QUIRE_BOTH(expression)                                                                \
    {                                                                                         \
        const auto of = [&](int i) __attribute__((always_inline)) { return expression; };     \
        return joined(of(0), of(1));                                                          \
    }

// For what goes from lane to lane.
template <class T>
struct Lanes {
    T at[64 / sizeof(T)];
};

// All bits of a word for each of the mask's bits from 8 i on.
QUIRE_HALVES __m256i chosen(__mmask16 mask, int i) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(mask >> (8 * i)), bit), bit);
}
QUIRE_HALVES void check_aligned(const void* p) {
    if (reinterpret_cast<uintptr_t>(p) % 64) __builtin_trap();
}

// Moves.
QUIRE_HALVES __m512 _mm512_castsi512_ps(__m512i a) { return reinterpret_cast<__m512>(a); }
QUIRE_HALVES __m512i _mm512_castps_si512(__m512 a) { return reinterpret_cast<__m512i>(a); }
QUIRE_CALLED __m256 _mm512_castps512_ps256(__m512 a) { return half(a, 0); }
QUIRE_CALLED __m256 _mm512_extractf32x8_ps(__m512 a, int i) { return half(a, i); }
QUIRE_CALLED __m512 _mm512_set1_ps(float x) QUIRE_BOTH(((void)i, _mm256_set1_ps(x)))
QUIRE_CALLED __m512i _mm512_set1_epi8(char x) QUIRE_BOTH(((void)i, _mm256_set1_epi8(x)))
QUIRE_CALLED __m512i _mm512_set1_epi16(short x) QUIRE_BOTH(((void)i, _mm256_set1_epi16(x)))
QUIRE_CALLED __m512i _mm512_set1_epi32(int x) QUIRE_BOTH(((void)i, _mm256_set1_epi32(x)))
QUIRE_CALLED __m512i _mm512_set1_epi64(long long x) QUIRE_BOTH(((void)i, _mm256_set1_epi64x(x)))
QUIRE_CALLED __m512i _mm512_broadcast_i32x4(__m128i a) QUIRE_BOTH(((void)i, _mm256_broadcastsi128_si256(a)))
QUIRE_CALLED __m512i _mm512_setzero_si512() { return _mm512_set1_epi32(0); }
QUIRE_CALLED __m512 _mm512_loadu_ps(const void* p) QUIRE_BOTH(_mm256_loadu_ps(static_cast<const float*>(p) + 8 * i))
QUIRE_CALLED __m512i _mm512_loadu_si512(const void* p) QUIRE_BOTH(_mm256_loadu_si256(static_cast<const __m256i_u*>(p) + i))
QUIRE_CALLED __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void* p)
    QUIRE_BOTH(_mm256_maskload_ps(static_cast<const float*>(p) + 8 * i, chosen(mask, i)))
QUIRE_CALLED void _mm512_storeu_ps(void* p, __m512 a) { std::memcpy(p, &a, sizeof a); }
QUIRE_CALLED void _mm512_storeu_si512(void* p, __m512i a) { std::memcpy(p, &a, sizeof a); }
QUIRE_CALLED void _mm512_store_si512(void* p, __m512i a) {
    check_aligned(p);
    std::memcpy(p, &a, sizeof a);
}
QUIRE_CALLED void _mm512_stream_ps(float* p, __m512 a) {
    check_aligned(p);
    for (int i = 0; i < 2; ++i) _mm256_stream_ps(p + 8 * i, half(a, i));
}
QUIRE_CALLED void _mm512_mask_storeu_ps(void* p, __mmask16 mask, __m512 a) {
    for (int i = 0; i < 2; ++i) _mm256_maskstore_ps(static_cast<float*>(p) + 8 * i, chosen(mask, i), half(a, i));
}
QUIRE_CALLED __m512 _mm512_mask_mov_ps(__m512 other, __mmask16 mask, __m512 a)
    QUIRE_BOTH(_mm256_blendv_ps(half(other, i), half(a, i), _mm256_castsi256_ps(chosen(mask, i))))

// Floats.
QUIRE_CALLED __m512 _mm512_add_ps(__m512 a, __m512 b) QUIRE_BOTH(_mm256_add_ps(half(a, i), half(b, i)))
QUIRE_CALLED __m512 _mm512_sub_ps(__m512 a, __m512 b) QUIRE_BOTH(_mm256_sub_ps(half(a, i), half(b, i)))
QUIRE_CALLED __m512 _mm512_mul_ps(__m512 a, __m512 b) QUIRE_BOTH(_mm256_mul_ps(half(a, i), half(b, i)))
QUIRE_CALLED __m512 _mm512_div_ps(__m512 a, __m512 b) QUIRE_BOTH(_mm256_div_ps(half(a, i), half(b, i)))
QUIRE_CALLED __m512 _mm512_min_ps(__m512 a, __m512 b) QUIRE_BOTH(_mm256_min_ps(half(a, i), half(b, i)))
QUIRE_CALLED __m512 _mm512_max_ps(__m512 a, __m512 b) QUIRE_BOTH(_mm256_max_ps(half(a, i), half(b, i)))
QUIRE_CALLED __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) QUIRE_BOTH(_mm256_fmadd_ps(half(a, i), half(b, i), half(c, i)))
QUIRE_CALLED __m512 _mm512_sqrt_ps(__m512 a) QUIRE_BOTH(_mm256_sqrt_ps(half(a, i)))
QUIRE_CALLED __m512 _mm512_abs_ps(__m512 a) QUIRE_BOTH(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), half(a, i)))
QUIRE_CALLED __m512 _mm512_cvtepi32_ps(__m512i a) QUIRE_BOTH(_mm256_cvtepi32_ps(half(a, i)))
QUIRE_CALLED __m512i _mm512_cvtps_epi32(__m512 a) QUIRE_BOTH(_mm256_cvtps_epi32(half(a, i)))
QUIRE_CALLED __m512 _mm512_cvtph_ps(__m256i a) QUIRE_BOTH(_mm256_cvtph_ps(half(a, i)))
// Where an instruction says how it rounds, the kernels ask for the nearest number, ties to even.
constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
QUIRE_CALLED __m256i _mm512_cvtps_ph(__m512 a, int how) {
    if (how != kNearest) __builtin_trap();
    QUIRE_BOTH(_mm256_cvtps_ph(half(a, i), kNearest))
}
QUIRE_CALLED __m512 _mm512_roundscale_ps(__m512 a, int how) {
    if (how != kNearest) __builtin_trap();
    QUIRE_BOTH(_mm256_round_ps(half(a, i), kNearest))
}
template <int kHow>
QUIRE_CALLED __mmask16 compared(__m512 a, __m512 b) {
    const auto of = [&](int i) __attribute__((always_inline)) { return _mm256_movemask_ps(_mm256_cmp_ps(half(a, i), half(b, i), kHow)); };
    return static_cast<__mmask16>(of(0) | of(1) << 8);
}
QUIRE_CALLED __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int how) {
    switch (how) {
        case _CMP_EQ_OQ: return compared<_CMP_EQ_OQ>(a, b);
        case _CMP_LT_OQ: return compared<_CMP_LT_OQ>(a, b);
        case _CMP_GT_OQ: return compared<_CMP_GT_OQ>(a, b);
        case _CMP_UNORD_Q: return compared<_CMP_UNORD_Q>(a, b);
        default: __builtin_trap();
    }
}
// What is left of a number without its whole part; of infinity 0.
QUIRE_CALLED __m512 _mm512_reduce_ps(__m512 a, int how) {
    const __m512 whole = _mm512_roundscale_ps(a, how), left = _mm512_sub_ps(a, whole);
    const __mmask16 infinite = _mm512_cmp_ps_mask(_mm512_abs_ps(a), _mm512_set1_ps(__builtin_inff()), _CMP_EQ_OQ);
    return _mm512_mask_mov_ps(left, infinite, _mm512_set1_ps(0.0f));
}
// a * 2^floor(b), rounded once: exact in double, whose exponents suffice for every b that gives neither 0 nor infinity.
QUIRE_HALVES float scaled(float a, float b) {
    constexpr double kMost = 600;
    if (b != b) return a != a ? a + b : b + b;
    if (a != a) return __builtin_isinf(b) ? (b > 0 ? b : 0.0f) : a + a;
    if (__builtin_isinf(b)) return b > 0 ? a * b : a * 0.0f;
    const double whole = __builtin_floor(static_cast<double>(b)), by = whole > kMost ? kMost : whole < -kMost ? -kMost : whole;
    return static_cast<float>(static_cast<double>(a) * __builtin_bit_cast(double, (static_cast<int64_t>(by) + 1023) << 52));
}
QUIRE_CALLED __m512 _mm512_scalef_ps(__m512 a, __m512 b) {
    const auto from = __builtin_bit_cast(Lanes<float>, a), by = __builtin_bit_cast(Lanes<float>, b);
    Lanes<float> to;
    for (int i = 0; i < 16; ++i) to.at[i] = scaled(from.at[i], by.at[i]);
    return __builtin_bit_cast(__m512, to);
}

// Integers.
QUIRE_CALLED __m512i _mm512_and_si512(__m512i a, __m512i b) QUIRE_BOTH(_mm256_and_si256(half(a, i), half(b, i)))
QUIRE_CALLED __m512i _mm512_or_si512(__m512i a, __m512i b) QUIRE_BOTH(_mm256_or_si256(half(a, i), half(b, i)))
QUIRE_CALLED __m512i _mm512_xor_si512(__m512i a, __m512i b) QUIRE_BOTH(_mm256_xor_si256(half(a, i), half(b, i)))
QUIRE_CALLED __m512i _mm512_add_epi16(__m512i a, __m512i b) QUIRE_BOTH(_mm256_add_epi16(half(a, i), half(b, i)))
QUIRE_CALLED __m512i _mm512_add_epi32(__m512i a, __m512i b) QUIRE_BOTH(_mm256_add_epi32(half(a, i), half(b, i)))
QUIRE_CALLED __m512i _mm512_sub_epi8(__m512i a, __m512i b) QUIRE_BOTH(_mm256_sub_epi8(half(a, i), half(b, i)))
QUIRE_CALLED __m512i _mm512_sub_epi32(__m512i a, __m512i b) QUIRE_BOTH(_mm256_sub_epi32(half(a, i), half(b, i)))
QUIRE_CALLED __m512i _mm512_max_epi32(__m512i a, __m512i b) QUIRE_BOTH(_mm256_max_epi32(half(a, i), half(b, i)))
QUIRE_CALLED __m512i _mm512_madd_epi16(__m512i a, __m512i b) QUIRE_BOTH(_mm256_madd_epi16(half(a, i), half(b, i)))
QUIRE_CALLED __m512i _mm512_slli_epi16(__m512i a, unsigned by) QUIRE_BOTH(_mm256_slli_epi16(half(a, i), static_cast<int>(by)))
QUIRE_CALLED __m512i _mm512_srli_epi16(__m512i a, unsigned by) QUIRE_BOTH(_mm256_srli_epi16(half(a, i), static_cast<int>(by)))
QUIRE_CALLED __m512i _mm512_slli_epi32(__m512i a, unsigned by) QUIRE_BOTH(_mm256_slli_epi32(half(a, i), static_cast<int>(by)))
QUIRE_CALLED __m512i _mm512_srli_epi32(__m512i a, unsigned by) QUIRE_BOTH(_mm256_srli_epi32(half(a, i), static_cast<int>(by)))
QUIRE_CALLED __m512i _mm512_srai_epi32(__m512i a, unsigned by) QUIRE_BOTH(_mm256_srai_epi32(half(a, i), static_cast<int>(by)))
QUIRE_CALLED __m512i _mm512_unpacklo_epi8(__m512i a, __m512i b) QUIRE_BOTH(_mm256_unpacklo_epi8(half(a, i), half(b, i)))
QUIRE_CALLED __m512i _mm512_unpackhi_epi8(__m512i a, __m512i b) QUIRE_BOTH(_mm256_unpackhi_epi8(half(a, i), half(b, i)))
QUIRE_CALLED __m512i _mm512_unpacklo_epi32(__m512i a, __m512i b) QUIRE_BOTH(_mm256_unpacklo_epi32(half(a, i), half(b, i)))
QUIRE_CALLED __m512i _mm512_unpackhi_epi32(__m512i a, __m512i b) QUIRE_BOTH(_mm256_unpackhi_epi32(half(a, i), half(b, i)))
QUIRE_CALLED __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) QUIRE_BOTH(_mm256_unpacklo_epi64(half(a, i), half(b, i)))
QUIRE_CALLED __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) QUIRE_BOTH(_mm256_unpackhi_epi64(half(a, i), half(b, i)))
QUIRE_CALLED __m512i _mm512_shuffle_epi8(__m512i a, __m512i at) QUIRE_BOTH(_mm256_shuffle_epi8(half(a, i), half(at, i)))
QUIRE_CALLED __m512i _mm512_cvtepu16_epi32(__m256i a) QUIRE_BOTH(_mm256_cvtepu16_epi32(half(a, i)))
QUIRE_CALLED __m512i _mm512_cvtepu8_epi32(__m128i a) QUIRE_BOTH(_mm256_cvtepu8_epi32(i ? _mm_srli_si128(a, 8) : a))
QUIRE_CALLED __m512i _mm512_cvtepi8_epi32(__m128i a) QUIRE_BOTH(_mm256_cvtepi8_epi32(i ? _mm_srli_si128(a, 8) : a))
QUIRE_CALLED __m256i _mm512_cvtepi32_epi16(__m512i a) {
    const __m512i low = _mm512_and_si512(a, _mm512_set1_epi32(0xffff));
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(half(low, 0), half(low, 1)), 0xd8);
}
QUIRE_CALLED __m128i _mm512_cvtepi32_epi8(__m512i a) {
    const __m256i words = _mm512_cvtepi32_epi16(_mm512_and_si512(a, _mm512_set1_epi32(0xff)));
    return _mm_packus_epi16(half(words, 0), half(words, 1));
}
QUIRE_CALLED __m512i _mm512_mask_or_epi32(__m512i other, __mmask16 mask, __m512i a, __m512i b)
    QUIRE_BOTH(_mm256_blendv_epi8(half(other, i), _mm256_or_si256(half(a, i), half(b, i)), chosen(mask, i)))
QUIRE_CALLED __mmask32 _mm512_testn_epi16_mask(__m512i a, __m512i b) {
    const auto of = [&](int i) __attribute__((always_inline)) {
        const __m256i none = _mm256_cmpeq_epi16(_mm256_and_si256(half(a, i), half(b, i)), _mm256_setzero_si256());
        return static_cast<uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(half(none, 0), half(none, 1))));
    };
    return of(0) | of(1) << 16;
}
QUIRE_CALLED __mmask8 _mm512_cmple_epi64_mask(__m512i a, __m512i b) {
    const auto x = __builtin_bit_cast(Lanes<int64_t>, a), y = __builtin_bit_cast(Lanes<int64_t>, b);
    int mask = 0;
    for (int i = 0; i < 8; ++i) mask |= (x.at[i] <= y.at[i]) << i;
    return static_cast<__mmask8>(mask);
}
// A bit of `table` for each bit of a, b and c: number 4 a + 2 b + c of it.
QUIRE_CALLED __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
    __m512i out = _mm512_setzero_si512();
    for (int i = 0; i < 8; ++i)
        if (table >> i & 1) out |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return out;
}
QUIRE_CALLED __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, int which) {
    const __m128i from[2][4] = {{half(half(a, 0), 0), half(half(a, 0), 1), half(half(a, 1), 0), half(half(a, 1), 1)},
                                {half(half(b, 0), 0), half(half(b, 0), 1), half(half(b, 1), 0), half(half(b, 1), 1)}};
    QUIRE_BOTH(joined(from[i][which >> (4 * i) & 3], from[i][which >> (4 * i + 2) & 3]))
}
QUIRE_CALLED __m512i _mm512_mask_permutexvar_epi16(__m512i other, __mmask32 mask, __m512i at, __m512i a) {
    const auto from = __builtin_bit_cast(Lanes<uint16_t>, a), places = __builtin_bit_cast(Lanes<uint16_t>, at);
    auto to = __builtin_bit_cast(Lanes<uint16_t>, other);
    for (int i = 0; i < 32; ++i)
        if (mask >> i & 1) to.at[i] = from.at[places.at[i] % 32];
    return __builtin_bit_cast(__m512i, to);
}
QUIRE_CALLED __m512i _mm512_permutexvar_epi16(__m512i at, __m512i a) { return _mm512_mask_permutexvar_epi16(a, ~__mmask32{0}, at, a); }
QUIRE_CALLED int _mm512_reduce_add_epi32(__m512i a) {
    uint32_t sum = 0;
    for (const uint32_t x : __builtin_bit_cast(Lanes<uint32_t>, a).at) sum += x;
    return static_cast<int>(sum);
}
QUIRE_CALLED int _mm512_reduce_max_epi32(__m512i a) {
    const auto from = __builtin_bit_cast(Lanes<int>, a);
    int most = from.at[0];
    for (const int x : from.at) most = x > most ? x : most;
    return most;
}

// VNNI: four products of unsigned bytes and signed ones are added to each word, which wraps around.
QUIRE_CALLED __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i bytes, __m512i signed_bytes) {
    const auto of = [&](int i) __attribute__((always_inline)) {
        const __m256i x = half(bytes, i), y = half(signed_bytes, i);
        const __m256i even = _mm256_madd_epi16(_mm256_and_si256(x, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(y, 8), 8));
        const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(x, 8), _mm256_srai_epi16(y, 8));
        return _mm256_add_epi32(half(sum, i), _mm256_add_epi32(even, odd));
    };
    return joined(of(0), of(1));
}

// VBMI2: the first numbers of a, put where the mask has bits, with zeros between them.
template <class T>
QUIRE_HALVES __m512i expanded(uint64_t mask, __m512i a) {
    const auto from = __builtin_bit_cast(Lanes<T>, a);
    Lanes<T> to = {};
    for (int i = 0; mask; ++i, mask &= mask - 1) to.at[__builtin_ctzll(mask)] = from.at[i];
    return __builtin_bit_cast(__m512i, to);
}
QUIRE_CALLED __m512i _mm512_maskz_expand_epi8(__mmask64 mask, __m512i a) { return expanded<uint8_t>(mask, a); }
QUIRE_CALLED __m512i _mm512_maskz_expand_epi16(__mmask32 mask, __m512i a) { return expanded<uint16_t>(mask, a); }

// BF16. Numbers without exponent are taken for zeros, NaN stays NaN, all else is rounded to the nearest, ties to even.
QUIRE_HALVES __m256i bf16_of(__m512 a) {
    const __m512i u = _mm512_castps_si512(a);
    const auto of = [&](int i) __attribute__((always_inline)) {
        const __m256i x = half(u, i), high = _mm256_srli_epi32(x, 16), odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
        const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(x, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
        const __m256i exponent = _mm256_and_si256(x, _mm256_set1_epi32(0x7f800000)), size = _mm256_and_si256(x, _mm256_set1_epi32(0x7fffffff));
        const __m256i tiny = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
        const __m256i nan = _mm256_cmpgt_epi32(size, _mm256_set1_epi32(0x7f800000));
        const __m256i number = _mm256_blendv_epi8(rounded, _mm256_and_si256(high, _mm256_set1_epi32(0x8000)), tiny);
        return _mm256_blendv_epi8(number, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
    };
    return _mm512_cvtepi32_epi16(joined(of(0), of(1)));
}
QUIRE_CALLED __m256bh _mm512_cvtneps_pbh(__m512 a) { return reinterpret_cast<__m256bh>(bf16_of(a)); }
QUIRE_CALLED __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) { return reinterpret_cast<__m512bh>(joined(bf16_of(low), bf16_of(high))); }
// Two fused multiply-adds, of the odd numbers and then of the even ones, which round to the nearest and take denormal numbers for 0,
// whatever the thread has set; one piece of assembler, so that nothing else is computed in that state.
QUIRE_CALLED __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
    const unsigned zeros_for_denormals = 0x9fc0, before = _mm_getcsr();
    const auto of = [&](int i) __attribute__((always_inline)) {
        const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
        const __m256i x = half(reinterpret_cast<__m512i>(a), i), y = half(reinterpret_cast<__m512i>(b), i);
        __m256 to = half(sum, i);
        asm("vldmxcsr %[zeros]\n\tvfmadd231ps %[x1], %[y1], %[to]\n\tvfmadd231ps %[x0], %[y0], %[to]\n\tvldmxcsr %[before]"
            : [to] "+&x"(to)
            : [x1] "x"(_mm256_and_si256(x, high)), [y1] "x"(_mm256_and_si256(y, high)), [x0] "x"(_mm256_slli_epi32(x, 16)),
              [y0] "x"(_mm256_slli_epi32(y, 16)), [zeros] "m"(zeros_for_denormals), [before] "m"(before));
        return to;
    };
    return joined(of(0), of(1));
}

#undef QUIRE_BOTH
#undef QUIRE_HALVES
#undef QUIRE_CALLED
