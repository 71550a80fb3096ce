// Entries (DeepSeek V4): rows of a cache that stand for some tokens each, how they are made, and attention to them and to the last tokens.
//
// An entry is made where its last token is computed, of rows in the cache alone: whatever cut brought these there, its numbers are the same.
// Sums ascend by token. A row reads the entries before it, ascending, and behind these the tokens of its window, ascending.
#pragma once

#include "indexer.h"

namespace quire::QUIRE_UNIT {
namespace {

struct EntryCall : PoolDescriptor {
    const BatchDescriptor &batch, &entry_batch;
    IndexCache rows, entries;
    const float* x;
    const int64_t* slots;
};

// Row `last` of sequence `s`, at `position`, ends the tokens of an entry.
struct EntryTask {
    int64_t s, position;
};

QUIRE_INLINE F load_row(const IndexCache& c, const char* row, int64_t at, int n) {
    return load_numbers(row, at, n, c.bf16() ? kNumbersBf16 : kNumbersF32);
}

inline void store_row(const IndexCache& c, char* to, const float* from) {
    if (c.bf16()) store_as<true>(to, from, c.d);
    else store_as<false>(to, from, c.d);
}

// Numbers at .. at + n of the entry: softmaxes over tokens of each number's gates weigh them. Tokens of the entry before have their first
// part in it, its own their last.
QUIRE_INLINE F pooled(const EntryCall& c, const char* const* rows, int64_t count, int64_t at, int n) {
    const int64_t d = c.entries.d, wide = c.series * d, before = count - c.every;
    const auto gate = [&](int64_t i) {
        const int64_t column = (i < before ? 0 : wide - d) + at, place = i < before ? i : i - before;
        return add(load_row(c.rows, rows[i], wide + column, n), load_lanes(c.bias + place * wide + column, n));
    };
    F top = gate(0), sum = set1(0.0f), all = set1(0.0f);
    for (int64_t i = 1; i < count; ++i) top = vmax(top, gate(i));
    for (int64_t i = 0; i < count; ++i) {
        const F p = vexp(sub(gate(i), top));
        sum = add(sum, p);
        all = fma(p, load_row(c.rows, rows[i], (i < before ? 0 : wide - d) + at, n), all);
    }
    return div(all, sum);
}

inline void entry_task(const EntryCall& c, const EntryTask& t, const char** rows) {
    const int64_t size = c.rows.block_size, d = c.entries.d, entry = c.entries.block_size;
    const int64_t wanted = c.series * c.every, count = t.position + 1 < wanted ? t.position + 1 : wanted;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t token = t.position + 1 - count + i;
        rows[i] = c.rows.key(c.batch.tables[t.s * c.batch.max_blocks + token / size], token % size);
    }
    alignas(64) float made[kMostIndexDim];
    for_lanes(d, [&](int64_t at, int n) { store_lanes(made + at, pooled(c, rows, count, at, n), n); });
    norm_row(made, made, c.norm, d, c.eps);
    rotate_pairs(made, c.table + (t.position + 1 - c.every) * 2 * c.half, c.half);
    const int64_t block = c.entry_batch.tables[t.s * c.entry_batch.max_blocks + t.position / entry];
    store_row(c.entries, c.entries.key(block, t.position % entry / c.every), made);
}

void check_table(const BatchDescriptor& b, const IndexCache& c, int64_t s, int64_t first) {
    if (b.context[s] > b.max_blocks * c.block_size) fail("entries: a context is longer than its block table");
    for (int64_t i = first / c.block_size; i * c.block_size < b.context[s]; ++i) {
        const int64_t block = b.tables[s * b.max_blocks + i];
        if (block < 0 || block >= c.blocks) fail("entries: a block lies outside the cache");
    }
}

int64_t base_of(const BatchDescriptor& b, int64_t s) { return b.context[s] - (b.cu_q[s + 1] - b.cu_q[s]); }

void check_pool(const EntryCall& c, int64_t rows) {
    check_index(c.rows);
    check_index(c.entries, c.every);
    check_entries(c.entries, c.every);
    if (c.every < 1 || c.series < 1 || c.series > 2 || c.rows.d != 2 * c.series * c.entries.d || c.half < 1 || 2 * c.half > c.entries.d)
        fail("pool_entries: rows are not numbers and gates of entries");
    if (c.batch.cu_q[0] != 0 || c.batch.cu_q[c.batch.sequences] != rows) fail("pool_entries: cu_q must run from 0 to the number of rows");
    for (int64_t r = 0; r < rows; ++r)
        if (c.slots[r] < 0 || c.slots[r] >= c.rows.blocks * c.rows.block_size) fail("pool_entries: a slot lies outside the cache");
    for (int64_t s = 0; s < c.batch.sequences; ++s) {
        if (c.batch.cu_q[s + 1] <= c.batch.cu_q[s]) continue;
        const int64_t base = base_of(c.batch, s), first = base + 1 - c.series * c.every;
        if (base < 0 || c.batch.context[s] > c.positions) fail("pool_entries: a context does not fit its rows and the table of positions");
        check_table(c.batch, c.rows, s, first > 0 ? first : 0);
        check_table(c.entry_batch, c.entries, s, base);
    }
}

// x [rows, 2 series d]: numbers, and behind them gates, of `series` parts; stored at `slots`.
void pool_entries(const float* x, const int64_t* slots, const IndexCache* row_cache, const IndexCache* entries, const BatchDescriptor* batch,
                  const BatchDescriptor* entry_batch, const PoolDescriptor* pool, int64_t rows) {
    const EntryCall c{*pool, *batch, *entry_batch, *row_cache, *entries, x, slots};
    check_pool(c, rows);
    parallel_ranges(rows, c.rows.d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
            store_row(c.rows, c.rows.key(slots[r] / c.rows.block_size, slots[r] % c.rows.block_size), x + r * c.rows.d);
    });
    auto* tasks = static_cast<EntryTask*>(scratch(Scratch::kTasks, static_cast<size_t>(rows) * sizeof(EntryTask)));
    int64_t count = 0;
    for (int64_t s = 0; s < batch->sequences; ++s)
        for (int64_t position = base_of(*batch, s); position < batch->context[s] && batch->cu_q[s + 1] > batch->cu_q[s]; ++position)
            if ((position + 1) % c.every == 0) tasks[count++] = {s, position};
    if (!count) return;
    const int64_t room = c.series * c.every;
    auto* lists = static_cast<const char**>(scratch(Scratch::kAttention, static_cast<size_t>(thread_count() * room) * sizeof(char*)));
    parallel_for(count, [&](int64_t i, int thread) { entry_task(c, tasks[i], lists + thread * room); });
}

