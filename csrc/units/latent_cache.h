// Latents in the cache (DeepSeek-AI 2024) and the small per-head products that carry queries into the latents' space and
// results out of it. Every sum of a product ascends, whatever the tile it was computed in.
#pragma once

#include "cache.h"
#include "dispatch.h"
#include "elementwise.h"
#include "linear_tiles.h"

namespace quire::QUIRE_UNIT {
namespace {

constexpr int64_t kLatentRows = 32;  // rows (tokens x heads) that share a pass over the keys
constexpr int64_t kMostLatent = 1 << 16;

// out[r][16 b ..] (+)= sum over steps of x[r][step] * w[b][step]: words of x are one f32 or two bf16, w has 64 bytes per step.
struct Product {
    float* out;
    int64_t out_stride;
    const char* x;
    int64_t x_stride;  // bytes
    const char* w;
    int64_t w_stride;  // bytes from one block of 16 columns to the next
    int64_t steps, n;
    bool fresh;
};

template <bool kBf16, int R, int NB>
void product_tile(const Product& p, int64_t row, int64_t block) {
    F acc[R][NB];
    for (int b = 0; b < NB; ++b) {
        const int64_t column = (block + b) * 16;
        const int lanes = static_cast<int>(p.n - column < 16 ? p.n - column : 16);
        for (int r = 0; r < R; ++r)
            acc[r][b] = p.fresh ? set1(0.0f) : load_lanes(p.out + (row + r) * p.out_stride + column, lanes);
    }
    const char* w = p.w + block * p.w_stride;
    const char* x = p.x + row * p.x_stride;
    for (int64_t s = 0; s < p.steps; ++s) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) {
                const char* at = w + b * p.w_stride + s * 64;
                if constexpr (kBf16) {
                    acc[r][b] = dot_bf16(acc[r][b], load_u(at), set1_u(word(x + r * p.x_stride + s * 4)));
                } else {
                    acc[r][b] = fma(load(reinterpret_cast<const float*>(at)), set1(reinterpret_cast<const float*>(x + r * p.x_stride)[s]), acc[r][b]);
                }
            }
        }
    }
    for (int b = 0; b < NB; ++b) {
        const int64_t column = (block + b) * 16;
        const int lanes = static_cast<int>(p.n - column < 16 ? p.n - column : 16);
        for (int r = 0; r < R; ++r) store_lanes(p.out + (row + r) * p.out_stride + column, acc[r][b], lanes);
    }
}

template <bool kBf16>
void product(const Product& p, int64_t rows) {
    const int64_t blocks = (p.n + 15) / 16;
    for (int64_t row = 0; row < rows; row += kFewRows) {
        with_count<kFewRows>(rows - row, [&]<int R>() {
            int64_t block = 0;
            for (; block + kFewBlocks <= blocks; block += kFewBlocks) product_tile<kBf16, R, kFewBlocks>(p, row, block);
            for (; block < blocks; ++block) product_tile<kBf16, R, 1>(p, row, block);
        });
    }
}

// n numbers as the cache keeps them; the rest of the last word is zero.
template <bool kBf16>
QUIRE_INLINE void store_as(char* to, const float* from, int64_t n) {
    if constexpr (!kBf16) {
        std::memcpy(to, from, static_cast<size_t>(n) * 4);
    } else {
        for_lanes(n, [&](int64_t i, int lanes) {
            uint16_t rounded[16];
            bf16_store(rounded, load_lanes(from + i, lanes));
            std::memcpy(to + i * 2, rounded, static_cast<size_t>(lanes) * 2);
        });
        if (n % 2) std::memset(to + n * 2, 0, 2);
    }
}

// out [rows, heads * n]: head h of x (its first k of `width` numbers) times matrix h of w [heads][n to 16][k].
template <bool kBf16>
void run_head_linear(float* out, const float* x, const Matrix& w, int64_t rows, int64_t heads, int64_t width, int64_t n) {
    const int64_t k = w.k, panels = (rows + kLatentRows - 1) / kLatentRows, words = kBf16 ? (k + 1) / 2 : k, blocks = (n + 15) / 16;
    const int64_t bytes = (kLatentRows * words * 4 + 63) / 64 * 64;
    auto* memory = static_cast<char*>(scratch(Scratch::kActivations, static_cast<size_t>(bytes * thread_count())));
    parallel_for(heads * panels, [&](int64_t i, int thread) {
        const int64_t head = i / panels, first = i % panels * kLatentRows;
        const int64_t some = rows - first < kLatentRows ? rows - first : kLatentRows;
        char* own = memory + thread * bytes;
        for (int64_t r = 0; r < some; ++r) store_as<kBf16>(own + r * words * 4, x + ((first + r) * heads + head) * width, k);
        product<kBf16>({out + (first * heads + head) * n, heads * n, own, words * 4, w.codes + head * blocks * w.code_step, w.code_step, words, n, true}, some);
    });
}

