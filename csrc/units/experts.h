// The matrices of a mixture of experts, each with the rows of its pairs (token, choice): a region of tasks (expert, piece of
// columns) for all experts together. A piece is computed by its kind's own tiles, so a row has the bits that `linear` gives it.
#pragma once

#include "expert_rows.h"
#include "linear_tiles.h"
#include "mlp.h"
#include "moe.h"

namespace quire::QUIRE_UNIT {
namespace {

constexpr int64_t kExpertColumns = kMlpColumns, kExpertRows = kMlpRows;
constexpr int64_t kFewPairs = 256;  // up to which the products of a piece of columns stay in a core's caches until they are summed

// The matrices of all experts: ExpertsDescriptor as the kernels see it.
struct Stack {
    const Matrix& w;
    const float* bias;
    int64_t n;

    explicit Stack(const ExpertsDescriptor& e) : w(*e.matrices), bias(e.bias), n(e.n) {
        if (e.experts < 1 || n < 1 || w.n != e.experts * ((n + 15) / 16 * 16)) fail("experts: the matrix is not that of so many experts");
    }

    LinearCall call(const Expert& e, const Rows& rows, float* out) const {
        return call_of(expert_of(w, e.id, n), rows, bias ? bias + e.id * n : nullptr, out);
    }
};

// Memory of a task that computes panels of up to `height` rows by `columns` columns of any expert.
int64_t panel_memory(const Stack& s, const Experts& experts, int64_t height, int64_t columns) {
    const Kernels& kernels = kernels_of(s.w);
    int64_t bytes = 0;
    for (const Expert& e : experts) {
        const int64_t wanted = kernels.panel_bytes(s.call(e, e.rows, nullptr), e.count, e.count < height ? e.count : height, (columns + 15) / 16);
        bytes = wanted > bytes ? wanted : bytes;
    }
    return bytes;
}

// How many pairs there are: as many as there is room for, or fewer where other ranks have experts too.
int64_t check_pairs(const PairsDescriptor& p, int64_t experts) {
    const int64_t pairs = p.offsets[experts];
    if (p.offsets[0] != 0 || pairs < 0 || pairs > p.room) fail("experts: offsets must run from 0 to the number of pairs");
    for (int64_t e = 0; e < experts; ++e)
        if (p.offsets[e + 1] < p.offsets[e]) fail("experts: offsets must ascend");
    for (int64_t i = 0; p.tokens && i < pairs; ++i)
        if (p.tokens[i] < 0 || p.tokens[i] >= p.x_rows) fail("experts: a token lies outside the batch");
    return pairs;
}

// out [pairs, n] = the pairs' activations times their experts' matrices.
void multiply_pairs(float* out, const Stack& s, const Experts& experts, Rows Expert::* rows, int64_t pairs) {
    const Kernels& kernels = kernels_of(s.w);
    const ExpertPieces pieces = pieces_of(experts, s.n, kExpertColumns, kExpertRows);
    const Work work(panel_memory(s, experts, kExpertRows, kExpertColumns));
    parallel_for(pieces.count, [&](int64_t index, int thread) {
        const ExpertPiece& p = pieces.first[index];
        const Expert& e = *p.expert;
        const LinearCall call = with_large_output(s.call(e, e.*rows, nullptr), pairs);
        float* to = out + (e.begin + p.row) * s.n + p.column;
        kernels.panel(part_of(call, p.row, p.column, p.columns, to, s.n), e.count, {p.row, p.end, 0, (p.columns + 15) / 16, work.of(thread)});
    });
}

// out [room, n]. With `tokens`, pair i reads row tokens[i] of x [x_rows, k], else row i.
void grouped_linear(float* out, const float* x, const ExpertsDescriptor* matrices, const PairsDescriptor* p) {
    const Stack s(*matrices);
    const int64_t pairs = check_pairs(*p, matrices->experts);
    if (!pairs) return;
    const Experts in_use = experts_of(p->offsets, matrices->experts);
    read_pairs(s.w, in_use, x, p->tokens, p->x_rows);
    multiply_pairs(out, s, in_use, &Expert::rows, pairs);
}

// What stands between the matrices of an expert.
struct Between {
    Gate act;
    const ClampedSwiglu* clamped;  // instead, if any