void check_entry_batch(const LatentCall& c, int64_t rows) {
    for (const LatentCache* each : {&c.cache, &c.entries})
        if (each->rank < 16 || each->rank % 16 || each->rank > kMostLatent || each->rope || each->block_size < 1 || each->blocks < 1 ||
            each->rank != c.cache.rank || each->bf16 != c.cache.bf16)
            fail("entry_attention: both caches must have rows of as many numbers, a multiple of 16");
    if (c.heads < 1 || c.recent < 1 || c.every < 0 || !(c.factor > 0.0f)) fail("entry_attention: needs heads, a window and a positive scale");
    if (c.every && c.entries.block_size % c.every && c.every % c.entries.block_size) fail("entry_attention: entries do not fit their blocks");
    if (c.cu_q[0] != 0 || c.cu_q[c.sequences] != rows) fail("entry_attention: cu_q must run from 0 to the number of rows");
    for (int64_t s = 0; s < c.sequences; ++s) {
        const int64_t count = int64_t{c.cu_q[s + 1]} - c.cu_q[s], base = c.context[s] - count;
        if (count < 0 || (count && base < 0)) fail("entry_attention: cu_q must ascend, and contexts include their rows");
        if (!count) continue;
        if (c.context[s] > c.max_blocks * c.cache.block_size) fail("entry_attention: a context is longer than its block table");
        for (int64_t i = (base + 1 - c.tokens_seen(base)) / c.cache.block_size; i * c.cache.block_size < c.context[s]; ++i) {
            const int64_t block = c.tables[s * c.max_blocks + i];
            if (block < 0 || block >= c.cache.blocks) fail("entry_attention: a block lies outside the cache");
        }
        const int64_t ends = c.every ? c.context[s] / c.every * c.every : 0;
        if (ends > c.entry_blocks * c.entries.block_size) fail("entry_attention: a context is longer than its table of entries");
        for (int64_t i = 0; i * c.entries.block_size < ends; ++i) {
            const int64_t block = c.entry_tables[s * c.entry_blocks + i];
            if (block < 0 || block >= c.entries.blocks) fail("entry_attention: a block of entries lies outside the cache");
        }
        for (int64_t t = 0; c.chosen && t < count; ++t)
            for (int64_t i = 0; i < c.entries_seen(base + t); ++i) {
                const int64_t entry = c.chosen[(c.cu_q[s] + t) * c.most + i];
                if (entry < 0 || c.every * (entry + 1) > base + t + 1) fail("entry_attention: a row sees an entry that is not before it");
            }
    }
}

// Entries of a row that an indexer chooses by `keys`: as of choose_tokens.
void choose_entries(int32_t* out, const float* q, const float* weights, const IndexCache* keys, const BatchDescriptor* batch, int64_t rows,
                    int64_t heads, int64_t most, int64_t every) {
    const IndexCall c{{*batch, q, *keys, heads, keys->d, 1, every}, out, weights, most};
    if (most < 1 || every < 1) fail("choose_entries: needs entries to choose");
    check_entries(c.cache, every);
    check_index_batch(c, rows);
    if (c.cache.bf16()) run_choose_tokens<true>(c);
    else run_choose_tokens<false>(c);
}

// Rows of both caches are keys and values; `chosen` [rows, most]: entries that a row reads, null: all before it.
void entry_attention(float* out, const float* q, const LatentCache* cache, const LatentCache* entries, const BatchDescriptor* batch,
                     const BatchDescriptor* entry_batch, const EntryReadsDescriptor* reads, Optional<const int32_t> chosen, int64_t rows) {
    const LatentCall c{*batch, out, q, q, *cache, reads->heads, cache->rank, reads->scale * kLog2E, chosen.ptr, reads->most, reads->sinks,
                       0, 1, reads->window, reads->every, *entries, entry_batch->tables, entry_batch->max_blocks};
    if (c.chosen && (c.most < 1 || !c.every)) fail("entry_attention: chosen entries need to be some");
    check_entry_batch(c, rows);
    if (c.cache.bf16) run_latent_attention<true>(c);
    else run_latent_attention<false>(c);
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
