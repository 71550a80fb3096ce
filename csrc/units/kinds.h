// The rows of kinds.inc with the kernels of this unit, which linear_*.cpp define.
#pragma once

#include "kind.h"

namespace quire::QUIRE_UNIT {

namespace {

// What of the offset the unit's products leave to the start of their sums; of bytes see kStart8.
constexpr int32_t start_of(int offset) { return offset == 128 ? kStart8 : offset; }
// Codes of fewer bits begin at their minimum where there is one.
constexpr int32_t start_with_mins(int offset) { return offset == 128 ? kStart8 : 0; }

constexpr KindRow row_for(const KindFacts& facts, const KernelSet& kernels) {
    return {facts, *facts.packer ? 1 : facts.together, start_of(facts.offset), start_with_mins(facts.offset), &kernels};
}

constexpr KindRow kKindRows[] = {
#define KIND(id, ...) row_for(kKindFacts[static_cast<int64_t>(Kind::id)], id##Kernels),
#include "kinds.inc"
};

}  // namespace

const KindRow& row_of(const Matrix& w) {
    constexpr int64_t kMost = int64_t{1} << 40;
    if (static_cast<int64_t>(w.kind) < 0 || static_cast<int64_t>(w.kind) >= kKindCount) fail("matrix: unknown kind");
    const KindRow& row = kKindRows[static_cast<int64_t>(w.kind)];
    const KindFacts& facts = row.facts;
    if (w.n < 1 || w.k < 1 || w.n > kMost || w.k > kMost || !w.codes) fail("matrix: sizes must lie in [1, 2^40]");
    if (w.k % row.multiple) fail("matrix: its columns are not a multiple of what its layout holds together");
    if (facts.table == Has::kMust && !w.table) fail("matrix: it needs a table");
    if (w.digits < 1 || w.digits > 2 || w.planes < 1 || w.planes > 2 || !row.of->kernels[w.planes - 1][w.digits - 1].run)
        fail("matrix: no kernel has so many digits");
    const bool power = w.group > 0 && (w.group & (w.group - 1)) == 0;
    if (facts.most_group ? !power || w.group < facts.least_group || w.group > facts.most_group || w.k % w.group || !w.scales : w.group != 0)
        fail("matrix: its group or scales do not fit its columns");
    if (row.of->wide_scales && !w.wide) fail("matrix: scales of this kind are f32");
    if (facts.multiples && (w.wide || w.zeros || (facts.mins == Has::kMust) != (w.mins != nullptr)))
        fail("matrix: super-blocks have f16 units, and minimums as their kind says");
    return row;
}

}  // namespace quire::QUIRE_UNIT
