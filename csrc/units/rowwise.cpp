// Ops of a row at a time: norms, activations, embeddings, selection, adapters, sampling. A row's result depends on that row only.
#include "elementwise.h"
#include "lora.h"
#include "ngrams.h"
#include "sample_rows.h"
#include "streams.h"

namespace quire::QUIRE_UNIT {
namespace {

void rmsnorm(float* out, const float* x, const float* weight, int64_t rows, int64_t d, double eps) {
    parallel_ranges(rows, d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) norm_row(out + r * d, x + r * d, weight, d, static_cast<float>(eps));
    });
}

void add_rmsnorm(float* out, float* x, const float* delta, const float* weight, int64_t rows, int64_t d, double eps) {
    parallel_ranges(rows, 2 * d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            float* row = x + r * d;
            for_lanes(d, [&](int64_t i, int n) {
                store_lanes(row + i, add(load_lanes(row + i, n), load_lanes(delta + r * d + i, n)), n);
            });
            norm_row(out + r * d, row, weight, d, static_cast<float>(eps));
        }
    });
}

// table [vocabulary, d].
void embedding(float* out, const int32_t* tokens, const void* table, int64_t rows, int64_t d, int64_t vocabulary, int64_t numbers, int64_t first) {
    if (numbers < 0 || numbers >= kNumbers) fail("embedding: unknown numbers");
    for (int64_t r = 0; r < rows; ++r) row_of_token(tokens[r], first, vocabulary);
    parallel_ranges(rows, d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const int64_t row = row_of_token(tokens[r], first, vocabulary);
            if (row < 0) {
                std::fill_n(out + r * d, d, -0.0f);
                continue;
            }
            for_lanes(d, [&](int64_t i, int n) { store_lanes(out + r * d + i, load_numbers(table, row * d + i, n, numbers), n); });
        }
    });
}

// The same of a table in pieces of `each` rows below each other, the last of which may have fewer: where each lies.
void embedding_pieces(float* out, const int32_t* tokens, const int64_t* pieces, int64_t rows, int64_t d, int64_t vocabulary, int64_t each, int64_t numbers) {
    if (numbers < 0 || numbers >= kNumbers || each < 1) fail("embedding: unknown numbers, or pieces without rows");
    for (int64_t r = 0; r < rows; ++r) row_of_token(tokens[r], -1, vocabulary);
    parallel_ranges(rows, d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const int64_t piece = tokens[r] / each, row = tokens[r] % each;
            const void* table = reinterpret_cast<const void*>(pieces[piece]);
            for_lanes(d, [&](int64_t i, int n) { store_lanes(out + r * d + i, load_numbers(table, row * d + i, n, numbers), n); });
        }
    });
}

template <int64_t kKind, bool kGated>
void activate_rows(float* out, const float* x, int64_t rows, int64_t f) {
    const int64_t stride = kGated ? 2 * f : f;
    constexpr int64_t kStep = 1024;
    const int64_t pieces = (f + kStep - 1) / kStep;
    parallel_ranges(rows * pieces, 4 * (f < kStep ? f : kStep), [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) {
            const int64_t r = at / pieces, from = at % pieces * kStep, count = f - from < kStep ? f - from : kStep;
            const float* gate = x + r * stride + from;
            float* target = out + r * f + from;
            for_lanes(count, [&](int64_t i, int n) {
                F y = activate<kKind>(load_lanes(gate + i, n));
                if constexpr (kGated) y = mul(y, load_lanes(gate + f + i, n));
                store_lanes(target + i, y, n);
            });
        }
    });
}

template <bool kGated>
void activate_kind(float* out, const float* x, int64_t rows, int64_t f, int64_t kind) {
    switch (kind) {
        case kSilu: return activate_rows<kSilu, kGated>(out, x, rows, f);
        case kGelu: return activate_rows<kGelu, kGated>(out, x, rows, f);
        case kGeluTanh: return activate_rows<kGeluTanh, kGated>(out, x, rows, f);
        case kRelu: return activate_rows<kRelu, kGated>(out, x, rows, f);
        case kRelu2: return activate_rows<kRelu2, kGated>(out, x, rows, f);
        default: fail("activation: unknown kind");
    }
}

void gated_activation(float* out, const float* gate_up, int64_t rows, int64_t f, int64_t kind) {
    activate_kind<true>(out, gate_up, rows, f, kind);
}

void activation(float* out, const float* x, int64_t rows, int64_t f, int64_t kind) {
    activate_kind<false>(out, x, rows, f, kind);
}

