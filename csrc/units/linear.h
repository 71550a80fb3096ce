// out [m, n] = x [m, k] times packed weights [n, k], plus bias.
//
// Every output element is one chain of sums in ascending k (integer weights: exact sums within a group, groups ascending),
// whatever the tile it was computed in, so a row does not depend on the batch. Activations are rounded or quantized once
// per call. A task is a few column blocks times a panel of rows that stays in the second-level cache.
#pragma once

struct LinearCall {
    float* out;
    int64_t out_stride;  // floats
    const char* weights;
    const char* scales;
    const int8_t* zeros;
    const float* bias;
    int64_t n, k, group, groups;
    bool scales_f32;
    const char* x;     // rows of int8 codes, bf16 or f32
    int64_t x_stride;  // bytes
    const float* x_scales;   // [m][groups]
    const int32_t* x_start;  // [m][groups]: start value of a group's sum, or the sum of codes when there are zeros
};

// Hardware prefetchers stop at page ends. A single row streams its weights once, so it asks for those a few pages ahead
// (measured: 100 instead of 73 of 113 GB/s at 4 bits); tiles of more rows ask for the next column group's.
constexpr int64_t kAhead = 8192;
constexpr int64_t kPartSteps = 1024;
constexpr int64_t kPanelBytes = 256 << 10;  // a quarter of a 1 MiB second-level cache; weights stream through the rest

// A part of the k axis, in the weights' steps: [begin, end). The sums of a first part wait in `out` and the next part goes
// on from there, so that the chain of sums is the one an undivided axis has.
struct Part {
    int64_t begin, end;
    bool last;
};

// Stores a tile; the bias comes with the last part.
template <int R, int NB>
QUIRE_INLINE void store_tile(const LinearCall& c, F (&acc)[R][NB], int64_t row, int64_t block, bool last) {
    for (int b = 0; b < NB; ++b) {
        const int64_t column = (block + b) * 16;
        const int lanes = static_cast<int>(c.n - column < 16 ? c.n - column : 16);
        const bool biased = c.bias && last;
        const F bias = biased ? load_lanes(c.bias + column, lanes) : set1(0.0f);
        for (int r = 0; r < R; ++r)
            store_lanes(c.out + (row + r) * c.out_stride + column, biased ? add(acc[r][b], bias) : acc[r][b], lanes);
    }
}

// What a tile starts from.
template <int R, int NB>
QUIRE_INLINE void load_tile(const LinearCall& c, F (&acc)[R][NB], int64_t row, int64_t block, bool first) {
    for (int b = 0; b < NB; ++b) {
        const int64_t column = (block + b) * 16;
        const int lanes = static_cast<int>(c.n - column < 16 ? c.n - column : 16);
        for (int r = 0; r < R; ++r) acc[r][b] = first ? set1(0.0f) : load_lanes(c.out + (row + r) * c.out_stride + column, lanes);
    }
}

QUIRE_INLINE uint32_t word(const char* p) {
    uint32_t x;
    std::memcpy(&x, p, 4);
    return x;
}

template <int R, int NB>
QUIRE_INLINE void prefetch_weights(const char* w, int64_t block_bytes) {
    if constexpr (R == 1) {
        prefetch(w + kAhead);
    } else {
        prefetch_far(w + NB * block_bytes);
    }
}

template <int R, int NB>
void f32_tile(const LinearCall& c, int64_t row, int64_t block, Part part) {
    F acc[R][NB];
    load_tile<R, NB>(c, acc, row, block, part.begin == 0);
    const char* w = c.weights + block * c.k * 64;
    const char* x = c.x + row * c.x_stride;
    for (int64_t k = part.begin; k < part.end; ++k) {
        F wk[NB];
#pragma GCC unroll 8
        for (int b = 0; b < NB; ++b) wk[b] = load(reinterpret_cast<const float*>(w + (b * c.k + k) * 64));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const F xk = set1(reinterpret_cast<const float*>(x + r * c.x_stride)[k]);
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) acc[r][b] = fma(wk[b], xk, acc[r][b]);
        }
    }
    store_tile<R, NB>(c, acc, row, block, part.last);
}

