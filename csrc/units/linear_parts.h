// The k axis in parts, and the tile for the rows that are left.
#pragma once

template <WeightKind kKind, int R, int NB, int kAbreast, bool kAlone>
void tile(const LinearCall& c, int64_t row, int64_t block, const Part& part) {
    if constexpr (reads_floats(kKind)) {
        f32_tile<kKind, R, NB>(c, row, block, part);
    } else if constexpr (is_bf16(kKind)) {
        bf16_tile<R, NB, kAbreast, kAlone>(c, row, block, part);
    } else {
        int_tile<kKind, R, NB, kAbreast, kAlone>(c, row, block, part);
    }
}

// The tile of `rows` <= R rows; of rows that lie side by side there are no fewer than half of R.
template <WeightKind kKind, int NB, int R, int kAbreast, bool kAlone>
void tile_of(const LinearCall& c, int64_t rows, int64_t row, int64_t block, const Part& part) {
#if defined(__AVX512BW__)
    if constexpr (chooses(kKind)) return chosen_tile_of<kKind, NB, R, kAlone>(c, rows, row, block, part);
#endif
    with_count<R, (kAbreast > 1 ? kAbreast / 2 : 1)>(rows, [&]<int kRows>() { tile<kKind, kRows, NB, kAbreast, kAlone>(c, row, block, part); });
}

// Columns of 12-bit weights (and of those without zeros) that are widened at a time: two blocks of them stay in the first-level cache, the four of a tile for
// many rows in the second (256 columns of those, in the first, were 2-5 % slower at 512 rows).
constexpr int64_t bf12_columns(int blocks) { return blocks > 2 ? 1024 : 512; }

// How a weight's k axis is walked: float weights go in parts when there are more rows than one tile, because a group of blocks
// of the whole k would not stay cached.
template <WeightKind kKind, int R, int NB>
QUIRE_INLINE int64_t steps_of_part(const LinearCall& c, int64_t m) {
    const int64_t steps = is_bf16(kKind) ? (c.w.k + 1) / 2 : c.w.k;
    if constexpr (kKind == WeightKind::kBf12 || (is_sparse(kKind) && !chooses(kKind))) return bf12_columns(NB) / 2;
    return is_float(kKind) && m > R && steps > kPartSteps ? kPartSteps : steps;
}

// Where the weights of a part lie; a tile that reads them alone asks for those ahead, others for the next part's, then the next blocks'.
template <int R, int NB, bool kAlone>
QUIRE_INLINE void read_bf16(Part& part, const LinearCall& c, int64_t block, int64_t steps) {
    const int64_t ahead = R == 1 ? g_tuning.ahead : kAlone ? stream_ahead(NB) : 0;
    part.stride = part.next_stride = steps * 64;
    part.weights = c.w.codes + block * part.stride + part.begin * 64;
    part.next = part.weights + (ahead ? ahead : part.last ? NB * part.stride - part.begin * 64 : (part.end - part.begin) * 64);
    part.next_step = 64;
}
