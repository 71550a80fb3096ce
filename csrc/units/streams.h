// Ops of rows that hold several streams side by side (AltUp), and of gates that few numbers pass.
#pragma once

#include <cmath>

#include "elementwise.h"

namespace quire::QUIRE_UNIT {
namespace {

constexpr int64_t kMostMixed = 256;

// out [rows, q h]: stream i of a row is the sum over j of c[i, j] * stream j of x [rows, n h], c = bias + weight m.
// m [rows, p]; weight [q n, p], bias [q n].
void mix_streams(float* out, const float* x, const float* m, const float* weight, const float* bias, int64_t rows, int64_t h,
                 int64_t n, int64_t q, int64_t p) {
    if (h < 1 || n < 1 || q < 1 || p < 1 || q * n > kMostMixed) fail("mix_streams: bad numbers of streams");
    parallel_ranges(rows, (n + q) * h, [&](int64_t begin, int64_t end) {
        float c[kMostMixed];
        for (int64_t r = begin; r < end; ++r) {
            for (int64_t i = 0; i < q * n; ++i) {
                c[i] = bias[i];
                for (int64_t k = 0; k < p; ++k) c[i] += weight[i * p + k] * m[r * p + k];
            }
            for (int64_t i = 0; i < q; ++i) {
                for_lanes(h, [&](int64_t at, int lanes) {
                    F sum = set1(0.0f);
                    for (int64_t j = 0; j < n; ++j) sum = fma(set1(c[i * n + j]), load_lanes(x + (r * n + j) * h + at, lanes), sum);
                    store_lanes(out + (r * q + i) * h + at, sum, lanes);
                });
            }
        }
    });
}

// m [rows, (2 + n) n] in place: sigmoid + least of the first n, most * sigmoid of n more, and behind these a matrix of softmaxes of rows,
// whose columns and rows are brought to sums of 1 in turns, columns first and last (Sinkhorn and Knopp 1967).
void sinkhorn_gates(float* m, int64_t rows, int64_t n, int64_t turns, double most, double least) {
    if (n < 1 || n * n > kMostMixed || turns < 1) fail("sinkhorn_gates: bad numbers of streams or turns");
    const auto high = static_cast<float>(most), eps = static_cast<float>(least);
    parallel_ranges(rows, 16 * turns * n * n, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            float *gates = m + r * (2 + n) * n, *c = gates + 2 * n;
            for (int64_t i = 0; i < n; ++i) gates[i] = 1.0f / (1.0f + std::exp(-gates[i])) + eps;
            for (int64_t i = n; i < 2 * n; ++i) gates[i] = high / (1.0f + std::exp(-gates[i]));
            for (int64_t i = 0; i < n; ++i) {
                float top = c[i * n], sum = 0.0f;
                for (int64_t j = 1; j < n; ++j) top = c[i * n + j] > top ? c[i * n + j] : top;
                for (int64_t j = 0; j < n; ++j) sum += c[i * n + j] = std::exp(c[i * n + j] - top);
                for (int64_t j = 0; j < n; ++j) c[i * n + j] = c[i * n + j] / sum + eps;
            }
            const auto bring = [&](int64_t step, int64_t next) {
                for (int64_t i = 0; i < n; ++i) {
                    float sum = eps;
                    for (int64_t j = 0; j < n; ++j) sum += c[i * step + j * next];
                    for (int64_t j = 0; j < n; ++j) c[i * step + j * next] /= sum;
                }
            };
            bring(1, n);
            for (int64_t turn = 1; turn < turns; ++turn) {
                bring(n, 1);
                bring(1, n);
            }
        }
    });
}

QUIRE_INLINE float mean_square(const float* x, int64_t d) {
    F sum = set1(0.0f);
    for_lanes(d, [&](int64_t i, int n) {
        const F v = load_lanes(x + i, n);
        sum = fma(v, v, sum);
    });
    return hsum(sum) / static_cast<float>(d);
}

// Streams of x [rows, n h] behind the first get its length; those shorter than sqrt(least) are not lengthened as much.
void match_lengths(float* x, int64_t rows, int64_t h, int64_t n, double least) {
    if (h < 1 || n < 1) fail("match_lengths: bad numbers of streams");
    const auto low = static_cast<float>(least);
    parallel_ranges(rows, 2 * n * h, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            float* row = x + r * n * h;
            const float length = __builtin_sqrtf(mean_square(row, h));
            for (int64_t j = 1; j < n; ++j) {
                float* part = row + j * h;
                const float own = mean_square(part, h);
                const F by = set1(length / __builtin_sqrtf(own < low ? low : own));
                for_lanes(h, [&](int64_t i, int lanes) { store_lanes(part + i, mul(load_lanes(part + i, lanes), by), lanes); });
            }
        }
    });
}

// Of x [rows, 2 f], each number of the first f less mean + factor * deviation of these f, and 0 where that is less.
void sparse_gate(float* x, int64_t rows, int64_t f, double factor) {
    if (f < 1) fail("sparse_gate: rows without numbers");
    parallel_ranges(rows, 4 * f, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            float* row = x + r * 2 * f;
            F sum = set1(0.0f);
            for_lanes(f, [&](int64_t i, int n) { sum = add(sum, load_lanes(row + i, n)); });
            const float mean = hsum(sum) / static_cast<float>(f);
            const F center = set1(mean);
            F squares = set1(0.0f);
            for_lanes(f, [&](int64_t i, int n) {
                F v = sub(load_lanes(row + i, n), center);
                if (n < 16) {  // lanes behind the row are zeros, whose difference is none
                    float kept[16] = {};
                    store_lanes(kept, v, n);
                    v = load_lanes(kept, 16);
                }
                squares = fma(v, v, squares);
            });
            const float deviation = __builtin_sqrtf(hsum(squares) / static_cast<float>(f));
            const F cut = set1(mean + static_cast<float>(factor) * deviation);
            for_lanes(f, [&](int64_t i, int n) { store_lanes(row + i, vmax(set1(0.0f), sub(load_lanes(row + i, n), cut)), n); });
        }
    });
}

void scale_columns(float* x, const float* factors, int64_t rows, int64_t d) {
    parallel_ranges(rows, d, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
            for_lanes(d, [&](int64_t i, int n) { store_lanes(x + r * d + i, mul(load_lanes(x + r * d + i, n), load_lanes(factors + i, n)), n); });
    });
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
