// Softmax(q k^T) v over paged keys and values, tiled, for any mixture of prefill chunks and decodes (Dao et al. 2022; the
// split over keys follows Flash-Decoding, 2023).
//
// A row's numbers depend on the row alone: keys are visited in tiles of 64 aligned to position 0, tiles are gathered in
// splits of 512 with their own running maximum, and splits are merged in ascending order, whether one task or many computed
// them. A tile a row cannot see leaves its state bit for bit unchanged (rescale by 1, add 0 times finite values), so values
// that were never written are never multiplied: the last pair is masked and blocks outside the range read zeros.
#pragma once

constexpr float kLog2E = 1.44269504f;
constexpr int64_t kTile = 64;
constexpr int64_t kSplit = 512;
// Rows (tokens x heads of a group) that share a pass over the keys (32 were 2-4 % slower on a Zen 5), rows beyond them that a
// pass may touch, and the multiple that head sizes are padded to.
constexpr int64_t kQueryRows = 64;
#if defined(QUIRE_AMX)
constexpr int64_t kSpareRows = 15, kDimStep = 32;
#else
constexpr int64_t kSpareRows = 0, kDimStep = 16;
#endif

struct AttentionCall {
    float* out;
    const float* qkv;
    const char *keys, *values;
    const int32_t *cu_q, *context, *tables;
    const uint64_t* tree;  // per row its ancestors in the draft, or null
    int64_t heads, group, max_blocks, window;
    float scale, softcap;        // softcap 0: none
    const float *sinks, *alibi;  // per head, or null
    const float* bias;           // [heads][distances] by the distance from the key to the row, or null
    int64_t distances;
    CacheShape cache;
    int64_t padded;  // head_dim rounded up to kDimStep

    uint64_t ancestors(int64_t row) const { return tree ? tree[row] : 0; }
    // Rows of sequence s before its draft.
    int64_t undrafted(int64_t s) const {
        int64_t rows = cu_q[s + 1] - cu_q[s];
        while (tree && rows > 0 && tree[cu_q[s] + rows - 1]) --rows;
        return rows;
    }
    // Scores need more than a factor. `factor` takes those that `softmax_rows` reads to powers of two.
    bool adjusted() const { return softcap > 0.0f || alibi || bias; }
    float factor() const { return adjusted() ? 1.0f : scale * kLog2E; }
};

