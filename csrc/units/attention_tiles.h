// The matrix products of a tile of 64 keys: q k^T and p v, in registers.
#pragma once

#include "attention_call.h"
#include "dispatch.h"
#include "lanes.h"

namespace quire::QUIRE_UNIT {
namespace {

// Vectors of scores, or of values, in a tile of so many rows: of a prompt 8 x 2 were 5 % faster than 4 x 4 (Zen 5), but the few
// rows of a decode need all four for enough independent sums.
constexpr int attention_vectors(int rows) { return rows <= 4 ? kAttentionTiles : kAttentionTiles / 2; }

QUIRE_INLINE F broadcast_float(const char* p) {
    float x;
    std::memcpy(&x, p, 4);
    return set1(x);
}

// scores[r][16 j + lane] = q[r] . k[token 16 j + lane] for R rows and NS groups of 16 tokens. `next` are the keys of the
// following tile, prefetched meanwhile (kPrefetch): pieces of 2 KiB are too short for hardware prefetchers, and prefetching a whole
// tile at once stalls. They come to the second level, as the first has no room for a tile beside the one in use (asked for in
// the first, on a Zen 4, a decode took 1.1 times as long at 135 tokens and 1.3 at 1,024).
template <bool kBf16, bool kPrefetch, int R, int NS>
void score_tile(float* scores, const char* q, int64_t q_stride, const char* const* keys, const char* const* next, int64_t words) {
    F acc[R][NS];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < NS; ++j) acc[r][j] = set1(0.0f);
    for (int64_t i = 0; i < words; ++i) {
        U k[NS];
#pragma GCC unroll 16
        for (int j = 0; j < NS; ++j) {
            k[j] = load_u(keys[j] + i * 64);
            if constexpr (kPrefetch) prefetch_far(next[j] + i * 64);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const char* x = q + r * q_stride + i * 4;
            if constexpr (kBf16) {
                const U b = set1_u(word(x));
#pragma GCC unroll 16
                for (int j = 0; j < NS; ++j) acc[r][j] = dot_bf16(acc[r][j], k[j], b);
            } else {
                const F b = broadcast_float(x);
#pragma GCC unroll 16
                for (int j = 0; j < NS; ++j) acc[r][j] = fma(as_f(k[j]), b, acc[r][j]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < NS; ++j) store(scores + r * kTile + j * 16, acc[r][j]);
}

// acc[r] = acc[r] * rescale[r] + p[r] . v for R rows and NV vectors of head dimensions, over `steps` pairs (bf16) or tokens
// (f32); of the last pair only the first token counts when `odd`.
template <bool kBf16, bool kPrefetch, int R, int NV>
void value_tile(float* out, int64_t out_stride, const float* rescale, const char* p, const char* const* values,
                const char* const* next, int64_t at, int64_t steps, bool odd) {
    constexpr int64_t kRowBytes = kTile * (kBf16 ? 2 : 4);
    F acc[R][NV];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        const F s = set1(rescale[r]);
#pragma GCC unroll 16
        for (int j = 0; j < NV; ++j) acc[r][j] = mul(load(out + r * out_stride + j * 16), s);
    }
    const auto step = [&](int64_t i, bool half) __attribute__((always_inline)) {
        U v[NV];
#pragma GCC unroll 16
        for (int j = 0; j < NV; ++j) {
            v[j] = load_u(values[i] + at + j * 64);
            if constexpr (kPrefetch) prefetch_far(next[i] + at + j * 64);
            if (kBf16 && half) v[j] = low_half(v[j]);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const char* x = p + r * kRowBytes + i * 4;
            if constexpr (kBf16) {
                const U b = set1_u(word(x));
#pragma GCC unroll 16
                for (int j = 0; j < NV; ++j) acc[r][j] = dot_bf16(acc[r][j], v[j], b);
            } else {
                const F b = broadcast_float(x);
#pragma GCC unroll 16
                for (int j = 0; j < NV; ++j) acc[r][j] = fma(as_f(v[j]), b, acc[r][j]);
            }
        }
    };
    const int64_t whole = odd ? steps - 1 : steps;
    for (int64_t i = 0; i < whole; ++i) step(i, false);
    if (odd) step(whole, true);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < NV; ++j) store(out + r * out_stride + j * 16, acc[r][j]);
}

// Scores of `rows` <= kAttentionRows rows and a tile's first groups of 16 tokens.
template <bool kBf16, bool kPrefetch>
void score_rows(int64_t rows, float* scores, const char* q, int64_t q_stride, const Located& tile, const Located& next, int64_t groups, int64_t words) {
    with_count<kAttentionRows>(rows, [&]<int R>() {
        for (int64_t j = 0; j < groups; j += attention_vectors(R))
            with_count<attention_vectors(R)>(groups - j, [&]<int NS>() {
                score_tile<kBf16, kPrefetch, R, NS>(scores + j * 16, q, q_stride, tile.keys + j, next.keys + j, words);
            });
    });
}

template <bool kBf16, bool kPrefetch>
void value_rows(int64_t rows, float* out, int64_t out_stride, const float* rescale, const char* p, const Located& tile,
                const Located& next, int64_t steps, bool odd) {
    with_count<kAttentionRows>(rows, [&]<int R>() {
        for (int64_t j = 0; j < out_stride; j += 16 * attention_vectors(R))
            with_count<attention_vectors(R)>((out_stride - j) / 16, [&]<int NV>() {
                value_tile<kBf16, kPrefetch, R, NV>(out + j, out_stride, rescale, p, tile.values, next.values, j * 4, steps, odd);
            });
    });
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
