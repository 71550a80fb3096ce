// Where the keys and values of a tile lie, and copies of layouts that the kernels cannot read in place.
#pragma once

#include "attention_call.h"

namespace quire::QUIRE_UNIT {
namespace {

// Where the tokens of one sequence lie. Divisions by the block size are shifts: they would cost more than the arithmetic.
struct Pages {
    const int32_t* table;
    int64_t context, first_block, shift, head, block_bytes, token_bytes, piece_bytes;

    int64_t offset(int64_t token) const { return token & ((int64_t{1} << shift) - 1); }
    // Bytes from the start of a cache to the piece of `token`'s block, or -1 for blocks that must not be read.
    int64_t piece(int64_t token) const {
        const int64_t block = token >> shift;
        return token >= context || block < first_block ? -1 : int64_t{table[block]} * block_bytes + head * piece_bytes;
    }
    // Bytes from the start of a cache to `token`, or -1.
    int64_t at(int64_t token) const {
        const int64_t start = piece(token);
        return start < 0 ? -1 : start + offset(token) * token_bytes;
    }
};

// Asks for `count` numbers of the next tile, if there are any: in small blocks they lie apart from the last ones, where no
// hardware prefetcher looks (measured beside blocks of 16, 32/8 heads: 4.4 times as long without it, 1.4 with). In the second
// level, as the first has no room for a tile beside the one in use.
QUIRE_INLINE void prefetch_numbers(const CacheShape& s, const char* cache, int64_t next, int64_t count) {
    if (next < 0) return;
    for (int64_t i = 0; i < count * s.width(); i += 64) prefetch_far(cache + next + i);
}

// `count` numbers from `at` of a cache as the kernels read them: in place, zeros, or widened into `room`; prefetches as many at `next`.
QUIRE_INLINE const char* readable(const AttentionCall& c, const AttentionBuffers& b, const char* cache, int64_t at, int64_t next, int64_t count, char* room) {
    prefetch_numbers(c.cache, cache, next, count);
    if (at < 0) return b.zeros;
    if (!c.cache.narrow()) return cache + at;
    widen(c.cache, room, cache + at, cache + at, count);
    return room;
}

// `count` bytes, without a call for each row of a tile.
QUIRE_INLINE void copy_bytes(char* to, const char* from, int64_t count) {
    int64_t i = 0;
    for (; i + 64 <= count; i += 64) store_u(to + i, load_u(from + i));
    if (i == count) return;
    if (count < 64) std::memcpy(to, from, static_cast<size_t>(count));
    else store_u(to + count - 64, load_u(from + count - 64));
}

// Keys of 16 tokens from blocks of kLanes < 16 tokens, side by side as blocks of 16 have them.
template <int kLanes>
void copy_keys(const AttentionCall& c, const AttentionBuffers& b, const Pages& pages, int64_t start, char* copy) {
    const int64_t words = c.cache.d / c.cache.pair();
    const char* from[16];
    for (int64_t lane = 0; lane < 16; lane += kLanes)
        from[lane] = readable(c, b, c.cache.keys, pages.at(start + lane), pages.at(start + lane + kTile), kLanes * c.cache.d, b.room + lane * words * 4);
    if constexpr (kLanes == 1) {
        int64_t i = 0;
        for (; i + 16 <= words; i += 16) transpose_words(copy + i * 64, from, i * 4);
        for (; i < words; ++i)
            for (int64_t lane = 0; lane < 16; ++lane) std::memcpy(copy + i * 64 + lane * 4, from[lane] + i * 4, 4);
        return;
    }
    for (int64_t lane = 0; lane < 16; lane += kLanes)
        for (int64_t i = 0; i < words; ++i) std::memcpy(copy + i * 64 + lane * 4, from[lane] + i * kLanes * 4, kLanes * 4);
}

// Keys of 16 tokens from larger blocks; of a narrow cache, prefetches those of the next tile.
void copy_group(const AttentionCall& c, const Pages& pages, int64_t start, char* copy) {
    const int64_t at = pages.at(start), next = pages.at(start + kTile);
    if (at < 0) {
        std::memset(copy, 0, static_cast<size_t>(16 * c.cache.d * c.cache.wide()));
    } else if (!c.cache.narrow()) {
        std::memcpy(copy, c.cache.keys + at, static_cast<size_t>(16 * c.cache.d * c.cache.wide()));
    } else {
        widen(c.cache, copy, c.cache.keys + at, c.cache.keys + (next < 0 ? at : next), 16 * c.cache.d);
    }
}

void copy_key_tile(const AttentionCall& c, const AttentionBuffers& b, const Pages& pages, int64_t start, Located& tile) {
    for (int64_t j = 0; j < kTile / 16; ++j) {
        char* copy = b.keys + j * c.padded / c.cache.pair() * 64;
        tile.keys[j] = copy;
        switch (c.cache.lanes()) {
            case 1: copy_keys<1>(c, b, pages, start + 16 * j, copy); break;
            case 2: copy_keys<2>(c, b, pages, start + 16 * j, copy); break;
            case 4: copy_keys<4>(c, b, pages, start + 16 * j, copy); break;
            case 8: copy_keys<8>(c, b, pages, start + 16 * j, copy); break;
            default: copy_group(c, pages, start + 16 * j, copy);
        }
    }
}

// Values of pairs of tokens (bf16) or single tokens (f32), interleaved, in rows of whole vectors; of a narrow cache also
// prefetches those of the next tile.
void copy_value_tile(const AttentionCall& c, const AttentionBuffers& b, const Pages& pages, int64_t start, Located& tile) {
    const CacheShape& s = c.cache;
    const int64_t pair = s.pair(), bytes = s.vpair() * s.d * s.wide(), step = s.block_size < kTile ? s.block_size : kTile;
    if (s.narrow() && s.vpair() == pair && s.d == c.padded) {  // a block's values lie as they are wanted
        for (int64_t i = 0; i < kTile / pair; ++i) tile.values[i] = b.values + i * c.padded * 4;
        for (int64_t t = 0; t < kTile; t += step) {
            const int64_t at = pages.at(start + t), next = pages.at(start + t + kTile);
            char* copy = b.values + t / pair * c.padded * 4;
            if (at < 0) {
                std::memset(copy, 0, static_cast<size_t>(step / pair * c.padded * 4));
            } else {
                widen(s, copy, c.cache.values + at, c.cache.values + (next < 0 ? at : next), step * s.d);
            }
        }
        return;
    }
    for (int64_t i = 0; i < kTile / pair; ++i) {
        char* copy = b.values + i * c.padded * 4;
        tile.values[i] = copy;
        const int64_t token = start + i * pair, at = pages.at(token), next = pages.at(token + kTile);
        if (s.vpair() == pair) {
            if (s.narrow() && at >= 0) {
                widen(s, copy, c.cache.values + at, c.cache.values + (next < 0 ? at : next), pair * s.d);
            } else {
                prefetch_numbers(s, c.cache.values, next, pair * s.d);
                copy_bytes(copy, at < 0 ? b.zeros : c.cache.values + at, bytes);
            }
            continue;
        }
        const char* first = readable(c, b, c.cache.values, at, next, s.d, b.room);
        const char* second = readable(c, b, c.cache.values, pages.at(token + 1), pages.at(token + 1 + kTile), s.d, b.room + bytes);
        int64_t x = 0;
        for (; x + 16 <= s.d; x += 16) zip16(copy + x * 4, first + x * 2, second + x * 2);
        for (; x < s.d; ++x) {
            std::memcpy(copy + x * 4, first + x * 2, 2);
            std::memcpy(copy + x * 4 + 2, second + x * 2, 2);
        }
    }
}

// Blocks of one token (bf16): every token lies elsewhere, so the addresses of a tile are looked up at once, and its keys and
// values are put together as larger blocks have them (1.6 times as fast from the caches as one look-up a use).
bool single_tokens(const AttentionCall& c) {
    return c.cache.format == kFormatBf16 && c.cache.block_size == 1 && c.cache.d % 32 == 0;
}

// Where the tokens of the tile from position `start` on begin in a cache, or zeros for those that must not be read.
QUIRE_INLINE void find_tokens(const Pages& pages, const char* cache, const char* zeros, int64_t start, const char** at) {
    const int64_t low = pages.first_block - start, high = pages.context - start, step = pages.block_bytes;
    const int64_t begin = low < 0 ? 0 : low < kTile ? low : kTile, end = high > kTile ? kTile : high > begin ? high : begin;
    const char* const base = cache + pages.head * pages.piece_bytes;
    for (int64_t t = 0; t < begin; ++t) at[t] = zeros;
    for (int64_t t = begin; t < end; ++t) at[t] = base + pages.table[start + t] * step;
    for (int64_t t = end; t < kTile; ++t) at[t] = zeros;
}

QUIRE_INLINE void prefetch_token(const char* at, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) prefetch_far(at + i);
}

// Keys and values of a tile, while those of the next one are asked for.
void copy_tokens(const AttentionCall& c, const AttentionBuffers& b, const Pages& pages, int64_t start, Located& tile) {
    const int64_t bytes = c.cache.d * 2, all = c.padded * 2;
    const char *from[kTile], *next[kTile];
    find_tokens(pages, c.cache.keys, b.zeros, start, from);
    find_tokens(pages, c.cache.keys, b.zeros, start + kTile, next);
    for (int64_t j = 0; j < kTile / 16; ++j) {
        char* copy = b.keys + j * all * 16;
        tile.keys[j] = copy;
        for (int64_t i = 0; i < bytes; i += 64) transpose_words(copy + i * 16, from + j * 16, i);
        for (int64_t t = 16 * j; t < 16 * j + 16; ++t) prefetch_token(next[t], bytes);
    }
    find_tokens(pages, c.cache.values, b.zeros, start, from);
    find_tokens(pages, c.cache.values, b.zeros, start + kTile, next);
    for (int64_t t = 0; t < kTile; t += 2) {
        char* copy = b.values + t * all;
        tile.values[t / 2] = copy;
        for (int64_t i = 0; i < bytes; i += 32) zip16(copy + i * 2, from[t] + i, from[t + 1] + i);
        prefetch_token(next[t], bytes);
        prefetch_token(next[t + 1], bytes);
    }
}

// The scales of a tile's tokens, 0 where nothing was written: what is multiplied by them may be garbage, but is finite.
void copy_scales(const AttentionCall& c, const AttentionBuffers& b, const Pages& pages, int64_t start) {
    const int64_t step = c.cache.block_size < kTile ? c.cache.block_size : kTile;
    std::memset(b.key_scales, 0, kTile * 4);
    std::memset(b.value_scales, 0, kTile * 4);
    for (int64_t t = 0; t < kTile; t += step) {
        const int64_t token = start + t, piece = pages.piece(token);
        if (piece < 0) continue;
        const int64_t at = piece + c.cache.numbers() + pages.offset(token) * 4, left = pages.context - token;
        const auto bytes = static_cast<size_t>(left < step ? left : step) * 4;
        std::memcpy(b.key_scales + t, c.cache.keys + at, bytes);
        std::memcpy(b.value_scales + t, c.cache.values + at, bytes);
    }
}

#if defined(QUIRE_AMX)
void gather_values(const AttentionCall& c, const AttentionBuffers& b, const Pages& pages, int64_t start);
void clear_behind(const AttentionCall& c, const AttentionBuffers& b, const Pages& pages, int64_t start);
constexpr bool kTileRegisters = true;
#else
constexpr bool kTileRegisters = false;
#endif

bool keys_in_place(const AttentionCall& c) {
    return !c.cache.narrow() && c.cache.block_size >= 16 && c.cache.d % (kTileRegisters && c.cache.bf16() ? 32 : 1) == 0;
}
bool values_side_by_side(const AttentionCall& c) {
    return !c.cache.narrow() && c.cache.vpair() == c.cache.pair() && c.cache.d == c.padded;
}
// Whether no tile is copied, so that the next one can be located, and prefetched, early.
template <bool kBf16>
bool reads_in_place(const AttentionCall& c) {
    return !(kTileRegisters && kBf16) && keys_in_place(c) && values_side_by_side(c);
}

// Points `tile` at the keys and values that begin at position `start`. Blocks that must not be read are zeros. Narrow caches,
// layouts with fewer than 16 keys side by side, single values and odd head sizes are copied; tile registers want all values
// of a tile side by side.
template <bool kBf16>
void locate_tile(const AttentionCall& c, const AttentionBuffers& b, const Pages& pages, int64_t start, Located& tile) {
    const CacheShape& s = c.cache;
    const int64_t step = s.block_size < kTile ? s.block_size : kTile, pair = s.pair();
    const bool keys_stay = keys_in_place(c), values_stay = values_side_by_side(c) && !(kTileRegisters && kBf16);
    if (single_tokens(c)) {
        copy_tokens(c, b, pages, start, tile);
#if defined(QUIRE_AMX)
        clear_behind(c, b, pages, start);
#endif
        return;
    }
    if (s.scaled()) copy_scales(c, b, pages, start);
    if (!keys_stay) copy_key_tile(c, b, pages, start, tile);
#if defined(QUIRE_AMX)
    if (kBf16 && values_side_by_side(c)) {
        for (int64_t i = 0; i < kTile / pair; ++i) tile.values[i] = b.values + i * c.padded * 4;
        gather_values(c, b, pages, start);
    }
#endif
    if (!values_stay && !(kTileRegisters && kBf16 && values_side_by_side(c))) copy_value_tile(c, b, pages, start, tile);
#if defined(QUIRE_AMX)
    if (kBf16) clear_behind(c, b, pages, start);
#endif
    if (!keys_stay && !values_stay) return;
    for (int64_t t = 0; t < kTile; t += step) {
        const int64_t at = pages.at(start + t);
        if (!keys_stay) prefetch_numbers(s, c.cache.values, pages.at(start + t + kTile), step * s.d);
        const int64_t key_bytes = at < 0 ? 0 : 16 * pages.token_bytes, value_bytes = at < 0 ? 0 : pair * pages.token_bytes;
        const char *keys = at < 0 ? b.zeros : c.cache.keys + at, *values = at < 0 ? b.zeros : c.cache.values + at;
        for (int64_t j = 0; keys_stay && j < step / 16; ++j) tile.keys[t / 16 + j] = keys + j * key_bytes;
        for (int64_t i = 0; values_stay && i < step / pair; ++i) tile.values[t / pair + i] = values + i * value_bytes;
    }
}

}  // namespace
}  // namespace quire::QUIRE_UNIT

#if defined(QUIRE_AMX)
#include "attention_amx.h"  // defines gather_values and clear_behind, and needs what is above
#endif
