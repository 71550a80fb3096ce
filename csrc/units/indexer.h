// The lightning indexer of sparse attention (DeepSeek-AI 2025): its keys in the cache, scores of earlier tokens, and the choice of the
// tokens with the highest.
//
// What a row chooses depends on the row alone: a score is summed in one order, head after head, and of equal scores the earlier tokens
// are taken.
#pragma once

#include "latent_attention.h"

namespace quire::QUIRE_UNIT {
namespace {

constexpr int64_t kIndexRows = 8;            // rows that share a pass over keys
constexpr int64_t kIndexSplit = 512;         // keys of a task
constexpr int64_t kIndexScores = 1 << 22;    // scores in memory at a time, or those of one group of rows
constexpr int64_t kMostIndexDim = 4096;

struct IndexCache : CacheDescriptor {
    bool bf16() const { return format == kFormatBf16; }
    int64_t width() const { return bf16() ? 2 : 4; }
    char* key(int64_t block, int64_t offset) const { return keys + block * step + offset * d * width(); }
};

// Blocks have whole keys, or whole blocks have one, where each stands for `every` tokens.
void check_entries(const IndexCache& c, int64_t every) {
    if (every > 1 && c.block_size % every && every % c.block_size) fail("index cache: a key is not that of whole blocks, nor blocks have whole ones");
}

void check_index(const IndexCache& c, int64_t every = 1) {
    if (c.d < 8 || c.d % 8 || c.d > kMostIndexDim) fail("index cache: keys must be of a multiple of 8 numbers up to 4096");
    if (c.format != kFormatF32 && c.format != kFormatBf16) fail("index cache: keys must be f32 or bf16");
    if (c.block_size < 1 || c.blocks < 1) fail("index cache: needs blocks");
    const int64_t held = c.block_size > every ? c.block_size / every : 1;
    if (c.step < held * c.d * c.width()) fail("index cache: blocks overlap");
}

// q [rows, heads * d], k [rows, d]: the first numbers of each head are rotated, of q in place; keys are stored.
void index_rope_and_cache(float* q, const float* k, const int32_t* positions, const int64_t* slots, const IndexCache* cache,
                          const RopeDescriptor* rotation, int64_t rows) {
    const IndexCache c = *cache;
    const RopeDescriptor t = *rotation;
    check_index(c);
    if (t.heads < 1 || t.half < 1 || 2 * t.half > c.d) fail("index_rope_and_cache: needs heads, at least as wide as their rotated part");
    for (int64_t r = 0; r < rows; ++r) {
        if (positions[r] < 0 || positions[r] >= t.positions) fail("index_rope_and_cache: a position lies outside the table");
        if (slots[r] < 0 || slots[r] >= c.blocks * c.block_size) fail("index_rope_and_cache: a slot lies outside the cache");
    }
    parallel_ranges(rows, 2 * (t.heads + 1) * c.d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const float* angles = t.table + int64_t{positions[r]} * 2 * t.half;
            for (int64_t h = 0; h < t.heads; ++h) rotate_pairs(q + (r * t.heads + h) * c.d, angles, t.half);
            alignas(64) float key[kMostIndexDim];
            std::memcpy(key, k + r * c.d, static_cast<size_t>(c.d) * 4);
            rotate_pairs(key, angles, t.half);
            char* to = c.key(slots[r] / c.block_size, slots[r] % c.block_size);
            if (c.bf16()) store_as<true>(to, key, c.d);
            else store_as<false>(to, key, c.d);
        }
    });
}

// Rows whose queries meet keys of the cache, the first `dim` numbers of what it holds: of every token, or of the last one of each `pool`.
struct IndexRows : BatchDescriptor {
    const float* q;  // [rows, heads * dim]
    IndexCache cache;
    int64_t heads, dim, pool = 1;
    int64_t every = 1;  // tokens that a key stands for where the cache has no others, in the block of the last of them
    int64_t words() const { return dim * cache.width() / 4; }
    int64_t base(int64_t s) const { return context[s] - (cu_q[s + 1] - cu_q[s]); }
    // Keys of the first `tokens` tokens, and where one lies.
    int64_t seen(int64_t tokens) const { return tokens / (pool * every); }
    const char* key(int64_t s, int64_t i) const {
        const int64_t last = (i + 1) * pool * every - 1;
        return cache.key(tables[s * max_blocks + last / cache.block_size], last % cache.block_size / every);
    }
};

