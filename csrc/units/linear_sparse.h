// bf16, int8 and int4 weights without their zeros (layout: sparse.h): they are expanded to what the dense kind has there, and multiplied
// as that kind does, so every sum has the dense kind's bits.
//
// Many rows share what was expanded into a cache, and are multiplied by the dense kind's own tiles, of which a build has no more than
// without these kinds. Few rows have tiles that expand in registers where the processor does so in one instruction, one for all numbers
// of rows up to its own: as many as the dense kind has, each with the shuffles for other processors, are the other part of what made a
// unit's build twice as long (see linear_chosen.h).
#pragma once

constexpr WeightKind dense_of(WeightKind kind) {
    if (kind == WeightKind::kSparse8 || kind == WeightKind::kTwoOfFour8) return WeightKind::kInt8;
    if (kind == WeightKind::kSparse4 || kind == WeightKind::kTwoOfFour4) return WeightKind::kInt4;
    return is_sparse(kind) ? WeightKind::kBf16 : kind;
}

// Columns of a register of the dense kind.
constexpr int columns_of_register(WeightKind kind) { return kKindFacts[static_cast<int64_t>(dense_of(kind))].together; }

// The weights of a block, register by register: chunks, and in a chunk the registers of its columns.
template <WeightKind kKind, bool kFast>
struct SparseStream {
    static constexpr int kRegisters = dense_of(kKind) == WeightKind::kInt4 ? 2 : 1;  // that one of the dense layout becomes
    const char *masks = nullptr, *at;

    explicit SparseStream(const char* block) : at(block) {}
    __attribute__((always_inline)) void begin_chunk() {
        masks = at;
        at += kSparseMasks;
    }
    // Those of the next register of the dense layout: bf16 numbers, int8 codes + 128, or int4 codes + 8 of its low and high halves.
    __attribute__((always_inline)) void next(U (&out)[kRegisters]) {
        if constexpr (dense_of(kKind) == WeightKind::kBf16) {
            const uint32_t mask = word(masks);
            out[0] = Expander<kFast>::halves(mask, at);
            masks += 4;
            at += 2 * __builtin_popcount(mask);
        } else if constexpr (dense_of(kKind) == WeightKind::kInt8) {
            const uint64_t mask = bits(0);
            out[0] = xor_u(Expander<kFast>::bytes(mask, at), set1_u(0x80808080u));
            masks += 8;
            at += __builtin_popcountll(mask);
        } else {
            const uint64_t low = bits(0), high = bits(8);
            Expander<kFast>::halves_of_bytes(out, low, high, at);
            for (U& half : out) half = masked_xor(half, set1_u(0x0f0f0f0fu), set1_u(0x08080808u));
            const int lows = __builtin_popcountll(low), highs = __builtin_popcountll(high);
            masks += 16;
            at += lows > highs ? lows : highs;
        }
    }

   private:
    __attribute__((always_inline)) uint64_t bits(int64_t from) const {
        uint64_t mask;
        std::memcpy(&mask, masks + from, 8);
        return mask;
    }
};

// Columns of a block as the dense kind has them; returns where the stream goes on.
template <WeightKind kKind, bool kFast>
const char* put_zeros_between(char* to, const char* at, int64_t columns) {
    SparseStream<kKind, kFast> from(at);
    for (int64_t column = 0; column < columns; column += kSparseColumns) {
        from.begin_chunk();
        for (int i = 0; i < kSparseColumns; i += columns_of_register(kKind), to += 64) {
            U out[SparseStream<kKind, kFast>::kRegisters];
            from.next(out);
            if constexpr (dense_of(kKind) == WeightKind::kInt4) out[0] = masked_or(shift<4>(out[1]), set1_u(~0u), out[0]);
            store_u(to, out[0]);
        }
    }
    return from.at;
}