template <int R, int NB>
void bf16_tile(const LinearCall& c, int64_t row, int64_t block, Part part) {
    F acc[R][NB];
    load_tile<R, NB>(c, acc, row, block, part.begin == 0);
    const int64_t pairs = (c.k + 1) / 2;
    const char* w = c.weights + block * pairs * 64;
    const char* x = c.x + row * c.x_stride;
    for (int64_t p = part.begin; p < part.end; ++p) {
        U wk[NB];
#pragma GCC unroll 8
        for (int b = 0; b < NB; ++b) {
            wk[b] = load_u(w + (b * pairs + p) * 64);
            prefetch_weights<R, NB>(w + (b * pairs + p) * 64, pairs * 64);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const U xk = set1_u(word(x + r * c.x_stride + p * 4));
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) acc[r][b] = dot_bf16(acc[r][b], wk[b], xk);
        }
    }
    store_tile<R, NB>(c, acc, row, block, part.last);
}

QUIRE_INLINE F load_scale(const LinearCall& c, int64_t index) {
    return c.scales_f32 ? load(reinterpret_cast<const float*>(c.scales) + index * 16)
                        : f16_load(reinterpret_cast<const uint16_t*>(c.scales) + index * 16);
}

template <int kBits, bool kZeros, int R, int NB>
void int_tile(const LinearCall& c, int64_t row, int64_t block) {
    constexpr int kStep = kBits == 4 ? 8 : 4;  // columns per 64 bytes of weights
    constexpr int kOffset = kBits == 4 ? 8 : kStart8;
    F acc[R][NB];
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < NB; ++b) acc[r][b] = set1(0.0f);
    const int64_t block_bytes = c.k / kStep * 64;
    const char* w = c.weights + block * block_bytes;
    const char* x = c.x + row * c.x_stride;
    for (int64_t g = 0; g < c.groups; ++g) {
        I sum[R][NB];
        I zero[NB];
        if constexpr (kZeros) {
            // -(offset + zero) per column; start = that times the sum of the row's codes
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b)
                zero[b] = add_i(set1_i(kOffset), load_i8(c.zeros + ((block + b) * c.groups + g) * 16));
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const I start = set1_i(c.x_start[(row + r) * c.groups + g]);
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) sum[r][b] = kZeros ? mul16(start, zero[b]) : start;
        }
        for (int64_t k = 0; k < c.group; k += kStep, w += 64, x += kStep) {
            U low[NB], high[NB];
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) {
                low[b] = load_u(w + b * block_bytes);
                prefetch_weights<R, NB>(w + b * block_bytes, block_bytes);
                if constexpr (kBits == 4) {
                    high[b] = high_nibbles(low[b]);
                    low[b] = low_nibbles(low[b]);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const U x0 = set1_u(word(x + r * c.x_stride));
                const U x1 = set1_u(kBits == 4 ? word(x + r * c.x_stride + 4) : 0);
#pragma GCC unroll 8
                for (int b = 0; b < NB; ++b) {
                    if constexpr (kBits == 4) {
                        sum[r][b] = dot4(dot4(sum[r][b], low[b], x0), high[b], x1);
                    } else {
                        sum[r][b] = dot8(sum[r][b], low[b], x0);
                    }
                }
            }
        }
        F scale[NB];
#pragma GCC unroll 8
        for (int b = 0; b < NB; ++b) scale[b] = load_scale(c, (block + b) * c.groups + g);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const F xs = set1(c.x_scales[(row + r) * c.groups + g]);
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) acc[r][b] = fma(to_f(sum[r][b]), mul(scale[b], xs), acc[r][b]);
        }
    }
    store_tile<R, NB>(c, acc, row, block, true);
}

enum class WeightKind { kF32, kBf16, kInt8, kInt8Zeros, kInt4, kInt4Zeros };

constexpr bool is_float(WeightKind kind) { return kind == WeightKind::kF32 || kind == WeightKind::kBf16; }

template <WeightKind kKind, int R, int NB>
void tile(const LinearCall& c, int64_t row, int64_t block, Part part) {
    if constexpr (kKind == WeightKind::kF32) f32_tile<R, NB>(c, row, block, part);
    if constexpr (kKind == WeightKind::kBf16) bf16_tile<R, NB>(c, row, block, part);
    if constexpr (kKind == WeightKind::kInt8) int_tile<8, false, R, NB>(c, row, block);
    if constexpr (kKind == WeightKind::kInt8Zeros) int_tile<8, true, R, NB>(c, row, block);
    if constexpr (kKind == WeightKind::kInt4) int_tile<4, false, R, NB>(c, row, block);
    if constexpr (kKind == WeightKind::kInt4Zeros) int_tile<4, true, R, NB>(c, row, block);
}

