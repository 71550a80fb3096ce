// 16 lanes in four 16-byte vectors of plain C++ vector extensions: any architecture. Multiply-adds are rounded twice (no hardware
// FMA assumed). One vector of 64 bytes is no substitute: GCC 12 takes it apart through memory.
#pragma once

#include <cstdint>
#include <cstring>

namespace quire::QUIRE_UNIT {
namespace {

#define QUIRE_INLINE static inline __attribute__((always_inline))

typedef float F4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));
typedef uint32_t U4 __attribute__((vector_size(16)));
typedef int16_t S8 __attribute__((vector_size(16)));

// Members, not an array: GCC 12 stores the sums of a tile to the stack at every step where they are arrays within arrays.
struct F {
    F4 a, b, c, d;
};
struct I {
    I4 a, b, c, d;
};
struct U {
    U4 a, b, c, d;
};

// What is left of the 128 that codes of 8 bits lie above their numbers once `dot8` has multiplied them: the start of a sum takes it off.
constexpr int kStart8 = 128;
// Linear: rows by column blocks of a tile, of a tile for a few rows, blocks for a single row (one by one, or side by
// side, Tuning::row_streams), and a tile of float weights for
// many rows; kStreamRows: the most rows that stream bf16 weights, 0: only single rows stream weights. Attention: rows by vectors. Sums of 4 rows would fill the 16 registers that every processor of this architecture has.
constexpr int kTileRows = 2, kTileBlocks = 1, kFewRows = 2, kFewBlocks = 1, kRowBlocks = 1, kRowStreams = 1;
constexpr int kStreamRows = 0;
constexpr int kManyRows = kTileRows, kManyBlocks = kTileBlocks;
constexpr int kAttentionRows = 2, kAttentionTiles = 2;

// The vector of lanes 4 i to 4 i + 3.
template <int i, class T>
QUIRE_INLINE auto quarter(const T& v) {
    static_assert(i >= 0 && i < 4);
    if constexpr (i == 0) return v.a;
    else if constexpr (i == 1) return v.b;
    else if constexpr (i == 2) return v.c;
    else return v.d;
}

template <class T, class Make>
QUIRE_INLINE T four(const Make& make) {
    return {make.template operator()<0>(), make.template operator()<1>(), make.template operator()<2>(), make.template operator()<3>()};
}

// A T of four vectors, `value` with i from 0 to 3.
#define QUIRE_FOUR(T, value) four<T>([&]<int i>() __attribute__((always_inline)) { return value; })