// A chunk of a matrix of 2:4 as the dense kind has it.
template <WeightKind kKind>
void put_zeros_back(char* wide, const char* chunk) {
    constexpr WeightKind kDense = dense_of(kKind);
    constexpr int kEach = kDense == WeightKind::kBf16 ? 2 : 4, kPieces = kDense == WeightKind::kBf16 ? 8 : 4;
    const char* numbers = chunk + kPlaces;
    std::memset(wide, kDense == WeightKind::kInt8 ? 0x80 : kDense == WeightKind::kInt4 ? 0x88 : 0, static_cast<size_t>(kSparseColumns / columns_of_register(kKind) * 64));
    for (int at = 0; at < 16 * kEach; ++at) {
        for (int piece = 0; piece < kPieces; ++piece) {
            if constexpr (kDense == WeightKind::kBf16) {
                uint16_t places;
                std::memcpy(&places, chunk + 2 * at, 2);
                const int place = places >> (2 * piece) & 3;
                // A zero of a row that has fewer than two lies where there is none.
                std::memcpy(wide + piece * 128 + place / 2 * 64 + at / 2 * 4 + place % 2 * 2, numbers + piece * 64 + 2 * at, 2);
            } else {
                const int place = static_cast<uint8_t>(chunk[at]) >> (2 * piece) & 3, later = at % 4 / 2;
                if constexpr (kDense == WeightKind::kInt8) {
                    wide[piece * 128 + later * 64 + at / 4 * 4 + place] = static_cast<char>(numbers[piece * 64 + at] ^ 0x80);
                } else {
                    const int code = (static_cast<uint8_t>(numbers[piece / 2 * 64 + at]) >> (piece % 2 * 4) & 15) ^ 8;
                    char& both = wide[piece * 64 + at / 4 * 4 + place];
                    both = static_cast<char>(later ? (both & 15) | code << 4 : (both & 0xf0) | code);
                }
            }
        }
    }
}

// Columns of a block as the dense kind has them, from the chunk at `at` on; returns the chunk behind them.
template <WeightKind kKind>
[[gnu::noinline]] const char* widen_sparse(char* to, const char* at, int64_t columns) {
    if constexpr (is_two_of_four(kKind)) {
        constexpr int64_t kWide = kSparseColumns / columns_of_register(kKind) * 64;
        for (int64_t column = 0; column < columns; column += kSparseColumns, to += kWide, at += chunk_bytes(kKind)) put_zeros_back<kKind>(to, at);
        return at;
    }
#if defined(__AVX512BW__)
    if (g_expands) return put_zeros_between<kKind, true>(to, at, columns);
#endif
    return put_zeros_between<kKind, false>(to, at, columns);
}

#if defined(__AVX512BW__)

// NB blocks' streams, beginning with block `block`.
template <WeightKind kKind, int NB>
struct SparseStreams {
    SparseStream<kKind, true> of[NB];
    SparseStreams(const LinearCall& c, int64_t block) : SparseStreams(c, block, std::make_integer_sequence<int, NB>()) {}

   private:
    template <int... kB>
    SparseStreams(const LinearCall& c, int64_t block, std::integer_sequence<int, kB...>)
        : of{SparseStream<kKind, true>(c.w.codes + (block + kB) * c.w.code_step)...} {}
};

// Asks for what a stream reads later: as many bytes ahead as a dense one, which is further in columns.
template <WeightKind kKind, int NB>
QUIRE_INLINE void ask_sparse(const SparseStreams<kKind, NB>& from, int64_t ahead) {
#pragma GCC unroll 8
    for (int b = 0; b < NB; ++b) prefetch(from.of[b].at + ahead);
}

