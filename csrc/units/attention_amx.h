// A tile of 64 keys in tile registers: 16 rows at a time, whatever number of them is in use, so that a row's sums do not depend
// on the batch. Registers 0-3 hold sums, 4 the rows (queries or probabilities), 5-7 keys or values.
#pragma once

#include "amx.h"
#include "attention_pages.h"
#include "attention_softmax.h"
#include "attention_tiles.h"

namespace quire::QUIRE_UNIT {
namespace {

constexpr int64_t kPassRows = 16;

TileShapes attention_tiles() {
    TileShapes shapes;
    for (int i = 0; i < 8; ++i) shapes.set(i, 16, 64);
    return shapes;
}

// scores[r][16 j + lane] = q[r] . k[token 16 j + lane] for 16 rows and `groups` groups of 16 tokens. q [16] rows of 32 `steps`
// numbers, keys[j] [16 steps][16 tokens][2].
QUIRE_INLINE void score_pass(float* scores, const char* q, const char* const* keys, int64_t groups, int64_t steps) {
    const int64_t q_stride = steps * 64, stride = kTile * 4;
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    for (int64_t i = 0; i < steps; ++i) {
        tile_load<4>(q + i * 64, q_stride);
        tile_load<5>(keys[0] + i * 1024, 64);
        tile_dot_bf16<0, 4, 5>();
        if (groups > 1) {
            tile_load<6>(keys[1] + i * 1024, 64);
            tile_dot_bf16<1, 4, 6>();
        }
        if (groups > 2) {
            tile_load<7>(keys[2] + i * 1024, 64);
            tile_dot_bf16<2, 4, 7>();
        }
        if (groups > 3) {
            tile_load<5>(keys[3] + i * 1024, 64);
            tile_dot_bf16<3, 4, 5>();
        }
    }
    tile_store<0>(scores, stride);
    if (groups > 1) tile_store<1>(scores + 16, stride);
    if (groups > 2) tile_store<2>(scores + 32, stride);
    if (groups > 3) tile_store<3>(scores + 48, stride);
}

template <int kTile>
QUIRE_INLINE void begin_sums(const char* from, int64_t stride, bool fresh) {
    if (fresh) tile_zero<kTile>();
    else tile_load<kTile>(from, stride);
}

// `kTiles` times 16 columns of what value_pass computes.
template <int kTiles>
QUIRE_INLINE void value_columns(char* out, const char* p, const char* values, int64_t stride, int64_t halves, bool fresh) {
    begin_sums<0>(out, stride, fresh);
    if constexpr (kTiles > 1) begin_sums<1>(out + 64, stride, fresh);
    if constexpr (kTiles > 2) begin_sums<2>(out + 128, stride, fresh);
    if constexpr (kTiles > 3) begin_sums<3>(out + 192, stride, fresh);
    for (int64_t i = 0; i < halves; ++i) {
        const char* v = values + i * 16 * stride;
        tile_load<4>(p + i * 64, kTile * 2);
        tile_load<5>(v, stride);
        tile_dot_bf16<0, 4, 5>();
        if constexpr (kTiles > 1) {
            tile_load<6>(v + 64, stride);
            tile_dot_bf16<1, 4, 6>();
        }
        if constexpr (kTiles > 2) {
            tile_load<7>(v + 128, stride);
            tile_dot_bf16<2, 4, 7>();
        }
        if constexpr (kTiles > 3) {
            tile_load<5>(v + 192, stride);
            tile_dot_bf16<3, 4, 5>();
        }
    }
    tile_store<0>(out, stride);
    if constexpr (kTiles > 1) tile_store<1>(out + 64, stride);
    if constexpr (kTiles > 2) tile_store<2>(out + 128, stride);
    if constexpr (kTiles > 3) tile_store<3>(out + 192, stride);
}

// acc[r] += p[r] . v for 16 rows and `d` columns, rounded up to 16. acc [16][padded], taken for 0 when `fresh`; p [16][64], values
// [32 pairs of tokens][padded][2], of which the first `halves` times 16 pairs count.
QUIRE_INLINE void value_pass(float* acc, const char* p, const char* values, int64_t d, int64_t padded, int64_t halves, bool fresh) {
    auto* out = reinterpret_cast<char*>(acc);
    const int64_t stride = padded * 4;
    int64_t tiles = (d + 15) / 16;
    for (; tiles >= 4; tiles -= 4, out += 256, values += 256) value_columns<4>(out, p, values, stride, halves, fresh);
    if (tiles == 3) value_columns<3>(out, p, values, stride, halves, fresh);
    if (tiles == 2) value_columns<2>(out, p, values, stride, halves, fresh);
    if (tiles == 1) value_columns<1>(out, p, values, stride, halves, fresh);
}

// Whether 16 rows see all of the tile that begins at `start`, and their scores need a factor only: most passes over a prompt.
QUIRE_INLINE bool sees_whole(const AttentionCall& c, const AttentionBuffers& b, int64_t r, int64_t start) {
    if (c.cache.scaled() || c.adjusted()) return false;
    const __m512i from = _mm512_set1_epi64(start), to = _mm512_set1_epi64(start + kTile);
    const auto seen = [&](int64_t i) {
        return _mm512_cmple_epi64_mask(_mm512_loadu_si512(b.from + i), from) & _mm512_cmple_epi64_mask(to, _mm512_loadu_si512(b.to + i));
    };
    return (seen(r) & seen(r + 8)) == 0xff;
}

// `softmax_rows` of 16 rows from `first` on that see a whole tile, bit for bit: powers of less than kLeastPower are 0 without being
// raised to it (`scale2` of this unit sees to that). A row's maximum is looked for only where a
// comparison of vectors finds that it grew by more than `kSlack`.
QUIRE_INLINE void softmax_whole(const AttentionCall& c, AttentionBuffers& b, int64_t first) {
    const F factor = set1(c.factor());
    float* most = b.split.most + first;
    alignas(64) float change[16] = {};
    bool raised = false;
    for (int64_t i = 0; i < kPassRows; ++i) {
        const float* at = b.scores + i * kTile;
        const F top = vmax(vmax(load(at + 48), load(at + 32)), vmax(load(at + 16), load(at)));
        if (!_mm512_cmp_ps_mask(mul(top, factor).v, set1(most[i] + kSlack).v, _CMP_GT_OQ)) continue;
        const float before = most[i];
        most[i] = hmax(top) * c.factor();
        change[i] = before - most[i];
        raised = true;
    }
    store(b.rescale + first, raised ? exp2_below<false>(load(change)) : set1(1.0f));
    for (int64_t i = 0; i < kPassRows; ++i) {
        const float* scores = b.scores + i * kTile;
        char* p = b.p + i * kTile * 2;
        const F less = set1(-most[i]);
        F sum = mul(load(b.lanes + (first + i) * 16), set1(b.rescale[first + i]));
#pragma GCC unroll 2
        for (int64_t j = 0; j < kTile; j += 32) {
            const F low = exp2_within<true>(fma(load(scores + j), factor, less)), high = exp2_within<true>(fma(load(scores + j + 16), factor, less));
            sum = add(add(sum, low), high);
            _mm512_store_si512(p + j * 2, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.v, low.v)));
        }
        store(b.lanes + (first + i) * 16, sum);
    }
}

