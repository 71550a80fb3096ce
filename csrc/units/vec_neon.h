// 16 lanes in four 128-bit registers of an aarch64 processor with the dot-product instructions; float operations round as the x86
// units' do. With I8MM, weights of 8 bits stay unsigned, which spares them an operation per vector.
#pragma once

#include <arm_neon.h>
#include <cstdint>
#include <cstring>

namespace quire::QUIRE_UNIT {
namespace {

#define QUIRE_INLINE static inline __attribute__((always_inline))

// Members, not an array: GCC 12 stores the sums of a tile of three rows or more to the stack at every step where they are arrays
// within arrays.
struct F {
    float32x4_t a, b, c, d;
};
struct I {
    int32x4_t a, b, c, d;
};
struct U {
    uint32x4_t a, b, c, d;
};

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kStart8 = 128;
#else
// Both sides of the dot product are signed: `dot8` takes the stored code's offset off, none is left.
constexpr int kStart8 = 0;
#endif
// Linear: rows by column blocks of a tile, of a tile for a few rows, blocks for a single row (one by one, or side by
// side, Tuning::row_streams), and a tile of float weights for
// many rows. Attention: rows by vectors.
constexpr int kTileRows = 4, kTileBlocks = 1, kFewRows = 2, kFewBlocks = 1, kRowBlocks = 1, kRowStreams = 1;
constexpr int kStreamRows = 0;
constexpr int kManyRows = kTileRows, kManyBlocks = kTileBlocks;
constexpr int kAttentionRows = 2, kAttentionTiles = 2;

// f for each register of x, and of as many others as there are.
template <class To, class Fn, class... X>
QUIRE_INLINE To each(const Fn& f, const X&... x) {
    return {f(x.a...), f(x.b...), f(x.c...), f(x.d...)};
}
QUIRE_INLINE uint8x16_t bytes_of(uint32x4_t x) { return vreinterpretq_u8_u32(x); }
QUIRE_INLINE uint16x8_t halves_of(uint32x4_t x) { return vreinterpretq_u16_u32(x); }
QUIRE_INLINE uint32x4_t words_of(uint8x16_t x) { return vreinterpretq_u32_u8(x); }
QUIRE_INLINE uint32x4_t words_of(uint16x8_t x) { return vreinterpretq_u32_u16(x); }
// Bits as numbers and back.
QUIRE_INLINE float32x4_t floats(uint32x4_t x) { return vreinterpretq_f32_u32(x); }
QUIRE_INLINE uint32x4_t bits(float32x4_t x) { return vreinterpretq_u32_f32(x); }
// The second operand wins when either is NaN, as in the x86 instructions.
QUIRE_INLINE float32x4_t least(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
QUIRE_INLINE float32x4_t most(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }

QUIRE_INLINE F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
QUIRE_INLINE void store(float* p, F x) {
    vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b), vst1q_f32(p + 8, x.c), vst1q_f32(p + 12, x.d);
}
QUIRE_INLINE void store_past(float* p, F x) { store(p, x); }
QUIRE_INLINE F load_n(const float* p, int n) {
    float t[16] = {};
    if (n > 0) std::memcpy(t, p, static_cast<size_t>(n) * 4);
    return load(t);
}
QUIRE_INLINE void store_n(float* p, F x, int n) {
    float t[16];
    store(t, x);
    if (n > 0) std::memcpy(p, t, static_cast<size_t>(n) * 4);
}
QUIRE_INLINE F set1(float x) {
    const float32x4_t v = vdupq_n_f32(x);
    return {v, v, v, v};
}
QUIRE_INLINE I set1_i(int32_t x) {
    const int32x4_t v = vdupq_n_s32(x);
    return {v, v, v, v};
}
QUIRE_INLINE U set1_u(uint32_t x) {
    const uint32x4_t v = vdupq_n_u32(x);
    return {v, v, v, v};
}
QUIRE_INLINE uint32x4_t load_words(const void* p) { return words_of(vld1q_u8(static_cast<const uint8_t*>(p))); }
QUIRE_INLINE U load_u(const void* p) {
    const char* at = static_cast<const char*>(p);
    return {load_words(at), load_words(at + 16), load_words(at + 32), load_words(at + 48)};
}
QUIRE_INLINE I load_i(const void* p) { return each<I>([](auto x) { return vreinterpretq_s32_u32(x); }, load_u(p)); }
QUIRE_INLINE F add(F x, F y) { return each<F>([](auto a, auto b) { return vaddq_f32(a, b); }, x, y); }
QUIRE_INLINE F sub(F x, F y) { return each<F>([](auto a, auto b) { return vsubq_f32(a, b); }, x, y); }
QUIRE_INLINE F mul(F x, F y) { return each<F>([](auto a, auto b) { return vmulq_f32(a, b); }, x, y); }
QUIRE_INLINE F div(F x, F y) { return each<F>([](auto a, auto b) { return vdivq_f32(a, b); }, x, y); }
QUIRE_INLINE F fma(F x, F y, F c) { return each<F>([](auto a, auto b, auto d) { return vfmaq_f32(d, a, b); }, x, y, c); }
QUIRE_INLINE F vmin(F x, F y) { return each<F>([](auto a, auto b) { return least(a, b); }, x, y); }
QUIRE_INLINE F vmax(F x, F y) { return each<F>([](auto a, auto b) { return most(a, b); }, x, y); }
QUIRE_INLINE F vabs(F x) { return each<F>([](auto a) { return vabsq_f32(a); }, x); }
QUIRE_INLINE F vsqrt(F x) { return each<F>([](auto a) { return vsqrtq_f32(a); }, x); }
QUIRE_INLINE F to_f(I x) { return each<F>([](auto a) { return vcvtq_f32_s32(a); }, x); }
QUIRE_INLINE I round_i(F x) { return each<I>([](auto a) { return vcvtnq_s32_f32(a); }, x); }
QUIRE_INLINE F exp2_int(I n) {
    return each<F>([](auto a) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(a, vdupq_n_s32(127)), 23)); }, n);
}
// The integer nearest to a, and p * 2^n for integral n in [kLeastPower, 127]; 0 at kLeastPower.
constexpr float kLeastPower = -127.0f;
QUIRE_INLINE F round_f(F x) { return each<F>([](auto a) { return vrndnq_f32(a); }, x); }
QUIRE_INLINE F scale2(F p, F n) { return mul(p, exp2_int(round_i(n))); }
QUIRE_INLINE F keep(F x, int from, int to, F other) {
    static constexpr int32_t kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const auto blend = [&](int32x4_t lane, float32x4_t a, float32x4_t b) {
        return vbslq_f32(vandq_u32(vcgeq_s32(lane, vdupq_n_s32(from)), vcltq_s32(lane, vdupq_n_s32(to))), a, b);
    };
    return each<F>(blend, load_i(kLanes), x, other);
}
// x in lanes where a < b, else y.
QUIRE_INLINE F where_less(F a, F b, F x, F y) {
    return each<F>([](auto p, auto q, auto r, auto s) { return vbslq_f32(vcltq_f32(p, q), r, s); }, a, b, x, y);
}
QUIRE_INLINE float hsum(F x) {
    const float32x4_t q = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    const float32x2_t d = vadd_f32(vget_low_f32(q), vget_high_f32(q));
    return vget_lane_f32(d, 0) + vget_lane_f32(d, 1);
}
QUIRE_INLINE float hmax(F x) {
    const float32x4_t q = most(most(x.a, x.c), most(x.b, x.d));
    const float32x4_t d = most(q, vextq_f32(q, q, 2));
    return vgetq_lane_f32(most(d, vextq_f32(d, d, 1)), 0);
}
QUIRE_INLINE int32_t hsum_i(I x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.a, x.b), vaddq_s32(x.c, x.d))); }

