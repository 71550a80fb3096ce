// Softmax(q k^T) v over paged keys and values, tiled, for any mixture of prefill chunks and decodes (Dao et al. 2022; the
// split over keys follows Flash-Decoding, 2023).
//
// A row's numbers depend on the row alone: keys are visited in tiles of 64 aligned to position 0, tiles are gathered in
// splits of 512 with their own running maximum, and splits are merged in ascending order, whether one task or many computed
// them. A tile a row cannot see leaves its state bit for bit unchanged (rescale by 1, add 0 times finite values), so values
// that were never written are never multiplied: the last pair is masked and blocks outside the range read zeros.
#pragma once

constexpr int64_t kTile = 64;
constexpr int64_t kSplit = 512;
constexpr int64_t kQueryRows = 32;  // rows (tokens x heads of a group) that share a pass over the keys

struct AttentionCall {
    float* out;
    const float* qkv;
    const char *keys, *values;
    const int32_t *cu_q, *context, *tables;
    int64_t heads, group, max_blocks, window;
    float scale;  // times log2(e)
    CacheShape cache;
    int64_t padded;  // head_dim rounded up to 16
};

struct AttentionTask {
    int64_t sequence, head, first, last;  // rows first..last of the sequence
    int64_t split_begin, split_end;
    float* partial;  // where each split leaves its state, or null: merge here
};

// The state of `rows` rows over some range of keys: maximum, sum and unnormalized output.
struct State {
    float *most, *sum, *acc;
    static int64_t floats(int64_t rows, int64_t padded) { return rows * (padded + 2); }
    static State at(float* p, int64_t rows, int64_t padded) { return {p + rows * padded, p + rows * (padded + 1), p}; }
};

// Where the keys (16 tokens each) and values (a pair or one token each) of a tile lie.
struct Located {
    const char* keys[kTile / 16];
    const char* values[kTile];
};

// Memory of one thread.
struct AttentionBuffers {
    State split, total;
    float *lanes, *scores, *rescale;  // [rows][16], [rows][64], [rows]
    char *q, *p;                      // [rows][padded], [rows][64] in the cache's type
    char *keys, *values, *zeros;      // copies of a tile for layouts the kernels cannot read in place
    Located tile, next;
    int64_t *from, *to;  // first and past-the-last visible position of each row
};

QUIRE_INLINE F broadcast_float(const char* p) {
    float x;
    std::memcpy(&x, p, 4);
    return set1(x);
}

// scores[r][16 j + lane] = q[r] . k[token 16 j + lane] for R rows and NS groups of 16 tokens. `next` are the keys of the
// following tile, asked for meanwhile (kAsk): pieces of 2 KiB are too short for hardware prefetchers, and asking for a whole
// tile at once stalls.
template <bool kBf16, bool kAsk, int R, int NS>
void score_tile(float* scores, const char* q, int64_t q_stride, const char* const* keys, const char* const* next, int64_t words) {
    F acc[R][NS];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < NS; ++j) acc[r][j] = set1(0.0f);
    for (int64_t i = 0; i < words; ++i) {
        U k[NS];
#pragma GCC unroll 16
        for (int j = 0; j < NS; ++j) {
            k[j] = load_u(keys[j] + i * 64);
            if constexpr (kAsk) prefetch(next[j] + i * 64);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const char* x = q + r * q_stride + i * 4;
            if constexpr (kBf16) {
                const U b = set1_u(word(x));
#pragma GCC unroll 16
                for (int j = 0; j < NS; ++j) acc[r][j] = dot_bf16(acc[r][j], k[j], b);
            } else {
                const F b = broadcast_float(x);
#pragma GCC unroll 16
                for (int j = 0; j < NS; ++j) acc[r][j] = fma(as_f(k[j]), b, acc[r][j]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < NS; ++j) store(scores + r * kTile + j * 16, acc[r][j]);
}

// acc[r] = acc[r] * rescale[r] + p[r] . v for R rows and NV vectors of head dimensions, over `steps` pairs (bf16) or tokens
// (f32); of the last pair only the first token counts when `odd`.
template <bool kBf16, bool kAsk, int R, int NV>
void value_tile(float* out, int64_t out_stride, const float* rescale, const char* p, const char* const* values,
                const char* const* next, int64_t at, int64_t steps, bool odd) {
    constexpr int64_t kRowBytes = kTile * (kBf16 ? 2 : 4);
    F acc[R][NV];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        const F s = set1(rescale[r]);
#pragma GCC unroll 16
        for (int j = 0; j < NV; ++j) acc[r][j] = mul(load(out + r * out_stride + j * 16), s);
    }
    const auto step = [&](int64_t i, bool half) __attribute__((always_inline)) {
        U v[NV];
#pragma GCC unroll 16
        for (int j = 0; j < NV; ++j) {
            v[j] = load_u(values[i] + at + j * 64);
            if constexpr (kAsk) prefetch(next[i] + at + j * 64);
            if (kBf16 && half) v[j] = low_half(v[j]);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const char* x = p + r * kRowBytes + i * 4;
            if constexpr (kBf16) {
                const U b = set1_u(word(x));
#pragma GCC unroll 16
                for (int j = 0; j < NV; ++j) acc[r][j] = dot_bf16(acc[r][j], v[j], b);
            } else {
                const F b = broadcast_float(x);
#pragma GCC unroll 16
                for (int j = 0; j < NV; ++j) acc[r][j] = fma(as_f(v[j]), b, acc[r][j]);
            }
        }
    };
    const int64_t whole = odd ? steps - 1 : steps;
    for (int64_t i = 0; i < whole; ++i) step(i, false);
    if (odd) step(whole, true);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < NV; ++j) store(out + r * out_stride + j * 16, acc[r][j]);
}