// Probabilities of n <= 16 rows, of which some see `visible` keys of a tile and none sees more.
QUIRE_INLINE void softmax_some(const AttentionCall& c, AttentionBuffers& b, int64_t first, int64_t n, int64_t start, int64_t visible) {
    if (c.cache.scaled()) scale_scores(b, first, n);
    if (c.adjusted())
        for (int64_t r = first; r < first + n; ++r) adjust_scores(c, b, r, start);
    softmax_rows<true>(c, b, first, n, start, (visible + 15) / 16 * 16);
    std::memset(b.p + n * kTile * 2, 0, static_cast<size_t>((kPassRows - n) * kTile * 2));
}

// n <= 16 rows against a tile. Rows that see none of it keep their state; groups of keys that no row sees are left out,
// which changes no sum.
QUIRE_INLINE void run_pass(const AttentionCall& c, AttentionBuffers& b, int64_t first, int64_t n, int64_t start) {
    const bool whole = n == kPassRows && sees_whole(c, b, first, start);
    int64_t visible = whole ? kTile : 0;
    for (int64_t r = first; !whole && r < first + n; ++r) visible = b.to[r] - start > visible ? b.to[r] - start : visible;
    if (visible <= 0) return;
    visible = visible < kTile ? visible : kTile;
    const int64_t groups = (visible + 15) / 16;
    float* acc = b.split.acc + first * c.padded;
    b.low = first;
    score_pass(b.scores, b.q + first * c.padded * 2, b.tile.keys, groups, c.padded / 32);
    if (whole) softmax_whole(c, b, first);
    else softmax_some(c, b, first, n, start, visible);
    const bool fresh = b.fresh == start;
    for (int64_t i = 0; !fresh && i < n; ++i) {
        if (b.rescale[first + i] == 1.0f) continue;
        const F change = set1(b.rescale[first + i]);
        for (int64_t j = 0; j < c.columns(); j += 16) store(acc + i * c.padded + j, mul(load(acc + i * c.padded + j), change));
    }
    value_pass(acc, b.p, b.values, c.cache.d, c.padded, (groups + 1) / 2, fresh);
}

void run_passes(const AttentionCall& c, AttentionBuffers& b, int64_t first, int64_t last, int64_t start) {
    for (int64_t r = first; r < last; r += kPassRows) run_pass(c, b, r, last - r < kPassRows ? last - r : kPassRows, start);
}

// Values of a tile side by side, with zeros where nothing was written; prefetches the keys and values of the next tile, in the
// second level: a whole tile at once is more than the first level can have under way (measured: 16 % faster).
void gather_values(const AttentionCall& c, const AttentionBuffers& b, const Pages& pages, int64_t start) {
    const int64_t step = c.cache.block_size < kTile ? c.cache.block_size : kTile, row = c.padded * 4;
    for (int64_t t = 0; t < kTile; t += step) {
        const int64_t at = pages.at(start + t), next = pages.at(start + t + kTile), bytes = step / 2 * row;
        char* to = b.values + t / 2 * row;
        const char *from = at < 0 ? nullptr : c.cache.values + at, *ahead = next < 0 ? nullptr : c.cache.keys + next, *also = c.cache.values + (next < 0 ? 0 : next);
        for (int64_t i = 0; i < bytes; i += 64) {
            if (ahead) {
                prefetch_far(ahead + i);
                prefetch_far(also + i);
            }
            if (from) {
                _mm512_store_si512(to + i, _mm512_loadu_si512(from + i));
            } else {
                _mm512_store_si512(to + i, _mm512_setzero_si512());
            }
        }
    }
}

// Tokens behind the last one hold garbage, which must not be multiplied, not even by 0.
void clear_behind(const AttentionCall& c, const AttentionBuffers& b, const Pages& pages, int64_t start) {
    const int64_t left = pages.context - start;
    if (left >= kTile) return;
    const int64_t first = (left + 1) / 2;
    auto* words = reinterpret_cast<uint32_t*>(b.values);
    if (left & 1)
        for (int64_t i = 0; i < c.padded; ++i) words[left / 2 * c.padded + i] &= 0xffff;
    std::memset(words + first * c.padded, 0, static_cast<size_t>((kTile / 2 - first) * c.padded * 4));
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