// The tile of `rows` <= R rows: tries R, R - 1, ... 1.
template <WeightKind kKind, int NB, int R>
void tile_of(const LinearCall& c, int64_t rows, int64_t row, int64_t block, Part part) {
    if (rows == R) return tile<kKind, R, NB>(c, row, block, part);
    if constexpr (R > 1) return tile_of<kKind, NB, R - 1>(c, rows, row, block, part);
}

// A rectangle of rows and column blocks.
struct Panel {
    int64_t row, rows_end, block, blocks_end;
};

// How a weight's k axis is walked: float weights go in parts when there are more rows than one tile, because a group of blocks
// of the whole k would not stay cached.
template <WeightKind kKind, int R>
QUIRE_INLINE int64_t steps_of_part(const LinearCall& c, int64_t m) {
    const int64_t steps = kKind == WeightKind::kBf16 ? (c.k + 1) / 2 : c.k;
    return is_float(kKind) && m > R && steps > kPartSteps ? kPartSteps : steps;
}

// A panel in tiles of up to R rows by NB blocks, one group of blocks after the other.
template <WeightKind kKind, int R, int NB>
void run_panel(const LinearCall& c, int64_t m, Panel p) {
    const int64_t steps = kKind == WeightKind::kBf16 ? (c.k + 1) / 2 : c.k, part_steps = steps_of_part<kKind, R>(c, m);
    for (int64_t block = p.block; block < p.blocks_end; block += NB) {
        for (int64_t begin = 0; begin < steps; begin += part_steps) {
            const int64_t end = begin + part_steps < steps ? begin + part_steps : steps;
            const Part part{begin, end, end == steps};
            for (int64_t row = p.row; row < p.rows_end; row += R) {
                const int64_t rows = p.rows_end - row < R ? p.rows_end - row : R;
                if (p.blocks_end - block >= NB) {
                    tile_of<kKind, NB, R>(c, rows, row, block, part);
                } else {
                    for (int64_t b = block; b < p.blocks_end; ++b) tile_of<kKind, 1, R>(c, rows, row, b, part);
                }
            }
        }
    }
}

// Calls f.template operator()<R, NB>() with the tile for m rows.
template <WeightKind kKind, class Fn>
QUIRE_INLINE void with_tile(int64_t m, const Fn& f) {
    if (m == 1) return f.template operator()<1, kKind == WeightKind::kBf16 ? kRowBlocks : 1>();
    if (m <= kFewRows) return f.template operator()<kFewRows, kFewBlocks>();
    f.template operator()<kTileRows, kTileBlocks>();
}

// All rows and column blocks; a panel of rows that stays in the second-level cache and one group of blocks per task.
template <WeightKind kKind>
void run_linear(const LinearCall& c, int64_t m) {
    with_tile<kKind>(m, [&]<int R, int NB>() {
        const int64_t blocks = (c.n + 15) / 16, column_groups = (blocks + NB - 1) / NB;
        int64_t panel = kPanelBytes / (is_float(kKind) ? steps_of_part<kKind, R>(c, m) * 4 : c.x_stride) / R * R;
        if (panel < R) panel = R;
        parallel_for((m + panel - 1) / panel * column_groups, [&](int64_t index, int) {
            const int64_t row = index / column_groups * panel, block = index % column_groups * NB;
            run_panel<kKind, R, NB>(c, m, {row, row + panel < m ? row + panel : m, block, block + NB < blocks ? block + NB : blocks});
        });
    });
}

// Codes, scale and start value of each group of a row. The maximum is taken over bit patterns, which orders NaN above all
// numbers: a NaN activation makes the scale and with it the whole output NaN instead of vanishing.
QUIRE_INLINE void quantize_row(int8_t* codes, float* scales, int32_t* starts, const float* x, int64_t k, int64_t group, int32_t factor) {
    for (int64_t g = 0; g < k / group; ++g) {
        const float* in = x + g * group;
        I most = set1_i(0);
        for (int64_t i = 0; i < group; i += 16) most = max_i(most, bits_of(vabs(load(in + i))));
        const int32_t bits = hmax_i(most);
        float top;
        std::memcpy(&top, &bits, 4);
        const F inverse = set1(top > 0.0f ? 127.0f / top : 0.0f);
        I sum = set1_i(0);
        for (int64_t i = 0; i < group; i += 16) {
            const F scaled = vmin(set1(127.0f), vmax(set1(-127.0f), mul(load(in + i), inverse)));
            const I code = round_i(scaled);
            sum = add_i(sum, code);
            store_i8(codes + g * group + i, code);
        }
        scales[g] = top / 127.0f;
        starts[g] = factor * hsum_i(sum);
    }
}