template <bool kBf16, bool kAsk, int R = kAttentionRows>
void score_rows(int64_t rows, float* scores, const char* q, int64_t q_stride, const Located& tile, const Located& next, int64_t words) {
    if (rows >= R) {
        for (int j = 0; j < kTile / 16; j += kAttentionTiles)
            score_tile<kBf16, kAsk, R, kAttentionTiles>(scores + j * 16, q, q_stride, tile.keys + j, next.keys + j, words);
        return;
    }
    if constexpr (R > 1) score_rows<kBf16, kAsk, R - 1>(rows, scores, q, q_stride, tile, next, words);
}

template <bool kBf16, bool kAsk, int R, int NV = kAttentionTiles>
void value_columns(int64_t vectors, float* out, int64_t out_stride, const float* rescale, const char* p, const Located& tile,
                   const Located& next, int64_t at, int64_t steps, bool odd) {
    if (vectors >= NV)
        return value_tile<kBf16, kAsk, R, NV>(out, out_stride, rescale, p, tile.values, next.values, at, steps, odd);
    if constexpr (NV > 1) value_columns<kBf16, kAsk, R, NV - 1>(vectors, out, out_stride, rescale, p, tile, next, at, steps, odd);
}

template <bool kBf16, bool kAsk, int R = kAttentionRows>
void value_rows(int64_t rows, float* out, int64_t out_stride, const float* rescale, const char* p, const Located& tile,
                const Located& next, int64_t steps, bool odd) {
    if (rows >= R) {
        for (int64_t j = 0; j < out_stride; j += 16 * kAttentionTiles)
            value_columns<kBf16, kAsk, R>((out_stride - j) / 16, out + j, out_stride, rescale, p, tile, next, j * 4, steps, odd);
        return;
    }
    if constexpr (R > 1) value_rows<kBf16, kAsk, R - 1>(rows, out, out_stride, rescale, p, tile, next, steps, odd);
}

// Where the tokens of one sequence lie. Divisions by the block size are shifts: they would cost more than the arithmetic.
struct Pages {
    const int32_t* table;
    int64_t context, first_block, shift, head, heads, token_bytes;

    // Offset in bytes of `token` from the start of a cache, or -1 for blocks that must not be read.
    int64_t at(int64_t token) const {
        const int64_t block = token >> shift;
        if (token >= context || block < first_block) return -1;
        return (((int64_t{table[block]} * heads + head) << shift) + (token & ((int64_t{1} << shift) - 1))) * token_bytes;
    }
};