    void operator()(float* gate, const float* up, int64_t count) const {
        if (!clamped) return act(gate, up, count);
        for (int64_t i = 0; i < count; i += 16) store(gate + i, clamped_gate(*clamped, load(gate + i), load(up + i)));
    }
};

// act(gate) * up of all pairs, into the form that `down` reads; a task as in mlp.h.
void gate_pairs(const Stack& s, const Matrix& down, const Experts& experts, const Between& act) {
    const Kernels& kernels = kernels_of(s.w);
    const int64_t f = down.k;
    const ExpertPieces pieces = pieces_of(experts, f, kExpertColumns, kExpertRows);
    int64_t height = 0;
    for (const Expert& e : experts) height = e.count > height ? e.count : height;
    const int64_t buffer = (height < kExpertRows ? height : kExpertRows) * 2 * kExpertColumns * 4;
    const Work work(buffer + panel_memory(s, experts, kExpertRows, kExpertColumns));
    parallel_for(pieces.count, [&](int64_t index, int thread) {
        const ExpertPiece& p = pieces.first[index];
        const Expert& e = *p.expert;
        const LinearCall call = s.call(e, e.rows, nullptr);
        const Panel panel{p.row, p.end, 0, p.columns / 16, work.of(thread) + buffer};
        auto* gates = reinterpret_cast<float*>(work.of(thread));
        kernels.panel(part_of(call, p.row, p.column, p.columns, gates, 2 * p.columns), e.count, panel);
        kernels.panel(part_of(call, p.row, f + p.column, p.columns, gates + p.columns, 2 * p.columns), e.count, panel);
        for (int64_t r = p.row; r < p.end; ++r) {
            float* gate = gates + (r - p.row) * 2 * p.columns;
            act(gate, gate + p.columns, p.columns);
            fill_rows(down, e.inner, r, p.column, gate, p.columns);
        }
    });
}

// The choices of each token: where its pairs lie and what they weigh.
struct Choices {
    const int32_t* places;
    const float* weights;
    int64_t rows, top_k;
};

// out [rows, n] = the weighted sums of the last products. A task makes a piece of columns of all pairs' and sums them up, while
// these are few; y [pairs * n] holds the pieces one after the other.
void sum_few_pairs(float* out, float* y, const Stack& s, const Experts& experts, const Choices& c) {
    const Kernels& kernels = kernels_of(s.w);
    const int64_t blocks = (s.n + 15) / 16, pairs = c.rows * c.top_k, share = blocks / (4 * thread_count());
    const int64_t width = 16 * (share < 1 ? 1 : share < kExpertColumns / 16 ? share : kExpertColumns / 16);
    const Work work(panel_memory(s, experts, pairs, width));
    parallel_for((s.n + width - 1) / width, [&](int64_t index, int thread) {
        const int64_t column = index * width, columns = column + width < s.n ? width : s.n - column;
        float* piece = y + column * pairs;
        for (const Expert& e : experts) {
            const LinearCall call = s.call(e, e.inner, nullptr);
            kernels.panel(part_of(call, 0, column, columns, piece + e.begin * columns, columns), e.count, {0, e.count, 0, (columns + 15) / 16, work.of(thread)});
        }
        for (int64_t r = 0; r < c.rows; ++r)
            combine_row(out + r * s.n + column, piece, c.places + r * c.top_k, c.weights + r * c.top_k, c.top_k, columns);
    });
}

// out [rows, n]; y [rows * top_k, n] is work space; gate_up: matrices of 2 down.k rows, a multiple of 32. Of the rows the first
// offsets[experts] / top_k are computed, which are all where this rank has all experts.
void expert_mlp(float* out, float* y, const float* x, const ExpertsDescriptor* gate_up, const ExpertsDescriptor* down,
                const BetweenDescriptor* between, const PairsDescriptor* p) {
    const Stack first(*gate_up), last(*down);
    const int64_t act = between->activation, experts = down->experts, top_k = p->top_k;
    if (last.w.k % 16 || last.w.order) fail("expert_mlp: the inner size must be a multiple of 16, and down's columns in order");
    if (act < 0 || act >= kActivations || top_k < 1) fail("expert_mlp: unknown activation, or no choices");
    if (gate_up->experts != experts || first.n != 2 * last.w.k) fail("expert_mlp: the matrices do not fit each other");
    const int64_t pairs = check_pairs(*p, experts), rows = pairs / top_k;
    if (pairs % top_k) fail("expert_mlp: a row lacks choices");
    if (!pairs) return;
    check_places(p->places, pairs);
    const Experts in_use = experts_of(p->offsets, experts);
    read_pairs(first.w, in_use, x, p->tokens, p->x_rows);
    lay_out(last.w, in_use, &Expert::inner, Scratch::kHidden, Scratch::kHiddenScales);
    const ClampedSwiglu clamp(between->alpha, between->limit, between->shift, between->most);
    gate_pairs(first, last.w, in_use, {kGates[act], between->clamped ? &clamp : nullptr});
    if (pairs <= kFewPairs) return sum_few_pairs(out, y, last, in_use, {p->places, p->weights, rows, top_k});
    multiply_pairs(y, last, in_use, &Expert::inner, pairs);
    combine(out, y, p->places, p->weights, rows, top_k, last.n);
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
