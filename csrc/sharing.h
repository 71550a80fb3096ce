// Which sequences of a batch name the same blocks, and for how many tokens.
#pragma once

#include <cstdint>

namespace quire {

struct Sharer {
    int64_t sequence;
    int64_t first;   // block that it reads first
    int64_t limit;   // leading tokens that all of its rows see, but for a window
    int64_t common;  // leading tokens in the blocks of the sharer before it: set by `arrange`
};

// How blocks are named: tables [sequence][max_blocks]. `tile`: shared tokens are counted in multiples of it.
struct SharedTables {
    const int32_t* tables;
    int64_t max_blocks, block_size, tile;
};

// Puts sharers next to those that they share most with and moves those that share nothing to the end; returns how many share.
// Any two of the first ones name the same blocks up to the least `common` of those behind the first of them, from the block
// on that both read. Entries of a table before `first` are not read.
int64_t arrange(const SharedTables& t, Sharer* list, int64_t count);

// Tiles of 64 keys and values of a head that attention has read since the start.
extern int64_t g_tiles_read;

}  // namespace quire
