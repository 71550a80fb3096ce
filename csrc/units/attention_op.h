// The attention op: checks and memory. The arithmetic is in attention.h, who walks which keys in attention_plan.h.
#pragma once

#include "attention_plan.h"
#include "pieces.h"

namespace quire::QUIRE_UNIT {
namespace {

AttentionBuffers thread_buffers(Pieces& pieces, int64_t most, int64_t padded) {
    const int64_t rows = most + kSpareRows;
    AttentionBuffers b{};
    const int64_t state = State::floats(rows, padded);
    b.split = State::at(pieces.take<float>(state), rows, padded);
    b.total = State::at(pieces.take<float>(state), rows, padded);
    b.lanes = pieces.take<float>(rows * 16);
    b.scores = pieces.take<float>(kPassing * kTile);
    b.rescale = pieces.take<float>(rows);
    b.q = pieces.take<char>(rows * padded * 4 + 64);
    b.p = pieces.take<char>(kPassing * kTile * 4);
    b.keys = pieces.take<char>(kTile * padded * 4);
    b.values = pieces.take<char>(kTile * padded * 4);
    b.zeros = pieces.take<char>(64 * padded);
    b.room = pieces.take<char>(64 * padded);
    b.key_scales = pieces.take<float>(kTile);
    b.value_scales = pieces.take<float>(kTile);
    b.from = pieces.take<int64_t>(rows);
    b.to = pieces.take<int64_t>(rows);
    b.own = pieces.take<int64_t>(rows);
    return b;
}

// Bit j of a drafted row's mask: it sees the draft's token j. Its own bit is the highest, the others are its parent's mask.
void check_tree(const AttentionCall& c, int64_t s) {
    const int64_t undrafted = c.undrafted(s), drafted = c.cu_q[s + 1] - c.cu_q[s] - undrafted;
    const uint64_t* masks = c.tree + c.cu_q[s];
    if (drafted > 64) fail("attention: a draft has more than 64 tokens");
    for (int64_t i = 0; i < undrafted; ++i)
        if (masks[i]) fail("attention: the rows of a draft must be the last of their sequence");
    masks += undrafted;
    for (int64_t i = 0; i < drafted; ++i) {
        const uint64_t own = uint64_t{1} << i, before = masks[i] ^ own;
        if (!(masks[i] & own) || before > own) fail("attention: a drafted row must see itself and no later token of the draft");
        if (before && masks[63 - __builtin_clzll(before)] != before) fail("attention: a drafted row must see what its parent sees");
    }
}

// Blocks first..end of a sequence: of a split that is read, all are in the cache or none is.
void check_held(const AttentionCall& c, int64_t s, int64_t first, int64_t end) {
    const int32_t* table = c.tables + s * c.max_blocks;
    for (int64_t b = first + 1; b < end; ++b)
        if (b * c.cache.block_size % kSplit && (table[b] < 0) != (table[b - 1] < 0)) fail("attention: a part of a split is held elsewhere");
}

// The rows of sequence s leave as many states as they see splits that are held.
void check_starts(const AttentionCall& c, int64_t s, int64_t count) {
    Span span{};
    span.sequence = s;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t row = c.cu_q[s] + i, to = c.context[s] - count + i + 1;
        span.from = c.from(to);
        int64_t found = 0;
        for (int64_t split = span.from / kSplit; split * kSplit < to; ++split) found += c.held(span, split);
        if (c.starts[row] < 0 || c.starts[row + 1] - c.starts[row] != found || c.starts[row + 1] > c.states)
            fail("attention: a row has not as many states as splits that are held");
    }
}

void check_attention(const AttentionCall& c, int64_t rows) {
    check_cache(c.cache);
    if (c.heads < 1 || c.heads % c.cache.kv_heads) fail("attention: heads must be a multiple of kv_heads");
    if (!(c.scale > 0.0f)) fail("attention: scale must be positive");
    if (!(c.softcap >= 0.0f)) fail("attention: softcap must not be negative");
    if (c.bias && (c.distances < 1 || c.behind < 0 || c.behind >= c.distances)) fail("attention: a bias by distance needs at least one distance");
    if (c.after < 0) fail("attention: keys after a row's own must not be fewer than none");
    if (c.after && (c.starts || c.tree || c.window < 0)) fail("attention: rows that see later ones leave no states, are no drafts and have no chunks");
    if (c.cu_q[0] != 0 || c.cu_q[c.sequences] != rows) fail("attention: cu_q must run from 0 to the number of rows");
    for (int64_t s = 0; s < c.sequences; ++s) {
        const int64_t count = int64_t{c.cu_q[s + 1]} - c.cu_q[s], context = c.context[s];
        if (count < 0) fail("attention: cu_q must ascend");
        if (count == 0) continue;
        if (c.tree) check_tree(c, s);
        if (context < count) fail("attention: a context is shorter than the rows it includes");
        if (context > c.max_blocks * c.cache.block_size) fail("attention: a context is longer than its block table");
        const int64_t first = c.from(context - count + 1) / c.cache.block_size;
        // Without a branch in the loop, so that it is one of vectors: small blocks are many.
        const int64_t end = (context + c.cache.block_size - 1) / c.cache.block_size;
        const auto limit = static_cast<uint32_t>(c.cache.blocks < INT32_MAX ? c.cache.blocks : INT32_MAX);
        uint32_t outside = 0;
        const auto elsewhere = c.starts ? UINT32_MAX : 0;  // at most one entry beside those of the cache: -1
        for (int64_t b = first; b < end; ++b) {
            const auto block = static_cast<uint32_t>(c.tables[s * c.max_blocks + b]);
            outside |= (block >= limit) & (block - elsewhere != 0);
        }
        if (outside) fail("attention: a block lies outside the cache");
        if (!c.starts) continue;
        check_held(c, s, first, end);
        check_starts(c, s, count);
    }
}

template <bool kBf16>
void run_attention(const AttentionCall& c) {
    const int64_t threads = thread_count(), most_rows = c.group > kQueryRows ? c.group : kQueryRows;
    AttentionPlan plan(c, c.sequences);
    Pieces size{nullptr};
    (void)thread_buffers(size, most_rows, c.padded);
    auto* memory = static_cast<char*>(scratch(Scratch::kAttention, static_cast<size_t>(size.used * threads + plan.state_floats() * 4)));
    for (int64_t t = 0; t < threads; ++t) {
        Pieces pieces{memory + t * size.used};
        const AttentionBuffers b = thread_buffers(pieces, most_rows, c.padded);
        std::memset(b.zeros, 0, static_cast<size_t>(64 * c.padded));
        if (c.cache.d == c.padded) continue;
        // What is behind the numbers of each token in copies stays zero.
        std::memset(b.keys, 0, static_cast<size_t>(kTile * c.padded * 4));
        std::memset(b.values, 0, static_cast<size_t>(kTile * c.padded * 4));
    }
    plan.make_tasks(reinterpret_cast<float*>(memory + size.used * threads));
    const auto run = [&](const AttentionTask* tasks, int64_t count) {
        parallel_for(count, [&](int64_t i, int thread) {
            Pieces pieces{memory + thread * size.used};
            AttentionBuffers b = thread_buffers(pieces, most_rows, c.padded);
            run_task<kBf16>(c, b, tasks[i]);
            __atomic_fetch_add(&g_tiles_read, b.read, __ATOMIC_RELAXED);
        });
    };
    run(plan.pieces, plan.piece_count);
    run(plan.tasks, plan.task_count);
}

// qkv [rows, (heads + 2 kv_heads) * d], or `queries_only`, [rows, heads * d].
void attention(float* out, const float* qkv, const CacheShape* cache, const BatchDescriptor* batch, const AttentionDescriptor* spec, int64_t rows) {
    const int64_t group = cache->kv_heads > 0 ? spec->heads / cache->kv_heads : 0;
    const AttentionCall c{*batch, *spec, out, qkv, *cache, group, (cache->d + kDimStep - 1) / kDimStep * kDimStep};
    if (c.starts && c.tree) fail("attention: drafts that branch leave no states");
    if (c.queries_only && (c.starts || c.tree)) fail("attention: rows that have queries only leave no states and are no drafts");
    check_attention(c, rows);
    if (c.cache.bf16()) {
        run_attention<true>(c);
    } else {
        run_attention<false>(c);
    }
}

// out [rows, heads * d] of states [count, heads, d + 2] as `attention` leaves them: row r is folded from states order[starts[r]] ..
// order[starts[r + 1] - 1], one after the other.
void fold_states(float* out, const float* states, const int64_t* starts, const int64_t* order, Optional<const float> sinks, int64_t rows,
                 int64_t heads, int64_t d, int64_t count) {
    if (heads < 1 || d < 1 || d > kMaxHeadDim) fail("fold_states: bad number or size of heads");
    for (int64_t r = 0; r < rows; ++r)
        if (starts[r] < 0 || starts[r] >= starts[r + 1]) fail("fold_states: a row has no states");
    for (int64_t i = starts[0]; i < starts[rows]; ++i)
        if (order[i] < 0 || order[i] >= count) fail("fold_states: there is no such state");
    AttentionCall c{};
    c.out = out;
    c.heads = heads;
    c.sinks = sinks.ptr;
    c.cache.d = d;
    c.padded = (d + 15) / 16 * 16;
    const int64_t each = (starts[rows] - starts[0]) / (rows > 0 ? rows : 1) * d;
    parallel_ranges(rows * heads, each, [&](int64_t begin, int64_t end) { fold_rows(c, states, starts, order, begin, end); });
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
