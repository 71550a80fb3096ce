// Rotary embedding of queries and keys, optional per-head norms, and the store of keys and values into their cache blocks.
#pragma once

constexpr int64_t kMaxHeadDim = 512;

struct CacheShape {
    int64_t kv_heads, d, block_size, blocks;
    bool bf16;
    int64_t lanes() const { return block_size < 16 ? block_size : 16; }
    int64_t pair() const { return bf16 ? 2 : 1; }
    int64_t vpair() const { return bf16 && block_size > 1 ? 2 : 1; }
    int64_t width() const { return bf16 ? 2 : 4; }
    // Byte offset of the keys of (block, head), 16 (or block_size) tokens from `offset` on.
    int64_t keys_at(int64_t block, int64_t head, int64_t offset) const {
        return ((block * kv_heads + head) * (block_size / lanes()) + offset / lanes()) * d * lanes() * width();
    }
    // Byte offset of the values of (block, head), the pair of tokens that holds `offset`.
    int64_t values_at(int64_t block, int64_t head, int64_t offset) const {
        return ((block * kv_heads + head) * (block_size / vpair()) + offset / vpair()) * d * vpair() * width();
    }
};

void check_cache(const CacheShape& c) {
    if (c.d < 8 || c.d % 8 || c.d > kMaxHeadDim) fail("cache: head_dim must be a multiple of 8 up to 512");
    if (c.block_size < 1 || c.block_size > 128 || (c.block_size & (c.block_size - 1))) fail("cache: block_size must be a power of two up to 128");
    if (c.kv_heads < 1 || c.blocks < 1) fail("cache: needs heads and blocks");
}

QUIRE_INLINE void rotate_head(float* x, const float* table, int64_t half) {
    for_lanes(half, [&](int64_t i, int n) {
        const F cosine = load_lanes(table + i, n), sine = load_lanes(table + half + i, n);
        const F a = load_lanes(x + i, n), b = load_lanes(x + half + i, n);
        store_lanes(x + i, sub(mul(a, cosine), mul(b, sine)), n);
        store_lanes(x + half + i, add(mul(b, cosine), mul(a, sine)), n);
    });
}

QUIRE_INLINE void store_key(char* keys, const float* k, const CacheShape& c, int64_t block, int64_t head, int64_t offset) {
    const int64_t lanes = c.lanes();
    char* target = keys + c.keys_at(block, head, offset) + offset % lanes * 4;
    const char* source = reinterpret_cast<const char*>(k);
    uint16_t rounded[kMaxHeadDim + 16];
    if (c.bf16) {
        for_lanes(c.d, [&](int64_t i, int n) { bf16_store(rounded + i, load_lanes(k + i, n)); });
        source = reinterpret_cast<const char*>(rounded);
    }
    const int64_t words = c.d / c.pair();
    for (int64_t i = 0; i < words; ++i) std::memcpy(target + i * lanes * 4, source + i * 4, 4);
}

QUIRE_INLINE void store_value(char* values, const float* v, const CacheShape& c, int64_t block, int64_t head, int64_t offset) {
    char* target = values + c.values_at(block, head, offset);
    if (!c.bf16) {
        std::memcpy(target, v, static_cast<size_t>(c.d) * 4);
        return;
    }
    uint16_t rounded[kMaxHeadDim + 16];
    for_lanes(c.d, [&](int64_t i, int n) { bf16_store(rounded + i, load_lanes(v + i, n)); });
    const int64_t pair = c.vpair(), lane = offset % pair;
    for (int64_t i = 0; i < c.d; ++i) std::memcpy(target + (i * pair + lane) * 2, rounded + i, 2);
}

// qkv [rows, (heads + 2 kv_heads) * d] in place; table [max_positions, 2, half].
void rope_and_cache(float* qkv, const int32_t* positions, Optional<const float> table, const int64_t* slots, char* keys, char* values,
                    Optional<const float> q_norm, Optional<const float> k_norm, int64_t rows, int64_t heads, int64_t kv_heads,
                    int64_t d, int64_t half, int64_t max_positions, int64_t block_size, int64_t blocks, int64_t bf16, double eps) {
    const CacheShape cache{kv_heads, d, block_size, blocks, bf16 != 0};
    check_cache(cache);
    if (half < 0 || 2 * half > d || heads < 1 || (half > 0 && !table.ptr)) fail("rope_and_cache: bad number of heads or rotated dimensions");
    for (int64_t r = 0; r < rows; ++r) {
        if (positions[r] < 0 || positions[r] >= max_positions) fail("rope_and_cache: a position lies outside the table");
        if (slots[r] < 0 || slots[r] >= blocks * block_size) fail("rope_and_cache: a slot lies outside the cache");
    }
    const int64_t all = heads + 2 * kv_heads;
    parallel_ranges(rows * all, 4 * d, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) {
            const int64_t r = at / all, head = at % all, kv = head - heads;
            float* x = qkv + at * d;
            const int64_t block = slots[r] / block_size, offset = slots[r] % block_size;
            if (kv >= kv_heads) {
                store_value(values, x, cache, block, kv - kv_heads, offset);
                continue;
            }
            const float* norm = kv < 0 ? q_norm.ptr : k_norm.ptr;
            if (norm) norm_row(x, x, norm, d, static_cast<float>(eps));
            if (half > 0) rotate_head(x, table.ptr + int64_t{positions[r]} * 2 * half, half);
            if (kv >= 0) store_key(keys, x, cache, block, kv, offset);
        }
    });
}
