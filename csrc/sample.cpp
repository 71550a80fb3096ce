// Sampling: penalties, draws and log-probabilities over rows of logits. The definitions are in src/quire/ops/sampling.py.
//
// A row never gets sorted. One pass finds the largest logit of every block of 64; blocks that cannot matter are skipped from
// then on; top-k and top-p select among the few candidates above a bound. All sums of a row run in one fixed order.
// The two passes over whole rows are written in 16 fixed lanes without fused multiply-add and cloned per instruction set,
// so that every machine gives the same bits.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "pool.h"
#include "registry.h"

#if defined(__x86_64__) && defined(__ELF__) && defined(__GNUC__) && !defined(__clang__)
#define QUIRE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define QUIRE_CLONES
#endif

namespace quire {
namespace {

using Lanes = float __attribute__((vector_size(64), aligned(4), may_alias));
using Ints = int32_t __attribute__((vector_size(64)));
using Wide = double __attribute__((vector_size(128)));

constexpr int64_t kBlock = 64;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr double kGreedyBelow = 1e-5;
enum Flag : int32_t { kNotFinite = 1, kNothingAllowed = 2 };

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

struct Edit {
    int64_t row;
    const int32_t* allowed;
    int64_t allowed_count;
    const int32_t* banned;
    int64_t banned_count;
    const int32_t* bias_ids;
    const float* bias;
    int64_t bias_count;
    const int32_t* seen;
    const int32_t* counts;
    int64_t seen_count;
    double repetition, frequency, presence;
};
static_assert(sizeof(Edit) == 14 * 8);

struct Candidate {
    float x, weight;
    int32_t id;
};

// Larger logits first, among equals the lower id.
bool better(const Candidate& a, const Candidate& b) { return a.x > b.x || (a.x == b.x && a.id < b.id); }

// The last candidate kept, by `better`.
struct Threshold {
    float x = -kInf;
    int32_t id = std::numeric_limits<int32_t>::max();
    bool keeps(float other, int32_t other_id) const { return other > x || (other == x && other_id <= id); }
};

// One row and the working memory of the thread that has it.
struct Row {
    const float* x;
    int64_t n;
    int64_t blocks;
    float* block_max;
    double* block_mass;
    Candidate* candidates;
    float max;

