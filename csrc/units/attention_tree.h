// Drafts that branch: the last tokens of a sequence form a tree, and a row sees its ancestors alone (SpecInfer, Miao et al.
// 2023). A row's ancestors are put where they would lie if they were the only draft, so that its numbers are bit for bit those
// of the same tokens without branches; masks, windows and slopes know positions only.
#pragma once

#include "attention_pages.h"

namespace quire::QUIRE_UNIT {
namespace {

// Where a token's numbers of a head lie in a cache: `count` words of `bytes` bytes, `stride` bytes apart.
struct Strided {
    const char* from;
    int64_t stride, bytes, count;
};

// The numbers of `token` as the kernels read them, side by side in `room`.
void read_token(const CacheShape& s, const Strided& at, char* room) {
    alignas(64) char packed[(kMaxHeadDim + 16) * 4];
    char* to = s.narrow() ? packed : room;
    for (int64_t i = 0; i < at.count; ++i) std::memcpy(to + i * at.bytes, at.from + i * at.stride, static_cast<size_t>(at.bytes));
    if (s.narrow()) widen(s, room, packed, packed, s.d);
}

// Puts the numbers of `token` (a slot of the sequence) at position `lane` of the copied tile.
void place_token(const AttentionCall& c, AttentionBuffers& b, const Pages& pages, int64_t token, int64_t lane) {
    const CacheShape& s = c.cache;
    const int64_t piece = pages.piece(token), offset = pages.offset(token), lanes = s.lanes(), word = s.pair() * s.width(), vpair = s.vpair();
    char* keys = b.keys + lane / 16 * c.padded / s.pair() * 64 + lane % 16 * 4;
    read_token(s, {c.cache.keys + piece + offset / lanes * lanes * pages.token_bytes + offset % lanes * word, lanes * word, word, s.d / s.pair()}, b.room);
    scatter<4>(keys, 64, b.room, s.d / s.pair());
    read_token(s, {c.cache.values + piece + offset / vpair * vpair * pages.token_bytes + offset % vpair * s.width(), vpair * s.width(), s.width(), s.d}, b.room);
    char* values = b.values + lane / s.pair() * c.padded * 4;
    if (s.bf16()) {
        scatter<2>(values + lane % 2 * 2, 4, b.room, s.d);
    } else {
        std::memcpy(values, b.room, static_cast<size_t>(s.d) * 4);
    }
    if (!s.scaled()) return;
    std::memcpy(b.key_scales + lane, c.cache.keys + piece + s.numbers() + offset * 4, 4);
    std::memcpy(b.value_scales + lane, c.cache.values + piece + s.numbers() + offset * 4, 4);
}

// Makes b.tile, which begins at position `start`, that of a row with ancestors `mask` (itself included) in a draft whose first
// token has position `root`.
void graft(const AttentionCall& c, AttentionBuffers& b, const Pages& pages, int64_t start, int64_t root, uint64_t mask) {
    const int64_t words = c.cache.d / c.cache.pair();
    for (int64_t j = 0; j < kTile / 16; ++j) {
        char* copy = b.keys + j * c.padded / c.cache.pair() * 64;
        if (b.tile.keys[j] != copy) std::memcpy(copy, b.tile.keys[j], static_cast<size_t>(words) * 64);
        b.tile.keys[j] = copy;
    }
    for (int64_t i = 0; i < kTile / c.cache.pair(); ++i) {
        char* copy = b.values + i * c.padded * 4;
        if (b.tile.values[i] != copy) std::memcpy(copy, b.tile.values[i], static_cast<size_t>(c.cache.d) * 4);
        b.tile.values[i] = copy;
    }
    for (int64_t position = root; mask; ++position, mask &= mask - 1)
        if (position >= start && position < start + kTile) place_token(c, b, pages, root + __builtin_ctzll(mask), position - start);
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
