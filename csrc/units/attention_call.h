// Attention as its kernels see it: the call, the rows that walk keys together, their states, and the memory of a thread.
#pragma once

#include "cache.h"

namespace quire::QUIRE_UNIT {
namespace {

constexpr float kLog2E = 1.44269504f;
constexpr int64_t kTile = 64;
// Rows (tokens x heads of a group) that share a pass over the keys (32 were 2-4 % slower on a Zen 5), rows beyond them that a
// pass may touch, and the multiple that head sizes are padded to.
constexpr int64_t kQueryRows = 64;
#if defined(QUIRE_AMX)
constexpr int64_t kSpareRows = 15, kDimStep = 32;
#else
constexpr int64_t kSpareRows = 0, kDimStep = 16;
#endif

// Rows whose scores and probabilities are in memory at a time: few, so that they stay in the first-level cache.
constexpr int64_t kPassing = 16;

// Tokens first..last of a sequence: their rows, one per token and head of a group, walk the keys together.
struct Span {
    int64_t sequence, first, last;
    int64_t from, to;  // positions that any of its rows sees
    int64_t base;      // position of the sequence's first row
    int64_t root;      // position of the draft's first token, or past all
    int64_t common;    // leading tokens in the blocks of the span before it (sharing.h)
    int64_t tokens() const { return last - first; }
};

struct AttentionCall : BatchDescriptor, AttentionDescriptor {
    float* out;  // rows; or with `starts` states
    const float* qkv;
    CacheShape cache;
    int64_t group;   // heads of queries that share keys
    int64_t padded;  // head_dim rounded up to kDimStep

    // Which of all heads of all rows head `i` of a group is, and where its query begins.
    int64_t place(int64_t token, int64_t head, int64_t i) const {
        return queries_only ? (token * group + i) * cache.kv_heads + head : token * heads + head * group + i;
    }
    const float* query(int64_t token, int64_t head, int64_t i) const {
        return qkv + (place(token, head, i) + (queries_only ? 0 : token * 2 * cache.kv_heads)) * cache.d;
    }

    // Whether this cache has what `span` reads of `split`: entries of a table below 0 are blocks that others have.
    bool held(const Span& span, int64_t split) const {
        const int64_t from = split * kSplit > span.from ? split * kSplit : span.from;
        return !starts || tables[span.sequence * max_blocks + from / cache.block_size] >= 0;
    }
    // The first key that a row sees whose own is the last of `own` keys, and the end of those that it sees of `all`.
    int64_t from(int64_t own) const {
        if (window < 0) return (own - 1) / -window * -window;
        return window > 0 && own > window ? own - window : 0;
    }
    int64_t to(int64_t own, int64_t all) const { return own + after < all ? own + after : all; }
    uint64_t ancestors(int64_t row) const { return tree ? tree[row] : 0; }
    // Rows of sequence s before its draft.
    int64_t undrafted(int64_t s) const {
        int64_t rows = cu_q[s + 1] - cu_q[s];
        while (tree && rows > 0 && tree[cu_q[s] + rows - 1]) --rows;
        return rows;
    }
    // Scores need more than a factor. `factor` takes those that `softmax_rows` reads to powers of two.
    bool adjusted() const { return softcap > 0.0f || alibi || bias; }
    // Numbers of a row of sums that count: whole vectors.
    int64_t columns() const { return (cache.d + 15) / 16 * 16; }
    float factor() const { return adjusted() ? 1.0f : scale * kLog2E; }
};

// The state of `rows` rows over some range of keys: maximum, sum and unnormalized output.
struct State {
    float *most, *sum, *acc;
    static int64_t floats(int64_t rows, int64_t padded) { return (rows + kSpareRows) * (padded + 2); }
    static State at(float* p, int64_t rows, int64_t padded) {
        const int64_t all = rows + kSpareRows;
        return {p + all * padded, p + all * (padded + 1), p};
    }
};

// Rows of some spans against the keys of some splits, for one key and value head.
struct AttentionTask {
    const Span* spans;
    int64_t count, rows, head;
    int64_t split_begin, split_end;
    State state;         // where its only split leaves its state; or none, and the splits are merged and written
    const State* parts;  // the states of the splits, or null: to be computed
};

// Where the keys (16 tokens each) and values (a pair or one token each) of a tile lie.
struct Located {
    const char* keys[kTile / 16];
    const char* values[kTile];
};

// Memory of one thread.
struct AttentionBuffers {
    State split, total;
    float *lanes, *scores, *rescale;  // [rows][16], [kPassing][64], [rows]
    char *q, *p;                      // [rows][padded], [kPassing][64] in the cache's type
    int64_t low;                      // the row that `scores` and `p` begin with
    char *keys, *values, *zeros;      // copies of a tile for layouts the kernels cannot read in place
    char* room;                       // numbers of 16 tokens on their way into a copy
    float *key_scales, *value_scales; // of a tile's tokens, for scaled caches
    Located tile, next;
    int64_t head;        // first query head of the task
    int64_t *from, *to;  // first and past-the-last visible position of each row
    int64_t* own;        // past its own position
    int64_t fresh;       // position of the tile with which the sums of all rows begin, or -1: they are there
    int64_t read;        // tiles
    float* scores_of(int64_t r) const { return scores + (r - low) * kTile; }
};

}  // namespace
}  // namespace quire::QUIRE_UNIT