    int64_t begin(int64_t block) const { return block * kBlock; }
    int64_t end(int64_t block) const { return std::min(n, (block + 1) * kBlock); }
};

// e^z for z <= 0, relative error below 2e-7; 0 below -87.
inline __attribute__((always_inline)) Lanes exp_lanes(Lanes z) {
    const Lanes zero = {};
    const Lanes low = z < -87.0f ? zero - 87.0f : z;
    const Lanes shifted = low * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the rounded integer
    const Lanes n = shifted - 12582912.0f;
    const Lanes f = (low - n * 0.693359375f) - n * -2.12194440e-4f;
    Lanes p = f * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * (f * f) + f + 1.0f;
    const Ints exponent = (__builtin_bit_cast(Ints, shifted) - 0x4B400000 + 127) << 23;
    const Lanes result = p * __builtin_bit_cast(Lanes, exponent);
    return z < -87.0f ? zero : result;
}

inline __attribute__((always_inline)) double sum_lanes(Lanes v) {
    const Wide w = __builtin_convertvector(v, Wide);
    double s[8];
    for (int i = 0; i < 8; ++i) s[i] = w[i] + w[i + 8];
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

}  // namespace

// The largest of each block of 64 values and of the whole row x [n]; NaN is returned if there is one.
QUIRE_CLONES float sample_block_max(const float* x, int64_t n, float* block_max) {
    float tail[kBlock];
    Ints unordered = {};
    float best = -kInf;
    for (int64_t at = 0; at < n; at += kBlock) {
        const float* p = x + at;
        if (at + kBlock > n) {
            std::fill(tail, tail + kBlock, -kInf);
            std::memcpy(tail, p, static_cast<size_t>(n - at) * sizeof(float));
            p = tail;
        }
        const Lanes* v = reinterpret_cast<const Lanes*>(p);
        const Lanes a = v[0], b = v[1], c = v[2], d = v[3];
        unordered |= (a != a) | (b != b) | (c != c) | (d != d);
        const Lanes ab = a > b ? a : b, cd = c > d ? c : d;
        const Lanes m = ab > cd ? ab : cd;
        float top = -kInf;
        for (int i = 0; i < 16; ++i) top = m[i] > top ? m[i] : top;
        *block_max++ = top;
        best = top > best ? top : best;
    }
    int32_t any = 0;
    for (int i = 0; i < 16; ++i) any |= unordered[i];
    return any ? std::numeric_limits<float>::quiet_NaN() : best;
}

// weights [64] of the block that starts at x: e^((x - max) * inverse), 0 beyond `count` values.
QUIRE_CLONES double sample_block_weights(const float* x, int64_t count, float max, float inverse, float* weights) {
    float tail[kBlock];
    if (count < kBlock) {
        std::fill(tail, tail + kBlock, -kInf);
        std::memcpy(tail, x, static_cast<size_t>(count) * sizeof(float));
        x = tail;
    }
    Lanes sum = {};
    for (int i = 0; i < 4; ++i) {
        const Lanes w = exp_lanes((reinterpret_cast<const Lanes*>(x)[i] - max) * inverse);
        reinterpret_cast<Lanes*>(weights)[i] = w;
        sum += w;
    }
    return sum_lanes(sum);
}

// The sum of e^((x - max) * inverse) over x [n]; that of each block of 64 goes to `block_mass`.
QUIRE_CLONES double sample_mass(const float* x, int64_t n, float max, float inverse, double* block_mass) {
    double total = 0.0;
    float tail[kBlock];
    for (int64_t at = 0; at < n; at += kBlock) {
        const float* p = x + at;
        if (at + kBlock > n) {
            std::fill(tail, tail + kBlock, -kInf);
            std::memcpy(tail, p, static_cast<size_t>(n - at) * sizeof(float));
            p = tail;
        }
        const Lanes* v = reinterpret_cast<const Lanes*>(p);
        Lanes sum = {};
        for (int i = 0; i < 4; ++i) sum += exp_lanes((v[i] - max) * inverse);
        *block_mass = sum_lanes(sum);
        total += *block_mass++;
    }
    return total;
}

namespace {

// Philox4x32-10 (Salmon et al. 2011): 53 bits as a number in [0, 1).
double uniform(uint64_t seed, int64_t position, int64_t stream) {
    const auto low = [](uint64_t v) { return static_cast<uint32_t>(v); };
    const auto high = [](uint64_t v) { return static_cast<uint32_t>(v >> 32); };
    const auto p = static_cast<uint64_t>(position), s = static_cast<uint64_t>(stream);
    uint32_t c0 = low(p), c1 = high(p), c2 = low(s), c3 = high(s), k0 = low(seed), k1 = high(seed);
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{0xD2511F53} * c0, b = uint64_t{0xCD9E8D57} * c2;
        c0 = high(b) ^ c1 ^ k0;
        c1 = low(b);
        c2 = high(a) ^ c3 ^ k1;
        c3 = low(a);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return static_cast<double>((uint64_t{c0} << 32 | c1) >> 11) * 0x1p-53;
}

int32_t scan(Row& row) {
    row.max = sample_block_max(row.x, row.n, row.block_max);
    if (std::isnan(row.max) || row.max == kInf) return kNotFinite;
    return row.max == -kInf ? kNothingAllowed : 0;
}

int32_t first_of(const Row& row, float value) {
    const int64_t block = std::find(row.block_max, row.block_max + row.blocks, value) - row.block_max;
    return static_cast<int32_t>(std::find(row.x + row.begin(block), row.x + row.n, value) - row.x);
}

// A value that at least k logits reach: each of the k best blocks has one.
float bound_of_top_k(const Row& row, int64_t k) {
    if (k > row.blocks) return -kInf;
    float* copy = reinterpret_cast<float*>(row.candidates);
    std::copy(row.block_max, row.block_max + row.blocks, copy);
    std::nth_element(copy, copy + (k - 1), copy + row.blocks, std::greater<float>());
    return copy[k - 1];
}

// All logits >= bound in ascending id, without weights; returns how many.
int64_t gather(const Row& row, float bound) {
    int64_t count = 0;
    for (int64_t block = 0; block < row.blocks; ++block) {
        if (row.block_max[block] < bound) continue;
        for (int64_t i = row.begin(block); i < row.end(block); ++i) {
            row.candidates[count] = {row.x[i], 0.0f, static_cast<int32_t>(i)};
            count += row.x[i] >= bound;
        }
    }
    return count;
}

void weigh(const Row& row, int64_t count, float inverse) {
    float x[kBlock], w[kBlock];
    for (int64_t at = 0; at < count; at += kBlock) {
        const int64_t some = std::min(kBlock, count - at);
        for (int64_t i = 0; i < some; ++i) x[i] = row.candidates[at + i].x;
        sample_block_weights(x, some, row.max, inverse, w);
        for (int64_t i = 0; i < some; ++i) row.candidates[at + i].weight = w[i];
    }
}

double mass_of(const Candidate* begin, const Candidate* end) {
    double sum = 0.0;
    for (; begin != end; ++begin) sum += begin->weight;
    return sum;
}

// Reorders c [n] so that the smallest set of best candidates with at least `mass` comes first, its worst member last;
// returns its size. Quickselect by weight: linear on average.
int64_t select_mass(Candidate* c, int64_t n, double mass) {
    int64_t from = 0, to = n;
    double before = 0.0;
    while (to - from > 32) {
        const int64_t middle = (from + to) / 2;
        std::nth_element(c + from, c + middle, c + to, better);
        const double half = mass_of(c + from, c + middle);
        if (before + half >= mass) {
            to = middle;
        } else {
            before += half;
            from = middle;
        }
    }
    std::sort(c + from, c + to, better);
    for (; from < to; ++from) {
        before += c[from].weight;
        if (before >= mass) return from + 1;
    }
    return to;
}

// The worst logit that top-k, top-p and min-p keep.
Threshold threshold_of(const Row& row, const Draw& draw, double total, float inverse) {
    Threshold kept;
    const bool top_k = draw.top_k > 0 && draw.top_k < row.n;
    if (top_k || draw.top_p < 1.0) {
        // What lies below total * (1 - p) / n of the mass each cannot make up the share 1 - p that top-p cuts off; the
        // factor 1/2 covers rounding.
        const double least = row.max + draw.temperature * std::log((1.0 - draw.top_p) * total / static_cast<double>(row.n) / 2);
        const float bound = top_k ? bound_of_top_k(row, draw.top_k) : static_cast<float>(least);
        int64_t count = gather(row, bound);
        if (top_k) {
            std::nth_element(row.candidates, row.candidates + (draw.top_k - 1), row.candidates + count, better);
            count = draw.top_k;
        }
        if (draw.top_p < 1.0) {
            weigh(row, count, inverse);
            if (top_k) total = mass_of(row.candidates, row.candidates + count);
            count = select_mass(row.candidates, count, draw.top_p * total);
        }
        kept = {row.candidates[count - 1].x, row.candidates[count - 1].id};
    }
    if (draw.min_p > 0.0) {
        const double least = row.max + draw.temperature * std::log(draw.min_p);
        auto floor = static_cast<float>(least);
        if (floor < least) floor = std::nextafter(floor, kInf);
        if (floor > kept.x) kept = {floor, std::numeric_limits<int32_t>::max()};
    }
    return kept;
}

// Inverse of the cumulative sum over the kept logits, in ascending id.
int32_t draw_kept(const Row& row, Threshold kept, float inverse, double u) {
    float w[kBlock];
    int64_t count = 0;
    double total = 0.0;
    for (int64_t block = 0; block < row.blocks; ++block) {
        if (row.block_max[block] < kept.x) continue;
        const int64_t at = row.begin(block), some = row.end(block) - at;
        sample_block_weights(row.x + at, some, row.max, inverse, w);
        for (int64_t i = 0; i < some; ++i) {
            const auto id = static_cast<int32_t>(at + i);
            if (!kept.keeps(row.x[id], id) || w[i] == 0.0f) continue;
            row.candidates[count++] = {row.x[id], w[i], id};
            total += w[i];
        }
    }
    double sum = 0.0;
    for (int64_t i = 0; i < count; ++i) {
        sum += row.candidates[i].weight;
        if (sum > u * total) return row.candidates[i].id;
    }
    return row.candidates[count - 1].id;
}

// The same over all logits, with the sums of blocks already known.
int32_t draw_all(const Row& row, double total, float inverse, double u) {
    const double target = u * total;
    double sum = 0.0;
    int64_t block = 0, last = 0;
    for (; block < row.blocks; ++block) {
        if (row.block_mass[block] == 0.0) continue;
        last = block;
        if (sum + row.block_mass[block] > target) break;
        sum += row.block_mass[block];
    }
    float w[kBlock];
    const int64_t at = row.begin(last), some = row.end(last) - at;
    sample_block_weights(row.x + at, some, row.max, inverse, w);
    int64_t chosen = 0;
    for (int64_t i = 0; i < some; ++i) {
        if (w[i] == 0.0f) continue;
        chosen = i;
        sum += w[i];
        if (sum > target) break;
    }
    return static_cast<int32_t>(at + chosen);
}

int32_t draw_token(const Row& row, const Draw& draw) {
    if (draw.temperature < kGreedyBelow) return first_of(row, row.max);
    const auto inverse = static_cast<float>(1.0 / draw.temperature);
    const double u = uniform(draw.seed, draw.position, draw.stream);
    const bool top_k = draw.top_k > 0 && draw.top_k < row.n;
    const double total = top_k ? 0.0 : sample_mass(row.x, row.n, row.max, inverse, row.block_mass);
    if (!top_k && draw.top_p >= 1.0 && draw.min_p <= 0.0) return draw_all(row, total, inverse, u);
    return draw_kept(row, threshold_of(row, draw, total, inverse), inverse, u);
}

// Working memory for rows of n logits, one part per thread; kept by the calling thread between calls.
class Workspace {
   public:
    explicit Workspace(int64_t n) : blocks_((n + kBlock - 1) / kBlock) {
        const auto blocks = static_cast<size_t>(blocks_);
        const size_t floats = (blocks * sizeof(float) + 63) / 64 * 64, masses = (blocks * sizeof(double) + 63) / 64 * 64;
        part_ = floats + masses + (blocks * kBlock * sizeof(Candidate) + 63) / 64 * 64;
        masses_at_ = floats;
        candidates_at_ = floats + masses;
        static thread_local std::vector<char> memory;
        memory.resize(std::max(memory.size(), part_ * static_cast<size_t>(thread_count()) + 64));
        base_ = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
    }
    Row row(const float* x, int64_t n, int thread) const {
        char* part = base_ + part_ * static_cast<size_t>(thread);
        return {x, n, blocks_, reinterpret_cast<float*>(part), reinterpret_cast<double*>(part + masses_at_),
                reinterpret_cast<Candidate*>(part + candidates_at_), 0.0f};
    }