// Keys of 16 tokens from blocks of kLanes < 16 tokens, side by side as blocks of 16 have them.
template <int kLanes>
void copy_keys(const AttentionCall& c, const AttentionBuffers& b, const Pages& pages, int64_t start, char* copy) {
    const int64_t words = c.cache.d / c.cache.pair();
    for (int64_t lane = 0; lane < 16; lane += kLanes) {
        const int64_t at = pages.at(start + lane);
        const char* source = at < 0 ? b.zeros : c.keys + at;
        for (int64_t i = 0; i < words; ++i) std::memcpy(copy + i * 64 + lane * 4, source + i * kLanes * 4, kLanes * 4);
    }
}

void copy_key_tile(const AttentionCall& c, const AttentionBuffers& b, const Pages& pages, int64_t start, Located& tile) {
    for (int64_t j = 0; j < kTile / 16; ++j) {
        char* copy = b.keys + j * c.cache.d / c.cache.pair() * 64;
        tile.keys[j] = copy;
        switch (c.cache.lanes()) {
            case 1: copy_keys<1>(c, b, pages, start + 16 * j, copy); break;
            case 2: copy_keys<2>(c, b, pages, start + 16 * j, copy); break;
            case 4: copy_keys<4>(c, b, pages, start + 16 * j, copy); break;
            default: copy_keys<8>(c, b, pages, start + 16 * j, copy);
        }
    }
}

// Values of pairs of tokens (bf16) or single tokens (f32), interleaved and padded to whole vectors.
void copy_value_tile(const AttentionCall& c, const AttentionBuffers& b, const Pages& pages, int64_t start, Located& tile) {
    const CacheShape& s = c.cache;
    const int64_t pair = s.pair();
    const auto find = [&](int64_t token) {
        const int64_t at = pages.at(token);
        return at < 0 ? b.zeros : c.values + at;
    };
    for (int64_t i = 0; i < kTile / pair; ++i) {
        char* copy = b.values + i * c.padded * 4;
        tile.values[i] = copy;
        std::memset(copy + s.d * 4, 0, static_cast<size_t>(c.padded - s.d) * 4);
        const char* first = find(start + i * pair);
        if (s.vpair() == pair) {
            std::memcpy(copy, first, static_cast<size_t>(s.d) * 4);
            continue;
        }
        const char* second = find(start + i * pair + 1);
        for (int64_t x = 0; x < s.d; ++x) {
            std::memcpy(copy + x * 4, first + x * 2, 2);
            std::memcpy(copy + x * 4 + 2, second + x * 2, 2);
        }
    }
}

// Points `tile` at the keys and values that begin at position `start`. Blocks that must not be read are zeros. Layouts
// with fewer than 16 keys side by side, single values or odd head sizes are copied.
void locate_tile(const AttentionCall& c, const AttentionBuffers& b, const Pages& pages, int64_t start, Located& tile) {
    const CacheShape& s = c.cache;
    const int64_t step = s.block_size < kTile ? s.block_size : kTile, pair = s.pair();
    const bool keys_in_place = s.block_size >= 16, values_in_place = s.vpair() == pair && s.d == c.padded;
    if (!keys_in_place) copy_key_tile(c, b, pages, start, tile);
    if (!values_in_place) copy_value_tile(c, b, pages, start, tile);
    if (!keys_in_place && !values_in_place) return;
    for (int64_t t = 0; t < kTile; t += step) {
        const int64_t at = pages.at(start + t);
        const int64_t key_bytes = at < 0 ? 0 : 16 * pages.token_bytes, value_bytes = at < 0 ? 0 : pair * pages.token_bytes;
        const char *keys = at < 0 ? b.zeros : c.keys + at, *values = at < 0 ? b.zeros : c.values + at;
        for (int64_t j = 0; keys_in_place && j < step / 16; ++j) tile.keys[t / 16 + j] = keys + j * key_bytes;
        for (int64_t i = 0; values_in_place && i < step / pair; ++i) tile.values[t / pair + i] = values + i * value_bytes;
    }
}

