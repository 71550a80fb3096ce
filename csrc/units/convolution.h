// Causal convolutions over tokens, each channel alone. The rows that they read lie in a paged cache, a row in two halves: the first is where
// keys lie otherwise (RowLayout of src/quire/ops/convolution.py).
#pragma once

#include "cache.h"
#include "elementwise.h"

namespace quire::QUIRE_UNIT {
namespace {

constexpr int64_t kMostTaps = 16;
constexpr int64_t kConvolutionRows = 32, kConvolutionColumns = 1024;  // of a task

struct ConvolutionCall : BatchDescriptor {
    float* out;
    const float* x;
    const int64_t* slots;
    CacheShape cache;
    ConvolutionDescriptor by;
    int64_t rows;
    int64_t stride() const { return by.gated ? 3 * by.width : by.width; }
    // Position of row r of sequence s, one before its first row here too.
    int64_t position(int64_t s, int64_t r) const { return int64_t{context[s]} - cu_q[s + 1] + r; }
};

// The row `back` rows before row r in what it continues: a row of a draft that branches has its ancestors' before it.
inline int64_t row_before(int64_t r, uint64_t ancestors, int64_t back) {
    if (!ancestors) return r - back;
    const auto highest = [](uint64_t mask) { return int64_t{63} - __builtin_clzll(mask); };
    const int64_t root = r - highest(ancestors);
    for (ancestors ^= uint64_t{1} << highest(ancestors); ancestors && back > 1; --back) ancestors ^= uint64_t{1} << highest(ancestors);
    return ancestors ? root + highest(ancestors) : root - back;
}

// Numbers as the cache keeps them, which are stored unless `to` is null.
template <int64_t kFormat>
QUIRE_INLINE F rounded_to(char* to, F u, int n) {
    if constexpr (kFormat == kFormatF32) {
        if (to) store_lanes(reinterpret_cast<float*>(to), u, n);
        return u;
    } else {
        uint16_t halves[16];
        if constexpr (kFormat == kFormatBf16) bf16_store(halves, u);
        else f16_store(halves, u);
        if (to) std::memcpy(to, halves, static_cast<size_t>(n) * 2);
        return kFormat == kFormatBf16 ? bf16_load(halves) : f16_load(halves);
    }
}

// Columns from .. from + count, which lie in one half, of some rows.
template <int64_t kFormat>
struct ConvolutionTask {
    const ConvolutionCall& c;
    int64_t from, count;
    float memory[kMostTaps][kConvolutionColumns];
    float* before[kMostTaps];  // the rows before the one at hand, the oldest first

    ConvolutionTask(const ConvolutionCall& call, int64_t column, int64_t columns) : c(call), from(column), count(columns) {
        for (int64_t k = 0; k < kMostTaps; ++k) before[k] = memory[k];
    }

    // Where the cache has the columns of the row at `offset` of `block`.
    char* at_cache(int64_t block, int64_t offset) const {
        const bool second = from >= c.cache.d;
        char* half = second ? c.cache.values : c.cache.keys;
        return half + block * c.cache.step + (offset * c.cache.d + from - (second ? c.cache.d : 0)) * c.cache.width();
    }

    inline __attribute__((always_inline)) F given(int64_t r, int64_t i, int n) const {
        const float* row = c.x + r * c.stride() + from + i;
        const F gate = load_lanes(row, n);
        return c.by.gated ? mul(gate, load_lanes(row + 2 * c.by.width, n)) : gate;
    }

    // Row r of sequence s, which may lie before its first row here.
    void recall(float* to, int64_t s, int64_t r) const {
        if (r >= c.cu_q[s]) {
            for_lanes(count, [&](int64_t i, int n) { store_lanes(to + i, rounded_to<kFormat>(nullptr, given(r, i, n), n), n); });
            return;
        }
        const int64_t position = c.position(s, r);
        if (position < 0) {
            std::memset(to, 0, static_cast<size_t>(count) * 4);
            return;
        }
        const char* row = at_cache(c.tables[s * c.max_blocks + position / c.cache.block_size], position % c.cache.block_size);
        if constexpr (kFormat == kFormatF32) {
            std::memcpy(to, row, static_cast<size_t>(count) * 4);
        } else {
            for_lanes(count, [&](int64_t i, int n) {
                uint16_t halves[16] = {};
                std::memcpy(halves, row + i * 2, static_cast<size_t>(n) * 2);
                store_lanes(to + i, kFormat == kFormatBf16 ? bf16_load(halves) : f16_load(halves), n);
            });
        }
    }

