// Tiles of integer weights: codes of 8 or 4 bits, and 4-bit codes that a table turns into numbers .
//
// Activations are int8 codes per group, or 16-bit ones in two digits of base 255, each -127..127; so are the numbers of a
// table. Dot products of digits are exact, and the sums of equal weight are one sum: a group's value is the same integer in
// whatever order it is added up. Only then come the floats, groups ascending.
#pragma once

QUIRE_INLINE F load_group(const LinearCall& c, const char* values, int64_t index) {
    return c.w.wide ? load(reinterpret_cast<const float*>(values) + index * 16)
                        : f16_load(reinterpret_cast<const uint16_t*>(values) + index * 16);
}

// Where row r of a tile that begins with row `row` has its scale of a group, its start and its sum.
template <int kAbreast>
QUIRE_INLINE int64_t place_of_group(const LinearCall& c, int64_t row, int64_t g, int r) {
    return row * c.groups + (kAbreast > 1 ? g * kAbreast + r : r * c.groups + g);
}

// The start of each sum. `x_start` holds minus the offset of the weights' codes times the sum of each digit's codes, or,
// with zeros, minus the sum alone. The sum of digit pairs (p, d) has the index p + d; the first digit is the high one.
template <int kPlanes, int kDigits, int kOffset, int R, int NB, int kAbreast>
QUIRE_INLINE void start_sums(const LinearCall& c, I (&sum)[kPlanes + kDigits - 1][R][NB], int64_t row, int64_t block, int64_t g) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const int32_t* starts = c.x_start + place_of_group<kAbreast>(c, row, g, r) * kDigits;
#pragma GCC unroll 4
        for (int s = 0; s < kPlanes + kDigits - 1; ++s) {
            int32_t start = 0;
            for (int p = 0; p < kPlanes; ++p)
                if (s - p >= 0 && s - p < kDigits) start += starts[s - p];
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) sum[s][r][b] = set1_i(start);
        }
    }
    if (!c.w.zeros) return;
#pragma GCC unroll 8
    for (int b = 0; b < NB; ++b) {
        const I zero = add_i(set1_i(kOffset), load_i8(c.w.zeros + ((block + b) * c.groups + g) * 16));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            for (int s = 0; s < kDigits; ++s) sum[s][r][b] = mul16(sum[s][r][b], zero);
    }
}

// acc += the group's integer times the scales of weights and activations, and the minimums times the activations' sum. Three
// digits do not fit into an integer: the last is added in floats.
template <int kSums, int R, int NB, int kAbreast>
QUIRE_INLINE void add_group(const LinearCall& c, F (&acc)[R][NB], I (&sum)[kSums][R][NB], int64_t row, int64_t block, int64_t g) {
    F scale[NB];
#pragma GCC unroll 8
    for (int b = 0; b < NB; ++b) scale[b] = load_group(c, c.w.scales, (block + b) * c.groups + g);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const F xs = set1(c.x_scales[place_of_group<kAbreast>(c, row, g, r)]);
#pragma GCC unroll 8
        for (int b = 0; b < NB; ++b) {
            I whole = sum[0][r][b];
            if constexpr (kSums > 1) whole = add_i(times255(whole), sum[1][r][b]);
            F value = to_f(whole);
            if constexpr (kSums > 2) value = fma(value, set1(255.0f), to_f(sum[2][r][b]));
            acc[r][b] = fma(value, mul(scale[b], xs), acc[r][b]);
        }
    }
    if (!c.w.mins) return;
#pragma GCC unroll 8
    for (int b = 0; b < NB; ++b) {
        const F least = load_group(c, c.w.mins, (block + b) * c.groups + g);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[r][b] = fma(least, set1(c.x_sums[place_of_group<kAbreast>(c, row, g, r)]), acc[r][b]);
    }
}

// Asks for the scales of group `g` of NB blocks.
template <int NB>
QUIRE_INLINE void ask_scales(const LinearCall& c, int64_t block, int64_t g) {
#pragma GCC unroll 8
    for (int b = 0; b < NB; ++b) prefetch(c.w.scales + ((block + b) * c.groups + g) * (c.w.wide ? 64 : 32));
}