struct IndexCall : IndexRows {
    int32_t* out;          // [rows, width]
    const float* weights;  // [rows, heads]
    int64_t most;          // pools
    int64_t width() const { return most * pool + pool - 1; }
};

// Tokens first..last of a sequence, of which all see more pools than they may choose; `scores` of each, `stride` apart.
struct IndexGroup {
    int64_t sequence, first, last, stride;
    float* scores;
};

// Memory of one thread.
struct IndexBuffers {
    char *q, *tile, *zeros;
    float* dots;
    const char* keys[kLatentTile];
};

IndexBuffers index_buffers(const IndexRows& c, Pieces& pieces) {
    IndexBuffers b{};
    b.q = pieces.take<char>(kIndexRows * c.heads * c.words() * 4);
    b.tile = pieces.take<char>(kLatentTile * c.words() * 4);
    b.zeros = pieces.take<char>(c.words() * 4);
    b.dots = pieces.take<float>(kLatentRows * kLatentTile);
    return b;
}

// The 64 keys from number `start` on side by side, zeros from `end` on.
QUIRE_INLINE void lay_keys(const IndexRows& c, IndexBuffers& b, int64_t sequence, int64_t start, int64_t end) {
    const int64_t words = c.words();
    for (int64_t i = 0; i < kLatentTile; ++i) {
        b.keys[i] = b.zeros;
        if (start + i < end) b.keys[i] = c.key(sequence, start + i);
    }
    for (int64_t g = 0; g < kLatentTile / 16; ++g) lay_across(b.tile + g * words * 64, b.keys + g * 16, words);
}

// Queries of the rows first..last in the cache's type.
template <bool kBf16>
QUIRE_INLINE void take_index_queries(const IndexRows& c, IndexBuffers& b, int64_t first, int64_t last) {
    for (int64_t i = first * c.heads; i < last * c.heads; ++i)
        store_as<kBf16>(b.q + (i - first * c.heads) * c.words() * 4, c.q + i * c.dim, c.dim);
}

// to[64] = sum over heads of weight * max(0, q . k) of one row, against the keys in `b.tile`.
template <bool kBf16>
void index_scores(const IndexCall& c, IndexBuffers& b, const char* q, const float* weights, float* to) {
    const int64_t words = c.words();
    F sums[kLatentTile / 16];
    for (F& sum : sums) sum = set1(0.0f);
    for (int64_t head = 0; head < c.heads; head += kLatentRows) {
        const int64_t some = c.heads - head < kLatentRows ? c.heads - head : kLatentRows;
        product<kBf16>({b.dots, kLatentTile, q + head * words * 4, words * 4, b.tile, words * 64, words, kLatentTile, true}, some);
        for (int64_t h = 0; h < some; ++h) {
            const F weight = set1(weights[head + h]);
            for (int64_t j = 0; j < kLatentTile / 16; ++j)
                sums[j] = fma(vmax(load(b.dots + h * kLatentTile + j * 16), set1(0.0f)), weight, sums[j]);
        }
    }
    for (int64_t j = 0; j < kLatentTile / 16; ++j) store(to + j * 16, sums[j]);
}