    // Row r, whose past is in `before`, of which it takes the place of the oldest.
    void convolve(int64_t r) {
        const int64_t last = c.by.taps - 1, n = c.by.width, slot = c.slots[r];
        char* kept = slot < 0 ? nullptr : at_cache(slot / c.cache.block_size, slot % c.cache.block_size);
        for_lanes(count, [&](int64_t i, int lanes) {
            const float* weight = c.by.weight + from + i;
            F sum = c.by.bias ? load_lanes(c.by.bias + from + i, lanes) : set1(0.0f);
            for (int64_t k = 0; k < last; ++k) sum = fma(load_lanes(weight + k * n, lanes), load_lanes(before[k] + i, lanes), sum);
            const F u = rounded_to<kFormat>(kept ? kept + i * c.cache.width() : nullptr, given(r, i, lanes), lanes);
            sum = fma(load_lanes(weight + last * n, lanes), u, sum);
            store_lanes(before[0] + i, u, lanes);
            if (c.by.silu) sum = activate<kSilu>(sum);
            if (c.by.gated) sum = mul(sum, load_lanes(c.x + r * c.stride() + n + from + i, lanes));
            store_lanes(c.out + r * n + from + i, sum, lanes);
        });
        float* latest = before[0];
        for (int64_t k = 1; k < last; ++k) before[k - 1] = before[k];
        if (last > 0) before[last - 1] = latest;
    }

    void run(int64_t first, int64_t end) {
        int64_t s = 0;
        for (int64_t high = c.sequences; s < high;) {
            const int64_t middle = (s + high) / 2;
            if (c.cu_q[middle + 1] <= first) s = middle + 1;
            else high = middle;
        }
        bool known = false;  // what is before the row
        for (int64_t r = first; r < end; ++r) {
            for (; s < c.sequences && r >= c.cu_q[s + 1]; known = false) ++s;
            if (s >= c.sequences) {  // rows that fill a step
                std::memset(c.out + r * c.by.width + from, 0, static_cast<size_t>(count) * 4);
                continue;
            }
            const uint64_t ancestors = c.tree ? c.tree[r] : 0;
            for (int64_t k = 0; (!known || ancestors) && k + 1 < c.by.taps; ++k)
                recall(before[k], s, row_before(r, ancestors, c.by.taps - 1 - k));
            convolve(r);
            known = !ancestors;
        }
    }
};

void check_convolution(const ConvolutionCall& c) {
    const CacheShape& cache = c.cache;
    if (c.by.taps < 1 || c.by.taps > kMostTaps || cache.kv_heads != 1 || cache.d < 1 || c.by.width != 2 * cache.d)
        fail("causal_conv: the cache is not of the convolution's rows");
    if (cache.format < 0 || cache.format > kFormatF16) fail("causal_conv: rows are kept as f32, bf16 or f16");
    if (cache.block_size < 1 || cache.blocks < 1 || cache.step < cache.numbers()) fail("causal_conv: blocks overlap");
    for (int64_t r = 0; r < c.rows; ++r)
        if (c.slots[r] < -1 || c.slots[r] >= cache.blocks * cache.block_size) fail("causal_conv: a slot lies outside the cache");
    if (c.sequences < 0 || c.cu_q[0] != 0 || c.cu_q[c.sequences] > c.rows) fail("causal_conv: the sequences do not fit the rows");
    for (int64_t s = 0; s < c.sequences; ++s) {
        const int64_t start = c.position(s, c.cu_q[s]);
        if (c.cu_q[s + 1] < c.cu_q[s]) fail("causal_conv: the sequences do not fit the rows");
        if (c.cu_q[s + 1] == c.cu_q[s]) continue;
        if (start < 0) fail("causal_conv: a sequence has more rows than tokens");
        for (int64_t at = std::max<int64_t>(start - c.by.taps + 1, 0); at < start; ++at) {
            const int64_t index = at / cache.block_size;
            if (index >= c.max_blocks) fail("causal_conv: a block table is too short");
            const int64_t block = c.tables[s * c.max_blocks + index];
            if (block < 0 || block >= cache.blocks) fail("causal_conv: a block lies outside the cache");
        }
    }
}

// x [rows, width or 3 width] -> out [rows, width].
void causal_conv(float* out, const float* x, const int64_t* slots, const CacheShape* cache, const BatchDescriptor* batch,
                 const ConvolutionDescriptor* by, int64_t rows) {
    const ConvolutionCall c{*batch, out, x, slots, *cache, *by, rows};
    check_convolution(c);
    const int64_t pieces = (c.cache.d + kConvolutionColumns - 1) / kConvolutionColumns;  // of a half
    const int64_t each = rows < kConvolutionRows ? rows : kConvolutionRows;
    const auto run = [&]<int64_t kFormat>(int64_t at) {
        const int64_t piece = at % (2 * pieces), half = piece / pieces, column = piece % pieces * kConvolutionColumns;
        const int64_t first = at / (2 * pieces) * each;
        ConvolutionTask<kFormat>(c, half * c.cache.d + column, std::min(kConvolutionColumns, c.cache.d - column))
            .run(first, std::min(first + each, rows));
    };
    parallel_ranges((rows + each - 1) / each * 2 * pieces, 4 * each * std::min(kConvolutionColumns, c.cache.d), [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) {
            switch (c.cache.format) {
                case kFormatF32: run.template operator()<kFormatF32>(at); break;
                case kFormatBf16: run.template operator()<kFormatBf16>(at); break;
                default: run.template operator()<kFormatF16>(at);
            }
        }
    });
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
