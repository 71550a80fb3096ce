// Where the keys and values of a tile lie, and copies of layouts that the kernels cannot read in place.
#pragma once

// Where the tokens of one sequence lie. Divisions by the block size are shifts: they would cost more than the arithmetic.
struct Pages {
    const int32_t* table;
    int64_t context, first_block, shift, head, heads, token_bytes;

    // Offset in bytes of `token` from the start of a cache, or -1 for blocks that must not be read.
    int64_t at(int64_t token) const {
        const int64_t block = token >> shift;
        if (token >= context || block < first_block) return -1;
        return (((int64_t{table[block]} * heads + head) << shift) + (token & ((int64_t{1} << shift) - 1))) * token_bytes;
    }
};

// Keys of 16 tokens from blocks of kLanes < 16 tokens, side by side as blocks of 16 have them.
template <int kLanes>
void copy_keys(const AttentionCall& c, const AttentionBuffers& b, const Pages& pages, int64_t start, char* copy) {
    const int64_t words = c.cache.d / c.cache.pair();
    if constexpr (kLanes == 1) {
        const char* from[16];
        for (int64_t lane = 0; lane < 16; ++lane) {
            const int64_t at = pages.at(start + lane);
            from[lane] = at < 0 ? b.zeros : c.keys + at;
        }
        int64_t i = 0;
        for (; i + 16 <= words; i += 16) transpose_words(copy + i * 64, from, i * 4);
        for (; i < words; ++i)
            for (int64_t lane = 0; lane < 16; ++lane) std::memcpy(copy + i * 64 + lane * 4, from[lane] + i * 4, 4);
        return;
    }
    for (int64_t lane = 0; lane < 16; lane += kLanes) {
        const int64_t at = pages.at(start + lane);
        const char* source = at < 0 ? b.zeros : c.keys + at;
        for (int64_t i = 0; i < words; ++i) std::memcpy(copy + i * 64 + lane * 4, source + i * kLanes * 4, kLanes * 4);
    }
}

void copy_key_tile(const AttentionCall& c, const AttentionBuffers& b, const Pages& pages, int64_t start, Located& tile) {
    for (int64_t j = 0; j < kTile / 16; ++j) {
        char* copy = b.keys + j * c.cache.d / c.cache.pair() * 64;
        tile.keys[j] = copy;
        switch (c.cache.lanes()) {
            case 1: copy_keys<1>(c, b, pages, start + 16 * j, copy); break;
            case 2: copy_keys<2>(c, b, pages, start + 16 * j, copy); break;
            case 4: copy_keys<4>(c, b, pages, start + 16 * j, copy); break;
            default: copy_keys<8>(c, b, pages, start + 16 * j, copy);
        }
    }
}

// Values of pairs of tokens (bf16) or single tokens (f32), interleaved and padded to whole vectors.
void copy_value_tile(const AttentionCall& c, const AttentionBuffers& b, const Pages& pages, int64_t start, Located& tile) {
    const CacheShape& s = c.cache;
    const int64_t pair = s.pair();
    const auto find = [&](int64_t token) {
        const int64_t at = pages.at(token);
        return at < 0 ? b.zeros : c.values + at;
    };
    for (int64_t i = 0; i < kTile / pair; ++i) {
        char* copy = b.values + i * c.padded * 4;
        tile.values[i] = copy;
        std::memset(copy + s.d * 4, 0, static_cast<size_t>(c.padded - s.d) * 4);
        const char* first = find(start + i * pair);
        if (s.vpair() == pair) {
            std::memcpy(copy, first, static_cast<size_t>(s.d) * 4);
            continue;
        }
        const char* second = find(start + i * pair + 1);
        int64_t x = 0;
        for (; x + 16 <= s.d; x += 16) zip16(copy + x * 4, first + x * 2, second + x * 2);
        for (; x < s.d; ++x) {
            std::memcpy(copy + x * 4, first + x * 2, 2);
            std::memcpy(copy + x * 4 + 2, second + x * 2, 2);
        }
    }
}

// Points `tile` at the keys and values that begin at position `start`. Blocks that must not be read are zeros. Layouts
// with fewer than 16 keys side by side, single values or odd head sizes are copied.
void locate_tile(const AttentionCall& c, const AttentionBuffers& b, const Pages& pages, int64_t start, Located& tile) {
    const CacheShape& s = c.cache;
    const int64_t step = s.block_size < kTile ? s.block_size : kTile, pair = s.pair();
    const bool keys_in_place = s.block_size >= 16, values_in_place = s.vpair() == pair && s.d == c.padded;
    if (!keys_in_place) copy_key_tile(c, b, pages, start, tile);
    if (!values_in_place) copy_value_tile(c, b, pages, start, tile);
    if (!keys_in_place && !values_in_place) return;
    for (int64_t t = 0; t < kTile; t += step) {
        const int64_t at = pages.at(start + t);
        const int64_t key_bytes = at < 0 ? 0 : 16 * pages.token_bytes, value_bytes = at < 0 ? 0 : pair * pages.token_bytes;
        const char *keys = at < 0 ? b.zeros : c.keys + at, *values = at < 0 ? b.zeros : c.values + at;
        for (int64_t j = 0; keys_in_place && j < step / 16; ++j) tile.keys[t / 16 + j] = keys + j * key_bytes;
        for (int64_t i = 0; values_in_place && i < step / pair; ++i) tile.values[t / pair + i] = values + i * value_bytes;
    }
}
