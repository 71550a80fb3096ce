// Tiles of R rows by NB column blocks: f32 and bf16 weights here, integers in linear_int.h.
#pragma once

// Stores numbers of a large output past the caches: to fetch its lines first, only to overwrite them, took 15 % of the time at
// 512 rows on a Zen 5 and up to a fifth on a Xeon with AMX. The pool's atomic count at the end of a task orders these stores.
QUIRE_INLINE void store_out(const LinearCall& c, float* to, F value, int lanes) {
    if (c.past_caches && lanes == 16 && reinterpret_cast<uintptr_t>(to) % 64 == 0) store_past(to, value);
    else store_lanes(to, value, lanes);
}

QUIRE_INLINE LinearCall with_large_output(LinearCall c, int64_t m) {
    constexpr int64_t kCacheBytes = 2 << 20;
    c.past_caches = m * c.w.n * 4 > kCacheBytes;
    return c;
}

// Stores a tile, of which `rows` are of the output; the bias comes with the last part.
template <int R, int NB>
QUIRE_INLINE void store_tile(const LinearCall& c, F (&acc)[R][NB], int64_t row, int64_t block, const Part& part, int64_t rows = R) {
    for (int b = 0; b < NB; ++b) {
        const int64_t column = (block + b) * 16;
        const int lanes = static_cast<int>(c.w.n - column < 16 ? c.w.n - column : 16);
        const F bias = c.bias ? load_lanes(c.bias + column, lanes) : set1(0.0f);
        for (int r = 0; r < R; ++r) {
            if (!part.last) store(part.sums + part.at + (r * NB + b) * 16, acc[r][b]);
            else if (r < rows) store_out(c, c.out + (row + r) * c.out_stride + column, c.bias ? add(acc[r][b], bias) : acc[r][b], lanes);
        }
    }
}

// What a tile starts from.
template <int R, int NB>
QUIRE_INLINE void load_tile(F (&acc)[R][NB], const Part& part) {
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < NB; ++b) acc[r][b] = part.begin ? load(part.sums + part.at + (r * NB + b) * 16) : set1(0.0f);
}

QUIRE_INLINE uint32_t word(const char* p) {
    uint32_t x;
    std::memcpy(&x, p, 4);
    return x;
}

// From byte `at` of NB streams of `bytes` each to the place to ask for: behind a stream's end the same stream goes on in the
// next group of blocks.
template <int NB>
QUIRE_INLINE int64_t place_ahead(int64_t at, int64_t bytes, int64_t ahead) {
    return ahead + (at + ahead >= bytes ? (NB - 1) * bytes : 0);
}

// 16 rows of a column: of 16 bits the f32 numbers that they are, so a sum has the bits that f32 weights give it.
template <WeightKind kKind>
QUIRE_INLINE F load_column(const char* from) {
    if constexpr (kKind == WeightKind::kF32) return load(reinterpret_cast<const float*>(from));
    if constexpr (kKind == WeightKind::kF16) return f16_load(reinterpret_cast<const uint16_t*>(from));
    return bf16_load(reinterpret_cast<const uint16_t*>(from));
}

template <WeightKind kKind, int R, int NB>
[[gnu::noinline]] void f32_tile(const LinearCall& c, int64_t row, int64_t block, const Part& part) {
    F acc[R][NB];
    load_tile<R, NB>(acc, part);
    constexpr int kBytes = kKind == WeightKind::kF32 ? 64 : 32;
    const char* w = c.w.codes + block * c.w.k * kBytes;
    const char* x = c.x + row * c.x_stride;
    for (int64_t k = part.begin; k < part.end; ++k) {
        F wk[NB];
#pragma GCC unroll 8
        for (int b = 0; b < NB; ++b) {
            const char* at = w + (b * c.w.k + k) * kBytes;
            wk[b] = load_column<kKind>(at);
            if constexpr (R == 1) prefetch(at + g_tuning.ahead);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const F xk = set1(reinterpret_cast<const float*>(x + r * c.x_stride)[k]);
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) acc[r][b] = fma(wk[b], xk, acc[r][b]);
        }
    }
    store_tile<R, NB>(c, acc, row, block, part);
}

// Rows lie kAbreast side by side. Inlined into its callers, GCC 12 keeps the sums of 16 rows in memory: a third of the speed.
template <int R, int NB, int kAbreast, bool kAlone>
[[gnu::noinline]] void bf16_tile(const LinearCall& c, int64_t row, int64_t block, const Part& part) {
    F acc[R][NB];
    load_tile<R, NB>(acc, part);
    const int64_t x_step = kAbreast > 1 ? 4 : c.x_stride;
    const char* x = c.x + row * c.x_stride + part.begin * 4 * kAbreast;
    Turns turns(part);
    for (int64_t p = 0; p < part.end - part.begin; ++p, x += 4 * kAbreast) {
        U wk[NB];
#pragma GCC unroll 8
        for (int b = 0; b < NB; ++b) wk[b] = load_u(part.weights + b * part.stride + p * 64);
        if (part.next && (kAlone || turns.now())) {
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) {
                const char* at = part.next + b * part.next_stride + p * part.next_step;
                kAlone ? prefetch(at) : prefetch_far(at);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const U xk = set1_u(word(x + r * x_step));
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) acc[r][b] = dot_bf16(acc[r][b], wk[b], xk);
        }
    }
    store_tile<R, NB>(c, acc, row, block, part);
}