void head_linear(float* out, const float* x, const Matrix* w, int64_t rows, int64_t heads, int64_t width, int64_t n) {
    if (rows < 1 || heads < 1 || n < 1 || w->k < 1 || width < w->k || width > kMostLatent || n > kMostLatent || heads > kMostLatent)
        fail("head_linear: the heads do not fit the rows");
    if (w->n != heads * ((n + 15) / 16 * 16)) fail("head_linear: the matrix is not that of so many heads");
    if (w->kind == Kind::kBf16) run_head_linear<true>(out, x, *w, rows, heads, width, n);
    else if (w->kind == Kind::kF32) run_head_linear<false>(out, x, *w, rows, heads, width, n);
    else fail("head_linear: matrices must be f32 or bf16");
}

struct LatentCache : LatentCacheDescriptor {
    int64_t width() const { return bf16 ? 2 : 4; }
    // Where the rotated key and the latent of a token lie.
    char* key(int64_t block, int64_t offset) const { return keys + block * key_step + offset * rope * width(); }
    char* latent(int64_t block, int64_t offset) const { return values + block * value_step + offset * rank * width(); }
};

void check_latent(const LatentCache& c) {
    if (c.rank < 16 || c.rank % 16 || c.rank > kMostLatent || c.rope < 0 || c.rope % 2 || c.rope > kMostLatent)
        fail("latent cache: the rank must be a multiple of 16, the rotated part even");
    if (c.block_size < 1 || c.blocks < 1) fail("latent cache: needs blocks");
    const int64_t tokens = c.block_size * c.width();
    if (c.key_step < tokens * c.rope || c.value_step < tokens * c.rank) fail("latent cache: blocks overlap");
}

QUIRE_INLINE void rotate_pairs(float* x, const float* table, int64_t half) {
    for_lanes(half, [&](int64_t i, int n) {
        const F cosine = load_lanes(table + i, n), sine = load_lanes(table + half + i, n);
        const F a = load_lanes(x + i, n), b = load_lanes(x + half + i, n);
        store_lanes(x + i, sub(mul(a, cosine), mul(b, sine)), n);
        store_lanes(x + half + i, add(mul(b, cosine), mul(a, sine)), n);
    });
}

// q [rows, heads * width]: the last `rope` numbers of a head are rotated. kv [rows, rank + rope]: norm, rotate, store.
void latent_rope_and_cache(float* q, float* kv, const int32_t* positions, const int64_t* slots, const LatentCache* cache,
                           const RopeDescriptor* rotation, int64_t rows, int64_t width) {
    const LatentCache c = *cache;
    const RopeDescriptor t = *rotation;
    const int64_t heads = t.heads, rank = c.rank, rope = c.rope;
    check_latent(c);
    if (heads < 1 || width < rope) fail("latent_rope_and_cache: the heads are narrower than their rotated part");
    if (t.half != rope / 2 || !t.k_norm) fail("latent_rope_and_cache: latents have a norm, and their rotated part is turned as a whole");
    for (int64_t r = 0; r < rows; ++r) {
        if (positions[r] < 0 || positions[r] >= t.positions) fail("latent_rope_and_cache: a position lies outside the table");
        if (slots[r] < 0 || slots[r] >= c.blocks * c.block_size) fail("latent_rope_and_cache: a slot lies outside the cache");
    }
    parallel_ranges(rows, 4 * rank + 4 * heads * rope, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const float* angles = t.table + int64_t{positions[r]} * rope;
            for (int64_t h = 0; h < heads; ++h) rotate_pairs(q + (r * heads + h) * width + width - rope, angles, rope / 2);
            float* latent = kv + r * (rank + rope);
            norm_row(latent, latent, t.k_norm, rank, t.eps);
            rotate_pairs(latent + rank, angles, rope / 2);
            const int64_t block = slots[r] / c.block_size, offset = slots[r] % c.block_size;
            char *key = c.key(block, offset), *value = c.latent(block, offset);
            if (c.bf16) {
                store_as<true>(value, latent, rank);
                store_as<true>(key, latent + rank, rope);
            } else {
                store_as<false>(value, latent, rank);
                store_as<false>(key, latent + rank, rope);
            }
        }
    });
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
