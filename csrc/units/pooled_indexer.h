// Attention to blocks of tokens with one index key each (Qwen4-Exp): of each row the blocks before it with the highest scores, as tables of
// cache blocks, over which ordinary attention runs.
//
// The key of a block lies where its last token is. A block's score is the sum over the heads of the indexer of max(0, q . k), in one order;
// of equal scores the earlier blocks are taken. Tokens behind the last whole block are read always.
#pragma once

#include "indexer.h"

namespace quire::QUIRE_UNIT {
namespace {

struct PooledCall : IndexRows {
    int32_t *out_tables, *out_contexts;  // [rows, width], [rows]
    int64_t rows, size, most;            // size: tokens of a block
    int64_t per() const { return size / cache.block_size; }  // blocks of the cache
    int64_t width() const { return (most + 1) * per(); }
    // Whole blocks that token t of sequence s sees.
    int64_t whole(int64_t s, int64_t t) const { return (base(s) + t + 1) / size; }
};

// Tokens first..last of a sequence; `scores` [tokens, blocks].
struct PooledGroup {
    int64_t sequence, first, last, blocks;
    float* scores;
};

// Keys of the 64 blocks from `start` on side by side, zeros from `end` on.
QUIRE_INLINE void lay_block_keys(const PooledCall& c, IndexBuffers& b, int64_t sequence, int64_t start, int64_t end) {
    const int64_t words = c.words();
    for (int64_t i = 0; i < kLatentTile; ++i) {
        b.keys[i] = b.zeros;
        if (start + i < end) {
            const int64_t token = (start + i + 1) * c.size - 1;
            b.keys[i] = c.cache.key(c.tables[sequence * c.max_blocks + token / c.cache.block_size], token % c.cache.block_size);
        }
    }
    for (int64_t g = 0; g < kLatentTile / 16; ++g) lay_across(b.tile + g * words * 64, b.keys + g * 16, words);
}

template <bool kBf16>
void pooled_task(const PooledCall& c, IndexBuffers& b, const PooledGroup& g, int64_t low) {
    const int64_t begin = c.cu_q[g.sequence], words = c.words();
    const int64_t high = g.blocks < low + kIndexSplit ? g.blocks : low + kIndexSplit;
    take_index_queries<kBf16>(c, b, begin + g.first, begin + g.last);
    for (int64_t start = low; start < high; start += kLatentTile) {
        lay_block_keys(c, b, g.sequence, start, high);
        const int64_t some = high - start < kLatentTile ? high - start : kLatentTile;
        for (int64_t t = g.first; t < g.last; ++t) {
            const char* q = b.q + (t - g.first) * c.heads * words * 4;
            F sums[kLatentTile / 16];
            for (F& sum : sums) sum = set1(0.0f);
            for (int64_t head = 0; head < c.heads; head += kLatentRows) {
                const int64_t count = c.heads - head < kLatentRows ? c.heads - head : kLatentRows;
                product<kBf16>({b.dots, kLatentTile, q + head * words * 4, words * 4, b.tile, words * 64, words, kLatentTile, true}, count);
                for (int64_t h = 0; h < count; ++h)
                    for (int64_t j = 0; j < kLatentTile / 16; ++j)
                        sums[j] = add(sums[j], vmax(load(b.dots + h * kLatentTile + j * 16), set1(0.0f)));
            }
            alignas(64) float found[kLatentTile];
            for (int64_t j = 0; j < kLatentTile / 16; ++j) store(found + j * 16, sums[j]);
            std::memcpy(g.scores + (t - g.first) * g.blocks + start, found, static_cast<size_t>(some) * 4);
        }
    }
}

// The chosen blocks of a row and what is behind the last whole one as blocks of the cache, and how many tokens they hold.
inline void write_pooled(const PooledCall& c, const PooledGroup& g, int64_t t) {
    const int64_t seen = c.base(g.sequence) + t + 1, count = c.whole(g.sequence, t), per = c.per(), at = c.cu_q[g.sequence] + t;
    const float* scores = g.scores + (t - g.first) * g.blocks;
    const int32_t* table = c.tables + g.sequence * c.max_blocks;
    int32_t *out = c.out_tables + at * c.width(), *end = out + c.width();
    const auto write = [&](int64_t block) {
        for (int64_t j = 0; j < per; ++j) *out++ = table[block * per + j];
    };
    if (count <= c.most) {
        for (int64_t block = 0; block < count; ++block) write(block);
    } else {
        int64_t equal = 0;
        const uint32_t least = threshold(scores, count, c.most, &equal);
        for (int64_t block = 0; block < count; ++block) {
            const uint32_t x = order_of(scores[block]);
            if (x < least || (x == least && --equal < 0)) continue;
            write(block);
        }
    }
    const int64_t rest = seen - count * c.size;
    for (int64_t j = 0; j * c.cache.block_size < rest; ++j) *out++ = table[count * per + j];
    while (out < end) *out++ = -1;
    c.out_contexts[at] = static_cast<int32_t>((count < c.most ? count : c.most) * c.size + rest);
}

template <bool kBf16>
void run_choose_pooled(const PooledCall& c) {
    const auto groups_of = [&](const auto& visit) {
        for (int64_t s = 0; s < c.sequences; ++s) {
            const int64_t count = c.cu_q[s + 1] - c.cu_q[s];
            for (int64_t first = 0; first < count; first += kIndexRows) {
                const int64_t last = first + kIndexRows < count ? first + kIndexRows : count;
                visit(PooledGroup{s, first, last, c.whole(s, last - 1), nullptr});
            }
        }
    };
    int64_t count = 0, floats = 0, splits = 0;
    groups_of([&](const PooledGroup& g) {
        ++count;
        floats += (g.last - g.first) * g.blocks;
        const int64_t own = (g.blocks + kIndexSplit - 1) / kIndexSplit;
        splits = own > splits ? own : splits;
    });
    Pieces size{nullptr};
    (void)index_buffers(c, size);
    const int64_t threads = thread_count();
    auto* memory = static_cast<char*>(scratch(Scratch::kAttention, static_cast<size_t>(size.used * threads + floats * 4)));
    auto* scores = reinterpret_cast<float*>(memory + size.used * threads);
    auto* groups = static_cast<PooledGroup*>(scratch(Scratch::kTasks, static_cast<size_t>(count) * sizeof(PooledGroup)));
    int64_t n = 0;
    groups_of([&](PooledGroup g) {
        g.scores = scores;
        scores += (g.last - g.first) * g.blocks;
        groups[n++] = g;
    });
    parallel_for(count * splits, [&](int64_t i, int thread) {
        const PooledGroup& g = groups[i / splits];
        const int64_t low = i % splits * kIndexSplit;
        if (low >= g.blocks || g.blocks <= c.most) return;
        Pieces pieces{memory + thread * size.used};
        IndexBuffers b = index_buffers(c, pieces);
        std::memset(b.zeros, 0, static_cast<size_t>(c.words() * 4));
        pooled_task<kBf16>(c, b, g, low);
    });
    parallel_for(count * kIndexRows, [&](int64_t i, int) {
        const PooledGroup& g = groups[i / kIndexRows];
        if (const int64_t t = g.first + i % kIndexRows; t < g.last) write_pooled(c, g, t);
    });
}

void choose_pooled(int32_t* tables, int32_t* contexts, const float* q, const IndexCache* cache, const BatchDescriptor* batch, int64_t rows,
                   int64_t heads, int64_t size, int64_t most) {
    const PooledCall c{{*batch, q, *cache, heads, cache->d}, tables, contexts, rows, size, most};
    check_index_batch(c, rows);
    if (most < 1) fail("choose_pooled: needs blocks to choose");
    if (size < 1 || size % c.cache.block_size) fail("choose_pooled: blocks must be whole blocks of the cache");
    if (c.cache.bf16()) run_choose_pooled<true>(c);
    else run_choose_pooled<false>(c);
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
