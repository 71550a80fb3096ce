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

// Memory of one thread.
struct AttentionBuffers {
    State split, total;
    float *lanes, *scores, *rescale;  // [rows][16], [rows][64], [rows]
    char *q, *p;                      // [rows][padded], [rows][64] in the cache's type
    char *keys, *values, *zeros;      // copies of a tile for layouts the kernels cannot read in place
    const char* key_at[kTile / 16];
    const char* value_at[kTile];
    int64_t *from, *to;  // first and past-the-last visible position of each row
};

QUIRE_INLINE F broadcast_float(const char* p) {
    float x;
    std::memcpy(&x, p, 4);
    return set1(x);
}

// scores[r][16 j + lane] = q[r] . k[token 16 j + lane] for R rows and NS groups of 16 tokens
template <bool kBf16, int R, int NS>
void score_tile(float* scores, const char* q, int64_t q_stride, const char* const* keys, int64_t words) {
    F acc[R][NS];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < NS; ++j) acc[r][j] = set1(0.0f);
    for (int64_t i = 0; i < words; ++i) {
        U k[NS];
#pragma GCC unroll 16
        for (int j = 0; j < NS; ++j) k[j] = load_u(keys[j] + i * 64);
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
template <bool kBf16, int R, int NV>
void value_tile(float* out, int64_t out_stride, const float* rescale, const char* p, const char* const* values, int64_t at,
                int64_t steps, bool odd) {
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

template <bool kBf16, int R = kAttentionRows>
void score_rows(int64_t rows, float* scores, const char* q, int64_t q_stride, const char* const* keys, int64_t words) {
    if (rows >= R) {
        for (int j = 0; j < kTile / 16; j += kAttentionTiles)
            score_tile<kBf16, R, kAttentionTiles>(scores + j * 16, q, q_stride, keys + j, words);
        return;
    }
    if constexpr (R > 1) score_rows<kBf16, R - 1>(rows, scores, q, q_stride, keys, words);
}

template <bool kBf16, int R, int NV = kAttentionTiles>
void value_columns(int64_t vectors, float* out, int64_t out_stride, const float* rescale, const char* p,
                   const char* const* values, int64_t at, int64_t steps, bool odd) {
    if (vectors >= NV) return value_tile<kBf16, R, NV>(out, out_stride, rescale, p, values, at, steps, odd);
    if constexpr (NV > 1) value_columns<kBf16, R, NV - 1>(vectors, out, out_stride, rescale, p, values, at, steps, odd);
}

template <bool kBf16, int R = kAttentionRows>
void value_rows(int64_t rows, float* out, int64_t out_stride, const float* rescale, const char* p, const char* const* values,
                int64_t steps, bool odd) {
    if (rows >= R) {
        for (int64_t j = 0; j < out_stride; j += 16 * kAttentionTiles)
            value_columns<kBf16, R>((out_stride - j) / 16, out + j, out_stride, rescale, p, values, j * 4, steps, odd);
        return;
    }
    if constexpr (R > 1) value_rows<kBf16, R - 1>(rows, out, out_stride, rescale, p, values, steps, odd);
}

// Points key_at and value_at at the tile that begins at position `start`. Blocks outside [first_block, blocks of the
// context) are zeros. Layouts with fewer than 16 keys side by side, single values or odd head sizes are copied.
void locate_tile(const AttentionCall& c, AttentionBuffers& b, const int32_t* table, int64_t head, int64_t start,
                 int64_t context, int64_t first_block) {
    const CacheShape& s = c.cache;
    const int64_t lanes = s.lanes(), words = s.d / s.pair();
    const auto block_of = [&](int64_t t) { return t < context && t / s.block_size >= first_block ? int64_t{table[t / s.block_size]} : int64_t{-1}; };
    for (int64_t j = 0; j < kTile / 16; ++j) {
        const int64_t t = start + 16 * j;
        if (lanes == 16) {
            const int64_t block = block_of(t);
            b.key_at[j] = block < 0 ? b.zeros : c.keys + s.keys_at(block, head, t % s.block_size);
            continue;
        }
        char* copy = b.keys + j * words * 64;
        for (int64_t lane = 0; lane < 16; lane += lanes) {
            const int64_t block = block_of(t + lane);
            const char* source = block < 0 ? b.zeros : c.keys + s.keys_at(block, head, 0);
            for (int64_t i = 0; i < words; ++i)
                std::memcpy(copy + i * 64 + lane * 4, source + i * lanes * 4, static_cast<size_t>(lanes) * 4);
        }
        b.key_at[j] = copy;
    }
    const int64_t pair = s.pair();
    const bool copied = s.vpair() != pair || s.d != c.padded;
    for (int64_t i = 0; i < kTile / pair; ++i) {
        const int64_t t = start + i * pair;
        if (!copied) {
            const int64_t block = block_of(t);
            b.value_at[i] = block < 0 ? b.zeros : c.values + s.values_at(block, head, t % s.block_size);
            continue;
        }
        char* copy = b.values + i * c.padded * 4;
        std::memset(copy, 0, static_cast<size_t>(c.padded) * 4);
        for (int64_t half = 0; half < pair; ++half) {
            const int64_t block = block_of(t + half);
            if (block < 0) continue;
            const int64_t offset = (t + half) % s.block_size, vpair = s.vpair();
            const char* source = c.values + s.values_at(block, head, offset) + offset % vpair * s.width();
            for (int64_t x = 0; x < s.d; ++x)
                std::memcpy(copy + (x * pair + half) * s.width(), source + x * vpair * s.width(), static_cast<size_t>(s.width()));
        }
        b.value_at[i] = copy;
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

// One split: the state of all rows over positions [split * 512, split * 512 + 512) that any of them sees.
template <bool kBf16>
void run_split(const AttentionCall& c, AttentionBuffers& b, const AttentionTask& task, int64_t split, int64_t rows,
               int64_t first_block) {
    const int64_t context = c.context[task.sequence];
    const int32_t* table = c.tables + task.sequence * c.max_blocks;
    const int64_t low = b.from[0] > split * kSplit ? b.from[0] / kTile * kTile : split * kSplit;
    const int64_t end = (split + 1) * kSplit, high = b.to[rows - 1] < end ? b.to[rows - 1] : end;
    clear(b.split, rows, c.padded);
    std::memset(b.lanes, 0, static_cast<size_t>(rows) * 64);
    for (int64_t start = low; start < high; start += kTile) {
        locate_tile(c, b, table, task.head, start, context, first_block);
        const int64_t visible = high - start < kTile ? high - start : kTile;
        const int64_t steps = kBf16 ? (visible + 1) / 2 : visible;
        const bool odd = kBf16 && (visible & 1);
        for (int64_t r = 0; r < rows;) {
            const int64_t n = rows - r < kAttentionRows ? rows - r : kAttentionRows;
            score_rows<kBf16>(n, b.scores + r * kTile, b.q + r * c.padded * c.cache.width(), c.padded * c.cache.width(), b.key_at,
                              c.cache.d / c.cache.pair());
            for (int64_t i = r; i < r + n; ++i) softmax_row<kBf16>(c, b, i, start);
            value_rows<kBf16>(n, b.split.acc + r * c.padded, c.padded, b.rescale + r, b.p + r * kTile * c.cache.width(), b.value_at,
                              steps, odd);
            r += n;
        }
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
