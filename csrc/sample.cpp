// Choosing tokens and scoring them. The definitions are in src/quire/ops/sampling.py, the passes over rows in
// units/sample_rows.h.
//
// A row never gets sorted. One pass finds the largest logit of every block of 64; blocks that cannot matter are skipped from
// then on; top-k and top-p select among the few candidates above a bound. All sums of a row run in one fixed order.
#include "sample.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "pool.h"
#include "registry.h"

// The logarithm as it was before glibc 2.29, which only reports errors in another way.
#if defined(__GLIBC__) && !defined(QUIRE_STATIC_LIBC) && defined(__x86_64__)
__asm__(".symver log, log@GLIBC_2.2.5");
#elif defined(__GLIBC__) && !defined(QUIRE_STATIC_LIBC) && defined(__aarch64__)
__asm__(".symver log, log@GLIBC_2.17");
#endif

namespace quire {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr double kGreedyBelow = 1e-5;
enum Flag : int32_t { kNotFinite = 1, kNothingAllowed = 2 };

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
    const RowKernels& kernels;
    const float* x;
    int64_t n;
    int64_t blocks;
    float* block_max;
    double* block_mass;
    Candidate* candidates;
    float max;

    int64_t begin(int64_t block) const { return block * kSampleBlock; }
    int64_t end(int64_t block) const { return std::min(n, (block + 1) * kSampleBlock); }
};

// The race of one row: token i arrives after an exponential time of mean 1 / weight, and the first is drawn. Its random
// number belongs to the token, so distributions that are close mostly give the same one.
struct Race {
    uint32_t counter[3], key[2];
    double best = 0.0;
    int32_t winner = -1;

    explicit Race(const Draw& draw)
        : counter{low(static_cast<uint64_t>(draw.position)), high(static_cast<uint64_t>(draw.position)), low(static_cast<uint64_t>(draw.stream))},
          key{low(draw.seed), high(draw.seed)} {}

    static uint32_t low(uint64_t v) { return static_cast<uint32_t>(v); }
    static uint32_t high(uint64_t v) { return static_cast<uint32_t>(v >> 32); }

    // The time is -log(1 - v), never less than v: hardly any token needs the logarithm.
    void enter(int32_t token, float weight, uint32_t word) {
        const double v = (word + 0.5) * 0x1p-32;
        if (weight < best * v) return;
        const double rate = weight / -std::log1p(-v);
        if (rate > best || (rate == best && token < winner)) best = rate, winner = token;
    }
    // Lighter tokens cannot win: v is 2^-33 at least.
    double lightest() const { return best * 0x1p-33; }
};

