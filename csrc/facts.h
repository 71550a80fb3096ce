// Numbers that kernels and Python must agree on: what is said here once, the module's `facts()` tells Python (ops/facts.py).
#pragma once

#include <cstdint>

#include "sparse.h"

namespace quire {

constexpr int64_t kLanes = 16;                             // rows of a block of a packed matrix
constexpr int64_t kBf12Chunk = 256, kBf12Exceptions = 16;  // columns of 16 rows that share a list of exceptions, and its length
constexpr int64_t kMaxHeadDim = 512;                       // of attention and its cache; latent attention has its own
constexpr int64_t kSplit = 512;                            // keys of a split of attention

// Of numbers in a cache. Attention computes in f32 over f32 and f16 caches, in bf16 over the others.
enum Format : int64_t { kFormatF32, kFormatBf16, kFormatF16, kFormatInt8, kFormatFp8, kFormats };

// Of numbers in a table of embeddings or positions.
enum Numbers : int64_t { kNumbersF32, kNumbersBf16, kNumbersF16, kNumbers };

enum Activation : int64_t { kSilu, kGelu, kGeluTanh, kRelu, kRelu2, kActivations };

// How a router's logits become scores of experts.
enum RouterScore : int64_t { kSoftmax, kSigmoid, kSparseMixer, kLateSigmoid, kSqrtSoftplus, kScores };

struct Fact {
    const char* name;
    int64_t value;
};

// "kind/name" is what ops call one of a kind: its number.
constexpr Fact kFacts[] = {
    {"LANES", kLanes},
    {"BF12_CHUNK", kBf12Chunk},
    {"BF12_EXCEPTION_BYTES", kBf12Exceptions * 4},
    {"MAX_HEAD_DIM", kMaxHeadDim},
    {"SPLIT", kSplit},
    {"SPARSE_COLUMNS", kSparseColumns},
    {"SPARSE_SLACK", kSparseSlack},
    {"cache/float32", kFormatF32},
    {"cache/bfloat16", kFormatBf16},
    {"cache/float16", kFormatF16},
    {"cache/int8", kFormatInt8},
    {"cache/float8_e4m3fn", kFormatFp8},
    {"table/float32", kNumbersF32},
    {"table/bfloat16", kNumbersBf16},
    {"table/float16", kNumbersF16},
    {"activation/silu", kSilu},
    {"activation/gelu", kGelu},
    {"activation/gelu_tanh", kGeluTanh},
    {"activation/relu", kRelu},
    {"activation/relu2", kRelu2},
    {"score/softmax", kSoftmax},
    {"score/sigmoid", kSigmoid},
    {"score/sparsemixer", kSparseMixer},
    {"score/late_sigmoid", kLateSigmoid},
    {"score/sqrtsoftplus", kSqrtSoftplus},
};

}  // namespace quire