// out [count, d] = rows of x [total, d] (null: all in turn), plus those of delta.
void take_rows(float* out, const float* x, Optional<const float> delta, Optional<const int32_t> rows, int64_t count, int64_t d, int64_t total) {
    if (!rows.ptr && count != total) fail("take_rows: all rows are not as many");
    for (int64_t r = 0; rows.ptr && r < count; ++r)
        if (rows.ptr[r] < 0 || rows.ptr[r] >= total) fail("take_rows: a row lies outside the batch");
    parallel_ranges(count, d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const int64_t at = (rows.ptr ? rows.ptr[r] : r) * d;
            for_lanes(d, [&](int64_t i, int n) {
                const F v = load_lanes(x + at + i, n);
                store_lanes(out + r * d + i, delta.ptr ? add(v, load_lanes(delta.ptr + at + i, n)) : v, n);
            });
        }
    });
}

// out may be x. Two passes: the mean first, so that a large common offset does not cancel the variance away.
QUIRE_INLINE void layernorm_row(float* out, const float* x, const float* weight, const float* bias, int64_t d, float eps) {
    F sum = set1(0.0f);
    for_lanes(d, [&](int64_t i, int n) { sum = add(sum, load_lanes(x + i, n)); });
    const F mean = set1(hsum(sum) / static_cast<float>(d));
    for_lanes(d, [&](int64_t i, int n) { store_lanes(out + i, sub(load_lanes(x + i, n), mean), n); });
    F squares = set1(0.0f);
    for_lanes(d, [&](int64_t i, int n) {
        const F v = load_lanes(out + i, n);
        squares = fma(v, v, squares);
    });
    const F s = set1(1.0f / __builtin_sqrtf(hsum(squares) / static_cast<float>(d) + eps));
    for_lanes(d, [&](int64_t i, int n) {
        const F y = mul(mul(load_lanes(out + i, n), s), load_lanes(weight + i, n));
        store_lanes(out + i, bias ? add(y, load_lanes(bias + i, n)) : y, n);
    });
}

QUIRE_INLINE void add_row(float* x, const float* delta, int64_t d) {
    for_lanes(d, [&](int64_t i, int n) { store_lanes(x + i, add(load_lanes(x + i, n), load_lanes(delta + i, n)), n); });
}

void layernorm(float* out, const float* x, const float* weight, Optional<const float> bias, int64_t rows, int64_t d, double eps) {
    parallel_ranges(rows, 2 * d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
            layernorm_row(out + r * d, x + r * d, weight, bias.ptr, d, static_cast<float>(eps));
    });
}

void add_layernorm(float* out, float* x, const float* delta, const float* weight, Optional<const float> bias, int64_t rows,
                   int64_t d, double eps) {
    parallel_ranges(rows, 3 * d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            add_row(x + r * d, delta + r * d, d);
            layernorm_row(out + r * d, x + r * d, weight, bias.ptr, d, static_cast<float>(eps));
        }
    });
}

// Columns start .. start + count of every row of `width` numbers, in pieces of `span`.
void norm_spans(float* x, const SpansDescriptor* by, int64_t rows, int64_t width) {
    const SpansDescriptor s = *by;
    if (s.span < 1 || s.count % s.span || s.start < 0 || s.start > width - s.count) fail("norm_spans: the spans do not fit the row");
    const int64_t span = s.span, spans = s.count / span;
    parallel_ranges(rows * spans, 2 * span, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) {
            const int64_t offset = at % spans * span;
            float* part = x + at / spans * width + s.start + offset;
            if (s.centered) layernorm_row(part, part, s.weight + offset, nullptr, span, s.eps);
            else norm_row(part, part, s.weight + offset, span, s.eps);
        }
    });
}

void add_rows(float* x, const float* delta, int64_t rows, int64_t d) {
    parallel_ranges(rows, d, [&](int64_t begin, int64_t end) { add_row(x + begin * d, delta + begin * d, (end - begin) * d); });
}

// x [rows, d] into columns at .. at + d of out [rows, width].
void place_columns(float* out, const float* x, int64_t rows, int64_t d, int64_t stride, int64_t width, int64_t at) {
    if (at < 0 || at > width - d) fail("place_columns: the columns do not fit the row");
    parallel_ranges(rows, d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) std::memcpy(out + r * width + at, x + r * stride, static_cast<size_t>(d) * sizeof(float));
    });
}

// table [entries, d].
void add_positions(float* x, const int32_t* positions, const void* table, int64_t rows, int64_t d, int64_t entries, int64_t offset,
                   int64_t numbers) {
    if (numbers < 0 || numbers >= kNumbers) fail("add_positions: unknown numbers");
    for (int64_t r = 0; r < rows; ++r)
        if (offset < 0 || positions[r] < 0 || positions[r] >= entries - offset) fail("add_positions: a position lies outside the table");
    parallel_ranges(rows, d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const int64_t at = (positions[r] + offset) * d;
            for_lanes(d, [&](int64_t i, int n) {
                float* to = x + r * d + i;
                store_lanes(to, add(load_lanes(to, n), load_numbers(table, at + i, n, numbers)), n);
            });
        }
    });
}

