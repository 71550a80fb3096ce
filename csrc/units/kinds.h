// The table of kinds. A new kind of packed matrix is a row here and one in KINDS of src/quire/ops/matrix.py.
#pragma once

template <WeightKind kKind>
constexpr Kernels kernels() {
    return {&run_linear<kKind>, &abreast_of<kKind>, &panel_of<kKind>, &bytes_of_panel<kKind>, nullptr};
}

template <WeightKind kKind>
constexpr Kernels gated_kernels() {
    return {&run_linear<kKind>, &abreast_of<kKind>, &panel_of<kKind>, &bytes_of_panel<kKind>, &gated_rows<kKind>};
}

template <WeightKind kKind>
constexpr KindRow super_row(Kind kind) {
    constexpr SuperForm kForm = super_form(kKind);
    constexpr int kIndex = static_cast<int>(kKind) - static_cast<int>(WeightKind::kSuper2), kOffset = kForm.table ? kStart8 : kForm.offset;
    return {kind, Form::kCodes, kForm.group, kForm.group, kSuperColumns, kForm.table, kOffset, kOffset, look_up_super<kIndex>, {{gated_kernels<kKind>()}}};
}

constexpr int64_t never_abreast(int64_t /*m*/) { return 1; }

constexpr KindRow kKindRows[] = {
    {Kind::kF32, Form::kFloats, 0, 0, 1, false, 0, 0, look_up<Kind::kF32>, {{gated_kernels<WeightKind::kF32>()}}},
    {Kind::kBf16, Form::kHalves, 0, 0, 1, false, 0, 0, look_up<Kind::kBf16>, {{gated_kernels<WeightKind::kBf16>()}}},
    {Kind::kBf12, Form::kHalves, 0, 0, 8, true, 0, 0, look_up<Kind::kBf12>, {{gated_kernels<WeightKind::kBf12>()}}},
    {Kind::kFp8, Form::kHalves, 32, 256, 1, false, 0, 0, look_up<Kind::kFp8>, {{{}, {&run_fp8, &never_abreast, &fp8_panel_of, &fp8_panel_bytes, nullptr}}}},
    {Kind::kInt8, Form::kCodes, 16, 128, 1, false, kStart8, kStart8, look_up<Kind::kInt8>,
     {{gated_kernels<WeightKind::kInt8>(), kernels<WeightKind::kInt8Wide>()}}},
    {Kind::kInt4, Form::kCodes, 16, 128, 1, false, 8, 0, look_up<Kind::kInt4>,
     {{gated_kernels<WeightKind::kInt4>(), kernels<WeightKind::kInt4Wide>()}}},
    {Kind::kTable4, Form::kCodes, 16, 128, 1, true, kStart8, kStart8, look_up<Kind::kTable4>,
     {{kernels<WeightKind::kTable>(), kernels<WeightKind::kTableWide>()},
      {kernels<WeightKind::kTablePair>(), kernels<WeightKind::kTablePairWide>()}}},
    {Kind::kBf16Floats, Form::kFloats, 0, 0, 1, false, 0, 0, look_up<Kind::kBf16Floats>, {{gated_kernels<WeightKind::kBf16Floats>()}}},
    super_row<WeightKind::kSuper2>(Kind::kSuper2),
    super_row<WeightKind::kSuper3>(Kind::kSuper3),
    super_row<WeightKind::kSuper4>(Kind::kSuper4),
    super_row<WeightKind::kSuper5>(Kind::kSuper5),
    super_row<WeightKind::kSuper6>(Kind::kSuper6),
    super_row<WeightKind::kSuperTable>(Kind::kSuperTable4),
};
constexpr auto kKindCount = static_cast<int64_t>(sizeof(kKindRows) / sizeof(kKindRows[0]));

constexpr bool in_order() {
    for (int64_t i = 0; i < kKindCount; ++i)
        if (static_cast<int64_t>(kKindRows[i].kind) != i) return false;
    return true;
}
static_assert(in_order(), "the rows must lie in the order of Kind");

const KindRow& row_of(const Matrix& w) {
    constexpr int64_t kMost = int64_t{1} << 40;
    if (static_cast<int64_t>(w.kind) < 0 || static_cast<int64_t>(w.kind) >= kKindCount) fail("matrix: unknown kind");
    const KindRow& row = kKindRows[static_cast<int64_t>(w.kind)];
    if (w.n < 1 || w.k < 1 || w.n > kMost || w.k > kMost || !w.codes) fail("matrix: sizes must lie in [1, 2^40]");
    if (w.k % row.multiple) fail("matrix: its columns are not a multiple of what its layout holds together");
    if (row.table && !w.table) fail("matrix: it needs a table");
    if (w.digits < 1 || w.digits > 2 || w.planes < 1 || w.planes > 2 || !row.kernels[w.planes - 1][w.digits - 1].run)
        fail("matrix: no kernel has so many digits");
    const bool power = w.group > 0 && (w.group & (w.group - 1)) == 0;
    if (row.most_group ? !power || w.group < row.least_group || w.group > row.most_group || w.k % w.group || !w.scales : w.group != 0)
        fail("matrix: its group or scales do not fit its columns");
    if (w.kind == Kind::kFp8 && !w.wide) fail("matrix: scales of fp8 are f32");
    if (w.kind >= Kind::kSuper2) {
        const SuperForm& form = kSuperForms[static_cast<int64_t>(w.kind) - static_cast<int64_t>(Kind::kSuper2)];
        if (w.wide || w.zeros || form.mins != (w.mins != nullptr)) fail("matrix: super-blocks have f16 units, and minimums as their kind says");
    }
    return row;
}