// Scores of one row and tile to probabilities; updates maximum, lane sums and the factor for what was summed before.
template <bool kBf16>
QUIRE_INLINE void softmax_row(const AttentionCall& c, AttentionBuffers& b, int64_t r, int64_t start) {
    char* p = b.p + r * kTile * (kBf16 ? 2 : 4);
    const auto put = [&](int64_t j, F v) __attribute__((always_inline)) {
        if constexpr (kBf16) {
            bf16_store(reinterpret_cast<uint16_t*>(p) + j * 16, v);
        } else {
            store(reinterpret_cast<float*>(p) + j * 16, v);
        }
    };
    b.rescale[r] = 1.0f;
    if (b.from[r] >= start + kTile || b.to[r] <= start) {
        for (int64_t j = 0; j < kTile / 16; ++j) put(j, set1(0.0f));
        return;
    }
    const int from = static_cast<int>(b.from[r] > start ? b.from[r] - start : 0);
    const int to = static_cast<int>(b.to[r] < start + kTile ? b.to[r] - start : kTile);
    F s[kTile / 16];
    F top = set1(-INFINITY);
#pragma GCC unroll 4
    for (int j = 0; j < kTile / 16; ++j) {
        s[j] = keep(mul(load(b.scores + r * kTile + j * 16), set1(c.scale)), from - 16 * j, to - 16 * j, set1(-INFINITY));
        top = vmax(s[j], top);
    }
    const float before = b.split.most[r], found = hmax(top);
    const float most = found > before ? found : before;
    b.split.most[r] = most;
    const F factor = exp2(set1(before - most));
    F sum = mul(load(b.lanes + r * 16), factor);
#pragma GCC unroll 4
    for (int j = 0; j < kTile / 16; ++j) {
        const F e = exp2(sub(s[j], set1(most)));
        sum = add(sum, e);
        put(j, e);
    }
    store(b.lanes + r * 16, sum);
    store_n(b.rescale + r, factor, 1);
}

// total = total merged with part (both over disjoint keys, part's after total's); a part without visible keys has sum 0.
QUIRE_INLINE void merge_row(const State& total, const State& part, int64_t r, int64_t padded) {
    if (part.sum[r] == 0.0f) return;
    float* to = total.acc + r * padded;
    const float* from = part.acc + r * padded;
    if (total.sum[r] == 0.0f) {
        total.most[r] = part.most[r];
        total.sum[r] = part.sum[r];
        for (int64_t i = 0; i < padded; i += 16) store(to + i, load(from + i));
        return;
    }
    const float most = total.most[r] > part.most[r] ? total.most[r] : part.most[r];
    const F a = exp2(set1(total.most[r] - most)), b = exp2(set1(part.most[r] - most));
    store_n(&total.sum[r], fma(set1(part.sum[r]), b, mul(set1(total.sum[r]), a)), 1);
    total.most[r] = most;
    for (int64_t i = 0; i < padded; i += 16) store(to + i, fma(load(from + i), b, mul(load(to + i), a)));
}

QUIRE_INLINE void clear(const State& s, int64_t rows, int64_t padded) {
    std::memset(s.acc, 0, static_cast<size_t>(rows * padded) * 4);
    std::memset(s.sum, 0, static_cast<size_t>(rows) * 4);
    for (int64_t r = 0; r < rows; ++r) s.most[r] = -INFINITY;
}

// All rows against one tile, a few rows at a time; the first few ask for the next tile.
template <bool kBf16, bool kAsk>
QUIRE_INLINE void run_rows(const AttentionCall& c, AttentionBuffers& b, int64_t r, int64_t n, int64_t start, int64_t visible) {
    const int64_t width = c.cache.width(), steps = kBf16 ? (visible + 1) / 2 : visible;
    score_rows<kBf16, kAsk>(n, b.scores + r * kTile, b.q + r * c.padded * width, c.padded * width, b.tile, b.next, c.cache.d / c.cache.pair());
    for (int64_t i = r; i < r + n; ++i) softmax_row<kBf16>(c, b, i, start);
    value_rows<kBf16, kAsk>(n, b.split.acc + r * c.padded, c.padded, b.rescale + r, b.p + r * kTile * width, b.tile, b.next, steps,
                            kBf16 && (visible & 1));
}

