// The matrix products of a tile of 64 keys in tile registers: 16 rows at a time, whatever number of them is in use, so that
// a row's sums do not depend on the batch. Registers 0-3 hold sums, 4 the rows (queries or probabilities), 5-7 keys or values.
#pragma once

constexpr int64_t kPassRows = 16;

TileShapes attention_tiles() {
    TileShapes shapes;
    for (int i = 0; i < 8; ++i) shapes.set(i, 16, 64);
    return shapes;
}

// GCC's intrinsics do not say that they read memory: without this, stores could be moved behind them.
QUIRE_INLINE void stores_done() { asm volatile("" : : : "memory"); }

// scores[r][16 j + lane] = q[r] . k[token 16 j + lane] for 16 rows and `groups` groups of 16 tokens. q [16] rows of 32 `steps`
// numbers, keys[j] [16 steps][16 tokens][2].
QUIRE_INLINE void score_pass(float* scores, const char* q, const char* const* keys, int64_t groups, int64_t steps) {
    const int64_t q_stride = steps * 64, stride = kTile * 4;
    stores_done();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < steps; ++i) {
        _tile_loadd(4, q + i * 64, q_stride);
        _tile_loadd(5, keys[0] + i * 1024, 64);
        _tile_dpbf16ps(0, 4, 5);
        if (groups > 1) {
            _tile_loadd(6, keys[1] + i * 1024, 64);
            _tile_dpbf16ps(1, 4, 6);
        }
        if (groups > 2) {
            _tile_loadd(7, keys[2] + i * 1024, 64);
            _tile_dpbf16ps(2, 4, 7);
        }
        if (groups > 3) {
            _tile_loadd(5, keys[3] + i * 1024, 64);
            _tile_dpbf16ps(3, 4, 5);
        }
    }
    _tile_stored(0, scores, stride);
    if (groups > 1) _tile_stored(1, scores + 16, stride);
    if (groups > 2) _tile_stored(2, scores + 32, stride);
    if (groups > 3) _tile_stored(3, scores + 48, stride);
}

// acc[r] += p[r] . v for 16 rows. acc [16][padded], p [16][64], values [32 pairs of tokens][padded][2], of which the first
// `halves` times 16 pairs count; padded a multiple of 32.
QUIRE_INLINE void value_pass(float* acc, const char* p, const char* values, int64_t padded, int64_t halves) {
    const int64_t stride = padded * 4;
    stores_done();
    for (int64_t at = 0; at < stride; at += 256) {
        char* out = reinterpret_cast<char*>(acc) + at;
        const bool four = at + 256 <= stride;
        _tile_loadd(0, out, stride);
        _tile_loadd(1, out + 64, stride);
        if (four) {
            _tile_loadd(2, out + 128, stride);
            _tile_loadd(3, out + 192, stride);
        }
        for (int64_t i = 0; i < halves; ++i) {
            const char* v = values + i * 16 * stride + at;
            _tile_loadd(4, p + i * 64, kTile * 2);
            _tile_loadd(5, v, stride);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, v + 64, stride);
            _tile_dpbf16ps(1, 4, 6);
            if (four) {
                _tile_loadd(7, v + 128, stride);
                _tile_dpbf16ps(2, 4, 7);
                _tile_loadd(5, v + 192, stride);
                _tile_dpbf16ps(3, 4, 5);
            }
        }
        _tile_stored(0, out, stride);
        _tile_stored(1, out + 64, stride);
        if (four) {
            _tile_stored(2, out + 128, stride);
            _tile_stored(3, out + 192, stride);
        }
    }
}

// n <= 16 rows against a tile. Rows that see none of it keep their state; groups of keys that no row sees are left out,
// which changes no sum.
QUIRE_INLINE void run_pass(const AttentionCall& c, AttentionBuffers& b, int64_t r, int64_t n, int64_t start) {
    int64_t visible = 0;
    for (int64_t i = r; i < r + n; ++i) visible = b.to[i] - start > visible ? b.to[i] - start : visible;
    if (visible <= 0) return;
    const int64_t groups = visible >= kTile ? kTile / 16 : (visible + 15) / 16;
    float* acc = b.split.acc + r * c.padded;
    char* p = b.p + r * kTile * 2;
    score_pass(b.scores + r * kTile, b.q + r * c.padded * 2, b.tile.keys, groups, c.padded / 32);
    if (c.cache.scaled()) scale_scores(b, r, n);
    if (c.adjusted())
        for (int64_t i = r; i < r + n; ++i) adjust_scores(c, b, i, start);
    softmax_rows<true>(c, b, r, n, start, groups * 16);
    std::memset(p + n * kTile * 2, 0, static_cast<size_t>((kPassRows - n) * kTile * 2));
    for (int64_t i = 0; i < n; ++i) {
        if (b.rescale[r + i] == 1.0f) continue;
        const F change = set1(b.rescale[r + i]);
        for (int64_t j = 0; j < c.padded; j += 16) store(acc + i * c.padded + j, mul(load(acc + i * c.padded + j), change));
    }
    value_pass(acc, p, b.values, c.padded, (groups + 1) / 2);
}

void run_passes(const AttentionCall& c, AttentionBuffers& b, int64_t first, int64_t last, int64_t start) {
    for (int64_t r = first; r < last; r += kPassRows) run_pass(c, b, r, last - r < kPassRows ? last - r : kPassRows, start);
}

// Values of a tile side by side, with zeros where nothing was written; asks for the keys and values of the next tile, in the
// second level: a whole tile at once is more than the first level can have under way (measured: 16 % faster).
void gather_values(const AttentionCall& c, const AttentionBuffers& b, const Pages& pages, int64_t start) {
    const int64_t step = c.cache.block_size < kTile ? c.cache.block_size : kTile, row = c.padded * 4;
    for (int64_t t = 0; t < kTile; t += step) {
        const int64_t at = pages.at(start + t), next = pages.at(start + t + kTile), bytes = step / 2 * row;
        char* to = b.values + t / 2 * row;
        const char *from = at < 0 ? nullptr : c.values + at, *ask = next < 0 ? nullptr : c.keys + next, *also = c.values + (next < 0 ? 0 : next);
        for (int64_t i = 0; i < bytes; i += 64) {
            if (ask) {
                prefetch_far(ask + i);
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
