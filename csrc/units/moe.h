// What a mixture of experts needs per row: routing, the weighted sum of expert outputs, and two activations.
#pragma once

#include "math.h"

namespace quire::QUIRE_UNIT {
namespace {

// Added to the sum that scores are divided by (LEAST_SUM of ops/reference/experts.py): where all of them are 0, so are the weights.
constexpr float kLeastSum = 1e-20f;

// The index of the largest of x that is not `taken`; of equal ones the lower, and the lowest of all when none compares.
inline int64_t best_of(const float* x, const bool* taken, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; ++i)
        if (!taken[i] && (best < 0 || x[i] > x[best])) best = i;
    return best;
}

// Marks the experts outside the best groups as taken. `choice` are the scores that choose.
inline void leave_groups(const RoutingDescriptor& c, const float* choice, bool* taken) {
    constexpr int64_t kMost = 256;
    float rank[kMost];
    bool chosen[kMost] = {};
    const int64_t size = c.experts / c.groups;
    for (int64_t g = 0; g < c.groups; ++g) {
        bool used[1024] = {};
        rank[g] = 0.0f;
        for (int64_t i = 0; i < c.group_best; ++i) {
            const int64_t best = best_of(choice + g * size, used, size);
            used[best] = true;
            rank[g] += choice[g * size + best];
        }
    }
    for (int64_t i = 0; i < c.top_groups; ++i) chosen[best_of(rank, chosen, c.groups)] = true;
    for (int64_t e = 0; e < c.experts; ++e) taken[e] = !chosen[e / size];
}

// Two experts, each weighed by a softmax over the logits that lie near the best of those left.
inline void sparsemixer(const RoutingDescriptor& c, int32_t* ids, float* weights, const float* logits) {
    bool taken[1024] = {};
    for (int64_t i = 0; i < 2; ++i) {
        const int64_t best = best_of(logits, taken, c.experts);
        const float top = logits[best];
        float sum = 0.0f;
        for (int64_t e = 0; e < c.experts; ++e) {
            const float size = std::fabs(logits[e]) > top ? std::fabs(logits[e]) : top;
            if (!taken[e] && !((top - logits[e]) / size > 2 * c.jitter)) sum += std::exp(logits[e] - top);
        }
        ids[i] = static_cast<int32_t>(best);
        weights[i] = 1.0f / sum;
        taken[best] = true;
    }
}

inline float sqrt_softplus(float x) { return __builtin_sqrtf(x > 20.0f ? x : std::log1p(std::exp(x))); }

inline void route_row(const RoutingDescriptor& c, int32_t* ids, float* weights, float* scores, const float* logits, const float* bias) {
    if (c.score == kSparseMixer) return sparsemixer(c, ids, weights, logits);
    if (c.score == kSoftmax) {
        float most = logits[0], sum = 0.0f;
        for (int64_t e = 1; e < c.experts; ++e) most = logits[e] > most ? logits[e] : most;
        for (int64_t e = 0; e < c.experts; ++e) sum += scores[e] = std::exp(logits[e] - most);
        for (int64_t e = 0; e < c.experts; ++e) scores[e] /= sum;
    } else if (c.score == kSqrtSoftplus) {
        for (int64_t e = 0; e < c.experts; ++e) scores[e] = sqrt_softplus(logits[e]);
    } else {
        for (int64_t e = 0; e < c.experts; ++e) scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
    }
    const float* choice = c.score == kLateSigmoid ? logits : scores;
    if (bias) {
        float* biased = scores + c.experts;
        for (int64_t e = 0; e < c.experts; ++e) biased[e] = choice[e] + bias[e];
        choice = biased;
    }
    bool taken[1024] = {};
    if (c.groups > 1) leave_groups(c, choice, taken);
    float sum = 0.0f;
    for (int64_t i = 0; i < c.top_k; ++i) {
        const int64_t best = best_of(choice, taken, c.experts);
        taken[best] = true;
        ids[i] = static_cast<int32_t>(best);
        sum += weights[i] = scores[best];
    }
    for (int64_t i = 0; i < c.top_k; ++i) weights[i] = (c.renormalize ? weights[i] / (sum + kLeastSum) : weights[i]) * c.scale;
}

// scratch [rows, 2 experts].
void route(int32_t* ids, float* weights, float* scratch, const float* logits, Optional<const float> bias, const RoutingDescriptor* routing,
           int64_t rows) {
    const RoutingDescriptor c = *routing;
    if (c.experts < 1 || c.experts > 1024 || c.score < 0 || c.score >= kScores) fail("route: needs 1 to 1024 experts and a known score");
    if (c.groups < 1 || c.groups > 256 || c.experts % c.groups || c.top_groups < 1 || c.top_groups > c.groups || c.group_best < 1 ||
        c.group_best > c.experts / c.groups)
        fail("route: the groups do not fit the experts");
    if (c.top_k < 1 || c.top_k > c.experts / c.groups * c.top_groups || (c.score == kSparseMixer && (c.top_k != 2 || c.experts < 2)))
        fail("route: that many experts cannot be chosen");
    parallel_ranges(rows, 16 * c.experts, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
            route_row(c, ids + r * c.top_k, weights + r * c.top_k, scratch + r * 2 * c.experts, logits + r * c.experts, bias.ptr);
    });
}

