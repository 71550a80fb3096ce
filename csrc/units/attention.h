// Softmax(q k^T) v over paged keys and values, tiled, for any mixture of prefill chunks and decodes (Dao et al. 2022; the
// split over keys follows Flash-Decoding, 2023).
//
// A row's numbers depend on the row alone: keys are visited in tiles of 64 aligned to position 0, tiles are gathered in
// splits of 512 with their own running maximum, and splits are merged in ascending order, whether one task or many computed
// them, and whatever other rows walk with it: sequences that name the same blocks read them once (Hydragen, Juravsky et al.
// 2024). A tile a row cannot see leaves its state bit for bit unchanged (rescale by 1, add 0 times finite values), so values
// that were never written are never multiplied: the last pair is masked and blocks outside the range read zeros.
#pragma once

#include "attention_softmax.h"
#include "attention_tiles.h"
#include "attention_tree.h"
#if defined(QUIRE_AMX)
#include "attention_amx.h"
#endif

namespace quire::QUIRE_UNIT {
namespace {

// All rows against one tile, a few rows at a time; the first few prefetch the next tile.
template <bool kBf16, bool kPrefetch>
QUIRE_INLINE void run_rows(const AttentionCall& c, AttentionBuffers& b, int64_t r, int64_t n, int64_t start, int64_t visible) {
    const int64_t width = c.cache.wide(), steps = kBf16 ? (visible + 1) / 2 : visible;
    const int64_t keys = (visible + 15) / 16 * 16;
    static_assert(kAttentionRows <= kPassing);
    b.low = r;
    score_rows<kBf16, kPrefetch>(n, b.scores, b.q + r * c.padded * width, c.padded * width, b.tile, b.next, keys / 16, c.cache.d / c.cache.pair());
    if (c.cache.scaled()) scale_scores(b, r, n);
    if (c.adjusted())
        for (int64_t i = r; i < r + n; ++i) adjust_scores(c, b, i, start);
    softmax_rows<kBf16>(c, b, r, n, start, keys);
    value_rows<kBf16, kPrefetch>(n, b.split.acc + r * c.padded, c.padded, b.rescale + r, b.p, b.tile, b.next, steps,
                            kBf16 && (visible & 1));
}

// Rows [first, last) against b.tile, which begins at position `start`, in vector registers. `ahead`: the next tile is prefetched.
template <bool kBf16>
void run_vectors(const AttentionCall& c, AttentionBuffers& b, int64_t first, int64_t last, int64_t start, bool ahead) {
    for (int64_t r = first; r < last; r += kAttentionRows) {
        const int64_t n = last - r < kAttentionRows ? last - r : kAttentionRows;
        int64_t visible = 0;
        for (int64_t i = r; i < r + n; ++i) visible = b.to[i] - start > visible ? b.to[i] - start : visible;
        visible = visible < kTile ? visible : kTile;
        if (visible <= 0) continue;
        if (r == first && ahead) {
            run_rows<kBf16, true>(c, b, r, n, start, visible);
        } else {
            run_rows<kBf16, false>(c, b, r, n, start, visible);
        }
    }
}

template <bool kBf16>
void run_tile(const AttentionCall& c, AttentionBuffers& b, int64_t first, int64_t last, int64_t start, bool ahead) {
#if defined(QUIRE_AMX)
    if constexpr (kBf16) {
        run_passes(c, b, first, last, start);
        return;
    } else
#endif
        run_vectors<kBf16>(c, b, first, last, start, ahead);
}

// A tile of a span, whose rows begin at `row`, that holds its draft: each token sees its own.
template <bool kBf16>
void run_drafted(const AttentionCall& c, AttentionBuffers& b, const Span& span, int64_t row, const Pages& pages, int64_t start) {
    for (int64_t token = span.first; token < span.last; ++token) {
        const int64_t r = row + (token - span.first) * c.group;
        if (b.to[r] <= start) continue;
        locate_tile<kBf16>(c, b, pages, start, b.tile);
        if (const uint64_t mask = c.ancestors(c.cu_q[span.sequence] + token)) graft(c, b, pages, start, span.root, mask);
        run_tile<kBf16>(c, b, r, r + c.group, start, false);
    }
}

// `rows` rows from `row` on against the tiles from `start` to `end`, which lie where `span` has them.
template <bool kBf16>
void run_tiles(const AttentionCall& c, AttentionBuffers& b, const Span& span, int64_t head, int64_t row, int64_t rows, int64_t start, int64_t end) {
    const Pages pages{c.tables + span.sequence * c.max_blocks, c.context[span.sequence], span.from / c.cache.block_size,
                      __builtin_ctzll(static_cast<unsigned long long>(c.cache.block_size)), head, c.cache.step,
                      c.cache.d * c.cache.width(), c.cache.piece()};
    const bool ahead = reads_in_place<kBf16>(c);
    if (ahead && start < end) locate_tile<kBf16>(c, b, pages, start, b.tile);
    for (; start < end; start += kTile, ++b.read) {
        if (start + kTile > span.root) {
            run_drafted<kBf16>(c, b, span, row, pages, start);
            continue;
        }
        locate_tile<kBf16>(c, b, pages, ahead ? start + kTile : start, ahead ? b.next : b.tile);
        run_tile<kBf16>(c, b, row, row + rows, start, ahead);
        if (ahead) b.tile = b.next;
    }
}

// Spans first..last, whose rows begin at `row`, over the positions start..end: together while all have the same blocks, then
// those that still do. What is shared all rows see to its end, so a row's numbers are what they are alone.
template <bool kBf16>
void walk(const AttentionCall& c, AttentionBuffers& b, const Span* first, const Span* last, int64_t head, int64_t row, int64_t start, int64_t end) {
    int64_t rows = 0, to = 0, common = end;
    const Span* widest = first;  // reads every block that another one reads
    for (const Span* s = first; s != last; ++s) {
        rows += s->tokens() * c.group;
        to = s->to > to ? s->to : to;
        if (s != first && s->common < common) common = s->common;
        if (s->from < widest->from) widest = s;
    }
    const int64_t low = widest->from / kTile * kTile, begin = low > start ? low : start;
    to = to < end ? to : end;
    const int64_t together = common < to ? common : to, at = together > begin ? together : begin;
    run_tiles<kBf16>(c, b, *widest, head, row, rows, begin, together);
    if (at >= to) return;
    for (const Span *s = first, *next; s != last; s = next) {
        for (next = s + 1; next != last && next->common > at;) ++next;
        walk<kBf16>(c, b, s, next, head, row, at, end);
        for (; s != next; ++s) row += s->tokens() * c.group;
    }
}

// Whether tile registers begin the sums of all rows with the tile at `start`: where each row sees all of it, as most of a prompt do.
template <bool kBf16>
bool begins(const AttentionBuffers& b, int64_t rows, int64_t start) {
    bool all = kTileRegisters && kBf16;
    for (int64_t r = 0; all && r < rows; ++r) all = b.from[r] <= start && b.to[r] >= start + kTile;
    return all;
}

// One split: the state of all rows over positions [split * 512, split * 512 + 512) that any of them sees.
template <bool kBf16>
void run_split(const AttentionCall& c, AttentionBuffers& b, const AttentionTask& task, int64_t split) {
    b.fresh = begins<kBf16>(b, task.rows, split * kSplit) ? split * kSplit : -1;
    clear(b.split, task.rows, b.fresh < 0 ? c.padded : 0);
    std::memset(b.lanes, 0, static_cast<size_t>(task.rows) * 64);
    walk<kBf16>(c, b, task.spans, task.spans + task.count, task.head, 0, split * kSplit, (split + 1) * kSplit);
    for (int64_t r = 0; r < task.rows; ++r) b.split.sum[r] = hsum(load(b.lanes + r * 16));
}

// The sink joins here, once, so that it does not matter how many splits were merged.
void write_row(const AttentionCall& c, int64_t place, int64_t head, const State& state, int64_t r) {
    float* out = c.out + place * c.cache.d;
    F inverse = div(set1(1.0f), set1(state.sum[r]));
    if (c.sinks) inverse = with_sink(c.sinks[head] * kLog2E, state.most[r], state.sum[r]);
    for_lanes(c.cache.d, [&](int64_t i, int n) { store_lanes(out + i, mul(load(state.acc + r * c.padded + i), inverse), n); });
}

// Visits (row of the task, row of the batch, span) per token.
template <class Visit>
void for_tokens(const AttentionCall& c, const AttentionTask& task, const Visit& visit) {
    int64_t r = 0;
    for (const Span* s = task.spans; s != task.spans + task.count; ++s)
        for (int64_t i = s->first; i < s->last; ++i, r += c.group) visit(r, c.cu_q[s->sequence] + i, *s);
}

// Queries of all rows in the cache's type, and what each row sees.
template <bool kBf16>
void take_queries(const AttentionCall& c, AttentionBuffers& b, const AttentionTask& task) {
    for_tokens(c, task, [&](int64_t first, int64_t token, const Span& span) {
        const uint64_t mask = c.ancestors(token);
        const int64_t own = mask ? span.root + __builtin_popcountll(mask) : span.base + token - c.cu_q[span.sequence] + 1;
        const int64_t to = c.after ? c.to(own, c.context[span.sequence]) : own;
        for (int64_t r = first; r < first + c.group; ++r) {
            b.own[r] = own;
            b.to[r] = to;
            b.from[r] = c.from(own);
            const float* q = c.query(token, task.head, r - first);
            for_lanes(c.cache.d, [&](int64_t i, int n) {
                if constexpr (kBf16) {
                    bf16_store(reinterpret_cast<uint16_t*>(b.q) + r * c.padded + i, load_lanes(q + i, n));
                } else {
                    store(reinterpret_cast<float*>(b.q) + r * c.padded + i, load_lanes(q + i, n));
                }
            });
        }
    });
}

void write_rows(const AttentionCall& c, const AttentionTask& task, const State& state) {
    for_tokens(c, task, [&](int64_t first, int64_t token, const Span&) {
        for (int64_t i = 0; i < c.group; ++i) write_row(c, c.place(token, task.head, i), task.head * c.group + i, state, first + i);
    });
}

// What a row leaves of a split: its maximum, its sum and its output not yet divided by it; splits ascend.
void write_states(const AttentionCall& c, const AttentionTask& task) {
    const int64_t width = c.cache.d + 2;
    for_tokens(c, task, [&](int64_t first, int64_t token, const Span& span) {
        const int64_t to = span.base + token - c.cu_q[span.sequence] + 1, from = c.from(to);
        float* out = c.out + (c.starts[token] * c.heads + task.head * c.group) * width;
        for (int64_t split = from / kSplit; split * kSplit < to; ++split) {
            if (!c.held(span, split)) continue;
            const State& part = task.parts[split - task.split_begin];
            for (int64_t r = first; r < first + c.group; ++r) {
                float* at = out + (r - first) * width;
                at[0] = part.most[r];
                at[1] = part.sum[r];
                std::memcpy(at + 2, part.acc + r * c.padded, static_cast<size_t>(c.cache.d) * 4);
            }
            out += c.heads * width;
        }
    });
}

template <bool kBf16>
void run_task(const AttentionCall& c, AttentionBuffers& b, const AttentionTask& task) {
    b.head = task.head * c.group;
    if (task.parts) {
        if (c.starts) return write_states(c, task);
        clear(b.total, task.rows, c.padded);
        for (int64_t i = 0; i < task.split_end - task.split_begin; ++i)
            merge_rows(b.total, task.parts[i], task.rows, c.padded, c.columns());
        return write_rows(c, task, b.total);
    }
#if defined(QUIRE_AMX)
    const TileShapes shapes = attention_tiles();
    const TileScope tiles(shapes);
    std::memset(b.q, 0, static_cast<size_t>((task.rows + kSpareRows) * c.padded * 2));
#endif
    take_queries<kBf16>(c, b, task);
    if (task.state.acc) {
        b.split = task.state;
        return run_split<kBf16>(c, b, task, task.split_begin);
    }
    run_split<kBf16>(c, b, task, task.split_begin);
    std::swap(b.split, b.total);
    for (int64_t split = task.split_begin + 1; split < task.split_end; ++split) {
        run_split<kBf16>(c, b, task, split);
        merge_rows(b.total, b.split, task.rows, c.padded, c.columns());
    }
    write_rows(c, task, b.total);
}

// Rows first..last of all rows and heads from the states that each left, in the order that `order` says.
void fold_rows(const AttentionCall& c, const float* states, const int64_t* starts, const int64_t* order, int64_t first, int64_t last) {
    alignas(64) float memory[2][kMaxHeadDim + 16] = {};
    float most[16], sum[16];  // two numbers, read as a vector
    const State total{&most[0], &sum[0], memory[0]}, part{&most[1], &sum[1], memory[1]};
    const int64_t d = c.cache.d;
    for (int64_t at = first; at < last; ++at) {
        const int64_t row = at / c.heads, head = at % c.heads;
        clear(total, 1, c.padded);
        for (int64_t i = starts[row]; i < starts[row + 1]; ++i) {
            const float* state = states + (order[i] * c.heads + head) * (d + 2);
            most[1] = state[0];
            sum[1] = state[1];
            std::memcpy(memory[1], state + 2, static_cast<size_t>(d) * 4);
            merge_rows(total, part, 1, c.padded, c.columns());
        }
        write_row(c, at, head, total, 0);
    }
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