template <class T>
QUIRE_INLINE T load_as(const void* p) {
    T v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// Lanes 4 i to 4 i + 3 of bytes and of halves.
QUIRE_INLINE U4 widened_bytes(const void* p, int i) {
    typedef uint8_t B __attribute__((vector_size(4)));
    return __builtin_convertvector(load_as<B>(static_cast<const char*>(p) + 4 * i), U4);
}
QUIRE_INLINE U4 widened_halves(const void* p, int i) {
    typedef uint16_t H __attribute__((vector_size(8)));
    return __builtin_convertvector(load_as<H>(static_cast<const char*>(p) + 8 * i), U4);
}
QUIRE_INLINE void store_halves(uint16_t* p, U v) {
    typedef uint16_t H __attribute__((vector_size(8)));
    const auto write = [p](int i, U4 words) __attribute__((always_inline)) {
        const H h = __builtin_convertvector(words, H);
        std::memcpy(p + 4 * i, &h, sizeof h);
    };
    write(0, v.a), write(1, v.b), write(2, v.c), write(3, v.d);
}

// Four copies of a vector each: GCC 12 takes one copy of 64 bytes through the stack, and with it what it is copied from or to.
QUIRE_INLINE F load(const float* p) { return QUIRE_FOUR(F, load_as<F4>(p + 4 * i)); }
template <class T>
QUIRE_INLINE void store_four(void* p, T v) {
    char* to = static_cast<char*>(p);
    std::memcpy(to, &v.a, 16), std::memcpy(to + 16, &v.b, 16), std::memcpy(to + 32, &v.c, 16), std::memcpy(to + 48, &v.d, 16);
}
QUIRE_INLINE void store(float* p, F v) { store_four(p, v); }
QUIRE_INLINE void store_past(float* p, F v) { store(p, v); }
QUIRE_INLINE F load_n(const float* p, int n) {
    float t[16] = {};
    for (int i = 0; i < n; ++i) t[i] = p[i];
    return load(t);
}
QUIRE_INLINE void store_n(float* p, F v, int n) {
    float t[16];
    store(t, v);
    for (int i = 0; i < n; ++i) p[i] = t[i];
}
QUIRE_INLINE F set1(float x) { return QUIRE_FOUR(F, (F4{x, x, x, x})); }
QUIRE_INLINE I set1_i(int32_t x) { return QUIRE_FOUR(I, (I4{x, x, x, x})); }
QUIRE_INLINE U set1_u(uint32_t x) { return QUIRE_FOUR(U, (U4{x, x, x, x})); }
QUIRE_INLINE U load_u(const void* p) { return QUIRE_FOUR(U, load_as<U4>(static_cast<const char*>(p) + 16 * i)); }
QUIRE_INLINE I load_i(const void* p) { return QUIRE_FOUR(I, load_as<I4>(static_cast<const char*>(p) + 16 * i)); }
QUIRE_INLINE F add(F a, F b) { return QUIRE_FOUR(F, quarter<i>(a) + quarter<i>(b)); }
QUIRE_INLINE F sub(F a, F b) { return QUIRE_FOUR(F, quarter<i>(a) - quarter<i>(b)); }
QUIRE_INLINE F mul(F a, F b) { return QUIRE_FOUR(F, quarter<i>(a) * quarter<i>(b)); }
QUIRE_INLINE F div(F a, F b) { return QUIRE_FOUR(F, quarter<i>(a) / quarter<i>(b)); }
QUIRE_INLINE F fma(F a, F b, F c) { return QUIRE_FOUR(F, quarter<i>(a) * quarter<i>(b) + quarter<i>(c)); }
// The second operand wins when either is NaN, as in the x86 instructions.
QUIRE_INLINE F vmin(F a, F b) { return QUIRE_FOUR(F, (quarter<i>(a) < quarter<i>(b) ? quarter<i>(a) : quarter<i>(b))); }
QUIRE_INLINE F vmax(F a, F b) { return QUIRE_FOUR(F, (quarter<i>(a) > quarter<i>(b) ? quarter<i>(a) : quarter<i>(b))); }
QUIRE_INLINE F vabs(F a) { return QUIRE_FOUR(F, (F4)((U4)quarter<i>(a) & 0x7fffffffu)); }
QUIRE_INLINE F to_f(I a) { return QUIRE_FOUR(F, __builtin_convertvector(quarter<i>(a), F4)); }
QUIRE_INLINE I to_i(F a) { return QUIRE_FOUR(I, __builtin_convertvector(quarter<i>(a), I4)); }
// The integer nearest to a, half to even, |a| below 2^22, and p * 2^n for integral n in [kLeastPower, 127]; 0 at kLeastPower.
constexpr float kLeastPower = -127.0f;
QUIRE_INLINE F round_f(F a) { return QUIRE_FOUR(F, (quarter<i>(a) + 12582912.0f) - 12582912.0f); }
QUIRE_INLINE I round_i(F a) { return to_i(round_f(a)); }
QUIRE_INLINE F exp2_int(I n) { return QUIRE_FOUR(F, (F4)((quarter<i>(n) + 127) << 23)); }
QUIRE_INLINE F scale2(F p, F n) { return mul(p, exp2_int(to_i(n))); }
QUIRE_INLINE F keep(F v, int from, int to, F other) {
    const I4 first = {0, 1, 2, 3};
    return QUIRE_FOUR(F, (((first + 4 * i >= from) & (first + 4 * i < to)) ? quarter<i>(v) : quarter<i>(other)));
}
// x in lanes where a < b, else y.
QUIRE_INLINE F where_less(F a, F b, F x, F y) { return QUIRE_FOUR(F, (quarter<i>(a) < quarter<i>(b) ? quarter<i>(x) : quarter<i>(y))); }
QUIRE_INLINE float hsum(F v) {
    const F4 sum = (v.a + v.c) + (v.b + v.d);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}
QUIRE_INLINE float hmax(F v) {
    float t[16];
    store(t, v);
    for (int w = 8; w; w /= 2)
        for (int i = 0; i < w; ++i) t[i] = t[i] > t[i + w] ? t[i] : t[i + w];
    return t[0];
}
QUIRE_INLINE int32_t hsum_i(I v) {
    const I4 sum = (v.a + v.b) + (v.c + v.d);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

QUIRE_INLINE F bf16_load(const uint16_t* p) { return QUIRE_FOUR(F, (F4)(widened_halves(p, i) << 16)); }
// Round half to even; NaN stays NaN.
QUIRE_INLINE U bf16_bits(F v) {
    const auto round = [](F4 x) __attribute__((always_inline)) {
        const U4 u = (U4)x;
        return x == x ? (u + 0x7fffu + ((u >> 16) & 1u)) >> 16 : (u >> 16) | 0x40u;
    };
    return QUIRE_FOUR(U, round(quarter<i>(v)));
}
QUIRE_INLINE void bf16_store(uint16_t* p, F v) { store_halves(p, bf16_bits(v)); }
// bf16 pairs: acc + odd product + even product, lane by lane.
QUIRE_INLINE F dot_bf16(F acc, U a, U b) {
    const F odd = QUIRE_FOUR(F, quarter<i>(acc) + (F4)(quarter<i>(a) & 0xffff0000u) * (F4)(quarter<i>(b) & 0xffff0000u));
    return QUIRE_FOUR(F, quarter<i>(odd) + (F4)(quarter<i>(a) << 16) * (F4)(quarter<i>(b) << 16));
}
// Numbers below 2^-14 are those of f32 2^112 times smaller too; inf and NaN have an exponent of their own.
QUIRE_INLINE F f16_load(const uint16_t* p) {
    const auto widen = [](U4 half) __attribute__((always_inline)) {
        const U4 size = (half & 0x7fffu) << 13;
        const U4 finite = (U4)((F4)size * 0x1p112f), beyond = size | 0x7f800000u;
        return (F4)((size >= 0x0f800000u ? beyond : finite) | (half & 0x8000u) << 16);
    };
    return QUIRE_FOUR(F, widen(widened_halves(p, i)));
}
// Round half to even. Below 2^-14 numbers are multiples of 2^-24: adding 0.5, whose last place is 2^-24, rounds to them.
QUIRE_INLINE void f16_store(uint16_t* p, F v) {
    const auto narrow = [](U4 bits) __attribute__((always_inline)) {
        const U4 size = bits & 0x7fffffffu, small = (U4)((F4)size + 0.5f) - 0x3f000000u;
        const U4 normal = ((size + 0xfffu + (size >> 13 & 1u)) >> 13) - (112u << 10);
        const U4 most = size > 0x7f800000u ? U4{} + 0x7e00u : U4{} + 0x7c00u;
        return (size >= 0x477ff000u ? most : size < 0x38800000u ? small : normal) | (bits >> 16 & 0x8000u);
    };
    store_halves(p, QUIRE_FOUR(U, narrow((U4)quarter<i>(v))));
}
// e4m3, moved to the bits of a number 2^120 times smaller; codes of NaN read as 480.
QUIRE_INLINE F fp8_load(const uint8_t* p) {
    const auto widen = [](U4 w) __attribute__((always_inline)) {
        const F4 magnitude = (F4)((w & 0x7fu) << 20) * 0x1p120f;
        return (F4)((U4)magnitude | (w & 0x80u) << 24);
    };
    return QUIRE_FOUR(F, widen(widened_bytes(p, i)));
}
// The low byte of each half, e4m3, as bf16; exact, codes of NaN read as 480. Numbers below 2^-6 are multiples of 2^-9.
QUIRE_INLINE U fp8_to_bf16(U w) {
    const auto widen = [](U4 code) __attribute__((always_inline)) {
        const U4 size = code & 0x7fu, normal = (size << 4) + (120u << 7);
        const U4 small = (U4)(__builtin_convertvector((I4)size, F4) * 0x1p-9f) >> 16;
        return (size < 8u ? small : normal) | (code & 0x80u) << 8;
    };
    return QUIRE_FOUR(U, widen(quarter<i>(w) & 0xffu) | widen(quarter<i>(w) >> 16 & 0xffu) << 16);
}
QUIRE_INLINE U high_bytes(U w) { return QUIRE_FOUR(U, quarter<i>(w) >> 8 & 0x00ff00ffu); }
QUIRE_INLINE U low_nibbles(U w) { return QUIRE_FOUR(U, quarter<i>(w) & 0x0f0f0f0fu); }
QUIRE_INLINE U high_nibbles(U w) { return QUIRE_FOUR(U, (quarter<i>(w) >> 4) & 0x0f0f0f0fu); }
// Bits moved within words, up where kBy > 0: of a byte those that a mask may then choose.
template <int kBy>
QUIRE_INLINE U shift(U w) {
    return QUIRE_FOUR(U, (kBy > 0 ? quarter<i>(w) << (kBy > 0 ? kBy : 0) : quarter<i>(w) >> (kBy < 0 ? -kBy : 0)));
}
QUIRE_INLINE I as_i(U a) { return QUIRE_FOUR(I, (I4)quarter<i>(a)); }
QUIRE_INLINE U kept(U a) { return a; }
// 16 bytes, one to a lane.
QUIRE_INLINE U load_bytes(const void* p) { return QUIRE_FOUR(U, widened_bytes(p, i)); }
QUIRE_INLINE U and_u(U a, U b) { return QUIRE_FOUR(U, quarter<i>(a) & quarter<i>(b)); }
// Products of 16-bit numbers that are those of two bytes, so that they fit, and the sums of neighbours.
QUIRE_INLINE I4 sums_of_products(S8 a, S8 b) {
#if defined(__SSE2__)
    return (I4)__builtin_ia32_pmaddwd128(a, b);
#else
    const I4 products = (I4)(a * b);
    return (products << 16 >> 16) + (products >> 16);
#endif
}
// In 16-bit products: those of 32 bits, of which GCC makes several instructions without SSE4.1, took four times as long.
QUIRE_INLINE I dot_bytes(I acc, U w, U x) {
    const auto dot = [](I4 sum, U4 a, U4 b) __attribute__((always_inline)) {
        const S8 first = (S8)(a & 0x00ff00ffu), second = (S8)(a >> 8 & 0x00ff00ffu), signed_bytes = (S8)b;
        return sum + sums_of_products(first, signed_bytes << 8 >> 8) + sums_of_products(second, signed_bytes >> 8);
    };
    return QUIRE_FOUR(I, dot(quarter<i>(acc), quarter<i>(w), quarter<i>(x)));
}
QUIRE_INLINE I dot4(I acc, U w, U x) { return dot_bytes(acc, w, x); }
QUIRE_INLINE I dot8(I acc, U w, U x) { return dot_bytes(acc, w, x); }
// Low 16 bits of each lane of a times those of b, signed.
QUIRE_INLINE I mul16(I a, I b) { return QUIRE_FOUR(I, ((quarter<i>(a) << 16) >> 16) * ((quarter<i>(b) << 16) >> 16)); }
QUIRE_INLINE I max_i(I a, I b) { return QUIRE_FOUR(I, (quarter<i>(a) > quarter<i>(b) ? quarter<i>(a) : quarter<i>(b))); }
QUIRE_INLINE I bits_of(F a) { return QUIRE_FOUR(I, (I4)quarter<i>(a)); }
QUIRE_INLINE int32_t hmax_i(I v) {
    const I4 low = v.a > v.b ? v.a : v.b, high = v.c > v.d ? v.c : v.d, all = low > high ? low : high;
    int32_t most = all[0];
    for (int i = 1; i < 4; ++i) most = all[i] > most ? all[i] : most;
    return most;
}
QUIRE_INLINE F as_f(U a) { return QUIRE_FOUR(F, (F4)quarter<i>(a)); }
QUIRE_INLINE U low_half(U a) { return QUIRE_FOUR(U, quarter<i>(a) & 0xffffu); }
QUIRE_INLINE I add_i(I a, I b) { return QUIRE_FOUR(I, quarter<i>(a) + quarter<i>(b)); }
QUIRE_INLINE I sub_i(I a, I b) { return QUIRE_FOUR(I, quarter<i>(a) - quarter<i>(b)); }
QUIRE_INLINE I times255(I a) { return QUIRE_FOUR(I, quarter<i>(a) * 255); }
// Byte of a table of 16 for each byte of `at`, all of them below 16.
QUIRE_INLINE U load_table(const void* p) { return QUIRE_FOUR(U, load_as<U4>(p)); }
QUIRE_INLINE U look_up(U table, U at) {
    uint8_t from[64], index[64], out[64];
    std::memcpy(from, &table, 64);
    std::memcpy(index, &at, 64);
    for (int i = 0; i < 64; ++i) out[i] = from[i / 16 * 16 + (index[i] & 15)];
    return load_u(out);
}
QUIRE_INLINE U xor_u(U a, U b) { return QUIRE_FOUR(U, quarter<i>(a) ^ quarter<i>(b)); }
// a & mask ^ b
QUIRE_INLINE U masked_xor(U a, U mask, U b) { return QUIRE_FOUR(U, (quarter<i>(a) & quarter<i>(mask)) ^ quarter<i>(b)); }
// a & mask | b
QUIRE_INLINE U masked_or(U a, U mask, U b) { return QUIRE_FOUR(U, (quarter<i>(a) & quarter<i>(mask)) | quarter<i>(b)); }
// Bytes of a and b in turn, of the first half or the second of each 16 bytes.
template <int kFrom>
QUIRE_INLINE U zip_bytes(U a, U b) {
    typedef uint8_t B __attribute__((vector_size(16)));
    constexpr int k = kFrom;
    return QUIRE_FOUR(U, ((U4)__builtin_shufflevector((B)quarter<i>(a), (B)quarter<i>(b), k, k + 16, k + 1, k + 17, k + 2, k + 18, k + 3, k + 19, k + 4, k + 20,
                                                      k + 5, k + 21, k + 6, k + 22, k + 7, k + 23)));
}
QUIRE_INLINE U zip_low(U a, U b) { return zip_bytes<0>(a, b); }
QUIRE_INLINE U zip_high(U a, U b) { return zip_bytes<8>(a, b); }
QUIRE_INLINE void store_u(void* p, U a) { store_four(p, a); }
QUIRE_INLINE I load_i8(const int8_t* p) {
    typedef int8_t B __attribute__((vector_size(4)));
    return QUIRE_FOUR(I, __builtin_convertvector(load_as<B>(p + 4 * i), I4));
}
QUIRE_INLINE void store_i8(int8_t* p, I v) {
    typedef int8_t B __attribute__((vector_size(4)));
    const auto write = [p](int i, I4 words) __attribute__((always_inline)) {
        const B b = __builtin_convertvector(words, B);
        std::memcpy(p + 4 * i, &b, sizeof b);
    };
    write(0, v.a), write(1, v.b), write(2, v.c), write(3, v.d);
}
QUIRE_INLINE F vsqrt(F a) {
    float t[16];
    store(t, a);
    for (int i = 0; i < 16; ++i) t[i] = __builtin_sqrtf(t[i]);
    return load(t);
}
// 16 pairs of halves: low in the lower 16 bits of each lane.
QUIRE_INLINE void zip16(char* to, const char* low, const char* high) {
    store_u(to, QUIRE_FOUR(U, widened_halves(low, i) | widened_halves(high, i) << 16));
}
// 16 words of each of 16 places, transposed: to[i][lane] = from[lane][i].
QUIRE_INLINE void transpose_words(char* to, const char* const* from, int64_t at) {
    for (int lane = 0; lane < 16; ++lane)
        for (int i = 0; i < 16; ++i) std::memcpy(to + i * 64 + lane * 4, from[lane] + at + i * 4, 4);
}
QUIRE_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
QUIRE_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

#undef QUIRE_FOUR

}  // namespace
}  // namespace quire::QUIRE_UNIT
