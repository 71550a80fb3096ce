// Attention over latents as its kernels see it: the call, the pieces that it is computed in, and the memory of a thread.
#pragma once

#include "latent_cache.h"

namespace quire::QUIRE_UNIT {
namespace {

constexpr int64_t kLatentSplit = 512;
constexpr int64_t kLatentTile = 64;

struct LatentCall : BatchDescriptor {
    float* out;
    const float *latent, *q;  // [rows, heads * rank], [rows, heads * width]
    LatentCache cache;
    int64_t heads, width;
    float factor;  // to powers of two
    const int32_t* chosen;  // [rows, most]: ascending, the positions of the tokens that a row sees; or null: all
    int64_t most;
    const float* sinks;  // [heads]: scores without latents, or null
    int64_t window;      // as of AttentionDescriptor; 0 with `chosen`
    int64_t pool;        // tokens that are chosen together
    // With `recent` a row sees so many of the last tokens, and before these in its list entries of `every` tokens each (0: there are none),
    // all or those of `chosen`: what lies in `entries`, whose blocks have tables of their own.
    int64_t recent = 0, every = 0;
    LatentCache entries{};
    const int32_t* entry_tables = nullptr;
    int64_t entry_blocks = 0;  // of a table
    int64_t entries_seen(int64_t position) const {
        const int64_t all = every ? (position + 1) / every : 0;
        return chosen && all > most ? most : all;
    }
    int64_t tokens_seen(int64_t position) const { return position + 1 < recent ? position + 1 : recent; }
    // The first of the tokens that the row at `position` sees.
    int64_t first(int64_t position) const {
        if (window < 0) return position / -window * -window;
        return window > 0 && position >= window ? position - window + 1 : 0;
    }
    // Tokens that the row at `position` sees; with `chosen` the first of its positions: whole pools, and those behind the last.
    int64_t seen(int64_t position) const {
        const int64_t all = position + 1;
        if (recent) return entries_seen(position) + tokens_seen(position);
        if (!chosen) return all;
        const int64_t some = most / pool * pool + all % pool;
        return all > some ? some : all;
    }
    int64_t words() const { return (cache.rank + cache.rope) * cache.width() / 4; }
    int64_t state() const { return kLatentRows * (cache.rank + 2); }  // floats of the state of some rows
};

struct LatentTask {
    int64_t sequence, first, last, head, heads;  // rows: tokens first..last, `heads` heads from `head` on
    int64_t split_begin, split_end;
    float* partial;
};

// Memory of one thread. A state is [rows][rank] sums, [rows] maxima, [rows] denominators.
struct LatentBuffers {
    float *total, *part, *scores;
    char *q, *p, *tile, *zeros;
    const char *keys[kLatentTile], *values[kLatentTile];
};

}  // namespace
}  // namespace quire::QUIRE_UNIT