void check_linear(int64_t m, int64_t n, int64_t k) {
    constexpr int64_t kMost = int64_t{1} << 40;
    if (m < 1 || n < 1 || k < 1 || m > kMost || n > kMost || k > kMost) fail("linear: sizes must lie in [1, 2^40]");
}

template <int kBits>
void linear_int(float* out, const float* x, const char* weights, const char* scales, Optional<const int8_t> zeros,
                Optional<const float> bias, int64_t m, int64_t n, int64_t k, int64_t group, bool scales_f32) {
    check_linear(m, n, k);
    if ((group != 32 && group != 64 && group != 128) || k % group) fail("linear: columns must be a multiple of the group (32, 64, 128)");
    const int64_t groups = k / group, stride = (k + 63) / 64 * 64 + 64;  // odd multiples of 64: rows fall into different cache sets
    auto* codes = static_cast<int8_t*>(scratch(Scratch::kActivations, static_cast<size_t>(m * stride)));
    auto* x_scales = static_cast<float*>(scratch(Scratch::kScales, static_cast<size_t>(m * groups) * 8));
    auto* starts = reinterpret_cast<int32_t*>(x_scales + m * groups);
    const int32_t factor = zeros.ptr ? -1 : -(kBits == 4 ? 8 : kStart8);
    parallel_ranges(m, k, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
            quantize_row(codes + r * stride, x_scales + r * groups, starts + r * groups, x + r * k, k, group, factor);
    });
    const LinearCall c{out, n, weights, scales, zeros.ptr, bias.ptr, n, k, group, groups, scales_f32,
                       reinterpret_cast<const char*>(codes), stride, x_scales, starts};
    if (zeros.ptr) {
        run_linear<kBits == 4 ? WeightKind::kInt4Zeros : WeightKind::kInt8Zeros>(c, m);
    } else {
        run_linear<kBits == 4 ? WeightKind::kInt4 : WeightKind::kInt8>(c, m);
    }
}

void linear_int4(float* out, const float* x, const char* weights, const char* scales, Optional<const int8_t> zeros,
                 int64_t scales_f32, Optional<const float> bias, int64_t m, int64_t n, int64_t k, int64_t group) {
    linear_int<4>(out, x, weights, scales, zeros, bias, m, n, k, group, scales_f32 != 0);
}

void linear_int8(float* out, const float* x, const char* weights, const char* scales, Optional<const int8_t> zeros,
                 int64_t scales_f32, Optional<const float> bias, int64_t m, int64_t n, int64_t k, int64_t group) {
    linear_int<8>(out, x, weights, scales, zeros, bias, m, n, k, group, scales_f32 != 0);
}

void linear_bf16(float* out, const float* x, const char* weights, Optional<const float> bias, int64_t m, int64_t n,
                 int64_t k, int64_t /*group*/) {
    check_linear(m, n, k);
    const int64_t stride = (k * 2 + 127) / 128 * 128 + 64;
    auto* rounded = static_cast<char*>(scratch(Scratch::kActivations, static_cast<size_t>(m * stride)));
    parallel_ranges(m, k, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            auto* row = reinterpret_cast<uint16_t*>(rounded + r * stride);
            for_lanes(k, [&](int64_t i, int lanes) { bf16_store(row + i, load_lanes(x + r * k + i, lanes)); });
        }
    });
    const LinearCall c{out, n, weights, nullptr, nullptr, bias.ptr, n, k, 0, 0, false, rounded, stride, nullptr, nullptr};
    run_linear<WeightKind::kBf16>(c, m);
}

void linear_f32(float* out, const float* x, const char* weights, Optional<const float> bias, int64_t m, int64_t n, int64_t k,
                int64_t /*group*/) {
    check_linear(m, n, k);
    const LinearCall c{out, n, weights, nullptr, nullptr, bias.ptr, n, k, 0, 0, false,
                       reinterpret_cast<const char*>(x), k * 4, nullptr, nullptr};
    run_linear<WeightKind::kF32>(c, m);
}