struct AttentionTask {
    int64_t sequence, head, first, last;  // rows first..last of the sequence
    int64_t split_begin, split_end;
    float* partial;  // where each split leaves its state, or null: merge here
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

// Where the keys (16 tokens each) and values (a pair or one token each) of a tile lie.
struct Located {
    const char* keys[kTile / 16];
    const char* values[kTile];
};

// Memory of one thread.
struct AttentionBuffers {
    State split, total;
    float *lanes, *scores, *rescale;  // [rows][16], [rows][64], [rows]
    char *q, *p;                      // [rows][padded], [rows][64] in the cache's type
    char *keys, *values, *zeros;      // copies of a tile for layouts the kernels cannot read in place
    char* room;                       // numbers of 16 tokens on their way into a copy
    float *key_scales, *value_scales; // of a tile's tokens, for scaled caches
    Located tile, next;
    int64_t head;        // first query head of the task
    int64_t *from, *to;  // first and past-the-last visible position of each row
};

#include "attention_tiles.h"
#include "attention_pages.h"
#include "attention_softmax.h"
#include "attention_tree.h"
#if defined(QUIRE_AMX)
#include "attention_amx.h"
#endif

// All rows against one tile, a few rows at a time; the first few ask for the next tile.
template <bool kBf16, bool kAsk>
QUIRE_INLINE void run_rows(const AttentionCall& c, AttentionBuffers& b, int64_t r, int64_t n, int64_t start, int64_t visible) {
    const int64_t width = c.cache.wide(), steps = kBf16 ? (visible + 1) / 2 : visible;
    const int64_t keys = (visible + 15) / 16 * 16;
    score_rows<kBf16, kAsk>(n, b.scores + r * kTile, b.q + r * c.padded * width, c.padded * width, b.tile, b.next, keys / 16, c.cache.d / c.cache.pair());
    if (c.cache.scaled()) scale_scores(b, r, n);
    if (c.adjusted())
        for (int64_t i = r; i < r + n; ++i) adjust_scores(c, b, i, start);
    softmax_rows<kBf16>(c, b, r, n, start, keys);
    value_rows<kBf16, kAsk>(n, b.split.acc + r * c.padded, c.padded, b.rescale + r, b.p + r * kTile * width, b.tile, b.next, steps,
                            kBf16 && (visible & 1));
}

// Rows [first, last) against b.tile, which begins at position `start`, in vector registers. `ask`: for the next tile.
template <bool kBf16>
void run_vectors(const AttentionCall& c, AttentionBuffers& b, int64_t first, int64_t last, int64_t start, bool ask) {
    for (int64_t r = first; r < last; r += kAttentionRows) {
        const int64_t n = last - r < kAttentionRows ? last - r : kAttentionRows;
        int64_t visible = 0;
        for (int64_t i = r; i < r + n; ++i) visible = b.to[i] - start > visible ? b.to[i] - start : visible;
        visible = visible < kTile ? visible : kTile;
        if (visible <= 0) continue;
        if (r == first && ask) {
            run_rows<kBf16, true>(c, b, r, n, start, visible);
        } else {
            run_rows<kBf16, false>(c, b, r, n, start, visible);
        }
    }
}

template <bool kBf16>
void run_tile(const AttentionCall& c, AttentionBuffers& b, int64_t first, int64_t last, int64_t start, bool ask) {
#if defined(QUIRE_AMX)
    if constexpr (kBf16) {
        run_passes(c, b, first, last, start);
        return;
    } else
#endif
        run_vectors<kBf16>(c, b, first, last, start, ask);
}

// A tile that holds a draft from position `root` on: each token sees its own.
template <bool kBf16>
void run_drafted(const AttentionCall& c, AttentionBuffers& b, const AttentionTask& task, const Pages& pages, int64_t start, int64_t root) {
    for (int64_t token = task.first; token < task.last; ++token) {
        const int64_t r = (token - task.first) * c.group;
        if (b.to[r] <= start) continue;
        locate_tile<kBf16>(c, b, pages, start, b.tile);
        if (const uint64_t mask = c.ancestors(c.cu_q[task.sequence] + token)) graft(c, b, pages, start, root, mask);
        run_tile<kBf16>(c, b, r, r + c.group, start, false);
    }
}

// One split: the state of all rows over positions [split * 512, split * 512 + 512) that any of them sees. The draft begins at
// position `root`.
template <bool kBf16>
void run_split(const AttentionCall& c, AttentionBuffers& b, const AttentionTask& task, int64_t split, int64_t rows,
               int64_t first_block, int64_t root) {
    const Pages pages{c.tables + task.sequence * c.max_blocks, c.context[task.sequence], first_block,
                      __builtin_ctzll(static_cast<unsigned long long>(c.cache.block_size)), task.head, c.cache.kv_heads,
                      c.cache.d * c.cache.width(), c.cache.piece()};
    int64_t from = b.from[0], to = b.to[0];
    for (int64_t r = 1; r < rows; ++r) {
        from = b.from[r] < from ? b.from[r] : from;
        to = b.to[r] > to ? b.to[r] : to;
    }
    const int64_t low = from > split * kSplit ? from / kTile * kTile : split * kSplit;
    const int64_t end = (split + 1) * kSplit, high = to < end ? to : end;
    const bool ahead = reads_in_place<kBf16>(c);
    clear(b.split, rows, c.padded);
    std::memset(b.lanes, 0, static_cast<size_t>(rows) * 64);
    if (ahead) locate_tile<kBf16>(c, b, pages, low, b.tile);
    for (int64_t start = low; start < high; start += kTile) {
        if (start + kTile > root) {
            run_drafted<kBf16>(c, b, task, pages, start, root);
            continue;
        }
        locate_tile<kBf16>(c, b, pages, ahead ? start + kTile : start, ahead ? b.next : b.tile);
        run_tile<kBf16>(c, b, 0, rows, start, ahead);
        if (ahead) b.tile = b.next;
    }
    for (int64_t r = 0; r < rows; ++r) b.split.sum[r] = hsum(load(b.lanes + r * 16));
}

// The sink joins here, once, so that it does not matter how many splits were merged.
void write_row(const AttentionCall& c, const AttentionTask& task, const State& state, int64_t r) {
    const int64_t token = c.cu_q[task.sequence] + task.first + r / c.group, head = task.head * c.group + r % c.group;
    float* out = c.out + (token * c.heads + head) * c.cache.d;
    F inverse = div(set1(1.0f), set1(state.sum[r]));
    if (c.sinks) inverse = with_sink(c.sinks[head] * kLog2E, state.most[r], state.sum[r]);
    for_lanes(c.cache.d, [&](int64_t i, int n) { store_lanes(out + i, mul(load(state.acc + r * c.padded + i), inverse), n); });
}

template <bool kBf16>
void run_task(const AttentionCall& c, AttentionBuffers& b, const AttentionTask& task) {
    const int64_t begin = c.cu_q[task.sequence], rows = (task.last - task.first) * c.group;
    const int64_t base = c.context[task.sequence] - (c.cu_q[task.sequence + 1] - begin);
    const int64_t row_floats = (c.heads + 2 * c.cache.kv_heads) * c.cache.d;
    const int64_t undrafted = c.undrafted(task.sequence), drafted = c.cu_q[task.sequence + 1] - begin - undrafted;
    const int64_t root = drafted ? base + undrafted : INT64_MAX / 2;
    b.head = task.head * c.group;
#if defined(QUIRE_AMX)
    const TileShapes shapes = attention_tiles();
    const TileScope tiles(shapes);
    std::memset(b.q, 0, static_cast<size_t>((rows + kSpareRows) * c.padded * 2));
#endif
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t token = task.first + r / c.group;
        const uint64_t mask = c.ancestors(begin + token);
        b.to[r] = mask ? root + __builtin_popcountll(mask) : base + token + 1;
        b.from[r] = c.window > 0 && b.to[r] > c.window ? b.to[r] - c.window : 0;
        const float* q = c.qkv + (begin + token) * row_floats + (task.head * c.group + r % c.group) * c.cache.d;
        for_lanes(c.cache.d, [&](int64_t i, int n) {
            if constexpr (kBf16) {
                bf16_store(reinterpret_cast<uint16_t*>(b.q) + r * c.padded + i, load_lanes(q + i, n));
            } else {
                store(reinterpret_cast<float*>(b.q) + r * c.padded + i, load_lanes(q + i, n));
            }
        });
    }
    const int64_t first_visible = c.window > 0 && base + 1 > c.window ? base + 1 - c.window : 0;
    const bool merge = !task.partial && task.split_end - task.split_begin > 1;
    if (merge) clear(b.total, rows, c.padded);
    for (int64_t split = task.split_begin; split < task.split_end; ++split) {
        if (task.partial) b.split = State::at(task.partial + (split - task.split_begin) * State::floats(rows, c.padded), rows, c.padded);
        run_split<kBf16>(c, b, task, split, rows, first_visible / c.cache.block_size, root);
        for (int64_t r = 0; merge && r < rows; ++r) merge_row(b.total, b.split, r, c.padded);
    }
    if (task.partial) return;
    for (int64_t r = 0; r < rows; ++r) write_row(c, task, merge ? b.total : b.split, r);
}