// The experts of a row are those that table [tokens, top_k] has of its token; scores weigh them alone.
void route_by_token(int32_t* ids, float* weights, const float* logits, const int32_t* tokens, const int32_t* table, const RoutingDescriptor* routing,
                    int64_t rows, int64_t known) {
    const RoutingDescriptor c = *routing;
    if (c.experts < 1 || c.top_k < 1 || (c.score != kSigmoid && c.score != kSqrtSoftplus)) fail("route_by_token: needs experts that are scored each by itself");
    for (int64_t r = 0; r < rows; ++r)
        if (tokens[r] < 0 || tokens[r] >= known) fail("route_by_token: a token lies outside the table");
    for (int64_t r = 0; r < rows; ++r) {
        float sum = 0.0f;
        for (int64_t i = 0; i < c.top_k; ++i) {
            const int32_t expert = table[tokens[r] * c.top_k + i];
            if (expert < 0 || expert >= c.experts) fail("route_by_token: there is no such expert");
            const float logit = logits[r * c.experts + expert];
            ids[r * c.top_k + i] = expert;
            sum += weights[r * c.top_k + i] = c.score == kSigmoid ? 1.0f / (1.0f + std::exp(-logit)) : sqrt_softplus(logit);
        }
        for (int64_t i = 0; i < c.top_k; ++i) {
            float& weight = weights[r * c.top_k + i];
            weight = (c.renormalize ? weight / (sum + kLeastSum) : weight) * c.scale;
        }
    }
}

// out [pairs] = weights of the experts `ids`, each times its expert's of scales [experts].
void scale_choices(float* out, const float* weights, const int32_t* ids, const float* scales, int64_t pairs, int64_t experts) {
    for (int64_t i = 0; i < pairs; ++i) {
        if (ids[i] < 0 || ids[i] >= experts) fail("scale_choices: there is no such expert");
        out[i] = weights[i] * scales[ids[i]];
    }
}

// y [pairs, count]; out[r] = sum over c, ascending, of weights[r, c] * y[places[r, c]] of row r. A choice of weight 0 reads nothing: its
// row need not have been computed.
QUIRE_INLINE void combine_row(float* out, const float* y, const int32_t* places, const float* weights, int64_t top_k, int64_t count) {
    for_lanes(count, [&](int64_t i, int n) {
        F sum = set1(0.0f);
        for (int64_t c = 0; c < top_k; ++c)
            if (weights[c] != 0.0f) sum = fma(set1(weights[c]), load_lanes(y + places[c] * count + i, n), sum);
        store_lanes(out + i, sum, n);
    });
}

void check_places(const int32_t* places, int64_t pairs) {
    for (int64_t i = 0; i < pairs; ++i)
        if (places[i] < 0 || places[i] >= pairs) fail("combine: a place lies outside the rows");
}

// y [rows * top_k, d].
void combine(float* out, const float* y, const int32_t* places, const float* weights, int64_t rows, int64_t top_k, int64_t d) {
    check_places(places, rows * top_k);
    parallel_ranges(rows, top_k * d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) combine_row(out + r * d, y, places + r * top_k, weights + r * top_k, top_k, d);
    });
}

// (up + shift) * gate * sigmoid(alpha * gate), both limited. NaN must stay, and vmin and vmax return their second operand then.
struct ClampedSwiglu {
    F alpha, high, low, shift, most;
    ClampedSwiglu(double a, double limit, double s, double m)
        : alpha(set1(static_cast<float>(a))), high(set1(static_cast<float>(limit))), low(set1(static_cast<float>(-limit))),
          shift(set1(static_cast<float>(s))), most(set1(static_cast<float>(m))) {}
};

QUIRE_INLINE F clamped_gate(const ClampedSwiglu& c, F gate, F up) {
    gate = vmin(c.most, gate);
    return mul(add(vmin(c.high, vmax(c.low, up)), c.shift), times_sigmoid(gate, mul(c.alpha, gate)));
}

// gate_up [rows, 2 f]
void clamped_swiglu(float* out, const float* gate_up, int64_t rows, int64_t f, double alpha, double limit, double shift, double most) {
    const ClampedSwiglu clamp(alpha, limit, shift, most);
    parallel_ranges(rows, 4 * f, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const float* row = gate_up + r * 2 * f;
            for_lanes(f, [&](int64_t i, int n) {
                store_lanes(out + r * f + i, clamped_gate(clamp, load_lanes(row + i, n), load_lanes(row + f + i, n)), n);
            });
        }
    });
}

void scale_by_sigmoid(float* x, const float* gate, int64_t rows, int64_t d) {
    parallel_ranges(rows, d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const F s = set1(1.0f / (1.0f + std::exp(-gate[r])));
            for_lanes(d, [&](int64_t i, int n) { store_lanes(x + r * d + i, mul(load_lanes(x + r * d + i, n), s), n); });
        }
    });
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