// Asks for what follows 64 bytes of NB blocks: a tile alone for those `ahead`, others for the next blocks'.
template <int NB, bool kAlone>
QUIRE_INLINE void ask_weights(const char* w, int64_t block_bytes, int64_t ahead) {
#pragma GCC unroll 8
    for (int b = 0; b < NB; ++b) {
        if constexpr (kAlone) {
            prefetch(w + b * block_bytes + ahead);
        } else {
            prefetch_far(w + (NB + b) * block_bytes);
        }
    }
}

template <WeightKind kKind, int R, int NB, int kAbreast, bool kAlone>
[[gnu::noinline]] void int_tile(const LinearCall& c, int64_t row, int64_t block, const Part& part) {
    constexpr bool kFour = !is_int8(kKind), kTable = kFour && !is_int4(kKind);
    constexpr int kStep = kFour ? 8 : 4;  // columns per 64 bytes of weights
    constexpr int kDigits = digits_of(kKind), kPlanes = planes_of(kKind), kSums = kPlanes + kDigits - 1;
    constexpr int kOffset = is_int4(kKind) ? 8 : kStart8;
    F acc[R][NB];
    load_tile<R, NB>(acc, part);
    U table[kPlanes];
    if constexpr (kTable)
        for (int p = 0; p < kPlanes; ++p) table[p] = load_table(c.w.table + p * 16);
    const int64_t block_bytes = c.w.k / kStep * 64, group_bytes = c.w.group / kStep * 64;
    const char* w = c.w.codes + block * block_bytes;
    const int64_t x_step = kAbreast > 1 ? 4 : c.x_stride;
    const char* x = c.x + row * c.x_stride;
    Turns turns(part), scale_turns(part);
    for (int64_t g = 0; g < c.groups; ++g) {
        I sum[kSums][R][NB];
        start_sums<kPlanes, kDigits, kOffset, R, NB, kAbreast>(c, sum, row, block, g);
        const int64_t ahead = place_ahead<NB>(g * group_bytes, block_bytes, R == 1 ? g_tuning.ahead : stream_ahead(NB));
        if constexpr (kAlone) {
            ask_scales<NB>(c, block, g + ahead / group_bytes);
        } else if (scale_turns.now()) {
            ask_scales<NB>(c, block + NB, g);
        }
        for (int64_t k = 0; k < c.w.group; k += kStep, w += 64, x += kStep * kAbreast) {
            U low[kPlanes][NB], high[kPlanes][NB];
            if (kAlone || turns.now()) ask_weights<NB, kAlone>(w, block_bytes, ahead);
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) {
                low[0][b] = load_u(w + b * block_bytes);
                if constexpr (kFour) {
                    high[0][b] = high_nibbles(low[0][b]);
                    low[0][b] = low_nibbles(low[0][b]);
                }
                if constexpr (kTable) {
#pragma GCC unroll 2
                    for (int p = kPlanes - 1; p >= 0; --p) {
                        low[p][b] = look_up(table[p], low[0][b]);
                        high[p][b] = look_up(table[p], high[0][b]);
                    }
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
                for (int d = 0; d < kDigits; ++d) {
                    const char* at = x + r * x_step + d * c.x_digit;
                    const U x0 = set1_u(word(at)), x1 = set1_u(kFour ? word(at + 4 * kAbreast) : 0);
#pragma GCC unroll 2
                    for (int p = 0; p < kPlanes; ++p) {
#pragma GCC unroll 8
                        for (int b = 0; b < NB; ++b) {
                            I& s = sum[p + d][r][b];
                            if constexpr (is_int4(kKind)) {
                                s = dot4(dot4(s, low[p][b], x0), high[p][b], x1);
                            } else if constexpr (kTable) {
                                s = dot8(dot8(s, low[p][b], x0), high[p][b], x1);
                            } else {
                                s = dot8(s, low[p][b], x0);
                            }
                        }
                    }
                }
            }
        }
        add_group<kSums, R, NB, kAbreast>(c, acc, sum, row, block, g);
    }
    store_tile<R, NB>(c, acc, row, block, part);
}
