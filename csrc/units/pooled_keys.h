// Keys of indexers that are of pools of tokens: means of their own keys, each number by itself, by gates that each token has (GLM-5.3-Flash).
//
// The cache holds of each token a key, and behind it what its gates are made of. Of the last token of a pool it holds the pool's key in
// the place of its own: nothing reads that again, since a pool is made anew only where its last token is.
#pragma once

#include "indexer.h"

namespace quire::QUIRE_UNIT {
namespace {

constexpr int64_t kMostPool = 256;

struct PoolCall : BatchDescriptor {
    IndexCache cache;
    const float* bias;  // [pool, dim]
    int64_t dim, pool;
    char* at(int64_t s, int64_t position) const {
        return cache.key(tables[s * max_blocks + position / cache.block_size], position % cache.block_size);
    }
};

template <bool kBf16>
QUIRE_INLINE F kept_numbers(const char* from, int64_t i, int n) {
    if constexpr (!kBf16) return load_lanes(reinterpret_cast<const float*>(from) + i, n);
    uint16_t halves[16] = {};
    std::memcpy(halves, from + i * 2, static_cast<size_t>(n) * 2);
    return bf16_load(halves);
}

// The key of the pool whose last token is at `last`: softmax over its tokens of gate + bias, times their keys.
template <bool kBf16>
void make_pool(const PoolCall& c, int64_t s, int64_t last) {
    const char* tokens[kMostPool];
    for (int64_t j = 0; j < c.pool; ++j) tokens[j] = c.at(s, last - c.pool + 1 + j);
    alignas(64) float made[kMostIndexDim];
    for_lanes(c.dim, [&](int64_t i, int n) {
        F top = set1(-INFINITY), sum = set1(0.0f), all = set1(0.0f);
        const auto gate = [&](int64_t j) { return add(kept_numbers<kBf16>(tokens[j], c.dim + i, n), load_lanes(c.bias + j * c.dim + i, n)); };
        for (int64_t j = 0; j < c.pool; ++j) top = vmax(top, gate(j));
        for (int64_t j = 0; j < c.pool; ++j) {
            const F weight = vexp(sub(gate(j), top));
            sum = add(sum, weight);
            all = fma(weight, kept_numbers<kBf16>(tokens[j], i, n), all);
        }
        store_lanes(made + i, div(all, sum), n);
    });
    store_as<kBf16>(c.at(s, last), made, c.dim);
}

template <bool kBf16>
void run_pool_keys(const PoolCall& c, const float* k, const float* gates, const int64_t* slots, int64_t rows) {
    const int64_t width = c.cache.width();
    parallel_ranges(rows, 2 * c.dim, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            char* to = c.cache.key(slots[r] / c.cache.block_size, slots[r] % c.cache.block_size);
            store_as<kBf16>(to, k + r * c.dim, c.dim);
            store_as<kBf16>(to + c.dim * width, gates + r * c.dim, c.dim);
        }
    });
    for (int64_t s = 0; s < c.sequences; ++s) {
        const int64_t base = c.context[s] - (c.cu_q[s + 1] - c.cu_q[s]), first = base / c.pool, last = c.context[s] / c.pool;
        if (c.cu_q[s] == c.cu_q[s + 1] || first == last) continue;
        parallel_ranges(last - first, 8 * c.pool * c.dim, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) make_pool<kBf16>(c, s, (first + i + 1) * c.pool - 1);
        });
    }
}

// k, gates [rows, dim] are stored; where rows have the last tokens of pools, so are keys of these.
void pool_keys(const float* k, const float* gates, const float* bias, const int64_t* slots, const IndexCache* cache,
               const BatchDescriptor* batch, int64_t rows, int64_t dim, int64_t pool) {
    const PoolCall c{*batch, *cache, bias, dim, pool};
    check_index_batch({*batch, k, *cache, 1, dim, pool}, rows);
    if (c.cache.d != 2 * dim || dim > kMostIndexDim || pool > kMostPool) fail("pool_keys: the cache has keys and gates of another size");
    for (int64_t r = 0; r < rows; ++r)
        if (slots[r] < 0 || slots[r] >= c.cache.blocks * c.cache.block_size) fail("pool_keys: a slot lies outside the cache");
    if (c.cache.bf16()) run_pool_keys<true>(c, k, gates, slots, rows);
    else run_pool_keys<false>(c, k, gates, slots, rows);
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
