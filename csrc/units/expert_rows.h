// The pairs (token, choice) of a mixture sorted by expert: which expert has which, their activations, and pieces of work. All of
// it is read from memory when an op runs, so that a recorded step can be replayed for other tokens.
#pragma once

#include "linear_op.h"

namespace quire::QUIRE_UNIT {
namespace {

// An expert that has pairs: begin .. begin + count of them, and their activations before its first and its last matrix.
struct Expert {
    int64_t id, begin, count;
    Rows rows, inner;
};

struct Experts {
    Expert* first;
    int64_t count;
    Expert* begin() const { return first; }
    Expert* end() const { return first + count; }
};

// Rows row .. end of an expert's by columns column .. column + columns of its matrix.
struct ExpertPiece {
    const Expert* expert;
    int64_t row, end, column, columns;
};

struct ExpertPieces {
    const ExpertPiece* first;
    int64_t count;
};

// The experts that have pairs. Those with most come first (by powers of two), so that what is left at the end of a region is small.
Experts experts_of(const int32_t* offsets, int64_t experts) {
    auto* found = static_cast<Expert*>(scratch(Scratch::kExperts, static_cast<size_t>(experts) * sizeof(Expert)));
    uint64_t most = 0;
    const auto pairs_of = [&](int64_t e) { return static_cast<uint64_t>(offsets[e + 1] - offsets[e]); };
    for (int64_t e = 0; e < experts; ++e) most = pairs_of(e) > most ? pairs_of(e) : most;
    int64_t count = 0;
    for (int size = static_cast<int>(std::bit_width(most)); size > 0; --size)
        for (int64_t e = 0; e < experts; ++e)
            if (static_cast<int>(std::bit_width(pairs_of(e))) == size)
                found[count++] = {e, offsets[e], static_cast<int64_t>(pairs_of(e)), {}, {}};
    return {found, count};
}

// The work of `columns` columns of every expert, in pieces of `width` columns by `height` rows. Neighbouring pieces have columns in
// common, so that weights are read from memory once.
ExpertPieces pieces_of(const Experts& experts, int64_t columns, int64_t width, int64_t height) {
    const int64_t across = (columns + width - 1) / width;
    int64_t most = 0, count = 0;
    for (const Expert& e : experts) most += (e.count + height - 1) / height * across;
    auto* pieces = static_cast<ExpertPiece*>(scratch(Scratch::kPieces, static_cast<size_t>(most) * sizeof(ExpertPiece)));
    for (const Expert& e : experts)
        for (int64_t column = 0; column < columns; column += width)
            for (int64_t row = 0; row < e.count; row += height)
                pieces[count++] = {&e, row, row + height < e.count ? row + height : e.count, column,
                                   column + width < columns ? width : columns - column};
    return {pieces, count};
}

// Space for the activations of all pairs in the form that the kernels of `w` read, which depends on how many an expert has.
void lay_out(const Matrix& w, const Experts& experts, Rows Expert::* rows, Scratch codes, Scratch numbers) {
    const Kernels& kernels = kernels_of(w);
    const auto bytes_of = [&](const Expert& e) {
        const RowBytes bytes = bytes_of_rows(w, e.count, kernels.interleaved(e.count));
        return RowBytes{(bytes.codes + 63) / 64 * 64, (bytes.numbers + 63) / 64 * 64};
    };
    RowBytes all{0, 0};
    for (const Expert& e : experts) all = {all.codes + bytes_of(e).codes, all.numbers + bytes_of(e).numbers};
    auto* at = static_cast<char*>(scratch(codes, static_cast<size_t>(all.codes)));
    auto* at_numbers = static_cast<char*>(scratch(numbers, static_cast<size_t>(all.numbers)));
    for (Expert& e : experts) {
        e.*rows = rows_at(w, e.count, kernels.interleaved(e.count), at, at_numbers);
        at += bytes_of(e).codes;
        at_numbers += bytes_of(e).numbers;
    }
}

// `count` words one below the other, to every `interleaved`-th.
QUIRE_INLINE void spread_words(char* to, int64_t interleaved, const void* from, int64_t count) {
    const auto* words = static_cast<const char*>(from);
    if (interleaved == 1) {
        std::memcpy(to, words, static_cast<size_t>(count) * 4);
        return;
    }
    for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * interleaved * 4, words + i * 4, 4);
}

// Row r of `from`, where rows lie one below the other, as row `at` of `to`.
void copy_row(const Matrix& w, const Rows& to, int64_t at, const Rows& from, int64_t r) {
    const char* row = from.codes + r * from.stride;
    const bool below = to.interleaved == 1;
    char* target = to.codes + at * (below ? to.stride : 4);
    if (row_of(w).facts.form != Form::kCodes) {
        const int64_t words = row_of(w).facts.form == Form::kFloats ? w.k : below ? (w.k + 31) / 32 * 16 : (w.k + 1) / 2;
        spread_words(target, to.interleaved, row, words);
        return;
    }
    const int64_t place = at * (below ? to.groups : 1), first = r * from.groups;
    for (int64_t d = 0; d < w.digits; ++d) spread_words(target + d * to.digit, to.interleaved, row + d * from.digit, w.k / 4);
    for (int64_t g = 0; g < to.groups; ++g) {
        to.scales[place + g * to.interleaved] = from.scales[first + g];
        to.sums[place + g * to.interleaved] = from.sums[first + g];
        for (int64_t d = 0; d < w.digits; ++d)
            to.starts[(place + g * to.interleaved) * w.digits + d] = from.starts[(first + g) * w.digits + d];
    }
}

// Sets e.rows to the activations of all pairs: those of a token, row tokens[i] of x [x_rows, k], are made once however many experts
// read them; without `tokens` x has the pairs' own, in their order.
void read_pairs(const Matrix& w, const Experts& experts, const float* x, const int32_t* tokens, int64_t x_rows) {
    constexpr int64_t kRows = 32;
    if (w.order) x = reorder(x, w.order, x_rows, w.k);
    lay_out(w, experts, &Expert::rows, Scratch::kPairs, Scratch::kPairScales);
    const Rows once = tokens ? read_rows(w, x, x_rows, 1) : Rows{};
    const ExpertPieces pieces = pieces_of(experts, 1, 1, kRows);
    int64_t pairs = 0;
    for (const Expert& e : experts) pairs += e.count;
    parallel_ranges(pieces.count, (w.k * pairs + pieces.count - 1) / pieces.count, [&](int64_t begin, int64_t end) {
        for (const ExpertPiece* piece = pieces.first + begin; piece < pieces.first + end; ++piece)
            for (int64_t r = piece->row; r < piece->end; ++r) {
                const Expert& e = *piece->expert;
                if (tokens) copy_row(w, e.rows, r, once, tokens[e.begin + r]);
                else fill_rows(w, e.rows, r, 0, x + (e.begin + r) * w.k, w.k);
            }
    });
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
