// The passes of sampling that read whole rows of logits.
#pragma once

#include "math.h"

namespace quire::QUIRE_UNIT {
namespace {

// Calls body(vectors, index) for every block of x [n]; the last block is padded with -inf.
template <class Body>
QUIRE_INLINE void for_blocks(const float* x, int64_t n, const Body& body) {
    float tail[kSampleBlock];
    for (int64_t at = 0; at < n; at += kSampleBlock) {
        const float* p = x + at;
        if (n - at < kSampleBlock) {
            for (int64_t i = 0; i < kSampleBlock; ++i) tail[i] = at + i < n ? x[at + i] : -__builtin_inff();
            p = tail;
        }
        const F v[4] = {load(p), load(p + 16), load(p + 32), load(p + 48)};
        body(v, at / kSampleBlock);
    }
}

float row_block_max(const float* x, int64_t n, float* block_max) {
    F best = set1(-__builtin_inff()), broken = set1(0.0f);
    const F lowest = set1(-3.402823466e38f), zero = set1(0.0f);
    for_blocks(x, n, [&](const F* v, int64_t block) {
        const F m = vmax(vmax(v[0], v[1]), vmax(v[2], v[3]));
        block_max[block] = hmax(m);
        best = vmax(m, best);
        // 0 times NaN or +inf is NaN; -inf is a legal logit and is lifted to the lowest number first.
        for (int i = 0; i < 4; ++i) broken = fma(vmax(lowest, v[i]), zero, broken);
    });
    return hsum(broken) == 0.0f ? hmax(best) : __builtin_nanf("");
}

void row_weights(const float* x, int64_t count, float max, float inverse, float* out) {
    const F m = set1(max), s = set1(inverse);
    for_lanes(count, [&](int64_t i, int n) { store_lanes(out + i, vexp(mul(sub(load_lanes(x + i, n), m), s)), n); });
}

double row_mass(const float* x, int64_t n, float max, float inverse, double* block_mass) {
    const F m = set1(max), s = set1(inverse);
    double total = 0.0;
    for_blocks(x, n, [&](const F* v, int64_t block) {
        F w[4];
        for (int i = 0; i < 4; ++i) w[i] = vexp(mul(sub(v[i], m), s));
        block_mass[block] = static_cast<double>(hsum(add(add(w[0], w[1]), add(w[2], w[3]))));
        total += block_mass[block];
    });
    return total;
}

void row_noise(const uint32_t counter[3], uint32_t last, const uint32_t key[2], uint32_t* words) {
    uint32_t c[4][16], k0 = key[0], k1 = key[1];
    for (uint32_t l = 0; l < 16; ++l) {
        for (int i = 0; i < 3; ++i) c[i][l] = counter[i];
        c[3][l] = last + l;
    }
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        for (int l = 0; l < 16; ++l) {
            const uint64_t a = uint64_t{0xD2511F53} * c[0][l], b = uint64_t{0xCD9E8D57} * c[2][l];
            c[0][l] = static_cast<uint32_t>(b >> 32) ^ c[1][l] ^ k0;
            c[1][l] = static_cast<uint32_t>(b);
            c[2][l] = static_cast<uint32_t>(a >> 32) ^ c[3][l] ^ k1;
            c[3][l] = static_cast<uint32_t>(a);
        }
    }
    __builtin_memcpy(words, c, sizeof c);
}

constexpr RowKernels kRowKernels = {&row_block_max, &row_weights, &row_mass, &row_noise};

void sample(const float* logits, int64_t rows, int64_t n, const Draw* draws, int64_t count, int32_t* tokens, int32_t* flags) {
    sample_rows(kRowKernels, logits, rows, n, draws, count, tokens, flags);
}

void top_logprobs(const float* logits, int64_t rows, int64_t n, const Query* queries, int64_t count, int64_t k, Score* scores,
                  Optional<int32_t> ids, Optional<float> logprobs) {
    score_rows(kRowKernels, logits, rows, n, queries, count, k, scores, ids.ptr, logprobs.ptr);
}

}  // namespace
}  // namespace quire::QUIRE_UNIT
