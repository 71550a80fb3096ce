// What an op is told beside its arrays, as structs at addresses that Python keeps (classes of src/quire/ops/descriptors.py, the same
// fields in the same order: descriptors.cpp lists them and tests/ops/test_descriptors.py compares). What is fixed of a layer's cache or
// attention is filled in once, what is of a step once a step. A packed matrix has a descriptor of its own: matrix.h.
//
// Here is data only: what the units compute of it is in their own namespaces, compiled for each instruction set.
#pragma once

#include <cstdint>

namespace quire {

struct Matrix;

// Keys and values of a layer, in the layout of src/quire/ops/layout.py.
struct CacheDescriptor {
    char *keys, *values;
    int64_t kv_heads, d, block_size, blocks;  // d: numbers of a head
    int64_t format;                           // enum Format of facts.h
    int64_t step;                             // bytes from one block to the next: where layers share blocks, more than this layer has of one
};

// Latents of a layer: keys [blocks, block_size, rope], values [blocks, block_size, rank].
struct LatentCacheDescriptor {
    char *keys, *values;
    int64_t rank, rope, block_size, blocks;
    int64_t bf16;  // else f32
    int64_t key_step, value_step;  // bytes from one block to the next: where layers share blocks, more than this layer has of one
};

// The sequences of a step: rows cu_q[s] .. cu_q[s + 1] are the last of the context[s] tokens whose blocks tables[s] names.
struct BatchDescriptor {
    const int32_t *cu_q, *context, *tables;  // [sequences + 1], [sequences], [sequences, max_blocks]
    const uint64_t* tree;                    // per row its ancestors in the draft, or null
    const int64_t* starts;                   // per row the first of the states that it leaves, and their number; or null: rows are finished
    int64_t sequences, max_blocks;
    int64_t states;  // that there is room for
};

// What varies in attention from layer to layer (src/quire/ops/attention_spec.py).
struct AttentionDescriptor {
    const float *sinks, *alibi;  // per head, or null
    const float* bias;           // [heads, distances] by the distance from the key to the row less that of its first, -behind; or null
    int64_t distances, behind;
    int64_t heads;         // of queries
    int64_t window;        // keys that a row sees at most, below 0 those of its chunk of so many; 0: all earlier ones
    int64_t after;         // keys after its own that a row sees at most
    int64_t queries_only;         // rows have queries only, and those that share keys lie `kv_heads` heads apart
    int64_t pool;                 // keys that are chosen together, of rows that read chosen ones
    float scale, softcap;  // softcap 0: none
};

// The causal convolution of a layer (src/quire/ops/convolution.py).
struct ConvolutionDescriptor {
    const float* weight;  // [taps, width], that of the oldest row first
    const float* bias;    // [width], or null
    int64_t taps, width;
    int64_t silu;   // of what is summed
    int64_t gated;  // a row is [write gate | read gate | x]
};

// How the heads of a layer are normed and turned.
struct RopeDescriptor {
    const float* table;            // [positions, 2, half], cosines and sines
    const float *q_norm, *k_norm;  // weights of a head of queries and of keys (or of a latent), or null
    int64_t positions, half;
    int64_t heads;  // of queries
    float eps;      // of the norms
};

// Spans of a row's columns, each of which has a norm of its own.
struct SpansDescriptor {
    const float* weight;  // [count]
    int64_t start, count, span;
    int64_t centered;  // by the mean
    float eps;
};

// Rows that a gate multiplies, by an activation of its numbers, and whose spans are normed.
struct GatedNormDescriptor {
    const float* weight;        // [span] or [columns]; null: no norm
    int64_t span, weights;      // numbers that are normed together, and how many the weight has
    int64_t sigmoid;            // the gate's activation, else silu
    int64_t gate_first;         // the norm is that of the product
    float eps;
};

// Which recurrent states a step reads and where it leaves them (src/quire/ops/recurrent.py).
struct StateBatchDescriptor {
    const int32_t* cu_q;       // [sequences + 1]
    const int32_t* source;     // [sequences], slots, or -1: zeros
    const int32_t* counts;     // [sequences, 2], rows of a sequence's own after which its state is stored
    const int32_t* target;     // [sequences, 2], slots, or -1: not stored
    int64_t sequences;
};

// A layer's gated delta rule.
struct DeltaDescriptor {
    const float* a;            // [value_heads], negative: -exp(A_log)
    const float* dt_bias;      // [value_heads], or [value_heads, key_dim] where each channel has a decay
    int64_t key_heads, value_heads, key_dim, value_dim;
    float lower_bound;         // of the logarithm of the decay, or 0: none
    float beta_scale;
};

// A layer's selective scan.
struct ScanDescriptor {
    const float* a;            // [heads], negative: -exp(A_log); or [state, heads * head_dim] where `selective`
    const float *d, *dt_bias;  // [heads], or [heads * head_dim] where `selective`; or null
    int64_t heads, groups, head_dim, state;
    int64_t selective;         // each channel has its own time step and decays: one head, one group
    float low, high;           // limits of time steps
};

// How the rows of a layer become entries, each of which stands for `every` tokens (src/quire/ops/entries.py).
struct PoolDescriptor {
    const float *bias, *norm;  // [every, series * d], [d]
    const float* table;        // [positions, 2, half], cosines and sines
    int64_t positions, half, every;
    int64_t series;  // 2: a row has a part in the entry behind its own, too
    float eps;       // of the norm
};

// How rows read the last tokens and entries before these.
struct EntryReadsDescriptor {
    const float* sinks;  // per head, or null
    int64_t heads, window, every, most;  // every 0: there are no entries
    float scale;
};

// How a router chooses experts (class Routing of src/quire/ops/experts.py).
struct RoutingDescriptor {
    int64_t experts, top_k;
    int64_t score;  // enum RouterScore of facts.h
    int64_t renormalize, groups, top_groups, group_best;
    float scale, jitter;
};

// The matrices of a layer's experts, n rows each, padded to whole blocks, below each other.
struct ExpertsDescriptor {
    const Matrix* matrices;
    const float* bias;  // [experts, n], or null
    int64_t experts, n;
};

// What stands between the two matrices of an expert.
struct BetweenDescriptor {
    int64_t activation;                // enum Activation of facts.h
    int64_t clamped;                   // clamped_swiglu instead
    double alpha, limit, shift, most;  // of that
};

// The pairs (token, choice) of a step, sorted by expert.
struct PairsDescriptor {
    const int32_t* tokens;   // row of x that each pair reads, or null: pairs have rows of their own
    const int32_t* places;   // [rows, top_k], where the pairs of a row lie
    const int32_t* offsets;  // [experts + 1]
    const float* weights;    // [rows, top_k]
    int64_t room;            // pairs at most
    int64_t x_rows, top_k;
};

// Who holds the experts of a layer: pairs.cpp.
struct HomesDescriptor {
    const int32_t* ranks;  // [experts, copies], those that hold an expert, ascending, -1 behind them
    const int32_t* local;  // [experts], the place of an expert among the `held` that `rank` has, or -1
    int64_t experts, copies, held, rank, world;
    int64_t idle;  // choices behind the experts that nobody computes
};

// Round-to-nearest quantization of rows of k columns, `stride` bytes apart, to codes low .. high.
struct RoundingDescriptor {
    const float* divisors;  // [tries], of a group's extreme: the scales to try
    int64_t tries, k, stride, group, low, high, bits;
    int64_t bf16;  // what is rounded, else f32
};

// How a stream reads its files.
struct ReaderDescriptor {
    int64_t threads, piece;  // reads at a time, bytes of one
    int64_t cached;          // by way of the system's cache
};

}  // namespace quire
