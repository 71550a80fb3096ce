// Block-sparse attention (MiniMax M3): of each row and head of keys and values the blocks of tokens with the highest scores, as tables of
// cache blocks, over which ordinary attention runs.
//
// A block's score is its highest of a token up to the row's own. Of equal scores the earlier blocks are taken, and the last blocks of a
// row always.
#pragma once

#include "indexer.h"

namespace quire::QUIRE_UNIT {
namespace {

struct BlockCall : IndexRows {
    int32_t *out_tables, *out_contexts;  // [heads, rows, most * per], [heads, rows]
    int64_t rows, size, most, local;     // size: tokens of a block
    int64_t per() const { return size / cache.block_size; }  // blocks of the cache
};

// Tokens first..last of a sequence; `scores` [tokens, heads, blocks].
struct BlockGroup {
    int64_t sequence, first, last, blocks;
    float* scores;
    float* of(const BlockCall& c, int64_t t, int64_t head) const { return scores + ((t - first) * c.heads + head) * blocks; }
};

// best[block] = the highest of dots [64] of the tokens from position `start` on, up to the one at `last`.
QUIRE_INLINE void raise_blocks(float* best, const float* dots, int64_t start, int64_t last, int64_t size) {
    for (int64_t i = 0; i < kLatentTile && start + i <= last; ++i) {
        float& most = best[(start + i) / size];
        if (dots[i] > most) most = dots[i];
    }
}

template <bool kBf16>
void block_task(const BlockCall& c, IndexBuffers& b, const BlockGroup& g, int64_t low) {
    const int64_t begin = c.cu_q[g.sequence], base = c.base(g.sequence), words = c.words();
    const int64_t seen = base + g.last, high = seen < low + kIndexSplit ? seen : low + kIndexSplit;
    take_index_queries<kBf16>(c, b, begin + g.first, begin + g.last);
    for (int64_t t = g.first; t < g.last; ++t)
        for (int64_t h = 0; h < c.heads; ++h)
            for (int64_t block = low / c.size; block * c.size < high; ++block) g.of(c, t, h)[block] = -INFINITY;
    for (int64_t start = low; start < high; start += kLatentTile) {
        lay_keys(c, b, g.sequence, start, high);
        for (int64_t t = g.first; t < g.last; ++t) {
            const char* q = b.q + (t - g.first) * c.heads * words * 4;
            for (int64_t head = 0; head < c.heads; head += kLatentRows) {
                const int64_t some = c.heads - head < kLatentRows ? c.heads - head : kLatentRows;
                product<kBf16>({b.dots, kLatentTile, q + head * words * 4, words * 4, b.tile, words * 64, words, kLatentTile, true}, some);
                for (int64_t h = 0; h < some; ++h) raise_blocks(g.of(c, t, head + h), b.dots + h * kLatentTile, start, base + t, c.size);
            }
        }
    }
}

// The chosen blocks of a row and head as blocks of the cache, and how many tokens they hold up to the row's own.
inline void write_blocks(const BlockCall& c, const BlockGroup& g, int64_t t, int64_t head) {
    const int64_t position = c.base(g.sequence) + t, count = position / c.size + 1, per = c.per(), at = head * c.rows + c.cu_q[g.sequence] + t;
    float* scores = g.of(c, t, head);
    for (int64_t i = 0; i < c.local && i < count; ++i) scores[count - 1 - i] = INFINITY;
    int32_t* out = c.out_tables + at * c.most * per;
    const int64_t taken = count < c.most ? count : c.most, held = (position + c.cache.block_size) / c.cache.block_size;
    const auto write = [&](int64_t i, int64_t block) {
        for (int64_t j = 0; j < per; ++j) {
            const int64_t own = block * per + j;
            out[i * per + j] = own < held ? c.tables[g.sequence * c.max_blocks + own] : -1;
        }
    };
    if (count <= c.most) {
        for (int64_t i = 0; i < count; ++i) write(i, i);
    } else {
        int64_t equal = 0, i = 0;
        const uint32_t least = threshold(scores, count, c.most, &equal);
        for (int64_t block = 0; block < count; ++block) {
            const uint32_t x = order_of(scores[block]);
            if (x < least || (x == least && --equal < 0)) continue;
            write(i++, block);
        }
    }
    for (int64_t i = taken * per; i < c.most * per; ++i) out[i] = -1;
    c.out_contexts[at] = static_cast<int32_t>((taken - 1) * c.size + position % c.size + 1);
}

template <bool kBf16>
void run_choose_blocks(const BlockCall& c) {
    const auto groups_of = [&](const auto& visit) {
        for (int64_t s = 0; s < c.sequences; ++s) {
            const int64_t count = c.cu_q[s + 1] - c.cu_q[s];
            for (int64_t first = 0; first < count; first += kIndexRows) {
                const int64_t last = first + kIndexRows < count ? first + kIndexRows : count;
                visit(BlockGroup{s, first, last, (c.base(s) + last - 1) / c.size + 1, nullptr});
            }
        }
    };
    int64_t count = 0, floats = 0, splits = 0;
    groups_of([&](const BlockGroup& g) {
        ++count;
        floats += (g.last - g.first) * c.heads * g.blocks;
        const int64_t own = (g.blocks * c.size + kIndexSplit - 1) / kIndexSplit;
        splits = own > splits ? own : splits;
    });
    Pieces size{nullptr};
    (void)index_buffers(c, size);
    const int64_t threads = thread_count();
    auto* memory = static_cast<char*>(scratch(Scratch::kAttention, static_cast<size_t>(size.used * threads + floats * 4)));
    auto* scores = reinterpret_cast<float*>(memory + size.used * threads);
    auto* groups = static_cast<BlockGroup*>(scratch(Scratch::kTasks, static_cast<size_t>(count) * sizeof(BlockGroup)));
    int64_t n = 0;
    groups_of([&](BlockGroup g) {
        g.scores = scores;
        scores += (g.last - g.first) * c.heads * g.blocks;
        groups[n++] = g;
    });
    parallel_for(count * splits, [&](int64_t i, int thread) {
        const BlockGroup& g = groups[i / splits];
        const int64_t low = i % splits * kIndexSplit;
        if (low >= c.base(g.sequence) + g.last) return;
        Pieces pieces{memory + thread * size.used};
        IndexBuffers b = index_buffers(c, pieces);
        std::memset(b.zeros, 0, static_cast<size_t>(c.words() * 4));
        block_task<kBf16>(c, b, g, low);
    });
    parallel_for(count * kIndexRows, [&](int64_t i, int) {
        const BlockGroup& g = groups[i / kIndexRows];
        const int64_t t = g.first + i % kIndexRows;
        for (int64_t head = 0; t < g.last && head < c.heads; ++head) write_blocks(c, g, t, head);
    });
}

void choose_blocks(int32_t* tables, int32_t* contexts, const float* q, const IndexCache* cache, const BatchDescriptor* batch, int64_t rows,
                   int64_t heads, int64_t size, int64_t most, int64_t local) {
    const BlockCall c{{*batch, q, *cache, heads, cache->d}, tables, contexts, rows, size, most, local};
    check_index_batch(c, rows);
    if (most < 1 || local < 1 || local > most) fail("choose_blocks: needs blocks to choose, the last one always");
    if (size < 1 || kIndexSplit % size || size % c.cache.block_size) fail("choose_blocks: blocks must be whole blocks of the cache, and divide 512");
    if (c.cache.bf16()) run_choose_blocks<true>(c);
    else run_choose_blocks<false>(c);
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