int32_t scan(Row& row) {
    row.max = row.kernels.block_max(row.x, row.n, row.block_max);
    if (std::isnan(row.max)) return kNotFinite;
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
    float x[kSampleBlock], w[kSampleBlock];
    for (int64_t at = 0; at < count; at += kSampleBlock) {
        const int64_t some = std::min(kSampleBlock, count - at);
        for (int64_t i = 0; i < some; ++i) x[i] = row.candidates[at + i].x;
        row.kernels.weights(x, some, row.max, inverse, w);
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

// The worst logit of the smallest set of best candidates with at least `mass`. Candidates are first counted in bins by
// their distance from the largest logit, so that only one bin needs an order.
Threshold nucleus(const Row& row, int64_t count, double mass) {
    constexpr int kBins = 1024;
    double bins[kBins] = {};
    Candidate* const c = row.candidates;
    float least = row.max;
    for (int64_t i = 0; i < count; ++i)
        if (c[i].weight > 0.0f && c[i].x < least) least = c[i].x;
    const float scale = least < row.max ? (kBins - 1) / (row.max - least) : 0.0f;
    const auto bin_of = [&](const Candidate& a) {
        return a.weight > 0.0f ? std::min(kBins - 1, static_cast<int>((row.max - a.x) * scale)) : kBins - 1;
    };
    for (int64_t i = 0; i < count; ++i) bins[bin_of(c[i])] += c[i].weight;
    int bin = 0;
    double before = 0.0;
    while (bin < kBins - 1 && before + bins[bin] < mass) before += bins[bin++];
    int64_t some = 0;
    for (int64_t i = 0; i < count; ++i)
        if (bin_of(c[i]) == bin) std::swap(c[some++], c[i]);
    if (some == 0) return {least, std::numeric_limits<int32_t>::max()};  // rounding left the sum short of `mass`
    some = select_mass(c, some, mass - before);
    return {c[some - 1].x, c[some - 1].id};
}

// A value that the worst logit of the nucleus reaches: already the best logits of the blocks hold the mass, or else what
// lies below total * (1 - p) / n each cannot make up the share 1 - p that is cut off (1/2 covers rounding).
float bound_of_top_p(const Row& row, const Draw& draw, double total, float inverse) {
    for (int64_t block = 0; block < row.blocks; ++block)
        row.candidates[block] = {row.block_max[block], 0.0f, static_cast<int32_t>(block)};
    weigh(row, row.blocks, inverse);
    if (mass_of(row.candidates, row.candidates + row.blocks) > draw.top_p * total)
        return nucleus(row, row.blocks, draw.top_p * total).x;
    const double least = std::log((1.0 - draw.top_p) * total / static_cast<double>(row.n) / 2);
    return static_cast<float>(row.max + draw.temperature * least);
}

// The worst logit that top-k, top-p and min-p keep.
Threshold lowest_kept_logit(const Row& row, const Draw& draw, double total, float inverse) {
    Threshold kept;
    const bool top_k = draw.top_k > 0 && draw.top_k < row.n;
    if (top_k || draw.top_p < 1.0) {
        int64_t count = gather(row, top_k ? bound_of_top_k(row, draw.top_k) : bound_of_top_p(row, draw, total, inverse));
        if (top_k) {
            std::nth_element(row.candidates, row.candidates + (draw.top_k - 1), row.candidates + count, better);
            count = draw.top_k;
            kept = {row.candidates[count - 1].x, row.candidates[count - 1].id};
        }
        if (draw.top_p < 1.0) {
            weigh(row, count, inverse);
            if (top_k) total = mass_of(row.candidates, row.candidates + count);
            kept = nucleus(row, count, draw.top_p * total);
        }
    }
    if (draw.min_p > 0.0) {
        const double least = row.max + draw.temperature * std::log(draw.min_p);
        auto floor = static_cast<float>(least);
        if (floor < least) floor = std::nextafter(floor, kInf);
        if (floor > kept.x) kept = {floor, std::numeric_limits<int32_t>::max()};
    }
    return kept;
}

int32_t draw_token(const Row& row, const Draw& draw) {
    if (draw.temperature < kGreedyBelow) return first_of(row, row.max);
    const auto inverse = static_cast<float>(1.0 / draw.temperature);
    const bool top_k = draw.top_k > 0 && draw.top_k < row.n, top_p = draw.top_p < 1.0;
    const double total = top_k || !top_p ? 0.0 : row.kernels.mass(row.x, row.n, row.max, inverse, row.block_mass);
    const Threshold kept = lowest_kept_logit(row, draw, total, inverse);
    Race race(draw);
    alignas(64) float weights[kSampleBlock];
    alignas(64) uint32_t words[kSampleBlock];
    const auto enter = [&](int64_t block) {
        const int64_t at = row.begin(block), some = row.end(block) - at;
        row.kernels.weights(row.x + at, some, row.max, inverse, weights);
        row.kernels.noise(race.counter, static_cast<uint32_t>(16 * block), race.key, words);
        for (int64_t i = 0; i < some; ++i) {
            const auto id = static_cast<int32_t>(at + i);
            if (kept.keeps(row.x[id], id) && weights[i] > 0.0f) race.enter(id, weights[i], words[i]);
        }
    };
    const int64_t first = std::find(row.block_max, row.block_max + row.blocks, row.max) - row.block_max;
    enter(first);
    const auto floor = std::max(kept.x, static_cast<float>(row.max + draw.temperature * (std::log(race.lightest()) - 1e-3)));
    for (int64_t block = 0; block < row.blocks; ++block)
        if (block != first && row.block_max[block] >= floor) enter(block);
    return race.winner;
}

// Working memory for rows of n logits, one part per thread; kept by the calling thread between calls.
class Workspace {
   public:
    explicit Workspace(int64_t n) : blocks_((n + kSampleBlock - 1) / kSampleBlock) {
        const auto blocks = static_cast<size_t>(blocks_);
        const size_t floats = (blocks * sizeof(float) + 63) / 64 * 64, masses = (blocks * sizeof(double) + 63) / 64 * 64;
        part_ = floats + masses + (blocks * kSampleBlock * sizeof(Candidate) + 63) / 64 * 64;
        masses_at_ = floats;
        candidates_at_ = floats + masses;
        static thread_local std::vector<char> memory;
        memory.resize(std::max(memory.size(), part_ * static_cast<size_t>(thread_count()) + 64));
        base_ = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
    }
    Row row(const RowKernels& kernels, const float* x, int64_t n, int thread) const {
        char* part = base_ + part_ * static_cast<size_t>(thread);
        return {kernels, x, n, blocks_, reinterpret_cast<float*>(part), reinterpret_cast<double*>(part + masses_at_),
                reinterpret_cast<Candidate*>(part + candidates_at_), 0.0f};
    }

   private:
    int64_t blocks_;
    size_t part_, masses_at_, candidates_at_;
    char* base_;
};

void check_shape(int64_t rows, int64_t n, int64_t count) {
    if (rows < 1 || n < 1 || n > std::numeric_limits<int32_t>::max() - kSampleBlock || count < 0)
        fail("sampling: rows and vocabulary must be positive and the vocabulary below 2^31");
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

}  // namespace

void sample_rows(const RowKernels& kernels, const float* logits, int64_t rows, int64_t n, const Draw* draws, int64_t count,
                 int32_t* tokens, int32_t* flags) {
    check_shape(rows, n, count);
    for (int64_t i = 0; i < count; ++i)
        if (draws[i].row < 0 || draws[i].row >= rows) fail("sample: a row lies outside the logits");
    const Workspace workspace(n);
    parallel_for(count, [&](int64_t i, int thread) {
        Row row = workspace.row(kernels, logits + draws[i].row * n, n, thread);
        flags[i] = scan(row);
        tokens[i] = flags[i] ? -1 : draw_token(row, draws[i]);
    });
}

void score_rows(const RowKernels& kernels, const float* logits, int64_t rows, int64_t n, const Query* queries, int64_t count,
                int64_t k, Score* scores, int32_t* ids, float* logprobs) {
    check_shape(rows, n, count);
    if (k < 0 || (k > 0 && (!ids || !logprobs))) fail("top_logprobs: no room for the alternatives");
    for (int64_t i = 0; i < count; ++i)
        if (queries[i].row < 0 || queries[i].row >= rows || queries[i].target < 0 || queries[i].target >= n)
            fail("top_logprobs: a row or a target lies outside the logits");
    const Workspace workspace(n);
    parallel_for(count, [&](int64_t i, int thread) {
        Row row = workspace.row(kernels, logits + queries[i].row * n, n, thread);
        Score& score = scores[i];
        score = {0.0, 0.0f, 0, scan(row), 0};
        if (score.flags) return;
        score.logsumexp = row.max + std::log(row.kernels.mass(row.x, n, row.max, 1.0f, row.block_mass));
        score.logprob = static_cast<float>(row.x[queries[i].target] - score.logsumexp);
        score.rank = rank_of(row, queries[i].target);
        if (k > 0) top_of(row, k, score.logsumexp, ids + i * k, logprobs + i * k);
    });
}

}  // namespace quire