// Columns 0 .. d of each row of x [rows, width] times factors[r], or factors[(positions[r] + ahead) / step]; `by`: how many factors
// there are, step and ahead.
void scale_rows(float* x, const float* factors, Optional<const int32_t> positions, const int64_t* by, int64_t rows, int64_t d, int64_t width) {
    const int64_t entries = by[0], step = by[1], ahead = by[2];
    if (d > width || step < 1 || ahead < 0) fail("scale_rows: columns, step or shift are not those of rows");
    const auto at = [&](int64_t r) { return positions.ptr ? (int64_t{positions.ptr[r]} + ahead) / step : r; };
    for (int64_t r = 0; r < rows; ++r)
        if ((positions.ptr && positions.ptr[r] < 0) || at(r) >= entries) fail("scale_rows: a row has no factor");
    parallel_ranges(rows, d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const F factor = set1(factors[at(r)]);
            for_lanes(d, [&](int64_t i, int n) { store_lanes(x + r * width + i, mul(load_lanes(x + r * width + i, n), factor), n); });
        }
    });
}

constexpr int64_t kRowPiece = 4096;

// f(F) -> F over `count` numbers in place.
template <typename Change>
void change_all(float* x, int64_t count, Change f) {
    const int64_t pieces = (count + kRowPiece - 1) / kRowPiece;
    parallel_ranges(pieces, kRowPiece, [&](int64_t begin, int64_t end) {
        const int64_t from = begin * kRowPiece, stop = end * kRowPiece < count ? end * kRowPiece : count;
        for_lanes(stop - from, [&](int64_t i, int n) { store_lanes(x + from + i, f(load_lanes(x + from + i, n)), n); });
    });
}

void scale(float* x, int64_t count, double factor) {
    const F s = set1(static_cast<float>(factor));
    change_all(x, count, [&](F v) { return mul(v, s); });
}

void softcap(float* x, int64_t count, double cap) {
    const F c = set1(static_cast<float>(cap));
    change_all(x, count, [&](F v) { return mul(vtanh(div(v, c)), c); });
}

void clip(float* x, int64_t count, double limit) {
    const F high = set1(static_cast<float>(limit)), low = set1(static_cast<float>(-limit));
    change_all(x, count, [&](F v) { return vmin(high, vmax(low, v)); });
}

// x > 0: positive x^2, else negative (exp(x) - 1 - x); beta x is added to both.
void xielu(float* x, int64_t count, double positive, double negative, double beta) {
    const F zero = set1(0.0f), one = set1(1.0f), p = set1(static_cast<float>(positive)), n = set1(static_cast<float>(negative)),
            b = set1(static_cast<float>(beta));
    change_all(x, count, [&](F v) {
        const F high = vmax(zero, v), low = vmin(zero, v);
        const F curved = mul(sub(sub(vexp(low), one), low), n);
        return fma(v, b, fma(mul(high, high), p, curved));
    });
}

}  // namespace

constexpr OpEntry kOps[] = {
    op_entry<&mix_streams>("mix_streams"),
    op_entry<&ngram_rows>("ngram_rows"),
    op_entry<&gate_values>("gate_values"),
    op_entry<&match_lengths>("match_lengths"),
    op_entry<&sinkhorn_gates>("sinkhorn_gates"),
    op_entry<&sparse_gate>("sparse_gate"),
    op_entry<&scale_columns>("scale_columns"),
    op_entry<&embedding>("embedding"),
    op_entry<&embedding_pieces>("embedding_pieces"),
    op_entry<&rmsnorm>("rmsnorm"),
    op_entry<&add_rmsnorm>("add_rmsnorm"),
    op_entry<&lora_shrink>("lora_shrink"),
    op_entry<&lora_expand>("lora_expand"),
    op_entry<&gated_activation>("gated_activation"),
    op_entry<&activation>("activation"),
    op_entry<&take_rows>("take_rows"),
    op_entry<&layernorm>("layernorm"),
    op_entry<&add_layernorm>("add_layernorm"),
    op_entry<&norm_spans>("norm_spans"),
    op_entry<&place_columns>("place_columns"),
    op_entry<&add_rows>("add"),
    op_entry<&add_positions>("add_positions"),
    op_entry<&scale>("scale"),
    op_entry<&scale_rows>("scale_rows"),
    op_entry<&softcap>("softcap"),
    op_entry<&clip>("clip"),
    op_entry<&xielu>("xielu"),
    op_entry<&sample>("sample"),
    op_entry<&top_logprobs>("top_logprobs"),
};
extern const OpList kRowwiseOps;
const OpList kRowwiseOps = list_of(kOps);

}  // namespace quire::QUIRE_UNIT