// All of `rows` <= R rows; what is computed for those beyond is not stored. A single row has two sums of a group, which are exact: with
// one, every product waits for the one before it, which took longer than to expand the weights (from the caches, Zen 4: 1.14 instead of
// 0.84 ns for a register of 64 codes).
template <WeightKind kKind, int R, int NB, int kAbreast>
[[gnu::noinline]] void sparse_int_tile(const LinearCall& c, int64_t rows, int64_t row, int64_t block, int64_t ahead) {
    constexpr bool kFour = dense_of(kKind) == WeightKind::kInt4, kTwo = R == 1;
    constexpr int kStep = columns_of_register(kKind), kOffset = kFour ? 8 : kStart8;
    const Part whole{0, c.w.k, true, nullptr, 0, 0, 1};
    F acc[R][NB];
    load_tile<R, NB>(acc, whole);
    SparseStreams<kKind, NB> from(c, block);
    const int64_t scales_ahead = ahead / (c.w.group * 8) + 1;  // of half as many numbers as the dense kind's bytes are
    const int64_t x_step = kAbreast > 1 ? 4 : c.x_stride;
    const char* x = c.x + row * c.x_stride;
    for (int64_t g = 0; g < c.groups; ++g) {
        I sum[1][R][NB], more[NB];
        for (int b = 0; b < NB; ++b) more[b] = set1_i(0);
        start_sums<1, 1, kOffset, R, NB, kAbreast>(c, sum, row, block, g);
        ask_scales<NB>(c, block, g + scales_ahead);
        for (int64_t k = 0; k < c.w.group; k += kSparseColumns) {
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) from.of[b].begin_chunk();
#pragma GCC unroll 8
            for (int i = 0; i < kSparseColumns; i += kStep, x += kStep * kAbreast) {
                U w[NB][SparseStream<kKind, true>::kRegisters];
                ask_sparse<kKind, NB>(from, ahead);
#pragma GCC unroll 8
                for (int b = 0; b < NB; ++b) from.of[b].next(w[b]);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const U x0 = set1_u(word(x + r * x_step)), x1 = set1_u(kFour ? word(x + r * x_step + 4 * kAbreast) : 0);
#pragma GCC unroll 8
                    for (int b = 0; b < NB; ++b) {
                        I& s = sum[0][r][b];
                        if constexpr (kFour) {
                            s = dot4(s, w[b][0], x0);
                            I& next = kTwo ? more[b] : s;
                            next = dot4(next, w[b][1], x1);
                        } else {
                            I& next = kTwo && i & kStep ? more[b] : s;
                            next = dot8(next, w[b][0], x0);
                        }
                    }
                }
            }
        }
        if constexpr (kTwo)
            for (int b = 0; b < NB; ++b) sum[0][0][b] = add_i(sum[0][0][b], more[b]);
        add_group<1, R, NB, kAbreast>(c, acc, sum, row, block, g);
    }
    store_tile<R, NB>(c, acc, row, block, whole, rows);
}

template <WeightKind kKind, int R, int NB, int kAbreast>
[[gnu::noinline]] void sparse_bf16_tile(const LinearCall& c, int64_t rows, int64_t row, int64_t block, int64_t ahead) {
    const Part whole{0, c.w.k, true, nullptr, 0, 0, 1};
    F acc[R][NB];
    load_tile<R, NB>(acc, whole);
    SparseStreams<kKind, NB> from(c, block);
    const int64_t x_step = kAbreast > 1 ? 4 : c.x_stride;
    const char* x = c.x + row * c.x_stride;
    for (int64_t k = 0; k < c.w.k; k += kSparseColumns) {
#pragma GCC unroll 8
        for (int b = 0; b < NB; ++b) from.of[b].begin_chunk();
        for (int i = 0; i < kSparseColumns; i += 2, x += 4 * kAbreast) {
            U wk[NB][1];
            ask_sparse<kKind, NB>(from, ahead);
#pragma GCC unroll 8
            for (int b = 0; b < NB; ++b) from.of[b].next(wk[b]);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const U xk = set1_u(word(x + r * x_step));
#pragma GCC unroll 8
                for (int b = 0; b < NB; ++b) acc[r][b] = dot_bf16(acc[r][b], wk[b][0], xk);
            }
        }
    }
    store_tile<R, NB>(c, acc, row, block, whole, rows);
}

// Whether tiles of R rows expand in registers, for up to two tiles. Integers that are two tiles do so twice: beside products it is nearly
// free, and whole columns of two blocks leave the first-level cache (16 rows by 8192 x 2048 of int8, one thread of a Zen 4: 2.3 instead
// of 2.8 ms).
template <WeightKind kKind, int R, bool kAlone>
constexpr bool expands_in_tiles() {
    return !is_two_of_four(kKind) && (kAlone || ((kStreamRows == 0 || !is_bf16(kKind)) && (R == kFewRows || R == kTileRows)));
}

