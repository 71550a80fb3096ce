// Rotary embedding of queries and keys, optional per-head norms, and the store of keys and values into their cache.
#pragma once

#include "cache.h"
#include "elementwise.h"

namespace quire::QUIRE_UNIT {
namespace {

QUIRE_INLINE void rotate_head(float* x, const float* table, int64_t half) {
    for_lanes(half, [&](int64_t i, int n) {
        const F cosine = load_lanes(table + i, n), sine = load_lanes(table + half + i, n);
        const F a = load_lanes(x + i, n), b = load_lanes(x + half + i, n);
        store_lanes(x + i, sub(mul(a, cosine), mul(b, sine)), n);
        store_lanes(x + half + i, add(mul(b, cosine), mul(a, sine)), n);
    });
}

// Slots lie in the cache, or are -1: not stored.
void check_slots(const int64_t* slots, int64_t rows, const CacheShape& cache) {
    for (int64_t r = 0; r < rows; ++r)
        if (slots[r] < -1 || slots[r] >= cache.blocks * cache.block_size) fail("rope_and_cache: a slot lies outside the cache");
}

// qkv [rows, (heads + 2 kv_heads) * d] in place.
void rope_and_cache(float* qkv, const int32_t* positions, const int64_t* slots, const CacheShape* shape, const RopeDescriptor* rotation, int64_t rows) {
    const CacheShape cache = *shape;
    const RopeDescriptor rope = *rotation;
    check_cache(cache);
    const int64_t heads = rope.heads, kv_heads = cache.kv_heads, d = cache.d;
    if (rope.half < 0 || 2 * rope.half > d || heads < 1 || (rope.half > 0 && !rope.table)) fail("rope_and_cache: bad number of heads or rotated dimensions");
    check_slots(slots, rows, cache);
    for (int64_t r = 0; r < rows; ++r)
        if (positions[r] < 0 || positions[r] >= rope.positions) fail("rope_and_cache: a position lies outside the table");
    const int64_t all = heads + 2 * kv_heads;
    const auto rotate = [&](int64_t r, int64_t head) {
        float* x = qkv + (r * all + head) * d;
        const float* norm = head < heads ? rope.q_norm : rope.k_norm;
        if (norm) norm_row(x, x, norm, d, rope.eps);
        if (rope.half > 0) rotate_head(x, rope.table + int64_t{positions[r]} * 2 * rope.half, rope.half);
    };
    // Of a head the rows first .. last.
    const auto run = [&](int64_t head, int64_t first, int64_t last) {
        const int64_t kv = head - heads;
        const float* x = qkv + (first * all + head) * d;
        for (int64_t r = first; kv < kv_heads && r < last; ++r) rotate(r, head);
        if (kv < 0) return;
        if (last - first == 16 && side_by_side(cache, slots + first)) {
            if (kv < kv_heads) store_keys(cache.keys, x, all * d, cache, slots[first], kv);
            else store_values(cache.values, x, all * d, cache, slots[first], kv - kv_heads);
            return;
        }
        for (int64_t r = first; r < last; ++r, x += all * d) {
            if (slots[r] < 0) continue;
            if (kv < kv_heads) store_key(cache.keys, x, cache, slots[r], kv);
            else store_value(cache.values, x, cache, slots[r], kv - kv_heads);
        }
    };
    constexpr int64_t kTogether = 16;
    parallel_ranges((rows + kTogether - 1) / kTogether * all, 4 * d * (rows < kTogether ? rows : kTogether), [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) {
            const int64_t first = at / all * kTogether, last = first + kTogether < rows ? first + kTogether : rows;
            run(at % all, first, last);
        }
    });
}

// kv [rows, 2 kv_heads * d]: keys as they leave `rope_and_cache`, and values.
void cache_rows(const float* kv, const int64_t* slots, const CacheShape* shape, int64_t rows) {
    const CacheShape cache = *shape;
    const int64_t kv_heads = cache.kv_heads, d = cache.d;
    check_cache(cache);
    check_slots(slots, rows, cache);
    const int64_t all = 2 * kv_heads;
    parallel_ranges(rows * all, d, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) {
            const int64_t r = at / all, head = at % all;
            if (slots[r] < 0) continue;
            if (head < kv_heads) {
                store_key(cache.keys, kv + at * d, cache, slots[r], head);
            } else {
                store_value(cache.values, kv + at * d, cache, slots[r], head - kv_heads);
            }
        }
    });
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
