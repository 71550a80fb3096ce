// 16 lanes in plain C++ vector extensions: any architecture. Multiply-adds are rounded twice (no hardware FMA assumed).
#pragma once

#include <cstdint>
#include <cstring>

#define QUIRE_INLINE static inline __attribute__((always_inline))

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));

// Weights of 8 bits reach `dot8` as stored code minus kStored8; the rest of the offset is in the start value.
constexpr int kStart8 = 128;
// Linear: rows by column blocks of a tile, of a tile for a few rows, blocks for a single row, and a tile of float weights for
// many rows. Attention: rows by vectors.
constexpr int kTileRows = 4, kTileBlocks = 1, kFewRows = 2, kFewBlocks = 1, kRowBlocks = 1;
constexpr int kStreamRows = 0;
constexpr int kManyRows = kTileRows, kManyBlocks = kTileBlocks;
constexpr int kAttentionRows = 2, kAttentionTiles = 2;

template <class T>
QUIRE_INLINE T load_as(const void* p) {
    T v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

QUIRE_INLINE F load(const float* p) { return load_as<F>(p); }
QUIRE_INLINE void store(float* p, F v) { std::memcpy(p, &v, sizeof v); }
QUIRE_INLINE void store_past(float* p, F v) { store(p, v); }
QUIRE_INLINE F load_n(const float* p, int n) {
    F v = {};
    for (int i = 0; i < n; ++i) v[i] = p[i];
    return v;
}
QUIRE_INLINE void store_n(float* p, F v, int n) {
    for (int i = 0; i < n; ++i) p[i] = v[i];
}
QUIRE_INLINE F set1(float x) { return F{} + x; }
QUIRE_INLINE I set1_i(int32_t x) { return I{} + x; }
QUIRE_INLINE U set1_u(uint32_t x) { return U{} + x; }
QUIRE_INLINE U load_u(const void* p) { return load_as<U>(p); }
QUIRE_INLINE I load_i(const void* p) { return load_as<I>(p); }
QUIRE_INLINE F add(F a, F b) { return a + b; }
QUIRE_INLINE F sub(F a, F b) { return a - b; }
QUIRE_INLINE F mul(F a, F b) { return a * b; }
QUIRE_INLINE F div(F a, F b) { return a / b; }
QUIRE_INLINE F fma(F a, F b, F c) { return a * b + c; }
// The second operand wins when either is NaN, as in the x86 instructions.
QUIRE_INLINE F vmin(F a, F b) { return a < b ? a : b; }
QUIRE_INLINE F vmax(F a, F b) { return a > b ? a : b; }
QUIRE_INLINE F vabs(F a) { return (F)((U)a & 0x7fffffffu); }
QUIRE_INLINE F to_f(I a) { return __builtin_convertvector(a, F); }
// Round half to even; |a| must be below 2^22.
QUIRE_INLINE I round_i(F a) { return __builtin_convertvector((a + 12582912.0f) - 12582912.0f, I); }
QUIRE_INLINE I to_i(F a) { return __builtin_convertvector(a, I); }
QUIRE_INLINE F exp2_int(I n) { return (F)((n + 127) << 23); }
// The integer nearest to a, |a| below 2^22, and p * 2^n for integral n in [kLeastPower, 127]; 0 at kLeastPower.
constexpr float kLeastPower = -127.0f;
QUIRE_INLINE F round_f(F a) { return (a + 12582912.0f) - 12582912.0f; }
QUIRE_INLINE F scale2(F p, F n) { return mul(p, exp2_int(to_i(n))); }
QUIRE_INLINE F keep(F v, int from, int to, F other) {
    const I lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return ((lane >= from) & (lane < to)) ? v : other;
}
// x in lanes where a < b, else y.
QUIRE_INLINE F where_less(F a, F b, F x, F y) { return a < b ? x : y; }
QUIRE_INLINE float hsum(F v) {
    float t[16];
    store(t, v);
    for (int w = 8; w; w /= 2)
        for (int i = 0; i < w; ++i) t[i] = t[i] + t[i + w];
    return t[0];
}
QUIRE_INLINE float hmax(F v) {
    float t[16];
    store(t, v);
    for (int w = 8; w; w /= 2)
        for (int i = 0; i < w; ++i) t[i] = t[i] > t[i + w] ? t[i] : t[i + w];
    return t[0];
}
QUIRE_INLINE int32_t hsum_i(I v) {
    int32_t s = 0;
    for (int i = 0; i < 16; ++i) s += v[i];
    return s;
}

QUIRE_INLINE F bf16_load(const uint16_t* p) {
    typedef uint16_t H __attribute__((vector_size(32)));
    return (F)(__builtin_convertvector(load_as<H>(p), U) << 16);
}
// Round half to even; NaN stays NaN.
QUIRE_INLINE U bf16_bits(F v) {
    const U u = (U)v;
    const U rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return (v == v) ? rounded : ((u >> 16) | 0x40u);
}
QUIRE_INLINE void bf16_store(uint16_t* p, F v) {
    typedef uint16_t H __attribute__((vector_size(32)));
    const H h = __builtin_convertvector(bf16_bits(v), H);
    std::memcpy(p, &h, sizeof h);
}
// bf16 pairs: acc + odd product + even product, lane by lane.
QUIRE_INLINE F dot_bf16(F acc, U a, U b) {
    acc = acc + (F)(a & 0xffff0000u) * (F)(b & 0xffff0000u);
    return acc + (F)(a << 16) * (F)(b << 16);
}
QUIRE_INLINE F f16_load(const uint16_t* p) {
    F v;
    for (int i = 0; i < 16; ++i) {
        const uint32_t h = p[i], sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
        uint32_t bits;
        if (exponent == 31) {
            bits = sign | 0x7f800000u | mantissa << 13;
        } else if (exponent) {
            bits = sign | (exponent + 112) << 23 | mantissa << 13;
        } else {
            const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
            std::memcpy(&bits, &magnitude, 4);
            bits |= sign;
        }
        float x;
        std::memcpy(&x, &bits, 4);
        v[i] = x;
    }
    return v;
}
// Round half to even. Below 2^-14 numbers are multiples of 2^-24: adding 0.5, whose last place is 2^-24, rounds to them.
QUIRE_INLINE void f16_store(uint16_t* p, F v) {
    for (int i = 0; i < 16; ++i) {
        uint32_t bits = 0, small = 0;
        const float x = v[i];
        std::memcpy(&bits, &x, 4);
        const uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
        float magnitude = 0.0f;
        std::memcpy(&magnitude, &size, 4);
        const float shifted = magnitude + 0.5f;
        std::memcpy(&small, &shifted, 4);
        uint32_t half = ((size + 0xfffu + (size >> 13 & 1u)) >> 13) - (112u << 10);
        if (size < 0x38800000u) half = small - 0x3f000000u;
        if (size >= 0x477ff000u) half = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
        p[i] = static_cast<uint16_t>(sign | half);
    }
}
// e4m3, moved to the bits of a number 2^120 times smaller; codes of NaN read as 480.
QUIRE_INLINE F fp8_load(const uint8_t* p) {
    typedef uint8_t B __attribute__((vector_size(16)));
    const U w = __builtin_convertvector(load_as<B>(p), U);
    const F magnitude = (F)((w & 0x7fu) << 20) * 0x1p120f;
    return (F)((U)magnitude | (w & 0x80u) << 24);
}
// The low byte of each half, e4m3, as bf16; exact, codes of NaN read as 480. Numbers below 2^-6 are multiples of 2^-9.
QUIRE_INLINE U fp8_to_bf16(U w) {
    const auto widen = [](U code) {
        const U size = code & 0x7fu, normal = (size << 4) + (120u << 7);
        const U small = (U)(to_f((I)size) * 0x1p-9f) >> 16;
        return (size < 8u ? small : normal) | (code & 0x80u) << 8;
    };
    return widen(w & 0xffu) | widen(w >> 16 & 0xffu) << 16;
}
QUIRE_INLINE U high_bytes(U w) { return w >> 8 & 0x00ff00ffu; }
QUIRE_INLINE U low_nibbles(U w) { return w & 0x0f0f0f0fu; }
QUIRE_INLINE U high_nibbles(U w) { return (w >> 4) & 0x0f0f0f0fu; }
// Bits moved within words, up where kBy > 0: of a byte those that a mask may then choose.
template <int kBy>
QUIRE_INLINE U shift(U w) {
    return kBy > 0 ? w << (kBy > 0 ? kBy : 0) : w >> (kBy < 0 ? -kBy : 0);
}
QUIRE_INLINE I as_i(U a) { return (I)a; }
QUIRE_INLINE U kept(U a) { return a; }
// 16 bytes, one to a lane.
QUIRE_INLINE U load_bytes(const void* p) {
    typedef uint8_t B __attribute__((vector_size(16)));
    return __builtin_convertvector(load_as<B>(p), U);
}
QUIRE_INLINE U and_u(U a, U b) { return a & b; }
QUIRE_INLINE I dot_bytes(I acc, U w, U x) {
    for (int j = 0; j < 4; ++j) {
        const I wj = (I)((w >> (8 * j)) & 0xffu);
        const I xj = (I)(x << (24 - 8 * j)) >> 24;
        acc += wj * xj;
    }
    return acc;
}
QUIRE_INLINE I dot4(I acc, U w, U x) { return dot_bytes(acc, w, x); }
QUIRE_INLINE I dot8(I acc, U w, U x) { return dot_bytes(acc, w, x); }
// Low 16 bits of each lane of a times those of b, signed.
QUIRE_INLINE I mul16(I a, I b) { return ((a << 16) >> 16) * ((b << 16) >> 16); }
QUIRE_INLINE I max_i(I a, I b) { return a > b ? a : b; }
QUIRE_INLINE I bits_of(F a) { return (I)a; }
QUIRE_INLINE int32_t hmax_i(I v) {
    int32_t m = v[0];
    for (int i = 1; i < 16; ++i) m = v[i] > m ? v[i] : m;
    return m;
}
QUIRE_INLINE F as_f(U a) { return (F)a; }
QUIRE_INLINE U low_half(U a) { return a & 0xffffu; }
QUIRE_INLINE I add_i(I a, I b) { return a + b; }
QUIRE_INLINE I sub_i(I a, I b) { return a - b; }
QUIRE_INLINE I times255(I a) { return a * 255; }
// Byte of a table of 16 for each byte of `at`, all of them below 16.
QUIRE_INLINE U load_table(const void* p) {
    U v;
    for (int i = 0; i < 4; ++i) std::memcpy(reinterpret_cast<char*>(&v) + 16 * i, p, 16);
    return v;
}
QUIRE_INLINE U look_up(U table, U at) {
    uint8_t from[64], index[64], out[64];
    std::memcpy(from, &table, 64);
    std::memcpy(index, &at, 64);
    for (int i = 0; i < 64; ++i) out[i] = from[index[i] & 15];
    std::memcpy(&at, out, 64);
    return at;
}
QUIRE_INLINE U xor_u(U a, U b) { return a ^ b; }
// a & mask ^ b
QUIRE_INLINE U masked_xor(U a, U mask, U b) { return (a & mask) ^ b; }
// a & mask | b
QUIRE_INLINE U masked_or(U a, U mask, U b) { return (a & mask) | b; }
// Bytes of a and b in turn, of the first half or the second of each 16 bytes.
template <int kFrom>
QUIRE_INLINE U zip_bytes(U a, U b) {
    uint8_t x[64], y[64], out[64];
    std::memcpy(x, &a, 64);
    std::memcpy(y, &b, 64);
    for (int i = 0; i < 32; ++i) {
        const int from = i / 8 * 16 + kFrom + i % 8;
        out[2 * i] = x[from];
        out[2 * i + 1] = y[from];
    }
    std::memcpy(&a, out, 64);
    return a;
}
QUIRE_INLINE U zip_low(U a, U b) { return zip_bytes<0>(a, b); }
QUIRE_INLINE U zip_high(U a, U b) { return zip_bytes<8>(a, b); }
QUIRE_INLINE void store_u(void* p, U a) { std::memcpy(p, &a, 64); }
QUIRE_INLINE I load_i8(const int8_t* p) {
    typedef int8_t B __attribute__((vector_size(16)));
    return __builtin_convertvector(load_as<B>(p), I);
}
QUIRE_INLINE void store_i8(int8_t* p, I v) {
    typedef int8_t B __attribute__((vector_size(16)));
    const B b = __builtin_convertvector(v, B);
    std::memcpy(p, &b, sizeof b);
}
QUIRE_INLINE F vsqrt(F a) {
    for (int i = 0; i < 16; ++i) a[i] = __builtin_sqrtf(a[i]);
    return a;
}
// 16 pairs of halves: low in the lower 16 bits of each lane.
QUIRE_INLINE void zip16(char* to, const char* low, const char* high) {
    typedef uint16_t H __attribute__((vector_size(32)));
    const U u = __builtin_convertvector(load_as<H>(low), U) | (__builtin_convertvector(load_as<H>(high), U) << 16);
    std::memcpy(to, &u, sizeof u);
}
// 16 words of each of 16 places, transposed: to[i][lane] = from[lane][i].
QUIRE_INLINE void transpose_words(char* to, const char* const* from, int64_t at) {
    for (int lane = 0; lane < 16; ++lane)
        for (int i = 0; i < 16; ++i) std::memcpy(to + i * 64 + lane * 4, from[lane] + at + i * 4, 4);
}
QUIRE_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
QUIRE_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }
