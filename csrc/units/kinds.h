// The rows of kinds.inc with the kernels of this unit.
#pragma once

template <WeightKind kKind>
constexpr Kernels of() {
    return {&run_linear<kKind>, &abreast_of<kKind>, &panel_of<kKind>, &bytes_of_panel<kKind>, mlp_rows(kKind)};
}

constexpr int64_t never_abreast(int64_t /*m*/) { return 1; }

template <>
constexpr Kernels of<WeightKind::kFp8>() {
    return {&run_fp8, &never_abreast, &fp8_panel_of, &fp8_panel_bytes, 0};
}

// What of the offset the unit's products leave to the start of their sums; of bytes see kStart8.
constexpr int32_t start_of(int offset) { return offset == 128 ? kStart8 : offset; }
// Codes of fewer bits begin at their minimum where there is one.
constexpr int32_t start_with_mins(int offset) { return offset == 128 ? kStart8 : 0; }

constexpr KindRow kKindRows[] = {
#define KIND(id, name, bits, together, codes, packer, least, most, multiples, zeros, mins, table, order, fuses, form, offset, ...) \
    {kKindFacts[static_cast<int64_t>(Kind::id)], Form::form, *packer ? 1 : together, start_of(offset), start_with_mins(offset), look_up<Kind::id>, {__VA_ARGS__}},
#include "kinds.inc"
};

const KindRow& row_of(const Matrix& w) {
    constexpr int64_t kMost = int64_t{1} << 40;
    if (static_cast<int64_t>(w.kind) < 0 || static_cast<int64_t>(w.kind) >= kKindCount) fail("matrix: unknown kind");
    const KindRow& row = kKindRows[static_cast<int64_t>(w.kind)];
    const KindFacts& facts = row.facts;
    if (w.n < 1 || w.k < 1 || w.n > kMost || w.k > kMost || !w.codes) fail("matrix: sizes must lie in [1, 2^40]");
    if (w.k % row.multiple) fail("matrix: its columns are not a multiple of what its layout holds together");
    if (facts.table == Has::kMust && !w.table) fail("matrix: it needs a table");
    if (w.digits < 1 || w.digits > 2 || w.planes < 1 || w.planes > 2 || !row.kernels[w.planes - 1][w.digits - 1].run)
        fail("matrix: no kernel has so many digits");
    const bool power = w.group > 0 && (w.group & (w.group - 1)) == 0;
    if (facts.most_group ? !power || w.group < facts.least_group || w.group > facts.most_group || w.k % w.group || !w.scales : w.group != 0)
        fail("matrix: its group or scales do not fit its columns");
    if (w.kind == Kind::kFp8 && !w.wide) fail("matrix: scales of fp8 are f32");
    if (facts.multiples && (w.wide || w.zeros || (facts.mins == Has::kMust) != (w.mins != nullptr)))
        fail("matrix: super-blocks have f16 units, and minimums as their kind says");
    return row;
}
