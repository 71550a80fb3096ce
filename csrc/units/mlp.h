// out [m, hidden] = down(act(gate(x)) * up(x)): the gated MLP (Shazeer 2020) without its two wide intermediates in memory.
//
// A task computes one piece of gate and the same piece of up for a panel of rows into its own small buffer, applies the
// activation there, and leaves the product in the form `down` reads. Element by element the arithmetic is that of linear,
// gated_activation and linear in turn. Why: at 512 rows of a 1 B model the intermediates are 100 MB of traffic a layer.
#pragma once

struct Matrix {
    WeightKind kind;
    const char* weights;
    const char* scales;
    const int8_t* zeros;
    const char* mins;
    bool scales_f32;
    const float* bias;
    int64_t n, k, group;
};

constexpr int64_t kMlpColumns = 128;
// Neighbouring tasks have the piece of weights in common, or the panel of rows: where panels are low the weights would be read
// from memory again for each (4 % of the time at 512 rows on a Zen 5).
#if defined(QUIRE_AMX)
constexpr int64_t kMlpRows = kAmxPanelRows;
constexpr bool kPieceInCommon = false;
#else
constexpr int64_t kMlpRows = 96;
constexpr bool kPieceInCommon = true;
#endif

// f.template operator()<kind>() for the kind at hand.
template <class Fn>
QUIRE_INLINE void with_kind(WeightKind kind, const Fn& f) {
    switch (kind) {
        case WeightKind::kF32: return f.template operator()<WeightKind::kF32>();
        case WeightKind::kBf16: return f.template operator()<WeightKind::kBf16>();
        case WeightKind::kBf12: return f.template operator()<WeightKind::kBf12>();
        case WeightKind::kInt8: return f.template operator()<WeightKind::kInt8>();
        case WeightKind::kInt4: return f.template operator()<WeightKind::kInt4>();
        default: fail("gated_mlp: unknown kind of weights");
    }
}

// What a group's sum of codes is multiplied with to be the start of its sums, see LinearCall.
QUIRE_INLINE int32_t start_factor(const Matrix& w) {
    if (w.zeros) return -1;
    return w.kind == WeightKind::kInt8 ? -kStart8 : w.mins ? 0 : -8;
}

// Space for rows of activations in the form that the kernels of one matrix read: integers or numbers.
CodedRows rows_for(const Matrix& w, int64_t m, Scratch codes, Scratch scales) {
    int64_t abreast = 1;
    with_kind(w.kind, [&]<WeightKind kKind>() { abreast = abreast_of<kKind>(m); });
    if (w.group) return coded_rows<1>(m, w.k, w.group, abreast, codes, scales);
    const int64_t stride = is_bf16(w.kind) ? bf16_stride(w.k) : w.k * 4;
    return {static_cast<char*>(scratch(codes, static_cast<size_t>((abreast > m ? abreast : m) * stride))), stride, 0, 0, abreast, nullptr, nullptr, nullptr};
}

// Columns column .. column + count of row r, rounded or quantized from f32 numbers.
QUIRE_INLINE void fill_rows(const Matrix& w, const CodedRows& to, int64_t r, int64_t column, const float* from, int64_t count) {
    char* row = to.codes + r * to.stride;
    if (w.group) {
        quantize_row<1>(to.from<1>(r, column / w.group, w.group), from, count, w.group, start_factor(w));
    } else if (to.abreast > 1) {
        round_pairs(to.codes + (column / 2 * to.abreast + r) * 4, to.abreast * 4, from, count);
    } else if (is_bf16(w.kind)) {
        round_row(reinterpret_cast<uint16_t*>(row) + column, from, count);
    } else {
        std::memcpy(reinterpret_cast<float*>(row) + column, from, static_cast<size_t>(count) * 4);
    }
}

LinearCall call_of(const Matrix& w, const CodedRows& rows, float* out) {
    return {out, w.n, w.weights, w.scales, w.zeros, w.bias, w.n, w.k, w.group, rows.groups, w.scales_f32, rows.codes, rows.stride,
            rows.scales, rows.starts, w.mins, rows.sums};
}

// Bytes of 16 packed rows of the matrix.
QUIRE_INLINE int64_t block_bytes_of(const Matrix& w) {
    if (w.kind == WeightKind::kF32) return w.k * 64;
    if (w.kind == WeightKind::kBf16) return (w.k + 1) / 2 * 64;
    if (w.kind == WeightKind::kBf12) return bf12_bytes(w.k);
    return w.kind == WeightKind::kInt8 ? w.k * 16 : w.k * 8;
}

// The call that computes columns first .. first + count (multiples of 16) of `c` for `rows` rows from `row` on.
QUIRE_INLINE LinearCall part_of(const LinearCall& c, const Matrix& w, int64_t row, int64_t first, int64_t count, float* out, int64_t out_stride) {
    LinearCall part = c;
    const int64_t block = first / 16;
    part.out = out - row * out_stride;
    part.out_stride = out_stride;
    part.n = count;
    part.weights += block * block_bytes_of(w);
    if (w.scales) part.scales += block * c.groups * 16 * (c.scales_f32 ? 4 : 2);
    if (w.zeros) part.zeros += block * c.groups * 16;
    if (w.mins) part.mins += block * c.groups * 16 * (c.scales_f32 ? 4 : 2);
    if (w.bias) part.bias += first;
    return part;
}

using Gate = void (*)(float* gate, const float* up, int64_t count);

// gate = act(gate) * up.
template <int64_t kActivation>
void gate_row(float* gate, const float* up, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) store(gate + i, mul(activate<kActivation>(load(gate + i)), load(up + i)));
}