   private:
    int64_t blocks_;
    size_t part_, masses_at_, candidates_at_;
    char* base_;
};

void check_shape(int64_t rows, int64_t n, int64_t count) {
    if (rows < 1 || n < 1 || n > std::numeric_limits<int32_t>::max() - kBlock || count < 0)
        fail("sampling: rows and vocabulary must be positive and the vocabulary below 2^31");
}

void check_ids(const int32_t* ids, int64_t count, int64_t n) {
    for (int64_t i = 0; i < count; ++i)
        if (ids[i] < 0 || ids[i] >= n) fail("penalize: a token id lies outside the vocabulary");
}

void allow_only(float* x, int64_t n, const int32_t* ids, int64_t count, float* saved) {
    for (int64_t i = 0; i < count; ++i) saved[i] = x[ids[i]];
    for (int64_t i = 0; i < n; ++i) x[i] = x[i] < kInf ? -kInf : x[i];  // NaN and +inf must stay visible
    for (int64_t i = 0; i < count; ++i) x[ids[i]] = saved[i];
}

void apply(float* x, int64_t n, const Edit& e, float* saved) {
    if (e.allowed) allow_only(x, n, e.allowed, e.allowed_count, saved);
    for (int64_t i = 0; i < e.banned_count; ++i)
        if (x[e.banned[i]] < kInf) x[e.banned[i]] = -kInf;
    for (int64_t i = 0; i < e.bias_count; ++i) x[e.bias_ids[i]] += e.bias[i];
    const auto repetition = static_cast<float>(e.repetition), frequency = static_cast<float>(e.frequency),
               presence = static_cast<float>(e.presence);
    for (int64_t i = 0; i < e.seen_count; ++i) {
        float& logit = x[e.seen[i]];
        logit = logit > 0.0f ? logit / repetition : logit * repetition;
        logit -= frequency * static_cast<float>(e.counts[i]);
        if (e.counts[i] > 0) logit -= presence;
    }
}

void penalize(float* logits, int64_t rows, int64_t n, const Edit* edits, int64_t count) {
    check_shape(rows, n, count);
    int64_t most = 0;
    for (int64_t i = 0; i < count; ++i) {
        const Edit& e = edits[i];
        if (e.row < 0 || e.row >= rows) fail("penalize: a row lies outside the logits");
        check_ids(e.allowed, e.allowed_count, n);
        check_ids(e.banned, e.banned_count, n);
        check_ids(e.bias_ids, e.bias_count, n);
        check_ids(e.seen, e.seen_count, n);
        most = std::max(most, e.allowed_count);
    }
    std::vector<float> saved(static_cast<size_t>(most * thread_count()));
    parallel_for(count, [&](int64_t i, int thread) {
        apply(logits + edits[i].row * n, n, edits[i], saved.data() + most * thread);
    });
}

void sample(const float* logits, int64_t rows, int64_t n, const Draw* draws, int64_t count, int32_t* tokens, int32_t* flags) {
    check_shape(rows, n, count);
    for (int64_t i = 0; i < count; ++i)
        if (draws[i].row < 0 || draws[i].row >= rows) fail("sample: a row lies outside the logits");
    const Workspace workspace(n);
    parallel_for(count, [&](int64_t i, int thread) {
        Row row = workspace.row(logits + draws[i].row * n, n, thread);
        flags[i] = scan(row);
        tokens[i] = flags[i] ? -1 : draw_token(row, draws[i]);
    });
}

int32_t rank_of(const Row& row, int32_t target) {
    const float value = row.x[target];
    int64_t rank = 1;
    for (int64_t block = 0; block < row.blocks; ++block) {
        if (row.block_max[block] < value) continue;
        for (int64_t i = row.begin(block); i < row.end(block); ++i)
            rank += (row.x[i] > value) + (row.x[i] == value && i < target);
    }
    return static_cast<int32_t>(rank);
}

void top_of(const Row& row, int64_t k, double logsumexp, int32_t* ids, float* logprobs) {
    const int64_t most = std::min(k, row.n);
    const int64_t count = gather(row, bound_of_top_k(row, most));
    std::partial_sort(row.candidates, row.candidates + most, row.candidates + count, better);
    for (int64_t i = 0; i < k; ++i) {
        const bool real = i < most && row.candidates[i].x > -kInf;
        ids[i] = real ? row.candidates[i].id : -1;
        logprobs[i] = real ? static_cast<float>(row.candidates[i].x - logsumexp) : -kInf;
    }
}

void top_logprobs(const float* logits, int64_t rows, int64_t n, const Query* queries, int64_t count, int64_t k, Score* scores,
                  Optional<int32_t> ids, Optional<float> logprobs) {
    check_shape(rows, n, count);
    if (k < 0 || (k > 0 && (!ids.ptr || !logprobs.ptr))) fail("top_logprobs: no room for the alternatives");
    for (int64_t i = 0; i < count; ++i)
        if (queries[i].row < 0 || queries[i].row >= rows || queries[i].target < 0 || queries[i].target >= n)
            fail("top_logprobs: a row or a target lies outside the logits");
    const Workspace workspace(n);
    parallel_for(count, [&](int64_t i, int thread) {
        Row row = workspace.row(logits + queries[i].row * n, n, thread);
        Score& score = scores[i];
        score = {0.0, 0.0f, 0, scan(row), 0};
        if (score.flags) return;
        score.logsumexp = row.max + std::log(sample_mass(row.x, n, row.max, 1.0f, row.block_mass));
        score.logprob = static_cast<float>(row.x[queries[i].target] - score.logsumexp);
        score.rank = rank_of(row, queries[i].target);
        if (k > 0) top_of(row, k, score.logsumexp, ids.ptr + i * k, logprobs.ptr + i * k);
    });
}

const OpEntry kOps[] = {op_entry<&penalize>("penalize"), op_entry<&sample>("sample"), op_entry<&top_logprobs>("top_logprobs")};
const Register kRegister(kOps);

}  // namespace
}  // namespace quire
