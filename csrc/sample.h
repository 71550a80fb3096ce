// Sampling over rows of logits: what the instruction-set units and the part that exists once know of each other.
#pragma once

#include <cstdint>

namespace quire {

constexpr int64_t kSampleBlock = 64;

// The passes over whole rows. A block is 64 logits; the last one of a row may be shorter.
struct RowKernels {
    // The largest of each block goes to block_max, the largest of all is returned: NaN if there is a NaN or +inf.
    float (*block_max)(const float* x, int64_t n, float* block_max);
    // e^((x - max) * inverse) of up to one block.
    void (*weights)(const float* x, int64_t count, float max, float inverse, float* out);
    // The sum of those over a row; that of each block goes to block_mass.
    double (*mass)(const float* x, int64_t n, float max, float inverse, double* block_mass);
    // Philox4x32-10 (Salmon et al. 2011) of 16 counters, the second half of which is `last` + lane: word w of lane l is
    // words[16 w + l], the random number of token 64 b + 16 w + l where last is 16 b.
    void (*noise)(const uint32_t counter[3], uint32_t last, const uint32_t key[2], uint32_t* words);
};

// Records of the arrays that src/quire/ops/sampling.py defines.
struct Draw {
    int32_t row, top_k;
    uint64_t seed;
    int64_t position, stream;
    double temperature, top_p, min_p;
};
static_assert(sizeof(Draw) == 56);

struct Query {
    int32_t row, target;
};

struct Score {
    double logsumexp;
    float logprob;
    int32_t rank, flags, pad;
};
static_assert(sizeof(Score) == 24);

void sample_rows(const RowKernels& kernels, const float* logits, int64_t rows, int64_t n, const Draw* draws, int64_t count,
                 int32_t* tokens, int32_t* flags);
void score_rows(const RowKernels& kernels, const float* logits, int64_t rows, int64_t n, const Query* queries, int64_t count,
                int64_t k, Score* scores, int32_t* ids, float* logprobs);

}  // namespace quire