template <WeightKind kKind, int R, int NB, bool kAlone>
void sparse_few_rows(const LinearCall& c, const Panel& p) {
    constexpr int kAbreast = rows_abreast<kKind, R, kAlone>();
    const int64_t ahead = !kAlone ? NB * c.w.code_step : R == 1 ? g_tuning.ahead : stream_ahead(NB);
    const auto tiles = [&]<int kBlocks>(int64_t block) {
        for (int64_t row = p.row; row < p.rows_end; row += R) {
            if constexpr (dense_of(kKind) == WeightKind::kBf16) sparse_bf16_tile<kKind, R, kBlocks, kAbreast>(c, p.rows_end - row, row, block, ahead);
            else sparse_int_tile<kKind, R, kBlocks, kAbreast>(c, p.rows_end - row, row, block, ahead);
        }
    };
    int64_t block = p.block;
    for (; block + NB <= p.blocks_end; block += NB) tiles.template operator()<NB>(block);
    for (; block < p.blocks_end; ++block) tiles.template operator()<1>(block);
}

#endif

// Columns of NB blocks that are expanded at a time: of integers, whose sums of groups do not wait in memory, all.
template <WeightKind kDense, int NB>
QUIRE_INLINE int64_t sparse_columns(const LinearCall& c) { return kDense == WeightKind::kBf16 ? bf12_columns(NB) : c.w.k; }

// Memory that a panel of `rows` rows needs.
template <WeightKind kKind, int R, int NB>
QUIRE_INLINE int64_t sparse_panel_bytes(const LinearCall& c, int64_t rows) {
    constexpr WeightKind kDense = dense_of(kKind);
    const int64_t wide = NB * sparse_columns<kDense, NB>(c) / columns_of_register(kKind) * 64;
    return wide + (kDense == WeightKind::kBf16 ? (rows + R - 1) / R * R * NB * 64 : 0);
}

// A part of the blocks' columns is expanded for all rows, then tiles of the dense kind multiply it.
template <WeightKind kDense, int R, int NB, bool kAlone>
void widened_panel(const LinearCall& c, const Panel& p, const char* (*widen)(char* to, const char* at, int64_t columns)) {
    constexpr int kAbreast = rows_abreast<kDense, R, kAlone>();
    constexpr bool kParts = kDense == WeightKind::kBf16;
    const int64_t columns = sparse_columns<kDense, NB>(c), block_bytes = columns / columns_of_register(kDense) * 64;
    const int64_t tiles = (p.rows_end - p.row + R - 1) / R, tile_floats = R * NB * 16;
    char* wide = p.work;
    auto* sums = reinterpret_cast<float*>(wide + NB * block_bytes);
    for (int64_t block = p.block; block < p.blocks_end; block += NB) {
        const int64_t blocks = p.blocks_end - block < NB ? p.blocks_end - block : NB;
        const char* from[NB];
        for (int64_t b = 0; b < blocks; ++b) from[b] = c.w.codes + (block + b) * c.w.code_step;
        for (int64_t begin = 0; begin < c.w.k; begin += columns) {
            const int64_t end = begin + columns < c.w.k ? begin + columns : c.w.k;
            for (int64_t b = 0; b < blocks; ++b) from[b] = widen(wide + b * block_bytes, from[b], end - begin);
            LinearCall dense = c;
            // Tiles of integers find their block from the first one's.
            if constexpr (!kParts) dense.w.codes = wide - block * block_bytes;
            for (int64_t t = 0; t < tiles; ++t) {
                const int64_t row = p.row + t * R, rows = p.rows_end - row < R ? p.rows_end - row : R;
                Part part{begin / 2, end / 2, end == c.w.k, sums, t * tile_floats, t, tiles, wide, block_bytes};
                if constexpr (!kParts) part = {0, c.w.k, true, nullptr, 0, t, tiles};
                if (blocks == NB) {
                    tile_of<kDense, NB, R, kAbreast, kAlone>(dense, rows, row, block, part);
                } else {
                    for (int64_t b = 0; b < blocks; ++b, part.at += R * 16, part.weights += part.stride)
                        tile_of<kDense, 1, R, kAbreast, kAlone>(dense, rows, row, block + b, part);
                }
            }
        }
    }
}

template <WeightKind kKind, int R, int NB, bool kAlone>
void sparse_panel(const LinearCall& c, const Panel& p) {
#if defined(__AVX512BW__)
    if constexpr (expands_in_tiles<kKind, R, kAlone>())
        if (g_expands && p.rows_end - p.row <= (kAlone ? R : 2 * kTileRows)) return sparse_few_rows<kKind, R, NB, kAlone>(c, p);
#endif
    widened_panel<dense_of(kKind), R, NB, kAlone>(c, p, &widen_sparse<kKind>);
}