// One split: the state of all rows over positions [split * 512, split * 512 + 512) that any of them sees.
template <bool kBf16>
void run_split(const AttentionCall& c, AttentionBuffers& b, const AttentionTask& task, int64_t split, int64_t rows,
               int64_t first_block) {
    const Pages pages{c.tables + task.sequence * c.max_blocks, c.context[task.sequence], first_block,
                      __builtin_ctzll(static_cast<unsigned long long>(c.cache.block_size)), task.head, c.cache.kv_heads,
                      c.cache.d * c.cache.width()};
    const int64_t low = b.from[0] > split * kSplit ? b.from[0] / kTile * kTile : split * kSplit;
    const int64_t end = (split + 1) * kSplit, high = b.to[rows - 1] < end ? b.to[rows - 1] : end;
    const bool copied = c.cache.block_size < 16 || c.cache.d != c.padded;
    clear(b.split, rows, c.padded);
    std::memset(b.lanes, 0, static_cast<size_t>(rows) * 64);
    locate_tile(c, b, pages, low, b.tile);
    for (int64_t start = low; start < high; start += kTile) {
        if (copied && start > low) locate_tile(c, b, pages, start, b.tile);
        if (!copied) locate_tile(c, b, pages, start + kTile, b.next);
        const int64_t visible = high - start < kTile ? high - start : kTile;
        for (int64_t r = 0; r < rows; r += kAttentionRows) {
            const int64_t n = rows - r < kAttentionRows ? rows - r : kAttentionRows;
            if (r == 0 && !copied) {
                run_rows<kBf16, true>(c, b, r, n, start, visible);
            } else {
                run_rows<kBf16, false>(c, b, r, n, start, visible);
            }
        }
        b.tile = b.next;
    }
    for (int64_t r = 0; r < rows; ++r) b.split.sum[r] = hsum(load(b.lanes + r * 16));
}

void write_row(const AttentionCall& c, const State& state, int64_t r, float* out) {
    const F inverse = div(set1(1.0f), set1(state.sum[r]));
    for_lanes(c.cache.d, [&](int64_t i, int n) { store_lanes(out + i, mul(load(state.acc + r * c.padded + i), inverse), n); });
}

float* out_row(const AttentionCall& c, const AttentionTask& task, int64_t r) {
    const int64_t token = c.cu_q[task.sequence] + task.first + r / c.group;
    return c.out + (token * c.heads + task.head * c.group + r % c.group) * c.cache.d;
}

template <bool kBf16>
void run_task(const AttentionCall& c, AttentionBuffers& b, const AttentionTask& task) {
    const int64_t begin = c.cu_q[task.sequence], rows = (task.last - task.first) * c.group;
    const int64_t base = c.context[task.sequence] - (c.cu_q[task.sequence + 1] - begin);
    const int64_t row_floats = (c.heads + 2 * c.cache.kv_heads) * c.cache.d;
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t token = task.first + r / c.group;
        b.to[r] = base + token + 1;
        b.from[r] = c.window > 0 && b.to[r] > c.window ? b.to[r] - c.window : 0;
        const float* q = c.qkv + (begin + token) * row_floats + (task.head * c.group + r % c.group) * c.cache.d;
        for_lanes(c.cache.d, [&](int64_t i, int n) {
            if constexpr (kBf16) {
                bf16_store(reinterpret_cast<uint16_t*>(b.q) + r * c.padded + i, load_lanes(q + i, n));
            } else {
                store(reinterpret_cast<float*>(b.q) + r * c.padded + i, load_lanes(q + i, n));
            }
        });
    }
    const int64_t first_visible = c.window > 0 && base + 1 > c.window ? base + 1 - c.window : 0;
    clear(b.total, rows, c.padded);
    for (int64_t split = task.split_begin; split < task.split_end; ++split) {
        if (task.partial) b.split = State::at(task.partial + (split - task.split_begin) * State::floats(rows, c.padded), rows, c.padded);
        run_split<kBf16>(c, b, task, split, rows, first_visible / c.cache.block_size);
        if (task.partial) continue;
        for (int64_t r = 0; r < rows; ++r) merge_row(b.total, b.split, r, c.padded);
    }
    if (task.partial) return;
    for (int64_t r = 0; r < rows; ++r) write_row(c, b.total, r, out_row(c, task, r));
}
