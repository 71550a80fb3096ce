// Attention over latents (DeepSeek-AI 2024): all heads share one key per token, the latent followed by a rotated part, and
// the latent is the value too.
//
// A row's numbers depend on the row alone: positions are taken in splits of 512 aligned to position 0, each with its own
// maximum, merged in ascending order; within a split, sums ascend. Positions a row cannot see add 0 times a finite number.
// Of rows that see chosen tokens alone, "positions" below are places in the list of these: so a list of all gives the same bits as none.
#pragma once

#include "latent_call.h"
#include "pieces.h"
#include "attention_softmax.h"
#include "attention_tiles.h"

namespace quire::QUIRE_UNIT {
namespace {

// Where what is start..start + 64 in the list of a row with entries lies; zeros past `end`. Entries are their own keys.
inline void locate_entries(const LatentCall& c, LatentBuffers& b, const LatentTask& t, int64_t start, int64_t end) {
    const int64_t row = c.cu_q[t.sequence] + t.first, position = c.context[t.sequence] - c.cu_q[t.sequence + 1] + row;
    const int64_t before = c.entries_seen(position), first = position + 1 - c.tokens_seen(position);
    for (int64_t i = 0; i < kLatentTile; ++i) {
        b.keys[i] = b.values[i] = b.zeros;
        const int64_t at = start + i;
        if (at >= end) continue;
        if (at < before) {
            const int64_t last = c.every * ((c.chosen ? c.chosen[row * c.most + at] : at) + 1) - 1, size = c.entries.block_size;
            b.values[i] = c.entries.latent(c.entry_tables[t.sequence * c.entry_blocks + last / size], last % size / c.every);
        } else {
            const int64_t token = first + at - before, size = c.cache.block_size;
            b.values[i] = c.cache.latent(c.tables[t.sequence * c.max_blocks + token / size], token % size);
        }
    }
}

// Where the tokens start..start + 64 lie; zeros before `from`, whose blocks may be others' by now, and past `end`.
inline void locate_latents(const LatentCall& c, LatentBuffers& b, const LatentTask& t, int64_t start, int64_t from, int64_t end) {
    if (c.recent) return locate_entries(c, b, t, start, end);
    const LatentCache& cache = c.cache;
    const int32_t* chosen = c.chosen ? c.chosen + (c.cu_q[t.sequence] + t.first) * c.most : nullptr;
    for (int64_t i = 0; i < kLatentTile; ++i) {
        b.keys[i] = b.values[i] = b.zeros;
        if (start + i < from || start + i >= end) continue;
        const int64_t position = chosen ? chosen[start + i] : start + i;
        const int64_t block = c.tables[t.sequence * c.max_blocks + position / cache.block_size];
        const int64_t offset = position % cache.block_size;
        b.keys[i] = cache.key(block, offset);
        b.values[i] = cache.latent(block, offset);
    }
}

// Words 0..count of 16 rows side by side: to[word][row].
QUIRE_INLINE void lay_across(char* to, const char* const* rows, int64_t count) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) transpose_words(to + i * 64, rows, i * 4);
    for (; i < count; ++i)
        for (int64_t r = 0; r < 16; ++r) std::memcpy(to + i * 64 + r * 4, rows[r] + i * 4, 4);
}

// Of a split, the positions that rows of a task see: those from..high, and where the tiles of them start. Tiles lie alike for
// all rows, whatever they see.
struct LatentSpan {
    int64_t low, from, high;
    int64_t start() const { return from > low ? from / kLatentTile * kLatentTile : low; }
};

// scores[r][position in split] of all rows against the positions of a span.
template <bool kBf16>
void latent_scores(const LatentCall& c, LatentBuffers& b, const LatentTask& t, int64_t rows, const LatentSpan& span) {
    const int64_t words = c.words(), latent_words = c.cache.rank * c.cache.width() / 4;
    for (int64_t start = span.start(); start < span.high; start += kLatentTile) {
        const int64_t visible = span.high - start < kLatentTile ? span.high - start : kLatentTile, groups = (visible + 15) / 16;
        locate_latents(c, b, t, start, span.from, span.high);
        for (int64_t g = 0; g < groups; ++g) {
            char* to = b.tile + g * words * 64;
            lay_across(to, b.values + g * 16, latent_words);
            lay_across(to + latent_words * 64, b.keys + g * 16, words - latent_words);
        }
        product<kBf16>({b.scores + start - span.low, kLatentSplit, b.q, words * 4, b.tile, words * 64, words, groups * 16, true}, rows);
    }
}

