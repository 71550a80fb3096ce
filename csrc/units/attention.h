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
constexpr int64_t kQueryRows = 32;  // rows (tokens x heads of a group) that share a pass over the keys

struct AttentionCall {
    float* out;
    const float* qkv;
    const char *keys, *values;
    const int32_t *cu_q, *context, *tables;
    int64_t heads, group, max_blocks, window;
    float scale, softcap;        // softcap 0: none
    const float *sinks, *alibi;  // per head, or null
    CacheShape cache;
    int64_t padded;  // head_dim rounded up to 16

    // Scores need more than a factor. `factor` takes those that `softmax_rows` reads to powers of two.
    bool adjusted() const { return softcap > 0.0f || alibi; }
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
    static int64_t floats(int64_t rows, int64_t padded) { return rows * (padded + 2); }
    static State at(float* p, int64_t rows, int64_t padded) { return {p + rows * padded, p + rows * (padded + 1), p}; }
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

// All rows against one tile, a few rows at a time; the first few ask for the next tile.
template <bool kBf16, bool kAsk>
QUIRE_INLINE void run_rows(const AttentionCall& c, AttentionBuffers& b, int64_t r, int64_t n, int64_t start, int64_t visible) {
    const int64_t width = c.cache.wide(), steps = kBf16 ? (visible + 1) / 2 : visible;
    score_rows<kBf16, kAsk>(n, b.scores + r * kTile, b.q + r * c.padded * width, c.padded * width, b.tile, b.next, c.cache.d / c.cache.pair());
    if (c.cache.scaled()) scale_scores(b, r, n);
    if (c.adjusted())
        for (int64_t i = r; i < r + n; ++i) adjust_scores(c, b, i, start);
    softmax_rows<kBf16>(c, b, r, n, start);
    value_rows<kBf16, kAsk>(n, b.split.acc + r * c.padded, c.padded, b.rescale + r, b.p + r * kTile * width, b.tile, b.next, steps,
                            kBf16 && (visible & 1));
}

// One split: the state of all rows over positions [split * 512, split * 512 + 512) that any of them sees.
template <bool kBf16>
void run_split(const AttentionCall& c, AttentionBuffers& b, const AttentionTask& task, int64_t split, int64_t rows,
               int64_t first_block) {
    const Pages pages{c.tables + task.sequence * c.max_blocks, c.context[task.sequence], first_block,
                      __builtin_ctzll(static_cast<unsigned long long>(c.cache.block_size)), task.head, c.cache.kv_heads,
                      c.cache.d * c.cache.width(), c.cache.piece()};
    const int64_t low = b.from[0] > split * kSplit ? b.from[0] / kTile * kTile : split * kSplit;
    const int64_t end = (split + 1) * kSplit, high = b.to[rows - 1] < end ? b.to[rows - 1] : end;
    const bool copied = c.cache.narrow() || c.cache.block_size < 16 || c.cache.d != c.padded;
    clear(b.split, rows, c.padded);
    std::memset(b.lanes, 0, static_cast<size_t>(rows) * 64);
    locate_tile(c, b, pages, low, b.tile);
    for (int64_t start = low; start < high; start += kTile) {
        if (copied && start > low) locate_tile(c, b, pages, start, b.tile);
        if (!copied) locate_tile(c, b, pages, start + kTile, b.next);
        const int64_t visible = high - start < kTile ? high - start : kTile;
        for (int64_t r = 0; r < rows; r += kAttentionRows) {
            const int64_t n = rows - r < kAttentionRows ? rows - r : kAttentionRows;
            if (r == 0 && !copied) {
                run_rows<kBf16, true>(c, b, r, n, start, visible);
            } else {
                run_rows<kBf16, false>(c, b, r, n, start, visible);
            }
        }
        b.tile = b.next;
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
    b.head = task.head * c.group;
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t token = task.first + r / c.group;
        b.to[r] = base + token + 1;
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
    clear(b.total, rows, c.padded);
    for (int64_t split = task.split_begin; split < task.split_end; ++split) {
        if (task.partial) b.split = State::at(task.partial + (split - task.split_begin) * State::floats(rows, c.padded), rows, c.padded);
        run_split<kBf16>(c, b, task, split, rows, first_visible / c.cache.block_size);
        if (task.partial) continue;
        for (int64_t r = 0; r < rows; ++r) merge_row(b.total, b.split, r, c.padded);
    }
    if (task.partial) return;
    for (int64_t r = 0; r < rows; ++r) write_row(c, task, b.total, r);
}