template <bool kBf16>
void index_task(const IndexCall& c, IndexBuffers& b, const IndexGroup& g, int64_t low) {
    const int64_t begin = c.cu_q[g.sequence], base = c.base(g.sequence), words = c.words();
    const int64_t seen = c.seen(base + g.last), high = seen < low + kIndexSplit ? seen : low + kIndexSplit;
    take_index_queries<kBf16>(c, b, begin + g.first, begin + g.last);
    for (int64_t start = low; start < high; start += kLatentTile) {
        lay_keys(c, b, g.sequence, start, high);
        for (int64_t t = g.first; t < g.last; ++t)
            index_scores<kBf16>(c, b, b.q + (t - g.first) * c.heads * words * 4, c.weights + (begin + t) * c.heads,
                                g.scores + (t - g.first) * g.stride + start);
    }
}

// Numbers that are ordered as scores are; NaN is above all, and both zeros are one.
QUIRE_INLINE uint32_t order_of(float score) {
    const float x = score + 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return 0xffffffffu;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The `most`-th highest of n scores; *equal of those that equal it are among the `most` highest.
inline uint32_t threshold(const float* scores, int64_t n, int64_t most, int64_t* equal) {
    uint32_t prefix = 0, mask = 0;
    int64_t left = most;
    for (const int shift : {21, 10, 0}) {
        const uint32_t bins = shift ? 2048 : 1024;
        int32_t counts[2048] = {};
        for (int64_t i = 0; i < n; ++i) {
            const uint32_t x = order_of(scores[i]);
            if ((x & mask) == prefix) ++counts[x >> shift & (bins - 1)];
        }
        uint32_t bin = bins - 1;
        while (counts[bin] < left) left -= counts[bin--];
        prefix |= bin << shift;
        mask |= (bins - 1) << shift;
    }
    *equal = left;
    return prefix;
}

// out [width]: the positions of the pools with the highest scores, of more than may be chosen, and those behind the last pool up to
// `position`, ascending; -1 behind them.
inline void choose_highest(const IndexCall& c, int32_t* out, const float* scores, int64_t position) {
    const int64_t n = c.seen(position + 1);
    int32_t* const end = out + c.width();
    int64_t equal = 0;
    const uint32_t least = threshold(scores, n, c.most, &equal);
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t x = order_of(scores[i]);
        if (x < least) continue;
        if (x == least && --equal < 0) continue;
        for (int64_t j = i * c.pool; j < (i + 1) * c.pool; ++j) *out++ = static_cast<int32_t>(j);
    }
    for (int64_t j = n * c.pool; j < (position + 1) / c.every; ++j) *out++ = static_cast<int32_t>(j);
    while (out < end) *out++ = -1;
}

// Groups of rows that see more than they may choose, of sequences in order.
template <class Visit>
void for_index_groups(const IndexCall& c, const Visit& visit) {
    for (int64_t s = 0; s < c.sequences; ++s) {
        const int64_t count = c.cu_q[s + 1] - c.cu_q[s], base = c.base(s);
        const int64_t few = (c.most + 1) * c.pool * c.every - 1 - base;  // rows that see no more pools than they may choose
        int64_t first = few > 0 ? few : 0;
        for (; first < count; first += kIndexRows) {
            const int64_t last = first + kIndexRows < count ? first + kIndexRows : count;
            visit(IndexGroup{s, first, last, (c.seen(base + last) + kLatentTile - 1) / kLatentTile * kLatentTile, nullptr});
        }
    }
}

void check_index_batch(const IndexRows& c, int64_t rows) {
    check_index(c.cache, c.every);
    if (c.heads < 1 || c.heads > kMostLatent) fail("indexer: needs heads");
    if (c.dim < 8 || c.dim % 8 || c.dim > c.cache.d || c.pool < 1) fail("indexer: keys of the cache are shorter than queries");
    if (c.cu_q[0] != 0 || c.cu_q[c.sequences] != rows) fail("indexer: cu_q must run from 0 to the number of rows");
    for (int64_t s = 0; s < c.sequences; ++s) {
        const int64_t count = int64_t{c.cu_q[s + 1]} - c.cu_q[s], context = c.context[s];
        if (count < 0) fail("indexer: cu_q must ascend");
        if (count == 0) continue;
        if (context < count) fail("indexer: a context is shorter than the rows it includes");
        if (context > c.max_blocks * c.cache.block_size) fail("indexer: a context is longer than its block table");
        for (int64_t i = 0; i * c.cache.block_size < context; ++i) {
            const int64_t block = c.tables[s * c.max_blocks + i];
            if (block < 0 || block >= c.cache.blocks) fail("indexer: a block lies outside the cache");
        }
    }
}