// part sums += p times latents of the positions of a span.
template <bool kBf16>
void latent_values(const LatentCall& c, LatentBuffers& b, const LatentTask& t, int64_t rows, const LatentSpan& span) {
    constexpr int64_t kSteps = kBf16 ? kLatentTile / 2 : kLatentTile, kWidth = kBf16 ? 2 : 4;
    for (int64_t start = span.start(); start < span.high; start += kLatentTile) {
        const int64_t visible = span.high - start < kLatentTile ? span.high - start : kLatentTile;
        const int64_t steps = kBf16 ? (visible + 1) / 2 : visible;
        locate_latents(c, b, t, start, span.from, span.high);
        for (int64_t s = 0; s < steps; ++s) {
            for (int64_t i = 0; i < c.cache.rank; i += 16) {
                char* to = b.tile + (i / 16 * kSteps + s) * 64;
                if constexpr (kBf16) {
                    zip16(to, b.values[2 * s] + i * 2, b.values[2 * s + 1] + i * 2);
                } else {
                    std::memcpy(to, b.values[s] + i * 4, 64);
                }
            }
        }
        product<kBf16>({b.part, c.cache.rank, b.p + (start - span.low) * kWidth, kLatentSplit * kWidth, b.tile, kSteps * 64, steps, c.cache.rank, start == span.start()}, rows);
    }
}

// Powers of two of the scores less their maximum, as the cache's type, of one row that sees the positions hidden..visible of the
// split, 0 of others; the sum and the maximum.
template <bool kBf16>
QUIRE_INLINE void latent_softmax(const LatentCall& c, LatentBuffers& b, int64_t r, int64_t hidden, int64_t visible, int64_t count, float* most, float* sum) {
    float* s = b.scores + r * kLatentSplit;
    const F factor = set1(c.factor), none = set1(-INFINITY);
    F top = none;
    for (int64_t i = 0; i < visible; i += 16) {
        const int64_t from = hidden - i < 0 ? 0 : hidden - i < 16 ? hidden - i : 16, to = visible - i < 16 ? visible - i : 16;
        const F scaled = keep(mul(load(s + i), factor), static_cast<int>(from), static_cast<int>(to), none);
        store(s + i, scaled);
        top = vmax(top, scaled);
    }
    *most = hmax(top);
    const F m = set1(*most);
    F all = set1(0.0f);
    for (int64_t i = 0; i < (count + 63) / 64 * 64; i += 16) {
        const F p = i < visible ? exp2_below<kBf16>(sub(load(s + i), m)) : set1(0.0f);
        all = add(all, p);
        if constexpr (kBf16) {
            bf16_store(reinterpret_cast<uint16_t*>(b.p) + r * kLatentSplit + i, p);
        } else {
            store(reinterpret_cast<float*>(b.p) + r * kLatentSplit + i, p);
        }
    }
    *sum = hsum(all);
}

// State `part` of one split; rows that see nothing of it have the maximum -inf.
template <bool kBf16>
void latent_split(const LatentCall& c, LatentBuffers& b, const LatentTask& t, int64_t split, int64_t base) {
    const int64_t rows = (t.last - t.first) * t.heads, rank = c.cache.rank;
    const int64_t low = split * kLatentSplit, end = low + kLatentSplit, last = c.seen(base + t.last - 1);
    const LatentSpan span{low, c.first(base + t.first), last < end ? last : end};
    float *most = b.part + kLatentRows * rank, *sum = most + kLatentRows;
    latent_scores<kBf16>(c, b, t, rows, span);
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t position = base + t.first + r / t.heads, from = c.first(position), to = c.seen(position);
        const int64_t hidden = from > low ? from - low : 0, visible = (to < span.high ? to : span.high) - low;
        if (visible > hidden) {
            latent_softmax<kBf16>(c, b, r, hidden, visible, span.high - low, most + r, sum + r);
        } else {
            most[r] = -INFINITY;
            std::memset(b.p + r * kLatentSplit * c.cache.width(), 0, static_cast<size_t>(kLatentSplit * c.cache.width()));
        }
    }
    latent_values<kBf16>(c, b, t, rows, span);
}