constexpr Gate kGates[] = {gate_row<kSilu>, gate_row<kGelu>, gate_row<kGeluTanh>, gate_row<kRelu>, gate_row<kRelu2>};
static_assert(sizeof(kGates) / sizeof(Gate) == kActivations);

// act(gate) * up for all rows, into the form `down` reads.
template <WeightKind kKind>
void gated_rows(const LinearCall& c, const Matrix& w, const Matrix& down, const CodedRows& inner, int64_t m, Gate act) {
    constexpr int64_t kRows = kKind == WeightKind::kBf12 ? 2 * kMlpRows : kMlpRows;  // that share what was widened for them
    const int64_t f = down.k, pieces = (f + kMlpColumns - 1) / kMlpColumns, panels = (m + kRows - 1) / kRows;
    with_tile<kKind>(m, [&]<int R, int NB, bool kAlone>() {
        parallel_for(panels * pieces, [&](int64_t index, int) {
            const int64_t row = (kPieceInCommon ? index % panels : index / pieces) * kRows, end = row + kRows < m ? row + kRows : m;
            const int64_t first = (kPieceInCommon ? index / panels : index % pieces) * kMlpColumns, count = f - first < kMlpColumns ? f - first : kMlpColumns;
            auto* buffer = static_cast<float*>(scratch(Scratch::kTile, static_cast<size_t>(kRows * 2 * kMlpColumns) * 4));
            const Panel panel{row, end, 0, count / 16};
            best_panel<kKind, R, NB, kAlone>(part_of(c, w, row, first, count, buffer, 2 * count), m, panel);
            best_panel<kKind, R, NB, kAlone>(part_of(c, w, row, f + first, count, buffer + count, 2 * count), m, panel);
            for (int64_t r = row; r < end; ++r) {
                float* gate = buffer + (r - row) * 2 * count;
                act(gate, gate + count, count);
                fill_rows(down, inner, r, first, gate, count);
            }
        });
    });
}

// A matrix as arguments of an op: kind (0 f32, 1 bf16, 2 bf16 in 12 bits, 3 int8, 4 int4), then what it comes with.
struct MatrixArgs {
    int64_t kind;
    const char* weights;
    Optional<const char> scales;
    Optional<const int8_t> zeros;
    Optional<const char> mins;
    int64_t scales_f32;
    Optional<const float> bias;
    int64_t group;
};

Matrix matrix_of(const MatrixArgs& a, int64_t n, int64_t k) {
    constexpr WeightKind kKinds[] = {WeightKind::kF32, WeightKind::kBf16, WeightKind::kBf12, WeightKind::kInt8, WeightKind::kInt4};
    if (a.kind < 0 || a.kind > 4) fail("gated_mlp: unknown kind of weights");
    const bool grouped = a.kind >= 3, narrow = a.kind == 2, fits = a.group == 16 || a.group == 32 || a.group == 64 || a.group == 128;
    check_linear(1, n, k);
    if (grouped && (!a.scales.ptr || !fits || k % a.group)) fail("gated_mlp: a group does not fit its matrix");
    if (narrow && (!a.scales.ptr || k % 8)) fail("gated_mlp: 12 bits need their exponents, and columns in eights");
    return {kKinds[a.kind], a.weights, a.scales.ptr, a.zeros.ptr, a.mins.ptr, a.scales_f32 != 0, a.bias.ptr, n, k, grouped ? a.group : 0};
}

// gate_up [2 f, hidden], down [hidden, f]; f a multiple of 16.
void gated_mlp(float* out, const float* x, int64_t kind, const char* weights, Optional<const char> scales, Optional<const int8_t> zeros,
               Optional<const char> mins, int64_t scales_f32, Optional<const float> bias, int64_t group, int64_t down_kind,
               const char* down_weights, Optional<const char> down_scales, Optional<const int8_t> down_zeros,
               Optional<const char> down_mins, int64_t down_scales_f32, Optional<const float> down_bias, int64_t down_group,
               int64_t m, int64_t hidden, int64_t f, int64_t act) {
    check_linear(m, f, hidden);
    if (f % 16) fail("gated_mlp: the inner size must be a multiple of 16");
    if (act < 0 || act >= kActivations) fail("gated_mlp: unknown activation");
    const Matrix w = matrix_of({kind, weights, scales, zeros, mins, scales_f32, bias, group}, 2 * f, hidden);
    const Matrix down = matrix_of({down_kind, down_weights, down_scales, down_zeros, down_mins, down_scales_f32, down_bias, down_group}, hidden, f);
    const CodedRows input = rows_for(w, m, Scratch::kActivations, Scratch::kScales);
    const CodedRows inner = rows_for(down, m, Scratch::kHidden, Scratch::kHiddenScales);
    if (w.group) {
        quantize_rows<1>(input, x, m, hidden, w.group, start_factor(w));
    } else if (input.abreast > 1) {
        round_abreast(input.codes, x, m, hidden, input.abreast);
    } else {
        parallel_ranges(m, hidden, [&](int64_t begin, int64_t end) {
            for (int64_t r = begin; r < end; ++r) fill_rows(w, input, r, 0, x + r * hidden, hidden);
        });
    }
    const LinearCall c = call_of(w, input, nullptr);
    with_kind(w.kind, [&]<WeightKind kKind>() { gated_rows<kKind>(c, w, down, inner, m, kGates[act]); });
    with_kind(down.kind, [&]<WeightKind kKind>() { run_linear<kKind>(call_of(down, inner, out), m); });
}