// Rows that see no more pools than they may choose: all tokens, and -1 behind these.
void choose_all(const IndexCall& c) {
    for (int64_t s = 0; s < c.sequences; ++s) {
        const int64_t count = c.cu_q[s + 1] - c.cu_q[s], base = c.base(s);
        for (int64_t t = 0; t < count && c.seen(base + t + 1) <= c.most; ++t) {
            int32_t* out = c.out + (c.cu_q[s] + t) * c.width();
            const int64_t all = (base + t + 1) / c.every;
            for (int64_t i = 0; i < c.width(); ++i) out[i] = i < all ? static_cast<int32_t>(i) : -1;
        }
    }
}

// Some groups at a time: scores of all their rows in tasks of some keys each, then the choice of each row.
template <bool kBf16>
void run_choose_tokens(const IndexCall& c) {
    int64_t count = 0, largest = 0;
    for_index_groups(c, [&](const IndexGroup& g) {
        ++count;
        if (g.stride * kIndexRows > largest) largest = g.stride * kIndexRows;
    });
    choose_all(c);
    if (!count) return;
    Pieces size{nullptr};
    (void)index_buffers(c, size);
    const int64_t room = largest > kIndexScores ? largest : kIndexScores, threads = thread_count();
    auto* memory = static_cast<char*>(scratch(Scratch::kAttention, static_cast<size_t>(size.used * threads + room * 4)));
    auto* scores = reinterpret_cast<float*>(memory + size.used * threads);
    auto* groups = static_cast<IndexGroup*>(scratch(Scratch::kTasks, static_cast<size_t>(count) * sizeof(IndexGroup)));
    int64_t n = 0;
    for_index_groups(c, [&](const IndexGroup& g) { groups[n++] = g; });
    for (int64_t from = 0; from < count;) {
        int64_t to = from, used = 0, splits = 0;
        for (; to < count && used + groups[to].stride * kIndexRows <= room; ++to) {
            groups[to].scores = scores + used;
            used += groups[to].stride * kIndexRows;
            const int64_t own = (groups[to].stride + kIndexSplit - 1) / kIndexSplit;
            splits = own > splits ? own : splits;
        }
        parallel_for((to - from) * splits, [&](int64_t i, int thread) {
            const IndexGroup& g = groups[from + i / splits];
            const int64_t low = i % splits * kIndexSplit;
            if (low >= g.stride) return;
            Pieces pieces{memory + thread * size.used};
            IndexBuffers b = index_buffers(c, pieces);
            std::memset(b.zeros, 0, static_cast<size_t>(c.words() * 4));
            index_task<kBf16>(c, b, g, low);
        });
        parallel_for((to - from) * kIndexRows, [&](int64_t i, int) {
            const IndexGroup& g = groups[from + i / kIndexRows];
            const int64_t t = g.first + i % kIndexRows;
            if (t >= g.last) return;
            choose_highest(c, c.out + (c.cu_q[g.sequence] + t) * c.width(), g.scores + (t - g.first) * g.stride, c.base(g.sequence) + t);
        });
        from = to;
    }
}

void choose_tokens(int32_t* out, const float* q, const float* weights, const IndexCache* cache, const BatchDescriptor* batch, int64_t rows,
                   int64_t heads, int64_t most, int64_t dim, int64_t pool) {
    const IndexCall c{{*batch, q, *cache, heads, dim, pool}, out, weights, most};
    if (most < 1) fail("choose_tokens: needs tokens to choose");
    check_index_batch(c, rows);
    if (c.cache.bf16()) run_choose_tokens<true>(c);
    else run_choose_tokens<false>(c);
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