// total = total merged with part.
inline void merge_latents(const LatentCall& c, float* total, const float* part, int64_t rows) {
    const int64_t rank = c.cache.rank;
    float *most = total + kLatentRows * rank, *sum = most + kLatentRows;
    const float *other = part + kLatentRows * rank, *other_sum = other + kLatentRows;
    for (int64_t r = 0; r < rows; ++r) {
        if (other[r] == -INFINITY) continue;
        const float top = most[r] > other[r] ? most[r] : other[r];
        const F a = exp2(set1(most[r] - top)), d = exp2(set1(other[r] - top));
        float scale[16], join[16];
        store(scale, a);
        store(join, d);
        sum[r] = sum[r] * scale[0] + other_sum[r] * join[0];
        most[r] = top;
        for (int64_t i = 0; i < rank; i += 16)
            store(total + r * rank + i, fma(load(total + r * rank + i), a, mul(load(part + r * rank + i), d)));
    }
}

inline void clear_latents(const LatentCall& c, float* total) {
    std::memset(total, 0, static_cast<size_t>(c.state()) * 4);
    for (int64_t r = 0; r < kLatentRows; ++r) total[kLatentRows * c.cache.rank + r] = -INFINITY;
}

inline void write_latents(const LatentCall& c, const LatentTask& t, const float* total) {
    const int64_t rank = c.cache.rank;
    for (int64_t r = 0; r < (t.last - t.first) * t.heads; ++r) {
        const int64_t token = c.cu_q[t.sequence] + t.first + r / t.heads, head = t.head + r % t.heads;
        const float most = total[kLatentRows * rank + r], sum = total[kLatentRows * (rank + 1) + r];
        const F inverse = c.sinks ? with_sink(c.sinks[head] * kLog2E, most, sum) : set1(1.0f / sum);
        for (int64_t i = 0; i < rank; i += 16)
            store(c.out + (token * c.heads + head) * rank + i, mul(load(total + r * rank + i), inverse));
    }
}

template <bool kBf16>
void latent_task(const LatentCall& c, LatentBuffers& b, const LatentTask& t) {
    const int64_t begin = c.cu_q[t.sequence], base = c.context[t.sequence] - (c.cu_q[t.sequence + 1] - begin);
    const int64_t rank = c.cache.rank, rope = c.cache.rope, rows = (t.last - t.first) * t.heads;
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = (begin + t.first + r / t.heads) * c.heads + t.head + r % t.heads;
        char* q = b.q + r * c.words() * 4;
        store_as<kBf16>(q, c.latent + at * rank, rank);
        store_as<kBf16>(q + rank * c.cache.width(), c.q + at * c.width + c.width - rope, rope);
    }
    clear_latents(c, b.total);
    for (int64_t split = t.split_begin; split < t.split_end; ++split) {
        if (t.partial) b.part = t.partial + (split - t.split_begin) * c.state();
        latent_split<kBf16>(c, b, t, split, base);
        if (!t.partial) merge_latents(c, b.total, b.part, rows);
    }
    if (!t.partial) write_latents(c, t, b.total);
}

void check_latent_batch(const LatentCall& c, int64_t rows) {
    check_latent(c.cache);
    if (c.heads < 1 || c.width < c.cache.rope || !(c.factor > 0.0f)) fail("latent_attention: needs heads and a positive scale");
    if (c.cu_q[0] != 0 || c.cu_q[c.sequences] != rows) fail("latent_attention: cu_q must run from 0 to the number of rows");
    for (int64_t s = 0; s < c.sequences; ++s) {
        const int64_t count = int64_t{c.cu_q[s + 1]} - c.cu_q[s], context = c.context[s];
        if (count < 0) fail("latent_attention: cu_q must ascend");
        if (count == 0) continue;
        if (context < count) fail("latent_attention: a context is shorter than the rows it includes");
        if (context > c.max_blocks * c.cache.block_size) fail("latent_attention: a context is longer than its block table");
        for (int64_t i = c.first(context - count) / c.cache.block_size; i * c.cache.block_size < context; ++i) {
            const int64_t block = c.tables[s * c.max_blocks + i];
            if (block < 0 || block >= c.cache.blocks) fail("latent_attention: a block lies outside the cache");
        }
        for (int64_t t = 0; c.chosen && t < count; ++t) {
            const int32_t* chosen = c.chosen + (c.cu_q[s] + t) * c.most;
            const int64_t position = context - count + t;
            for (int64_t i = 0; i < c.seen(position); ++i)
                if (chosen[i] < 0 || chosen[i] > position) fail("latent_attention: a row sees a token that is not before it");
        }
    }
}