QUIRE_INLINE F bf16_load(const uint16_t* p) {
    const auto four = [&](int i) { return floats(vshll_n_u16(vld1_u16(p + 4 * i), 16)); };
    return {four(0), four(1), four(2), four(3)};
}
// Round half to even; NaN stays NaN.
QUIRE_INLINE void bf16_store(uint16_t* p, F x) {
    const auto rounded = [](float32x4_t v) {
        const uint32x4_t u = bits(v), high = vshrq_n_u32(u, 16), odd = vandq_u32(high, vdupq_n_u32(1));
        const uint32x4_t even = vshrq_n_u32(vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
        return vmovn_u32(vbslq_u32(vceqq_f32(v, v), even, vorrq_u32(high, vdupq_n_u32(0x40))));
    };
    vst1_u16(p, rounded(x.a)), vst1_u16(p + 4, rounded(x.b)), vst1_u16(p + 8, rounded(x.c)), vst1_u16(p + 12, rounded(x.d));
}
// The odd product, then the even one: the order of the other units.
QUIRE_INLINE F dot_bf16(F acc, U x, U y) {
    const auto odd = [](uint32x4_t a) { return floats(vandq_u32(a, vdupq_n_u32(0xffff0000u))); };
    const auto even = [](uint32x4_t a) { return floats(vshlq_n_u32(a, 16)); };
    const auto dot = [&](auto sum, auto a, auto b) { return vfmaq_f32(vfmaq_f32(sum, odd(a), odd(b)), even(a), even(b)); };
    return each<F>(dot, acc, x, y);
}
QUIRE_INLINE F f16_load(const uint16_t* p) {
    const auto four = [&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); };
    return {four(0), four(1), four(2), four(3)};
}
QUIRE_INLINE void f16_store(uint16_t* p, F x) {
    const auto narrow = [](float32x4_t v) { return vreinterpret_u16_f16(vcvt_f16_f32(v)); };
    vst1_u16(p, narrow(x.a)), vst1_u16(p + 4, narrow(x.b)), vst1_u16(p + 8, narrow(x.c)), vst1_u16(p + 12, narrow(x.d));
}
// Each byte in a word of its own.
QUIRE_INLINE U widen_bytes(uint8x16_t b) {
    const uint16x8_t low = vmovl_u8(vget_low_u8(b)), high = vmovl_u8(vget_high_u8(b));
    return {vmovl_u16(vget_low_u16(low)), vmovl_u16(vget_high_u16(low)), vmovl_u16(vget_low_u16(high)), vmovl_u16(vget_high_u16(high))};
}
// e4m3, moved to the bits of a number 2^120 times smaller; codes of NaN read as 480.
QUIRE_INLINE F fp8_load(const uint8_t* p) {
    const auto number = [](uint32x4_t w) {
        const uint32x4_t size = vshlq_n_u32(vandq_u32(w, vdupq_n_u32(0x7f)), 20);
        const uint32x4_t sign = vshlq_n_u32(vandq_u32(w, vdupq_n_u32(0x80)), 24);
        return floats(vorrq_u32(bits(vmulq_f32(floats(size), vdupq_n_f32(0x1p120f))), sign));
    };
    return each<F>(number, widen_bytes(vld1q_u8(p)));
}
// The low byte of each half, e4m3, as bf16; exact, codes of NaN read as 480. Numbers below 2^-6 come from a table.
QUIRE_INLINE U fp8_to_bf16(U w) {
    static constexpr uint16_t kSmall[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
    const uint8x16_t table = vreinterpretq_u8_u16(vld1q_u16(kSmall));
    const auto widen = [&](uint32x4_t words) {
        const uint16x8_t code = halves_of(words), size = vandq_u16(code, vdupq_n_u16(0x7f));
        const uint16x8_t normal = vaddq_u16(vshlq_n_u16(size, 4), vdupq_n_u16(120 << 7));
        const uint16x8_t at = vmlaq_n_u16(vdupq_n_u16(0x0100), size, 0x0202);  // bytes 2 size and 2 size + 1
        const uint16x8_t small = vreinterpretq_u16_u8(vqtbl1q_u8(table, vreinterpretq_u8_u16(at)));
        const uint16x8_t number = vbslq_u16(vcltq_u16(size, vdupq_n_u16(8)), small, normal);
        return words_of(vorrq_u16(number, vandq_u16(vshlq_n_u16(code, 8), vdupq_n_u16(0x8000))));
    };
    return each<U>(widen, w);
}
QUIRE_INLINE U high_bytes(U w) { return each<U>([](auto a) { return words_of(vshrq_n_u16(halves_of(a), 8)); }, w); }
QUIRE_INLINE U low_nibbles(U w) { return each<U>([](auto a) { return words_of(vandq_u8(bytes_of(a), vdupq_n_u8(15))); }, w); }
QUIRE_INLINE U high_nibbles(U w) { return each<U>([](auto a) { return words_of(vshrq_n_u8(bytes_of(a), 4)); }, w); }
// Bits moved within the halves of words, up where kBy > 0: of a byte those that a mask may then choose.
template <int kBy>
QUIRE_INLINE U shift(U w) {
    if constexpr (kBy == 0) return w;
    else return each<U>([](auto a) { return words_of(vshlq_u16(halves_of(a), vdupq_n_s16(kBy))); }, w);
}
QUIRE_INLINE I as_i(U x) { return each<I>([](auto a) { return vreinterpretq_s32_u32(a); }, x); }
QUIRE_INLINE U kept(U x) { return x; }
// 16 bytes, one to a lane.
QUIRE_INLINE U load_bytes(const void* p) { return widen_bytes(vld1q_u8(static_cast<const uint8_t*>(p))); }
QUIRE_INLINE U and_u(U x, U y) { return each<U>([](auto a, auto b) { return vandq_u32(a, b); }, x, y); }
QUIRE_INLINE int32x4_t dot_signed(int32x4_t acc, uint8x16_t w, uint32x4_t x) {
    return vdotq_s32(acc, vreinterpretq_s8_u8(w), vreinterpretq_s8_u32(x));
}
QUIRE_INLINE I dot4(I acc, U w, U x) {
    return each<I>([](auto sum, auto a, auto b) { return dot_signed(sum, bytes_of(a), b); }, acc, w, x);
}
#if defined(__ARM_FEATURE_MATMUL_INT8)
QUIRE_INLINE I dot8(I acc, U w, U x) {
    return each<I>([](auto sum, auto a, auto b) { return vusdotq_s32(sum, bytes_of(a), vreinterpretq_s8_u32(b)); }, acc, w, x);
}
#else
QUIRE_INLINE I dot8(I acc, U w, U x) {
    return each<I>([](auto sum, auto a, auto b) { return dot_signed(sum, veorq_u8(bytes_of(a), vdupq_n_u8(0x80)), b); }, acc, w, x);
}
#endif
// Low 16 bits of each lane of a times those of b, signed.
QUIRE_INLINE I mul16(I x, I y) {
    const auto low = [](int32x4_t a) { return vshrq_n_s32(vshlq_n_s32(a, 16), 16); };
    return each<I>([&](auto a, auto b) { return vmulq_s32(low(a), low(b)); }, x, y);
}
QUIRE_INLINE I max_i(I x, I y) { return each<I>([](auto a, auto b) { return vmaxq_s32(a, b); }, x, y); }
QUIRE_INLINE I bits_of(F x) { return each<I>([](auto a) { return vreinterpretq_s32_f32(a); }, x); }
QUIRE_INLINE int32_t hmax_i(I x) { return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.a, x.b), vmaxq_s32(x.c, x.d))); }
QUIRE_INLINE F as_f(U x) { return each<F>([](auto a) { return floats(a); }, x); }
QUIRE_INLINE U low_half(U x) { return each<U>([](auto a) { return vandq_u32(a, vdupq_n_u32(0xffff)); }, x); }
QUIRE_INLINE I add_i(I x, I y) { return each<I>([](auto a, auto b) { return vaddq_s32(a, b); }, x, y); }
QUIRE_INLINE I sub_i(I x, I y) { return each<I>([](auto a, auto b) { return vsubq_s32(a, b); }, x, y); }
QUIRE_INLINE I times255(I x) { return each<I>([](auto a) { return vsubq_s32(vshlq_n_s32(a, 8), a); }, x); }
// Byte of a table of 16 for each byte of `at`, all of them below 16.
QUIRE_INLINE U load_table(const void* p) {
    const uint32x4_t v = load_words(p);
    return {v, v, v, v};
}
QUIRE_INLINE U look_up(U table, U at) {
    return each<U>([](auto a, auto b) { return words_of(vqtbl1q_u8(bytes_of(a), bytes_of(b))); }, table, at);
}
QUIRE_INLINE U xor_u(U x, U y) { return each<U>([](auto a, auto b) { return veorq_u32(a, b); }, x, y); }
// a & mask ^ b
QUIRE_INLINE U masked_xor(U a, U mask, U b) { return xor_u(and_u(a, mask), b); }
// a & mask | b
QUIRE_INLINE U masked_or(U a, U mask, U b) {
    return each<U>([](auto x, auto m, auto y) { return vorrq_u32(vandq_u32(x, m), y); }, a, mask, b);
}
// Bytes of a and b in turn, of the first half or the second of each 16 bytes.
QUIRE_INLINE U zip_low(U x, U y) {
    return each<U>([](auto a, auto b) { return words_of(vzip1q_u8(bytes_of(a), bytes_of(b))); }, x, y);
}
QUIRE_INLINE U zip_high(U x, U y) {
    return each<U>([](auto a, auto b) { return words_of(vzip2q_u8(bytes_of(a), bytes_of(b))); }, x, y);
}
QUIRE_INLINE void store_u(void* p, U x) {
    auto* to = static_cast<uint8_t*>(p);
    vst1q_u8(to, bytes_of(x.a)), vst1q_u8(to + 16, bytes_of(x.b)), vst1q_u8(to + 32, bytes_of(x.c)), vst1q_u8(to + 48, bytes_of(x.d));
}
QUIRE_INLINE I load_i8(const int8_t* p) {
    const int8x16_t b = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(b)), high = vmovl_s8(vget_high_s8(b));
    return {vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)), vmovl_s16(vget_high_s16(high))};
}
QUIRE_INLINE void store_i8(int8_t* p, I x) {
    const int16x8_t low = vcombine_s16(vmovn_s32(x.a), vmovn_s32(x.b));
    const int16x8_t high = vcombine_s16(vmovn_s32(x.c), vmovn_s32(x.d));
    vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
// 16 pairs of halves: low in the lower 16 bits of each lane.
QUIRE_INLINE void zip16(char* to, const char* low, const char* high) {
    for (int i = 0; i < 2; ++i) {
        const uint16x8_t a = halves_of(load_words(low + 16 * i)), b = halves_of(load_words(high + 16 * i));
        vst1q_u8(reinterpret_cast<uint8_t*>(to) + 32 * i, vreinterpretq_u8_u16(vzip1q_u16(a, b)));
        vst1q_u8(reinterpret_cast<uint8_t*>(to) + 32 * i + 16, vreinterpretq_u8_u16(vzip2q_u16(a, b)));
    }
}
// 16 words of each of 16 places, transposed: to[i][lane] = from[lane][i].
QUIRE_INLINE void transpose_words(char* to, const char* const* from, int64_t at) {
    for (int lane = 0; lane < 16; lane += 4) {
        for (int i = 0; i < 16; i += 4) {
            uint32x4_t r[4];
            for (int j = 0; j < 4; ++j) r[j] = load_words(from[lane + j] + at + i * 4);
            const uint32x4_t a = vzip1q_u32(r[0], r[2]), b = vzip2q_u32(r[0], r[2]);
            const uint32x4_t c = vzip1q_u32(r[1], r[3]), d = vzip2q_u32(r[1], r[3]);
            const uint32x4_t out[4] = {vzip1q_u32(a, c), vzip2q_u32(a, c), vzip1q_u32(b, d), vzip2q_u32(b, d)};
            for (int j = 0; j < 4; ++j) vst1q_u8(reinterpret_cast<uint8_t*>(to) + (i + j) * 64 + lane * 4, bytes_of(out[j]));
        }
    }
}
QUIRE_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
QUIRE_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace
}  // namespace quire::QUIRE_UNIT