template <class Visit>
void for_latent_tasks(const LatentCall& c, const Visit& visit) {
    const int64_t together = c.heads < kLatentRows ? c.heads : kLatentRows, tokens = c.chosen || c.recent ? 1 : kLatentRows / together;
    for (int64_t s = 0; s < c.sequences; ++s) {
        const int64_t count = c.cu_q[s + 1] - c.cu_q[s], base = c.context[s] - count;
        for (int64_t first = 0; first < count; first += tokens) {
            const int64_t last = first + tokens < count ? first + tokens : count;
            for (int64_t head = 0; head < c.heads; head += together) {
                const int64_t heads = c.heads - head < together ? c.heads - head : together;
                visit(LatentTask{s, first, last, head, heads, c.first(base + first) / kLatentSplit, (c.seen(base + last - 1) + kLatentSplit - 1) / kLatentSplit, nullptr});
            }
        }
    }
}

LatentBuffers latent_buffers(const LatentCall& c, Pieces& pieces) {
    LatentBuffers b{};
    b.total = pieces.take<float>(c.state());
    b.part = pieces.take<float>(c.state());
    b.scores = pieces.take<float>(kLatentRows * kLatentSplit);
    b.q = pieces.take<char>(kLatentRows * c.words() * 4);
    b.p = pieces.take<char>(kLatentRows * kLatentSplit * 4);
    b.tile = pieces.take<char>(kLatentTile * (c.cache.rank + c.cache.rope) * 4 + 64);
    b.zeros = pieces.take<char>((c.cache.rank + c.cache.rope) * 4);
    return b;
}

// Few tasks: every split is a task of its own, merged afterwards in the order in which one task would have merged.
template <bool kBf16>
void run_latent_attention(const LatentCall& c) {
    int64_t tasks = 0, splits = 0;
    for_latent_tasks(c, [&](const LatentTask& t) { ++tasks, splits += t.split_end - t.split_begin; });
    const int64_t threads = thread_count();
    const bool apart = tasks < 8 * threads && splits > tasks;
    Pieces size{nullptr};
    (void)latent_buffers(c, size);
    const int64_t partial_bytes = apart ? splits * c.state() * 4 : 0;
    auto* memory = static_cast<char*>(scratch(Scratch::kAttention, static_cast<size_t>(size.used * threads + partial_bytes)));
    auto* list = static_cast<LatentTask*>(scratch(Scratch::kTasks, static_cast<size_t>(tasks + splits) * sizeof(LatentTask)));
    LatentTask* parts = list + tasks;
    auto* partial = reinterpret_cast<float*>(memory + size.used * threads);
    int64_t n = 0, m = 0;
    for_latent_tasks(c, [&](LatentTask t) {
        t.partial = apart ? partial : nullptr;
        list[n++] = t;
        for (int64_t split = t.split_begin; apart && split < t.split_end; ++split, partial += c.state())
            parts[m++] = {t.sequence, t.first, t.last, t.head, t.heads, split, split + 1, partial};
    });
    const LatentTask* work = apart ? parts : list;
    parallel_for(apart ? m : n, [&](int64_t i, int thread) {
        Pieces pieces{memory + thread * size.used};
        LatentBuffers b = latent_buffers(c, pieces);
        std::memset(b.zeros, 0, static_cast<size_t>(c.cache.rank + c.cache.rope) * 4);
        latent_task<kBf16>(c, b, work[i]);
    });
    if (!apart) return;
    parallel_for(n, [&](int64_t i, int thread) {
        Pieces pieces{memory + thread * size.used};
        const LatentBuffers b = latent_buffers(c, pieces);
        const LatentTask& t = list[i];
        clear_latents(c, b.total);
        for (int64_t split = t.split_begin; split < t.split_end; ++split)
            merge_latents(c, b.total, t.partial + (split - t.split_begin) * c.state(), (t.last - t.first) * t.heads);
        write_latents(c, t, b.total);
    });
}

// Of `spec` the heads, their scale, window and sinks: latents have no caps or biases, and their drafts do not branch.
void latent_attention(float* out, const float* latent, const float* q, const LatentCache* cache, const BatchDescriptor* batch,
                      const AttentionDescriptor* spec, Optional<const int32_t> chosen, int64_t rows, int64_t width, int64_t most) {
    const LatentCall c{*batch, out, latent, q, *cache, spec->heads, width, spec->scale * kLog2E, chosen.ptr, most, spec->sinks, spec->window, spec->pool};
    if (c.chosen && (c.pool < 1 || most < 2 * c.pool - 1)) fail("latent_attention: chosen tokens need to be some");
    if (c.chosen && c.window) fail("latent_attention: chosen tokens have no window");
    check_latent_batch(c, rows);
    if (c.cache.bf16) run_latent_attention<true>(c);
    else run_latent_attention<false>(c);
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
